"""A stage whose verbs run inside of a block that a profile makes: a named range, or a stop watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_lite.zero.runner import Verbs

# (verb, stage, micro-batch or None) -> the block in which the verb runs
Around = Callable[[str, int, int | None], contextlib.AbstractContextManager[Any]]


class WatchedStage:
    """The verbs of stage `index`, each inside of `around(verb, index, micro_batch)`."""

    def __init__(self, stage: Verbs, index: int, around: Around) -> None:
        self._stage, self._index, self._around = stage, index, around

    def gather(self) -> None:
        with self._around("gather", self._index, None):
            self._stage.gather()

    def require_weights(self) -> None:
        with self._around("require", self._index, None):
            self._stage.require_weights()

    def accumulate(self) -> None:
        with self._around("accumulate", self._index, None):
            self._stage.accumulate()

    def forward(self, hidden: Tensor | None, micro_batch: Any, slot: int) -> Tensor:
        with self._around("forward", self._index, slot):
            return self._stage.forward(hidden, micro_batch, slot)

    def backward(self, grad: Tensor | None, slot: int) -> Tensor | None:
        with self._around("backward", self._index, slot):
            return self._stage.backward(grad, slot)

    def reduce(self, again: bool) -> None:
        with self._around("reduce", self._index, None):
            self._stage.reduce(again)

    def finish_reduction(self) -> None:
        with self._around("finish", self._index, None):
            self._stage.finish_reduction()


def range_name(verb: str, stage: int, micro_batch: int | None) -> str:
    """Return the name of a verb in traces: `forward stage 2, micro-batch 0`."""
    return f"{verb} stage {stage}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")
