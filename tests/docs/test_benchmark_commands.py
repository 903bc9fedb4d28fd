"""The commands of docs/benchmarks.md are legal and select the rows of the tables below them."""

import re
import shlex
from pathlib import Path

import pytest

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
# A command of docs/benchmarks.md, and the table below it.
BLOCK = re.compile(r"^```bash\n([^`]*)\n```\n\n((?:\|[^\n]*\n)+)", re.M)
COMMANDS = [
    (shlex.split(command.replace("\\\n", "")), re.findall(r"^\| ([^|]*) \|", table, re.M)[2:])
    for command, table in BLOCK.findall((ROOT / "docs" / "benchmarks.md").read_text("utf-8"))
]


def test_every_command_of_the_document_is_checked() -> None:
    """Three tables of training, three of memory, one each of checkpoints and programs;
    reports and other races have tests of their own."""
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert len(COMMANDS) == 8 and text.count("```bash\n") == 15
    assert "bash scripts/gpu_report.sh --output=docs/gpu_report.json\n" in text


def test_commands_of_the_document_make_its_tables() -> None:
    """Every command is legal, and selects the rows of the table below it."""
    # They import what they compare with, which takes a second of each process that collects tests.
    from scripts.benchmarks import checkpoint
    from scripts.benchmarks.programs import contestants
    from scripts.benchmarks.training import memory, settings

    for command, names in COMMANDS:
        module = command.index("-m") + 1
        program, arguments = command[module].rpartition(".")[2], command[module + 1 :]
        if program == "memory":
            options, rows = memory.choose(arguments)
            assert options.ranks == 2 and rows == names
        elif program == "checkpoint":
            assert checkpoint.parse(arguments).turns == 8
            assert [name for name in names if " / " not in name] == [
                *checkpoint.SAVES,
                *checkpoint.LOADS,
            ]
        elif program == "programs":
            assert arguments[0] == "--nanogpt=DIR" and {"nanoGPT helped", *names} <= {
                *contestants.PROGRAMS
            }
        else:
            rows = list(
                settings.chosen(
                    settings.parse(arguments), int(command[1].removeprefix("--nproc-per-node="))
                )
            )
            assert rows == names, command
