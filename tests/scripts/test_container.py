"""The Dockerfile and the workflow of GitHub: what they name exists, and the steps of the image's
build work."""

import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import parse
from scripts import fresh_environment

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text("utf-8")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, words) pairs, continued lines joined."""
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (line.split()[0], " ".join(line.split()[1:]))
        for line in joined.splitlines()
        if line.strip()
    ]


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path of the checkout into the build; the last rule that names it
    counts."""
    allowed = True
    folders = [path, *(parent.as_posix() for parent in Path(path).parents)]
    for rule in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if (
            rule
            and not rule.startswith("#")
            and any(fnmatch(folder, rule.lstrip("!")) for folder in folders)
        ):
            allowed = rule.startswith("!")
    return allowed


def copies() -> list[tuple[list[str], str]]:
    return [
        (words.split()[:-1], words.split()[-1]) for name, words in instructions() if name == "COPY"
    ]


def test_image_is_made_of_files_that_exist() -> None:
    """Each source of COPY exists and is sent; nothing else is; dependencies are installed before
    the code is copied."""
    sources = [source for group, _ in copies() for source in group]
    assert all((ROOT / source).exists() and sent(source) for source in sources)
    top = {path.name for path in ROOT.iterdir() if sent(path.name)}
    assert top == {source.split("/")[0] for source in sources}
    assert (
        not sent("megatron_lite/cli/__pycache__/x.pyc")
        and not sent(".git/config")
        and not sent("experiments/a")
    )
    steps = [words for name, words in instructions() if name in ("COPY", "RUN")]
    installs = [index for index, words in enumerate(steps) if "pip install" in words]
    assert (
        len(installs) == 2
        and installs[0] < steps.index("megatron_lite megatron_lite") < installs[1]
    )


def test_image_runs_our_command_without_privileges() -> None:
    """The base has a torch that setup.py accepts, output is not buffered, the user is not root, the
    command is ours."""
    found = dict(instructions())
    requirement = pytest.importorskip("packaging.requirements").Requirement(
        re.findall(r'"(torch[^"]*)"', SETUP)[0]
    )
    assert requirement.specifier.contains(found["ARG"].partition("=")[2].split("-")[0])
    assert "-cuda13." in found["ARG"], (
        "the cuDNN of CUDA 12.6 is older than `CUDNN_WITH_ANY_LENGTH`"
    )
    assert found["FROM"] == "pytorch/pytorch:${PYTORCH}" and "PYTHONUNBUFFERED=1" in str(
        instructions()
    )
    (entry,) = re.findall(r'^\["(\w+)"\]$', found["ENTRYPOINT"])
    assert f'"{entry} = ' in SETUP
    names = [name for name, _ in instructions()]
    assert found["USER"] != "root" and f"useradd {found['USER']}" in str(instructions())
    assert not {"COPY", "RUN", "ADD"} & set(names[names.index("USER") :])
    (extras,) = re.findall(r'pip install "\.\[(.*)\]"', (ROOT / "Dockerfile").read_text("utf-8"))
    assert all(f'"{extra}": [' in SETUP for extra in extras.split(","))


def test_documented_docker_command_is_understood() -> None:
    """The flags behind the image's name are flags of ours."""
    (line,) = re.findall(
        r"^docker run .*$", (ROOT / "docs" / "installation.md").read_text("utf-8"), re.M
    )
    words = shlex.split(line)
    assert parse.parse(words[words.index("megatron_lite") + 1 :]).config.training.train_iters == 100


@pytest.mark.slow  # by default test_installation.py builds and installs the same sources
@pytest.mark.guides
def test_steps_of_the_image(tmp_path: Path) -> None:
    """COPY and pip's RUN lines of the Dockerfile, one after the other in an empty folder: the entry
    point answers."""
    environment = tmp_path / "environment"
    fresh_environment.create(environment)
    build = tmp_path / "build"
    build.mkdir()
    for name, words in instructions():
        if name == "COPY":
            copy(words.split()[:-1], build / words.split()[-1])
        elif "pip install" in words:
            pip = f"{sys.executable} -m pip --python {environment}/bin/python install"
            offline = "--quiet --no-index --no-deps --no-build-isolation"
            shell(words.replace("pip install", f"{pip} {offline}"), build)
    shutil.rmtree(build)
    assert "usage: " in shell(f"{environment}/bin/pretrain_gpt --help", tmp_path)


def copy(sources: list[str], target: Path) -> None:
    """Copy as COPY does: the content of a folder, files into a folder."""
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source,
                target,
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, target)


def shell(command: str, folder: Path) -> str:
    """Run a line as docker does; what it prints."""
    result = subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")))


def test_github_runs_what_ci_runs() -> None:
    """One step runs .ci/run on Python 3.11 and 3.12, and with the oldest versions that setup.py
    accepts, on every push and pull request, with no right to write."""
    jobs = workflow()["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    (row,) = jobs["test"]["strategy"]["matrix"]["include"]
    assert (
        set(row) == {"python", "versions"}
        and "matrix.versions" in jobs["test"]["env"]["PIP_CONSTRAINT"]
    )
    lines = (ROOT / ".ci" / f"{row['versions']}.txt").read_text("utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert set(pinned) == {"torch", "triton", "numpy"}
    assert re.findall(r'"torch>=([^",]*)', SETUP) == [pinned["torch"].removesuffix(".*")]
    assert [step["run"] for step in jobs["test"]["steps"] if "run" in step] == ["bash .ci/run"]
    assert {"push", "pull_request"} <= set(workflow()[True])  # YAML reads `on` as true
    assert workflow()["permissions"] == {"contents": "read"}


def test_actions_are_pinned() -> None:
    """Every action is named by a whole commit, with its version behind it, and every job has a time
    limit."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    lines = [line.strip() for line in text.splitlines() if "uses:" in line]
    assert lines and all(
        re.fullmatch(r"- uses: actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
        for line in lines
    )
    assert all(job["timeout-minutes"] <= 60 for job in workflow()["jobs"].values())
