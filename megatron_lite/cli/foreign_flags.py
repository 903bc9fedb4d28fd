"""Look up a flag of another program: what to write instead, or why there is nothing.

The tables are in `cli/other_programs/`, one module for each program. The parser answers from them, and
`scripts/docs/foreign_flags.py` makes the tables of docs/from_levanter.md and docs/from_fast_llm.md. A flag without a
row is the same flag here, perhaps as an alias. Other programs' values of existing options are in
`config/foreign_values.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_lite.cli.other_programs.fast_llm import FAST_LLM, FAST_LLM_YAML
from megatron_lite.cli.other_programs.hugging_face import CONFIG_JSON, RUN_CLM, TRAINER
from megatron_lite.cli.other_programs.levanter import LEVANTER
from megatron_lite.cli.other_programs.megatron import MEGATRON
from megatron_lite.cli.other_programs.nanogpt import NANOGPT
from megatron_lite.cli.other_programs.others import OTHERS
from megatron_lite.cli.other_programs.row import Row
from megatron_lite.config.values import SPELLINGS

# The tables of each program.
PROGRAMS: Mapping[str, tuple[tuple[Row, ...], ...]] = MappingProxyType(
    {
        "Megatron-LM": (MEGATRON,),
        "Levanter": (LEVANTER,),
        "Fast-LLM": (FAST_LLM, FAST_LLM_YAML),
        "Hugging Face's Trainer and run_clm.py, and names of its config.json": (TRAINER, RUN_CLM, CONFIG_JSON),
        "nanoGPT and nanochat": (NANOGPT,),
        "torchtitan, litgpt, PyTorch Lightning, DeepSpeed and torchrun, and short names": (OTHERS,),
    }
)
ANY_END = "*"  # ends a name that stands for all names with this beginning


def by_name(*tables: tuple[Row, ...]) -> dict[str, list[tuple[str, Row]]]:
    """Return the rows of each name: (case, row) for every case of the option, or one row with the case ""."""
    found: dict[str, list[tuple[str, Row]]] = {}
    for row in (row for table in tables for row in table):
        for name in row.names.split():
            option, _, case = name.partition(":")
            found.setdefault(option, []).append((case, row))
    return found


def _answer(cases: list[tuple[str, Row]], value: str | None = None) -> str:
    if len(cases) == 1:
        return cases[0][1].answer_to(value)
    return "write " + " or ".join(f"{row.here} ({case})" for case, row in cases)


_ROWS: Mapping[str, list[tuple[str, Row]]] = MappingProxyType(
    by_name(*(table for tables in PROGRAMS.values() for table in tables))
)
# Flags that are accepted with some values, and refused with all others.
REFUSED: Mapping[str, Row] = MappingProxyType({name: cases[0][1] for name, cases in _ROWS.items() if cases[0][1].only})
# Flags that do not exist here: what to write instead, or why there is nothing. `moe_*` stands for all that begin so.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {name: _answer(cases) for name, cases in _ROWS.items() if name not in SPELLINGS and name not in REFUSED}
)


def suffixes(name: str) -> Iterator[str]:
    """Yield `trainer.tracker.name`, `tracker.name`, `name`: the ends of a dotted name, the longest first."""
    parts = name.split(".") if re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) else []
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def answer_of(name: str, value: str | None = None) -> str | None:
    """Return what to write instead of another program's flag, or why there is nothing; None for an unknown name.

    The longest known end of a dotted name counts (`tracker.name` of `trainer.tracker.name`), and if none is known, the
    innermost group (`tracker`). `value`, if it is a value of the flag here, becomes part of the answer.
    """
    for end in suffixes(name):
        if end in INSTEAD:
            return _answer(_ROWS[end], value)
    *groups, leaf = name.split(".") if len(name) <= 120 else [name]
    if groups and leaf in SPELLINGS:
        return f"flags have no dots; {Row(leaf, f'--{SPELLINGS[leaf].name}').answer_to(value)}"
    if groups and leaf in REFUSED:
        return REFUSED[leaf].remark
    return next((INSTEAD[group] for group in reversed(groups) if group in INSTEAD), None)


def answer_of_family(name: str) -> str | None:
    """Return the answer for all names that begin as this one does (`moe_*`), the longest beginning first."""
    families = [other for other in INSTEAD if other.endswith(ANY_END) and name.startswith(other.removesuffix(ANY_END))]
    return INSTEAD[max(families, key=len)] if families else None


def answers_for(program: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the flags of a program that do not exist here, with their answers; neighbours with one answer together."""
    names = (name for name in by_name(*PROGRAMS[program]) if name in INSTEAD)
    for answer, group in itertools.groupby(names, key=INSTEAD.__getitem__):
        yield tuple(group), answer
