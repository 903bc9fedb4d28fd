"""Write docs/flags.md, and the tables of docs/from_levanter.md and docs/from_fast_llm.md.

Sources: megatron_lite/config/ with its other_programs.txt, and the lists of other programs' options
and defaults in tests/vectors. The prose of the guides is written by hand; only their tables are
replaced.

    python -m scripts.docs.flags            write the three files
    python -m scripts.docs.flags --check    compare only; exit code 1 if one is stale
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_lite.cli.help import default_words
from megatron_lite.cli.unknown_flags import answers_for, by_name, refused, suffixes
from megatron_lite.config import AREAS
from megatron_lite.config.other_programs import Row
from megatron_lite.config.other_programs import table as other_programs
from megatron_lite.config.values import FLAGS, SPELLINGS, Flag, limits, written
from scripts.docs.tables import ROOT, markdown_table, write_documents

SAME = "(the same)"  # marks a default that the other program only spells differently
# Options with such a default, besides `none` where the value is derived here.
SAME_DEFAULT = (
    "optimizer.cycles trainer.per_device_parallelism trainer.per_device_eval_parallelism trainer.mp min_lr world_size "
    "model.num_kv_heads model.activation_function"
).split()
# Behaviour that Levanter has no option for: (behaviour, its value there, our flag, remark).
FIXED = (
    (
        "index of the first update",
        "0",
        "lr_step_offset",
        "a warmup then starts at rate 0; Adam's moments still move",
    ),
    ("clipping", "levanter", "clip_grad_style", "torch adds 1e-6 to the norm by which it divides"),
    ("mean over micro-batches", "micro_mean", "loss_reduction", "differs if tokens are masked"),
    ("attention across documents", "0", "cross_document_attention", ""),
    (
        "first validation",
        "1",
        "validation_at_start",
        "after the first update there, before it here",
    ),
    ("exported weights", "average", "export_weights", "if there is an average"),
    ("sharding over all ranks", "3", "zero_stage", "weights, gradients and optimizer state"),
)
LISTED = "The same flag with the same default:"
_FLAG = r'--[a-z][\w-]*(?:=(?:"[^"]*"|<[^>]*>|[^\s<,;"]|,(?=\S))+)?'
_FLAGS = re.compile(rf"(?:torchrun )?{_FLAG}(?: {_FLAG})*")


@dataclass(frozen=True)
class GuideRow:
    """One row of a guide. defaults: the other program's, one for each of its models."""

    option: str
    defaults: tuple[str, ...]
    here: str
    remark: str
    flag: Flag | None = None  # the flag here with the same meaning, if there is exactly one
    same: bool = False  # whether the default here is only spelled differently

    @property
    def cells(self) -> tuple[str, ...]:
        default = cell_text(default_words(self.flag)) if self.flag else ""
        return (
            self.option,
            *self.defaults,
            self.here,
            f"{default} {SAME}" if self.same else default,
            self.remark,
        )


@dataclass(frozen=True)
class Guide:
    """One page about another program. rows: by section heading."""

    program: str
    path: Path
    rows: dict[str, list[GuideRow]]
    same: dict[str, list[str]]  # flags with the same name and default, by section


def cell_text(text: str) -> str:
    """Return text for a cell of a Markdown table, with flags as code."""
    parts, end = [], 0
    for match in _FLAGS.finditer(text):
        parts += [text[end : match.start()].replace("<", "&lt;"), f"`{match[0]}`"]
        end = match.end()
    return "".join([*parts, text[end:].replace("<", "&lt;")]).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table of Markdown cells."""
    return "".join(f"{line}\n" for line in markdown_table(head, rows))


def guides() -> tuple[Guide, Guide]:
    """Return both guides with current rows."""
    fixed = [
        GuideRow(text, (value,), f"`--{name}`", remark, FLAGS[name])
        for text, value, name, remark in FIXED
    ]
    levanter, known = {"Fixed there, a flag here": fixed}, by_name("Megatron-LM", "Levanter")
    for section, options in _options("levanter").items():
        levanter[section] = _merged(options, known)
    fast_llm = {}
    same = {}
    known = by_name("Fast-LLM")
    for section, options in _options("fast_llm").items():
        same[section] = [
            name for name, default in options.items() if name not in known and _equal(name, default)
        ]
        others = {name: default for name, default in options.items() if name not in same[section]}
        fast_llm[section] = _merged(others, known)
    pages = ROOT / "docs"
    return (
        Guide("Levanter", pages / "from_levanter.md", levanter, {}),
        Guide("Fast-LLM", pages / "from_fast_llm.md", fast_llm, same),
    )


def _options(program: str) -> dict[str, dict[str, str | None | dict[str, str | None]]]:
    text = (ROOT / "tests" / "vectors" / f"{program}_options.json").read_text("utf-8")
    return dict(json.loads(text))


def _equal(name: str, default: object) -> bool:
    """Return whether a flag of Fast-LLM has the same default here."""
    flag = FLAGS[name]
    if flag.default is None:
        return default in ("none", "derived")
    return flag.value_aliases.get(str(default), default) == (written(flag.default) or "[]")


def _cases(name: str, known: Mapping[str, list[tuple[str, Row]]]) -> list[tuple[str, Row]]:
    """Return the rows of a full name: those of its longest known suffix, or of the innermost known
    group."""
    for end in suffixes(name):
        if end in known:
            return known[end]
        if end in SPELLINGS:
            return [("", Row((end,)))]
    cases = next(known[group] for group in reversed(name.split(".")) if group in known)
    # only the group itself takes these values
    return [(case, row._replace(only=())) for case, row in cases]


def _rows(name: str, default: object, cases: list[tuple[str, Row]]) -> Iterator[GuideRow]:
    """Yield a row for each case of an option; the default is that of the first case."""
    for place, (case, row) in enumerate(cases):
        theirs = tuple(default.values()) if isinstance(default, dict) else (default,)
        defaults = tuple(str(text or "") if place == 0 else "" for text in theirs)
        option = f"`{name}`" + (f" ({case})" if case else "")
        leaf = name.rpartition(".")[2]
        here = row.here or (f"--{SPELLINGS[leaf].name}" if leaf in SPELLINGS else "")
        flag = FLAGS.get(here.removeprefix("--"))
        if row.only:
            cell = "only " + " or ".join(f"`{value}`" for value in row.only)
        else:
            cell = cell_text(here or "refused")
        derived = (
            flag is not None
            and flag.default in (None, (), "auto")
            and default_words(flag) != "none"
        )
        same = place == 0 and (name in SAME_DEFAULT or (derived and {*defaults} - {""} == {"none"}))
        # none means something else in Fast-LLM
        same = same and name not in ("lr_decay_iters", "zero_stage")
        yield GuideRow(option, defaults, cell, cell_text(row.remark), flag, same)


def _merged(
    options: Mapping[str, object], known: Mapping[str, list[tuple[str, Row]]]
) -> list[GuideRow]:
    """Return the rows of options; adjacent ones without a flag here that differ only in their name
    are one row."""
    rows = (
        row
        for name, default in options.items()
        for row in _rows(name, default, _cases(name, known))
    )
    found = []
    for _, group in itertools.groupby(
        rows, key=lambda row: (row.option if row.flag else "", row.cells[1:])
    ):
        first, *others = group
        found.append(
            dataclasses.replace(first, option=", ".join(row.option for row in (first, *others)))
        )
    return found


def page(guide: Guide, text: str) -> str:
    """Return the text of a guide with current tables and lists of equal flags."""
    return "".join(_section(guide, section) for section in re.split(r"^(?=## )", text, flags=re.M))


def _section(guide: Guide, text: str) -> str:
    heading = text.partition("\n")[0].removeprefix("## ")
    if heading not in guide.rows:
        return text
    lists = ""
    if guide.same.get(heading):
        names = ", ".join(f"`--{name}`" for name in guide.same[heading])
        lists = textwrap.fill(f"{LISTED} {names}.", 125, break_on_hyphens=False) + "\n\n"
    models = (
        ("gpt2", "llama")
        if heading == "Model" and guide.program == "Levanter"
        else ("default there",)
    )
    first = "Levanter" if guide.program == "Levanter" else "flag"
    made = table(
        (first, *models, "here", "default here", "remarks"),
        [row.cells for row in guide.rows[heading]],
    )
    text = re.sub(rf"^{LISTED}.*?\n\n", "", text, flags=re.M | re.S)
    return re.sub(r"(^\|.*\n)+", lambda _: lists + made, text, count=1, flags=re.M)


def other_defaults() -> dict[str, str]:
    """Return other programs' defaults by flag, where they differ from ours."""
    found: dict[str, dict[str, list[str]]] = {}
    for guide in guides():
        for row in itertools.chain.from_iterable(guide.rows.values()):
            models = ("gpt2", "llama") if len(row.defaults) > 1 else ("",)
            for model, text in zip(models, row.defaults, strict=True):
                text = re.sub(r"none \((.*)\)", r"\1", text)
                if row.flag is None or row.same or text in ("", "none", default_words(row.flag)):
                    continue
                shown = f"{text} ({model})" if model else text
                found.setdefault(row.flag.name, {}).setdefault(guide.program, []).append(shown)
    return {
        flag: "; ".join(
            f"{program}: {', '.join(dict.fromkeys(texts))}" for program, texts in programs.items()
        )
        for flag, programs in found.items()
    }


TARGET = ROOT / "docs" / "flags.md"

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
- If a flag is repeated, the last one wins, with a warning if the values differ.
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

The program answers each of them with a message. Names with the same meaning and values are in the column
"also spelled" above. A dotted name, such as Levanter's `--trainer.tracker.name`, matches by its longest known suffix;
`--moe_*` is every other name that begins with `--moe_`.
"""


def option_table(area: str, elsewhere: Mapping[str, str]) -> str:
    """Return the option table of one area. elsewhere: other programs' defaults by flag, where they
    differ."""
    rows = [
        (
            f"`--{flag.name}`",
            default_words(flag),
            _limits(flag),
            ", ".join(f"`{name}`" for name in flag.aliases),
            flag.help,
            elsewhere.get(flag.name, ""),
        )
        for flag in FLAGS.values()
        if flag.area == area
    ]
    head = ("flag", "default", "values", "also spelled", "meaning", "defaults elsewhere")
    return table(
        head, [tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) for row in rows]
    )


def _limits(flag: Flag) -> str:
    word = {"int": "integer", "float": "number", "str": "text", "bool": "0 or 1"}[flag.kind]
    text = ", ".join(flag.choices) or word + ("s" if flag.is_list else "")
    text += f" {limits(flag)}" if limits(flag) else ""
    also = ", ".join(f"{alias} = {value}" for alias, value in flag.value_aliases.items())
    return text + (f" ({also})" if also else "") + ("; none" if flag.optional else "")


def refused_table() -> str:
    """Return the table of flags and values that are accepted only if they change nothing."""
    rows = [
        (name, ", ".join(f"`{value}`" for value in row.only), row.remark)
        for name, row in refused().items()
    ]
    rows += [(typed, "nothing", reason) for typed, reason in other_programs().values.items()]
    cells = [(f"`--{name}`", accepted, cell_text(reason)) for name, accepted, reason in rows]
    return table(("flag", "accepted", "why no other value"), cells)


def instead_tables() -> Iterator[str]:
    """Yield a heading and a table for each program: its flags, with what to write instead."""
    for program in other_programs().programs:
        rows = [
            (", ".join(f"`--{name}`" for name in names), cell_text(text))
            for names, text in answers_for(program)
        ]
        yield f"### {program}\n"
        yield table(("flags", "answer"), rows)


def flags_page() -> str:
    """Return the text of docs/flags.md."""
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
