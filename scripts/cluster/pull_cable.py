"""Pull the cable between two machines of a run at random moments: both sides must end in time, and
the run resume.

    sudo -E python -m scripts.cluster.pull_cable --folder=NEW --cuts=30

Cuts fall into each of PHASES in turn. The next start of the same command is that of the next cut.
It writes a line for each cut, and ends with exit code 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.cluster.machines import Pair

# --distributed_timeout, --startup_timeout, and what may pass after them
TIMEOUT_S = 10
STARTUP_S = 60
LATE_S = 20
READY_S = 300.0  # limit on a resumed run's end
IMPORTS_S = 120  # limit on what comes before a rank looks at its clock, on a busy machine
MOMENTS_S = 8.0  # the cable is pulled within this time after the start, or after the first step
FLAGS = (
    "--num_layers=2 --hidden_size=32 --num_attention_heads=4 --sequence_length=16 --micro_batch_size=2 --batch_size=4 "
    "--dataset_source=random --vocab_size=64 --device=cpu --zero_stage=2 --max_checkpoints=2 --num_workers=0 "
    f"--distributed_timeout={TIMEOUT_S} --startup_timeout={STARTUP_S}"
).split()
WORDS = "cannot be reached|nobody answered|missing: rank 1"
GUESS = "alive, but it hangs"  # of a rank that nobody can see


class Phase(NamedTuple):
    """Where the cable is pulled."""

    trains: bool = True  # whether the run trains by then
    interval: int = 50  # of checkpoints
    before: str = ""  # Python that runs first, and makes the phase last longer


PHASES = {
    "steps": Phase(),
    "the wait for data": Phase(
        before="import os, time; from megatron_lite.data.reading import RandomReader as Reader\n"
        "read, wait_s = Reader.read, 3 * int(os.environ['RANK'])\n"
        "Reader.read = lambda *given: (time.sleep(wait_s), read(*given))[1]"
    ),
    "saves": Phase(
        interval=3,
        before="import os, time; sync = os.fsync\n"
        "os.fsync = lambda file: (time.sleep(1), sync(file))",
    ),
    "the start": Phase(trains=False),
}


class Outcome(NamedTuple):
    """The end of one side after a cut."""

    code: int | None  # None: it had not ended
    took_s: float
    words: str  # of its error; empty if it leaves them to rank 0


def start(pair: Pair, folder: Path, phase: Phase, iterations: int) -> list[subprocess.Popen[str]]:
    """Start both ranks; the output of each goes to a file beside the run."""
    flags = (
        *FLAGS,
        f"--train_iters={iterations}",
        f"--checkpoint_interval={phase.interval}",
        f"--experiment_dir={folder / 'run'}",
    )
    return [pair.start(rank, flags, folder / f"rank_{rank}.txt", phase.before) for rank in (0, 1)]


def log(folder: Path, rank: int) -> str:
    return (folder / f"rank_{rank}.txt").read_text("utf-8", "replace")


def ends(sides: Sequence[subprocess.Popen[str]], folder: Path, limit_s: float) -> list[Outcome]:
    """Wait for both sides; kill what has not ended within the limit."""
    begin_s = time.monotonic()
    took_s = dict[int, float]()
    while len(took_s) < len(sides) and time.monotonic() - begin_s < limit_s:
        for rank, side in enumerate(sides):
            if rank not in took_s and side.poll() is not None:
                took_s[rank] = time.monotonic() - begin_s
        time.sleep(0.1)
    found = []
    for rank, side in enumerate(sides):
        words = next((line for line in log(folder, rank).split("\n") if line[:5] == "ERROR"), "")
        found.append(Outcome(side.poll(), took_s.get(rank, limit_s), words))
    return found


def cut(
    pair: Pair, folder: Path, phase: Phase, generator: random.Random
) -> tuple[float, list[Outcome]]:
    """Start the run, pull the cable, and return at which second and how both sides end."""
    sides = start(pair, folder, phase, 10**6)
    begin_s = time.monotonic()
    while phase.trains and "loss" not in log(folder, 0) and sides[0].poll() is None:
        time.sleep(0.1)
    time.sleep(generator.uniform(0.0, MOMENTS_S))
    moment_s = time.monotonic() - begin_s
    pair.machines[1].plug("down")
    found = ends(sides, folder, STARTUP_S + IMPORTS_S + LATE_S + 10)
    pair.machines[1].plug("up")
    return moment_s, found


def message(folder: Path) -> str:
    """Return what exit.json says of the end."""
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder / "run" / "exit.json").read_text())["message"])[:200]
    return "no exit.json"


def promised(sides: Sequence[Outcome], said: str, left: Sequence[str]) -> bool:
    """Return whether a cut ended as it should. said: see `message`. left: processes, still there."""
    words = f"{said} {sides}"
    good = not left and re.search(WORDS, words) is not None and GUESS not in words
    for side in sides:
        limit_s = STARTUP_S + IMPORTS_S if "--startup" in side.words else TIMEOUT_S
        good &= side.code == 6 and side.took_s <= limit_s + LATE_S
    return good


def reached(folder: Path) -> int:
    """Return the newest iteration that was saved; 0 if none was."""
    names = (path.name for path in (folder / "run" / "checkpoints").glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cuts, then let the run resume; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, required=True, help="an empty folder for the run and its output"
    )
    options = parser.parse_args(argv)
    if "SLURM_JOB_ID" in os.environ:
        raise SystemExit("not inside a job: this changes the network of the machine")
    if os.geteuid() != 0:
        raise SystemExit("needs root, for namespaces")
    folder = options.folder
    folder.mkdir(parents=True)
    generator = random.Random(options.seed)
    broken = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with Pair() as pair:
        for number, name in zip(range(options.cuts), itertools.cycle(PHASES), strict=False):
            moment_s, found = cut(pair, folder, PHASES[name], generator)
            said, left = message(folder), pair.left_over()
            resumed = re.search("resumed from .* (at iteration [0-9]+)", log(folder, 0))
            good = promised(found, said, left)
            broken += not good
            print(
                f"{number + 1} {'ok' if good else 'BROKEN'} in {name}: cut after {moment_s:.1f} s, "
                f"{'resumed ' + resumed[1] if resumed else 'nothing resumed before'}, "
                f"{len(left)} processes left; {said!r}",
                flush=True,
            )
            for rank, one in enumerate(found):
                end = f"code {one.code} after {one.took_s:.1f} s"
                print(f"    rank {rank}: {end}: {one.words[:300]}", flush=True)
            pair.kill()
        sides = start(pair, folder, Phase(), reached(folder) + 10)
        found = ends(sides, folder, READY_S)
        print("resumed", found, flush=True)
        broken += any(one.code != 0 for one in found)
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
