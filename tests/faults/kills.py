"""SIGKILL at random moments, to one rank, to all, to the launcher alone or to everything, until the
run is done.

    python -m tests.faults --kills=1000 --seed=1
    python -m tests.faults --kills=20 --torchrun      the real launcher in place of one that stands for it

A cycle starts the same command, kills what it drew at the moment that it drew, waits for the end of
every process, and checks what is left. A run ends with a start that nothing disturbs, and is
compared with a run that was never killed. The last lines are the figures; the exit code is 1 if
anything was lost, left over or differs.
"""

import argparse
import collections
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.support.forked_ranks import (
    describe,
    processes_of_starts,
    ranks_of_launcher,
    ranks_of_torchrun,
    reap,
    start_by_hand,
    start_launcher,
    start_torchrun,
)
from tests.support.launch import PROGRAM, TINY
from tests.support.os_calls import OsCall
from tests.support.results import assert_all_good, assert_same_run, checkpoints
from tests.support.token_files import write_documents

RANKS = 2
STARTUP_TIMEOUT_S = 5
ALONE_S = 5.0  # in which ranks without their launcher must have stopped
GONE_S = 10.0  # in which every process must be gone
# A rank that was started by hand cannot know that another one will never come. torch waits for the
# store a second time.
NEVER_MET_S = GONE_S + 2 * STARTUP_TIMEOUT_S
# A data worker whose rank dies while starting it. The rest of what Python says then is not ours to
# change.
WORKER_WITHOUT_RANK = re.compile(
    r"Traceback \(most recent call last\):\n(?:  .*\n)+EOFError: Ran out of input\n"
)
START_S = 120.0  # in which a start must end by itself
TARGETS = ("rank", "ranks", "launcher", "node")
PHASES = ("start", "rendezvous", "load", "step", "save", "prune", "export")
LAYOUTS = (
    {"zero_stage": 3, "num_workers": 1},
    {"zero_stage": 1, "async_checkpoint": 1},
    {"zero_stage": 2, "tensor_parallel": 2, "sequence_tensor_parallel": 1},
)
IN_USE = "another run is using it"


@dataclass(frozen=True)
class Moment:
    """Whom to kill, and when."""

    launcher: bool  # whether there is one
    target: str  # rank, ranks, launcher or node
    rank: int
    phase: str
    delay_s: float  # after the phase began
    count: int  # lines of metrics.jsonl, or calls of the phase, until it counts as begun
    pause_s: float  # of the rank before that call, so that the kill comes first
    workers: bool  # whether data workers of a killed rank are killed with it
    overlap: bool  # whether the next start does not wait for the end of this one

    def may_never_meet(self) -> bool:
        """Whether a rank may wait for one that nobody ends with it."""
        return not self.launcher and self.target == "rank" and self.phase in ("start", "rendezvous")

    def __str__(self) -> str:
        return (
            f"{self.target}{f' {self.rank}' if self.target == 'rank' else ''}"
            f"{'' if self.launcher else ' (by hand)'} in {self.phase} {self.count} + {self.delay_s * 1e3:.1f} ms"
        )


def draw(chance: random.Random, targets: Collection[str], torchrun: bool = False) -> Moment:
    """Draw a moment: first the phase, so that short ones are met as often as long ones."""
    phase = chance.choice(("start", "step") if torchrun else PHASES)
    launcher = torchrun or chance.random() < 0.7
    possible = ("rank", "ranks", "launcher", "launcher", "node") if launcher else ("rank", "ranks")
    target = chance.choice([target for target in possible if target in targets])
    width_s = {
        "start": 5.0 if torchrun else 0.4,
        "rendezvous": 0.05,
        "load": 0.2,
        "step": 0.05,
    }.get(phase, 0.002)
    count = chance.randint(1, {"step": 4, "prune": 12, "export": 24}.get(phase, 40))
    rank = 0 if phase == "prune" else chance.randrange(RANKS)
    pause_s = chance.choice((0.0, 0.005))
    overlap = target == "launcher" and chance.random() < 0.5
    delay_s = chance.uniform(0.0, width_s)
    return Moment(
        launcher, target, rank, phase, delay_s, count, pause_s, chance.random() < 0.5, overlap
    )


@dataclass
class Figures:
    """The counts of a whole command, and every bad outcome in words."""

    kills: int = 0
    runs: int = 0
    met: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    bad: list[str] = field(default_factory=list)
    gone_s: list[float] = field(default_factory=list)
    refused: int = 0  # starts beside one that was still ending
    lost: int = 0
    damaged: int = 0
    different: int = 0
    orphans: int = 0
    went_on: int = 0  # runs that saved long after their launcher's death
    written_by_two: int = 0

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the report."""
        targets = sorted({target for _, target in self.met})
        for phase in PHASES:
            yield f"  {phase:<11}" + "".join(
                f"{target:>9} {self.met[phase, target]:>4}" for target in targets
            )
        slowest = max(self.gone_s, default=0.0)
        yield (
            f"{self.kills:,} kills in {self.runs:,} runs, {seconds:.0f} s: {self.lost} published checkpoints lost, "
            f"{self.damaged} damaged, {self.different} runs that differ, {self.orphans} processes left after "
            f"{GONE_S:g} s (the last was gone after {slowest:.1f} s), "
            f"{self.went_on} runs that went on without their launcher, {self.written_by_two} folders written by two "
            f"runs ({self.refused} starts refused meanwhile), {len(self.bad)} bad outcomes"
        )


class Cycle:
    """One start of the command in `experiment`; `moment` is None for one that nothing disturbs."""

    def __init__(
        self, command: list[str], experiment: Path, moment: Moment | None, torchrun: bool = False
    ) -> None:
        self.experiment, self.moment = experiment, moment
        self.folder = Path(tempfile.mkdtemp(prefix="start_", dir=experiment.parent))
        self.published = {*checkpoints(experiment)}
        self.latest_s = 0.0  # when a new checkpoint was seen
        self.exported = exported(experiment)
        self.lines = self._metrics_lines()
        self.signals, sender = os.pipe()
        hooks = {}
        if moment is not None and moment.phase in ("save", "prune", "export"):
            hooks[moment.rank] = notify(sender, moment)
        self.torchrun, self.launcher = torchrun and moment is not None, None
        self.by_hand: list[int] = []
        if self.torchrun:
            self.launcher = start_torchrun(command, self.folder, RANKS)
        elif moment is not None and moment.launcher:
            self.launcher = start_launcher(command, self.folder, RANKS, hooks)
        else:
            self.by_hand = start_by_hand(command, self.folder, RANKS, hooks)
        os.close(sender)
        self.begun = time.monotonic()
        self.codes: dict[int, int] = {}

    def _metrics_lines(self) -> int:
        path = self.experiment / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def ranks(self) -> list[int]:
        if self.torchrun:
            return ranks_of_torchrun(self.launcher or 0)
        return self.by_hand or ranks_of_launcher(self.folder)

    def look(self) -> None:
        """See what is published, and who has died."""
        if new := {*checkpoints(self.experiment)} - self.published:
            self.published |= new
            self.latest_s = time.monotonic()
        self.exported |= exported(self.experiment)
        self.codes |= reap()

    def has_begun(self, moment: Moment) -> bool:
        """Whether the phase of a moment has begun."""
        if moment.phase == "start":
            return True
        if moment.phase == "rendezvous":
            return (self.folder / f"rank_{moment.rank}.meets").exists()
        if moment.phase == "load":
            return (self.folder / f"rank_{moment.rank}.joined").exists()
        if moment.phase == "step":
            return self._metrics_lines() >= self.lines + moment.count
        return bool(select.select([self.signals], [], [], 0.0)[0]) and bool(
            os.read(self.signals, 1)
        )

    def wait_for(
        self, condition: Callable[[], bool], limit_s: float, pause_s: float = 0.0005
    ) -> bool:
        """Wait for a condition; return False if it does not come, or every process has ended."""
        deadline, checked = time.monotonic() + limit_s, time.monotonic()
        while not condition():
            self.look()
            if time.monotonic() > deadline:
                return False
            if time.monotonic() > checked + 0.05:
                checked = time.monotonic()
                if not processes_of_starts():
                    return condition()
            time.sleep(pause_s)
        return True

    def kill(self, moment: Moment) -> None:
        """Send SIGKILL to what was drawn, as far as it is there."""
        ranks = self.ranks()
        victims = [self.launcher] if moment.target in ("launcher", "node") else []
        if moment.target in ("ranks", "node"):
            victims += ranks
        elif moment.target == "rank":
            victims += ranks[moment.rank :][:1]
        for pid in victims:
            for send in (os.killpg, os.kill) if moment.workers and pid in ranks else (os.kill,):
                try:
                    send(pid, signal.SIGKILL)
                    break
                except ProcessLookupError:
                    pass

    def said(self, streams: str = "std*") -> str:
        return "".join(
            path.read_text("utf-8", "replace") for path in sorted(self.folder.glob(streams))
        )

    def close(self) -> None:
        os.close(self.signals)
        shutil.rmtree(self.folder)


def exported(experiment: Path) -> set[str]:
    """Return the names of the published exports."""
    root = experiment / "export"
    return {name for name in os.listdir(root) if name.isdecimal()} if root.is_dir() else set()


def notify(sender: int, moment: Moment) -> Callable[[OsCall], None]:
    """Return a hook of a rank that reports the drawn call of a phase."""
    calls = 0

    def hook(call: OsCall) -> None:
        nonlocal calls
        calls += call.phase == moment.phase
        if calls == moment.count and call.phase == moment.phase:
            os.write(sender, b"x")
            time.sleep(moment.pause_s)

    return hook


def write_corpus(prefix: Path) -> None:
    """Write a data set that a run reads more than once."""
    generator = np.random.default_rng(0)
    write_documents(
        prefix, (generator.integers(0, 64, size=int(generator.integers(1, 40))) for _ in range(60))
    )


class Harness:
    """Runs that are killed again and again, and what is expected of them."""

    def __init__(
        self, folder: Path, seed: int, targets: Collection[str], iterations: int, torchrun: bool
    ) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.figures = Figures()
        self.torchrun = torchrun
        self.targets, self.iterations = targets, iterations
        write_corpus(folder / "corpus")
        self.references: dict[int, Path] = {}

    def command(self, experiment: Path, layout: int) -> list[str]:
        """Return the program and its flags."""
        return [
            *(
                str(PROGRAM),
                *TINY,
                f"--experiment_dir={experiment}",
                f"--data_path={self.folder / 'corpus'}",
            ),
            *f"--train_iters={self.iterations} --startup_timeout={STARTUP_TIMEOUT_S} --hidden_dropout=0.1".split(),
            *"--dataset_source=list --split=9,1,0 --checkpoint_interval=2 --max_checkpoints=2 --log_interval=3".split(),
            *"--validation_iters=1 --validation_interval=8 --export_interval=6".split(),
            *(f"--{name}={value}" for name, value in LAYOUTS[layout].items()),
        ]

    def _reference(self, layout: int) -> Path:
        """Return the run of this layout that nothing disturbs."""
        if layout in self.references:
            return self.references[layout]
        experiment = self.folder / f"reference_{layout}" / "run"
        experiment.parent.mkdir()
        cycle = Cycle(self.command(experiment, layout), experiment, None)
        self._finish(cycle)
        cycle.close()
        self.references[layout] = experiment
        return experiment

    def kill(self, kills: int) -> None:
        """Go on until so many kills have been made."""
        while self.figures.kills < kills:
            self._one_run(min(10, kills - self.figures.kills))

    def _one_run(self, most: int) -> None:
        """Kill one run up to `most` times, then let it finish."""
        layout, number = self.chance.randrange(len(LAYOUTS)), self.figures.runs
        self.figures.runs += 1
        experiment = self.folder / f"run_{number}" / "run"
        experiment.parent.mkdir()
        command, before = self.command(experiment, layout), len(self.figures.bad)
        reference = self._reference(layout)
        for _ in range(most):
            if not self._one_cycle(command, experiment):
                break
        else:
            cycle = Cycle(command, experiment, None)
            self._finish(cycle)
            cycle.close()
        try:
            assert_same_run(experiment, reference)
        except (AssertionError, OSError, ValueError, IndexError) as error:
            self.figures.different += 1
            self._bad(f"run {number} differs: {str(error)[:2000]}")
        self._check_one_writer(experiment)
        if len(self.figures.bad) == before:
            shutil.rmtree(experiment.parent)

    def _one_cycle(self, command: list[str], experiment: Path) -> bool:
        """Start and kill once; return False if the run was done before."""
        moment = draw(self.chance, self.targets, self.torchrun)
        expected = max(checkpoints(experiment), default=None)
        cycle = Cycle(command, experiment, moment, self.torchrun)
        met = cycle.wait_for(lambda: cycle.has_begun(moment), START_S)
        if met:
            time.sleep(moment.delay_s)
            cycle.look()
            cycle.kill(moment)
            killed_s = time.monotonic()
            self.figures.kills += 1
            self.figures.met[moment.phase, moment.target] += 1
            if moment.overlap:
                self._overlap(command, experiment)
        limit_s = NEVER_MET_S if moment.may_never_meet() else GONE_S
        self._gone(cycle, str(moment), limit_s if met else START_S)
        self._check(cycle, str(moment), expected)
        if (
            met
            and moment.target == "launcher"
            and not moment.overlap
            and cycle.latest_s > killed_s + ALONE_S
        ):
            self.figures.went_on += 1
            self._bad(
                f"{moment}: saved {cycle.latest_s - killed_s:.1f} s after its launcher was gone"
            )
        ended = not met and self._is_complete(experiment)
        if not met and not ended:
            self._bad(f"{moment}: ended before, and not as it should: {cycle.said()[-3000:]}")
        cycle.close()
        return met

    def _overlap(self, command: list[str], experiment: Path) -> None:
        """Start again while ranks without a launcher are still there: refused, or they write
        nothing any more."""
        second = Cycle(command, experiment, None)
        while any(pid in processes_of_starts() for pid in second.by_hand):
            second.look()
            time.sleep(0.01)
        while not second.codes.keys() >= {*second.by_hand}:
            second.look()
        codes = [second.codes.get(pid) for pid in second.by_hand]
        if IN_USE in second.said("stderr*"):
            self.figures.refused += 1
            if codes != [8] * RANKS:
                self._bad(f"a refused start ended with {codes}: {second.said()[-3000:]}")
        elif codes != [0] * RANKS:
            self._bad(f"a start beside an ending one ended with {codes}: {second.said()[-3000:]}")
        second.close()

    def _gone(self, cycle: Cycle, story: str, limit_s: float) -> None:
        """Wait until no process is left, and end those that are."""
        begun = time.monotonic()
        cycle.wait_for(lambda: False, limit_s, 0.005)
        if left := processes_of_starts():
            self.figures.orphans += len(left)
            said = [describe(pid) for pid in left]
            cycle.wait_for(lambda: False, GONE_S, 0.005)
            self._bad(
                f"{story}: left after {limit_s:g} s: {said}; after {time.monotonic() - begun:.1f} s: "
                f"{[describe(pid) for pid in processes_of_starts()]}: {cycle.said()[-3000:]}"
            )
            for pid in processes_of_starts():
                os.kill(pid, signal.SIGKILL)
            cycle.wait_for(lambda: False, GONE_S, 0.005)
        elif limit_s == GONE_S:  # not a start that ended by itself
            self.figures.gone_s.append(time.monotonic() - begun)
        while not cycle.codes.keys() >= {
            *cycle.by_hand
        }:  # a dead process can be a moment away from being reaped
            cycle.look()

    def _check(self, cycle: Cycle, story: str, expected: int | None) -> None:
        """Check what a start has left: all that was published is there or was replaced by newer,
        and whole."""
        published = checkpoints(cycle.experiment)
        if max(published, default=0) < max(cycle.published, default=0) or cycle.exported - exported(
            cycle.experiment
        ):
            self.figures.lost += 1
            self._bad(
                f"{story}: published {sorted(cycle.published)} {cycle.exported}, now {published}"
            )
        try:
            assert_all_good(cycle.experiment)
        except (AssertionError, OSError, ValueError) as error:
            self.figures.damaged += 1
            self._bad(f"{story}: a damaged checkpoint: {error}")
        said = cycle.said()
        resumed = re.search(r"^resumed from .* at iteration (\d+)", said, re.M)
        loaded = resumed is not None or "loss" in said
        if loaded and (int(resumed[1]) if resumed else None) != expected:
            self._bad(
                f"{story}: resumed from {resumed and resumed[0]}, not from {expected}: {said[-3000:]}"
            )
        codes = {cycle.codes.get(pid) for pid in cycle.by_hand} - {None, 0, -signal.SIGKILL}
        if (
            (not cycle.torchrun and "Traceback" in WORKER_WITHOUT_RANK.sub("", said))
            or "skipped, looking for an older" in said
            or codes - {6}
        ):
            self._bad(f"{story}: exit codes {cycle.codes}: {said[-3000:]}")

    def _finish(self, cycle: Cycle) -> None:
        """Let a start run to its end."""
        self._gone(cycle, "undisturbed", START_S)
        if [cycle.codes.get(pid) for pid in cycle.by_hand] != [0] * RANKS:
            self._bad(f"an undisturbed start ended with {cycle.codes}: {cycle.said()[-3000:]}")

    def _is_complete(self, experiment: Path) -> bool:
        return checkpoints(experiment)[-1:] == [self.iterations]

    def _check_one_writer(self, experiment: Path) -> None:
        """Check that no start wrote its metrics between those of a later one."""
        runs = [
            json.loads(line)["run"]
            for line in (experiment / "metrics.jsonl").read_bytes().splitlines()
        ]
        if runs != sorted(runs):
            self.figures.written_by_two += 1
            self._bad(f"{experiment}: metrics of starts {runs}")

    def _bad(self, story: str) -> None:
        self.figures.bad.append(story)
        print(f"BAD: {story}", flush=True)


def main() -> int:
    """Kill as told, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=24, help="of each run")
    parser.add_argument(
        "--keep", default=None, help="a folder for the runs, kept if anything is wrong"
    )
    parser.add_argument(
        "--targets", nargs="+", default=TARGETS, choices=TARGETS, help="what may be killed"
    )
    parser.add_argument("--torchrun", action="store_true", help="start with the real torchrun")
    arguments = parser.parse_args()
    # Imported here once; every rank is a fork of this process, which has one thread and has never
    # used torch.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import megatron_lite.train  # noqa: F401

    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="megatron_lite_kills_"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    harness = Harness(
        folder, arguments.seed, arguments.targets, arguments.iterations, arguments.torchrun
    )
    try:
        harness.kill(arguments.kills)
    finally:
        for line in harness.figures.lines(time.monotonic() - begun):
            print(line)
        if arguments.keep is None or not harness.figures.bad:
            shutil.rmtree(folder, ignore_errors=True)
    return int(bool(harness.figures.bad))


if __name__ == "__main__":
    sys.exit(main())
