"""A package that is missing is one line with the command that helps, whichever program is started,
from any folder."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_lite.run import exit_status

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "text.txt --output_prefix=data"
GENERATE = "--model=x --prompt=y"
FLAGS = "--num_layers=1 --hidden_size=8 --num_attention_heads=1 --vocab_size=8 --train_iters=1 --dataset_source=random"
# Found by glob, so that a new program is tested too.
FILES = [
    "pretrain_gpt.py",
    *sorted(f"scripts/{path.name}" for path in ROOT.glob("scripts/[!_]*.py")),
]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in ROOT.glob("scripts/*/**/*.py")
    if '__name__ == "__main__"' in path.read_text("utf-8") or path.name == "__main__.py"
)
NEED_NO_PACKAGE = {
    "scripts/build_corpus.py",
    "scripts/check_installed.py",
    "scripts/plot_schedule.py",
    "scripts/verify_checkpoint.py",
}
NEED_NO_PACKAGE |= {
    "scripts.docs.flags",
    "scripts.benchmarks.gpu.render",
    "scripts.benchmarks.gpu.report",
}
NEED_NO_PACKAGE |= {
    "scripts.benchmarks.cpu",
    "scripts.benchmarks.cpu.render",
    "scripts.docs.reliability",
}
NEED_NO_PACKAGE |= {
    "scripts/fresh_environment.py",
    "scripts.cluster.pull_cable",
}
LACKS = re.compile(r"lacks the package (torch|numpy|jinja2); \w+ .* and repeat the command: (.*)")


def start(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python without any installed package."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=cwd,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(cwd),
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def advice(result: subprocess.CompletedProcess[str]) -> str:
    """The command in the only line that a program printed."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.stderr
    found = LACKS.search(result.stderr)
    assert found is not None and result.stderr.startswith("ERROR: "), result.stderr
    return found[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is not active."""
    folder = tmp_path / "check out"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_lite", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pretrain_gpt.py", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv" / "lib" / "python3.99" / "site-packages" / "torch").mkdir(parents=True)
    (folder / ".venv" / "lib" / "python3.99" / "site-packages" / "numpy").mkdir()
    return folder


def test_there_are_programs() -> None:
    """The globs find the programs of today."""
    assert len(FILES) >= 11 and len(MODULES) >= 9
    assert {*FILES, *MODULES} >= NEED_NO_PACKAGE


def test_programs_name_the_missing_package(tmp_path: Path) -> None:
    """Without packages and outside of the checkout: no traceback, but one line and exit code 2."""
    flags = {
        "pretrain_gpt.py": FLAGS,
        "scripts/prepare_data.py": PREPARE,
        "scripts/generate.py": GENERATE,
        "scripts/evaluate.py": "--model x --text y",
        "scripts/convert_checkpoint.py": "--from=x --to=y --format=huggingface",
    }
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda name: start(str(ROOT / name), *flags.get(name, "").split(), cwd=tmp_path), FILES
        )
    for program, result in zip(FILES, results, strict=True):
        assert (
            "Traceback" not in result.stderr
            and "ModuleNotFound" not in result.stdout + result.stderr
        ), program
        if program == "scripts/smoke_test.py":  # its output is JSON, and its exit code 0 or 1
            assert result.returncode == 1 and LACKS.search(result.stdout)
        elif program not in NEED_NO_PACKAGE:
            assert "activate" in advice(result) or "pip install" in advice(result), program


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_modules_name_the_missing_package(each: int) -> None:
    """The same for `python -m`, which only works in the checkout; by default for every fourth
    module."""
    modules = MODULES[::each]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda module: start("-m", module, "--help", cwd=ROOT), modules)
    for module, result in zip(modules, results, strict=True):
        assert "Traceback" not in result.stderr, module
        if module not in NEED_NO_PACKAGE:
            advice(result)


def test_environment_of_the_checkout_is_named(checkout: Path, tmp_path: Path) -> None:
    """A .venv that has the package is to be activated: by its short path in the checkout, else by
    the whole one."""
    flags = FLAGS.split()
    assert advice(start("pretrain_gpt.py", *flags, cwd=checkout)) == "source .venv/bin/activate"
    elsewhere = advice(start(str(checkout / "pretrain_gpt.py"), *flags, cwd=tmp_path))
    assert elsewhere == f"source '{checkout}/.venv/bin/activate'"


def test_without_an_environment_the_project_is_installed(checkout: Path, tmp_path: Path) -> None:
    """Without .venv the line creates it and installs the project, and it can be pasted."""
    shutil.rmtree(checkout / ".venv")
    command = advice(start("scripts/generate.py", *GENERATE.split(), cwd=checkout))
    assert command == "python3 -m venv .venv && source .venv/bin/activate && pip install -e ."
    assert f"pip install -e '{checkout}'" in advice(
        start(f"{checkout}/scripts/generate.py", *GENERATE.split(), cwd=tmp_path)
    )


def test_only_the_missing_package_is_installed_beside_torch(checkout: Path) -> None:
    """Where torch is installed, as in many containers, the line names only what is missing."""
    # is found, whatever is imported first
    (checkout / "torch.py").write_text("import absent_package\n")
    result = start("pretrain_gpt.py", *FLAGS.split(), cwd=checkout)
    assert result.returncode == 2
    assert result.stderr.endswith("repeat the command: pip install absent_package\n")


def test_one_rank_of_a_machine_speaks(checkout: Path) -> None:
    """Of several ranks on a machine the first one prints the line; all end with code 2."""
    for rank in "01":
        job = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
            "RANK": rank,
            "LOCAL_RANK": rank,
        }
        result = start("pretrain_gpt.py", *FLAGS.split(), cwd=checkout, **job)
        assert advice(result) if rank == "0" else (result.returncode, result.stderr) == (2, "")


def test_a_package_that_is_missing_later_is_named_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Packages are also imported in the middle of a run: code 2, one line, and the reason in
    exit.json."""
    error = ModuleNotFoundError("No module named 'absent'", name="absent")
    assert exit_status.print_failure(error, "") == 2
    assert exit_status.report(error, str(tmp_path), prints=True) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("lacks the package absent" in line for line in lines)
    assert "lacks the package absent" in (tmp_path / "exit.json").read_text()


def test_defects_keep_their_traceback(checkout: Path) -> None:
    """A module that is missing from the program itself is a defect, and so is any other error."""
    (checkout / "megatron_lite" / "pretrain.py").write_text("import megatron_lite.absent\n")
    result = start("pretrain_gpt.py", *FLAGS.split(), cwd=checkout)
    assert (
        result.returncode == 1
        and "Traceback" in result.stderr
        and "megatron_lite.absent" in result.stderr
    )
    (checkout / "megatron_lite" / "pretrain.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in start("pretrain_gpt.py", *FLAGS.split(), cwd=checkout).stderr
