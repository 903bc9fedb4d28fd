"""Problems, notes, and helpers that format them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

from megatron_lite.config import Draft
from megatron_lite.config.values import typed
from megatron_lite.errors import UsageError

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class Note(NamedTuple):
    """A remark or warning that a run prints at startup."""

    text: str
    is_warning: bool = False


class Problem(NamedTuple):
    """One contradiction: the options involved, and the message."""

    names: tuple[str, ...]
    message: str


def problem(draft: Draft, names: str, rule: str, also: str = "") -> Problem:
    """Report options that break a rule, as `--a=1, --b=2: <rule>; <fix>`.

    names: options to show with their values. also: options involved but not shown. Both are separated by spaces.
    """
    return Problem((*names.split(), *also.split()), f"{typed(draft, *names.split())}: {rule}")


def parsing(
    names: str, parse: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Iterator[Problem]:
    """Report the error that `parse` raises for the values of these options, if any."""
    try:
        parse(*args, **kwargs)
    except UsageError as error:
        yield Problem(tuple(names.split()), str(error))


def default(value: Value | None, derived: Value) -> Value:
    """Return `value` unless it is None, else the derived value."""
    return derived if value is None else value


def fill(draft: Draft, **derived: object) -> None:
    """Set the options that are None to derived values."""
    for name, value in derived.items():
        setattr(draft, name, default(getattr(draft, name), value))


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value` as text: `64 or 128`."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)
