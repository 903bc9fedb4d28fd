"""Count the calls of a save from a lower room into a higher one: `python -m tests.support.save_calls`
lists them.

The save is a plain one: one rank, at once, with an experiment directory, on a CPU. The threads that
it starts count, too.
"""

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import megatron_lite
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import run_distributed, start_run, tiny_config

PACKAGE = Path(megatron_lite.__file__).parent


def save_calls(floor_of: dict[str, int]) -> Counter[str]:
    """Return the calls into a higher room, by caller and callee. floor_of: 0 is the top floor."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = run_distributed(1, _called, folder)[0]
    return Counter(
        f"{caller} -> {callee}"
        for caller, callee in pairs
        if floor_of[_room(callee)] < floor_of[_room(caller)]
    )


def _room(place: str) -> str:
    return Path(place.partition(":")[0]).parts[0].removesuffix(".py")


def _called(distributed: Distributed, folder: str) -> list[tuple[str, str]]:
    """Return caller and callee of each call of a save between files of the package."""
    from megatron_lite.outputs.saving import save
    from megatron_lite.train import train_step

    run = start_run(distributed, tiny_config(experiment_dir=folder))
    train_step(run, next(run.data.batches("training", 0, 1)), 1)
    run.iteration = 1
    pairs: list[tuple[str, str]] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (callee := _place(frame)):
            caller = frame.f_back
            while caller is not None and not _place(caller):
                caller = caller.f_back
            if caller is not None:
                pairs.append((_place(caller), callee))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        save(run)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    run.data.close()
    return pairs


def _place(frame: FrameType) -> str:
    """Return file and function of a frame of the package; "" for other frames."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    return f"{path.relative_to(PACKAGE)}:{frame.f_code.co_qualname}"


if __name__ == "__main__":
    from tests.test_structure import FLOOR_OF

    calls = save_calls(FLOOR_OF)
    for pair, count in calls.most_common():
        print(f"{count:6} {pair}")
    print(f"{calls.total():6} calls")
