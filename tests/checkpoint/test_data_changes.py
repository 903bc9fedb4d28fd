"""Other data, another tokenizer or another seed on resume: refused with both values, or allowed by one flag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_lite.checkpoint.compatibility import check_data
from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.saved_state import RunState
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.errors import CheckpointError, DamagedError
from tests.support.fakes import run_state

ROW, OTHER = [60, 2931, "uint16", "0123456789abcdef"], [61, 3000, "uint16", "fedcba9876543210"]
SAVED = {"data_path": ("0.25", "a", "0.75", "b"), "train_iters": 10, "tokenizer_file": "t.json"}
IDENTITY = {"sets": [ROW, OTHER], "tokenizer": "00000000000000aa"}


def config(**changes: Any) -> Config:
    return unflatten({**SAVED, **changes})


def loaded(data: Any = IDENTITY, **changes: Any) -> Manifest:
    saved = json.loads(json.dumps(flatten(config(**changes))))
    state = run_state() if data is None else {**run_state(), "data": data}
    return Manifest("0" * 16, 5, 1, saved, state, {}, {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_path": ("0.25", "moved/a", "0.75", "b")},
        {"data_path": ("1", "a", "3", "b")},
        {"split": (96.9, 3.0, 0.1)},
        {"tokenizer_file": "elsewhere/t.json"},
        {"train_iters": 20, "batch_size": 8, "num_workers": 0},
        {"train_iters": 0, "seed": 5},
        {"data_weights_schedule": ("5:1/1", "9:0/1")},  # after the iterations that are done, which are 5
        {"data_path": ("a", "b"), "data_weights_schedule": ("0:1/3",)},
        {"max_epochs": 3},
    ],
)
def test_no_change(changes: dict[str, Any]) -> None:
    """Paths may move, weights and shares are relative, and a run that trains nothing may read anything."""
    assert check_data(loaded(), config(**changes), IDENTITY, "here") == []


@pytest.mark.parametrize(
    ("changes", "identity", "line"),
    [
        ({"seed": 5}, {}, "--seed: 1234 in the checkpoint, 5 now"),
        ({"split": (9.0, 1.0, 0.0)}, {}, "--split: 969,30,1 in the checkpoint, 9,1,0 now"),
        (
            {},
            {"sets": [ROW, ROW]},
            "data set 1: b (61 documents, 3,000 tokens, uint16, fingerprint fedcba9876543210, 75% of the samples) in "
            "the checkpoint, b (60 documents, 2,931 tokens, uint16, fingerprint 0123456789abcdef, 75% of the samples) "
            "now",
        ),
        ({"data_path": ("1", "a", "1", "b")}, {}, "data set 0: a (60 documents"),
        ({"data_path": ("a",)}, {"sets": [ROW]}, "data set 1: b (61 documents"),
        ({}, {"tokenizer": "00000000000000bb"}, "--tokenizer_file: t.json (digest 00000000000000aa) in the checkpoint"),
        ({"shuffle": "none"}, {}, "--shuffle: epoch in the checkpoint, none now"),
        ({"shuffle_era": 100}, {}, "--shuffle_era: none in the checkpoint, 100 now"),
        ({"shuffle_documents": True}, {}, "--shuffle_documents: 0 in the checkpoint, 1 now"),
        ({"truncate_documents": False}, {}, "--truncate_documents: 1 in the checkpoint, 0 now"),
        ({"shuffle": "full", "max_epochs": 2}, {}, "--max_epochs: none in the checkpoint, 2 now"),
        (
            {"data_weights_schedule": ("4:1/1", "9:0/1")},
            {},
            "--data_weights_schedule: none in the checkpoint, 4:1/1 9:0/1 now, in the iterations that are done",
        ),
        (
            {},
            {"masks": [None, "00000000000000cc"]},
            "--loss_mask of data set 1: none in the checkpoint, fingerprint 00000000000000cc now",
        ),
        ({"dataset_source": "random"}, {"sets": []}, "--dataset_source: list in the checkpoint, random now"),
    ],
)
def test_changes(changes: dict[str, Any], identity: dict[str, Any], line: str) -> None:
    """One error names the difference; with --allow_data_change=1 the same line is for the log."""
    now = {**IDENTITY, **identity}
    with pytest.raises(CheckpointError, match="checkpoint here was trained with other data") as caught:
        check_data(loaded(), config(**changes), now, "here")
    assert line in str(caught.value) and "--allow_data_change=1" in str(caught.value) and caught.value.exit_code == 4
    lines = check_data(loaded(), config(**changes, allow_data_change=True), now, "here")
    assert any(item.startswith(line) for item in lines)


def test_checkpoints_from_before_the_order_of_samples_was_an_option() -> None:
    """They were trained with the defaults."""
    older = loaded()
    for name in ("shuffle", "shuffle_era", "shuffle_documents", "max_epochs", "data_weights_schedule"):
        del older.config[name]
    assert check_data(older, config(), IDENTITY, "here") == []
    assert check_data(older, config(shuffle="none", allow_data_change=True), IDENTITY, "here") == [
        "--shuffle: epoch in the checkpoint, none now"
    ]


def test_the_record_of_masks_is_checked() -> None:
    """A list of digests or nulls, and nothing else."""
    decode(RunState, {**run_state(), "data": {**IDENTITY, "masks": [None, "00000000000000cc"]}}, "state")
    for masks in (None, ["x"], [0], {"0": None}):
        with pytest.raises(DamagedError, match="masks"):
            decode(RunState, {**run_state(), "data": {**IDENTITY, "masks": masks}}, "state")


def test_checkpoints_of_older_versions_and_strange_ones() -> None:
    """Without a record only options can differ; a record that contradicts its options has data sets without names."""
    assert check_data(loaded(None), config(), {**IDENTITY, "sets": [ROW, ROW]}, "here") == []
    with pytest.raises(CheckpointError, match="a data set .60 documents"):
        check_data(loaded(data_path=("1", "1")), config(), {**IDENTITY, "sets": [OTHER, ROW]}, "here")
    many = {"sets": [ROW] * 1000, "tokenizer": None}
    path = tuple(str(number) + "x" for number in range(1000))
    with pytest.raises(CheckpointError) as caught:
        check_data(loaded(many, data_path=path), config(data_path=path), {**many, "sets": [OTHER] * 1000}, "here")
    assert len(str(caught.value)) < 6000 and "and 980 more" in str(caught.value)
