"""The answer to a flag that does not exist: the flag that was meant, or those with the most similar names.

An answer names only flags that can be typed. A name that resembles another program's flag gets that flag's answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from megatron_lite.cli.foreign_flags import ANY_END, answer_of, answer_of_family, answer_to, instead, refusal, refused
from megatron_lite.config.other_programs import Row
from megatron_lite.config.values import DASHES, FLAGS, SPELLINGS, shown

LONGEST_NAME = 60  # characters; a longer word was not meant as a flag
HELP = ("help", "help_all", "version")
BASIC = frozenset(spelling for spelling, flag in SPELLINGS.items() if flag.option.basic)


def answer_to_unknown(spelling: str, value: str | None) -> str:
    """Return the message for a flag that does not exist. `value`: the text that follows, if any."""
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
    ours = [other for other in near if other in SPELLINGS or other in HELP]
    if near and near[0] in ours and is_one_edit(name, near[0]):
        return f"{message}; did you mean {_either(ours)}?"
    if family := answer_of_family(name):
        return f"{shown(spelling)} is not a flag here: {with_a_flag(family)}"
    if not near:
        return f"{message}; --help_all lists all flags"
    if near[0] in ours:
        return f"{message}; did you mean {_either(ours)}?"
    return f"{message}; if {near[0]} is meant: {with_a_flag(foreign_answer(near[0]))}"


def answer_of_any(spelling: str, value: str | None) -> str | None:
    """Return what to write for one of our flags, or instead of another program's; None for an unknown name."""
    name = plain_name(spelling)
    if name in SPELLINGS:
        return answer_to(Row((name,), f"--{name}"), value)
    answer = refusal(name) if name in refused() else answer_of(name, value)
    return with_a_flag(answer) if answer else None


def plain_name(spelling: str) -> str:
    """Return a flag as our names are spelled: `-Max-Iters` is max_iters."""
    return spelling.lstrip(DASHES).replace("-", "_").lower()


def foreign_answer(name: str) -> str:
    """Return the answer to another program's flag, typed without a value."""
    return refusal(name) if name in refused() else instead()[name]


@functools.cache
def foreign_names() -> tuple[str, ...]:
    """Return the other programs' flags that may have been misspelled: no dotted names, no families."""
    return tuple(name for name in (*refused(), *instead()) if "." not in name and not name.endswith(ANY_END))


def with_a_flag(answer: str) -> str:
    """Return an answer that names at least one flag to go on with."""
    return answer if "--" in answer else f"{answer} (--help_all lists all flags)"


def nearest_flags(name: str, count: int = 3) -> list[str]:
    """Return the names that `name` may have been meant to be, the likeliest first.

    First come names that differ by one edit, ours before other programs' and common ones before rare ones; then those
    of ours that `name` begins, or that have all its words; then similar ones.
    """
    if not 1 <= len(name) <= LONGEST_NAME:
        return []
    ours = sorted((*SPELLINGS, *HELP), key=lambda other: (other not in BASIC, other not in FLAGS))
    edited = [other for names in (ours, foreign_names()) for other in names if is_one_edit(name, other)]
    found = edited
    if not found or found[0] in ours:
        found = [*found, *(other for other in ours if len(name) > 1 and other.startswith(name))]
    if not found and (words := {*name.split("_")}) and len(name) > 3:
        found = [other for other in ours if words <= {*other.split("_")}]
    if not found:
        found = [*similar(name, ours, 0.8), *similar(name, foreign_names(), 0.85)]
    return list(dict.fromkeys(found))[:count]


def is_one_edit(one: str, other: str) -> bool:
    """Whether two names differ by one letter more, less or replaced, or by two neighbours in the wrong order."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    one, other = one[start:], other[start:]
    if len(one) != len(other):
        shorter, longer = sorted((one, other), key=len)
        return longer[1:] == shorter
    return one[1:] == other[1:] or (one[:2] == other[1::-1] and one[2:] == other[2:])


def similar(name: str, names: Iterable[str], cutoff: float) -> list[str]:
    """Return up to three names whose letters agree with those of `name` to this share, the most similar first."""
    import difflib  # only a mistake needs it

    return difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)


def _either(names: list[str]) -> str:
    return " or ".join(f"--{name}" for name in names)
