"""Decode JSON into types: a value that does not fit its type is damaged; the error gives the place
and the expected type.

A type is a dictionary of types (an object with these keys; one that ends with "?" may be absent,
and its object empty), a `NamedTuple` or a dataclass, or made of `list`, `dict`, `tuple`, `| None`,
`Any`, `bool`, `int`, `float`, `int | float` and `str`; all but `Any` may be `Annotated` with a
`Rule`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from megatron_lite.errors import DamagedError

LARGEST_COUNT = 2**62


class Rule(NamedTuple):
    """A rule for a type's values: its description and its test."""

    words: str
    holds: Callable[[Any], object]


Count = Annotated[int, Rule("a count", lambda value: value >= 0)]
PositiveCount = Annotated[int, Rule("a positive count", lambda value: value >= 1)]


Decoder = Callable[[Any], Any]
_SCALARS: dict[Any, Rule] = {
    bool: Rule("true or false", lambda value: type(value) is bool),
    int: Rule("an integer", lambda value: type(value) is int and abs(value) <= LARGEST_COUNT),
    float: Rule("a number", lambda value: type(value) is float and not math.isnan(value)),
    int | float: Rule(
        "a number", lambda value: type(value) in (int, float) and not math.isnan(value)
    ),
    str: Rule("a text", lambda value: type(value) is str),
}


class _WrongError(Exception):
    """A value that does not fit; `path` grows from the value outwards."""

    def __init__(self, problem: str) -> None:
        self.problem, self.path = problem, ""


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Decode a JSON value into a type.

    Raises:
        DamagedError: names the first place whose value does not fit. `where`: name of the top-level
            value, if any.
    """
    try:
        return _decoder(kind)(value)
    except _WrongError as wrong:
        place = f"{where}{wrong.path}".removeprefix(".") or "it"
        raise DamagedError(f"{place} {wrong.problem}") from None


def _decoder(kind: Any) -> Decoder:
    if not isinstance(kind, dict):
        return _type_decoder(kind)
    fields = {key.removesuffix("?"): _decoder(inner) for key, inner in kind.items()}
    optional = {
        key.removesuffix("?"): isinstance(inner, dict)
        for key, inner in kind.items()
        if key.endswith("?")
    }
    return functools.partial(_object, fields, optional)


@functools.cache
def _type_decoder(kind: Any) -> Decoder:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in _SCALARS:
        return functools.partial(_scalar, *_SCALARS[kind])
    if origin is Annotated:
        (words, rule), holds = arguments[1], _SCALARS[arguments[0]].holds
        return functools.partial(_scalar, words, lambda value: holds(value) and rule(value))
    if origin is tuple:
        return functools.partial(_tuple, [_decoder(argument) for argument in arguments])
    if origin in (list, dict):
        return functools.partial(_list if origin is list else _dict, _decoder(arguments[-1]))
    if type(None) in arguments:
        inner = _decoder(arguments[0])
        return lambda value: None if value is None else inner(value)
    decoded = _decoder(get_type_hints(kind, include_extras=True))
    return lambda value: kind(**decoded(value))


def _scalar(words: str, holds: Callable[[Any], object], value: Any) -> Any:
    if not holds(value):
        raise _WrongError(f"is not {words}")
    return value


def _inside(key: Any, decoder: Decoder, value: Any) -> Any:
    """Decode the element at a key or index."""
    try:
        return decoder(value)
    except _WrongError as wrong:
        wrong.path = (
            f"[{key}]" if isinstance(key, int) else f".{ascii(key[:80])[1:-1]}"
        ) + wrong.path
        raise


def _list(decoder: Decoder, value: Any) -> list[Any]:
    if type(value) is not list:
        raise _WrongError("is not a list")
    return [_inside(index, decoder, item) for index, item in enumerate(value)]


def _tuple(decoders: list[Decoder], value: Any) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(decoders):
        raise _WrongError(f"is not a list of {len(decoders)}")
    return tuple(map(_inside, range(len(value)), decoders, value))


def _dict(decoder: Decoder, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _WrongError("is not an object")
    return {key: _inside(key, decoder, item) for key, item in value.items()}


def _object(fields: dict[str, Decoder], optional: dict[str, bool], value: Any) -> dict[str, Any]:
    """Decode an object. optional: keys that may be absent, and whether their value may be an empty
    object."""
    if type(value) is not dict:
        raise _WrongError("is not an object")
    if unknown := [key for key in value if key not in fields]:
        raise _WrongError(f"has the unknown key {ascii(unknown[0][:40])}")
    if missing := [name for name in fields if name not in value and name not in optional]:
        raise _WrongError(f"has no {missing[0]}")
    empty = {key for key, item in value.items() if item == {} and optional.get(key)}
    return {
        key: {} if key in empty else _inside(key, fields[key], item) for key, item in value.items()
    }
