"""Loading verifies every byte while it reads it: one pass, no wrong bit accepted, no good
checkpoint refused."""

import io
import itertools
import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.checkpoint import blocks, files, manifest
from megatron_lite.errors import DamagedError
from tests.checkpoint.test_damage import (
    AVERAGED,
    FROZEN,
    as_version,
    expect_fallback,
    flip,
    saved_pair,
    seal,
)
from tests.checkpoint.test_writing import SPECS, load, save
from tests.support.fakes import Layout, Values, held, random_values, same


@pytest.mark.parametrize("layout", [{}, FROZEN, AVERAGED], ids=["trained", "frozen", "averaged"])
@pytest.mark.parametrize("num_bytes", [blocks.BLOCK_BYTES, 100, 8])
def test_checksums_of_files_are_those_of_their_bytes(
    layout: dict[str, Any], num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every block, the header and padding included; the last may be shorter."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", num_bytes)
    save(tmp_path, 10, 1, 3, **layout)
    for name, file in manifest.read(tmp_path / "10").files.items():
        data = (tmp_path / "10" / name).read_bytes()
        assert file.size == len(data) and file.block_bytes == num_bytes
        found = [file.block(number) for number in file.blocks]
        starts = range(0, file.size, num_bytes)
        assert found == [
            (at, min(at + num_bytes, file.size), zlib.crc32(data[at:][:num_bytes])) for at in starts
        ]
        assert len(file.crc32) == 8 * len(found)


def test_sums_of_isal_are_those_of_zlib() -> None:
    """Of any length, and continued from any sum; a checkpoint is read with either."""
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert blocks.crc32 is isal_zlib.crc32
    generator = random.Random(0)
    for length in (0, 1, 15, 16, 17, 63, 1000, 2**16 + 5):
        data = memoryview(bytearray(generator.randbytes(length)))
        for before in (0, 1, 2**31, 2**32 - 1):
            assert blocks.crc32(data, before) == zlib.crc32(data, before)


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize(
    "largest", [files.LARGEST_BLOCK_BYTES, 100], ids=["read as a block", "read twice"]
)
def test_older_versions_are_still_read(
    version: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of an older version loads bit for bit, and its damage is found by the checksums
    of its files."""
    monkeypatch.setattr(files, "LARGEST_BLOCK_BYTES", largest)
    tensor = {"tensor_ranks": 2} if version == 5 else {}
    saved_pair(tmp_path, **tensor)
    for folder in tmp_path.iterdir():
        (folder / "manifest.json").write_bytes(seal(as_version(version, folder)))
    content = manifest.read(tmp_path / "20")
    loaded, values, lines = load(tmp_path, 3)
    assert loaded == content and lines == [] and same(values, random_values(SPECS, 2))
    flip(
        tmp_path / "20" / "rank_001.safetensors", -1 + content.files["rank_001.safetensors"].size, 0
    )
    expect_fallback(tmp_path, "rank_001.safetensors: its checksum does not match")


@pytest.mark.parametrize("version", [3, 4, 5])
def test_slices_have_the_form_of_their_version(version: int, tmp_path: Path) -> None:
    """A slice has a checksum in versions 4 and 5 and a run in version 5; both must be counts, a run
    at most all."""
    save(tmp_path, 10, 1)
    values = as_version(version, tmp_path / "10")
    piece = values["parameters"]["head.norm.weight"]["weights"][0]
    good = {3: [], 4: [7], 5: [7, 1]}[version]
    for last in (
        [],
        [7],
        [None],
        [-1],
        ["7"],
        [7, 1],
        [7, 0],
        [7, 2],
        [7, None],
        [7, True],
        [7, 1, 1],
    ):
        piece[4:] = last
        (tmp_path / "10" / "manifest.json").write_bytes(seal(values))
        if last == good and True not in [value is True for value in last]:
            assert (
                manifest.read(tmp_path / "10")
                .parameters["head.norm.weight"]
                .slices["weights"][0]
                .run
                == 1
            )
            continue
        with pytest.raises(DamagedError, match="not the content of version|head.norm.weight"):
            manifest.read(tmp_path / "10")


def test_the_system_reads_ahead_of_what_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints cover the next bytes without a gap, as many as were read in order, up to a limit; a
    jump begins anew."""
    asked: list[tuple[int, int]] = []
    hint: Any = lambda descriptor, offset, size, advice: asked.append((offset, offset + size))  # noqa: E731
    monkeypatch.setattr(os, "posix_fadvise", hint)
    monkeypatch.setattr(files, "AHEAD_BYTES", 80)
    (tmp_path / "file").write_bytes(bytes(1400))
    opened, target = files.Files(tmp_path), torch.empty(10, dtype=torch.uint8)
    for start in (0, 1000):
        asked.clear()
        for end in range(start + 10, start + 400, 10):
            opened.read("file", end - 10, torch.uint8, target)
            covered = asked[-1][1] if asked else start
            assert (
                covered <= end + min(end - start, 80) and covered - end > min(end - start, 80) - 20
            )
        assert asked[0][0] == start and all(
            one[1] == two[0] for one, two in zip(asked, asked[1:], strict=False)
        )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The offsets of all bytes that are read of each rank's file, in order."""
    found: dict[str, list[int]] = {}
    lock = threading.Lock()

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            start, count = self.tell(), super().readinto(buffer)
            with lock:
                found.setdefault(
                    Path(os.readlink(f"/proc/self/fd/{self.fileno()}")).name, []
                ).extend(range(start, start + count))
            return count

    monkeypatch.setattr("megatron_lite.run.regular_files.io.FileIO", Counting)
    return found


@pytest.mark.parametrize(
    ("saved", "layout"),
    [({}, {}), (FROZEN, FROZEN), (AVERAGED, AVERAGED), ({}, AVERAGED), (FROZEN, {})],
    ids=["trained", "frozen", "averaged", "averages begin", "training begins"],
)
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_each_block_is_read_once(
    saved: dict[str, Any],
    layout: dict[str, Any],
    saving: int,
    loading: int,
    tmp_path: Path,
    read: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over all ranks, the bytes read are those of the files; a rank of the same layout reads its
    own file in order.

    Other ranks also read the blocks around the ends of their shards.
    """
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    save(tmp_path, 10, 1, saving, **saved)
    load(tmp_path, loading, **layout)
    content = manifest.read(tmp_path / "10")
    for name, file in content.files.items():
        offsets = [at for at in read[name] if at < file.size]
        assert {*offsets} == {*range(file.size)}
        if saving == loading and saved == layout:
            turns = sum(two < one for one, two in itertools.pairwise(offsets))
            assert turns <= 1 and len(offsets) == file.size, (
                "what is no parameter's is read at the end"
            )
        again = len(offsets) - file.size
        ends = sum(
            len(pieces) for entry in content.parameters.values() for pieces in entry.slices.values()
        )
        assert again <= 64 * (ends + 12 * loading) and max(Counter(offsets).values()) <= 3, again


@pytest.mark.parametrize(
    ("saving", "loading"),
    [((4, 2), (4, 2)), ((4, 2), (2, 1)), ((2, 1), (4, 4)), ((2, 2), (4, 4))],
    ids=str,
)
def test_bytes_that_tensor_parallel_ranks_read_again(
    saving: tuple[int, int],
    loading: tuple[int, int],
    tmp_path: Path,
    read: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(ranks, tensor-parallel among them): all bytes are read, those of the same layout once but
    for shared blocks.

    With another one, rows are read once by each rank that needs some of their columns.
    """
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 16)
    save(tmp_path, 10, 1, saving[0], tensor_ranks=saving[1])
    values = load(tmp_path, loading[0], tensor_ranks=loading[1])[1]
    assert same(values, random_values(SPECS, 1))
    for name, file in manifest.read(tmp_path / "10").files.items():
        counts = Counter(at for at in read[name] if at < file.size)
        assert {*counts} == {*range(file.size)} and max(counts.values()) <= 2 * loading[1]


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((4, 2), (4, 2)),
        ((4, 2), (2, 1)),
        ((2, 1), (4, 2)),
        ((4, 4), (2, 2)),
        ((2, 1), (1, 1)),
        ((2, 1), (3, 1)),
    ],
    ids=str,
)
def test_a_wrong_bit_of_any_read_is_found(
    saving: tuple[int, int],
    loading: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every 30th read, be it one of several of the same bytes: what any rank received is what
    counts."""
    for iteration in (10, 20):
        save(tmp_path, iteration, iteration // 10, saving[0], tensor_ranks=saving[1])
    number, lock = itertools.count(), threading.Lock()
    wrong = -1

    class Flaky(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            if "/20/rank_" in os.readlink(f"/proc/self/fd/{self.fileno()}"):
                with lock:
                    if next(number) == wrong:
                        buffer[count // 2] ^= 4
            return count

    monkeypatch.setattr("megatron_lite.run.regular_files.io.FileIO", Flaky)
    assert load(tmp_path, loading[0], tensor_ranks=loading[1])[2] == []
    for wrong in range(0, next(number), 30):
        number = itertools.count()
        loaded, _, lines = load(tmp_path, loading[0], tensor_ranks=loading[1])
        assert loaded is not None and loaded.iteration == 10, wrong
        assert len(lines) == 1 and "its checksum does not match" in lines[0], (wrong, lines)


# -- thousands of flips, cuts and clean loads
# --------------------------------------------------------------------------


class Case(NamedTuple):
    """Two checkpoints, and the ranks and layout that read them."""

    root: Path
    ranks: int
    layout: dict[str, Any]
    older: Values
    newer: Values


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Saved and loaded by the same number of ranks, more, and fewer; with frozen weights, and with
    averages."""
    made = []
    tensor = {"tensor_ranks": 2}
    layouts = ((1, 1, {}), (2, 2, {}), (2, 1, FROZEN), (1, 2, {}), (2, 2, AVERAGED), (4, 2, tensor))
    for saving, loading, layout in layouts:
        root = tmp_path_factory.mktemp("checkpoints")
        for iteration in (10, 20):
            save(root, iteration, iteration // 10, saving, **layout)
        values = [
            held(random_values(SPECS, seed, manifest.KINDS), Layout(**layout)) for seed in (1, 2)
        ]
        made.append(Case(root, loading, layout, *values))
    return made


def damage(folder: Path, generator: random.Random) -> tuple[str, Callable[[], None]]:
    """Flip a bit of a random file, or cut the file; return its name, and what undoes the damage."""
    path = generator.choice(sorted(folder.iterdir()))
    size = path.stat().st_size
    if generator.random() < 0.8:
        offset, bit = generator.randrange(size), generator.randrange(8)
        flip(path, offset, bit)
        return path.name, lambda: flip(path, offset, bit)
    content = path.read_bytes()
    os.truncate(path, generator.randrange(size))
    return path.name, lambda: path.write_bytes(content) and None


def hurt_and_load(cases: list[Case], count: int) -> None:
    """Damage and load `count` times: every time one line names the file, and the older checkpoint
    is loaded."""
    generator = random.Random(4)
    for number in range(count):
        case = cases[number % len(cases)]
        name, undo = damage(case.root / "20", generator)
        loaded, values, lines = load(case.root, case.ranks, **case.layout)
        undo()
        assert (
            loaded is not None and loaded.iteration == 10 and len(lines) == 1 and name in lines[0]
        ), (number, lines)
        assert number % 20 or same(values, case.older), number


def load_clean(cases: list[Case], count: int) -> None:
    """Load undamaged checkpoints `count` times: no line, the newest values."""
    for number in range(count):
        case = cases[number % len(cases)]
        loaded, values, lines = load(case.root, case.ranks, **case.layout)
        assert loaded is not None and loaded.iteration == 20 and lines == [], (number, lines)
        assert number % 20 or same(values, case.newer), number


def test_random_damage_is_found(cases: list[Case]) -> None:
    """100 random flips and cuts are found, and 20 clean loads give no alarm."""
    hurt_and_load(cases, 100)
    load_clean(cases, 20)


@pytest.mark.slow
def test_ten_thousand_damages_are_found(cases: list[Case]) -> None:
    """10,000 random flips and cuts are all found, and 1,000 clean loads give no alarm."""
    hurt_and_load(cases, 10_000)
    load_clean(cases, 1000)
