"""Weights, moments and averages that are not finite are found and named, and never published."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.errors import NumericsError
from megatron_lite.outputs.saving import refuse_broken_weights
from megatron_lite.planner.plan import SimulatedGroup
from megatron_lite.zero.finite import are_finite, not_finite
from tests.support.engine_runs import Engine

NAME = "blocks.1.mlp.down.weight"


def engine(rank: int, **options: Any) -> Engine:
    """A model with state, as rank `rank` of two holds it."""
    return Engine(SimulatedGroup(rank, 2, "cpu", "cpu"), options)


def spoil(made: Engine, kind: str, value: float) -> bool:
    """Put `value` into an element of NAME, if this rank's shard has one."""
    for _, part in made.model.parts():
        for slot, start, _ in part.layout.pieces(part.group.rank):
            if slot.spec.name == NAME and part.has(kind, slot.spec):
                values = part.read(kind)
                values[slot.offset + start - part.group.rank * part.layout.shard_numel] = value
                part.write(kind, values)
                return True
    return False


@pytest.mark.parametrize("kind", ["weights", "exp_avg", "exp_avg_sq", "average"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_every_kind_is_looked_at(kind: str, value: float) -> None:
    """One element of any kind of state is found on the rank that has it, with the name of its
    parameter."""
    found = []
    for rank in range(2):
        made = engine(rank, ema_type="ema", batch_size=4)
        assert not_finite(made.model) is None
        if spoil(made, kind, value):
            found.append(not_finite(made.model))
        else:
            assert not_finite(made.model) is None
    assert found and set(found) == {NAME if kind == "weights" else f"{kind} of {NAME}"}


@pytest.mark.parametrize(
    "options", [{"optimizer": "muon"}, {"optimizer": "sgd"}, {"split_master_weights": True}]
)
def test_state_of_other_optimizers(options: dict[str, Any]) -> None:
    """Matrices without second moments, a single moment, and split weights are looked at, too."""
    dtype = {"training_dtype": "bf16"} if "split_master_weights" in options else {}
    for kind in ("weights", "exp_avg"):
        for rank in range(2):
            made = engine(rank, batch_size=4, **options, **dtype)
            assert not_finite(made.model) is None
            assert spoil(made, kind, math.nan) == (not_finite(made.model) is not None)


def test_nothing_is_published() -> None:
    """Every rank raises the error, whichever has the broken element."""
    made = engine(1, batch_size=4)
    assert spoil(made, "exp_avg_sq", math.inf)
    peers = SimpleNamespace(
        agree_max=lambda value: value, gather_objects=lambda value: [None, value]
    )
    run: Any = SimpleNamespace(model=made.model, distributed=peers, iteration=7)
    with pytest.raises(
        NumericsError,
        match=rf"state is no longer finite at iteration 7, first exp_avg_sq of {NAME} on rank 1",
    ):
        refuse_broken_weights(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_broken_value_is_seen_anywhere(dtype: torch.dtype, broken: float) -> None:
    """In the whole vectors of a tensor and in its rest."""
    for numel in (1, 7, 33, 1000, 5001):
        good = torch.linspace(-3, 3, numel).to(dtype)
        for place in {0, numel // 2, numel - 1}:
            bad = good.clone()
            bad[place] = broken
            assert are_finite([good, bad, good]) == [True, False, True]
    assert are_finite([]) == []
