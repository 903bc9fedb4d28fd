"""What a start does with its mirror, without a run around it, and checkpoints that know their
history."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import reading
from megatron_lite.checkpoint.history import History
from megatron_lite.checkpoint.mirror import Mirror
from megatron_lite.checkpoint.resume import choose
from megatron_lite.config import CheckpointConfig
from tests.checkpoint import test_writing
from tests.support.fakes import one_rank, run_state

RUN, OPTIONS = "1" * 16, "a" * 16
WITHIN_S = 60.0


def make(root: Path, address: str, run: str = RUN, **options: Any) -> Mirror:
    """Return the mirror of a start of a run that is set up."""
    made = Mirror(root, CheckpointConfig(mirror=address, **options))
    made.begin(run)
    return made


def restore(made: Mirror) -> Mirror:
    """Let a start choose, and restore what it has chosen."""
    load_chosen(made)
    return made


def load_chosen(made: Mirror) -> tuple[Path, list[str]] | None:
    """Load what a start chooses, on one rank; return its folder and the warnings, None if there is
    nothing."""
    made.compare()
    choice = choose(made._checkpoints, made._options, made.usable)
    model: Any = test_writing.empty_model(test_writing.SPECS, test_writing.Layout(1, 3), 0)
    lines = list[str]()
    where = made._checkpoints
    found = reading.load_first_good(
        choice.found, where, model, one_rank(), lines.append, repair=made.fetch
    )
    return None if found is None else (found[0], lines)


def save(
    root: Path, iteration: int, seed: int, ranks: int = 1, *, run: str = RUN, **more: Any
) -> None:
    """Save a checkpoint of a run, whose iterations had one set of options unless `changes` says
    otherwise."""
    history = History(run, more.pop("changes", ((0, OPTIONS),)))
    state = {**run_state(), **more.pop("state", {}), **history.state()}
    test_writing.save(root, iteration, seed, ranks, state=state, **more)


def finish(made: Mirror) -> None:
    """Wait until everything is there."""
    made.update()
    wait_until(lambda: made._done == made._asked)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
