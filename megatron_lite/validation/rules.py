"""Problems and notes, and the conditions between options declared in `config/`: `needs`,
`excludes`, `idle_unless`.

A condition is a list of alternatives, `a or b=x|y or c!=z`: a has a truthy value, b has one of
these values, c has none of these. Several conditions are joined by `and`, which binds less tightly
than `or`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from megatron_lite.config import Draft
from megatron_lite.config.option import Rule
from megatron_lite.config.values import FLAGS, typed, written
from megatron_lite.errors import UsageError

Value = TypeVar("Value")


class Note(NamedTuple):
    """A remark or warning that a run prints at startup."""

    text: str
    is_warning: bool = False


class Problem(NamedTuple):
    """One contradiction: the options involved, and the message."""

    names: tuple[str, ...]
    message: str


# What a check of a draft yields: a problem, or the options to show with their values, the rule with
# its fix, and options that are involved, but not shown. Several options are separated by spaces.
Problems = Iterator[Problem | tuple[str, str] | tuple[str, str, str]]


def reported(draft: Draft, found: Problems) -> list[Problem]:
    """Return a check's problems, with the draft's values at that time: `--a=1, --b=2: <rule>;
    <fix>`."""
    return [each if isinstance(each, Problem) else _problem(draft, *each) for each in found]


def _problem(draft: Draft, names: str, rule: str, also: str = "") -> Problem:
    return Problem((*names.split(), *also.split()), f"{typed(draft, *names.split())}: {rule}")


def parsing(names: str, parse: Callable[..., object], *values: object) -> Problems:
    """Yield the error that `parse` raises for these options' values, if any."""
    try:
        parse(*values)
    except UsageError as error:
        yield Problem(tuple(names.split()), str(error))


def default(value: Value | None, derived: Value) -> Value:
    """Return `value` unless it is None, else the derived value."""
    return derived if value is None else value


def fill(draft: Draft, **derived: object) -> None:
    """Set options that are None to derived values."""
    for name, value in derived.items():
        setattr(draft, name, default(getattr(draft, name), value))


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value` as text: `64 or 128`."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)


def declared(draft: Draft) -> Problems:
    """Check `needs` and `excludes` of each option that differs from its default."""
    for name in draft.changed(*FLAGS):
        option = FLAGS[name]
        for rule in (*option.needs, *option.excludes):
            is_need = rule in option.needs
            if (not rule.when or holds(rule.when, draft)) and holds(
                rule.condition, draft
            ) != is_need:
                fix = (
                    f"{_remedy(rule.condition)}, or leave {name} out"
                    if is_need
                    else "leave one of the two out"
                )
                yield _broken(draft, name, rule, rule.fix or fix)


def holds(condition: str, options: Draft) -> bool:
    """Return whether all parts of a condition hold."""
    return not any(unmet(part, options) for part in condition.split(" and "))


def unmet(condition: str, options: Draft) -> str:
    """Return why a condition without `and` does not hold; "" if it does."""
    with_values: list[str] = []
    without: list[str] = []
    for name, sign, values in _alternatives(condition):
        value = getattr(options, name)
        listed = (set(value) if isinstance(value, tuple) else {written(value)}) & {*values}
        if (sign == "=" and listed) or (sign == "!=" and not listed) or (not sign and value):
            return ""
        if value in (None, ""):
            without.append(f"--{name}")
        elif isinstance(value, tuple):
            without.append(f"--{name}={'|'.join(values)}" if values else f"--{name}")
        else:
            with_values.append(typed(options, name))
    reasons = [f"with {' and '.join(with_values)}"] if with_values else []
    reasons += [f"without {' or '.join(without)}"] if without else []
    return " and ".join(reasons)


def _alternatives(condition: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (option, sign, values) for each alternative of a condition; the sign is =, != or
    empty."""
    for alternative in condition.split(" or "):
        name, sign, values = alternative.partition("!=" if "!=" in alternative else "=")
        yield name, sign, values.split("|") if values else []


def _broken(draft: Draft, name: str, rule: Rule, fix: str) -> Problem:
    """Report a broken rule with the values of its condition's options that are set or trigger the
    rule."""
    others = [other for other, _, _ in _alternatives(rule.condition)]
    asking = [found for part in rule.when.split(" and ") if part for found in _alternatives(part)]
    when = [other for other, _, _ in asking]
    named = [*(other for other, sign, _ in asking if not sign), *others]
    shown = dict.fromkeys(
        [name, *(other for other in named if getattr(draft, other) not in (None, "", (), False))]
    )
    return Problem((name, *others, *when), f"{typed(draft, *shown)}: {rule.why}; {fix}")


def _remedy(condition: str) -> str:
    """Return how to meet a condition: `set --a or --b`, or `write --a=1`."""
    flags, verb = [], "set"
    for name, _, values in _alternatives(condition):
        if FLAGS[name].kind == "bool":
            values = values or ["1"]
        verb = "write" if values else verb
        listed = " or ".join(", ".join(values).rsplit(", ", 1))
        flags.append(f"--{name}" + (f"={listed}" if values else ""))
    return f"{verb} {' or '.join(flags)}"
