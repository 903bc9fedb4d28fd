"""Signals and kills at random moments before the first iteration: exit.json, the exit codes and the
output must agree.

    python -m tests.faults.early_ends --starts=100 --seed=1

Each start gets one signal: one rank, all ranks, or torchrun. The moment is drawn relative to a
phase of the set-up, so that it means the same on a busy machine. Half of the starts find a
checkpoint, and all find the exit.json of an earlier start that was done.
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.run.experiment import newest_run
from tests.support.forked_ranks import ranks_of_torchrun
from tests.support.launch import TINY, Outcome, Start, read_exit, run

RENDEZVOUS = "in the rendezvous"
PHASES = (
    "",
    RENDEZVOUS,
    "in the preparation of the data",
    "in the choice of a checkpoint",
    "in the loading",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
STARTUP_TIMEOUT_S, ENDS_WITHIN_S = 20, 100.0
EARLIER = {
    "exit_code": 0,
    "status": "done",
    "message": "of an earlier start",
    "run": 0,
    "time": 1.0,
}
SAVED_AT = 2
OURS = re.compile(r'File "[^"]*(megatron_lite|pretrain_gpt)')
# A rank ended before it could tell the others, and no launcher ends them.
LATE = re.compile(r"missing: rank |lost rank 0, where the ranks meet")


@dataclass(frozen=True)
class Moment:
    """A signal to one start."""

    ranks: int
    how: str  # of `Start`
    resumes: bool  # whether there is a checkpoint
    number: signal.Signals
    target: int | None  # a rank; -1: torchrun; None: all ranks
    phase: str  # the message of exit.json after which the delay begins; empty: as soon as the ranks handle signals
    delay_s: float

    def __str__(self) -> str:
        target = {None: "all ranks", -1: "torchrun"}.get(self.target, f"rank {self.target}")
        checkpoint = "with" if self.resumes else "without"
        return (
            f"{self.number.name} to {target} of {self.ranks} ({self.how}, {checkpoint} a checkpoint) "
            f"{self.phase or 'in the imports'} + {self.delay_s * 1e3:.0f} ms"
        )


def draw(chance: random.Random, torchrun: float) -> Moment:
    """Draw a moment. torchrun: share of the starts under torchrun, which import torch and take
    seconds."""
    ranks, how = chance.randint(1, 3), "torchrun" if chance.random() < torchrun else "forked"
    targets = [None, chance.randrange(ranks), *([-1] if how == "torchrun" else [])]
    phase = chance.choice(PHASES)
    delay_s = chance.uniform(0.0, 0.2 if phase in ("", RENDEZVOUS) else 0.05)
    return Moment(
        ranks,
        how,
        chance.random() < 0.5,
        chance.choice(SIGNALS),
        chance.choice(targets),
        phase,
        delay_s,
    )


def command(experiment: Path, ranks: int) -> list[str]:
    """Return the flags of a run that never ends by itself."""
    flags = f"--experiment_dir={experiment} --batch_size=6 --startup_timeout={STARTUP_TIMEOUT_S} --checkpoint_interval=50"
    return [*TINY, *flags.split(), "--train_iters=1000000", f"--micro_batch_size={6 // ranks}"]


def prepare(folder: Path) -> Path:
    """Train a run to a checkpoint, from which starts of any number of ranks resume."""
    experiment = folder / "saved" / "run"
    outcome = run([*command(experiment, 1), f"--stop_interval={SAVED_AT}"])
    assert outcome.codes == [0], outcome.output
    return experiment


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) & (1 << (number - 1)))


def problems(moment: Moment, saved: Path, folder: Path) -> list[str]:
    """Make one start, signal it, and return what is wrong about its end."""
    experiment = folder / "run"
    shutil.rmtree(experiment, ignore_errors=True)
    if moment.resumes:
        shutil.copytree(saved, experiment)
    else:
        experiment.mkdir(parents=True)
    (experiment / "exit.json").write_text(json.dumps(EARLIER))
    before = newest_run(experiment)
    with Start(command(experiment, moment.ranks), moment.ranks, moment.how) as start:
        if not start.wait_until(lambda: _has_begun(moment, start, experiment), str(moment)):
            return [f"ended before: {start.wait().output[-2000:]}"]
        time.sleep(moment.delay_s)
        for pid in _targets(moment, start):
            os.kill(pid, moment.number)
        outcome = start.wait(ENDS_WITHIN_S)
        start.assert_nothing_left(10.0)
    return list(_wrong(moment, outcome, experiment, newest_run(experiment) != before))


def _ranks(moment: Moment, start: Start) -> list[int]:
    if moment.how == "torchrun":
        return ranks_of_torchrun(start.processes[0].pid)
    return [process.pid for process in start.processes]


def _targets(moment: Moment, start: Start) -> list[int]:
    if moment.target == -1:
        return [start.processes[0].pid]
    ranks = _ranks(moment, start)
    return ranks if moment.target is None else [ranks[moment.target]]


def _has_begun(moment: Moment, start: Start, experiment: Path) -> bool:
    ranks = _ranks(moment, start)
    # unlike torchrun
    if len(ranks) < moment.ranks or not all(catches(pid, signal.SIGUSR1) for pid in ranks):
        return False
    if not moment.phase:
        return True
    ended = read_exit(experiment)
    if ended["status"] == "starting":
        return PHASES.index(ended["message"]) >= PHASES.index(moment.phase)
    return str(ended["status"]) == "running"


def _owned(ended: dict[str, object]) -> bool:
    return ended["message"] != EARLIER["message"]


def _wrong(moment: Moment, outcome: Outcome, experiment: Path, is_owned: bool) -> Iterator[str]:
    ended, output = read_exit(experiment), outcome.output
    message, code = str(ended["message"]), ended["exit_code"]
    said = f"{outcome.codes}, {ended}, {output[-3000:]}"
    if (
        "frame #" in output
        or OURS.search(output)
        or (moment.how == "forked" and "Traceback" in output)
    ):
        yield f"a stack in the output: {said}"
    # between the folder of the start and exit.json
    at_once = moment.number == signal.SIGKILL and not moment.phase
    if is_owned and not _owned(ended) and not at_once:
        yield f"exit.json is of another start: {said}"
    if (ended["status"], code) not in (
        (("starting", None), ("running", None), ("failed", 6), ("stopped", 75), ("done", 0))
    ):
        yield f"the status and the code of exit.json: {said}"
    if "no checkpoint" in output + message:
        yield f"a false sentence about checkpoints: {said}"
    if (
        "nothing to save" in message
        and "in the start" not in message  # the directory is not known yet
        and (f"iteration {SAVED_AT} (" if moment.resumes else "starts again") not in message
    ):
        yield f"how the run goes on: {said}"
    torchrun_died = moment.target == -1 and moment.number in (signal.SIGUSR1, signal.SIGKILL)
    if moment.number == signal.SIGKILL or torchrun_died:
        allowed = ("starting", "running", "failed", "done", "stopped")
        codes = {6, 75, -signal.SIGKILL}
    else:
        allowed, codes = ("stopped", "done"), {75}
    if moment.how == "forked" and moment.target is not None and LATE.search(output):
        allowed, codes = (*allowed, "failed"), codes | {6}
    if ended["status"] not in allowed:
        yield f"the status: {said}"
    if moment.how == "forked" and {*outcome.codes} - codes:
        yield f"exit codes: {said}"
    if moment.how == "torchrun" and 0 in outcome.codes:
        yield f"torchrun's exit code: {said}"


def main() -> int:
    """Make the starts, print what is wrong and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--torchrun", type=float, default=0.15, help="share of the starts under torchrun"
    )
    arguments = parser.parse_args()
    chance, begun = random.Random(arguments.seed), time.monotonic()
    met: collections.Counter[str] = collections.Counter()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="megatron_lite_early_") as name:
        folder = Path(name)
        saved = prepare(folder)
        for number in range(arguments.starts):
            moment = draw(chance, arguments.torchrun)
            found = problems(moment, saved, folder)
            ended = read_exit(folder / "run")
            met[f"{ended['status']} {ended['exit_code']}"] += 1
            bad += bool(found)
            for problem in found:
                print(f"BAD {number}: {moment}: {problem}", flush=True)
    print(
        f"{arguments.starts} starts in {time.monotonic() - begun:.0f} s, {dict(met)}: {bad} bad outcomes"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
