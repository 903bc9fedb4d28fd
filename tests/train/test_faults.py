"""Faults outside of the program end in one clear line, the right exit code, and nothing lost.

Exit codes: 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 a lost peer, 8 storage; `exit.json` repeats
them.
"""

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_lite.checkpoint import blocks, manifest
from megatron_lite.distributed import peer_watch
from megatron_lite.distributed.peer_watch import MeetingPoint, connect
from tests.support.launch import (
    TINY,
    Outcome,
    Start,
    command_line,
    free_port,
    is_loopback,
    listening,
    read_exit,
    run,
    succeed,
    trains,
)
from tests.support.metrics import read_metrics
from tests.support.results import digests
from tests.support.token_files import overwrite, write_documents

RANKS = 2
CANARY = "a5ecretc0deca5ecretc0deca5ecretc0deca5ec"


def assert_one_error(
    outcome: Outcome, *facts: str, codes: Sequence[int], experiment: Path | None = None
) -> str:
    """Check the exit codes, and one message with these facts and no library output; `exit.json`
    agrees.

    codes: the first is the run's, and at least one rank exits with it; other ranks may only lose
    their peer.
    """
    assert codes[0] in outcome.codes and set(outcome.codes) <= set(codes), (
        outcome.codes,
        outcome.output,
    )
    lines = outcome.error_lines()
    assert [line for line in lines if line.startswith("ERROR")] == lines[:1], outcome.stderrs
    message = "\n".join(lines)
    for fact in facts:
        assert fact in message, (fact, message)
    assert "Traceback" not in outcome.output, outcome.output
    if experiment is not None:
        ended = read_exit(experiment)
        assert (ended["exit_code"], ended["status"]) == (codes[0], "failed"), ended
        assert ended["message"] in message, (ended, message)
    return message


def wait_for_metrics(start: Start, experiment: Path) -> None:
    """Wait until the run has logged an iteration."""
    path = experiment / "metrics.jsonl"
    assert start.wait_until(
        lambda: path.exists() and path.stat().st_size > 0, "the first line of metrics.jsonl"
    )


# -- data
# -----------------------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes, or drop the last `-size`."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


# The parts that find damaged data and checkpoints have tests for every kind of damage: tests/data,
# tests/checkpoint.
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "index cut in half": (
        lambda prefix: cut(
            prefix.with_suffix(".idx"), prefix.with_suffix(".idx").stat().st_size // 2
        ),
        (".idx: ", "bytes, but its header describes"),
    ),
    "missing tokens": (lambda prefix: prefix.with_suffix(".bin").unlink(), (".bin",)),
    "shorter than a sample": (
        lambda prefix: write_documents(prefix, [[1, 2, 3, 4]] * 4),
        (".bin: 16 tokens for training", "one sample needs 17"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data(tmp_path: Path, damage: str) -> None:
    """Exit 3 before any training, one line that names the file and the fact, printed once for two
    ranks."""
    prefix, experiment = tmp_path / "corpus", tmp_path / "run"
    write_documents(prefix, [[index % 64 for index in range(100)]] * 10)
    change, facts = DAMAGE[damage]
    change(prefix)
    before = digests(tmp_path)
    outcome = run(train_on(prefix, experiment), RANKS)
    message = assert_one_error(outcome, str(prefix), *facts, codes=[3], experiment=experiment)
    assert "\n" not in message
    assert {name: digest for name, digest in digests(tmp_path).items() if name in before} == before
    assert not (experiment / "checkpoints").exists()


def corpus_with(prefix: Path, tokens: dict[tuple[int, int], int] | None = None) -> None:
    """Write ten documents of 100 tokens below 64, with exceptions by (document, offset)."""
    documents = [[(7 * index) % 64 for index in range(100)] for _ in range(10)]
    for (document, offset), token in (tokens or {}).items():
        documents[document][offset] = token
    write_documents(prefix, documents)


def train_on(prefix: Path, experiment: Path, *more: str) -> list[str]:
    data = ("--dataset_source=list", f"--data_path={prefix}", "--split=1")
    return [*TINY, *data, f"--experiment_dir={experiment}", *more]


@pytest.mark.parametrize(
    "bad, num_workers",
    [
        ("one token", 2),
        pytest.param("one token", 0, marks=pytest.mark.slow),
        pytest.param("every token", 1, marks=pytest.mark.slow),
    ],
)
def test_token_outside_of_the_vocabulary(tmp_path: Path, bad: str, num_workers: int) -> None:
    """The message names file, document, offset and id once; earlier checkpoints are untouched."""
    prefix, experiment = tmp_path / "corpus", tmp_path / "run"
    corpus_with(prefix)
    more = (f"--num_workers={num_workers}", "--checkpoint_interval=2", "--allow_data_change=1")
    command = train_on(prefix, experiment, *more)
    succeed([*command, "--train_iters=2"], RANKS)
    before = digests(experiment / "checkpoints" / "2")
    if bad == "one token":
        corpus_with(prefix, {(6, 41): 64})
        where = "document 6, offset 41: token id 64 is outside the vocabulary of 64"
    else:
        write_documents(prefix, [[65000] * 100] * 10)
        where = "token id 65000 is outside the vocabulary of 64"
    outcome = run([*command, "--train_iters=50"], RANKS)
    message = assert_one_error(
        outcome, f"{prefix}.bin: document", where, codes=[3, 6], experiment=experiment
    )
    assert "\n" not in message
    assert digests(experiment / "checkpoints" / "2") == before
    corpus_with(prefix)
    succeed([*command, "--train_iters=6"], RANKS)


def test_token_outside_of_the_vocabulary_in_a_part_that_is_not_read(tmp_path: Path) -> None:
    """The search in the background ends the run, which would have read this document days later."""
    corpus_with(tmp_path / "corpus", {(9, 41): 64})
    outcome = run(
        train_on(tmp_path / "corpus", tmp_path / "run", "--split=9,1", "--train_iters=1000000")
    )
    where = "corpus.bin: document 9, offset 41: token id 64 is outside the vocabulary of 64"
    assert_one_error(outcome, where, codes=[3], experiment=tmp_path / "run")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (lambda path: cut(path, 200), ".bin: 200 bytes, but it had "),
    "overwritten": (overwrite, ".bin: it holds other data than when the run began"),
    "deleted": (Path.unlink, ".bin: is gone"),
}


@pytest.mark.parametrize(
    "change",
    [
        "cut short",
        *(pytest.param(change, marks=pytest.mark.slow) for change in ("overwritten", "deleted")),
    ],
)
def test_data_changed_during_a_run(tmp_path: Path, change: str) -> None:
    """A .bin that shrinks, changes or goes while it is read is a data error, not a SIGBUS."""
    prefix, experiment = tmp_path / "corpus", tmp_path / "run"
    corpus_with(prefix)
    with Start(
        train_on(prefix, experiment, "--train_iters=100000", "--num_workers=1"), RANKS
    ) as start:
        wait_for_metrics(start, experiment)
        act, fact = CHANGES[change]
        act(prefix.with_suffix(".bin"))
        outcome = start.wait(30)
        start.assert_nothing_left()
    assert_one_error(outcome, f"{prefix}{fact}", codes=[3, 6], experiment=experiment)


def test_killed_data_worker(tmp_path: Path) -> None:
    """A data worker killed by the system ends the run with one line about it, saved, and no process
    is left."""
    prefix, experiment = tmp_path / "corpus", tmp_path / "run"
    corpus_with(prefix)
    flags = ("--checkpoint_interval=100000", "--num_workers=2")
    with Start(train_on(prefix, experiment, "--train_iters=100000", *flags), RANKS) as start:
        wait_for_metrics(start, experiment)
        worker = [pid for pid in start.left_over() if "spawn_main" in command_line(pid)][1]
        os.kill(worker, signal.SIGKILL)
        outcome = start.wait(30)
        start.assert_nothing_left()
    assert_one_error(outcome, "data worker", "killed by SIGKILL", codes=[6], experiment=experiment)
    (saved,) = os.listdir(experiment / "checkpoints")
    goes_on = succeed(
        train_on(prefix, experiment, f"--train_iters={int(saved) + 1}", *flags), RANKS
    )
    assert f"resumed from {experiment}/checkpoints/{saved}" in goes_on.output


# -- checkpoints
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete a run of 6 iterations on two ranks, with checkpoints 2, 4 and 6."""
    experiment = tmp_path_factory.mktemp("trained") / "run"
    succeed(train(experiment), RANKS)
    assert sorted(os.listdir(experiment / "checkpoints")) == ["2", "4", "6"]
    return experiment


def train(experiment: Path, *more: str) -> list[str]:
    return [*TINY, f"--experiment_dir={experiment}", "--checkpoint_interval=2", *more]


def copy(trained: Path, tmp_path: Path, *iterations: int) -> Path:
    """Copy the run with only these checkpoints."""
    experiment = tmp_path / "copy"
    shutil.copytree(trained, experiment)
    for folder in (experiment / "checkpoints").iterdir():
        if int(folder.name) not in iterations:
            shutil.rmtree(folder)
    return experiment


def flip(path: Path, offset: int) -> None:
    """Flip one bit; a negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


WRECK: dict[str, Callable[[Path], None]] = {
    "bit of a weight": lambda folder: flip(folder / "rank_001.safetensors", -1000),
    "short shard": lambda folder: cut(folder / "rank_001.safetensors", -1),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize(
    "wreck", [*list(WRECK)[:2], pytest.param("missing manifest", marks=pytest.mark.slow)]
)
def test_only_checkpoint_damaged(trained: Path, tmp_path: Path, wreck: str) -> None:
    """Exit 4, the file is named, no file is touched, and training does not restart from zero."""
    experiment = copy(trained, tmp_path, 4)
    folder = experiment / "checkpoints" / "4"
    WRECK[wreck](folder)
    before = digests(experiment / "checkpoints")
    metrics = (experiment / "metrics.jsonl").read_bytes()
    outcome = run(train(experiment, "--zero_stage=3"), RANKS)
    named = "manifest.json" if "manifest" in wreck else "rank_"
    message = assert_one_error(
        outcome,
        "no usable checkpoint",
        "nothing was changed",
        f"{folder}: {named}",
        codes=[4],
        experiment=experiment,
    )
    assert len(message.splitlines()) == 2, message
    assert digests(experiment / "checkpoints") == before
    assert (experiment / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    "wreck", ["bit of a weight", pytest.param("missing manifest", marks=pytest.mark.slow)]
)
def test_older_checkpoint_is_used(trained: Path, tmp_path: Path, wreck: str) -> None:
    """A damaged checkpoint is named and skipped; the run resumes from the older one to the same
    weights."""
    experiment = copy(trained, tmp_path, 2, 4)
    folder = experiment / "checkpoints" / "4"
    WRECK[wreck](folder)
    outcome = succeed(train(experiment), RANKS)
    assert not outcome.error_lines()
    (skipped,) = [
        line
        for line in outcome.stdouts[0].splitlines()
        if "skipped" in line and "checkpoint" in line
    ]
    assert skipped.startswith(f"WARNING: checkpoint {folder}: "), skipped
    assert f"resumed from {experiment}/checkpoints/2 at iteration 2" in outcome.stdouts[0]
    for name in ("rank_000.safetensors", "rank_001.safetensors"):
        saved, expected = (root / "checkpoints" / "6" for root in (experiment, trained))
        assert manifest.read(saved).parameters == manifest.read(expected).parameters
        assert tensor_bytes(saved / name) == tensor_bytes(expected / name)


def tensor_bytes(path: Path) -> bytes:
    """Return a safetensors file without its header, which names the save."""
    content = path.read_bytes()
    return content[8 + struct.unpack("<Q", content[:8])[0] :]


def test_changed_architecture(trained: Path, tmp_path: Path) -> None:
    """Exit 4 with all flags that differ and both values; the checkpoints are untouched."""
    experiment = copy(trained, tmp_path, 4, 6)
    before = digests(experiment / "checkpoints")
    changed = train(
        experiment, "--hidden_size=64", "--num_layers=3", "--tie_word_embeddings=0", "--lr=0.5"
    )
    outcome = run(changed, RANKS)
    message = assert_one_error(
        outcome,
        "--num_layers: 2 in the checkpoint, 3 now",
        "--hidden_size: 32 in the checkpoint, 64 now",
        "--tie_word_embeddings: 1 in the checkpoint, 0 now",
        "another --experiment_dir",
        codes=[4],
        experiment=experiment,
    )
    assert "--lr" not in message
    assert digests(experiment / "checkpoints") == before


# -- storage
# --------------------------------------------------------------------------------------------------------


@pytest.fixture
def namespace() -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own mount namespace; no other process sees its mounts."""
    tools = ("unshare", "nsenter", "mount")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    holder = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            "echo ready; exec sleep 600",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"ready\n":
            pytest.skip("this user may not make a mount namespace (unshare --mount)")
        yield holder
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def mount(namespace: subprocess.Popen[bytes], *arguments: str) -> None:
    """`mount` inside a namespace."""
    enter = ["nsenter", f"--mount=/proc/{namespace.pid}/ns/mnt"]
    done = subprocess.run([*enter, "mount", *arguments], capture_output=True)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.decode().strip()}")


def seen_by(namespace: subprocess.Popen[bytes], path: Path) -> Path:
    """Return a path inside the namespace as this process can read it."""
    return Path(f"/proc/{namespace.pid}/root{path}")


UNUSABLE = {
    "file": "choose a writable directory",
    "file/run": "choose a writable directory",
    "/proc/run": "choose a writable directory",
    "with_checkpoints": "with_checkpoints/checkpoints is not a directory",  # noticed now, not at the first save
    "with_export": "with_export/export is not a directory",
    "~nobody_of_that_name/run": "give an absolute path",
}


@pytest.mark.parametrize("place", UNUSABLE)
def test_experiment_directory_that_cannot_be(tmp_path: Path, place: str) -> None:
    """On top of a file, below one, in /proc, with a file where a folder belongs, of an unknown
    user: exit 8 with --experiment_dir and its value before any training, once for two ranks."""
    (tmp_path / "file").write_text("mine")
    for name in ("checkpoints", "export"):
        (tmp_path / f"with_{name}").mkdir()
        (tmp_path / f"with_{name}" / name).touch()
    path = Path(place) if place.startswith("~") else tmp_path / place
    outcome = run([*TINY, f"--experiment_dir={path}"], RANKS)
    message = assert_one_error(outcome, f"--experiment_dir={path}: ", UNUSABLE[place], codes=[8])
    assert "\n" not in message
    assert (tmp_path / "file").read_text() == "mine"


def test_read_only_experiment_directory(
    tmp_path: Path, namespace: subprocess.Popen[bytes], trained: Path
) -> None:
    """Exit 8 on a file system that is read-only, for a new run and for one that could be
    resumed."""
    shutil.copytree(trained, tmp_path / "old")
    mount(namespace, "--bind", str(tmp_path), str(tmp_path))
    mount(namespace, "-o", "remount,bind,ro", str(tmp_path))
    for name in ("new", "old"):
        path = tmp_path / name
        outcome = run(train(path), RANKS, mounts_of=namespace.pid)
        message = assert_one_error(outcome, f"{path}", "Read-only file system", codes=[8])
        assert ("exit.json, which tells how an earlier start ended" in message) == (name == "old")


def test_full_disk_during_a_save(tmp_path: Path, namespace: subprocess.Popen[bytes]) -> None:
    """Exit 8 with the bytes needed and free; older checkpoints are intact, nothing half written
    stays; with room made the same command finishes."""
    mount(namespace, "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(tmp_path))
    experiment = tmp_path / "run"
    outcome = run(train(experiment, "--train_iters=8"), RANKS, mounts_of=namespace.pid)
    seen = seen_by(namespace, experiment)
    message = assert_one_error(
        outcome,
        "cannot save the checkpoint of iteration 6",
        "No space left on device",
        "bytes needed",
        "bytes free",
        codes=[8],
        experiment=seen,
    )
    assert "\n" not in message
    assert sorted(os.listdir(seen / "checkpoints")) == ["2", "4"]
    for iteration in (2, 4):
        folder = seen / "checkpoints" / str(iteration)
        content = manifest.read(folder)
        for name, file in content.files.items():
            blocks.check_blocks(folder, name, file)
    mount(namespace, "-o", "remount,size=100m", str(tmp_path))
    outcome = succeed(train(experiment, "--train_iters=8"), RANKS, mounts_of=namespace.pid)
    assert "resumed from" in outcome.stdouts[0]
    assert {record["iteration"] for record in read_metrics(seen / "metrics.jsonl")} == set(
        range(1, 9)
    )


def test_full_disk_from_the_start(tmp_path: Path, namespace: subprocess.Popen[bytes]) -> None:
    """A full disk: exit 8, one line, no traceback."""
    mount(namespace, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path))
    seen_by(namespace, tmp_path / "filler").write_bytes(b"x" * 65536)
    outcome = run(train(tmp_path / "run"), RANKS, mounts_of=namespace.pid)
    assert_one_error(outcome, "No space left on device", codes=[8])


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    """A second run exits with 8 and leaves the first alone; once the first is dead, even killed, a
    third starts."""
    experiment = tmp_path / "run"
    command = train(
        experiment, "--train_iters=100000", "--checkpoint_interval=100000", "--log_interval=10"
    )
    with Start(command, RANKS) as first:
        assert first.wait_until(lambda: trains(experiment), "the first iteration")
        before = read_exit(experiment), (experiment / "config.json").read_text()
        assert before[0]["status"] == "running"
        outcome = run([*command, "--lr=1"], RANKS)
        assert_one_error(
            outcome, f"--experiment_dir={experiment}", "another run is using it", codes=[8]
        )
        assert first.running()
        assert (read_exit(experiment), (experiment / "config.json").read_text()) == before, (
            "the first run's files"
        )
        first.signal(signal.SIGKILL)
        first.wait()
    succeed(train(experiment), RANKS)


# -- processes
# ------------------------------------------------------------------------------------------------------


def endless(experiment: Path, *more: str) -> list[str]:
    return train(experiment, "--train_iters=1000000", "--checkpoint_interval=1000000", *more)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_rank(tmp_path: Path, victim: int) -> None:
    """The other rank names the lost one, its process and host, the likely cause, and the checkpoint
    that the same command resumes from, and ends with exit 6 within seconds; so does exit.json, with
    gloo's words apart."""
    experiment = tmp_path / "run"
    with Start(
        [*endless(experiment), "--checkpoint_interval=3", "--max_checkpoints=1"], RANKS
    ) as start:
        wait_for_metrics(start, experiment)
        checkpoints = experiment / "checkpoints"
        assert start.wait_until((checkpoints / "3").exists, "a checkpoint")
        start.signal(signal.SIGKILL, victim)
        begun = time.monotonic()
        outcome = start.wait(30)
        seconds = time.monotonic() - begun
        start.assert_nothing_left()
    assert outcome.codes[victim] == -signal.SIGKILL
    assert outcome.codes[1 - victim] == 6, outcome.output
    assert seconds < 10, seconds
    cause, resumes = outcome.error_lines()
    place = f"rank {victim} (process {start.processes[victim].pid} on {socket.gethostname()})"
    assert cause.startswith(
        f"ERROR{' on rank 1' if victim == 0 else ''}: lost {place} while this rank was in "
    ), cause
    assert re.search(r" in the (step|wait for data|save), iteration [0-9]+\. ", cause), cause
    assert "SIGKILL" in cause and "out-of-memory" in cause and "dmesg" in cause
    (newest,) = checkpoints.iterdir()
    expected = (
        f"  the same command resumes from the newest checkpoint, iteration {newest.name} ({newest})"
    )
    assert resumes == expected
    assert "gloo" not in outcome.output and "GLHF" not in outcome.output
    ended = read_exit(experiment)
    assert (
        ended["exit_code"] == 6
        and cause.endswith(ended["message"].splitlines()[0])
        and "gloo" in ended["detail"]
    )


def test_rank_that_hangs(tmp_path: Path) -> None:
    """A rank that stops answering ends the run after the collective's time-out. One that was
    stopped is named, with what it was doing, and killed: torchrun would wait 30 s for its end. The
    others leave stacks and collectives."""
    experiment = tmp_path / "run"
    with Start(
        endless(experiment, "--distributed_timeout=2", "--startup_timeout=4"), RANKS
    ) as start:
        wait_for_metrics(start, experiment)
        time.sleep(1.3 * peer_watch.LOOK_S)  # rank 1 says from time to time what it is doing
        start.signal(signal.SIGSTOP, 1)
        assert start.wait_until(
            lambda: start.processes[0].wait(0) is not None, "the end of rank 0", 20
        )
        assert start.processes[0].wait(0) == 6
        assert read_exit(experiment)["exit_code"] == 6
        outcome = start.wait(5)
        assert outcome.codes == [6, -signal.SIGKILL]
        cause, resumes = outcome.error_lines()
        assert cause.startswith(
            f"ERROR: no answer from rank 1 (process {start.processes[1].pid} on "
        ), cause
        doing = r"stopped by a signal \(SIGSTOP\) or a debugger in the [a-z ]+, iteration \d+, after collective [\d,]+ "
        assert re.search(doing, cause), cause
        assert resumes.endswith("the same command starts again")
    stacks = (experiment / "runs" / "0" / "artifacts" / "stacks_rank_000.txt").read_text()
    assert (
        "most recent call first" in stacks
        and "after a time-out" in stacks
        and " agreement, " in stacks
    )


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_dies_while_the_ranks_meet(tmp_path: Path, victim: int) -> None:
    """Two of three ranks have come; one dies, perhaps the one that keeps the meeting point. The
    other says so within seconds and does not wait for the third one, which may come in an hour
    (--startup_timeout)."""
    port = free_port()
    place = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    places = [{**place, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    experiment = tmp_path / "run"
    flags = [*TINY, f"--experiment_dir={experiment}", "--batch_size=3"]
    starts = [Start(flags, variables=variables) for variables in places]
    with starts[0], starts[1]:
        store = connect(
            MeetingPoint("localhost", port, hosted=True, prefix="megatron_lite/0"), 3, 30
        )
        assert starts[0].wait_until(lambda: store.add("came", 0) == 2, "two ranks")
        starts[victim].signal(signal.SIGKILL)
        outcome = starts[1 - victim].wait(10)
    lost = (
        "lost rank 0, where the ranks meet"
        if victim == 0
        else f"lost rank 1 (process {starts[1].processes[0].pid} "
    )
    assert_one_error(outcome, lost, codes=[6], experiment=experiment)


@pytest.mark.parametrize("missing", [0, 2])
def test_rank_that_never_comes(tmp_path: Path, missing: int) -> None:
    """All others name it after --startup_timeout, also if it keeps the meeting point; so does
    exit.json."""
    place = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    experiment = tmp_path / "run"
    flags = [*TINY, f"--experiment_dir={experiment}", "--batch_size=6", "--startup_timeout=1"]
    come = [str(rank) for rank in range(3) if rank != missing]
    starts = [Start(flags, variables={**place, "RANK": rank, "LOCAL_RANK": rank}) for rank in come]
    with starts[0], starts[1]:
        outcomes = [start.wait(30) for start in starts]
    message = str(read_exit(experiment)["message"])
    met = "nobody answered at localhost:" if missing == 0 else "2 of 3 ranks met at localhost:"
    assert (
        message.startswith(met)
        and "within --startup_timeout=1 s" in message
        and f"missing: rank {missing}." in message
    )
    for outcome in outcomes:
        assert (
            outcome.codes == [6]
            and "lost rank" not in outcome.output
            and "Traceback" not in outcome.output
        )
        assert all(message in line for line in outcome.error_lines()), outcome.stderrs


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_end_while_the_ranks_meet(tmp_path: Path, number: signal.Signals) -> None:
    """A start that waits for another rank has left the phase in exit.json, in place of the end of
    the start before; a signal ends it with 75."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    experiment = tmp_path / "run"
    experiment.mkdir()
    (experiment / "exit.json").write_text(
        '{"exit_code": 0, "status": "done", "message": "", "run": 0}'
    )
    variables = {**place, "MASTER_PORT": str(free_port())}
    with Start([*TINY, f"--experiment_dir={experiment}"], variables=variables) as start:
        assert start.wait_until(
            lambda: read_exit(experiment)["status"] == "starting", "the rendezvous"
        )
        starting = read_exit(experiment)
        assert (starting["exit_code"], starting["message"], starting["run"]) == (
            None,
            "in the rendezvous",
            0,
        )
        start.signal(number)
        outcome = start.wait(30)
    ended = read_exit(experiment)
    if number == signal.SIGKILL:
        assert outcome.codes == [-signal.SIGKILL] and ended == starting
        return
    assert outcome.codes == [75] and outcome.output == f"{ended['message']}\n"
    assert (ended["exit_code"], ended["status"]) == (75, "stopped")
    assert (
        ended["message"]
        == "stopped by SIGTERM in the rendezvous: nothing to save; the same command starts again"
    )


def test_a_launcher_variable_without_a_value() -> None:
    """Empty is unset."""
    empty = dict.fromkeys(
        ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"), ""
    )
    succeed([*TINY, "--train_iters=1"], variables=empty)


def test_port_in_use() -> None:
    """A MASTER_PORT in use is named; no message claims that a rank has died."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        outcome = run([*TINY, "--startup_timeout=1"], variables=place, timeout_s=30)
    assert outcome.codes[0] in (2, 6)
    message = assert_one_error(outcome, port, codes=outcome.codes)
    assert "died" not in message, message


# -- usage and secrets
# ----------------------------------------------------------------------------------------------


def test_no_gpu(tmp_path: Path) -> None:
    """--device=cuda on a machine without a GPU: exit 2, printed once."""
    outcome = run([*TINY, "--device=cuda", f"--experiment_dir={tmp_path / 'run'}"], RANKS)
    assert_one_error(
        outcome, "--device=cuda: no CUDA device", codes=[2], experiment=tmp_path / "run"
    )


@pytest.mark.parametrize(
    "wrong, facts",
    [
        (["--num_layer=3"], ["--num_layer", "--num_layers"]),
        (["--hidden_size=30", "--lr=nan", "--trian_iters=3"], ["--lr", "--trian_iters"]),
        (["--num_attention_heads=5", "--batch_size=7"], ["num_attention_heads", "batch_size"]),
    ],
)
def test_usage_errors(tmp_path: Path, wrong: list[str], facts: list[str]) -> None:
    """All problems in one message, printed once for two ranks, and left in exit.json: the directory
    was readable."""
    experiment = tmp_path / "run"
    outcome = run([*TINY, f"--experiment_dir={experiment}", *wrong], RANKS)
    assert_one_error(outcome, *facts, codes=[2], experiment=experiment)
    assert outcome.stdouts == ["", ""]
    assert sorted(os.listdir(experiment)) == ["exit.json"]


def test_secrets_stay_secret(tmp_path: Path) -> None:
    """No file, output or command line holds a key from the environment, however a run ends; no
    socket listens beyond loopback."""
    experiment = tmp_path / "run"
    variables = {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY}
    good = train(experiment, "--export_interval=6")
    for command in (good, [*good, "--hidden_size=64"], [*good, "--wrong=1"]):
        outcome = run(command, RANKS, variables=variables)
        assert CANARY not in outcome.output
    metrics = experiment / "metrics.jsonl"
    size = metrics.stat().st_size
    with Start(endless(experiment), RANKS, variables=variables) as start:
        assert start.wait_until(
            lambda: metrics.stat().st_size > size, "another line of metrics.jsonl"
        )
        processes = start.left_over()
        assert len(processes) >= RANKS
        assert not [
            number
            for number in processes
            if CANARY.encode() in Path(f"/proc/{number}/cmdline").read_bytes()
        ]
        sockets = [place for number in processes for place in listening(number)]
        assert len(sockets) > RANKS and all(map(is_loopback, sockets)), sockets
        start.signal(signal.SIGKILL, 0)
        assert CANARY not in start.wait().output
    files = [path for path in experiment.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """A finite gradient with an absurd learning rate: exit 5, and no checkpoint or export of broken
    weights."""
    experiment = tmp_path / "run"
    outcome = run(train(experiment, "--lr=1e38", "--export_interval=1"), RANKS)
    assert_one_error(outcome, "the weights are no longer finite", "lower --lr", codes=[5])
    assert not list(experiment.glob("checkpoints/*")) and not list(experiment.glob("export/*"))
