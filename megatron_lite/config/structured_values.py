"""Options with their own syntax: data sets with weights, name patterns with scales, sizes,
environment variables."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_lite.config.values import (
    QUOTES,
    BadValueError,
    abridged,
    is_number,
    parse_float,
    shown,
)
from megatron_lite.errors import UsageError

# As in transformers: KB is 1,000 bytes, KiB is 1,024. The B is upper case, because b would mean
# bits.
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS = MappingProxyType(_DECIMAL | {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40})
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]{0,3})")
_KEEP_RULE = re.compile(r"([0-9]{1,18})(?::([0-9]{1,18}))?")
_SAMPLE_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_WEIGHT_CHANGE = re.compile(r"([0-9]{1,18}):([^:]+)")
LINKS = ("auto", "nvlink", "ib", "ethernet")
_ADDRESS = re.compile(r"(?!.*::)([a-z][a-z0-9+.-]*://[^/].*|file://.+|(?!.*://).+)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def weighted_paths(data_path: Sequence[str], flag: str = "data_path") -> list[tuple[float, str]]:
    """Return the data sets in `data_path`, the words of `flag`, with weights that sum to 1; by
    default equal.

    A run adds weights, see `corpus.from_text`.

    Every prefix follows a weight (`0.3 a 0.7 b`), or none does. A prefix that looks like a number
    needs its folder (`./7`).

    Raises:
        UsageError: if weights and prefixes do not alternate, or a weight is not a positive finite
        number.
    """
    words = tuple(data_path)
    typed = f"--{flag}={abridged(words)}"
    if not any(is_number(word) for word in words):
        return [(1.0 / len(words), word) for word in words]
    if len(words) % 2 or any(
        is_number(word) == bool(place % 2) for place, word in enumerate(words)
    ):
        raise UsageError(
            f"{typed}: write a weight before every prefix (0.3 first 0.7 second) or before none; "
            f"a prefix that looks like a number needs its folder (./7)"
        )
    weights = [_number(word, f"{typed}: weight {word}") for word in words[::2]]
    for word, weight in zip(words[::2], weights, strict=True):
        if weight <= 0:
            raise UsageError(
                f"{typed}: weight {word} must be > 0; leave the data set out if it is not wanted"
            )
    total = sum(weights)
    if not math.isfinite(total):
        raise UsageError(f"{typed}: the sum of the weights overflows; write smaller ones")
    return [(weight / total, prefix) for weight, prefix in zip(weights, words[1::2], strict=True)]


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return each of these distinct paths' shortest suffix, in whole parts, that no other path
    has."""
    ends = {}
    for path in paths:
        parts = [part for part in path.split("/") if part] or [path]
        ends[path] = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    times = Counter(end for of_path in ends.values() for end in of_path)
    return {
        path: next((end for end in of_path if times[end] == 1), path)
        for path, of_path in ends.items()
    }


class WeightStage(NamedTuple):
    """Weights of a blend's data sets, which sum to 1, once `start` iterations are done."""

    start: int
    weights: tuple[float, ...]


def weight_stages(data_path: Sequence[str], schedule: Sequence[str]) -> tuple[WeightStage, ...]:
    """Return the weights of `data_path` over a run: its own first, then --data_weights_schedule.

    `1000:0.5/0.5 2000:0/1` changes the weights of two data sets once 1000 iterations are done, and
    again after 2000. A change at 0 sets the weights of `data_path`, which then has none.

    Raises:
        UsageError: like `weighted_paths`; for an item that is not <iteration>:<weight>/<weight>...,
            iterations out of order, or a weight that is not a finite number >= 0.
    """
    first = tuple(weight for weight, _ in weighted_paths(data_path))
    stages = [WeightStage(0, first)]
    for item in schedule:
        typed = f"--data_weights_schedule={abridged(tuple(schedule))}: {shown(item)}"
        match = _WEIGHT_CHANGE.fullmatch(item)
        if match is None:
            raise UsageError(f"{typed}: write <iteration>:<weight>/<weight>, as in 1000:0.5/0.5")
        weights = [_number(text, f"{typed}: weight {shown(text)}") for text in match[2].split("/")]
        if len(weights) != len(first):
            raise UsageError(
                f"{typed}: {len(weights)} weights for {len(first)} data sets; write one for each"
            )
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise UsageError(f"{typed}: write finite weights >= 0 with a positive sum")
        stage = WeightStage(int(match[1]), tuple(weight / sum(weights) for weight in weights))
        if stage.start == 0 and len(stages) == 1:
            if len(first) != len(data_path):
                raise UsageError(f"{typed}: --data_path has weights, too; leave one of the two out")
            stages = []
        elif stage.start <= stages[-1].start:
            raise UsageError(
                f"{typed}: {stage.start} follows {stages[-1].start}; sort the iterations"
            )
        stages.append(stage)
    return tuple(stages)


def sample_ranges(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the words of --skip_samples, <first>-<last>, as pairs (first, last + 1).

    Raises:
        UsageError: for another word, or a last sample before the first.
    """
    found = []
    for word in words:
        match = _SAMPLE_RANGE.fullmatch(word)
        if match is None or int(match[2]) < int(match[1]):
            raise UsageError(
                f"--skip_samples={abridged(tuple(words))}: {shown(word)}: write <first sample>-<last sample>, as in "
                "51200-76799"
            )
        found.append((int(match[1]), int(match[2]) + 1))
    return found


def _number(text: str, where: str) -> float:
    """Parse a number; an error begins with `where`."""
    try:
        return parse_float(text)
    except BadValueError as error:
        raise UsageError(f"{where}: {error}") from None


def mlp_lr_scales(mlp: float | None, router: float | None) -> list[tuple[str, float]]:
    """Return the pairs of --mlp_lr_scale and --router_lr_scale; see `lr_scale_patterns`. router:
    None of a model without routers."""
    if mlp is None and router in (None, 1.0):
        return []
    scales = [("*.mlp.*", 1.0 if mlp is None else mlp)]
    return scales if router is None else [*scales, ("*.mlp.router.*", router)]


def lr_scale_patterns(freeze: Sequence[str], lr_scales: Sequence[str]) -> list[tuple[str, float]]:
    """Return (pattern, learning-rate scale) pairs; the last pair that matches a name counts.

    The "pattern:scale" items of `lr_scales` come first, then the patterns of `freeze` with scale 0,
    so freezing wins.

    Raises:
        UsageError: for an item without a pattern or a scale, or with a scale that is not a finite
        number >= 0.
    """
    scales = []
    for item in lr_scales:
        pattern, _, text = item.rpartition(":")
        typed = f"--lr_scales={abridged(item)}"
        if not pattern or not text:
            raise UsageError(
                f"{typed}: write <pattern of the names>:<scale>, as in embedding:0.1 or *.bias:2"
            )
        scales.append((pattern, _number(text, f"{typed}: scale {shown(text)}")))
        if scales[-1][1] < 0:
            raise UsageError(f"{typed}: scale {shown(text)} must be >= 0; 0 freezes")
    for item in freeze:
        if ":" in item or not item:
            typed = abridged(item)
            raise UsageError(
                f"--freeze={typed}: no name has a colon; write scales as --lr_scales={typed}"
            )
    return scales + [(pattern, 0.0) for pattern in freeze]


class KeepRule(NamedTuple):
    """Keeps every checkpoint whose iteration is a multiple of `every`, up to and including
    `until`."""

    every: int
    until: int | None  # None: to the end of the run


def keep_rules(items: Sequence[str]) -> tuple[KeepRule, ...]:
    """Parse --keep_checkpoints: `1000:10000 5000` is every 1000th up to iteration 10000, then every
    5000th.

    Raises:
        UsageError: if an item is not <every> or <every>:<until>, has an end out of order, or
        follows one without end.
    """
    rules: list[KeepRule] = []
    for item in items:
        typed, match = f"--keep_checkpoints={abridged(tuple(items))}", _KEEP_RULE.fullmatch(item)
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"{typed}: {shown(item)}: write <every>:<until>, as in 1000:10000, and <every> at the end"
            )
        rule = KeepRule(int(match[1]), int(match[2]) if match[2] else None)
        before = rules[-1].until if rules else 0
        if before is None:
            raise UsageError(
                f"{typed}: {shown(item)} never applies: the rule before it has no end; write one"
            )
        if rule.until is not None and rule.until <= before:
            raise UsageError(
                f"{typed}: {shown(item)} never applies: the rule before reaches {before}; sort the ends"
            )
        rules.append(rule)
    return tuple(rules)


REGEX = "regex:"  # prefix of a regular expression in a list of modules
_ONLY_IN_EXPRESSIONS = re.compile(r"^[.^]|[\\|()$+{}]")  # never in a name or a wildcard pattern
_LEVANTER_NAMES = MappingProxyType(  # Levanter's parts of names -> ours
    {
        "attn": r"attention\.",
        "token_embeddings": r"embedding\.word",
        "position_embeddings": r"embedding\.position",
    }
)


def module_expression(flag: str, pattern: str) -> re.Pattern[str] | None:
    """Return the regular expression in an item of a list of modules, or None for a plain pattern.

    Raises:
        UsageError: for an empty pattern, an invalid regular expression, one without prefix or with
            Levanter's names.
    """
    text = pattern.removeprefix(REGEX)
    if not text:
        raise UsageError(
            f"--{flag}={pattern}: the pattern is empty; write a name, or regex:<expression>"
        )
    marked, theirs = pattern.startswith(REGEX), [name for name in _LEVANTER_NAMES if name in text]
    if not marked and not _ONLY_IN_EXPRESSIONS.search(text):
        return None
    if theirs or not marked:
        for name in theirs:
            text = text.replace(name, _LEVANTER_NAMES[name])
        # not mlp_norm, which has no mlp in its name there
        text = re.sub(r"(?<!\w)mlp(?![\w\\])", r"mlp\\.", text)
        why = f"no name here has {theirs[0]}" if theirs else "a regular expression"
        typed = f"--{flag}={abridged(pattern)}: {why}"
        raise UsageError(f"{typed}; write --{flag}='{REGEX}{text}'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such an expression may change its meaning soon
            return re.compile(text)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--{flag}={abridged(pattern)}: not a regular expression: {error}; an item ends at a "
            "comma or space, so write the expression without them"
        ) from None


def size_bytes(text: str, name: str = "export_shard_size") -> int:
    """Return the bytes in a size such as 5GB, 500MB, 2GiB, 1.5GB or plain bytes. `name`: the flag,
    for messages.

    Raises:
        UsageError: for any other text, or a size below one byte.
    """
    typed, match = f"--{name}={shown(text)}", _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{typed}: not a size; write a number and a unit, as in 5GB, 500MB or 2GiB, or plain bytes"
        )
    number, unit = match.groups()
    if unit not in SIZE_UNITS:
        near = next((known for known in SIZE_UNITS if known.lower() == unit.lower()), "GB")
        known = ", ".join(known for known in SIZE_UNITS if known)
        raise UsageError(
            f"{typed}: {unit} is not a unit of bytes (known: {known}); write {number}{near}"
        )
    whole, _, decimals = number.partition(".")
    size = int(whole + decimals) * SIZE_UNITS[unit] // 10 ** len(decimals)
    if not 0 < size < 2**63:
        raise UsageError(f"{typed}: must be at least one byte, and less than 2**63; write 5GB")
    return size


def storage_address(text: str, name: str) -> None:
    """Check a folder's address: a path, or scheme://bucket/path. `name`: the flag, for messages.

    Raises:
        UsageError: for any other text.
    """
    if not _ADDRESS.fullmatch(text):
        raise UsageError(
            f"--{name}={shown(text)}: must be the address of a folder, as in s3://bucket/run or /mnt/run"
        )


class Interconnect(NamedTuple):
    """The slowest link between ranks: auto, nvlink, ib or ethernet, and its speed if given."""

    kind: str
    gb_s: float | None  # per GPU and direction


def interconnect(text: str) -> Interconnect:
    """Return a link such as nvlink, ib:25 or ethernet:12.5.

    Raises:
        UsageError: for any other text.
    """
    kind, colon, speed = text.partition(":")
    try:
        gb_s = parse_float(speed) if colon else None
    except BadValueError:
        gb_s = 0.0
    if (
        kind not in LINKS
        or (gb_s is not None and not 0 < gb_s <= 1e6)
        or (kind == "auto" and colon)
    ):
        known = "auto, nvlink, ib or ethernet, or one of these links with its GB/s per GPU"
        raise UsageError(
            f"--interconnect={shown(text)}: must be {known}, as in --interconnect=ib:25"
        )
    return Interconnect(kind, gb_s)


def environment_values(text: str) -> dict[str, str]:
    """Return the variables in a JSON object of strings, {"NAME": "value"}. Messages never show a
    value.

    Raises:
        BadValueError: for any other text, or for names and values that an environment cannot
            contain.
    """
    example = """write a JSON object of strings, as in '{"NAME": "value"}'"""
    if text[:1] in set(QUOTES) - {'"'}:  # JSON itself may begin with "
        raise BadValueError(
            "begins with a literal quote, which a shell keeps inside a variable; use an @file"
        )
    try:
        # keeps repeated names, and arrays are lists
        pairs: Any = json.loads(text, object_pairs_hook=tuple)
    except ValueError as error:
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" ({error.msg.lower()} at character {error.pos + 1})"
        raise BadValueError(f"not JSON{where}; {example}") from None
    except RecursionError:
        raise BadValueError(f"nested too deeply; {example}") from None
    if not isinstance(pairs, tuple):
        raise BadValueError(f"not a JSON object; {example}")
    for number, (variable, value) in enumerate(pairs, start=1):
        if not _VARIABLE.fullmatch(variable):
            raise BadValueError(
                f"name {number} is not a variable name: use letters, digits and _, no digit first"
            )
        if not isinstance(value, str):
            raise BadValueError(
                f"the value of {variable} is not a string; write it in double quotes"
            )
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise BadValueError(
                f"the value of {variable} has a character that an environment cannot hold"
            )
    if len(dict(pairs)) != len(pairs):
        raise BadValueError("a name is given twice; leave one out")
    return dict(pairs)
