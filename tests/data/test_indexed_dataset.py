"""The .bin/.idx format: byte compatibility with Megatron-LM's layout, damage of every kind, killed
writers."""

import itertools
import multiprocessing
import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data import indexed_dataset
from megatron_lite.data.disk_array import DataFile
from megatron_lite.data.indexed_dataset import (
    HEADER,
    MAGIC,
    IndexedDataset,
    IndexedDatasetWriter,
    smallest_dtype,
)
from megatron_lite.errors import DataError, StorageError
from tests.support.token_files import write_counting, write_documents

# Documents of odd lengths, some empty, at the start, in the middle and at the end.
DOCUMENTS: list[list[int]] = [[], [5, 1, 2], [7], [], [], [9, 8, 7, 6, 5, 4], [3, 3], []]


def megatron_bytes(documents: list[list[int]], code: int, letter: str) -> tuple[bytes, bytes]:
    """(.idx, .bin) as megatron-core's _IndexWriter lays them out, written by hand, independently of
    our writer."""
    count, sizes = len(documents), [len(document) for document in documents]
    itemsize = struct.calcsize("<" + letter)
    pointers = [itemsize * sum(sizes[:number]) for number in range(count)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, count + 1)
    index += struct.pack(f"<{count}i{count}q{count + 1}q", *sizes, *pointers, *range(count + 1))
    return index, b"".join(
        struct.pack(f"<{len(document)}{letter}", *document) for document in documents
    )


def write_pair(folder: Path, index: bytes, tokens: bytes) -> str:
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(tokens)
    return str(folder / "x")


def open_error(prefix: str) -> str:
    """Open a data set, which must raise a DataError, and return its message of one line."""
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


KINDS = [
    (1, "B", "|u1"),
    (2, "b", "|i1"),
    (3, "h", "<i2"),
    (4, "i", "<i4"),
    (5, "q", "<i8"),
    (8, "H", "<u2"),
]


@pytest.mark.parametrize(("code", "letter", "dtype"), KINDS)
def test_reads_and_writes_megatrons_bytes(
    tmp_path: Path, code: int, letter: str, dtype: str
) -> None:
    """Our reader reads Megatron's layout, and our writer writes the same bytes, for every integer
    dtype."""
    index, tokens = megatron_bytes(DOCUMENTS, code, letter)
    dataset = IndexedDataset(write_pair(tmp_path, index, tokens))
    assert [
        dataset.document(number).tolist() for number in range(dataset.num_documents)
    ] == DOCUMENTS
    assert dataset.num_tokens == sum(map(len, DOCUMENTS)) and dataset.tokens.dtype == np.dtype(
        dtype
    )
    write_documents(tmp_path / "ours", DOCUMENTS, dtype)
    assert (tmp_path / "ours.idx").read_bytes() == index
    assert (tmp_path / "ours.bin").read_bytes() == tokens
    assert sorted(os.listdir(tmp_path)) == ["ours.bin", "ours.idx", "x.bin", "x.idx"]


def test_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    """Megatron allows several sequences in a document; each is read as a document of its own."""
    index, tokens = megatron_bytes([[1, 2], [3], [4]], 8, "H")
    index = index[:26] + struct.pack("<Q", 2) + index[34:-32] + struct.pack("<2q", 0, 3)
    assert IndexedDataset(write_pair(tmp_path, index, tokens)).num_documents == 3


def test_empty_data_set_opens(tmp_path: Path) -> None:
    """No documents is a legal file; the loader, not the reader, refuses it."""
    write_documents(tmp_path / "x", [])
    assert (tmp_path / "x.idx").read_bytes() == megatron_bytes([], 8, "H")[0]
    assert IndexedDataset(str(tmp_path / "x")).num_documents == 0


def test_locate_names_document_and_offset(tmp_path: Path) -> None:
    """Every token of the file is found in its document, never in an empty one."""
    dataset = IndexedDataset(write_pair(tmp_path, *megatron_bytes(DOCUMENTS, 8, "H")))
    expected = [
        (number, offset)
        for number, document in enumerate(DOCUMENTS)
        for offset in range(len(document))
    ]
    assert [dataset.locate(token) for token in range(dataset.num_tokens)] == expected


@pytest.mark.parametrize("version", [1, 2, 3])
def test_truncated_index_is_refused_at_every_length(tmp_path: Path, version: int) -> None:
    """Fast-LLM's versions 2 and 3 differ by one or two bytes if they hold no spans. An index cut at
    or between field boundaries, or with extra bytes, always gives one clear line."""
    index, tokens = megatron_bytes(DOCUMENTS, 8, "H")
    index = index[:9] + struct.pack("<Q", version) + bytes(version - 1) + index[17:]
    dataset = IndexedDataset(write_pair(tmp_path, index, tokens))
    assert [
        dataset.document(number).tolist() for number in range(dataset.num_documents)
    ] == DOCUMENTS
    for length in range(0, len(index), 1 if version == 1 else 3):
        assert f"x.idx: {length:,} bytes, but " in open_error(
            write_pair(tmp_path, index[:length], tokens)
        )
    message = open_error(write_pair(tmp_path, index[:40], tokens))
    assert message.endswith(
        f"x.idx: 40 bytes, but its header describes {len(index)}; copy it again"
    )
    open_error(write_pair(tmp_path, index + b"\0", tokens))


def test_bin_of_another_size_is_refused(tmp_path: Path) -> None:
    """A .bin that lost or gained a byte, a token or half of itself is found at open."""
    index, tokens = megatron_bytes(DOCUMENTS, 8, "H")
    for other in (
        tokens[:-1],
        tokens[:-2],
        tokens[:-12],
        *(tokens + bytes(more) for more in (1, 2, 1000)),
    ):
        assert f"x.bin: {len(other):,} bytes, but " in open_error(
            write_pair(tmp_path, index, other)
        )


# Bytes [start, end) of the index, what replaces them, and the fact that the message names.
DAMAGE: list[tuple[int, int | None, bytes, str]] = [
    (0, 9, b"NOTANIDX!", "not a token index"),
    (9, 17, struct.pack("<Q", 0), "format version 0"),
    (9, 17, struct.pack("<Q", 4), "format version 4"),
    (9, 17, struct.pack("<QB", 2, 1), "loss-masking spans (format version 2)"),
    (9, 17, struct.pack("<QBB", 3, 0, 1), "preference spans (format version 3)"),
    (1000, None, bytes(len(DOCUMENTS)), "has a mode for each sequence"),
    (17, 18, b"\x06", "floating point"),
    (17, 18, b"\x07", "floating point"),
    (17, 18, b"\x09", "unknown dtype code 9"),
    (17, 18, b"\x00", "unknown dtype code 0"),
    (18, 26, struct.pack("<Q", 2**63), "its header describes"),
    (18, 26, struct.pack("<Q", 2**64 - 1), "its header describes"),
    (26, 34, struct.pack("<Q", 2**61), "its header describes"),
    (38, 42, struct.pack("<i", -3), "document 1 has a size of -3 tokens"),
    (38, 42, struct.pack("<i", 4), "document 2 begins at byte 6 instead of 8"),
    (66, 74, struct.pack("<q", 2), "document 0 begins at byte 2 instead of 0"),
    (-8, None, struct.pack("<q", 9), "document index runs from 0 to 9"),
    (-16, -8, struct.pack("<q", 99), "not in rising order"),
]


def test_damaged_index_is_named(tmp_path: Path) -> None:
    """Damage to any field is refused with the file and the fact."""
    index, tokens = megatron_bytes(DOCUMENTS, 8, "H")
    for start, end, damage, fact in DAMAGE:
        damaged = index[:start] + damage + (b"" if end is None else index[end:])
        message = open_error(write_pair(tmp_path, damaged, tokens))
        assert fact in message and message.startswith(str(tmp_path / "x.idx")), fact


def test_an_index_of_ten_million_documents_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening reads at most 3 MB of it; this sparse file stands for 200 MB."""
    count, read = 10_000_000, DataFile.read
    with open(tmp_path / "x.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, 2))
        file.truncate(HEADER.size + 12 * count + 8)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<q", count))
    (tmp_path / "x.bin").touch()
    sizes: list[int] = []

    def counted(self: DataFile, offset: int, size: int) -> bytes:
        sizes.append(size)
        return read(self, offset, size)

    monkeypatch.setattr(DataFile, "read", counted)
    assert IndexedDataset(str(tmp_path / "x")).num_documents == count
    assert sum(sizes) < 3_000_000


def test_damage_between_the_checked_pieces_is_found_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large index some pieces are checked at the start; every other entry is checked when it
    is used."""
    monkeypatch.setattr(indexed_dataset, "CHECKED", 8)
    monkeypatch.setattr(indexed_dataset, "CHECKED_PIECES", 4)
    sizes = np.random.default_rng(0).integers(0, 9, 60).tolist()
    index, tokens = megatron_bytes([[0] * size for size in sizes], 8, "H")
    generator = random.Random(0)
    at_open = 0
    used = 0
    for _ in range(120):
        damaged, place = bytearray(index), generator.randrange(34, 34 + 12 * len(sizes))
        damaged[place] ^= generator.randrange(1, 256)
        prefix = write_pair(tmp_path, bytes(damaged), tokens)
        try:
            dataset = IndexedDataset(prefix)
        except DataError:
            at_open += 1
            continue
        with pytest.raises(DataError):
            for document in range(len(sizes) + 1):
                dataset.first_token(document)
        used += 1
    assert at_open > 6 and used > 60


def read_all(dataset: IndexedDataset, borders: bool) -> None:
    """Read whatever a run reads, and check that it adds up."""
    if borders:
        for start in range(0, dataset.num_tokens - 3, 3):
            lengths = [length for _, length in dataset.runs(start, 3)]
            assert sum(lengths) == 3 and min(lengths) > 0
    for number in range(dataset.num_documents):
        assert len(dataset.document(number)) == dataset.sizes[number]
    for file in (dataset.tokens.file, dataset.pointers.file):
        assert file.check() is None


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_headers_never_do_anything_but_a_data_error(tmp_path: Path, count: int) -> None:
    """Random damage to the header and the tables ends in a DataError or in a data set that reads as
    it says."""
    index, tokens = megatron_bytes(DOCUMENTS, 8, "H")
    generator = random.Random(0)
    refused = 0
    for number in range(count):
        damaged = bytearray(index)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(34 if generator.random() < 0.7 else len(index))] = (
                generator.randrange(256)
            )
        if number % 10 == 0:  # a version with spans, by chance cut short
            damaged[9:17] = struct.pack("<Q", generator.choice([2, 3]))
            damaged[17:17] = bytes(generator.randint(0, 2))
        prefix = write_pair(tmp_path, bytes(damaged), tokens)
        try:
            dataset = IndexedDataset(prefix)
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            read_all(dataset, borders=True)
    assert refused > 0.9 * count


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["before", "while open"])
def test_files_cut_at_random_never_do_anything_but_a_data_error(
    tmp_path: Path, when: str, count: int
) -> None:
    """Cut before it is opened, or while it is open: one line, and never a signal, a hang or other
    data."""
    sizes = np.random.default_rng(1).integers(0, 9, 100).tolist()
    whole = dict(
        zip((".idx", ".bin"), megatron_bytes([[7] * size for size in sizes], 8, "H"), strict=True)
    )
    generator = random.Random(1)
    for _ in range(count):
        prefix = write_pair(tmp_path, *whole.values())
        ending = generator.choice(list(whole))
        dataset = IndexedDataset(prefix) if when == "while open" else None
        os.truncate(prefix + ending, generator.randrange(len(whole[ending])))
        with pytest.raises(DataError, match=r"^[^\n]*x\.(idx|bin): [^\n]*$"):
            read_all(dataset or IndexedDataset(prefix), borders=generator.random() < 0.5)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Opening a named pipe would wait for a writer for ever."""
    os.mkfifo(tmp_path / "x.idx")
    assert "x.idx: is a device, not a file" in open_error(str(tmp_path / "x"))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    """Missing halves, folders, and prefixes with an ending are told apart."""
    assert "x: no such file, folder or pair" in open_error(str(tmp_path / "x"))
    write_pair(tmp_path, *megatron_bytes(DOCUMENTS, 8, "H"))
    assert f"without its ending: {tmp_path / 'x'}" in open_error(str(tmp_path / "x.bin"))
    (tmp_path / "text.txt").write_text("words")
    assert "evaluate --text reads a text" in open_error(str(tmp_path / "text.txt"))
    (tmp_path / "x.bin").unlink()
    assert "x.bin: no such file" in open_error(str(tmp_path / "x"))
    (tmp_path / "y.idx").mkdir()
    assert "y.idx: is a folder" in open_error(str(tmp_path / "y"))
    open_error("zero\0byte")


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Token ids beyond the dtype are an error, and an error leaves no file behind."""
    for tokens in ([300], [-1]):
        with pytest.raises(DataError, match="does not fit uint8"):
            write_documents(tmp_path / "x", [tokens], "|u1")
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="cannot be written"):
        IndexedDatasetWriter(str(tmp_path / "missing" / "x"), "|u1")


def test_second_writer_of_a_prefix_is_refused(tmp_path: Path) -> None:
    """Two writers cannot mix their tokens; the first one is not disturbed."""
    with IndexedDatasetWriter(str(tmp_path / "x"), "|u1") as writer:
        writer.add_document(np.array([1, 2, 3]))
        with pytest.raises(StorageError, match="another process is writing it"):
            IndexedDatasetWriter(str(tmp_path / "x"), "|u1")
    assert IndexedDataset(str(tmp_path / "x")).document(0).tolist() == [1, 2, 3]


def write_until(prefix: str, deadly_call: int) -> None:
    """Write a pair, and die instead of a sync or rename."""
    calls = itertools.count()

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
    write_documents(prefix, [np.arange(1000)] * 5)


def test_killed_writer_leaves_nothing_that_opens(tmp_path: Path) -> None:
    """Killed before each sync and rename in turn, the pair is either complete or cannot be opened;
    a rerun works."""
    prefix = str(tmp_path / "x")
    for deadly_call in range(5):  # two syncs, two renames, the sync of the folder
        writer = multiprocessing.get_context("fork").Process(
            target=write_until, args=(prefix, deadly_call)
        )
        writer.start()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        if deadly_call == 4:
            assert IndexedDataset(prefix).num_tokens == 5000
        else:
            open_error(prefix)
    assert IndexedDataset(write_counting(prefix, [7])).num_tokens == 7
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_smallest_dtype_holds_the_last_id() -> None:
    """Each dtype is used up to its largest id."""
    expected = {256: "|u1", 257: "<u2", 65536: "<u2", 65537: "<i4", 2**31: "<i4", 2**31 + 1: "<i8"}
    assert {size: smallest_dtype(size) for size in expected} == expected
