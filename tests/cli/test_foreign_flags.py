"""docs/from_levanter.md and docs/from_fast_llm.md are complete, and the program does what they say
of every option.

tests/vectors lists the options and their defaults by section, from Levanter's and Fast-LLM's own
pages and classes.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import flatten
from megatron_lite.config.values import FLAGS, SPELLINGS, written
from megatron_lite.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
LEVANTER = (ROOT / "docs" / "from_levanter.md").read_text("utf-8")
FAST_LLM = (ROOT / "docs" / "from_fast_llm.md").read_text("utf-8")
FLAGS_PAGE = (ROOT / "docs" / "flags.md").read_text("utf-8")
SAME = " (the same)"  # of a default that is only written differently
OTHERS = ("save_interval", "lr_schedule", "shuffle")
NO_FLAG = " (--help_all lists all flags)"  # ends an answer that names no flag by itself

Row = dict[str, str]


def options(name: str) -> dict[str, dict[str, Any]]:
    """Return another program's options: {section: {name: default as typed, or null where there is
    no plain one}}."""
    parts: dict[str, dict[str, Any]] = json.loads(
        (ROOT / "tests" / "vectors" / f"{name}_options.json").read_text()
    )
    return parts


def rows(page: str) -> list[Row]:
    """Return the rows of all tables with a column "default here" as {column: cell}; the first
    column is "option"."""
    found, head = [], []
    for line in page.splitlines():
        cells = [
            html.unescape(cell.strip().replace("\\|", "|"))
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        if "default here" in cells:
            head = ["option", *cells[1:]]
        elif head and cells and cells[0].strip("-"):
            assert len(cells) == len(head), line
            found.append(dict(zip(head, cells, strict=True)))
        elif not cells:
            head = []
    return found


def options_of(row: Row) -> list[str]:
    """Return all names in the first cell; none in a row about something that is not an option
    there."""
    return re.findall(r"`([\w.]+)`", row["option"])


def remark_of(row: Row) -> str:
    return row["remarks"].replace("`", "")


def flags_in(text: str) -> list[str]:
    return re.findall(r"--([a-z]\w*)", text)


def flag_of(row: Row) -> str | None:
    """Return the flag if it is all that the column "here" says."""
    match = re.fullmatch(r"`--(\w+)`", row["here"])
    return match[1] if match else None


def assert_accepted_only(name: str, row: Row) -> None:
    """The values of the row are accepted and change nothing; others are refused with its remark."""
    accepted = re.findall(r"`([^`]*)`", row["here"])
    for value in accepted:
        assert parse([f"--{name}={value}"]).given == {}
    for value in {"17", "something"} - set(accepted):
        assert answer(f"--{name}={value}").startswith(
            f"--{name}={value} is refused: {remark_of(row)}"
        )


def answer(argument: str) -> str:
    """Return the error message for a flag, as if nothing else were wrong."""
    with pytest.raises(UsageError) as caught:
        parse([argument, "--dataset_source=random"])
    return str(caught.value)


LEVANTER_ROWS, FAST_LLM_ROWS = rows(LEVANTER), rows(FAST_LLM)
LEVANTER_OPTIONS = [(name, row) for row in LEVANTER_ROWS for name in options_of(row)]
FAST_LLM_OPTIONS = [(name, row) for row in FAST_LLM_ROWS for name in options_of(row)]


# -- both
# ------------------------------------------------------------------------------------------------------------


def test_flags_and_defaults_here() -> None:
    """Every named flag exists, and its default is the one in the table."""
    pages = LEVANTER + FAST_LLM
    named = set(flags_in(pages))
    assert len(named) > 150
    unknown = named - set(SPELLINGS)
    assert unknown == {"trainer"}  # --trainer.tracker.project in the introduction
    for row in (*LEVANTER_ROWS, *FAST_LLM_ROWS):
        name = flag_of(row)
        if name is None:
            assert row["default here"] == "", row
            continue
        flag = FLAGS[name]
        default = flag.unset if flag.default is None else written(flag.default) or "none"
        assert row["default here"].removesuffix(SAME) == default, row


def test_defaults_elsewhere_in_the_table_of_flags() -> None:
    """docs/flags.md has every default there that differs, and no other."""
    differing: dict[str, set[str]] = {}
    for program, found in (("Levanter", LEVANTER_ROWS), ("Fast-LLM", FAST_LLM_ROWS)):
        for row in found:
            name = flag_of(row)
            columns = [column for column in ("default there", "gpt2", "llama") if column in row]
            for column in columns if name and not row["default here"].endswith(SAME) else ():
                there = re.sub(r"none \((.*)\)", r"\1", row[column])
                if there not in ("", "none", row["default here"]):
                    model = f" ({column})" if len(columns) > 1 else ""
                    differing.setdefault(name or "", set()).add(f"{program}: {there}{model}")
    assert len(differing) > 25
    for line in FLAGS_PAGE.splitlines():
        cells = (
            line.strip("| ").split(" | ")
            if line.startswith("| `--") and line.count(" | ") == 5
            else []
        )
        if cells:
            name, listed = cells[0].strip("`-"), set()
            for part in filter(None, cells[5].strip(" |").split("; ") if len(cells) > 5 else []):
                program, _, defaults = part.partition(": ")
                listed |= {f"{program}: {default}" for default in defaults.split(", ")}
            assert listed == differing.pop(name, set()), line
    assert not differing


# -- Levanter
# --------------------------------------------------------------------------------------------------------


def test_every_option_of_levanter_has_a_row() -> None:
    """No option of the page is left out, none is made up, and the defaults there are the page's."""
    defaults = {
        name: default for part in options("levanter").values() for name, default in part.items()
    }
    assert len(defaults) >= 150
    assert {name for name, _ in LEVANTER_OPTIONS} == set(defaults)
    for name, default in defaults.items():
        mine = [row for other, row in LEVANTER_OPTIONS if other == name]
        if isinstance(default, dict):  # of each kind of model
            assert {kind: text or "" for kind, text in default.items()} in [
                {kind: row[kind] for kind in default} for row in mine
            ]
        elif default is not None:
            assert default in [row["default there"] for row in mine], (name, mine, default)


def test_the_program_answers_as_the_table_says() -> None:
    """Typed with all its parts, an option of Levanter is answered with the flags of its row, or
    with its reason."""
    for name, row in LEVANTER_OPTIONS:
        flags = flags_in(row["here"])
        if name in SPELLINGS:  # the same flag under its own name
            assert SPELLINGS[name].name in flags, name
            continue
        if row["here"].startswith("only "):
            assert_accepted_only(name, row)
            continue
        said = answer(f"--{name}")  # without a value, all cases
        assert said.startswith(f"--{name} is not a flag here: ")
        # a case in which there is nothing to write
        if row["here"] == "refused" and "(" in row["option"]:
            assert remark_of(row) in said
        elif row["here"] == "refused":
            assert said.removesuffix(NO_FLAG) == f"--{name} is not a flag here: {remark_of(row)}"
            assert len(remark_of(row)) > 10, name
        else:
            assert flags and set(flags) <= set(flags_in(said)), (said, flags)


def test_the_last_part_alone() -> None:
    """`--num_train_steps` without `trainer.` is the flag of the row, or refused; never another flag
    by accident."""
    for name, row in LEVANTER_OPTIONS:
        leaf = name.rpartition(".")[2]
        if leaf in SPELLINGS:
            # Two names mean something else elsewhere: Megatron's save_interval, Fast-LLM's
            # lr_schedule. Levanter's shuffle is an order or a window.
            assert SPELLINGS[leaf].name in flags_in(row["here"]) or leaf in OTHERS, name
        else:
            said = answer(f"--{leaf}=17")
            assert (
                " is not a flag here: " in said
                or "is refused: " in said
                or said.startswith("unknown flag")
            ), said


def test_names_with_dots_that_nobody_knows() -> None:
    """They are unknown flags with short messages and no guess; one of our flags below any group is
    named."""
    assert answer("--trainer.nothing=1").startswith("unknown flag --trainer.nothing")
    assert answer("--model.hidden_size=1").endswith(": flags have no dots; write --hidden_size=1")
    assert answer("--any.tensor_parallel=2").endswith(
        ": flags have no dots; write --tensor_parallel=2"
    )
    assert len(answer("--" + "a." * 100_000 + "mp=1")) < 300


def test_types_of_schedules_and_trackers() -> None:
    """`type` chooses the kind of an option in Levanter, but is no option in its lists."""
    for name in ("optimizer.lr_schedule.type", "lr_schedule.type"):
        assert answer(f"--{name}=cosine").startswith(
            f"--{name} is not a flag here: write --lr_decay_style"
        )
    assert "write --trackers=wandb" in answer("--trainer.tracker.type=wandb")


def test_defaults_of_levanter_as_flags() -> None:
    """The recipe at the top of the page sets every default of Levanter that differs from the one of
    a flag here."""
    recipe = re.search(r"^```\n(.*?)\n```$", LEVANTER, re.M | re.S)
    assert recipe is not None
    arguments = parse([*recipe[1].split(), "--dataset_source=random"])
    assert arguments.warnings == ()
    values, left = flatten(arguments.config), set(arguments.given) - {"dataset_source"}
    # Not part of how a model is trained: files and trackers, and the order of samples, which has
    # other words here.
    for row in LEVANTER_ROWS:
        there, name = row.get("default there", ""), flag_of(row)
        if name is None or there in ("", "none") or row["default here"].endswith(SAME):
            continue
        trackers = (
            "trackers",
            "wandb_project_name",
            "wandb_mode",
            "wandb_save_code",
            "watch_interval",
        )
        if name not in ("export_interval", "export_weights", "shuffle", *trackers):
            assert written(values[name]) == re.sub(r"none \((.*)\)", r"\1", there), row
            left.discard(name)
    checkpoints = {"checkpoint_minutes": 15.0, "max_checkpoints": 1, "keep_checkpoints": ("10000",)}
    assert {name: values[name] for name in left} == {
        **checkpoints,
        "recompute_layers": values["num_layers"],
    }


# -- Fast-LLM
# --------------------------------------------------------------------------------------------------------


def listed_as_same() -> list[str]:
    """The flags in the lists of those that are the same with the same default."""
    lists = re.findall(r"^The same flag with the same default: (.*?)\.\n\n", FAST_LLM, re.M | re.S)
    return [name for text in lists for name in flags_in(text)]


def test_every_flag_of_fast_llm_is_there_once() -> None:
    """In a list or in one row; a row has Fast-LLM's default."""
    defaults = {
        name: default for part in options("fast_llm").values() for name, default in part.items()
    }
    names = [*listed_as_same(), *(name for name, _ in FAST_LLM_OPTIONS)]
    assert sorted(names) == sorted(defaults) and len(names) == 206
    assert all(defaults[name] == row["default there"] for name, row in FAST_LLM_OPTIONS)


def test_the_same_flags_have_the_same_defaults() -> None:
    defaults = {
        name: default for part in options("fast_llm").values() for name, default in part.items()
    }
    for name in listed_as_same():
        flag, default = FLAGS[name], defaults[name]
        empty = "[]" if flag.is_list else ""
        derived = {"none": "none"}.get(default, "derived")
        ours = derived if flag.default is None else written(flag.default) or empty
        assert flag.value_aliases.get(default, default) == ours, name


def test_flags_of_fast_llm() -> None:
    """Each is the flag of its row, or refused with the remark unless its value changes nothing."""
    for name, row in FAST_LLM_OPTIONS:
        if flag_of(row):
            assert flag_of(row) == SPELLINGS[name].name
            continue
        assert len(remark_of(row)) > 10, name
        if row["here"] == "refused":
            assert (
                answer(f"--{name}=17").removesuffix(NO_FLAG)
                == f"--{name} is not a flag here: {remark_of(row)}"
            )
            continue
        assert row["here"].startswith("only `"), name
        assert_accepted_only(name, row)
