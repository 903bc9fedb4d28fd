"""Differences between a checkpoint and the command line: some are refused, some are listed."""

import dataclasses
import json
import re
import shlex
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint.compatibility import (
    ARCHITECTURE,
    DATA,
    KINDS,
    check_architecture,
    check_data,
    differences,
    moved_rate,
    moved_samples,
    schedule_table,
    wrong_frozen_layers,
)
from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.saved_state import RUN_STATE
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.structured_values import weight_stages
from megatron_lite.data.blending import Blend
from megatron_lite.errors import CheckpointError, DamagedError
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve
from tests.support.fakes import run_state


def saved_config(**changes: Any) -> dict[str, Any]:
    """Return a flat config as a manifest does."""
    return json.loads(json.dumps(flatten(Config()))) | changes


def test_the_same_config_differs_in_nothing() -> None:
    """JSON turns tuples into lists, which is not a difference."""
    assert differences(saved_config(), Config(), ARCHITECTURE, DATA, None) == []
    check_architecture(saved_config(), Config(), "here")


def test_a_dense_checkpoint_from_before_experts_and_equal_patterns() -> None:
    """It lacks the options of experts, and states patterns as they were typed."""
    options = {"attention_pattern": ("full",), "window_size": 8, "dataset_source": "random"}
    config = resolve(unflatten(options), 1)
    new = [name for name in flatten(config) if name.startswith(("moe_", "mup", "expert_"))]
    new += ["num_experts", "num_experts_per_token", "num_shared_experts", "hybrid_norm"]
    old = {name: value for name, value in flatten(config).items() if name not in new}
    old |= {"attention_pattern": ["full", "full"], "rotary_pattern": ["rotary", "rotary"]}
    assert differences(old, config, ARCHITECTURE, DATA, None) == []
    mixed = resolve(unflatten(options | {"num_experts": 2}), 1)
    with pytest.raises(CheckpointError, match="num_experts: 1 in the checkpoint, 2 now"):
        check_architecture(old, mixed, "here")


def test_every_architecture_option_is_an_option_of_the_model() -> None:
    """The list names real options, of the model or of adapters; others do not change its
    function."""
    areas = Config().model, Config().adapters
    of_model, of_adapters = ({field.name for field in dataclasses.fields(area)} for area in areas)
    architecture = {name for name, kind in KINDS.items() if kind == ARCHITECTURE}
    assert architecture <= of_model | of_adapters and {*KINDS} <= flatten(Config()).keys()
    others = (
        "attention_dropout",
        "embedding_dropout",
        "hidden_dropout",
        "init_",
        "layer_norm_init",
        "random_bias",
        "expert_",
        "moe_balance",
        "moe_jitter_eps",
        "moe_router_bias_update_rate",
    )
    others += (
        "cross_entropy",
        "mlp_recompute",
        "make_vocab_size",
        "attention_softmax",
        "full_precision_residual",
    )
    others += (
        "expert_",
        "moe_balance",
        "moe_jitter",
        "moe_router_bias_update",
    )
    assert all(name.startswith(others) for name in of_model - architecture)


def test_a_changed_architecture_is_refused_with_all_flags_and_both_values() -> None:
    """One error lists every difference."""
    saved = saved_config(hidden_size=512, gated=True, lr=1.0)
    with pytest.raises(CheckpointError) as caught:
        check_architecture(saved, Config(), "checkpoints/100")
    text = str(caught.value)
    assert "--hidden_size: 512 in the checkpoint, 1024 now" in text
    assert "--gated: 1 in the checkpoint, 0 now" in text
    assert "--lr" not in text and "checkpoints/100" in text
    assert caught.value.exit_code == 4


def test_other_differences_are_listed() -> None:
    """The command line wins over them; options that only one side knows do not count."""
    saved = saved_config(
        lr=1.0, data_path=["a"], hidden_size=512, freeze=["blocks.0"], option_of_the_future=1
    )
    del saved["min_lr"]
    assert [str(difference) for difference in differences(saved, Config(), DATA, None)] == [
        "lr: 1 in the checkpoint, 0.0001 now",
        "freeze: blocks.0 in the checkpoint, none now",
        "data_path: a in the checkpoint, none now",
    ]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"freeze": ("embedding",), "lr_scales": ("head:0.1",)},
            {
                "freeze: none in the checkpoint, embedding now",
                "lr_scales: none in the checkpoint, head:0.1 now",
            },
        ),
        ({"tf32": True}, {"tf32: 0 in the checkpoint, 1 now"}),
        (
            {"cross_document_attention": False},
            {"cross_document_attention: 1 in the checkpoint, 0 now"},
        ),
    ],
)
def test_options_that_may_change(options: dict[str, Any], lines: set[str]) -> None:
    """Each is listed, none is refused; a checkpoint older than the options counts as trained
    without them."""
    old = {name: value for name, value in saved_config().items() if name not in options}
    for saved in (saved_config(), old):
        check_architecture(saved, unflatten(options), "here")
        assert {
            str(difference) for difference in differences(saved, unflatten(options), DATA, None)
        } == lines
    assert differences(old, Config(), DATA, None) == []


def test_a_longer_context_is_allowed_without_learned_positions() -> None:
    """max_position_embeddings is a shape only with a table of learned positions."""
    rotary = Config(
        model=dataclasses.replace(
            Config().model,
            use_rotary_embeddings=True,
            use_position_embeddings=False,
            max_position_embeddings=4096,
        )
    )
    saved = json.loads(json.dumps(flatten(rotary))) | {"max_position_embeddings": 2048}
    check_architecture(saved, rotary, "here")
    learned = Config(model=dataclasses.replace(rotary.model, use_position_embeddings=True))
    with pytest.raises(
        CheckpointError, match="--max_position_embeddings: 2048(.|\n)*--use_position_embeddings: 0"
    ):
        check_architecture(saved, learned, "here")


@pytest.mark.parametrize(
    ("saved", "now", "iteration", "expected"),
    [
        ({"batch_size": 4}, ("0:4", "3:8"), 3, None),
        ({"batch_size": 8, "batch_size_schedule": ["0:4", "9:8"]}, ("0:4", "5:8"), 5, None),
        ({"batch_size": 4}, ("0:4", "3:8"), 5, '8 samples are left out; .*="0:4 5:8"'),
        (
            {"batch_size_schedule": ["0:8", "4:2"]},
            ("0:4", "9:6"),
            6,
            'read again; .*="0:8 4:2 6:4 9:6"',
        ),
    ],
)
def test_a_batch_size_that_moves_the_samples_is_said(
    saved: dict[str, Any], now: tuple[str, ...], iteration: int, expected: str | None
) -> None:
    """The warning states the number of samples and a schedule that keeps the offset; an unchanged
    offset gives none."""
    config = unflatten({"batch_size_schedule": now})
    saved = {"batch_size": 8, "batch_size_schedule": [], **saved}
    message = moved_samples(saved, config, iteration)
    assert (message is None) == (expected is None) and re.search(expected or "", message or ""), (
        message
    )
    if message is not None:
        fix = unflatten({"batch_size_schedule": tuple(message.split('"')[1].split())})
        assert moved_samples(saved, fix, iteration) is None
        coming = [batch_schedule(some.batch).batch_size(iteration + 1) for some in (fix, config)]
        assert coming[0] == coming[1]


COSINE = {
    "lr": 2e-3,
    "min_lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup": 80,
    "train_iters": 800,
}


@pytest.mark.parametrize(
    ("now", "fix"),
    [
        ({"train_iters": 1200}, "write --lr_decay_iters=800"),
        ({"lr": 1e-3, "min_lr_ratio": 0.5, "min_lr": None, "train_iters": 801}, "write"),
        (
            {
                "train_iters": 900,
                "lr_step_offset": 0,
                "lr_decay_iters": 800,
                "lr": 4e-3,
                "min_lr": 4e-4,
            },
            "leave out",
        ),
        ({"train_iters": 900, "lr_schedule": "constant,900,0.5"}, "leave out --lr_schedule"),
        (
            {"min_lr": None, "min_lr_ratio": 0.1, "train_iters": 900},
            "--min_lr=0.0002",
        ),  # equal, by the ratio
        ({"train_iters": 900, "lr_decay_iters": 800}, None),
        ({"train_iters": 900, "lr_decay_iters": 800, "lr_warmup": 10}, None),  # moves the past only
        ({}, None),  # nothing is left to train
    ],
    ids=str,
)
def test_a_schedule_that_moves_the_learning_rate_is_said(
    now: dict[str, Any], fix: str | None
) -> None:
    """The warning has the next iteration's rate by both schedules, and flags that keep the old
    one."""
    saved = json.loads(
        json.dumps(flatten(resolve(unflatten({"dataset_source": "random", **COSINE}), 1)))
    )
    given = {} if "lr_schedule" in now else COSINE
    given = {"dataset_source": "random", **given, **now}
    config = resolve(unflatten(given), 1)
    message = moved_rate(saved, config, 800)
    assert (message is None) == (fix is None), message
    if message is None:
        return
    assert fix is not None and fix in message
    assert f"iteration 801 is {learning_rate(config, 801):.3e}, but 2.000e-04 by" in message
    words = re.findall(r"--(\w+)(?:=(\S+))?", message)
    keep = {
        name: json.loads(value) if value and value[0].isdigit() else value
        for name, value in words
        if value
    }
    left = {
        name: value
        for name, value in given.items()
        if name not in [name for name, value in words if not value]
    }
    mended = resolve(unflatten({**left, **keep}), 1)
    assert moved_rate(saved, mended, 800) is None


def test_another_sequence_length_moves_tokens() -> None:
    """Whatever the batch size, samples are cut differently; the fix is the saved length."""
    saved = saved_config(batch_size=8, sequence_length=16)
    now = unflatten({"batch_size": 8, "sequence_length": 8})
    for batch_size, length in ((8, 8), (8, 32), (16, 8)):
        other = unflatten({"batch_size": batch_size, "sequence_length": length})
        warning = moved_samples(saved, other, 100) or ""
        assert (
            f"--sequence_length={length}: samples are cut at other places and come in another order"
            in warning
        )
        assert "write --sequence_length=16" in warning and "no schedule avoids that" in warning
    for read, said in ((780, "read them all: about 24.0% of the rest"), (8, "no sched")):
        sets = [["0" * 16, "a", 200, 16, 20], ["1" * 16, "b", 600, 16, read]]
        assert said in (moved_samples(saved, now, 100, sets) or "")
    assert moved_samples(saved, now, 0) is None


def test_a_changed_schedule_is_a_table() -> None:
    """Old and new values at the next iteration, the quarters and the end, also if the next rate is
    the same."""
    base = {"dataset_source": "random", **COSINE, "batch_size": 8}
    saved = json.loads(json.dumps(flatten(resolve(unflatten(base), 1))))
    assert schedule_table(saved, resolve(unflatten(base), 1), 400) == []
    now = resolve(unflatten({**base, "train_iters": 1200, "batch_size": 16}), 1)
    kept, header, *rows = schedule_table(saved, now, 400)
    assert "iterations done (400)" in kept and header.split()[:3] == ["iteration", "saved", "rate"]
    assert [int(row.split()[0].replace(",", "")) for row in rows] == [401, 600, 800, 1000, 1200]
    assert kept.startswith("kept: weights, optimizer state, the number") and "gone" not in kept
    for names, gone in (
        (("adamw", "muon"), "the moments of matrices of"),
        (("muon", "adamw"), "the moments of"),
    ):
        before, after = ({"optimizer": name} for name in names)
        kept, *_ = schedule_table(
            saved | before, resolve(unflatten({**flatten(now), **after}), 1), 400
        )
        assert (
            kept.startswith("kept: weights, the number")
            and f"; gone: {gone} --optimizer={names[0]}" in kept
        )
    place, old, new, *sizes = rows[2].split()
    assert (old, sizes) == ("2.000e-04", ["8", "16"]) and float(new) == pytest.approx(
        learning_rate(now, 800), rel=1e-3
    )
    late = {**base, "lr_decay_style": "constant", "min_lr": None}
    flat = json.loads(json.dumps(flatten(resolve(unflatten(late), 1))))
    other = resolve(
        unflatten({**late, "batch_size": None, "batch_size_schedule": ("0:8", "700:16")}), 1
    )
    assert moved_rate(flat, other, 400) is None and moved_samples(flat, other, 400) is None
    assert schedule_table(flat, other, 400)[-1].split()[3:] == ["8", "16"]
    assert schedule_table(saved, now, 1200) == []


# -- data
# --------------------------------------------------------------------------------------------------------------

ROW, OTHER = [60, 2931, "uint16", "0123456789abcdef"], [61, 3000, "uint16", "fedcba9876543210"]
SAVED = {"data_path": ("0.25", "a", "0.75", "b"), "train_iters": 10, "tokenizer_file": "t.json"}
IDENTITY = {"sets": [ROW, OTHER], "tokenizer": "00000000000000aa"}


def with_data(**changes: Any) -> Config:
    return unflatten({**SAVED, **changes})


def loaded(data: Any = IDENTITY, **changes: Any) -> Manifest:
    saved = json.loads(json.dumps(flatten(with_data(**changes))))
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
        {
            "data_weights_schedule": ("5:1/1", "9:0/1")
        },  # after the iterations that are done, which are 5
        {"data_path": ("a", "b"), "data_weights_schedule": ("0:1/3",)},
        {"max_epochs": 3},
    ],
)
def test_no_change(changes: dict[str, Any]) -> None:
    """Paths may move, weights and shares are relative, and a run that trains nothing may read
    anything."""
    assert check_data(loaded(), with_data(**changes), IDENTITY, "here") == []


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
        (
            {},
            {"tokenizer": "00000000000000bb"},
            "--tokenizer_file: t.json (digest 00000000000000aa) in the checkpoint",
        ),
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
        (
            {"dataset_source": "random"},
            {"sets": []},
            "--dataset_source: list in the checkpoint, random now",
        ),
    ],
)
def test_changes(changes: dict[str, Any], identity: dict[str, Any], line: str) -> None:
    """One error names the difference; with --allow_data_change=1 the same line is for the log."""
    now = {**IDENTITY, **identity}
    with pytest.raises(
        CheckpointError, match="checkpoint here was trained with other data"
    ) as caught:
        check_data(loaded(), with_data(**changes), now, "here")
    assert (
        line in str(caught.value)
        and "--allow_data_change=1" in str(caught.value)
        and caught.value.exit_code == 4
    )
    lines = check_data(loaded(), with_data(**changes, allow_data_change=True), now, "here")
    assert any(item.startswith(line) for item in lines)


THIRD = [7, 700, "uint16", "00000000000000dd"]


@pytest.mark.parametrize(
    ("before", "now", "rows"),
    [
        (
            {"data_path": ("0.5", "a", "0.5", "b")},
            {"data_path": ("0.8", "a", "0.2", "b")},
            [ROW, OTHER],
        ),
        ({}, {"data_path": ("0.3", "a", "0.2", "b", "0.5", "c d")}, [ROW, OTHER, THIRD]),
        ({}, {"data_path": ("a",)}, [ROW]),
        (
            {"data_weights_schedule": ("2:1/1", "90:0/1")},
            {"data_path": ("a", "b"), "data_weights_schedule": ("0:1/3", "3:2/1", "8:5/1")},
            [ROW, OTHER],
        ),
    ],
    ids=str,
)
def test_other_weights_from_now_on(
    before: dict[str, Any], now: dict[str, Any], rows: list[Any]
) -> None:
    """The message has flags with which the resume is allowed, what was read stays, and what follows
    is as asked."""
    saved, identity = loaded(**before), {**IDENTITY, "sets": rows}
    with pytest.raises(CheckpointError) as caught:
        check_data(saved, with_data(**now), identity, "here")
    words = shlex.split(str(caught.value).split("what follows, write ")[1])
    mended = with_data(
        data_path=tuple(words[1:-1]),
        data_weights_schedule=tuple(words[-1].partition("=")[2].split()),
    )
    number = len(mended.data.data_path)
    known = {**IDENTITY, "sets": [ROW, OTHER, THIRD][:number]}
    assert check_data(saved, mended, known, "here") == []

    def blend(config: Config) -> Blend:
        first, *later = weight_stages(config.data.data_path, config.data.data_weights_schedule)
        padded = [
            (10 * start, (*weights, *[0.0] * (number - len(weights))))
            for start, weights in (first, *later)
        ]
        return Blend(padded[0][1], padded[1:])

    old, asked, found = map(blend, (with_data(**before), with_data(**now), mended))
    past = np.arange(10 * saved.iteration - 2)
    assert all(
        np.array_equal(*pair) for pair in zip(old.locate(past), found.locate(past), strict=True)
    )
    for start in (50, 60, 70, 80, 90):
        assert np.allclose(
            np.subtract(asked.due(start + 10), asked.due(start)),
            np.subtract(found.due(start + 10), found.due(start)),
        )


def test_a_data_set_without_weight_so_far_may_come_go_and_change() -> None:
    """No sample came from it; once one did, it may not."""
    third = {**IDENTITY, "sets": [ROW, OTHER, THIRD], "masks": [None, None, "00000000000000cc"]}
    later = dict(data_path=("a", "b", "c"), data_weights_schedule=("0:1/3/0", "5:1/1/1"))
    assert check_data(loaded(), with_data(**later), third, "here") == []
    saved = loaded(third, **later)
    assert check_data(saved, with_data(), IDENTITY, "here") == []
    assert (
        check_data(saved, with_data(**later), {**third, "sets": [ROW, OTHER, OTHER]}, "here") == []
    )
    early = {**later, "data_weights_schedule": ("0:1/3/0", "4:1/1/1")}
    with pytest.raises(CheckpointError, match="data set 2: c .7 documents"):
        check_data(loaded(third, **early), with_data(), IDENTITY, "here")


def test_checkpoints_from_before_the_order_of_samples_was_an_option() -> None:
    """They were trained with the defaults."""
    older = loaded()
    for name in (
        "shuffle",
        "shuffle_era",
        "shuffle_documents",
        "max_epochs",
        "data_weights_schedule",
    ):
        del older.config[name]
    assert check_data(older, with_data(), IDENTITY, "here") == []
    assert check_data(
        older, with_data(shuffle="none", allow_data_change=True), IDENTITY, "here"
    ) == ["--shuffle: epoch in the checkpoint, none now"]


def test_the_record_of_masks_is_checked() -> None:
    """A list of digests or nulls, and nothing else."""
    decode(
        RUN_STATE,
        {**run_state(), "data": {**IDENTITY, "masks": [None, "00000000000000cc"]}},
        "state",
    )
    for masks in (None, ["x"], [0], {"0": None}):
        with pytest.raises(DamagedError, match="masks"):
            decode(RUN_STATE, {**run_state(), "data": {**IDENTITY, "masks": masks}}, "state")


def test_checkpoints_of_older_versions_and_strange_ones() -> None:
    """Without a record only options can differ; a record that contradicts its options has data sets
    without names."""
    assert check_data(loaded(None), with_data(), {**IDENTITY, "sets": [ROW, ROW]}, "here") == []
    with pytest.raises(CheckpointError, match="a data set .60 documents"):
        check_data(
            loaded(data_path=("1", "1")), with_data(), {**IDENTITY, "sets": [OTHER, ROW]}, "here"
        )
    many = {"sets": [ROW] * 1000, "tokenizer": None}
    path = tuple(str(number) + "x" for number in range(1000))
    with pytest.raises(CheckpointError) as caught:
        check_data(
            loaded(many, data_path=path),
            with_data(data_path=path),
            {**many, "sets": [OTHER] * 1000},
            "here",
        )
    assert len(str(caught.value)) < 6000 and "and 980 more" in str(caught.value)


@pytest.mark.parametrize(
    ("weight", "is_wrong"),
    [
        ([0.002, [[3, 0.9]]], True),  # not rounded since the first iteration
        ([0.002, []], True),  # for longer than the history
        ([0.002, [[0, 0.7], [2, 0.9]]], False),  # trained, or gathered in each iteration
        ([1.0, []], False),  # zeros, or never rounded
    ],
)
def test_frozen_layers_of_a_version_that_computed_them_wrongly(weight: Any, is_wrong: bool) -> None:
    """A checkpoint says so itself: the magnitude of a layer's weight was not seen in the last
    iteration."""
    other = [0.1, [[0, 9.0]]]
    scales = {
        "blocks.0.mlp.up": [other, weight, [1.0, []]],
        "blocks.1.mlp.up": [other, other, other],
    }
    state = {**run_state(), "optimizer": {**run_state()["optimizer"], "scales": scales}}
    decode(RUN_STATE, state, "state")
    warnings = list(wrong_frozen_layers(dataclasses.replace(loaded(), state=state)))
    assert len(warnings) == is_wrong and list(wrong_frozen_layers(loaded())) == []
    if is_wrong:
        assert (
            "wrong weights in frozen layers (blocks.0.mlp.up), from" in warnings[0]
            and "iteration 2" in warnings[0]
        )
