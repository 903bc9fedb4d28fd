"""Every kind of input gives the same documents; damaged files are errors that name them."""

import bz2
import gzip
import importlib
import json
import lzma
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import prepare_data
from megatron_lite.corpus import inputs
from megatron_lite.corpus.documents import Reading, TextFields, cut_file
from megatron_lite.corpus.inputs import expand_braces, find_inputs, table_rows
from megatron_lite.corpus.pieces import Encoding, Recipe, plan_pieces
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.errors import DataError, UsageError

TEXTS = [f"document {number} {'ü' * (number % 7)}" for number in range(100)]
LINES = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS).encode()
RECIPE = Recipe(
    Encoding("", True, "", 257, None, 256, False), "", TextFields(("text",)), False, False, None
)


def read(*names: Path | str, key: str = "text", cut: int = 1 << 30) -> list[str]:
    """The documents of files, cut into spans of about `cut` bytes; there must be no fault."""
    spans = [
        span for file in find_inputs([str(name) for name in names]) for span in cut_file(file, cut)
    ]
    reading = Reading(spans, TextFields((key,)))
    found = list(reading.documents())
    assert not reading.findings.fault_counts and reading.read_bytes == sum(
        span.size_bytes for span in spans
    )
    return found


def zstd(data: bytes) -> bytes:
    """Two frames, as appending to a file makes them."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    return bytes(compressor.compress(data[:1000]) + compressor.compress(data[1000:]))


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_lines_and_text(ending: str, tmp_path: Path) -> None:
    """Compressed files give what plain ones give; one that was cut short anywhere is an error, not
    a shorter text."""
    data = COMPRESS[ending](LINES)
    path, text = tmp_path / f"x.jsonl{ending}", tmp_path / f"x.txt{ending}"
    path.write_bytes(data)
    text.write_bytes(COMPRESS[ending](b"one text" * 500))
    assert read(path) == TEXTS and read(text) == ["one text" * 500]
    for size in (len(data) - 1, len(data) // 2, 7):
        path.write_bytes(data[:size])
        with pytest.raises(
            DataError, match=f"x.jsonl{ending}: damaged or incomplete compressed data"
        ):
            read(path)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(DataError, match=f"x.jsonl{ending}: damaged or incomplete compressed data"):
        read(path)


@pytest.mark.parametrize("cut", [1, 7, 64, 1000])
def test_a_line_belongs_to_one_span(cut: int, tmp_path: Path) -> None:
    """However a .jsonl file is cut, each line is read once, in order, also without a newline at the
    end."""
    for number, data in enumerate((LINES, LINES.rstrip(b"\n"), b"\xef\xbb\xbf" + LINES)):
        (tmp_path / f"{number}.jsonl").write_bytes(data)
        assert read(tmp_path / f"{number}.jsonl", cut=cut) == TEXTS
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert read(tmp_path / "empty.jsonl", cut=cut) == []


def test_parquet(tmp_path: Path) -> None:
    """Row groups in any number of spans; a column inside another; a missing column and a cut file
    are named."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    rows = [{"text": text, "deep": {"a": text.upper()}, "number": 1} for text in TEXTS]
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    for cut in (1, 1 << 30):
        assert read(path, cut=cut) == TEXTS
    assert len(cut_file(find_inputs([str(path)])[0], 1)) == 15
    assert read(path, key="deep.a") == [text.upper() for text in TEXTS]
    with pytest.raises(
        DataError, match=r"x.parquet: has no column body \(--json_key\), but text, deep, number"
    ):
        read(path, key="body")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="x.parquet: damaged or not what its name says"):
        read(path)


def test_arrow_files(tmp_path: Path) -> None:
    """Both forms of arrow files: a stream, and with a footer; a cut one is named."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": TEXTS, "number": list(range(100))})
    for name, writer in (("s.arrow", arrow.ipc.new_stream), ("f.arrow", arrow.ipc.new_file)):
        with writer(str(tmp_path / name), table.schema) as output:
            output.write_table(table, max_chunksize=9)
        assert read(tmp_path / name) == TEXTS
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1500])
        with pytest.raises(DataError, match=f"{name}: damaged or not what its name says"):
            read(tmp_path / name)


def test_folders_saved_by_datasets(tmp_path: Path) -> None:
    """A saved dataset is read in the order of its rows, also after a shuffle; one with splits asks
    for one."""
    datasets = pytest.importorskip("datasets")
    shuffled = datasets.Dataset.from_dict({"text": TEXTS}).shuffle(seed=1)
    shuffled.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert read(tmp_path / "saved") == shuffled["text"][:]
    datasets.DatasetDict({"train": shuffled, "test": shuffled}).save_to_disk(
        str(tmp_path / "splits")
    )
    with pytest.raises(
        UsageError, match="splits: holds the splits test, train; name one: .*splits/test"
    ):
        read(tmp_path / "splits")
    assert read(tmp_path / "splits" / "train") == shuffled["text"][:]


def test_names_are_expanded(tmp_path: Path) -> None:
    """Lists and ranges in braces, patterns; the order is that of the names given, then sorted."""
    assert expand_braces("{b,a}/{08..11}.txt") == [
        f"{x}/{n}.txt" for x in "ba" for n in ("08", "09", "10", "11")
    ]
    assert expand_braces("{a,b{1,2}}{") == ["a{", "b1{", "b2{"] and expand_braces("{x}") == ["{x}"]
    for name in (
        "b/2.txt",
        "b/1.txt",
        "a/1.txt",
        "a/deep/2.txt",
        "a/3.jsonl.gz",
        "odd{1,2}.txt",
        "a/skip.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(*names: str) -> list[str]:
        return [
            file.path.removeprefix(f"{tmp_path}/")
            for file in find_inputs([f"{tmp_path}/{name}" for name in names])
        ]

    assert found("{b,a}/1.txt") == ["b/1.txt", "a/1.txt"]
    assert found("b/*.txt", "a/**/*.txt") == ["b/1.txt", "b/2.txt", "a/1.txt", "a/deep/2.txt"]
    assert found("odd{1,2}.txt") == ["odd{1,2}.txt"]  # a name that exists is meant as it is
    assert found("a") == ["a/1.txt", "a/3.jsonl.gz", "a/deep/2.txt"]
    with pytest.raises(DataError, match="no file matches this pattern"):
        found("c/*.txt")
    with pytest.raises(UsageError, match="stands for more than 1,000,000 names"):
        found("{0..9999999}")


@pytest.mark.parametrize(
    ("name", "package"),
    [("x.parquet", "pyarrow"), ("x.arrow", "pyarrow"), ("x.jsonl.zst", "zstandard")],
)
def test_a_missing_package_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the packages of the extra: one line with the file, the package and the command that
    installs it."""
    (tmp_path / name).write_bytes(b"0123456789")
    original = importlib.import_module

    def import_module(wanted: str) -> Any:
        if wanted.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return original(wanted)

    monkeypatch.setattr(importlib, "import_module", import_module)
    (file,) = find_inputs([str(tmp_path / name)])
    with pytest.raises(UsageError, match=f"needs the package {package}"):
        plan_pieces([file], RECIPE)  # before any work
    with pytest.raises(
        UsageError,
        match=rf"{name} is .*, which needs the package {package}: pip install '\.\[data\]'",
    ):
        read(tmp_path / name)


RECORDS = [json.loads(line) for line in LINES.splitlines()]
PRETTY = json.dumps(RECORDS, indent=2).encode()


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("c4.00000.json", LINES),
        ("bom.json", b"\xef\xbb\xbf" + LINES),
        ("array.json", json.dumps(RECORDS).encode()),
        ("pretty.json", PRETTY),
        ("part-00000", LINES),
        ("lines.txt", LINES),
        ("lines.jl", LINES),
    ],
)
def test_json_under_other_endings(ending: str, name: str, data: bytes, tmp_path: Path) -> None:
    """Lines of records and arrays of them, as files and, with a known ending, in a folder, as
    `datasets` reads them."""
    path = tmp_path / (name + ending)
    path.write_bytes(COMPRESS[ending](data) if ending else data)
    assert read(path) == TEXTS
    if name.endswith(".json"):
        assert read(tmp_path) == TEXTS
        if data == LINES and not ending:
            assert read(path, cut=64) == TEXTS  # by all cores
    if ending in ("", ".gz") and name.endswith(".json") and not name.startswith("bom"):
        datasets = pytest.importorskip("datasets")
        found = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert found["text"][:] == TEXTS


def test_json_that_is_no_lines(tmp_path: Path) -> None:
    """One object is one record; what is no JSON stops with its name; one line of JSON in a text is
    a text."""
    for name, text in {
        "one.json": json.dumps(RECORDS[0], indent=1),
        "line.json": json.dumps(RECORDS[0]),
    }.items():
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) == TEXTS[:1]
    for text in ('{"text": "a"}', '{"text": "a"}\nprose\n', "[1]\n[2]\n", "{\n}\n", "", "\n\n"):
        (tmp_path / "x.txt").write_text(text)
        assert find_inputs([str(tmp_path / "x.txt")])[0].kind == "text"
    (tmp_path / "empty.json").touch()
    assert read(tmp_path / "empty.json") == []
    for data in (PRETTY[:-9], PRETTY.replace(b"document 5", b"\xff"), b"[" * 100_000, b"prose"):
        (tmp_path / "array.json").write_bytes(data)
        with pytest.raises(DataError, match=r"array\.json: damaged or not what its name says: "):
            read(tmp_path / "array.json")


@pytest.mark.parametrize("size", [1, 7, 64])
def test_an_array_is_read_a_few_records_at_a_time(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items are those of `json.loads` wherever windows end, and damage is an error where it is
    one there."""
    path, randomly = tmp_path / "array.json", random.Random(1)
    path.write_bytes(PRETTY + b" " * (4 << 20))
    with open(path, "rb") as file:
        assert next(table_rows(file, find_inputs([str(path)])[0], ("text",), 0, 0)) == RECORDS[0]
        assert file.tell() <= 2 << 20
    monkeypatch.setattr(inputs, "JSON_BYTES", size)
    odd = [
        {"text": 'a "\\\n\u00e9\ud83d'},
        -1e300,
        float("-inf"),
        True,
        None,
        "",
        "\U0001f389" * 40,
        [[], {}],
        123456,
    ]
    for trial in range(120):
        text = json.dumps(
            randomly.sample(odd, randomly.randrange(1, 9)),
            indent=trial % 3,
            ensure_ascii=trial % 2 == 0,
        )
        if trial % 4 > 1:
            place = randomly.randrange(len(text))
            text = (
                text[:place]
                + randomly.choice(["", "]", '"', ",", "x"])
                + text[place + randomly.randrange(2) :]
            )
        path.write_bytes(text.encode("utf-16" if trial % 5 == 0 else "utf-8", "surrogatepass"))
        described, found = find_inputs([str(path)])[0], list[Any]()
        try:
            expected = json.loads(path.read_bytes())
        except ValueError as error:
            expected = error
        with open(path, "rb") as file:
            try:
                found += table_rows(file, replace(described, kind="json"), (), 0, 0)
            except DataError as error:
                assert isinstance(expected, ValueError), (text, error)
                continue
        assert repr(found) == repr(expected if isinstance(expected, list) else [expected]), text


def test_damage_in_an_array_has_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Far behind the first window, in characters of the file; exit code 3."""
    path, text = tmp_path / "x.json", "[" + '{"text": "é"},\n' * 100_000
    for damage, reason in (
        ("{]", "Expecting property name enclosed in double quotes: "),
        ('"', "Invalid control character at: "),
    ):
        path.write_text(text + damage + "\n" * 40)
        assert prepare_data.main([str(path), f"--output_prefix={tmp_path / 'o'}"]) == 3
        said = capsys.readouterr().err
        assert (
            f"{path}: damaged or not what its name says: {reason}" in said
            and "character 1,500,00" in said
        )


def bytes_read() -> int:
    """Bytes that this process has read so far, by the kernel's count."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.parametrize(
    ("name", "begin", "kind", "limit"),
    [
        ("x.txt", b"prose ", "text", 1 << 18),
        ("x.json", b'["prose', "json", 1 << 18),
        ("x.txt", b'{"text": "', "text", 1 << 25),
        ("x.json", b'{"text": "', "jsonl", 1 << 25),
    ],
)
def test_the_kind_of_one_long_line(
    name: str, begin: bytes, kind: str, limit: int, tmp_path: Path
) -> None:
    """200 MB without a line break are not read to find it; a record may be long."""
    with open(tmp_path / name, "wb") as file:
        file.write(begin)
        file.truncate(200_000_000)
    before = bytes_read()
    assert find_inputs([str(tmp_path / name)])[0].kind == kind
    assert bytes_read() - before < limit
    (tmp_path / name).write_text((json.dumps({"text": "x" * 100_000}) + "\n") * 2)
    assert find_inputs([str(tmp_path / name)])[0].kind == "jsonl"


def test_files_that_describe_are_no_documents(tmp_path: Path) -> None:
    """A folder that holds its own tokens: the same command finds its own result, even after it was
    interrupted."""
    (tmp_path / "a.json").write_bytes(LINES)
    options = CorpusOptions((str(tmp_path),), str(tmp_path / "x"), TokenizerChoice())
    assert prepare(options)[1] and not prepare(options)[1]
    for name in (
        "x.partial/1a.json",
        "x.partial/tokenizer.json",
        "b/copied.json",
        "tokenizer_config.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"documents": 1}')
    assert not prepare(options)[1] and [
        Path(file.path).name for file in find_inputs([str(tmp_path)])
    ] == ["a.json"]
