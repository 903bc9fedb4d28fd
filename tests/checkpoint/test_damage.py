"""Damaged checkpoints: loading finds and names every change and falls back to an older one; nothing
is deleted."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import blocks, manifest, reading, retention
from megatron_lite.errors import CheckpointError, DamagedError
from tests.checkpoint.test_writing import SPECS, load, names, newest, save
from tests.support.fakes import random_values, same

FROZEN: dict[str, Any] = dict(
    frozen=("embedding.word.weight", "blocks.0.mlp.up.bias"), frozen_dtype=torch.bfloat16
)
AVERAGED: dict[str, Any] = dict(moments=("exp_avg",), averaged=True)
TENSOR: dict[str, Any] = dict(tensor_ranks=2)


def saved_pair(root: Path, **layout: Any) -> Path:
    """Save two good checkpoints, 10 and 20, by two ranks each."""
    for iteration in (10, 20):
        save(root, iteration, iteration // 10, world_size=2, **layout)
    return root


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two good checkpoints; tests undo their changes."""
    return saved_pair(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def root(pair: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(pair, tmp_path / "root")


def expect_fallback(root: Path, message: str, world_size: int = 1) -> None:
    """Check that one line reports 20 with its folder and the message, and that 10 is loaded."""
    loaded, values, lines = load(root, world_size)
    assert loaded is not None and loaded.iteration == 10
    assert same(values, random_values(SPECS, 1))
    assert len(lines) == 1 and "\n" not in lines[0]
    assert str(root / "20") in lines[0] and message in lines[0], lines


def flip(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))


@pytest.mark.parametrize("name", ["rank_000.safetensors", "rank_001.safetensors", "manifest.json"])
def test_single_bit_flips_are_found(pair: Path, name: str) -> None:
    """Eight flips per file, in its length, header, middle and last byte and at random, are reported
    and survived."""
    path, generator = pair / "20" / name, random.Random(name)
    size = path.stat().st_size
    for offset in (
        0,
        7,
        8,
        15,
        size // 2,
        size - 1,
        generator.randrange(size),
        generator.randrange(size),
    ):
        bit = generator.randrange(8)
        flip(path, offset, bit)
        expect_fallback(pair, name, world_size=1 + bit % 3)
        flip(path, offset, bit)
    assert load(pair)[2] == [], "restored: good again"


@pytest.mark.parametrize("step", [32, pytest.param(1, marks=pytest.mark.slow)])
def test_every_part_of_the_manifest_counts(pair: Path, tmp_path: Path, step: int) -> None:
    """A flipped bit in each byte, by default in every 32nd, is never accepted and never another
    exception."""
    data = (pair / "20" / "manifest.json").read_bytes()
    generator = random.Random(3)
    for offset in range(0, len(data), step):
        changed = bytearray(data)
        changed[offset] ^= 1 << generator.randrange(8)
        (tmp_path / "manifest.json").write_bytes(changed)
        with pytest.raises(DamagedError, match=r"manifest\.json: "):
            manifest.read(tmp_path)


@pytest.mark.parametrize("name", ["rank_000.safetensors", "rank_001.safetensors", "manifest.json"])
@pytest.mark.parametrize("left", [0, 1, 0.5, -1, "missing", "longer", "directory", "pipe", "zeros"])
def test_truncated_and_missing_files_are_found(root: Path, name: str, left: Any) -> None:
    """Cut to nothing, one byte, half, all but one byte; gone; longer; not a file; a block of
    zeros."""
    path = root / "20" / name
    size = path.stat().st_size
    if left == "longer":
        os.truncate(path, size + 1)
    elif left == "zeros":
        with open(path, "r+b") as file:
            file.seek(size // 2)
            file.write(bytes(size // 4))
    elif isinstance(left, str):
        path.unlink()
        if left == "directory":
            path.mkdir()
        elif left == "pipe":
            os.mkfifo(path)
    else:
        os.truncate(path, size - 1 if left == -1 else int(left * size) if left == 0.5 else left)
    expect_fallback(root, name, world_size=2)


def test_the_shard_of_another_save_is_found(root: Path) -> None:
    """A rank's file from another iteration has the right size but another checksum."""
    shutil.copy(root / "10" / "rank_001.safetensors", root / "20" / "rank_001.safetensors")
    expect_fallback(
        root,
        "rank_001.safetensors: its checksum does not match: it is damaged or belongs to another save",
    )


def test_a_file_that_shrinks_after_its_check_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank falls back, even if only one of them reads the end of the file."""
    real_check = blocks.check_sizes

    def check(
        folder: Path, saved: Mapping[str, blocks.SavedFile], rank: int, world_size: int
    ) -> None:
        real_check(folder, saved, rank, world_size)
        if folder.name == "20" and rank == 1:
            os.truncate(folder / "rank_001.safetensors", saved["rank_001.safetensors"].size - 4)

    monkeypatch.setattr(reading, "check_sizes", check)
    expect_fallback(root, "it became shorter while it was read", world_size=3)


def test_a_renamed_checkpoint_is_found(root: Path) -> None:
    """A folder name must agree with the iteration in the manifest."""
    shutil.rmtree(root / "20")
    shutil.copytree(root / "10", root / "20")
    expect_fallback(root, "it is of iteration 10")


@pytest.mark.parametrize("version", [1, 2, 7])
def test_another_version_is_refused_by_name(root: Path, version: int) -> None:
    """The line names both versions and says what to do; the checksum of the manifest is right."""
    values = json.loads((root / "20" / "manifest.json").read_bytes())
    (root / "20" / "manifest.json").write_bytes(seal({**values, "version": version}))
    advice = "this program reads versions 3 to 6; use the version of the program that wrote it"
    expect_fallback(root, f"manifest.json: written in format version {version}, {advice}")


@pytest.mark.parametrize("name", ["payload.pt", "model.bin", ".metadata", "rank_002.safetensors"])
def test_extra_files_are_never_opened(root: Path, name: str, tmp_path: Path) -> None:
    """Other files in the folder, such as pickles, are ignored."""
    canary = tmp_path / "canary"
    (root / "20" / name).write_bytes(f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode())
    loaded, _, lines = load(root)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    assert not canary.exists()


def test_only_damaged_ones_stop_the_run_and_stay_untouched(root: Path) -> None:
    """Every rank gets exit code 4 and a line per checkpoint, instead of a silent restart from
    zero."""
    (root / "30").mkdir()
    flip(root / "20" / "rank_001.safetensors", 2000, 3)
    (root / "10" / "rank_000.safetensors").unlink()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(CheckpointError) as caught:
        load(root, world_size=2)
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert f"{root}/30: manifest.json: No such file" in text
    assert f"{root}/20: rank_001.safetensors: its checksum does not match" in text
    assert f"{root}/10: rank_000.safetensors: No such file" in text
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


# -- hostile manifests: the checksum is right, the content is not
# ------------------------------------------------------


def seal(values: Any) -> bytes:
    """Return a manifest with these values and a matching checksum."""
    content = {key: value for key, value in values.items() if key != "crc32"}
    covered = json.dumps(content, indent=1)[:-2].encode() + b",\n"
    return covered + f'"crc32": {zlib.crc32(covered)}\n}}\n'.encode()


def as_version(version: int, folder: Path) -> dict[str, Any]:
    """Return the content of a folder's manifest as version 3, 4 or 5 had it."""
    values = json.loads((folder / "manifest.json").read_bytes())
    if version == manifest.VERSION:
        return values
    data = {name: (folder / name).read_bytes() for name in values["files"]}
    files = {
        name: {"size": len(content), "crc32": zlib.crc32(content)} for name, content in data.items()
    }
    for parameter in values["parameters"].values():
        for kind in manifest.KINDS:
            for piece in parameter.get(kind, ()):
                name, offset, num_bytes, _, run = piece
                piece[4:] = [zlib.crc32(data[name][offset : offset + num_bytes]), run][
                    : version - 3
                ]
    return {**values, "version": version, "files": files}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"format": "a", "format": "a"}',
        b'{"format": "megatron_lite_checkpoint"}',
        b'{"format": "megatron_lite_checkpoint", "version": 1}\n',
        b'{"a": ' * 50_000,
        b'"crc32": 0\n}\n',
        b"\x80\x04\x95cposix\nsystem\n",
    ],
)
def test_malformed_manifests_are_refused(data: bytes, tmp_path: Path) -> None:
    """Any bytes give the same error, quickly."""
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedError, match=r"manifest\.json: "):
        manifest.read(tmp_path)


def test_an_enormous_manifest_is_not_read(tmp_path: Path) -> None:
    """A sparse terabyte costs nothing."""
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedError, match="bytes, at most"):
        manifest.read(tmp_path)


# -- symbolic links
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "rank_001.safetensors", "manifest.json"], ids=["folder", "rank", "manifest"]
)
@pytest.mark.parametrize("target", ["same", "gone"])
def test_links_are_refused_and_survive(root: Path, name: str, target: str, tmp_path: Path) -> None:
    """A link in place of a checkpoint or of one of its files is never followed on loading, pruning
    or saving, even if it leads to a good copy; a loading run says so and takes the older
    checkpoint."""
    canary = tmp_path / "canary"
    (root / "20" / name).rename(canary)
    (root / "20" / name).symlink_to(canary if target == "same" else tmp_path / "gone")
    where = f"{name}: " if name else ""
    expect_fallback(
        root, f"{root}/20: {where}a symbolic link, which is not followed here", world_size=2
    )
    found = newest(root)
    assert found is not None and found[0].name == ("20" if name.startswith("rank") else "10")
    retention.prune(root, 1, newest=20)
    assert names(root) == {"10", "20"}, "10 is the only good one"
    content = {
        path.name: path.read_bytes() for path in (canary.iterdir() if canary.is_dir() else [canary])
    }
    save(root, 20, 3, world_size=2)
    loaded, _, lines = load(root)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    assert {
        path.name: path.read_bytes() for path in (canary.iterdir() if canary.is_dir() else [canary])
    } == content


def test_a_link_alone_is_no_fresh_start(pair: Path, tmp_path: Path) -> None:
    """A run whose only checkpoint is a link stops instead of starting from zero."""
    (tmp_path / "20").symlink_to(pair / "20")
    with pytest.raises(CheckpointError, match="20: a symbolic link"):
        load(tmp_path)


def test_the_folder_of_checkpoints_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """Users keep checkpoints on scratch storage: loading, saving and pruning go through a link
    above the iteration."""
    link = tmp_path / "checkpoints"
    link.symlink_to(root)
    loaded, _, lines = load(link)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    save(link, 30, 3)
    retention.prune(link, 2, newest=30)
    assert link.is_symlink() and names(root) == {"20", "30"}
