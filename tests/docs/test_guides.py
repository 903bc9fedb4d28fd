"""The guides: the commands that they show run and print what stands below them; tables are the
engine's own books."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_lite.config.values import FLAGS, SPELLINGS
from scripts.docs import engine_tables
from tests.support import documents, warm_python
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
# whose flags guides name, beside commands
SCRIPTS = ("check_mup", "concatenate_dataset", "plot_schedule")
PLAIN_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")


def normalized(text: str) -> list[str]:
    """The lines of an output without its numbers and spacing."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    "document", ["multi_stage.md", pytest.param("parallelism.md", marks=pytest.mark.slow)]
)
def test_tables_are_what_the_engine_counts(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory against the byte formulas, collectives against theirs, buffers, choices: rewritten,
    nothing changes."""
    assert document in engine_tables.DOCUMENTS
    monkeypatch.setattr(engine_tables, "DOCUMENTS", (document,))
    assert engine_tables.main(["--check"]) == 0


def rows_of(guide: str, name: str) -> list[list[str]]:
    """The cells of a generated table of a guide."""
    (table,) = re.findall(
        rf"<!-- table: {name} -->\n(.*?)<!-- end -->", documents.read(guide), re.S
    )
    return [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]


def test_formulas_in_the_tables_are_equal_to_the_counts() -> None:
    """Allocated less padding is the formula; gathers, reductions and the bytes that tensor-parallel
    ranks send are theirs, in every row."""
    memory, traffic = rows_of("multi_stage", "memory"), rows_of("multi_stage", "traffic")
    assert len(memory) == 24 and len(traffic) == 12
    for row in memory:
        formula, padding, allocated = (int(cell.replace(",", "")) for cell in row[3:6])
        assert formula + padding == allocated and padding < allocated / 1000
    assert all(row[2] == row[3] and row[4] == row[5] for row in traffic)
    for _, tokens, recomputed, gathers, sent, formula, _, summed, sums, _ in rows_of(
        "parallelism", "tensor_traffic"
    ):
        assert sent == formula and summed == sums
        assert (gathers == "0") == (tokens == "whole") and recomputed in ("0", "32")


def test_every_command_of_the_guides_is_run() -> None:
    """Each bash block but the first half of a pair has its output below it."""
    text = GUIDE + PERFORMANCE
    assert (
        len(SHOWN) == text.count("```bash\n") == text.count("```text\n") == 6 and len(MEASURED) == 3
    )
    for guide in WHOLE:
        text = documents.read(guide)
        assert len(documents.shown(text)) == text.count("```bash\n") == text.count("```text\n") == 3


def outputs(commands: Sequence[str], folder: Path) -> list[str]:
    """What commands print, each typed in a checkout of its own, two at a time."""
    warm_python.folder()  # the server of all threads

    def output(number: int) -> str:
        checkout = folder / str(number)
        checkout.mkdir()
        printed = documents.typed(
            commands[number], documents.make_checkout(checkout)
        ).stdout.rstrip()
        return printed.replace(str(checkout), "/home/you/megatron_lite")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(output, range(len(commands))))


def test_commands_print_what_is_shown(tmp_path: Path) -> None:
    """Every line that the guide shows is printed, in this order; `...` stands for lines left
    out."""
    for (command, shown), text in zip(
        MEASURED, outputs([command for command, _ in MEASURED], tmp_path), strict=True
    ):
        printed = iter(normalized(text))
        for line in normalized(shown):
            found = line == "..." or any(line == candidate for candidate in printed)
            assert found, f"{command}: not printed, or not in this order: {line}"


def test_outputs_are_shown_whole(tmp_path: Path) -> None:
    """The same words, and nearly the same numbers; without any difference where nothing is
    trained."""
    pairs = [(guide, *pair) for guide in WHOLE for pair in documents.shown(documents.read(guide))]
    for (guide, command, shown), printed in zip(
        pairs, outputs([pair[1] for pair in pairs], tmp_path), strict=True
    ):
        assert PLAIN_NUMBER.sub("#", printed) == PLAIN_NUMBER.sub("#", shown), command
        numbers = [
            [float(word.replace(",", "")) for word in PLAIN_NUMBER.findall(text)]
            for text in (printed, shown)
        ]
        exact = "--dry_run=1" in command
        assert numbers[0] == pytest.approx(numbers[1], rel=0.0 if exact else WHOLE[guide]), command


@pytest.mark.parametrize(
    "guide",
    ["data", "models", "pretrained", "exports", "generation", "samples", "optimizer", "schedules"],
)
def test_flags_of_guides_exist(guide: str) -> None:
    """No guide names an option that neither the program has nor a script of ours or another program
    that it shows."""
    known = {*SPELLINGS, "nproc", "local"}  # of torchrun --nproc-per-node, hf download --local-dir
    known |= {"model", "model_args", "tasks", "include_path", "device"}  # of lm_eval
    scripts = [ROOT / "scripts" / f"{name}.py" for name in SCRIPTS]
    scripts += (ROOT / "megatron_lite" / "commands").glob("*.py")
    modules = [
        ROOT / "megatron_lite" / name for name in ("cli/model_arguments.py", "cli/prepare_data.py")
    ]
    for path in (*scripts, *modules):
        known |= set(re.findall(r'"--(\w+)"', path.read_text("utf-8")))
    named = re.findall(r"--(\w+)(\*?)", documents.read(guide))
    assert len(named) > 10
    for flag, is_pattern in named:
        assert flag in known or (is_pattern and any(name.startswith(flag) for name in known)), flag


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_warning_of_torchrun_is_explained(page: str) -> None:
    """Above the first command to type that starts several processes, which prints it."""
    before, _, _ = (
        (ROOT / page).read_text("utf-8").partition("\ntorchrun --standalone --nproc-per-node=2 ")
    )
    assert "torchrun's warning about `OMP_NUM_THREADS` does not matter" in " ".join(before.split())


def test_defaults_in_the_guide_of_exports() -> None:
    """The second column of its table of flags: the default, or what follows from it."""
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \|", documents.read("exports"), re.M)
    assert len(rows) > 5
    for name, shown in rows:
        assert shown.strip("`-") == (FLAGS[name].unset or str(FLAGS[name].default) or "none"), name
