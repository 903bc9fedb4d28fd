"""Look up a flag of another program: what to write instead, or why there is nothing.

The rows are in `config/other_programs.txt`, and are read at the first call. The parser answers from them, and
`scripts/docs/foreign_flags.py` makes the tables of docs/from_levanter.md and docs/from_fast_llm.md. A flag without a
row is the same flag here, perhaps as an alias.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_lite.config.other_programs import Row, refused_value, table
from megatron_lite.config.values import SPELLINGS, BadValueError, is_legal, number, parse_float

ANY_END = "*"  # ends a name that stands for all names with this beginning
_RAW_TEXT = "scripts/prepare_data.py"  # in a remark: the values of such a flag name raw text, and fit no flag here


@functools.cache
def by_name(*programs: str) -> Mapping[str, list[tuple[str, Row]]]:
    """Return the rows of each name, of some programs or of all: (case, row) for every case of an option.

    The case is "" unless the option has several.
    """
    found: dict[str, list[tuple[str, Row]]] = {}
    rows = table().programs
    for row in itertools.chain.from_iterable(rows[program] for program in programs or rows):
        for name in row.names:
            option, _, case = name.partition(":")
            found.setdefault(option, []).append((case, row))
    return MappingProxyType(found)


@functools.cache
def refused() -> Mapping[str, Row]:
    """Return the flags that are accepted with some values, and refused with all others."""
    return MappingProxyType({name: cases[0][1] for name, cases in by_name().items() if cases[0][1].only})


@functools.cache
def instead() -> Mapping[str, str]:
    """Return the answers to flags that do not exist here; `moe_*` stands for all names that begin so."""
    known = {*SPELLINGS, *refused()}
    return MappingProxyType({name: _answer(cases) for name, cases in by_name().items() if name not in known})


def accepts(row: Row, value: str) -> bool:
    """Whether `value`, as typed, is one of `row.only`: 1, 1.0 and true are the same, and so are .5 and 0.5."""
    return _plain(value) in {_plain(accepted) for accepted in row.only}


def refusal(name: str) -> str:
    """Return the answer to a value of the refused flag `name` that is not accepted."""
    row = refused()[name]
    accepted = " or ".join(f"--{name}={value}" for value in row.only)
    return f"{row.remark}; accepted: {accepted}, which changes nothing"


def answer_to(row: Row, value: str | None) -> str:
    """Return the answer to a flag typed with this value, if any, which a flag of the same meaning takes over."""
    here, name = row.here, row.here.removeprefix("--")
    if name in SPELLINGS:
        plain = value and re.fullmatch(r"[\w./:~+-]{1,60}", value, re.ASCII) and _RAW_TEXT not in row.remark
        if value and plain and is_legal(SPELLINGS[name], value) and not refused_value(SPELLINGS[name].name, value):
            here = f"{here}={value}"
    elif value and value.lower() == "false":
        return f"for {value} leave it out; else {answer_to(row, None)}"
    if not here:
        return row.remark
    return f"write {here} ({row.remark})" if row.remark else f"write {here}"


def answer_of(name: str, value: str | None = None) -> str | None:
    """Return what to write instead of another program's flag, or why there is nothing; None for an unknown name.

    The longest known end of a dotted name counts (`tracker.name` of `trainer.tracker.name`), and if none is known, the
    innermost group (`tracker`). `value`, if it is a value of the flag here, becomes part of the answer.
    """
    answers = instead()
    for end in suffixes(name):
        if end in answers:
            return _answer(by_name()[end], value)
    *groups, leaf = name.split(".") if len(name) <= 120 else [name]
    if groups and leaf in SPELLINGS:
        return f"flags have no dots; {answer_to(Row((leaf,), f'--{SPELLINGS[leaf].name}'), value)}"
    if groups and leaf in refused():
        return refused()[leaf].remark
    return next((answers[group] for group in reversed(groups) if group in answers), None)


def answer_of_family(name: str) -> str | None:
    """Return the answer for all names that begin as this one does (`moe_*`), the longest beginning first."""
    families = (other for other in instead() if other.endswith(ANY_END))
    longest = max((other for other in families if name.startswith(other.removesuffix(ANY_END))), key=len, default=None)
    return longest and instead()[longest]


def answers_for(program: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the flags of a program that do not exist here, with their answers; neighbours with one answer together."""
    names = (name for name in by_name(program) if name in instead())
    for answer, group in itertools.groupby(names, key=instead().__getitem__):
        yield tuple(group), answer


def suffixes(name: str) -> Iterator[str]:
    """Yield `trainer.tracker.name`, `tracker.name`, `name`: the ends of a dotted name, the longest first."""
    parts = name.split(".") if re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) else []
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def _answer(cases: list[tuple[str, Row]], value: str | None = None) -> str:
    if len(cases) == 1:
        return answer_to(cases[0][1], value)
    return "write " + " or ".join(f"{row.here} ({case})" for case, row in cases)


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(value.lower(), value.lower())
    try:
        return number(parse_float(value))
    except BadValueError:
        return value
