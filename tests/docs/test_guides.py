"""The guides: the commands that they show run and print what stands below them; tables are the engine's own books."""

import re
from pathlib import Path

import pytest

from megatron_lite.config.values import FLAGS, SPELLINGS
from scripts.docs import engine_tables
from tests.support import documents
from tests.support.documents import ROOT

pytestmark = pytest.mark.guides

GUIDE, PERFORMANCE = documents.read("multi_stage"), documents.read("performance")
# Each command with the output that it is shown with; `dry_runs` compares those of dry runs.
SHOWN = documents.shown(GUIDE) + documents.shown(PERFORMANCE)
MEASURED = [pair for pair in SHOWN if "--dry_run=1" not in pair[0]]
# Guides whose outputs are shown whole, and how far a number may be from the one that is shown.
WHOLE = {"optimizer": 1e-3, "schedules": 1e-9}
# Numbers, dates and device words differ from machine to machine; everything else may not.
NUMBER = re.compile(r"[+-]?\d[\d,.]*(e[+-]\d+)?")
PLAIN_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")


def normalized(text: str) -> list[str]:
    """The lines of an output without its numbers and spacing."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


def test_tables_are_what_the_engine_counts() -> None:
    """Memory against the byte formulas, collectives against theirs, buffers, choices: rewritten, nothing changes."""
    assert engine_tables.main(["--check"]) == 0


def rows_of(guide: str, name: str) -> list[list[str]]:
    """The cells of a generated table of a guide."""
    (table,) = re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", documents.read(guide), re.S)
    return [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]


def test_formulas_in_the_tables_are_equal_to_the_counts() -> None:
    """Allocated less padding is the formula; gathers, reductions and the bytes that tensor-parallel ranks send are
    theirs, in every row."""
    memory, traffic = rows_of("multi_stage", "memory"), rows_of("multi_stage", "traffic")
    assert len(memory) == 24 and len(traffic) == 12
    for row in memory:
        formula, padding, allocated = (int(cell.replace(",", "")) for cell in row[3:6])
        assert formula + padding == allocated and padding < allocated / 1000
    assert all(row[2] == row[3] and row[4] == row[5] for row in traffic)
    for _, tokens, recomputed, gathers, sent, formula, _, summed, sums, _ in rows_of("parallelism", "tensor_traffic"):
        assert sent == formula and summed == sums
        assert (gathers == "0") == (tokens == "whole") and recomputed in ("0", "32")


def test_every_command_of_the_guides_is_run() -> None:
    """Each bash block but the first half of a pair has its output below it."""
    text = GUIDE + PERFORMANCE
    assert len(SHOWN) == text.count("```bash\n") == text.count("```text\n") == 6 and len(MEASURED) == 3
    for guide in WHOLE:
        text = documents.read(guide)
        assert len(documents.shown(text)) == text.count("```bash\n") == text.count("```text\n") == 3


@pytest.mark.parametrize(("command", "shown"), MEASURED, ids=[f"command {index}" for index in range(len(MEASURED))])
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    """Every line that the guide shows is printed, in this order; `...` stands for lines left out."""
    printed = iter(normalized(documents.typed(command, documents.make_checkout(tmp_path)).stdout))
    for line in normalized(shown):
        if line == "...":
            continue
        assert any(line == candidate for candidate in printed), f"not printed, or not in this order: {line}"


@pytest.mark.parametrize(("guide", "index"), [(guide, index) for guide in WHOLE for index in range(3)])
def test_outputs_are_shown_whole(guide: str, index: int, tmp_path: Path) -> None:
    """The same words, and nearly the same numbers; without any difference where nothing is trained."""
    command, shown = documents.shown(documents.read(guide))[index]
    printed = documents.typed(command, documents.make_checkout(tmp_path)).stdout.rstrip()
    printed = printed.replace(str(tmp_path), "/home/you/megatron_lite")
    assert PLAIN_NUMBER.sub("#", printed) == PLAIN_NUMBER.sub("#", shown)
    numbers = [[float(word.replace(",", "")) for word in PLAIN_NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.0 if "--dry_run=1" in command else WHOLE[guide])


@pytest.mark.parametrize(
    "guide", ["data", "models", "pretrained", "exports", "generation", "samples", "optimizer", "schedules"]
)
def test_flags_of_guides_exist(guide: str) -> None:
    """No guide names an option that neither the program has nor a script of ours or another program that it shows."""
    known = {*SPELLINGS, "nproc", "local"}  # of torchrun --nproc-per-node, hf download --local-dir
    known |= {"model", "model_args", "tasks", "include_path", "device"}  # of lm_eval
    names = ("generate", "evaluate", "convert_checkpoint", "concatenate_dataset", "plot_schedule")
    scripts = [ROOT / "scripts" / f"{name}.py" for name in names]
    modules = [ROOT / "megatron_lite" / name for name in ("generation/model.py", "cli/prepare_data.py")]
    for path in (*scripts, *modules):
        known |= set(re.findall(r'"--(\w+)"', path.read_text("utf-8")))
    named = re.findall(r"--(\w+)(\*?)", documents.read(guide))
    assert len(named) > 10
    for flag, is_pattern in named:
        assert flag in known or (is_pattern and any(name.startswith(flag) for name in known)), flag


def test_defaults_in_the_guide_of_exports() -> None:
    """The second column of its table of flags: the default, or what follows from it."""
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \|", documents.read("exports"), re.M)
    assert len(rows) > 5
    for name, shown in rows:
        assert shown.strip("`-") == (FLAGS[name].unset or str(FLAGS[name].default) or "none"), name
