"""Problems, notes, and the words they are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_lite.config.values import written


class Note(NamedTuple):
    """A remark or warning that a run prints at its start."""

    text: str
    is_warning: bool = False


class Problem(NamedTuple):
    """One contradiction: the options that take part in it, and the message."""

    names: tuple[str, ...]
    message: str


def typed(values: dict[str, Any], *names: str) -> str:
    """`--a=1, --b=2` for messages."""
    return ", ".join(f"--{name}={written(values[name])}" for name in names)


def fill(values: dict[str, Any], name: str, value: Any) -> None:
    if values[name] is None:
        values[name] = value


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value` in words, none of them 0."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)
