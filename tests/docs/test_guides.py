"""The guides: the commands that they show run and print what stands below them; tables are the engine's own books."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_lite.config.values import FLAGS, SPELLINGS
from tests.support import warm_python

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "multi_stage.md").read_text("utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text("utf-8")
# Each command with the output that it is shown with.
BLOCKS = re.compile(r"^```bash\n(.*?)\n```\n\n(?:[^\n`]+\n)*?\n?```text\n(.*?)\n```$", re.M | re.S)
SHOWN = [*BLOCKS.findall(GUIDE), *BLOCKS.findall(PERFORMANCE)]
DRY_RUNS = [pair for pair in SHOWN if "--dry_run=1" in pair[0]]
# Numbers, dates and device words differ from machine to machine; everything else may not.
NUMBER = re.compile(r"[+-]?\d[\d,.]*(e[+-]\d+)?")


def normalized(text: str) -> list[str]:
    """The lines of an output without its numbers and spacing."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


def run(command: str, folder: Path) -> str:
    """As typed into bash in a checkout; returns everything that it prints."""
    for name in ("pretrain_gpt.py", "scripts", "megatron_lite"):
        (folder / name).symlink_to(ROOT / name)
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=warm_python.environment(), capture_output=True, text=True, timeout=180
    )
    return result.stdout + result.stderr


def test_tables_are_what_the_engine_counts() -> None:
    """Memory against the byte formulas, collectives against theirs, buffers, choices: rewritten, nothing changes."""
    command = [str(warm_python.folder() / "python"), "-m", "scripts.docs.engine_tables", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_formulas_in_the_tables_are_equal_to_the_counts() -> None:
    """Allocated less padding is the formula; gathers and reductions are theirs, in every row."""
    memory, traffic = (
        [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]
        for table in re.findall(r"<!-- table: (?:memory|traffic) -->\n(.*?)<!-- end -->", GUIDE, re.S)
    )
    assert len(memory) == 24 and len(traffic) == 12
    for row in memory:
        formula, padding, allocated = (int(cell.replace(",", "")) for cell in row[3:6])
        assert formula + padding == allocated and padding < allocated / 1000
    assert all(row[2] == row[3] and row[4] == row[5] for row in traffic)


def test_every_command_of_the_guide_is_run_here() -> None:
    """Each bash block but the first half of a pair has its output below it."""
    text = GUIDE + PERFORMANCE
    assert len(SHOWN) == text.count("```bash\n") == text.count("```text\n") == 6


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[f"command {index}" for index in range(len(SHOWN))])
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    """Every line that the guide shows is printed, in this order; `...` stands for lines left out."""
    printed = iter(normalized(run(command, tmp_path)))
    for line in normalized(shown):
        if line == "...":
            continue
        assert any(line == candidate for candidate in printed), f"not printed, or not in this order: {line}"


@pytest.mark.parametrize(("command", "shown"), DRY_RUNS, ids=["a plan", "advice", "performance.md"])
def test_dry_runs_are_shown_with_their_numbers(command: str, shown: str, tmp_path: Path) -> None:
    """Nothing in a dry run depends on the machine: the page is the one shown, digit by digit."""
    assert run(command, tmp_path).rstrip("\n") == shown


@pytest.mark.parametrize("guide", ["data", "models", "pretrained", "exports", "generation", "samples"])
def test_flags_of_guides_exist(guide: str) -> None:
    """No guide names an option that neither the program has nor a script of ours or another program that it shows."""
    known = {*SPELLINGS, "nproc", "local"}  # of torchrun --nproc-per-node, hf download --local-dir
    known |= {"model", "model_args", "tasks", "include_path", "device"}  # of lm_eval
    names = ("generate", "evaluate", "convert_checkpoint", "concatenate_dataset")
    scripts = [ROOT / "scripts" / f"{name}.py" for name in names]
    modules = [ROOT / "megatron_lite" / name for name in ("generation/model.py", "cli/prepare_data.py")]
    for path in (*scripts, *modules):
        known |= set(re.findall(r'"--(\w+)"', path.read_text("utf-8")))
    named = re.findall(r"--(\w+)(\*?)", (ROOT / "docs" / f"{guide}.md").read_text("utf-8"))
    assert len(named) > 10
    for flag, is_pattern in named:
        assert flag in known or (is_pattern and any(name.startswith(flag) for name in known)), flag


def test_defaults_in_the_guide_of_exports() -> None:
    """The second column of its table of flags: the default, or what follows from it."""
    text = (ROOT / "docs" / "exports.md").read_text("utf-8")
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \|", text, re.M)
    assert len(rows) > 5
    for name, shown in rows:
        assert shown.strip("`-") == (FLAGS[name].option.unset or str(FLAGS[name].default) or "none"), name
