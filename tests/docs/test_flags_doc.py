"""docs/flags.md is current and complete."""

import json
from pathlib import Path

import pytest

from megatron_lite.cli.unknown_flags import instead, refused
from megatron_lite.config.other_programs import table
from megatron_lite.config.values import FLAGS
from scripts.docs import flags

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flags.md"

# Every flag of Fast-LLM's flat-flag era, as its dataclasses had them.
_PARTS = json.loads((ROOT / "tests" / "vectors" / "fast_llm_options.json").read_text("utf-8"))
FAST_LLM_FLAGS = [name for part in _PARTS.values() for name in part]


def first_cells(text: str) -> list[str]:
    """Return the flags of all rows of the tables, without backticks and dashes."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `--")]
    return [cell.strip("|` ").removeprefix("--") for row in rows for cell in row.split(", `")]


def test_page_is_current() -> None:
    """The page is what the script writes, and so are the cells that it fills in the guides."""
    assert flags.main(["--check"]) == 0


def test_every_flag_of_fast_llm_has_a_row() -> None:
    """It works, or is answered with a reason; never both, never neither."""
    answers = {**instead(), **{other: row.remark for other, row in refused().items()}}
    cells = first_cells(PAGE.read_text("utf-8"))
    for name in FAST_LLM_FLAGS:
        assert (name in FLAGS) != (name in answers), name
        assert name in cells and (name in FLAGS or len(answers[name]) > 10), name


def test_page_has_every_option_once() -> None:
    """There is one row for each option, refused flag, refused value and flag of another program."""
    cells = first_cells(PAGE.read_text("utf-8"))
    assert len(cells) == len(set(cells))
    assert set(FLAGS) <= set(cells)
    assert {*refused(), *instead(), *table().values} <= set(cells)
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 4, 7), line
