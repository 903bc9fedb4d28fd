"""DataSource: the arrangement of samples, workers and their deaths, errors that name their file."""

import contextlib
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.compatibility import Difference
from megatron_lite.cli.help import banners
from megatron_lite.config import Config, Draft, flatten
from megatron_lite.data import open_data as open_data_module
from megatron_lite.data.loader import DataSource
from megatron_lite.data.open_data import open_data
from megatron_lite.data.reading import search
from megatron_lite.data.workers import Workers
from megatron_lite.errors import DataError, RunError, WorkerError
from megatron_lite.validation import resolve
from megatron_lite.validation.rules import reported
from tests.support.token_files import data_config, write_counting, write_documents

ROOT = Path(__file__).parents[2]
LENGTH = 16


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    """Two data sets of different dtypes whose tokens count up from 0 and from 100,000."""
    sizes = np.random.default_rng(1).integers(0, 60, 100).tolist()
    return write_counting(tmp_path / "a", sizes, "<u2"), write_counting(
        tmp_path / "b", sizes, "<i4", 100_000
    )


def config(data_path: tuple[str, ...], **values: Any) -> Config:
    """A configuration with the options that the data room reads."""
    sizes = dict(
        batch_size=12, micro_batch_size=3, sequence_length=LENGTH, vocab_size=200_000, seed=11
    )
    phases = dict(split=(80.0, 10.0, 10.0), train_iters=8, validation_iters=2, test_iters=1)
    return data_config(*data_path, **{**sizes, **phases, **values})


def test_hundreds_of_data_sets_print_a_page(prefixes: tuple[str, str]) -> None:
    """Banners, errors and differences show the beginning of a long --data_path, and data sets
    beyond 20 as a sum."""
    many = resolve(config(prefixes * 300, train_iters=2), 1)
    described = open_data(many, 0, 1).description
    assert (
        described["other data"].startswith("580 data sets: ")
        and "96.67% of the samples" in described["other data"]
    )
    error = reported(Draft(**flatten(many)), iter([("data_path split", "rule")]))[0].message
    difference = str(Difference("data_path", tuple(prefixes), many.data.data_path))
    for text in (*banners(many, described), error, difference):
        assert "(600 words)" in text and len(text) < 27_000


def micro_batches(source: DataSource, phase: str, first: int, count: int) -> list[list[Tensor]]:
    """The tokens of `count` iterations."""
    with contextlib.closing(source.batches(phase, first, count)) as batches:  # type: ignore[type-var]
        return [[batch.tokens for batch in iteration] for iteration in batches]


def alike(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    one, other = (
        [[part.tolist() for part in parts] for parts in batches] for batches in (first, second)
    )
    return one == other


def test_samples_are_runs_of_the_stream_and_an_epoch_covers_it(prefixes: tuple[str, str]) -> None:
    """Tokens count up within a sample, across documents; one epoch visits every slot of the
    training split once."""
    values = config(prefixes[:1], train_iters=1000)
    source = open_data(values, 0, 1)
    samples = torch.cat([torch.cat(batch) for batch in micro_batches(source, "training", 0, 40)])
    assert (samples[:, 1:] - samples[:, :-1] == 1).all()
    sizes = np.random.default_rng(1).integers(0, 60, 100)
    per_epoch = (int(sizes[:80].sum()) - 1) // LENGTH
    first_epoch = np.sort(samples[:per_epoch, 0].numpy())
    assert (np.diff(first_epoch) == LENGTH).all()
    validation = torch.cat(micro_batches(source, "validation", 0, 1)[0])
    test = torch.cat(micro_batches(source, "test", 0, 1)[0])
    assert samples.max() < sizes[:80].sum() <= validation.min()
    assert validation.max() < sizes[:90].sum() <= test.min()


SCHEDULE: dict[str, Any] = dict(
    batch_size=13,
    batch_size_schedule=("0:5", "2:13", "3:1", "5:7"),
    allow_nondivisible_batch_size=True,
    train_iters=7,
)
SIZES = [5, 5, 13, 1, 1, 7, 7]


def arranged(
    values: Config, ranks: int, phase: str, first: int, count: int
) -> list[list[list[Tensor]]]:
    """Collect the real samples by iteration, micro-step and rank; check padding and leave it
    out."""
    sources = [open_data(values, rank, ranks) for rank in range(ranks)]
    iterations = []
    for batches in zip(*(source.batches(phase, first, count) for source in sources), strict=True):
        iterations.append([])
        for step in zip(*batches, strict=True):  # as many micro-batches on every rank
            assert all(len(batch.tokens) == len(step[0].tokens) for batch in step)
            assert all(
                (batch.tokens[len(batch.tokens) - batch.padding :] == 0).all() for batch in step
            )
            iterations[-1].append(
                [batch.tokens[: len(batch.tokens) - batch.padding] for batch in step]
            )
    return iterations


@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 0), (2, 0), (2, 2)])
def test_a_schedule_reads_every_sample_once_in_order(
    prefixes: tuple[str, str], ranks: int, num_workers: int
) -> None:
    """The samples of a run with batches of 5, 13, 1 and 7 are those of a run with batches of 1,
    whatever the iteration it resumes at; only the end of a batch is padded."""
    one = open_data(config(prefixes, batch_size=1, micro_batch_size=1), 0, 1)
    single = micro_batches(one, "training", 0, sum(SIZES))
    expected = torch.cat([batch for (batch,) in single]).split(SIZES)
    values = config(prefixes, **SCHEDULE, num_workers=num_workers)
    for first in range(len(SIZES)) if num_workers == 0 else (1,):
        iterations = arranged(values, ranks, "training", first, len(SIZES) - first)
        for found, batch in zip(iterations, expected[first:], strict=True):
            assert torch.equal(torch.cat([part for step in found for part in step]), batch)
            assert len(found) == -(-len(batch) // (3 * ranks))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("source", ["list", "random"])
def test_padding_is_documents_of_its_own(prefixes: tuple[str, str], source: str) -> None:
    """Micro-batches with one sample and with none: documents of the samples, then one per padded
    row."""
    options: dict[str, Any] = dict(
        cross_document_attention=False, dataset_source=source, batch_size=1
    )
    ((whole,),) = open_data(config(prefixes[:1], **options, micro_batch_size=1), 0, 1).batches(
        "training", 0, 1
    )
    padded = config(prefixes[:1], **options, micro_batch_size=4, allow_nondivisible_batch_size=True)
    some, none = (next(open_data(padded, rank, 2).batches("training", 0, 1))[0] for rank in (0, 1))
    assert (some.padding, none.padding) == (3, 4) and torch.equal(some.tokens[:1], whole.tokens)
    assert some.starts is not None and none.starts is not None and whole.starts is not None
    assert some.starts.tolist() == [*whole.starts.tolist(), 2 * LENGTH, 3 * LENGTH, 4 * LENGTH]
    assert (
        none.starts.tolist() == [0, LENGTH, 2 * LENGTH, 3 * LENGTH, 4 * LENGTH]
        and none.starts.dtype == torch.int32
    )


@pytest.mark.parametrize(
    ("data_path", "ranks"), [("{a}", 1), ("0.9 {a} 0.1 {b}", 2), ("{a} {b} {a}", 3)]
)
def test_the_whole_split_is_read_once(
    prefixes: tuple[str, str], data_path: str, ranks: int
) -> None:
    """Each slot of one epoch of each data set comes once, for any weights, ranks and
    micro-batches."""
    words = tuple(data_path.format(a=prefixes[0], b=prefixes[1]).split())
    values = config(words, validation_iters="all", eval_micro_batch_size=2, **SCHEDULE)
    source = open_data(values, 0, ranks)
    count = source.phases["validation"].iterations
    total = sum(source.split("validation", iteration).samples for iteration in range(1, count + 1))
    iterations = arranged(values, ranks, "validation", 0, count)
    samples = torch.cat([part for steps in iterations for step in steps for part in step])
    sizes = np.random.default_rng(1).integers(0, 60, 100)
    per_epoch = (int(sizes[80:90].sum()) - 1) // LENGTH
    bases = (0, 100_000) if "{b}" in data_path else (0,)
    assert len(samples) == total == per_epoch * len(bases)
    assert [sum(len(part) for step in steps for part in step) for steps in iterations][:-1] == [
        13
    ] * (count - 1)
    for base in bases:
        starts = np.sort(
            samples[(samples[:, 0] >= base) & (samples[:, 0] < base + 100_000), 0].numpy()
        )
        assert len(starts) == per_epoch and (np.diff(starts) == LENGTH).all()
    assert alike(*(micro_batches(source, "validation", 0, count) for _ in range(2)))
    assert source.description["validation data"].startswith(f"{total} samples out of ")


def test_validation_batches_do_not_follow_the_schedule(prefixes: tuple[str, str]) -> None:
    """An evaluation uses the largest batch size, and the same samples for every micro-batch
    size."""
    expected = micro_batches(
        open_data(config(prefixes, batch_size=13, micro_batch_size=13), 0, 1), "validation", 0, 2
    )
    for size in (None, 1, 5, 13):
        values = config(prefixes, **SCHEDULE, eval_micro_batch_size=size)
        source = open_data(values, 0, 1)
        assert [source.split("validation", iteration).samples for iteration in (1, 2)] == [13, 13]
        assert source.phases["validation"].iterations == 2
        found = arranged(values, 1, "validation", 0, 2)
        assert alike(
            [[torch.cat([part for step in steps for part in step])] for steps in found], expected
        )


@pytest.mark.parametrize("context", ["spawn", "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_give_the_same_batches(prefixes: tuple[str, str], context: str) -> None:
    """Workers, of any number and start method, read what the process itself reads, of shuffled
    documents and several epochs, too; they are gone when the batches end."""
    data_path = ("0.3", prefixes[0], "0.7", prefixes[1])
    options = dict(shuffle_documents=True, train_iters=200)
    expected = micro_batches(open_data(config(data_path, **options), 1, 2), "training", 100, 6)
    for workers, prefetch_factor in ((1, None), (3, 50)) if context == "fork" else ((1, 2),):
        more = dict(
            num_workers=workers, prefetch_factor=prefetch_factor, multiprocessing_context=context
        )
        values = config(data_path, **options, **more)
        assert alike(micro_batches(open_data(values, 1, 2), "training", 100, 6), expected)
        assert not multiprocessing.active_children()


def test_the_first_iteration_does_not_wait_for_workers(
    prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is read in place while the workers start; they are asked for the data of the next
    ones meanwhile."""
    asked: list[int] = []

    def refuse(*_: object) -> None:
        raise AssertionError("waited for a worker")

    monkeypatch.setattr(Workers, "_receive", refuse)
    monkeypatch.setattr(Workers, "_send", lambda self, number, request: asked.append(request[0]))
    expected = micro_batches(open_data(config(prefixes), 0, 1), "training", 2, 1)
    source = open_data(config(prefixes, num_workers=1, prefetch_factor=3), 0, 1)
    batches = source.batches("training", 2, 6)
    assert alike([[batch.tokens for batch in next(batches)]], expected)
    assert asked == [36, 39, 42]  # samples: three of the four micro-batches of the next iteration
    with pytest.raises(AssertionError, match="waited"):
        next(batches)
    source.close()


def test_closing_midway_leaves_no_processes(prefixes: tuple[str, str]) -> None:
    """A generator that is closed, dropped or left to DataSource.close takes its workers with it, at
    once."""
    values = config(prefixes, num_workers=2)
    source = open_data(values, 0, 1)
    batches = source.batches("training", 0, 8)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    begun = time.monotonic()
    batches.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children() and time.monotonic() - begun < 2
    kept = source.batches("training", 0, 8)
    next(kept)
    source.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RunError, match="were closed"):
        next(kept)


ALL_FOR_TRAINING: dict[str, Any] = dict(split=(1.0,), validation_iters=0, test_iters=0)


@pytest.mark.parametrize(
    ("bad", "dtype", "num_workers"),
    [(500, "<u2", 0), (65535, "<u2", 2), (-1, "<i4", 0), (2**31 - 1, "<i4", 0)],
)
def test_bad_token_is_named(tmp_path: Path, num_workers: int, bad: int, dtype: str) -> None:
    """A token id beyond the vocabulary or below zero: file, document, offset and id in one line,
    also from a worker."""
    documents = np.full((40, 10), 499)
    documents[7, 4] = bad
    prefix = write_documents(tmp_path / "x", [*documents[:6], [], *documents[7:]], dtype)
    values = config((prefix,), vocab_size=500, num_workers=num_workers, **ALL_FOR_TRAINING)
    with pytest.raises(DataError) as caught:
        micro_batches(open_data(values, 0, 1), "training", 0, 8)
    expected = f"{prefix}.bin: document 7, offset 4: token id {bad} is outside the vocabulary of 500 (--vocab_size)"
    assert str(caught.value) == expected
    assert caught.value.__cause__ is None and not multiprocessing.active_children()


def test_a_bad_token_is_found_before_it_is_read(tmp_path: Path) -> None:
    """The whole pair is searched in the background; the search ends with the source."""
    documents = np.full((3000, 1000), 499)
    documents[2900, 7] = 500
    found: list[RunError] = []
    arrived = threading.Event()
    prefix = write_documents(tmp_path / "x", documents, "<u2")
    source = open_data(config((prefix,), vocab_size=500, **ALL_FOR_TRAINING), 0, 1)
    source.search_in_background(
        [prefix], lambda error: (found.append(error), arrived.set()) and None
    )
    assert arrived.wait(60)
    expected = f"{prefix}.bin: document 2900, offset 7: token id 500 is outside the vocabulary of 500 (--vocab_size)"
    assert [str(error) for error in found] == [expected] and isinstance(found[0], DataError)
    source.close()
    search([prefix], 500, found.append, source._ended)  # ends after the first piece
    search([prefix], 501, found.append, threading.Event())
    assert len(found) == 1


def test_killed_worker_is_one_clear_line(prefixes: tuple[str, str]) -> None:
    """SIGKILL of a worker ends the run with a line that says so, not with a hang."""
    source = open_data(config(prefixes, num_workers=2, prefetch_factor=1), 0, 1)
    batches = source.batches("training", 0, 1000)
    next(batches)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid or 0, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        list(batches)
    message = r"data worker \d was killed by SIGKILL, often for memory: try fewer --num_workers.*"
    assert re.fullmatch(message, str(caught.value))
    assert time.monotonic() - begun < 60 and not multiprocessing.active_children()


def test_workers_outlive_group_wide_signals(prefixes: tuple[str, str]) -> None:
    """Signals that a terminal, torchrun or Slurm sends to every process do not take the workers
    from the parent."""
    source = open_data(config(prefixes, num_workers=2, prefetch_factor=1), 0, 1)
    batches = source.batches("training", 0, 20)
    next(batches)
    for child in multiprocessing.active_children():
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            os.kill(child.pid or 0, number)
    assert len(list(batches)) == 19


PARENT = textwrap.dedent("""
    import multiprocessing, os, signal, sys, threading
    from megatron_lite.data.reading import RandomReader
    from megatron_lite.data.workers import Workers
    if __name__ == "__main__":
        ending = sys.argv[1]
        if ending == "starting":  # signals to the whole group, like those of torchrun, while the workers start
            signal.signal(signal.SIGTERM, lambda *_: None)
            for delay in range(1, 60):
                threading.Timer(delay / 100, os.killpg, (0, signal.SIGTERM)).start()
        workers = Workers(RandomReader(1, 16, 50), ((number, 1) for number in range(100)), 2, 2, "spawn")
        batches = iter(workers)
        next(batches)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "forgotten":
            raise SystemExit(5)
        if ending == "starting":
            assert len(list(batches)) == 99
""")


@pytest.mark.parametrize(("ending", "code"), [("killed", -9), ("forgotten", 5), ("starting", 0)])
def test_workers_die_with_their_parent(tmp_path: Path, ending: str, code: int) -> None:
    """However the parent ends, also by SIGKILL, no worker stays and nothing hangs; signals at the
    start do no harm."""
    script, environment = tmp_path / "parent.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    script.write_text(PARENT)
    begun, command = time.monotonic(), [sys.executable, str(script), ending]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert (done.returncode, done.stderr) == (code, "")
    for pid in map(int, done.stdout.split()):
        while _alive(pid):
            assert time.monotonic() - begun < 30, f"worker {pid} lives on"
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_workers_do_not_import_torch() -> None:
    """The modules that a worker needs load without torch: that is what makes workers start fast and
    small."""
    code = "import sys, megatron_lite.data.workers; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}
        ).returncode
        == 0
    )


def test_slow_sample_is_reported(
    prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading a sample for longer than the limit gives a warning that names the file, from workers
    too."""
    monkeypatch.setattr(open_data_module, "SLOW_MS", 1e-9)
    values = config(prefixes[:1], num_workers=1)
    with caplog.at_level(logging.WARNING, logger="megatron_lite"):
        micro_batches(open_data(values, 0, 1), "training", 0, 1)
    assert "a.bin: reading one sample took" in caplog.text


FAULTS: list[
    tuple[str, dict[str, Any], type[Exception], str]
] = [  # sizes of the documents, options, error, message
    ("", {}, DataError, r"x\.idx: an empty data set: it holds no documents"),
    (
        "100",
        {},
        DataError,
        r"=80,10,10 leaves none of its 1 documents for validation .*--valid_data_path, or set --validation_iters=",
    ),
    (
        "100",
        {"split": (0.0, 1.0), "test_iters": 0},
        DataError,
        r"leaves none of its 1 documents for training",
    ),
    (
        "10 0 6",
        ALL_FOR_TRAINING,
        DataError,
        r"x\.bin: 16 tokens for training \(3 of 3 documents, --split=1\), but one sample needs 17 \(--sequence_length",
    ),
    ("0 0 0", ALL_FOR_TRAINING, DataError, r"x\.bin: 0 tokens for training"),
    (
        "100",
        {"tokenizer_file": "/nonexistent.json"},
        DataError,
        r"/nonexistent.json: cannot be read",
    ),
]


@pytest.mark.parametrize(("sizes", "options", "kind", "message"), FAULTS)
def test_faults_at_open(
    tmp_path: Path, sizes: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """Empty data sets, splits and data sets below one sample are refused before any work, in one
    line."""
    prefix = write_documents(tmp_path / "x", [[0] * int(size) for size in sizes.split()])
    with pytest.raises(kind, match=message) as caught:
        open_data(config(**{"data_path": (prefix,), **options}), 0, 1)
    assert "\n" not in str(caught.value)


def test_only_needed_phases_are_checked(tmp_path: Path) -> None:
    """One document of one sample is enough to train on; with no iterations at all not even a file
    is needed."""
    write_counting(tmp_path / "x", [LENGTH + 1])
    values = config((str(tmp_path / "x"),), **ALL_FOR_TRAINING)
    source = open_data(values, 0, 1)
    for batch in micro_batches(source, "training", 0, 2):
        for micro_batch in batch:
            assert micro_batch.tolist() == [list(range(LENGTH + 1))] * 3
    assert source.description["training data"] == "96 samples out of 17 tokens: 96 epochs"
    assert (
        open_data(config((), train_iters=0, validation_iters=0, test_iters=0), 0, 1).description
        == {}
    )


def test_more_data_sets_than_files_may_be_open(tmp_path: Path) -> None:
    """The limit that a system begins with, here very low, is raised as far as needed, for workers
    too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    prefixes = [write_counting(tmp_path / str(number), [2 * LENGTH]) for number in range(40)]
    few = len(os.listdir("/proc/self/fd")) + 20
    options = dict(
        batch_size=40,
        micro_batch_size=40,
        train_iters=2,
        num_workers=1,
        cross_document_attention=False,
    )
    values = config(tuple(prefixes), **ALL_FOR_TRAINING, **options)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        assert len(micro_batches(open_data(values, 0, 1), "training", 0, 2)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
