"""Answer unknown flags: what to write instead of another program's flag, or the likely spelling.

The rows of other programs are in `config/other_programs.txt`, read at the first call;
`scripts/docs/flags.py` generates the tables in docs/from_levanter.md and docs/from_fast_llm.md from
them. A flag without a row is the same flag here, perhaps as an alias. Answers name only flags that
exist here.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_lite.config.other_programs import KINDS, Row, refused_value, table
from megatron_lite.config.values import (
    DASHES,
    FLAGS,
    SPELLINGS,
    BadValueError,
    is_legal,
    number,
    parse_float,
    shown,
    similar,
)

ANY_END = "*"  # at the end of a name: any name with this prefix
LONGEST_NAME = 60  # characters; a longer word is not meant as a flag
HELP = ("help", "help_all", "version")
_NOTHING = ("none", "null", "false", "[]", "{}", "-1")  # values that mean an option is not wanted


@functools.cache
def by_name(*programs: str) -> Mapping[str, list[tuple[str, Row]]]:
    """Return the rows for each name as (case, row), for the given programs or all; the case of a
    single row is ""."""
    found: dict[str, list[tuple[str, Row]]] = {}
    rows = table().programs
    for row in itertools.chain.from_iterable(rows[program] for program in programs or rows):
        for name in row.names:
            option, _, case = name.partition(":")
            found.setdefault(option, []).append((case, row))
    return MappingProxyType(found)


@functools.cache
def refused() -> Mapping[str, Row]:
    """Return the flags that are accepted with some values and refused with all others."""
    return MappingProxyType(
        {name: cases[0][1] for name, cases in by_name().items() if cases[0][1].only}
    )


def refused_row(name: str) -> Row | None:
    """Return the row in `refused` for a name, possibly dotted: the longest known suffix counts."""
    return refused().get(
        next((end for end in suffixes(name) if end in by_name() or end in SPELLINGS), "")
    )


@functools.cache
def instead() -> Mapping[str, str]:
    """Return the answers to flags that do not exist here; `moe_*` covers all names with that
    prefix."""
    known = {*SPELLINGS, *refused()}
    return MappingProxyType(
        {name: _answer(cases) for name, cases in by_name().items() if name not in known}
    )


@functools.cache
def foreign_names() -> tuple[str, ...]:
    """Return the other programs' flags that count as possible misspellings: no dotted names, no
    families."""
    return tuple(
        name for name in (*refused(), *instead()) if "." not in name and not name.endswith(ANY_END)
    )


def answers_for(program: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield a program's flags that do not exist here with their answers; adjacent flags with one
    answer are grouped."""
    names = (name for name in by_name(program) if name in instead())
    for answer, group in itertools.groupby(names, key=instead().__getitem__):
        yield tuple(group), answer


# --- Another program's flag


def accepts(row: Row, value: str) -> bool:
    """Return whether `value`, as typed, is in `row.only`: 1, 1.0 and true are equal, and so are .5
    and 0.5."""
    return _plain(value) in map(_plain, row.only)


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(
        value.lower(), value.lower()
    )
    try:
        return number(parse_float(value))
    except BadValueError:
        return value


def foreign_answer(name: str) -> str:
    """Return the answer to another program's flag with a wrong or missing value."""
    row = refused_row(name)
    if row is None:
        return instead()[name]
    accepted = " or ".join(f"--{name}={value}" for value in row.only)
    return f"{row.remark}; accepted: {accepted}, which changes nothing"


def _answer(cases: list[tuple[str, Row]], value: str | None = None, leaf: str = "") -> str:
    typed = (value or "").lower()
    chosen = [
        pair
        for pair in cases
        if pair[0] == typed or re.fullmatch(KINDS.get(pair[0], "(?!)"), typed)
    ]
    if typed and typed not in _NOTHING:
        chosen = chosen or [pair for pair in cases if pair[0] == "other"]
    if len(chosen or cases) == 1:
        ((case, row),) = chosen or cases
        return _answer_to(row, None if case == typed else value, leaf)
    answer = " or ".join(f"{row.here or row.remark} ({case})" for case, row in cases)
    return (
        f"for {value} leave it out; else write {answer}" if typed in _NOTHING else f"write {answer}"
    )


def _answer_to(row: Row, value: str | None, leaf: str = "") -> str:
    """Return the answer to a flag, with the typed value in place of `leaf`, its name: <4 *
    hidden_size>."""
    here, flag = row.here, SPELLINGS.get(row.here.removeprefix("--"))
    if value:
        text = value.lower() in _NOTHING and flag is not None and (flag.is_list or flag.is_text)
        compute = re.match(r"(?:.*,)?c(?:ompute)?=(\w+)", value)  # p=f32,c=bfloat16
        meant = compute[1] if compute else value
        if flag and (reason := refused_value(flag.name, meant)):
            return reason
        legal = (
            flag is not None
            and is_legal(flag, meant)
            and (not text or (meant == "none" and not flag.default))
        )
        if value.lower() in _NOTHING and here and not legal:
            return f"for {value} leave it out; else {_answer_to(row, None)}"
        if re.fullmatch(r"[\w./:~+,-]{1,60}", meant, re.ASCII):
            here = f"{here}={meant}" if legal else here.replace(f"<{leaf}>", value)
            here = re.sub(rf"(<[^<>]*)\b{leaf or '-'}\b", rf"\g<1>{value}", here)
    if not here:
        return row.remark
    return f"write {here} ({row.remark})" if row.remark else f"write {here}"


def _answer_of(name: str, value: str | None) -> str | None:
    """Return the answer to another program's flag; None for an unknown name.

    A dotted name matches by its longest known suffix (`tracker.name` of `trainer.tracker.name`), or
    else by its innermost known group (`tracker`).
    """
    answers = instead()
    *groups, leaf = name.split(".") if len(name) <= 120 else [name]
    for end in suffixes(name):
        if end in answers:
            return _answer(by_name()[end], value, leaf)
    if groups and leaf in SPELLINGS:
        return f"flags have no dots; {_answer_to(Row((leaf,), f'--{SPELLINGS[leaf].name}'), value)}"
    group = next(
        (group for group in reversed(groups) if group in answers or group in refused()), None
    )
    return None if group is None else answers.get(group) or refused()[group].remark


def suffixes(name: str) -> Iterator[str]:
    """Yield the suffixes of a dotted name, longest first: `trainer.tracker.name`, `tracker.name`,
    `name`."""
    parts = name.split(".") if re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) else []
    for start in range(len(parts)):
        yield ".".join(parts[start:])


# --- Any flag


def answer_to_unknown(spelling: str, value: str | None) -> str:
    """Return the message for a flag that does not exist. value: the text that follows, if any."""
    message, name = f"unknown flag {shown(spelling)}", plain_name(spelling)
    if name in HELP:
        return f"{message}: flags begin with two ASCII dashes and are lower case; write --{name}"
    if answer := answer_of_any(name, value):
        if name in SPELLINGS or name in refused():
            return f"{message}: flags begin with two ASCII dashes and are lower case; {answer}"
        return f"{spelling} is not a flag here: {answer}"
    flag = SPELLINGS.get(name.removeprefix("no_"))
    if flag is not None and flag.kind == "bool":
        return f"{message}; write --{flag.name}=0"
    near = nearest_flags(name)
    ours = [f"--{other}" for other in near if other in SPELLINGS or other in HELP]
    meant = bool(near) and f"--{near[0]}" in ours
    families = [
        other for other in instead() if other.endswith(ANY_END) and name.startswith(other[:-1])
    ]
    if families and not (meant and is_one_edit(name, near[0])):
        return f"{shown(spelling)} is not a flag here: {_with_a_flag(instead()[max(families, key=len)])}"
    if not near:
        return f"{message}; --help_all lists all flags"
    if meant:
        return f"{message}; did you mean {' or '.join(ours)}?"
    return f"{message}; if {near[0]} is meant: {_with_a_flag(foreign_answer(near[0]))}"


def answer_of_any(spelling: str, value: str | None) -> str | None:
    """Return what to write for one of our flags or another program's; None for an unknown name."""
    name = plain_name(spelling)
    if name in SPELLINGS:
        return _answer_to(Row((name,), f"--{name}"), value)
    answer = foreign_answer(name) if refused_row(name) else _answer_of(name, value)
    return _with_a_flag(answer) if answer else None


def plain_name(spelling: str) -> str:
    """Return a flag in our spelling: `-Max-Iters` is max_iters, and `keep.0.every`, from an item,
    is keep.every."""
    return re.sub(r"\.[0-9]+(?=\.)", "", spelling.lstrip(DASHES).replace("-", "_").lower())


def _with_a_flag(answer: str) -> str:
    """Return an answer that names at least one flag."""
    return answer if "--" in answer else f"{answer} (--help_all lists all flags)"


def nearest_flags(name: str) -> list[str]:
    """Return up to three names that `name` may mean, likeliest first.

    First names at one edit (ours before other programs', common before rare), then our names that
    begin with `name` or contain all its words, then similar names.
    """
    if not 1 <= len(name) <= LONGEST_NAME:
        return []
    basic = {spelling for spelling, flag in SPELLINGS.items() if flag.basic}
    ours = sorted((*SPELLINGS, *HELP), key=lambda other: (other not in basic, other not in FLAGS))
    found = [
        other for names in (ours, foreign_names()) for other in names if is_one_edit(name, other)
    ]
    if not found or found[0] in ours:
        found += [other for other in ours if len(name) > 1 and other.startswith(name)]
    if not found and (words := {*name.split("_")}) and len(name) > 3:
        found = [other for other in ours if words <= {*other.split("_")}]
    if not found:
        found = [*similar(name, ours, 3, 0.8), *similar(name, foreign_names(), 3, 0.85)]
    return list(dict.fromkeys(found))[:3]


def is_one_edit(one: str, other: str) -> bool:
    """Return whether two names differ by one letter added, removed or replaced, or by two adjacent
    letters swapped."""
    if abs(len(one) - len(other)) > 1:
        return False
    start = len(os.path.commonprefix([one, other]))
    short, long = sorted((one[start:], other[start:]), key=len)
    if len(short) < len(long):
        return long[1:] == short
    return short != long and (
        short[1:] == long[1:] or (short[:2] == long[1::-1] and short[2:] == long[2:])
    )
