"""Loading verifies every byte while it reads it: one pass, no wrong bit accepted, no good checkpoint refused."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.checksums import Checksums, CutChecksums, Piece, combine, joined, missing
from megatron_lite.errors import DamagedError
from tests.checkpoint.test_damage import AVERAGED, FROZEN, expect_fallback, flip, seal
from tests.checkpoint.test_sharded import SPECS, load, save
from tests.support.fakes import Layout, Values, empty_model, held, random_values, same


def test_checksums_of_pieces_are_those_of_the_whole() -> None:
    """Any cuts, empty pieces and long ones; what is missing or there twice is told."""
    generator = random.Random(1)
    for size in (0, 1, 7, 300, 2**20 + 3):
        data = generator.randbytes(size)
        cuts = sorted({0, size, *(generator.randrange(size + 1) for _ in range(5))})
        pieces = [Piece(start, end, zlib.crc32(data[start:end])) for start, end in zip(cuts, cuts[1:], strict=False)]
        generator.shuffle(pieces)
        assert joined(pieces) == zlib.crc32(data) and missing(pieces, size) == []
        if len(pieces) > 1:
            left = pieces.pop()
            assert missing(pieces, size) == [left[:2]] and (joined(pieces) is None or left.end == size)
            assert joined([*pieces, left, left]) is None
    assert combine(zlib.crc32(b"a"), zlib.crc32(b""), 0) == zlib.crc32(b"a")
    zeros = zlib.crc32(bytes(2**16))
    for power in range(16, 40):  # a terabyte of zeros, by doubling
        zeros = combine(zeros, zeros, 2**power)
    assert combine(zlib.crc32(b"x"), zlib.crc32(bytes(2**20)), 2**20) == zlib.crc32(b"x" + bytes(2**20))


def test_pieces_that_touch_are_one() -> None:
    """Bytes in order make one piece per file, whatever is read of other files meanwhile; a jump begins another."""
    checksums = Checksums()
    for file, offset, data in (("a", 0, b"01"), ("a", 2, b"23"), ("b", 9, b"4"), ("a", 4, b"5"), ("a", 1, b"6")):
        checksums.begin(file, offset)
        checksums.add(memoryview(data))
    crc = zlib.crc32
    found = {"a": [(0, 5, crc(b"01235")), (1, 2, crc(b"6"))], "b": [(9, 10, crc(b"4"))]}
    assert checksums.pieces() == found


def test_pieces_are_cut_anywhere() -> None:
    """Data of any lengths, cut within and between them, give the checksums of the ranges and of the whole."""
    generator = random.Random(2)
    for size in (0, 1, 9, 1000):
        data = generator.randbytes(size)
        cuts = [generator.randrange(size + 1) for _ in range(generator.randrange(8))]
        sums, rest = CutChecksums([*cuts, *cuts]), memoryview(data)
        while rest:
            step = generator.randrange(1, 300)
            sums.add(rest[:step])
            rest = rest[step:]
        places = sorted({0, size, *cuts})
        wanted = [(low, high, zlib.crc32(data[low:high])) for low, high in zip(places, places[1:], strict=False)]
        assert sums.pieces() == wanted and joined(sums.pieces()) == zlib.crc32(data)


@pytest.mark.parametrize("layout", [{}, FROZEN, AVERAGED], ids=["trained", "frozen", "averaged"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_checksums_of_slices_and_files_are_those_of_their_bytes(
    layout: dict[str, Any], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slice has the CRC-32 of its own bytes, and every file that of all, whatever is written at a time."""
    for iteration, num_bytes in ((10, files.PIECE_BYTES), (20, 100)):
        monkeypatch.setattr(files, "PIECE_BYTES", num_bytes)
        save(tmp_path, iteration, 1, ranks, **layout)
        content = manifest.read(tmp_path / str(iteration))
        assert content.has_slice_checksums
        for name, slices in content.places().items():
            data = (tmp_path / str(iteration) / name).read_bytes()
            assert content.files[name] == (len(data), zlib.crc32(data))
            for piece, what in slices:
                assert piece.crc32 == zlib.crc32(data[piece.offset : piece.offset + piece.num_bytes]), what


@pytest.mark.parametrize("version", [3, 4])
def test_older_versions_are_still_read(version: int, tmp_path: Path) -> None:
    """A checkpoint of an older version loads bit for bit, and its damage is found by the checksums of its files."""
    for iteration in (10, 20):
        save(tmp_path, iteration, iteration // 10, world_size=2)
        path = tmp_path / str(iteration) / "manifest.json"
        path.write_bytes(seal(as_version(version, json.loads(path.read_bytes()))))
    content = manifest.read(tmp_path / "20")
    assert content.has_slice_checksums == (version == 4)
    loaded, values, lines = load(tmp_path, 3)
    assert loaded == content and lines == [] and same(values, random_values(SPECS, 2))
    flip(tmp_path / "20" / "rank_001.safetensors", -1 + content.files["rank_001.safetensors"].size, 0)
    expect_fallback(tmp_path, "rank_001.safetensors: its checksum does not match")


@pytest.mark.parametrize("version", [3, 4, 5])
def test_slices_have_the_form_of_their_version(version: int, tmp_path: Path) -> None:
    """A slice has a checksum from version 4 on and a run from version 5 on; both must be counts, a run at most all."""
    save(tmp_path, 10, 1)
    values = json.loads((tmp_path / "10" / "manifest.json").read_bytes())
    values = as_version(version, values)
    piece = values["parameters"]["head.norm.weight"]["weights"][0]
    rest = [[], [7], [None], [-1], [1.5], [True], ["7"], [7, 1], [7, 0], [7, 2], [7, None], [7, True], [7, 1, 1]]
    good = {3: [], 4: [7], 5: [7, 1]}[version]
    for last in rest:
        piece[4:] = last
        (tmp_path / "10" / "manifest.json").write_bytes(seal(values))
        if last is rest[rest.index(good)]:
            assert manifest.read(tmp_path / "10").parameters["head.norm.weight"].slices["weights"][0].run == 1
            continue
        with pytest.raises(DamagedError, match=r"'head\.norm\.weight': a slice is malformed"):
            manifest.read(tmp_path / "10")


def as_version(version: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest as an older version had it."""
    values = {**values, "version": version}
    for parameter in values["parameters"].values():
        for kind in manifest.KINDS:
            parameter |= {kind: [piece[: version + 1] for piece in parameter[kind]]} if kind in parameter else {}
    return values


def test_the_system_reads_ahead_of_what_is_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints cover the next bytes without a gap, as many as were read in order, up to a limit; a jump begins anew."""
    asked: list[tuple[int, int]] = []
    hint: Any = lambda descriptor, offset, size, advice: asked.append((offset, offset + size))  # noqa: E731
    monkeypatch.setattr(os, "posix_fadvise", hint)
    monkeypatch.setattr(files, "AHEAD_BYTES", 80)
    ahead = files.ReadAhead(0)
    for start in (0, 1000):
        asked.clear()
        for end in range(start + 10, start + 400, 10):
            ahead.begin(end - 10)
            ahead.add(10)
            covered = asked[-1][1] if asked else start
            assert covered <= end + min(end - start, 80) and covered - end > min(end - start, 80) - 20
        assert asked[0][0] == start and all(one[1] == two[0] for one, two in zip(asked, asked[1:], strict=False))


@pytest.mark.parametrize(
    ("saved", "layout"),
    [({}, {}), (FROZEN, FROZEN), (AVERAGED, AVERAGED), ({}, AVERAGED), (FROZEN, {})],
    ids=["trained", "frozen", "averaged", "averages begin", "training begins"],
)
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_each_byte_is_read_once(
    saved: dict[str, Any],
    layout: dict[str, Any],
    saving: int,
    loading: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over all ranks, the bytes read are those of the files; a rank of the same layout reads its own file in order."""
    save(tmp_path, 10, 1, saving, **saved)
    read: Counter[tuple[str, int]] = Counter()
    order: dict[str, list[int]] = {}
    real = files.read_into

    def read_into(file: io.FileIO, offset: int, target: torch.Tensor, *seen: Any) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name
        read.update((name, offset + place) for place in range(target.numel()))
        order.setdefault(name, []).append(offset)
        real(file, offset, target, *seen)

    monkeypatch.setattr(files, "read_into", read_into)
    load(tmp_path, loading, **layout)
    content = manifest.read(tmp_path / "10")
    assert set(read.values()) == {1} and len(read) == sum(file.size for file in content.files.values())
    if saving == loading and saved == layout:
        assert all(offsets == sorted(offsets) for offsets in order.values())


@pytest.mark.parametrize(
    ("saving", "loading"), [((4, 2), (4, 2)), ((4, 2), (2, 1)), ((2, 1), (4, 4)), ((2, 2), (4, 4))], ids=str
)
def test_bytes_that_tensor_parallel_ranks_read_again(
    saving: tuple[int, int], loading: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(ranks, tensor-parallel among them): all bytes are read, with the same layout only copies again.

    With another one, rows are read once by each rank that needs some of their columns, overlaps for their checksums.
    """
    save(tmp_path, 10, 1, saving[0], tensor_ranks=saving[1])
    read: Counter[tuple[str, int]] = Counter()
    real = files.read_into

    def read_into(file: io.FileIO, offset: int, target: torch.Tensor, *seen: Any) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name
        read.update((name, offset + place) for place in range(target.numel()))
        real(file, offset, target, *seen)

    monkeypatch.setattr(files, "read_into", read_into)
    assert same(load(tmp_path, loading[0], tensor_ranks=loading[1])[1], random_values(SPECS, 1))
    content = manifest.read(tmp_path / "10")
    assert len(read) == sum(file.size for file in content.files.values())
    assert max(read.values()) <= (1 if loading[1] == 1 else 2 * loading[1])
    (_, part), *_ = empty_model(SPECS, Layout(loading[0], 8, tensor_ranks=loading[1]), 0).parts()
    copied = {f"of {slot.spec.name!r}" for slot in part.layout.slots if len(slot.spec.pieces[-1].holders) > 1}
    for piece in content.parameters["blocks.0.mlp.up.weight"].slices["weights"]:
        assert max(read[piece.file, piece.offset + place] for place in range(piece.num_bytes)) <= loading[1]
    for piece, what in itertools.chain(*content.places().values()) if saving == loading else ():
        again = {read[piece.file, piece.offset + place] for place in range(piece.num_bytes)} != {1}
        assert again <= any(what.endswith(name) for name in copied), what


@pytest.mark.parametrize(
    ("saving", "loading"), [((4, 2), (4, 2)), ((4, 2), (2, 1)), ((2, 1), (4, 2)), ((4, 4), (2, 2))], ids=str
)
def test_a_wrong_bit_of_any_read_is_found(
    saving: tuple[int, int], loading: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every 30th read, be it one of several of the same bytes: what any rank received is what counts."""
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

    monkeypatch.setattr("megatron_lite.checkpoint.names.io.FileIO", Flaky)
    assert load(tmp_path, loading[0], tensor_ranks=loading[1])[2] == []
    for wrong in range(0, next(number), 30):
        number = itertools.count()
        loaded, _, lines = load(tmp_path, loading[0], tensor_ranks=loading[1])
        assert loaded is not None and loaded.iteration == 10, wrong
        assert len(lines) == 1 and "its checksum does not match" in lines[0], (wrong, lines)


@pytest.mark.parametrize("loading", [1, 2, 3])
def test_a_bit_that_changes_on_the_way_is_found(loading: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is good, but a rank once receives a wrong bit: what arrives is what counts."""
    for iteration in (10, 20):
        save(tmp_path, iteration, iteration // 10, world_size=2)
    flipped: list[str] = []
    real = io.FileIO

    class Flaky(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            name = os.readlink(f"/proc/self/fd/{self.fileno()}")
            if not flipped and count > 100 and "/20/rank_001" in name:
                flipped.append(name)
                buffer[50] ^= 4
            return count

    monkeypatch.setattr("megatron_lite.checkpoint.names.io.FileIO", Flaky)
    expect_fallback(tmp_path, "rank_001.safetensors: its checksum does not match", world_size=loading)
    assert flipped
    monkeypatch.setattr("megatron_lite.checkpoint.names.io.FileIO", real)
    assert load(tmp_path)[2] == []


# -- thousands of flips, cuts and clean loads --------------------------------------------------------------------------


class Case(NamedTuple):
    """Two checkpoints, and the ranks and layout that read them."""

    root: Path
    ranks: int
    layout: dict[str, Any]
    older: Values
    newer: Values


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Saved and loaded by the same number of ranks, more, and fewer; with frozen weights, and with averages."""
    made = []
    tensor = {"tensor_ranks": 2}
    layouts = ((1, 1, {}), (2, 2, {}), (2, 1, FROZEN), (1, 2, {}), (2, 2, AVERAGED), (4, 2, tensor))
    for saving, loading, layout in layouts:
        root = tmp_path_factory.mktemp("checkpoints")
        for iteration in (10, 20):
            save(root, iteration, iteration // 10, saving, **layout)
        values = [held(random_values(SPECS, seed, manifest.KINDS), Layout(**layout)) for seed in (1, 2)]
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
    """Damage and load `count` times: every time one line names the file, and the older checkpoint is loaded."""
    generator = random.Random(4)
    for number in range(count):
        case = cases[number % len(cases)]
        name, undo = damage(case.root / "20", generator)
        loaded, values, lines = load(case.root, case.ranks, **case.layout)
        undo()
        assert loaded is not None and loaded.iteration == 10 and len(lines) == 1 and name in lines[0], (number, lines)
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


def test_what_was_read_of_a_damaged_checkpoint_is_overwritten(tmp_path: Path) -> None:
    """The last bytes are damaged, so that all shards were filled before: every value is the older checkpoint's."""
    for iteration in (10, 20):
        save(tmp_path / "from", iteration, iteration // 10, world_size=2)
    for place in (-1, -600):
        root = tmp_path / str(place)
        shutil.copytree(tmp_path / "from", root)
        path = root / "20" / "rank_001.safetensors"
        flip(path, path.stat().st_size + place, 0)
        for ranks in (1, 2, 3):
            expect_fallback(root, "rank_001.safetensors: its checksum does not match", world_size=ranks)
