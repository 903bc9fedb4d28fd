"""scripts/prepare_data.py: inputs of every kind, damaged lines, statistics, refusals and exit
codes."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_lite.corpus.pieces import PieceWriter
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import ByteTokenizer, JsonTokenizer
from megatron_lite.run.progress_line import ProgressLine
from scripts import prepare_data as script

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def main(*arguments: str | Path) -> int:
    """Run the script in this process; returns its exit code."""
    try:
        return int(script.main([str(argument) for argument in arguments]))
    except SystemExit as error:
        return int(error.code or 0)


def texts(prefix: Path) -> list[str]:
    """The documents, decoded; each has to end with the end of a document, and only there."""
    dataset, tokenizer = IndexedDataset(str(prefix)), JsonTokenizer(f"{prefix}.tokenizer.json")
    found = []
    for number in range(dataset.num_documents):
        tokens = dataset.document(number).tolist()
        assert (
            tokens[-1] == tokenizer.end_of_document and tokens.count(tokenizer.end_of_document) == 1
        )
        found.append(tokenizer.decode(tokens))
    return found


def summary(prefix: Path) -> dict[str, object]:
    return dict(json.loads(Path(f"{prefix}.summary.json").read_text()))


def test_progress_of_both_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's pass and the tokens' pass say how much they have read and how long they will
    take."""
    (tmp_path / "a.jsonl").write_text('{"text": "aaaa bbbb"}\n' * 1000)
    (tmp_path / "b.txt").write_text("cccc " * 2000)
    monkeypatch.setattr(
        ProgressLine, "update", lambda line, words: print(words(2.0), file=sys.stderr)
    )
    files = tmp_path / "a.jsonl", tmp_path / "b.txt"
    assert main(*files, "--output_prefix", tmp_path / "out", "--train_tokenizer", "260") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[499] == "reading for the tokenizer: 0.0 of 0.0 MB (34%), 0.0 MB/s, 0:00:04 left"
    done = re.compile(
        r"tokenizing: 0.0 of 0.0 MB \(100%\), 1,001 documents, [0-9,]+ tokens, 0.0 MB/s, 0:00:00 left"
    )
    assert any(done.fullmatch(line) for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with text files at several depths, and others that are not asked for."""
    files = {
        "b.txt": "second\r\nfile\n",
        "a/z.txt": "first ü\n",
        "a/z.md": "# mark\n",
        "a/skip.py": "print()\n",
    }
    files |= {"c.jsonl": '{"text": "third"}\n', "d.txt": " \n ", ".hidden/e.txt": "hidden\n"}
    for name, text in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "in"


def test_folder_is_read_recursively_in_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Default endings, sorted paths, exact texts; the blank file is skipped and counted."""
    assert main(folder, "--output_prefix", tmp_path / "out" / "x") == 0
    assert texts(tmp_path / "out" / "x") == [
        "hidden\n",
        "# mark\n",
        "first ü\n",
        "second\r\nfile\n",
        "third",
    ]
    output = capsys.readouterr()
    assert "5 documents, 46 tokens (uint16)" in output.out and "1: blank" in output.out
    assert f"skipped {folder / 'd.txt'}: blank" in output.err
    assert main(folder, "--suffix", "py,.md", "--output_prefix", tmp_path / "y") == 0
    assert texts(tmp_path / "y") == ["print()\n", "# mark\n"]
    assert main(folder / "b.txt", folder / "a" / "skip.py", "--output_prefix", tmp_path / "z") == 0
    assert texts(tmp_path / "z") == ["second\r\nfile\n", "print()\n"]


def test_summary_has_the_entropy(tmp_path: Path) -> None:
    """Documents, tokens, bytes per token and unigram entropy agree with a count by hand."""
    (tmp_path / "a.txt").write_text("aabbbü")
    (tmp_path / "b.txt").write_text("ab")
    assert main(tmp_path / "a.txt", tmp_path / "b.txt", "--output_prefix", tmp_path / "x") == 0
    tokens = [*"aabbbü".encode(), 256, *b"ab", 256]
    entropy = -sum(
        count / len(tokens) * math.log(count / len(tokens)) for count in Counter(tokens).values()
    )
    found = summary(tmp_path / "x")
    assert found.pop("unigram_entropy_nats") == pytest.approx(entropy, rel=1e-12)
    expected = {
        "documents": 2,
        "tokens": 11,
        "text_bytes": 9,
        "bytes_per_token": 9 / 11,
        "vocab_size": 257,
    }
    expected |= {"end_of_document": 256, "dtype": "uint16", "skipped": {}}
    assert {key: found[key] for key in expected} == expected


BAD_LINES = [
    (b"", "blank"),
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"9" * 5000, "not JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b"[]", "no text under the key"),
    (b"null", "no text under the key"),
    (b'{"other": "x"}', "no text under the key"),
    (b'{"text": 5}', "no text under the key"),
    (b'{"text": " "}', "blank"),
    (b'{"text": "\\ud800"}', "contains half of a surrogate pair"),
]


def test_bad_lines_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of bad line is named with its number and counted; good lines around it survive."""
    lines = [line for bad, _ in BAD_LINES for line in (bad, b'{"text": "good"}')]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    assert main(path, "--output_prefix", tmp_path / "x") == 0
    assert texts(tmp_path / "x") == ["good"] * len(BAD_LINES)
    skipped = summary(tmp_path / "x")["skipped"]
    assert (
        isinstance(skipped, dict)
        and sum(skipped.values()) == len(BAD_LINES)
        and skipped["not UTF-8"] == 1
    )
    errors = capsys.readouterr().err.splitlines()
    assert "4300 digits" in errors[3] and "sys." not in errors[3], "advice about the interpreter"
    assert errors[4].startswith(f"skipped {path}: line 9: not UTF-8: byte 10 is 0xff")
    assert (
        errors[10] == "skipped more documents: from here on they are only counted"
        and len(errors) == 11
    )


def test_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a run: exit code 7 and one line, which names the input and what to change."""

    def no_room(*words: object) -> None:
        raise MemoryError("Unable to allocate 1 GiB")

    (tmp_path / "x.txt").write_text("text")
    monkeypatch.setattr(PieceWriter, "_encode", no_room)
    assert main(tmp_path / "x.txt", "--output_prefix", tmp_path / "x") == 7
    message = capsys.readouterr().err
    assert (
        message.startswith(f"ERROR: {tmp_path / 'x.txt'}: out of memory")
        and "--num_processes" in message
    )
    assert message.count("\n") == 1


@pytest.mark.slow
def test_a_compressed_file_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """A small file of one huge document, under a limit of memory: exit code 7 and one line."""
    with gzip.open(tmp_path / "x.txt.gz", "wb") as file:
        for _ in range(150):
            file.write(bytes(10**6))
    limit = 700 * 2**20
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    start = f"{code}; import sys; from megatron_lite.cli.prepare_data import main; sys.exit(main(sys.argv[1:]))"
    words = [
        sys.executable,
        "-c",
        start,
        str(tmp_path / "x.txt.gz"),
        f"--output_prefix={tmp_path / 'x'}",
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 7, ended.stderr[-2000:]
    assert "out of memory" in ended.stderr and ended.stderr.count("\n") == 1


def test_strict_refuses_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --strict the first bad line ends it with exit code 3 and one line; nothing is left that
    opens."""
    path = tmp_path / "x.jsonl"
    for line, kind in BAD_LINES:
        path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
        assert main(path, "--strict", "--output_prefix", tmp_path / "x") == 3, kind
        message = capsys.readouterr().err
        assert message.startswith(f"ERROR: {path}: line 2: {kind}") and message.count("\n") == 1, (
            line[:20],
            message,
        )
        assert os.listdir(tmp_path) == ["x.jsonl"], kind


def test_json_key_and_text_in_another_encoding(tmp_path: Path) -> None:
    """--json_key chooses the text; a file that is not UTF-8 is skipped as a whole."""
    (tmp_path / "x.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    inputs = (tmp_path / "x.jsonl", tmp_path / "latin.txt")
    assert main(*inputs, "--json_key", "body", "--output_prefix", tmp_path / "x") == 0
    assert texts(tmp_path / "x") == ["yes"] and summary(tmp_path / "x")["skipped"] == {
        "not UTF-8": 1
    }


def test_trained_and_given_tokenizers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--train_tokenizer trains on the input, --tokenizer takes the result again: same tokens, same
    tokenizer file."""
    (folder / "long.txt").write_text("the same words again and the same words again\n" * 50)
    assert main(folder, "--train_tokenizer", 280, "--output_prefix", tmp_path / "x") == 0
    assert (
        main(
            folder, "--tokenizer", tmp_path / "x.tokenizer.json", "--output_prefix", tmp_path / "y"
        )
        == 0
    )
    for ending in (".bin", ".idx", ".tokenizer.json"):
        assert (
            Path(f"{tmp_path / 'x'}{ending}").read_bytes()
            == Path(f"{tmp_path / 'y'}{ending}").read_bytes()
        )
    assert (
        texts(tmp_path / "y")[-1].startswith("the same words")
        and summary(tmp_path / "y")["vocab_size"] == 280
    )
    capsys.readouterr()
    assert main(folder, "--train_tokenizer", 5000, "--output_prefix", tmp_path / "z") == 0
    assert "the texts are too small for a vocabulary of 5000" in capsys.readouterr().err


def test_prepare_data_refuses_to_overwrite(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing pair stays as it is unless --overwrite is given, and also when an overwriting run
    fails."""
    prefix = tmp_path / "x"
    assert main(folder, "--output_prefix", prefix) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("x.*")}
    assert len(before) == 4
    assert main(folder, "--output_prefix", prefix) == 0  # the same again: nothing to do
    assert "nothing to do" in capsys.readouterr().out
    (folder / "b.txt").write_text("changed\n")
    assert main(folder, "--output_prefix", prefix) == 2
    assert (
        "x.idx: exists; choose another --output_prefix, or replace it with --overwrite"
        in capsys.readouterr().err
    )
    assert (
        main(folder, "--output_prefix", prefix, "--overwrite", "--strict", "--train_tokenizer", 257)
        == 3
    )
    assert {path: path.read_bytes() for path in tmp_path.glob("x.*")} == before
    assert main(folder / "b.txt", "--output_prefix", prefix, "--overwrite") == 0
    assert texts(prefix) == ["changed\n"]


def test_refusals_have_codes_and_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage 2, data 3, storage 8; the message names the file or the flag."""
    prefix = ("--output_prefix", tmp_path / "x")
    blocked = tmp_path / "file"
    blocked.write_text(" ")
    cases = [
        (3, "missing: no such file or folder", (tmp_path / "missing", *prefix)),
        (3, "ends in .rs (prepare_data --suffix)", (folder, "--suffix", ".rs", *prefix)),
        (3, "no documents left to write (1 skipped)", (blocked, *prefix)),
        (3, "t.json: cannot be read", (folder, "--tokenizer", tmp_path / "t.json", *prefix)),
        (2, "vocabulary of 5 is too small", (folder, "--train_tokenizer", "5", *prefix)),
        (2, "--suffix", (folder, "--suffix", ",", *prefix)),
        (
            2,
            "names a folder; add a name for the files",
            (folder, "--output_prefix", f"{tmp_path}/.."),
        ),
        (8, "cannot be created", (folder, "--output_prefix", blocked / "x" / "y")),
    ]
    for code, fact, arguments in cases:
        assert main(*arguments) == code, fact
        errors = [
            line for line in capsys.readouterr().err.splitlines() if not line.startswith("skipped ")
        ]
        assert len(errors) == 1 and errors[0].startswith("ERROR: ") and fact in errors[0]
    for flags in ((), (*prefix, "--over"), (*prefix, "--tokenizer=byte", "--train_tokenizer=300")):
        assert main(folder, *flags) == 2
    assert not list(tmp_path.glob("x.*"))


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    """Not installed; nothing on standard error."""
    source = tmp_path / "in.jsonl"
    source.write_text((json.dumps({"text": "some words " * 100}) + "\n") * 100)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), str(source), "--output_prefix", "x"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert IndexedDataset(str(tmp_path / "x")).num_tokens == 100 * (1100 + 1)
    assert {path.suffix for path in tmp_path.glob("x.*")} == {".bin", ".idx", ".json"}
    assert (
        ByteTokenizer().decode(IndexedDataset(str(tmp_path / "x")).document(0))
        == "some words " * 100
    )
