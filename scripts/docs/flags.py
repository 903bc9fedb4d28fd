"""Write docs/flags.md, and our defaults in from_levanter.md and from_fast_llm.md, from the options in config/.

    python -m scripts.docs.flags            write the three files
    python -m scripts.docs.flags --check    compare only; exit code 1 if one is stale

The table rows of the two guides are written by hand, except for our defaults and the reasons for refused flags. In
return, flags.md takes the defaults of the other programs from the guides.
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
# Guides with tables: option, default there (in one or more columns), here, default here, remarks.
GUIDES = {"Levanter": REPOSITORY / "docs" / "from_levanter.md", "Fast-LLM": REPOSITORY / "docs" / "from_fast_llm.md"}
SAME = "(the same)"  # after a default here: the same value, written differently there

INTRODUCTION = """\
# Flags

<!-- Written by `python -m scripts.docs.flags` from megatron_lite/config/ and cli/foreign_flags.py: do not edit. -->

`--a_b=v`, `--a_b v` and `--a-b=v` are the same flag; names are never abbreviated. Guides for
users of other programs: [from_levanter.md](from_levanter.md), [from_fast_llm.md](from_fast_llm.md). Guides by topic:
stages and memory in [multi_stage.md](multi_stage.md), layers in [performance.md](performance.md),
[batches.md](batches.md), [schedules.md](schedules.md), and the update in [optimizer.md](optimizer.md).

- A flag with values 0 and 1 also takes `true` and `false`; without a value it means 1.
- `none` means the default, for every flag that lists `none` among its values. An empty value
  (`--wandb_entity_name=$UNSET`) means the same for text flags and is an error for all others.
- Separate list items by commas, by spaces, or as several words: `--split=969,30,1`, `--data_path 0.3 first 0.7 second`.
- Write numbers in ASCII digits, with an optional exponent unless the flag takes an integer; they must be finite.
- If a flag is repeated, the last one counts, with a warning if the values differ.
- `@file` inserts the flags in a file: shell words with quotes and `#` comments, but without variables. A nested
  `@file` is relative to the folder of the file; all other paths are relative to the current directory, as on the
  command line. `~` at the start of a path is the home directory.
"""

REFUSED = """\
## Flags of Fast-LLM that are not options here

Each flag is accepted with the values in the third column, which describe what this program always does, and refused
with every other value. No flag is accepted and ignored.
"""

INSTEAD = """\
## Flags of Megatron-LM and Levanter that are written differently here

Other names for the same flag and values are in the column "also spelled" above. The names below are refused with a
message. For a dotted name such as Levanter's `--trainer.tracker.name`, the longest known ending counts.
"""


def table_rows(page: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (line number, column names, cells) for each table row of a guide."""
    columns: list[str] = []
    for number, line in enumerate(page.splitlines()):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("| ") else []
        if not cells or "default here" in cells:
            columns = cells
        elif columns and cells[0].strip("-"):
            yield number, columns, cells


def refreshed(page: str) -> str:
    """Return a guide with current defaults and current reasons for refused flags."""
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
    """Return the cells "here" and "remarks" of an option that is refused here."""
    refused = REFUSED_SPELLINGS.get(name)
    if refused is None:
        return "refused", escaped(instead_of(name) or "unknown")
    values = " or ".join(f"`{value}`" for value in refused.accepted)
    return f"only {values}" if values else "refused", escaped(refused.reason)


def the_flag(cell: str) -> str | None:
    """Return the flag in a cell that holds nothing else, so that its default can be compared."""
    match = re.fullmatch(r"`--(\w+)`", cell)
    return match[1] if match else None


def escaped(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def other_defaults() -> dict[str, str]:
    """Return the defaults of other programs by flag, where they differ from ours."""
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
    """Return the text of docs/flags.md."""
    parts, elsewhere = [INTRODUCTION], other_defaults()
    for area, owner in AREAS.items():
        parts += [f"## {owner.__doc__}\n", option_table(area, elsewhere)]
    return "\n".join([*parts, REFUSED, refused_table(), INSTEAD, instead_table()])


def main(argv: Sequence[str]) -> int:
    """Write or compare the three files; return the exit code."""
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
