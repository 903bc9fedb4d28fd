"""The documents in tests: their blocks and tables, and their commands, run as typed into bash in a
checkout."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("pretrain_gpt.py", "scripts", "megatron_lite")


def read(name: str) -> str:
    """The text of docs/NAME.md."""
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def section(text: str, title: str) -> str:
    """The content below a heading of the second level that begins with this title."""
    return text.partition(f"\n## {title}")[2].partition("\n## ")[0]


def blocks(text: str, language: str = "bash") -> list[str]:
    """The contents of the blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.M | re.S)


def smaller(command: str, sizes: Mapping[str, str]) -> str:
    """A command with other sizes than those that are written."""
    for written, size in sizes.items():
        command = command.replace(written, size)
    return command


def shown(text: str) -> list[tuple[str, str]]:
    """Each command that stands above its output, up to three lines of prose between them, and the
    output."""
    pattern = r"^```bash\n([^`]*?)\n```\n\n(?:[^\n`]+\n){0,3}\n?```text\n(.*?)\n```$"
    return re.findall(pattern, text, re.M | re.S)


def table(text: str, first_cell: str) -> list[list[str]]:
    """The rows, without the head, of the table whose head begins with this cell."""
    found = re.search(rf"^\| {re.escape(first_cell)} \|.*\n\|[- |:]+\n((?:\|.*\n)+)", text, re.M)
    assert found is not None, first_cell
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in found[1].splitlines()]


def make_checkout(folder: Path) -> Path:
    """Put the programs into a folder, as links; return it."""
    for name in PROGRAMS:
        (folder / name).symlink_to(ROOT / name)
    return folder


def typed(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Type a command into bash; errors are part of its output, in their place."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=warm_python.environment() | environment,
        text=True,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(command: str, folder: Path) -> str:
    """What a command prints that must end well."""
    result = typed(command, folder)
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}"
    return result.stdout
