"""Write docs/flags.md, and the tables of docs/from_levanter.md and docs/from_fast_llm.md.

They are made from megatron_lite/config/ with its other_programs.txt.

    python -m scripts.docs.flags            write the three files
    python -m scripts.docs.flags --check    compare only; exit code 1 if one is stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_lite.cli.help import default_words
from megatron_lite.cli.unknown_flags import answers_for, refused
from megatron_lite.config import AREAS
from megatron_lite.config.other_programs import table as other_programs
from megatron_lite.config.values import FLAGS, Flag, limits
from scripts.docs.foreign_flags import REPOSITORY, cell_text, guides, other_defaults, page, table
from scripts.docs.tables import write_documents

TARGET = REPOSITORY / "docs" / "flags.md"

INTRODUCTION = """\
# Flags

<!-- Written by `python -m scripts.docs.flags` from megatron_lite/config/: do not edit. -->

`--a_b=v`, `--a_b v` and `--a-b=v` are the same flag; names are never abbreviated. Guides for
users of other programs: [from_levanter.md](from_levanter.md), [from_fast_llm.md](from_fast_llm.md). Guides by topic:
stages and memory in [multi_stage.md](multi_stage.md), shared layers in [parallelism.md](parallelism.md), layers in
[performance.md](performance.md),
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

REFUSED_HEADING = """\
## Flags of other programs that are accepted only if they change nothing

The values in the second column describe what this program does anyway. Every other value is refused.
"""

INSTEAD_HEADING = """\
## Flags of other programs that do not exist here

The program answers each of them with a message. Names that mean the same with the same values are in the column
"also spelled" above. The longest known end of a dotted name counts, as in Levanter's `--trainer.tracker.name`;
`--moe_*` is every other name that begins so.
"""


def option_table(area: str, elsewhere: Mapping[str, str]) -> str:
    """Return the table of the options of one area. `elsewhere`: other programs' defaults by flag, where they differ."""
    rows = [
        (
            f"`--{flag.name}`",
            default_words(flag),
            _limits(flag),
            ", ".join(f"`{name}`" for name in flag.aliases),
            flag.option.help,
            elsewhere.get(flag.name, ""),
        )
        for flag in FLAGS.values()
        if flag.area == area
    ]
    head = ("flag", "default", "values", "also spelled", "meaning", "defaults elsewhere")
    return table(head, [tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) for row in rows])


def _limits(flag: Flag) -> str:
    word = {"int": "integer", "float": "number", "str": "text", "bool": "0 or 1"}[flag.kind.removeprefix("list of ")]
    text = ", ".join(flag.option.choices) or word + ("s" if flag.is_list else "")
    text += f" {limits(flag)}" if limits(flag) else ""
    also = ", ".join(f"{alias} = {value}" for alias, value in flag.option.value_aliases.items())
    return text + (f" ({also})" if also else "") + ("; none" if flag.optional else "")


def refused_table() -> str:
    """Return the table of flags and values that are accepted only if they change nothing."""
    rows = [
        (f"`--{name}`", ", ".join(f"`{value}`" for value in row.only), cell_text(row.remark))
        for name, row in refused().items()
    ]
    rows += [(f"`--{typed}`", "nothing", cell_text(reason)) for typed, reason in other_programs().values.items()]
    return table(("flag", "accepted", "why no other value"), rows)


def instead_tables() -> Iterator[str]:
    """Yield a heading and a table for each program: its flags, with what to write instead."""
    for program in other_programs().programs:
        rows = [(", ".join(f"`--{name}`" for name in names), cell_text(text)) for names, text in answers_for(program)]
        yield f"### {program}\n"
        yield table(("flags", "answer"), rows)


def flags_page() -> str:
    """The whole text of docs/flags.md."""
    parts, elsewhere = [INTRODUCTION], other_defaults()
    for area, owner in AREAS.items():
        parts += [f"## {owner.__doc__}\n", option_table(area, elsewhere)]
    return "\n".join([*parts, REFUSED_HEADING, refused_table(), INSTEAD_HEADING, *instead_tables()])


def main(argv: Sequence[str]) -> int:
    """Write or compare the three files; return the exit code."""
    if list(argv) not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    pages: dict[Path, Callable[[str], str]] = {TARGET: lambda _: flags_page()}
    pages |= {guide.path: partial(page, guide) for guide in guides()}
    return write_documents(pages, bool(argv), "python -m scripts.docs.flags")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
