"""A corpus is the same for any number of processes, and after any number of kills."""

import bz2
import gzip
import json
import lzma
import multiprocessing
import os
import random
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.corpus.documents import TextFields
from megatron_lite.corpus.inputs import InputFile, find_inputs
from megatron_lite.corpus.prepare import UNFINISHED, CorpusOptions, held, prepare
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError, PeerError, StorageError, UsageError
from megatron_lite.run.progress_line import ByteProgress
from tests.support.loading import loaded

SPAWN = BaseProcess.start
ENDINGS = (".bin", ".idx", ".summary.json", ".tokenizer.json")


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote: only a power loss would."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def write_inputs(folder: Path, lines: int = 60) -> Path:
    """Files of several kinds, with bad lines, empty lines and a document that occurs twice."""
    folder.mkdir()
    generator = random.Random(0)

    def documents() -> list[bytes]:
        words = ["alpha", "beta", "é", "gamma\\n"]
        texts = (
            " ".join(generator.choices(words, k=generator.randrange(1, 40))) for _ in range(lines)
        )
        return [f'{{"text": "{number} {text}"}}\n'.encode() for number, text in enumerate(texts)]

    for name in ("a.jsonl", "b.jsonl"):
        content = documents()
        content[lines // 2] = b"broken\n"
        content[lines // 3] = content[0]
        (folder / name).write_bytes(b"".join(content).rstrip(b"\n"))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(documents())))
    (folder / "d.txt.xz").write_bytes(lzma.compress(b"a text\n" * 30))
    (folder / "e.txt.bz2").write_bytes(bz2.compress(b"another text\n" * 30))
    (folder / "f.txt").write_bytes("ein Text über nichts".encode())
    return folder


def options(inputs: Path, output: Path, **changes: object) -> CorpusOptions:
    plain = CorpusOptions((str(inputs),), str(output / "x"), TokenizerChoice(), piece_bytes=1500)
    return replace(plain, **changes)  # type: ignore[arg-type]


def files(output: Path, prefix: str = "x") -> dict[str, bytes]:
    return {ending: (output / f"{prefix}{ending}").read_bytes() for ending in ENDINGS}


def texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    return [
        bytes(dataset.document(n)[:-1].astype("u1")).decode() for n in range(dataset.num_documents)
    ]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_result_does_not_depend_on_processes_or_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One and three processes, and other pieces, give the same four files and the same messages."""
    inputs = write_inputs(tmp_path / "in")
    results, messages = [], []
    for number, changes in enumerate(({}, {"num_processes": 3}, {"piece_bytes": None})):
        output = tmp_path / str(number)
        _, is_new = prepare(options(inputs, output, deduplicate=True, **changes))
        assert is_new and sorted(path.name for path in output.iterdir()) == sorted(
            f"x{ending}" for ending in ENDINGS
        )
        results.append(files(output))
        lines = capsys.readouterr().err.splitlines()
        # shown on slow machines
        messages.append([line for line in lines if not line.startswith("tokenizing: ")])
    assert all(result == results[0] for result in results[1:])
    assert messages == [messages[0]] * 3 and any(
        "b.jsonl: line 31: not JSON" in line for line in messages[0]
    )
    summary = json.loads(results[0][".summary.json"])
    # Each .jsonl file has one bad line and one repeated document.
    assert (summary["documents"], summary["duplicates"], summary["skipped"]) == (
        60 * 3 - 4 + 3,
        2,
        {"not JSON": 2},
    )


def prepare_in(folder: Path, chosen: CorpusOptions) -> None:
    """Prepare in a process that its working folder tells from others, without progress."""
    os.chdir(folder)
    with open(os.devnull, "w") as sys.stderr:
        prepare(chosen)


def children_in(folder: Path) -> list[int]:
    """Processes whose working folder this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill_and_finish(tmp_path: Path, kills: int, processes: int) -> None:
    """Kill starts of one command at random points, then let one finish; compare with an undisturbed
    result."""
    inputs = write_inputs(tmp_path / "in")
    prepare(options(inputs, tmp_path / "undisturbed"))
    output, generator = tmp_path / "out" / "files", random.Random(kills)
    output.parent.mkdir()
    arguments = (output.parent, options(inputs, output, num_processes=processes))
    for kill in range(kills + 1):
        process = multiprocessing.get_context("fork").Process(target=prepare_in, args=arguments)
        process.start()
        while process.is_alive() and not Path(f"{output}/x{UNFINISHED}").exists():
            time.sleep(0.002)
        if kill < kills:
            time.sleep(generator.uniform(0, 0.5))
            process.kill()
        process.join()
        if (output / "x.idx").exists():  # then the whole pair is there
            assert files(output) == files(tmp_path / "undisturbed")
            for path in filter(Path.is_file, output.glob("x.*") if kill < kills else ()):
                path.unlink()
        deadline_s = time.monotonic() + 10
        while children_in(output.parent) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not children_in(output.parent)
    assert process.exitcode == 0 and files(output) == files(tmp_path / "undisturbed")
    assert not list(output.glob("*.partial")) and not list(output.glob("*.tmp"))


def test_killed_starts_change_nothing(tmp_path: Path) -> None:
    """Two kills at random points, with workers: none survives, and the next start ends with the
    same files."""
    kill_and_finish(tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_killed_a_hundred_times(tmp_path: Path, processes: int) -> None:
    """A hundred kills, half of them with one process and half with three."""
    kill_and_finish(tmp_path, 50, processes)


def test_finished_pieces_are_kept_and_damaged_ones_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption only what is missing or damaged is read; the result is the same."""
    inputs = write_inputs(tmp_path / "in")
    prepare(options(inputs, tmp_path / "undisturbed"))
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("megatron_lite.corpus.prepare.write_pairs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(inputs, output))
    folder = Path(f"{output}/x{UNFINISHED}")
    pieces = sorted(folder.glob("*.bin"))
    assert len(pieces) > 8 and not (output / "x.idx").exists()
    pieces[3].write_bytes(pieces[3].read_bytes()[:-1] + b"\xff")
    before = {path: path.stat().st_mtime_ns for path in pieces}
    with monkeypatch.context() as patch:
        patch.setattr("megatron_lite.corpus.prepare.remove", lambda folder: None)
        prepare(options(inputs, output))
    assert [path for path, mtime in before.items() if path.stat().st_mtime_ns != mtime] == [
        pieces[3]
    ]
    assert files(output) == files(tmp_path / "undisturbed")


def test_a_worker_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker ends the command with its name, its signal and what helps; a second start
    finishes."""
    inputs = write_inputs(tmp_path / "in")
    started: list[BaseProcess] = []

    def start_and_kill(process: BaseProcess) -> None:
        started.append(process)
        SPAWN(process)
        if len(started) == 2:
            process.kill()

    monkeypatch.setattr(BaseProcess, "start", start_and_kill)
    with pytest.raises(PeerError) as caught:
        prepare(options(inputs, tmp_path / "out", num_processes=2))
    words = r"worker process \d+ was killed by SIGKILL, often for memory: .*; finished pieces are kept: start .* again"
    assert re.fullmatch(words, str(caught.value)), caught.value
    assert all(process.exitcode is not None for process in started)
    prepare(options(inputs, tmp_path / "out"))
    assert texts(tmp_path / "out" / "x")


def test_inputs_that_change_and_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes after the plan is an error, and so is a second process at work on the
    same prefix."""
    inputs = write_inputs(tmp_path / "in")

    def find_then_change(*names: Any) -> list[InputFile]:
        found = find_inputs(*names)
        with open(inputs / "b.jsonl", "ab") as file:
            file.write(b"\n{}")
        return found

    with monkeypatch.context() as patch:
        patch.setattr("megatron_lite.corpus.prepare.find_inputs", find_then_change)
        with pytest.raises(DataError, match="b.jsonl: has changed since the work was planned"):
            prepare(options(inputs, tmp_path / "out"))
    with held(tmp_path / "out" / f"x{UNFINISHED}"):
        with pytest.raises(StorageError, match="another process is writing it"):
            prepare(options(inputs, tmp_path / "out"))
    assert prepare(options(inputs, tmp_path / "out"))[1]


def test_documents_are_chosen(tmp_path: Path) -> None:
    """--max_documents, --validation_documents, --shards and --deduplicate keep order and lose
    nothing."""
    inputs = tmp_path / "x.jsonl"
    inputs.write_text(
        "".join(json.dumps({"text": f"document {number % 40}"}) + "\n" for number in range(50))
    )
    every = [f"document {number}" for number in range(40)]
    prepare(options(inputs, tmp_path / "d", deduplicate=True))
    assert texts(tmp_path / "d" / "x") == every
    summary, _ = prepare(options(inputs, tmp_path / "m", max_documents=7, num_processes=2))
    assert texts(tmp_path / "m" / "x") == every[:7] and summary["documents"] == 7
    prepare(options(inputs, tmp_path / "dm", deduplicate=True, max_documents=39))
    assert texts(tmp_path / "dm" / "x") == every[:39]
    prepare(options(inputs, tmp_path / "v", deduplicate=True, validation_documents=4, shards=3))
    validation = texts(tmp_path / "v" / "x_validation")
    assert validation == [every[5], every[15], every[25], every[35]]
    shards = [texts(tmp_path / "v" / f"x-{number:05d}-of-00003") for number in range(3)]
    assert [len(shard) for shard in shards] == [12, 12, 12]
    assert sum(shards, []) == [text for text in every if text not in validation]


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder where nobody can make one, and more pairs than documents are one line each; the
    first was once tried again without an end."""
    inputs = tmp_path / "x.jsonl"
    inputs.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(
        StorageError, match=r"/proc/x.partial: cannot be created: No such file or directory"
    ):
        prepare(replace(options(inputs, tmp_path), output_prefix="/proc/x"))
    for more in ({"shards": 3}, {"validation_documents": 2}):
        with pytest.raises(
            UsageError,
            match="a pair would be empty with 2 documents in total; write smaller numbers",
        ):
            prepare(options(inputs, tmp_path / "many", **more))
        assert not (tmp_path / "many" / "x.bin").exists()


def test_begin_and_end_of_documents(tmp_path: Path) -> None:
    """A token before each document, none after it; a token that the tokenizer lacks is refused."""
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    marks = {
        (None, None): "ab.c.",
        ("<|endoftext|>", "none"): ".ab.c",
        ("none", "<|endoftext|>"): "ab.c.",
    }
    for number, ((begin, end), expected) in enumerate(marks.items()):
        output = tmp_path / str(number)
        prepare(
            options(tmp_path / "{a,b}.txt", output, tokenizer=TokenizerChoice(begin=begin, end=end))
        )
        dataset = IndexedDataset(str(output / "x"))
        tokens = dataset.tokens.read(0, dataset.num_tokens).tolist()
        assert tokens == [256 if character == "." else ord(character) for character in expected]
    with pytest.raises(UsageError, match="--begin_of_document=<s>: byte: has no such token"):
        prepare(options(tmp_path / "a.txt", tmp_path / "n", tokenizer=TokenizerChoice(begin="<s>")))


def test_keys(tmp_path: Path) -> None:
    """A path of keys, a key with a dot in its name, and several keys that are joined."""
    lines = [
        {"a": {"b": "inner"}, "t": "title"},
        {"a.b": "dotted"},
        {"t": "alone", "a": None},
        {"t": 5},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    prepare(options(path, tmp_path / "one", fields=TextFields(("a.b",))))
    assert texts(tmp_path / "one" / "x") == ["inner", "dotted"]
    prepare(options(path, tmp_path / "two", fields=TextFields(("t", "a.b"), " / ")))
    assert texts(tmp_path / "two" / "x") == ["title / inner", "dotted", "alone"]


def test_an_interrupt_ends_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle of the work: code 130, one line, no worker left; the pieces stay."""
    inputs = write_inputs(tmp_path / "in")
    started: list[BaseProcess] = []
    monkeypatch.setattr(
        BaseProcess, "start", lambda process: (started.append(process), SPAWN(process))
    )
    monkeypatch.setattr(ByteProgress, "add", interrupt)
    monkeypatch.setattr("megatron_lite.corpus.pieces.SMALLEST_PIECE_BYTES", 700)
    with loaded("prepare_data") as module:
        assert (
            module.main([str(inputs), "--output_prefix", str(tmp_path / "x"), "--num_processes=2"])
            == 130
        )
    assert capsys.readouterr().err == "interrupted; the same command continues where it stopped\n"
    assert len(started) == 2 and all(process.exitcode is not None for process in started)
    assert (tmp_path / "x.partial").is_dir() and not (tmp_path / "x.idx").exists()


def test_two_runs_prepare_the_same_once(tmp_path: Path) -> None:
    """A start that finds another one at work waits for it, and takes its result."""
    inputs = write_inputs(tmp_path / "in")
    waits: list[bool] = []
    with held(tmp_path / "out" / f"x{UNFINISHED}"):
        result: list[tuple[object, bool]] = []
        chosen = options(inputs, tmp_path / "out", on_wait=lambda: waits.append(True))
        other = threading.Thread(target=lambda: result.append(prepare(chosen)))
        other.start()
        while not waits:
            time.sleep(0.005)
        prepare(options(inputs, tmp_path / "elsewhere"))
        for ending in ENDINGS:  # as if the holder had published
            shutil.copy(tmp_path / "elsewhere" / f"x{ending}", tmp_path / "out")
    other.join()
    assert [is_new for _, is_new in result] == [False] and not list(
        (tmp_path / "out").glob("*.partial")
    )
