"""scripts/verify_checkpoint.py: a row per checkpoint, in words and with an exit code, without a
model."""

import json
import math
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.commands import verify_checkpoint
from tests.checkpoint.test_damage import flip, seal
from tests.checkpoint.test_writing import save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two good checkpoints and an export of each format."""
    root = tmp_path_factory.mktemp("run")
    for folder, iteration in (("checkpoints", 10), ("checkpoints", 20), ("export", 20)):
        save(root / folder, iteration, iteration, world_size=2)
    (root / "export" / "10").mkdir()
    (root / "export" / "10" / "config.json").write_text("{}")
    return root


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the words of the rows of the tables, the verdict as one word."""
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line[0].isdecimal() or line[0] == "link"]


def test_a_good_run_is_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest first, with the bytes of the rank files; Hugging Face exports are left out."""
    assert verify_checkpoint.main([str(run), "--values"]) == 0
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "20").glob("*.safetensors"))
    row = [f"{size:,}", "2", "yes"]
    assert rows(capsys) == [["20", *row], ["10", *row], ["20", *row]]
    assert verify_checkpoint.main([str(run / "checkpoints" / "10"), str(run / "checkpoints")]) == 0
    assert [line[0] for line in rows(capsys)] == ["10", "20", "10"]


def test_only_values_take_torch(run: Path) -> None:
    """Sums and manifests are read without it."""
    code = (
        "import sys; from megatron_lite.commands import start\n"
        "code = start('verify_checkpoint', sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    for words, said in ([], "0 False"), (["--values"], "0 True"):
        result = subprocess.run(
            [sys.executable, "-c", code, str(run), *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.splitlines()[-1] == said


def test_every_problem_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage in both files, of the manifest, a link, an empty folder, and other files, which do no
    harm."""
    root = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", root)
    for iteration in ("20", "30", "40"):
        shutil.copytree(root / "10", root / iteration, dirs_exist_ok=True)
    flip(root / "20" / "manifest.json", 3000, 1)
    flip(root / "10" / "rank_000.safetensors", 9000, 1)
    (root / "10" / "rank_001.safetensors").unlink()
    (root / "40" / "manifest.json").unlink()
    (root / "50").symlink_to(root / "30")
    save(root, 60, 1)
    (root / "60" / "notes \x1b[31m.txt").write_text("mine")
    assert verify_checkpoint.main([str(tmp_path)]) == 4
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines()[2:]]
    for line, part in zip(
        lines,
        [
            "yes; other files: 'notes \\x1b[31m.txt'",
            "NO: a symbolic link, which is not followed here",
            "NO: manifest.json: No such file or directory",
            "NO: manifest.json: it is of iteration 10",
            "NO: manifest.json: ",
            "NO: rank_000.safetensors: its checksum does not match: it is damaged or belongs to another save (weights",
        ],
        strict=True,
    ):
        assert part in line and "\x1b" not in line
    assert captured.err == "ERROR: 5 of 6 checkpoints cannot be used\n"


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint, with a checksum of its own that is right."""
    values = json.loads((folder / "manifest.json").read_bytes())
    change(values)
    (folder / "manifest.json").write_bytes(seal(values))


def test_files_that_do_not_belong_together(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest of another save is found by the files' headers, and a forged checksum would stop
    every reader."""
    damaged = "its checksum does not match: it is damaged or belongs to another save ("
    for name, change, said in (
        (
            "1",
            lambda values: values.update(save_id="0" * 16),
            "it belongs to another save, iteration or rank",
        ),
        (
            "2",
            lambda values: values["files"]["rank_000.safetensors"].update(crc32="0" * 8),
            damaged,
        ),
    ):
        folder = shutil.copytree(run / "checkpoints" / "20", tmp_path / name / "20")
        reseal(folder, change)
        assert verify_checkpoint.main([str(folder)]) == 4
        assert f"rank_000.safetensors: {said}" in capsys.readouterr().out


def test_values_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --values each parameter with such a number is named; without, the bytes are as they were
    written."""
    save(tmp_path, 10, 1)
    content = manifest.read(tmp_path / "10")
    name = "blocks.0.mlp.up.bias"
    (piece,) = content.parameters[name].slices["exp_avg"]
    path = tmp_path / "10" / piece.file
    data = bytearray(path.read_bytes())
    data[piece.offset : piece.offset + 4] = struct.pack("<f", math.inf)
    path.write_bytes(data)
    reseal(
        tmp_path / "10",
        lambda values: values["files"][piece.file].update(crc32=f"{zlib.crc32(data):08x}"),
    )
    assert verify_checkpoint.main([str(tmp_path)]) == 0
    assert verify_checkpoint.main([str(tmp_path), "--values"]) == 4
    assert f"exp_avg of '{name}' holds numbers that are not finite" in capsys.readouterr().out


def test_nothing_to_verify_is_a_wrong_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such folder, one without checkpoints, or a file."""
    (tmp_path / "file").write_text("")
    for path in ("nothing", "", "file"):
        assert verify_checkpoint.main([str(tmp_path / path)]) == 2
        assert "give a checkpoint or the directory of a run" in capsys.readouterr().err, path


def test_memory_is_one_piece(tmp_path: Path) -> None:
    """The largest Python allocation follows the size of a piece, not that of a file."""
    save(tmp_path, 10, 1)
    with open(tmp_path / "10" / "rank_000.safetensors", "ab") as file:
        file.truncate(2**26)
    sized = {"size": 2**26, "crc32": "0" * 8 * 64}
    reseal(tmp_path / "10", lambda values: values["files"]["rank_000.safetensors"].update(sized))
    tracemalloc.start()
    assert verify_checkpoint.main([str(tmp_path)]) == 4
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21, peak
