"""Every call that changes the disk during a save, a deletion and an export fails once, on each of
two ranks.

The run resumes from its first checkpoint, makes one more iteration, saves it, deletes the first
checkpoint and exports. In place of one of those calls comes SIGKILL, a full disk or an I/O error.
Whatever the call: published checkpoints stay whole, an error is one line with path and reason and
exit code 8, and the next start ends with the bits of a run without a fault.
"""

import collections
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launch import PROGRAM, STARTED, Fault, Outcome, run, succeed
from tests.support.results import assert_all_good, assert_same_run, checkpoints

RANKS = 2
KINDS = {"kill": None, "full": errno.ENOSPC, "broken": errno.EIO, "full from then on": errno.ENOSPC}
WAYS = {
    "in place": {},
    "in the background": {"async_checkpoint": 1, "train_iters": 3, "export_interval": 3},
}
SOME = {("kill", 0): 72, ("full", 0): 40, ("broken", 1): 9, ("full from then on", 1): 4}
CHANGES = "open openat creat mkdir mkdirat write writev pwrite64 pwritev copy_file_range sendfile ftruncate truncate \
fallocate fsync fdatasync rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat rmdir"
NAMES = {
    "openat": "open",
    "mkdirat": "mkdir",
    "pwrite64": "pwrite",
    "renameat": "rename",
    "renameat2": "rename",
    "unlinkat": "unlink",
}


def flags(experiment: Path, **more: object) -> list[str]:
    values = {
        **STARTED,
        "experiment_dir": experiment,
        "train_iters": 2,
        "checkpoint_interval": 1,
        "max_checkpoints": 1,
        "export_interval": 2,
        **more,
    }
    return [f"--{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class Case:
    """A run that has stopped after its first iteration, and the same run, finished without a
    fault."""

    begun: Path
    reference: Path
    options: dict[str, object]

    @property
    def last(self) -> int:
        return int(str(self.options.get("train_iters", 2)))


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run that saves as one of WAYS says; in place by default."""
    options: dict[str, object] = WAYS[getattr(request, "param", "in place")]
    begun = tmp_path_factory.mktemp("begun") / "run"
    succeed(flags(begun, stop_interval=1, **options), RANKS)
    assert checkpoints(begun) == [1]
    reference = begun.with_name("reference")
    shutil.copytree(begun, reference)
    succeed(flags(reference, **options), RANKS)
    case = Case(begun, reference, options)
    assert checkpoints(reference) == [case.last] and os.listdir(reference / "export") == [
        str(case.last)
    ]
    return case


def assert_one_clear_line(outcome: Outcome, kind: str, call: str, experiment: Path) -> None:
    """Check how a start with a fault has ended. 0: a deletion that fails is a warning."""
    assert "Traceback" not in outcome.output, outcome.output
    errors = [line for line in outcome.error_lines() if line.startswith("ERROR")]
    assert len(errors) <= 1, outcome.stderrs
    if kind == "kill":
        assert set(outcome.codes) in ({-signal.SIGKILL, 6}, {-signal.SIGKILL, 0}), (
            outcome.codes,
            outcome.output,
        )
        return
    assert outcome.codes in ([0, 0], [8, 8]), (outcome.codes, outcome.output)
    assert (outcome.codes == [8, 8]) == bool(errors), outcome.output
    reason = os.strerror(KINDS[kind] or 0)
    if call == f"mkdir {experiment}/checkpoints":  # which exists
        return
    said = [
        line
        for line in outcome.output.splitlines()
        if re.search(rf"{experiment}/\S+: .*{reason}", line)
    ]
    assert said, f"no line names path and reason\n{outcome.output}"


def survives(kind: str, rank: int, call: int, case: Case, folder: Path) -> bool:
    """Run with one fault, then without; return False if the rank makes fewer calls."""
    experiment, fired = folder / "run", str(folder / "fired")
    shutil.copytree(case.begun, experiment)
    lasts = kind == "full from then on"
    faults = {
        other: Fault(call * (other == rank), KINDS[kind], fired, lasts) for other in range(RANKS)
    }
    outcome = run(flags(experiment, **case.options), RANKS, faults=faults)
    if not os.path.exists(fired):
        assert outcome.codes == [0, 0], outcome.output
        return False
    assert_one_clear_line(outcome, kind, Path(fired).read_text("utf-8"), experiment)
    assert checkpoints(experiment)
    assert_all_good(experiment)
    newest = checkpoints(experiment)[-1]
    again = run(flags(experiment, **case.options), RANKS)
    assert again.codes == [0, 0], again.output
    assert f"resumed from {experiment}/checkpoints/{newest} at" in again.stdouts[0], again.output
    assert_all_good(experiment)
    assert_same_run(experiment, case.reference)
    left = [
        path
        for path in (experiment / "checkpoints").iterdir()
        if path.name.startswith((".tmp", ".ready"))
    ]
    assert not left
    return True


@pytest.mark.parametrize("kind, rank", SOME, ids=str)
def test_a_fault_in_some_calls(kind: str, rank: int, case: Case, tmp_path: Path) -> None:
    """One call of each kind; with -m slow, all of them."""
    assert survives(kind, rank, SOME[kind, rank], case, tmp_path), (
        f"fewer than {SOME[kind, rank]} calls"
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", WAYS, indirect=True)
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_every_call(kind: str, rank: int, case: Case, tmp_path: Path) -> None:
    """Each call in turn, until the run makes no more."""
    call, bad = 1, []
    while True:
        folder = tmp_path / str(call)
        folder.mkdir()
        try:
            if not survives(kind, rank, call, case, folder):
                break
        except AssertionError as error:
            bad.append(f"call {call}: {error}")
            print(bad[-1])
        shutil.rmtree(folder)
        call += 1
    print(f"{call - 1} calls: {len(bad)} bad outcomes")
    assert not bad, f"{len(bad)} of {call - 1} calls:\n" + "\n".join(bad)
    assert call - 1 > (60 if rank == 0 else 10)


@pytest.mark.slow
def test_no_call_is_missed(case: Case, tmp_path: Path) -> None:
    """The calls where these tests let something fail are all that the kernel sees."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    seen, traced = tmp_path / "seen", tmp_path / "traced"
    for experiment in (seen, traced):
        shutil.copytree(case.begun, experiment)
    log, calls = tmp_path / "calls", tmp_path / "strace"
    succeed(flags(seen), faults={0: Fault(0, None, str(log), records=True)})
    known = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    words = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-s",
        "0",
        "-o",
        str(calls),
        "-e",
        f"trace={','.join(CHANGES.split())}",
    ]
    subprocess.run(
        [*words, sys.executable, str(PROGRAM), *flags(traced)],
        env=known,
        check=True,
        capture_output=True,
    )
    ours = collections.Counter(_general(line) for line in log.read_text("utf-8").splitlines())
    kernels = collections.Counter(
        filter(None, map(_traced, calls.read_text("utf-8", "replace").splitlines()))
    )
    assert ours == kernels


def _general(call: str) -> str:
    """Leave out of a call whatever differs between two runs."""
    name, _, path = call.partition(" ")
    short = re.search(r"/(checkpoints|export)(/.*)?$", path)
    assert short, call
    return f"{name} {re.sub(r'[0-9a-f]{16}', '<nonce>', short[0])}"


def _traced(line: str) -> str | None:
    """Return a line of strace in the words of `os`; None for one outside of checkpoints/ and
    export/."""
    found = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
    if found is None or not re.search(r"/traced/(checkpoints|export)\b", found[2]):
        return None
    name, arguments = NAMES.get(found[1], found[1]), found[2]
    if name == "open" and not re.search(r"O_WRONLY|O_RDWR|O_CREAT", arguments):
        return None
    if name == "unlink" and "AT_REMOVEDIR" in arguments:
        name = "rmdir"
    folder = re.match(r"(?:\d+|AT_FDCWD)<(.*?)>", arguments)
    path = re.search(r'"(.*?)"', arguments)
    if path is None or not path[1]:  # the data of a write, of which strace shows nothing
        assert folder, line
        return _general(f"{name} {folder[1]}")
    base = folder[1] if folder and not path[1].startswith("/") else ""
    return _general(f"{name} {os.path.join(base, path[1])}")
