"""Lists whose items have a form of their own: weights with data sets, scales with name patterns. Imports no torch."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence

from megatron_lite.errors import UsageError
from megatron_lite.flags import BadValueError, is_number, parse_float, shown


def weighted_paths(data_path: Sequence[str]) -> list[tuple[float, str]]:
    """The data sets of `data_path` with their weights, which sum to 1: equal ones if none are given.

    Either every prefix has its weight before it (`0.3 a 0.7 b`) or none has. A prefix that looks like a number is
    written with its folder (`./7`).

    Raises:
        UsageError: if weights and prefixes do not alternate, or a weight is not a positive finite number.
    """
    words = tuple(data_path)
    typed = f"--data_path={_shortened(words)}"
    if not any(is_number(word) for word in words):
        return [(1.0 / len(words), word) for word in words]
    if len(words) % 2 or any(is_number(word) == bool(place % 2) for place, word in enumerate(words)):
        raise UsageError(
            f"{typed}: write a weight before every prefix (0.3 first 0.7 second) or before none; "
            f"a prefix that looks like a number needs its folder (./7)"
        )
    weights = []
    for word in words[::2]:
        try:
            weights.append(parse_float(word))
        except BadValueError as error:
            raise UsageError(f"{typed}: weight {word}: {error}") from None
        if weights[-1] <= 0:
            raise UsageError(f"{typed}: weight {word} must be > 0; leave a data set out that is not wanted")
    total = sum(weights)
    if not math.isfinite(total):
        raise UsageError(f"{typed}: the sum of the weights overflows; write smaller ones")
    return [(weight / total, prefix) for weight, prefix in zip(weights, words[1::2], strict=True)]


def _shortened(words: Sequence[str]) -> str:
    text = " ".join(words)
    return text if len(text) <= 120 else text[:100] + f"... ({len(words)} words)"


def lr_scale_patterns(freeze: Sequence[str], lr_scales: Sequence[str]) -> list[tuple[str, float]]:
    """(pattern, learning-rate scale), to be applied in this order, so that the last that matches counts.

    `lr_scales` as "pattern:scale" come first, then the patterns of `freeze` with scale 0: freezing wins.

    Raises:
        UsageError: for an item without a pattern or a scale, or with a scale that is no finite number >= 0.
    """
    scales = []
    for item in lr_scales:
        pattern, _, text = item.rpartition(":")
        typed = f"--lr_scales={_shortened([item])}"
        if not pattern or not text:
            raise UsageError(f"{typed}: write <pattern of the names>:<scale>, as in embedding:0.1 or *.bias:2")
        try:
            scales.append((pattern, parse_float(text)))
        except BadValueError as error:
            raise UsageError(f"{typed}: scale {shown(text)}: {error}") from None
        if scales[-1][1] < 0:
            raise UsageError(f"{typed}: scale {shown(text)} must be >= 0; 0 freezes")
    for item in freeze:
        if ":" in item or not item:
            typed = _shortened([item])
            raise UsageError(f"--freeze={typed}: no name has a colon; write scales as --lr_scales={typed}")
    return scales + [(pattern, 0.0) for pattern in freeze]


REGEX = "regex:"  # begins an item of --weight_decay_modules that is a regular expression


def decay_expression(pattern: str) -> re.Pattern[str] | None:
    """The regular expression that an item of `weight_decay_modules` is, or None if it is a plain pattern.

    Raises:
        UsageError: for an empty pattern, or a regular expression that cannot be read.
    """
    text = pattern.removeprefix(REGEX)
    if not text:
        raise UsageError(
            f"--weight_decay_modules={pattern}: nothing stands behind it; write a name, or regex:<expression>"
        )
    if not pattern.startswith(REGEX):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python may soon read in another way
            return re.compile(text)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--weight_decay_modules={_shortened([pattern])}: no regular expression: {error}; an item ends at a comma "
            "or a space, so write the expression without"
        ) from None
