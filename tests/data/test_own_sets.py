"""Validation and test data of their own: what each phase reads, what the options refuse, and what a
resume accepts."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint import compatibility
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config import flatten, unflatten
from megatron_lite.data.open_data import open_data
from megatron_lite.data.reading import StreamReader
from megatron_lite.errors import CheckpointError, DataError, UsageError
from megatron_lite.validation import resolve
from tests.support.token_files import data_config, read_batches, write_counting, write_documents

LENGTH = 16
SIZES = {
    "batch_size": 4,
    "micro_batch_size": 2,
    "sequence_length": LENGTH,
    "vocab_size": 30_000,
    "train_iters": 3,
}
config = functools.partial(data_config, **SIZES)


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """Data sets of 60 documents of 16 tokens each; the first token tells which one."""
    names = enumerate("abcd")
    return {
        name: write_counting(tmp_path / name, [LENGTH] * 60, "<u2", 5000 * number)
        for number, name in names
    }


def resolved(data_path: str, ranks: int = 1, /, **options: Any) -> Any:
    fixed = {"data_path": (data_path,), "num_workers": 0, "device": "cpu"}
    return resolve(unflatten({**fixed, **SIZES, **options}), ranks)


def documents(source: Any, phase: str) -> list[int]:
    """Return the number of tokens of each data set that a phase reads."""
    reader = source.phases[phase].reader
    assert isinstance(reader, StreamReader)
    return [stream.order.num_tokens for stream in reader.streams]


def test_training_gets_the_share_of_validation(sets: dict[str, str]) -> None:
    """Without --split, training reads all documents; with it, its share; an own test set takes no
    share, either."""
    own = {"valid_data_path": (sets["b"],), "validation_iters": "all"}
    for options, split, training in (
        ({}, (1, 0, 0), 960),
        ({"split": (1.0, 0.0, 1.0), "test_iters": 1}, (1, 0, 1), 480),
        ({"test_data_path": (sets["c"],), "test_iters": 1}, (1, 0, 0), 960),
    ):
        whole = resolved(sets["a"], **own, **options)
        assert whole.data.split == split and resolve(whole, 1) == whole
        source = open_data(whole, 0, 1)
        assert documents(source, "training") == [training] and documents(source, "validation") == [
            960
        ], options
    assert resolved(sets["a"], test_data_path=(sets["c"],)).data.split == (969, 30, 0)


def test_samples_are_those_of_a_split_that_is_all_validation(sets: dict[str, str]) -> None:
    """So scripts/evaluate.py --split=0,1,0 measures the same; each of two ranks has its half, at
    every evaluation."""
    own = resolved(
        sets["a"], 2, valid_data_path=("1", sets["b"], "3", sets["c"]), validation_iters=5
    )
    shared = config(
        "1", sets["b"], "3", sets["c"], validation_iters=5, train_iters=0, split=(0.0, 1.0, 0.0)
    )
    expected = [
        torch.cat([batch.tokens for batch in step])
        for step in read_batches(shared, phase="validation")
    ]
    for _ in range(2):
        ranks = [read_batches(own, rank, 2, phase="validation") for rank in range(2)]
        found = [
            torch.cat([batch.tokens for rank in step for batch in rank])
            for step in zip(*ranks, strict=True)
        ]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_each_of_several_sets_has_a_name(sets: dict[str, str]) -> None:
    """Without --validation_by_dataset, and for the test, too; the banner describes every set."""
    own = {
        "valid_data_path": ("1", sets["b"], "3", sets["c"]),
        "test_data_path": (sets["c"], sets["d"]),
    }
    source = open_data(resolved(sets["a"], **own, validation_iters=4, test_iters=2), 0, 1)
    assert source.alone("validation") == {"b": "validation/b", "c": "validation/c"}
    assert source.alone("test") == {"c": "test/c", "d": "test/d"} and source.alone("training") == {}
    for name, first in (("b", 5000), ("c", 10_000)):
        tokens = torch.cat(
            [batch.tokens for step in source.batches(f"validation/{name}") for batch in step]
        )
        assert ((tokens >= first) & (tokens < first + 960)).all()
    lines = source.description
    assert lines["data 0"] == f"{sets['a']}: 60 documents, 960 tokens"
    assert lines["valid 1"] == f"{sets['c']}: 60 documents, 960 tokens, 75% of the samples"
    assert lines["validation data"].startswith("16 samples out of 1,920 tokens")
    one = open_data(resolved(sets["a"], valid_data_path=(sets["b"],), validation_iters=4), 0, 1)
    assert one.alone("validation") == {}


def test_masks_follow_the_order_of_the_options(sets: dict[str, str], tmp_path: Path) -> None:
    """One for each data set of all options; a validation counts only the labels that its own mask
    lets count."""
    counts = (np.arange(960) % 3 == 0).astype(np.uint8)
    mask = write_documents(tmp_path / "mask", np.split(counts, range(LENGTH, 960, LENGTH)), "|u1")
    own = {"valid_data_path": (sets["b"],), "validation_iters": "all"}
    with pytest.raises(
        UsageError, match="1 for 2 data sets; write .* the order of --data_path and --valid_data"
    ):
        resolved(sets["a"], **own, loss_mask=(mask,))
    whole = resolved(sets["a"], **own, loss_mask=("none", mask))
    for step in read_batches(whole, phase="validation"):
        for batch in step:
            labels, rows = batch.tokens[:, 1:], batch.tokens.shape[0] - batch.padding
            assert batch.masked is not None
            assert torch.equal(batch.masked[:rows], ((labels - 5000) % 3 != 0)[:rows])
    assert all(batch.masked is None for step in read_batches(whole, count=2) for batch in step)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"split": (98.0, 2.0, 0.0)},
            "--split=98,2,0, --valid_data_path={b}: nothing would read that share of --data_path; write "
            "--split=98,0,0, or leave one of the two out",
        ),
        (
            {"test_iters": 2},
            "--valid_data_path={b}, --test_iters=2: no documents are left for test; give it a share in --split, data "
            "of its own with --test_data_path, or write --test_iters=0",
        ),
        (
            {"valid_data_path": ("0.5", "b", "c")},
            "--valid_data_path=0.5 b c: write a weight before every prefix",
        ),
        ({"data_path": ()}, "--data_path is missing"),
    ],
)
def test_contradictions(sets: dict[str, str], options: dict[str, Any], line: str) -> None:
    """One line each, with the flags, the rule and the fix."""
    with pytest.raises(UsageError) as caught:
        resolved(sets["a"], **{"valid_data_path": (sets["b"],), "validation_iters": 2, **options})
    assert str(caught.value).startswith(line.format(**sets)) and "\n" not in str(caught.value)


def test_a_validation_alone_needs_no_other_data(sets: dict[str, str], tmp_path: Path) -> None:
    """Nothing of --data_path is opened where nothing reads it; a set that is too short is named
    without a --split."""
    alone = {"valid_data_path": (sets["b"],), "validation_iters": 2, "train_iters": 0}
    assert documents(open_data(resolved("missing", **alone), 0, 1), "validation") == [960]
    resolved("", **alone, data_path=())
    short = write_counting(tmp_path / "short", [LENGTH], "<u2")
    with pytest.raises(
        DataError, match=r"16 tokens for validation \(1 documents\), but one sample needs 17"
    ):
        open_data(resolved(sets["a"], valid_data_path=(short,), validation_iters=1), 0, 1)


def test_other_validation_data_only_warn(sets: dict[str, str]) -> None:
    """A resume goes on with other validation data and warns once for each phase; other documents
    for training are refused, with the --split that keeps them.
    """
    own = {"valid_data_path": (sets["b"],), "validation_iters": 2}

    def saved(**options: Any) -> Manifest:
        whole = resolved(sets["a"], **options)
        state = {"data": open_data(whole, 0, 1).identity}
        return Manifest("0" * 16, 2, 1, flatten(whole), state, {}, {})

    def resumed(loaded: Manifest, **options: Any) -> list[str]:
        whole = resolved(sets["a"], **options)
        identity = open_data(whole, 0, 1).identity
        assert compatibility.check_data(loaded, whole, identity, "here") == []
        return list(compatibility.other_evaluations(loaded, whole, identity))

    warning = (
        "other validation data than before: validation losses are not comparable with earlier ones"
    )
    assert resumed(saved(**own), **own) == []
    assert resumed(saved(**own), **{**own, "valid_data_path": (sets["c"],)}) == [
        f"--valid_data_path: {warning}"
    ]
    blend = {**own, "valid_data_path": ("1", sets["b"], "2", sets["c"])}
    assert resumed(saved(**blend), **{**own, "valid_data_path": ("1", sets["b"], "3", sets["c"])})
    assert (
        resumed(saved(**blend), **{**own, "valid_data_path": ("2", sets["b"], "4", sets["c"])})
        == []
    )
    assert resumed(saved(split=(1.0,)), **own) == []  # no validation before
    default = saved(validation_iters=2)
    assert resumed(default, **own, split=(969.0, 0.0, 31.0)) == [f"--valid_data_path: {warning}"]
    assert resumed(default, split=(969.0, 31.0), validation_iters=2) == [f"--split: {warning}"]
    with pytest.raises(
        CheckpointError, match="969,30,1 in the .*, 1,0,0 now; --split=969,0,31 leaves"
    ) as caught:
        resumed(default, **own)
    assert len(str(caught.value).splitlines()) == 2
    whole = resolved(sets["a"], **own)
    other = dataclasses.replace(
        whole, data=dataclasses.replace(whole.data, dataset_source="random")
    )
    assert (
        list(compatibility.other_evaluations(default, other, {"sets": [], "tokenizer": None})) == []
    )
