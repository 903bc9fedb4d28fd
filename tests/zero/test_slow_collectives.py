"""A shared buffer is never written, nor zeroed, nor computed with before the collective that uses it has finished.

Collectives here are as late as can be: nothing is sent before somebody waits. Whoever forgets to wait either writes
into a buffer that is still to be read, which is caught at once, or computes with what was there before, which changes
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Trajectory, run_distributed, same_weights, train_tiny
from torch import Tensor

from megatron_lite.distributed import Distributed, Handle
from megatron_lite.zero.stage import Buffer, Stage

LAYOUTS = [
    {"num_layers": 3, "batch_size": 8, "depth_first_micro_batches": depth, "breadth_first_micro_batches": breadth,
     "tie_word_embeddings": tied, **buffers}
    for depth, breadth in ((1, 1), (2, 1), (1, 2))
    for tied in (True, False)
    for buffers in ({"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3},
                    {"num_weight_buffers": 1, "num_grad_buffers": 1}, {"num_weight_buffers": 3, "num_grad_buffers": 3})
]  # fmt: skip


class Late:
    """A collective that begins when it is waited for, and insists that its input is what it was when it was started."""

    def __init__(self, start: Callable[[Tensor], Handle], buffer: Tensor, reads: Tensor) -> None:
        self._start, self._buffer, self._reads, self._before = start, buffer, reads, reads.clone()
        self._handle: Handle | None = None

    def wait(self) -> None:
        if self._handle is None:
            assert torch.equal(self._reads, self._before), "written while a collective still reads it"
            self._handle = self._start(self._buffer)
        self._handle.wait()


def make_late(distributed: Distributed) -> None:
    """Delay the collectives of the stages; agreement between ranks stays as it is."""
    gather, reduce = distributed.all_gather, distributed.reduce_scatter

    def own(buffer: Tensor) -> Tensor:
        return buffer.view(distributed.world_size, -1)[distributed.rank]

    stage_gather = Stage.gather

    def late_gather(stage: Stage) -> None:
        distributed.all_gather = lambda buffer: Late(gather, buffer, own(buffer))  # type: ignore[method-assign]
        stage_gather(stage)
        distributed.all_gather = gather  # type: ignore[method-assign]

    Stage.gather = late_gather  # type: ignore[method-assign]
    distributed.reduce_scatter = lambda buffer: Late(reduce, buffer, buffer)  # type: ignore[method-assign]


def train_late(distributed: Distributed, layouts: list[dict[str, Any]]) -> list[Trajectory]:
    make_late(distributed)
    return [train_tiny(distributed, layout, 10) for layout in layouts]


def train_normally(distributed: Distributed, layouts: list[dict[str, Any]]) -> list[Trajectory]:
    return [train_tiny(distributed, layout, 10) for layout in layouts]


@pytest.mark.parametrize("ranks", [2])
def test_slow_collectives_change_no_bit(ranks: int) -> None:
    """Every schedule, every buffer count, tied and not: the numbers of the latest possible collectives are the same."""
    normal = run_distributed(ranks, train_normally, LAYOUTS)[0]
    late = run_distributed(ranks, train_late, LAYOUTS)[0]
    for layout, a, b in zip(LAYOUTS, normal, late, strict=True):
        assert a.losses == b.losses and a.grad_norms == b.grad_norms and same_weights(a.weights, b.weights), layout


def train_with_a_wait_removed(distributed: Distributed, removed: str) -> str | list[float]:
    make_late(distributed)
    if removed == "before writing into a gradient buffer":
        original_accumulate, original_start = Stage.accumulate, Buffer.start

        def accumulate(stage: Stage) -> None:
            assert stage.gradients is not None
            pending, stage.gradients._pending = stage.gradients._pending, None
            original_accumulate(stage)
            stage.gradients._pending = pending

        def start_after_the_last(buffer: Buffer, collective: Handle) -> None:
            buffer.wait()
            original_start(buffer, collective)

        Stage.accumulate = accumulate  # type: ignore[method-assign]
        Buffer.start = start_after_the_last  # type: ignore[method-assign]
    elif removed == "before computing with gathered weights":
        Stage.require_weights = lambda stage: None  # type: ignore[method-assign]
        original = Buffer.start

        def start(buffer: Buffer, collective: Handle) -> None:
            buffer._pending = None
            original(buffer, collective)

        Buffer.start = start  # type: ignore[method-assign]
    try:
        return train_tiny(distributed, {"zero_stage": 3, "num_layers": 3}, 10).losses
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("removed", ["before writing into a gradient buffer", "before computing with gathered weights"])
def test_a_missing_wait_is_noticed(removed: str) -> None:
    """The test above can fail: without either wait it would."""
    right = run_distributed(2, train_normally, [{"zero_stage": 3, "num_layers": 3}])[0][0].losses
    wrong = run_distributed(2, train_with_a_wait_removed, removed)[0]
    if removed == "before writing into a gradient buffer":
        assert wrong == "written while a collective still reads it"
    else:
        assert wrong != right
