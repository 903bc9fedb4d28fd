"""Write docs/flags.md from megatron_lite/config/, refused.py and instead.py, and what follows from them in two guides.

In docs/from_levanter.md and docs/from_fast_llm.md the rows of the tables are written by hand, except for our own
defaults and the reasons why flags are refused; the other programs' defaults in flags.md come from there.

python -m scripts.docs.flags            writes the three files
python -m scripts.docs.flags --check    only compares them; exit code 1 if one is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.cli.help import default_words, instead_table, option_table, refused_table
from megatron_lite.cli.suggestions import instead_of
from megatron_lite.config import AREAS
from megatron_lite.config.foreign_values import REFUSED_SPELLINGS
from megatron_lite.config.values import FLAGS

REPOSITORY = Path(__file__).resolve().parents[2]

TARGET = REPOSITORY / "docs" / "flags.md"
# Guides with tables: option, default there (perhaps of several models), here, default here, remarks.
GUIDES = {"Levanter": REPOSITORY / "docs" / "from_levanter.md", "Fast-LLM": REPOSITORY / "docs" / "from_fast_llm.md"}
SAME = "(the same)"  # behind a default here: it is only written differently there

INTRODUCTION = """\
# Flags

<!-- Written by scripts/docs/flags.py from megatron_lite/config/, refused.py and instead.py: do not edit. -->

`--a_b=v`, `--a_b v` and `--a-b=v` are the same flag; names are never abbreviated. Option by option from elsewhere:
[from_levanter.md](from_levanter.md), [from_fast_llm.md](from_fast_llm.md). What flags do together: stages and memory in
[multi_stage.md](multi_stage.md), layers in [performance.md](performance.md), [batches.md](batches.md),
[schedules.md](schedules.md), and the update in [optimizer.md](optimizer.md).

- A flag with values 0 and 1 also takes `true` and `false`; bare, it means 1.
- `none` stands for the default of every flag whose values say so. An empty value (`--wandb_entity_name=$UNSET`)
  means the same for texts and is an error for every other flag.
- Lists take commas, spaces, or the words that follow: `--split=969,30,1`, `--data_path 0.3 first 0.7 second`.
- Numbers are plain ASCII digits with an optional exponent where no integer is asked for; they must be finite.
- The last one of several equal flags counts, with a warning if their values differ.
- `@file` inserts the flags of a file: shell words, where quotes work and `#` begins a comment, but no variables.
  An `@file` in it is relative to its folder; every other path is relative to the current directory, as on the
  command line. `~` at the beginning of a path is the home directory.
"""

REFUSED = """\
## Flags of Fast-LLM that are not options here

Each is accepted with the values in the third column, because they describe what this program does in any case, and
refused with every other value. Nothing is accepted and ignored.
"""

INSTEAD = """\
## Flags of Megatron-LM and Levanter that are written differently here

Names that mean the same with the same values are in the column "also spelled" above. These are refused with a message.
Of a name with dots, such as Levanter's `--trainer.tracker.name`, the longest end counts that is known.
"""


def table_rows(page: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """The rows of a guide's tables: (number of the line, names of the columns, cells)."""
    columns: list[str] = []
    for number, line in enumerate(page.splitlines()):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("| ") else []
        if not cells or "default here" in cells:
            columns = cells
        elif columns and cells[0].strip("-"):
            yield number, columns, cells


def refreshed(page: str) -> str:
    """A guide with our defaults, and the reasons for what is refused, as they are now."""
    lines = page.splitlines()
    for number, columns, cells in table_rows(page):
        row = dict(zip(columns, cells, strict=True))
        if row["here"].startswith(("only", "refused")):
            row["here"], row["remarks"] = refusal(row[columns[0]].split("`")[1])
        flag = the_flag(row["here"])
        same = f" {SAME}" if flag and row["default here"].endswith(SAME) else ""
        row["default here"] = escaped(default_words(FLAGS[flag])) + same if flag else ""
        lines[number] = "| " + " | ".join(row.values()) + " |"
    return "\n".join(lines) + "\n"


def refusal(name: str) -> tuple[str, str]:
    """What stands in the columns "here" and "remarks" of an option that is not here."""
    refused = REFUSED_SPELLINGS.get(name)
    if refused is None:
        return "refused", escaped(instead_of(name) or "unknown")
    values = " or ".join(f"`{value}`" for value in refused.accepted)
    return f"only {values}" if values else "refused", escaped(refused.reason)


def the_flag(cell: str) -> str | None:
    """The flag that is all of a cell; its default can be compared."""
    match = re.fullmatch(r"`--(\w+)`", cell)
    return match[1] if match else None


def escaped(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def other_defaults() -> dict[str, str]:
    """Flag -> the defaults of other programs, as far as they differ from ours."""
    found: dict[str, dict[str, list[str]]] = {}
    for program, guide in GUIDES.items():
        for _, columns, cells in table_rows(guide.read_text(encoding="utf-8")):
            row = dict(zip(columns, cells, strict=True))
            flag, ours = the_flag(row["here"]), row["default here"]
            theirs = {name: row[name].strip("`") for name in columns[1 : columns.index("here")]}
            differ = {name: text for name, text in theirs.items() if text not in ("", "none", ours)}
            if flag is None or not differ or ours.endswith(SAME):
                continue
            for name, text in differ.items():
                text = re.sub(r"none \((.*)\)", r"\1", text) + (f" ({name})" if len(theirs) > 1 else "")
                found.setdefault(flag, {}).setdefault(program, []).append(text)
    return {
        flag: "; ".join(f"{program}: {', '.join(dict.fromkeys(texts))}" for program, texts in programs.items())
        for flag, programs in found.items()
    }


def flags_page() -> str:
    """The whole text of docs/flags.md."""
    parts, elsewhere = [INTRODUCTION], other_defaults()
    for area, owner in AREAS.items():
        parts += [f"## {owner.__doc__}\n", option_table(area, elsewhere)]
    return "\n".join([*parts, REFUSED, refused_table(), INSTEAD, instead_table()])


def main(argv: Sequence[str]) -> int:
    """Write or compare the three files; returns the exit code."""
    if list(argv) not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = False
    for target in (*GUIDES.values(), TARGET):  # in this order: flags.md quotes the guides
        current = target.read_text(encoding="utf-8") if target.exists() else ""
        wanted = flags_page() if target == TARGET else refreshed(current)
        if current == wanted:
            continue
        if argv:
            print(f"{target} is out of date; run python -m scripts.docs.flags", file=sys.stderr)
            stale = True
        else:
            target.write_text(wanted, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
