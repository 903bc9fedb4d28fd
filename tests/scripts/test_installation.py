"""What pip makes of the project: an sdist, a wheel, and commands that work without the checkout."""

import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_lite.commands import VERBS
from scripts import fresh_environment

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = dict(re.findall(r'"(\w+) = ([\w.]+:\w+)"', (ROOT / "setup.py").read_text("utf-8")))
TINY = (
    "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --vocab_size=257 --sequence_length=16 --batch_size=2"
    " --train_iters=2 --lr_warmup_iters=1 --validation_iters=0 --split=1,0,0 --data_path=data/mine"
)


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, without this checkout on any path; what it prints."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_commands_exist() -> None:
    """Each command names a function that returns an exit code."""
    assert set(COMMANDS) == {"megatron_lite", "pretrain_gpt", "prepare_data"}
    for place in COMMANDS.values():
        module, function = place.split(":")
        assert getattr(importlib.import_module(module), function).__annotations__["return"] == "int"


def test_sources_with_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout what git would track, new files too; in an unpacked sdist everything but
    compiled files."""
    git = ["git", "-C", str(tmp_path)]
    monkeypatch.setattr(fresh_environment, "ROOT", tmp_path)
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("new.py", "ignored", "__pycache__/new.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {path.name for path in fresh_environment.source_files()} == {
        ".gitignore",
        "new.py",
        "ignored",
    }
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert {path.name for path in fresh_environment.source_files()} == {
        ".gitignore",
        "new.py",
        "new.pyc",
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the archives and an environment with the wheel."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("fresh")
    call(sys.executable, ROOT / "scripts" / "fresh_environment.py", folder, cwd=folder)
    return folder


@pytest.mark.guides
def test_archives_are_complete(fresh: Path) -> None:
    """The sdist holds every file of the sources, and the wheel every file of the package and
    nothing else."""
    sources = {path.as_posix() for path in fresh_environment.source_files()}
    (sdist,) = (fresh / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert sources <= {member.name.partition("/")[2] for member in archive}
    (wheel,) = (fresh / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert installed == {
        "pretrain_gpt.py",
        *(name for name in sources if name.startswith("megatron_lite/")),
    }


@pytest.mark.slow
def test_commands_work_in_any_folder(fresh: Path, tmp_path: Path) -> None:
    """The installed commands start away from the checkout; by default, CI's smoke test uses them
    all."""
    programs = fresh / "environment" / "bin"
    found = call(
        programs / "python",
        "-c",
        "import megatron_lite, pretrain_gpt as p; print(p.__file__)",
        cwd=tmp_path,
    )
    assert found.startswith(str(fresh))
    for name in COMMANDS:
        assert re.fullmatch(
            r"megatron_lite [\d.]+\n", call(programs / name, "--version", cwd=tmp_path)
        )
    assert "usage: prepare_data " in call(programs / "prepare_data", "--help", cwd=tmp_path)
    assert "-m pretrain_gpt" in call(
        programs / "python", "-m", "pretrain_gpt", "--help", cwd=tmp_path
    )


@pytest.mark.slow
def test_every_verb_works_in_any_folder(fresh: Path, tmp_path: Path) -> None:
    """Each verb explains its flags; a run trained with the installed commands is read back by all
    of them."""
    program, python = (fresh / "environment" / "bin" / name for name in ("megatron_lite", "python"))
    for verb in VERBS:
        assert call(program, verb, "--help", cwd=tmp_path).startswith(
            "usage: torchrun" if verb == "pretrain_gpt" else f"usage: megatron_lite {verb} "
        )
    assert call(python, "-m", "megatron_lite", "--help", cwd=tmp_path) == call(
        program, "--help", cwd=tmp_path
    )
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    assert "2,101 tokens" in call(
        program, "prepare_data", "text.txt", "--output_prefix", "data/mine", cwd=tmp_path
    )
    assert "peak with state" in call(
        python.with_name("pretrain_gpt"), *TINY.split(), "--dry_run=1", cwd=tmp_path
    )
    run = ("--experiment_dir=run", "--export_interval=2", "--tokenizer_file=byte", "--device=cpu")
    call(program, "pretrain_gpt", *TINY.split(), *run, cwd=tmp_path)
    model = ("--model=run", "--device=cpu")
    assert call(
        program, "generate", *model, "--prompt=To be", "--max_new_tokens=3", cwd=tmp_path
    ).startswith("To be")
    assert call(program, "evaluate", *model, "--text=text.txt", cwd=tmp_path).startswith("loss ")
    source = ("--from=run", "--to=mine", "--format=huggingface")
    assert "a Hugging Face folder" in call(program, "convert_checkpoint", *source, cwd=tmp_path)
    assert "2 iterations" in call(program, "watch_run", "run", "--once", cwd=tmp_path)
    for verb, said in (("report_run", "report: "), ("plot_run", "loss curve: ")):
        assert said in call(program, verb, "run", cwd=tmp_path)
    assert "yes" in call(program, "verify_checkpoint", "run", cwd=tmp_path)
    assert "all losses are equal" in call(
        program, "compare_runs", "run", "run", "--loss_tolerance=0", cwd=tmp_path
    )


@pytest.mark.slow
def test_the_wheel_passes_the_smoke_test(fresh: Path, tmp_path: Path) -> None:
    """Train, kill, resume, export and reload with the installed commands; two ranks of torchrun,
    too."""
    python = fresh / "environment" / "bin" / "python"
    assert '{"ok": true' in call(
        python, ROOT / "scripts" / "smoke_test.py", "--quick", "--installed", cwd=tmp_path
    )
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    call(python.with_name("prepare_data"), "text.txt", "--output_prefix", "data/mine", cwd=tmp_path)
    torchrun = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "pretrain_gpt",
    ]
    assert "training complete: 2 iterations" in call(
        *torchrun, *TINY.split(), "--device=cpu", cwd=tmp_path
    )
