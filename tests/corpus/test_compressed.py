"""Compressed files against the tools of their formats: the whole content, or an error; never a part
without a word."""

import bz2
import gzip
import json
import lzma
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.corpus.documents import Reading, TextFields, cut_file
from megatron_lite.corpus.inputs import find_inputs
from megatron_lite.errors import DataError

TEXTS = [f"document {number} {'x' * number}" for number in range(9)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]


def zstd(data: bytes) -> bytes:
    return bytes(
        pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)
    )


TOOLS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    ".gz": ("gzip", gzip.compress),
    ".bz2": ("bzip2", bz2.compress),
    ".xz": ("xz", lzma.compress),
    ".zst": ("zstd", zstd),
}


def texts_of(path: Path) -> list[str]:
    reading = Reading(
        [span for file in find_inputs([str(path)]) for span in cut_file(file, 1)],
        TextFields(("text",)),
    )
    found = list(reading.documents())
    assert not reading.findings.fault_counts
    return found


def by_tool(ending: str, data: bytes) -> bytes | None:
    """What the tool prints; None if it ends with an error."""
    tool = TOOLS[ending][0]
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    done = subprocess.run([tool, "-dc"], input=data, capture_output=True, check=False)
    return None if done.returncode else done.stdout


def check(path: Path, ending: str, data: bytes, is_damaged: bool) -> None:
    """Compare with the tool: what it prints, or all, since tools differ in the padding that they
    take, or an error.

    bzip2 lets pass as garbage what begins no stream, and an older zstd some flipped bits.
    """
    path.write_bytes(data)
    expected = by_tool(ending, data)
    try:
        found = texts_of(path)
    except DataError as error:
        assert str(path) in str(error) and (expected is None or is_damaged)
        return
    # of a file that was cut between two streams, fewer
    printed = expected == b"".join(LINES[: len(found)])
    assert found == TEXTS or (printed and found == TEXTS[: len(found)])


@pytest.mark.parametrize("ending", TOOLS)
def test_several_streams_with_padding(ending: str, tmp_path: Path) -> None:
    """Streams of a few lines each, with zeros between and after them, as parallel compressors and
    tapes write them."""
    compress, path = TOOLS[ending][1], tmp_path / f"x.jsonl{ending}"
    streams = [compress(b"".join(LINES[start : start + 3])) for start in (0, 3, 6)]
    for zeros in (0, 1, 3, 4, 8, 1 << 14):
        for data in (bytes(zeros).join(streams), b"".join(streams) + bytes(zeros)):
            check(path, ending, data, False)
    path.write_bytes(bytes(4).join(streams) + bytes(8))
    assert texts_of(path) == TEXTS
    for data in (b"", bytes(8), bytes(4) + streams[0]):
        path.write_bytes(data)
        with pytest.raises(DataError, match="damaged or incomplete compressed data"):
            texts_of(path)


@pytest.mark.parametrize("ending", TOOLS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_damage_anywhere(ending: str, seed: int, tmp_path: Path) -> None:
    """A flipped bit, a cut, or garbage in any stream: all documents, or an error that names the
    file."""
    generator, compress = random.Random(seed), TOOLS[ending][1]
    whole = b"".join(compress(b"".join(LINES[start : start + 3])) for start in (0, 3, 6))
    for _ in range(20):
        data = bytearray(whole)
        place = generator.randrange(len(data))
        kind = generator.choice(("bit", "cut", "garbage"))
        if kind == "bit":
            data[place] ^= 1 << generator.randrange(8)
        elif kind == "cut":
            del data[place:]
        else:
            data[place:place] = generator.randbytes(5)
        check(tmp_path / f"x.jsonl{ending}", ending, bytes(data), True)
    second = len(compress(b"".join(LINES[:3])))
    for bit in range(16):  # the magic of the second stream
        data = bytearray(whole)
        data[second + bit // 8] ^= 1 << bit % 8
        check(tmp_path / f"x.jsonl{ending}", ending, bytes(data), True)


def test_zstd_with_large_windows_and_dictionaries(tmp_path: Path) -> None:
    """`zstd --long=31` needs a window of 2 GiB; a file that needs a dictionary is told so, not
    called damaged."""
    zstandard, path = pytest.importorskip("zstandard"), tmp_path / "x.jsonl.zst"
    if shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    for size in (27, 28, 31):
        path.write_bytes(
            subprocess.run(
                ["zstd", f"--long={size}"], input=b"".join(LINES), capture_output=True
            ).stdout
        )
        assert texts_of(path) == TEXTS
    words = zstandard.train_dictionary(512, [line * 9 for line in LINES] * 99)
    path.write_bytes(zstandard.ZstdCompressor(dict_data=words).compress(b"".join(LINES)))
    with pytest.raises(
        DataError, match=r"x.jsonl.zst: was compressed with a dictionary.*zstd -d -D"
    ):
        texts_of(path)
