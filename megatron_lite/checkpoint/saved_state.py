"""The shape of `state` in a manifest: exactly what the optimizer, its guards and the log window write.

A key that ends with `?` may be absent, as in checkpoints of older versions; an object under it may also be empty. After
`check_state` every `load_state` can trust types, signs and lengths. Who adds state to a checkpoint adds it here:
`manifest.dump` refuses to write what could not be read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_lite.config.numbers import LONGEST_WINDOW
from megatron_lite.config.optimizer import EMA_TYPES
from megatron_lite.errors import DamagedError

LARGEST_COUNT = 2**62
MOST_SETS = 100_000
_TOKEN_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
_LARGEST_FP32 = (2 - 2**-23) * 2.0**127


class _Value(NamedTuple):
    """A value that is no object: what it must be, in words, and whether it is."""

    words: str
    is_legal: Callable[[Any], bool]


def is_count(value: Any, minimum: int = 0) -> bool:
    """Whether a JSON value is an integer of a sensible size; bool is an int, but not a count."""
    return type(value) is int and minimum <= value <= LARGEST_COUNT


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_hex(value: Any) -> bool:
    """Whether a text is what `float.hex` returns; NaN and infinities are, too."""
    try:
        return type(value) is str and len(value) <= 32 and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        return False


def _is_scale(value: Any) -> bool:
    return type(value) is float and (0 < value <= _LARGEST_FP32 or value == math.inf)


def _is_step(value: Any) -> bool:
    """Whether a value is a dropped step: two numbers, their limits, and the iteration, which is a whole number."""
    if not isinstance(value, list) or len(value) != 5 or not all(map(_is_hex, value)):
        return False
    iteration = float.fromhex(value[4])
    return iteration.is_integer() and 0 <= iteration <= 2**53


def _is_digest(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[0-9a-f]{16}", value) is not None


def _is_sets(value: Any) -> bool:
    """Whether a value lists data sets: documents, tokens, dtype, fingerprint of each."""
    return isinstance(value, list) and len(value) <= MOST_SETS and all(map(_is_set, value))


def _is_set(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    documents, tokens, dtype, mark = value
    return is_count(documents) and is_count(tokens) and dtype in _TOKEN_DTYPES and _is_digest(mark)


def _is_masks(value: Any) -> bool:
    """Whether a value lists the fingerprints of loss masks, or null for a data set without one."""
    return (
        isinstance(value, list) and len(value) <= MOST_SETS and all(mark is None or _is_digest(mark) for mark in value)
    )


def _rows(width: int) -> _Value:
    def is_rows(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) <= LONGEST_WINDOW
            and all(isinstance(row, list) and len(row) == width and all(map(_is_finite, row)) for row in value)
        )

    return _Value(f"a list of at most {LONGEST_WINDOW} rows of {width} finite numbers", is_rows)


_COUNT = _Value("a count", is_count)
_INTEGER = _Value("an integer", lambda value: type(value) is int and abs(value) <= LARGEST_COUNT)
_FLAG = _Value("true or false", lambda value: type(value) is bool)
_NOT_NEGATIVE = _Value("a finite number >= 0", lambda value: _is_finite(value) and value >= 0)
_SCALE = _Value("a number > 0 that fits fp32", _is_scale)
_HEX = _Value("a hexadecimal float", _is_hex)
_STEP = _Value("five hexadecimal floats that end with an iteration", _is_step)
_SETS = _Value("a list of at most 100,000 data sets", _is_sets)
_DIGEST = _Value("16 hexadecimal digits or null", lambda value: value is None or _is_digest(value))
_MASKS = _Value("a list of at most 100,000 digests or nulls", _is_masks)
_EMA_TYPE = _Value(f"one of {', '.join(EMA_TYPES)}", lambda value: type(value) is str and value in EMA_TYPES)

_LOSS_SCALE = {"dynamic": _FLAG, "scale": _SCALE, "good": _COUNT, "patience": _INTEGER}
_COUNTS = {"skipped": _COUNT, "nan": _COUNT, "new": _COUNT, "streak": _COUNT, "bad?": _COUNT}
_CLIPPING = {"clipped?": _COUNT, "norm?": _NOT_NEGATIVE, "norms?": _rows(1)}
_STATE: Mapping[str, Any] = MappingProxyType(
    {
        "optimizer": {
            "updates": _COUNT,
            "loss_scale": _LOSS_SCALE,
            "guard?": {"usual?": _rows(2), "dropped?": {**_COUNTS, "last": _STEP}},
            "rule?": {"clipping?": _CLIPPING},
            "averaging?": {"type": _EMA_TYPE, "updates": _COUNT, "total": _NOT_NEGATIVE},
        },
        "window": {"loss": _HEX, "tokens": _COUNT},
        "evaluation_due?": _FLAG,
        "data?": {"sets": _SETS, "tokenizer": _DIGEST, "masks?": _MASKS},
    }
)


def check_state(state: Any) -> None:
    """Check the state of a run beside its shards.

    Raises:
        DamagedError: names the first value that no version of this program writes.
    """
    _check(state, _STATE, "state")


def _check(value: Any, shape: Mapping[str, Any] | _Value, where: str) -> None:
    if isinstance(shape, _Value):
        if not shape.is_legal(value):
            raise DamagedError(f"{where} is not {shape.words}")
        return
    if not isinstance(value, dict):
        raise DamagedError(f"{where} is not an object")
    names = {name.removesuffix("?"): name for name in shape}
    for key in value:
        if key not in names:
            raise DamagedError(f"{where} has the unknown key {key[:40]!r}")
    for key, name in names.items():
        optional = name.endswith("?")
        if key not in value:
            if not optional:
                raise DamagedError(f"{where} has no {key}")
        elif not (optional and value[key] == {} and not isinstance(shape[name], _Value)):
            _check(value[key], shape[name], f"{where}.{key}")
