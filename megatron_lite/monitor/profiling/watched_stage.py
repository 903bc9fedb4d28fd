"""A stage whose verbs run inside of a block that a profile makes: a named range, or a stop watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

from megatron_lite.monitor.profiling.schedule_times import COMPUTING
from megatron_lite.zero.runner import Verbs

# (verb, stage, micro-batch or None) -> the block in which the verb runs
Around = Callable[[str, int, int | None], contextlib.AbstractContextManager[Any]]


class _WatchedStage:
    """The verbs of stage `index`, each inside of `around(verb, index, micro_batch)`."""

    def __init__(self, stage: Verbs, index: int, around: Around) -> None:
        self._stage, self._index, self._around = stage, index, around

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = name.partition("_")[0]  # "require" of `require_weights`, "finish" of `finish_reduction`

        def watched_verb(*arguments: Any) -> Any:
            micro_batch = arguments[-1] if verb in COMPUTING else None
            with self._around(verb, self._index, micro_batch):
                return getattr(self._stage, name)(*arguments)

        return watched_verb


def watched(stage: Verbs, index: int, around: Around) -> Verbs:
    """Return a stage whose verbs run inside of `around(verb, index, micro_batch)`."""
    return cast(Verbs, _WatchedStage(stage, index, around))


def range_name(verb: str, stage: int, micro_batch: int | None) -> str:
    """Return the name of a verb in traces: `forward stage 2, micro-batch 0`."""
    return f"{verb} stage {stage}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")
