"""Options of averages: what contradicts, what has no effect, and what a dry run says they cost."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.errors import UsageError
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.report import describe
from megatron_lite.validation.warnings import warnings
from tests.support.harness import tiny_config

EMA: dict[str, Any] = {"ema_type": "ema"}
EXPORT: dict[str, Any] = {"export_interval": 10, "experiment_dir": "/run", "export_weights": "average"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EXPORT, "--export_weights=average, --ema_type=none: no average is kept; write --ema_type=ema"),
        ({"export_weights": "average"}, "no average is kept"),
        (
            {**EXPORT, **EMA, "export_format": "distributed"},
            "--export_weights=average, --export_format=distributed: a resumable checkpoint always holds weights and "
            "averages; leave one of the two out",
        ),
        ({"ema_type": "ema", "ema_beta": 1.0}, "--ema_beta=1: must be "),
        ({"ema_type": "ema_decay_sqrt", "ema_decay_iters": 0}, "--ema_decay_iters=0: must be >= 1"),
        ({"ema_type": "swa"}, "--ema_type=swa: takes none, ema, ema_decay_sqrt"),
    ],
    ids=str,
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny_config(**options)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_beta": 0.9}, "--ema_beta has no effect with --ema_type=none"),
        ({**EMA, "ema_switch_iter": 5}, "--ema_switch_iter has no effect with --ema_type=ema"),
        ({**EMA, "ema_decay_iters": 5}, "--ema_decay_iters has no effect with --ema_type=ema"),
        ({**EMA, "export_weights": "average"}, "--export_weights has no effect without --export_interval"),
        (EMA, "--ema_type=ema: the averages are only saved; evaluate them with --validation_iters"),
        ({"ema_type": "ema_decay_sqrt"}, "--ema_switch_iter=100000 is not reached in 20 iterations: the average"),
    ],
    ids=str,
)
def test_surprises(options: dict[str, Any], message: str) -> None:
    assert sum(message in line for line in warnings(tiny_config(**options))) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**EMA, "validation_iters": 1},
        {**EMA, "test_iters": 1},
        {**EMA, **EXPORT},
        {"ema_type": "ema_decay_sqrt", "ema_switch_iter": 19, "ema_decay_iters": 1, "validation_iters": 1},
    ],
    ids=str,
)
def test_no_surprise(options: dict[str, Any]) -> None:
    assert warnings(tiny_config(**{"experiment_dir": "/run", **options})) == []


def test_a_dry_run_counts_averages_and_their_buffers() -> None:
    """One rank of two, tied head: 4 bytes per element of a shard; two shared buffers and the embedding's own."""
    plan = make_plan(tiny_config(2, **EMA, zero_stage=3, training_dtype="bf16"), 2, "cuda")
    rows = {line[:28].strip(): line.split()[-3:] for line in describe(plan, 2**40, ())}
    sizes = [stage.numel for stage in plan.model.stages]
    assert rows["averages"][:2] == [str(len(sizes)), f"{4 * sum(sizes) // 2:,}"]
    buffers = sizes[0] + max(sizes[1], sizes[3]) + sizes[2]
    assert rows["average buffers"][:2] == ["3", f"{2 * buffers:,}"]
