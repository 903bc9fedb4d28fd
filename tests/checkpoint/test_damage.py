"""Damaged checkpoints: loading finds and names every change and falls back to an older one; nothing is deleted."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import file_checks, manifest, sharded
from megatron_lite.errors import CheckpointError, DamagedError
from tests.checkpoint.test_sharded import SPECS, load, names, newest, save
from tests.support.fakes import Layout, held, random_values, same


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two good checkpoints, 10 and 20, each saved by two ranks; tests undo their changes."""
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, 10, 1, world_size=2)
    save(root, 20, 2, world_size=2)
    return root


FROZEN: dict[str, Any] = dict(frozen=("embedding.word.weight", "blocks.0.mlp.up.bias"), frozen_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def frozen_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a model with two frozen parameters, stored in bf16."""
    root = tmp_path_factory.mktemp("frozen")
    save(root, 10, 1, world_size=2, **FROZEN)
    save(root, 20, 2, world_size=2, **FROZEN)
    return root


AVERAGED: dict[str, Any] = dict(moments=("exp_avg",), averaged=True)


@pytest.fixture(scope="module")
def averaged_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a model with averages and one moment."""
    root = tmp_path_factory.mktemp("averaged")
    save(root, 10, 1, world_size=2, **AVERAGED)
    save(root, 20, 2, world_size=2, **AVERAGED)
    return root


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
    """Eight flips per file, in its length, header, middle and last byte and at random, are reported and survived."""
    path, generator = pair / "20" / name, random.Random(name)
    size = path.stat().st_size
    for offset in (0, 7, 8, 15, size // 2, size - 1, generator.randrange(size), generator.randrange(size)):
        bit = generator.randrange(8)
        flip(path, offset, bit)
        expect_fallback(pair, name)
        flip(path, offset, bit)
    assert load(pair)[2] == [], "restored: good again"


def test_every_part_of_the_manifest_counts(pair: Path, tmp_path: Path) -> None:
    """A flipped bit in every fourth byte in turn is never accepted and never another exception."""
    data = (pair / "20" / "manifest.json").read_bytes()
    generator = random.Random(3)
    for offset in range(0, len(data), 4):
        changed = bytearray(data)
        changed[offset] ^= 1 << generator.randrange(8)
        (tmp_path / "manifest.json").write_bytes(changed)
        with pytest.raises(DamagedError, match=r"manifest\.json: "):
            manifest.read(tmp_path)


@pytest.mark.parametrize("name", ["rank_000.safetensors", "rank_001.safetensors", "manifest.json"])
@pytest.mark.parametrize("left", [0, 1, 0.5, -1, "missing", "longer", "directory", "pipe", "zeros"])
def test_truncated_and_missing_files_are_found(pair: Path, name: str, left: Any, tmp_path: Path) -> None:
    """Cut to nothing, one byte, half, all but one byte; gone; longer; not a file; a block of zeros."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
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


def test_the_shard_of_another_save_is_found(pair: Path, tmp_path: Path) -> None:
    """A rank's file from another iteration has the right size but another checksum."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
    shutil.copy(root / "10" / "rank_001.safetensors", root / "20" / "rank_001.safetensors")
    expect_fallback(root, "rank_001.safetensors: its checksum does not match: it is damaged or belongs to another save")


def test_a_file_that_shrinks_after_its_check_is_found(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank falls back, even if only one of them reads the end of the file."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
    real_check = file_checks.check_sizes

    def check(folder: Path, content: manifest.Manifest, rank: int, world_size: int) -> None:
        real_check(folder, content, rank, world_size)
        if folder.name == "20" and rank == 1:
            os.truncate(folder / "rank_001.safetensors", content.files["rank_001.safetensors"].size - 4)

    monkeypatch.setattr(file_checks, "check_sizes", check)
    expect_fallback(root, "it became shorter while it was read", world_size=3)


def test_a_renamed_checkpoint_is_found(pair: Path, tmp_path: Path) -> None:
    """A folder name must agree with the iteration in the manifest."""
    root = tmp_path / "root"
    shutil.copytree(pair / "10", root / "20")
    shutil.copytree(pair / "10", root / "10")
    expect_fallback(root, "it is of iteration 10")


@pytest.mark.parametrize("version", [1, 2, 6])
def test_another_version_is_refused_by_name(pair: Path, version: int, tmp_path: Path) -> None:
    """The line names both versions and says what to do; the checksum of the manifest is right."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
    values = json.loads((root / "20" / "manifest.json").read_bytes())
    (root / "20" / "manifest.json").write_bytes(seal({**values, "version": version}))
    advice = "this program reads versions 3 to 5; use the version of the program that wrote it"
    expect_fallback(root, f"manifest.json: written in format version {version}, {advice}")


@pytest.mark.parametrize("name", ["payload.pt", "model.bin", ".metadata", "rank_002.safetensors"])
def test_extra_files_are_never_opened(pair: Path, name: str, tmp_path: Path) -> None:
    """Other files in the folder, such as pickles, are ignored."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
    canary = tmp_path / "canary"
    (root / "20" / name).write_bytes(f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode())
    loaded, _, lines = load(root)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    assert not canary.exists()


def test_only_damaged_ones_stop_the_run_and_stay_untouched(pair: Path, tmp_path: Path) -> None:
    """Every rank gets exit code 4 and a line per checkpoint, instead of a silent restart from zero."""
    root = tmp_path / "root"
    shutil.copytree(pair, root)
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


def test_clean_checkpoints_give_no_alarm(pair: Path) -> None:
    """Loading again and again reports nothing."""
    for world_size in (1, 2, 3) * 5:
        assert load(pair, world_size)[2] == []


# -- hostile manifests: the checksum is right, the content is not ------------------------------------------------------


def seal(values: Any) -> bytes:
    """Return a manifest with these values and a matching checksum."""
    content = {key: value for key, value in values.items() if key != "crc32"}
    covered = json.dumps(content, indent=1)[:-2].encode() + b",\n"
    return covered + f'"crc32": {zlib.crc32(covered)}\n}}\n'.encode()


def test_flips_in_frozen_weights_are_found(frozen_pair: Path) -> None:
    """Flip a bit at the start, middle and end of each frozen tensor in each rank's file."""
    for rank in range(2):
        path = frozen_pair / "20" / f"rank_00{rank}.safetensors"
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        tensors = [entry["data_offsets"] for name, entry in header.items() if ".frozen." in name]
        assert len(tensors) == 2
        for start, end in tensors:
            for offset in (start, (start + end) // 2, end - 1):
                flip(path, 8 + length + offset, 3)
                loaded, values, lines = load(frozen_pair, 3, **FROZEN)
                assert loaded is not None and loaded.iteration == 10 and path.name in lines[0]
                assert same(values, held(random_values(SPECS, 1), Layout(**FROZEN)))
                flip(path, 8 + length + offset, 3)
    assert load(frozen_pair, **FROZEN)[2] == [], "restored: good again"


def read_changed(pair: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> manifest.Manifest:
    values = json.loads((pair / "20" / "manifest.json").read_bytes())
    change(values)
    (folder / "manifest.json").write_bytes(seal(values))
    return manifest.read(folder)


NAME = "embedding.word.weight"


def rename_file(new: str) -> Callable[[dict[str, Any]], Any]:
    def change(values: dict[str, Any]) -> None:
        values["files"][new] = values["files"].pop("rank_001.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_file("../../etc/passwd"), "'../../etc/passwd' is not a file name of this format"),
        (rename_file("/etc/passwd"), "is not a file name"),
        (rename_file("a/rank_001.safetensors"), "is not a file name"),
        (rename_file("rank_001.safetensors\n"), "is not a file name"),
        (rename_file("rank_٠٠١.safetensors"), "is not a file name"),
        (lambda v: v.update(world_size=3), "names 2 files for 3 ranks"),
        (lambda v: v.update(world_size=True), "world_size is not a count"),
        (lambda v: v.update(iteration=-1), "iteration is not a count"),
        (lambda v: v.update(iteration=20.0), "iteration is not a count"),
        (lambda v: v.update(version=True), "no version"),
        (lambda v: v.update(version="1"), "no version"),
        (lambda v: v.update(format="other"), "not of the format"),
        (lambda v: v.update(save_id="../x"), "save_id is malformed"),
        (lambda v: v.update(state=[]), "state is not an object"),
        (lambda v: v.update(extra=1), "not the keys of this format"),
        (lambda v: v.pop("config"), "not the keys of this format"),
        (lambda v: v["files"]["rank_000.safetensors"].update(size=float("nan")), "is malformed"),
        (lambda v: v["files"]["rank_000.safetensors"].update(size=10**30), "is malformed"),
        (lambda v: v["files"]["rank_000.safetensors"].update(crc32=-1), "is malformed"),
        (lambda v: v["parameters"].update(x=None), "parameter 'x': its keys are wrong"),
        (lambda v: v["parameters"][NAME].update(dtype="float64"), "its dtype is not float32 or bfloat16 or float16"),
        (lambda v: v["parameters"][NAME].update(shape=[37, 0]), "its shape is wrong"),
        (lambda v: v["parameters"][NAME].update(shape=[2**62] * 8), "elements"),
        (lambda v: v["parameters"][NAME].update(shape=[38, 16]), "the slices of weights hold 592 of 608 elements"),
        (lambda v: v["parameters"][NAME]["exp_avg"].pop(), "the slices of exp_avg hold"),
        (lambda v: v["parameters"][NAME]["exp_avg"].reverse(), "leave a gap or overlap at element 0"),
        (lambda v: v["parameters"][NAME]["weights"][1].__setitem__(3, 0), "leave a gap or overlap"),
        (lambda v: v["parameters"][NAME]["weights"][0].__setitem__(0, "rank_009.safetensors"), "not listed"),
        (lambda v: v["parameters"][NAME]["weights"][0].__setitem__(0, ["rank_000.safetensors"]), "not listed"),
        (lambda v: v["parameters"][NAME]["weights"][0].__setitem__(1, 10**9), "beyond the end of rank_000"),
        (lambda v: v["parameters"][NAME]["weights"][0].__setitem__(1, -8), "malformed"),
        (lambda v: v["parameters"][NAME]["weights"][0].__setitem__(2, 3), "malformed"),
        (lambda v: v["parameters"][NAME]["weights"][0].append(1), "malformed"),
    ],
)
def test_a_forged_manifest_is_refused(pair: Path, change: Any, message: str, tmp_path: Path) -> None:
    """Paths, counts, sizes and coverage are checked one by one."""
    assert read_changed(pair, tmp_path, lambda values: None).iteration == 20, "the forger's checksum is accepted"
    with pytest.raises(DamagedError) as caught:
        read_changed(pair, tmp_path, change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


BIAS = "blocks.0.mlp.up.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["parameters"][BIAS].update(dtype="float8_e5m2"), "its dtype is not float32 or bfloat16 or float1"),
        (lambda v: v["parameters"][BIAS].update(dtype="torch.bfloat16"), "its dtype is not"),
        (lambda v: v["parameters"][BIAS].update(dtype="BFLOAT16"), "its dtype is not"),
        (lambda v: v["parameters"][BIAS].update(dtype=["bfloat16"]), "its dtype is not"),
        (lambda v: v["parameters"][BIAS].update(dtype=None), "its dtype is not"),
        (lambda v: v["parameters"][BIAS].update(dtype="float32"), "malformed"),  # 65 elements of 2 bytes
        (lambda v: v["parameters"][NAME].update(dtype="float32"), "malformed"),
        (lambda v: v["parameters"]["head.output.weight"].update(dtype="float16"), "the slices of weights"),
        (lambda v: v["parameters"][BIAS]["weights"].clear(), "the slices of weights hold 0 of 65 elements"),
        (lambda v: v["parameters"][BIAS]["weights"][0].__setitem__(2, 129), "malformed"),
        (lambda v: v["parameters"][BIAS].update(exp_avg=None), "exp_avg is not a list"),
        (lambda v: v["parameters"][BIAS].update(exp_avg={}), "exp_avg is not a list"),
        (lambda v: v["parameters"][BIAS].update(average=None), "average is not a list"),
        (lambda v: v["parameters"][BIAS].update(exp_avg=[]), "the slices of exp_avg hold 0 of 65 elements"),
        (lambda v: v["parameters"][BIAS].update(average=[]), "the slices of average hold 0 of 65 elements"),
        (lambda v: v["parameters"][BIAS].update(momentum=[]), "its keys are wrong"),
        (lambda v: v["parameters"][BIAS].pop("weights"), "its keys are wrong"),
        (lambda v: v["parameters"]["head.output.weight"]["exp_avg"].clear(), "the slices of exp_avg hold 0 of 592"),
        (lambda v: v["parameters"]["head.output.weight"].pop("exp_avg"), "one of its moments is missing"),
        (lambda v: lend(v, "exp_avg_sq"), "one of its moments is missing"),
        (lambda v: lend(v, "exp_avg"), "exp_avg beside bfloat16 weights"),
        (lambda v: lend(v, "average"), "average beside bfloat16 weights"),
        (lambda v: lend(v, "exp_avg", "exp_avg_sq"), "exp_avg and exp_avg_sq beside bfloat16 weights"),
        (lambda v: lend(v, "average", "exp_avg"), "its keys are wrong"),  # in another order
        (lambda v: lend(v, "exp_avg", "exp_avg_sq", num_bytes=130), "malformed"),
        (lambda v: lend(v, "exp_avg", "exp_avg_sq", num_bytes=128), "the slices of exp_avg hold 32 of 65 elements"),
    ],
)
def test_a_forged_manifest_of_frozen_parameters_is_refused(
    frozen_pair: Path, change: Any, message: str, tmp_path: Path
) -> None:
    """A dtype must be one of three and fit the bytes; moments and averages must be complete, fp32 and in order, and
    belong to fp32 weights."""
    content = read_changed(frozen_pair, tmp_path, lambda values: None)
    assert content.parameters[BIAS].dtype == torch.bfloat16 and list(content.parameters[BIAS].slices) == ["weights"]
    with pytest.raises(DamagedError) as caught:
        read_changed(frozen_pair, tmp_path, change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def lend(values: dict[str, Any], *kinds: str, num_bytes: int = 260) -> None:
    """Give the frozen bias moments that are bytes of another parameter."""
    for kind in kinds:
        values["parameters"][BIAS][kind] = [["rank_000.safetensors", 4096, num_bytes, 0, 0, num_bytes // 4]]


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


@pytest.mark.parametrize(
    ("which", "layout"),
    [("pair", {}), ("frozen_pair", FROZEN), ("averaged_pair", AVERAGED)],
    ids=["trained", "frozen", "averaged"],
)
@pytest.mark.parametrize("changes", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_changes_never_give_another_error(
    which: str, layout: dict[str, Any], changes: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Structure-aware fuzzing: a changed manifest is either refused, or loads without reading outside its files."""
    junk: tuple[Any, ...] = (
        None,
        True,
        -1,
        0,
        1,
        2**63,
        10**400,
        1.5,
        float("nan"),
        "",
        "x",
        "../x",
        [],
        [[]],
        {},
        {"a": 1},
        [1, 2, 3, 4],
    )
    generator = random.Random(11)
    root, pair = tmp_path / "root", request.getfixturevalue(which)
    shutil.copytree(pair, root)
    accepted = 0
    for _ in range(changes):
        values = json.loads((pair / "20" / "manifest.json").read_bytes())
        node: Any = values
        while True:  # walk to a random place
            key = generator.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or generator.random() < 0.3:
                break
            node = node[key]
        if isinstance(node, dict) and generator.random() < 0.2:
            del node[key]
        else:
            node[key] = generator.choice(junk)
        (root / "20" / "manifest.json").write_bytes(seal(values))
        try:
            loaded, _, lines = load(root, **layout)
        except CheckpointError:  # accepted, but of another model
            accepted += 1
            continue
        assert loaded is not None and (loaded.iteration == 10) == any("; skipped, " in line for line in lines)
        accepted += loaded.iteration == 20
    assert 0 < accepted < 0.75 * changes
    assert names(root) == {"10", "20"}


# -- symbolic links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "rank_001.safetensors", "manifest.json"], ids=["folder", "rank", "manifest"])
@pytest.mark.parametrize("target", ["same", "gone"])
def test_links_are_refused_and_survive(pair: Path, name: str, target: str, tmp_path: Path) -> None:
    """A link in place of a checkpoint or of one of its files is never followed on loading, pruning or saving, even if
    it leads to a good copy; a loading run says so and takes the older checkpoint."""
    root, canary = tmp_path / "root", tmp_path / "canary"
    shutil.copytree(pair, root)
    (root / "20" / name).rename(canary)
    (root / "20" / name).symlink_to(canary if target == "same" else tmp_path / "gone")
    where = f"{name}: " if name else ""
    expect_fallback(root, f"{root}/20: {where}a symbolic link, which is not followed here", world_size=2)
    found = newest(root)
    assert found is not None and found[0].name == ("20" if name.startswith("rank") else "10")
    sharded.prune(root, 1, newest=20)
    assert names(root) == {"10", "20"}, "10 is the only good one"
    content = {path.name: path.read_bytes() for path in (canary.iterdir() if canary.is_dir() else [canary])}
    save(root, 20, 3, world_size=2)
    loaded, _, lines = load(root)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    assert {path.name: path.read_bytes() for path in (canary.iterdir() if canary.is_dir() else [canary])} == content


def test_a_link_alone_is_no_fresh_start(pair: Path, tmp_path: Path) -> None:
    """A run whose only checkpoint is a link stops instead of starting from zero."""
    (tmp_path / "20").symlink_to(pair / "20")
    with pytest.raises(CheckpointError, match="20: a symbolic link"):
        load(tmp_path)


def test_the_folder_of_checkpoints_may_be_a_link(pair: Path, tmp_path: Path) -> None:
    """Users keep checkpoints on scratch storage: loading, saving and pruning go through a link above the iteration."""
    shutil.copytree(pair, tmp_path / "scratch")
    root = tmp_path / "checkpoints"
    root.symlink_to(tmp_path / "scratch")
    loaded, _, lines = load(root)
    assert loaded is not None and loaded.iteration == 20 and lines == []
    save(root, 30, 3)
    sharded.prune(root, 2, newest=30)
    assert root.is_symlink() and names(tmp_path / "scratch") == {"20", "30"}
