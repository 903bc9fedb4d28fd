"""The flags, one per option in `config/`, and the parsing of their values.

A value is never guessed: it is legal, or `BadValueError` names the broken rule and the value to
write instead. Numbers are plain ASCII digits, because Python's `int` and `float` also accept `nan`,
`1_000` and full-width digits, round `1e999` to infinity, and take seconds for a hundred thousand
digits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from megatron_lite.config import AREAS, Config, flatten
from megatron_lite.config import option as declarations
from megatron_lite.config.model import block_parts, join_block_parts
from megatron_lite.config.option import All, Auto, Flag
from megatron_lite.errors import without_credentials

LARGEST_INTEGER = 2**63 - 1
DASHES = (
    "-\u2010\u2011\u2012\u2013\u2014\u2212"  # ASCII, and those from word processors and web pages
)
PATHS = frozenset(  # options that name files and folders
    "experiment_dir data_path valid_data_path test_data_path dataset_cache loss_mask tokenizer_file "
    "pretrained_checkpoint_path load_checkpoint_path sample_prompts export_callback_script tensorboard_dir "
    "machine_speeds write_sbatch".split()
)
REMOTE = frozenset(  # options that may name remote storage, which a run copies
    "data_path valid_data_path test_data_path loss_mask tokenizer_file pretrained_checkpoint_path".split()
)
URL, LOCAL = r"[A-Za-z][\w+.-]*://", "a URL is neither read nor written"
QUOTES = "'\"\u2018\u2019\u201c\u201d"
LONGEST_NUMBER = 64  # characters
LONGEST_SHOWN = (
    200  # characters of a value in banners and messages; a --data_path may have thousands of files
)
LONGEST_TEXT = 4096  # characters; also the longest path of Linux


class BadValueError(ValueError):
    """A value that its flag does not accept; the message is the rule and the fix, without the
    flag's name.

    instead: values to write, unless the rule names one. guessed: whether these are only a guess.
    """

    def __init__(self, rule: str, *instead: str, guessed: bool = False) -> None:
        self.rule = rule
        self.instead = instead
        self.guessed = guessed
        super().__init__(rule + self.fix())

    def fix(self, prefix: str = "") -> str:
        """Return the end of the message, with `prefix` before each value: `--flag=`."""
        values = " or ".join(f"{prefix}{value}" for value in self.instead)
        if not values:
            return ""
        return f"; did you mean {values}?" if self.guessed else f"; write {values}"


def _flags() -> dict[str, Flag]:
    words = {"Auto": get_args(Auto), "All": get_args(All)}
    flags = {}
    for area, owner in AREAS.items():
        for field in dataclasses.fields(owner):
            # config/ keeps its annotations as text
            annotation, *others = str(field.type).split(" | ")
            declared = field.metadata["flag"]
            kind, bounds = _kind_and_bounds(annotation)
            flags[field.name] = dataclasses.replace(
                declared,
                name=field.name,
                kind=kind,
                is_list=annotation.startswith("tuple"),
                default=field.default,
                optional=field.default is None,
                area=area,
                words=(
                    *declared.words,
                    *(word for other in others for word in words.get(other, ())),
                ),
                takes_share="Share" in others,
                **bounds,
            )
    return flags


def _kind_and_bounds(annotation: str) -> tuple[str, dict[str, float]]:
    """Return `Flag.kind` and the bounds of a type: int and >= 1 for `tuple[PositiveInt, ...]`."""
    item = annotation.removeprefix("tuple[").removesuffix(", ...]")
    kind, bounds = get_args(getattr(declarations, item, None)) or (item, {})
    return getattr(kind, "__name__", kind), bounds


FLAGS: Mapping[str, Flag] = MappingProxyType(_flags())
SPELLINGS: Mapping[str, Flag] = MappingProxyType(
    {spelling: flag for flag in FLAGS.values() for spelling in (flag.name, *flag.aliases)}
)

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NUMBER_LIKE = re.compile(
    r"[+-]?(?:nan|inf(?:inity)?)|[+-]?\.?\d[\d_.,]*(?:e[+-]?\d*)?", re.IGNORECASE
)


def shown(value: str) -> str:
    """Return `value` for an error message: shortened if long, and quoted and escaped unless it is
    plain ASCII.

    A secret in an address is hidden.
    """
    value = without_credentials(value)
    text = value if len(value) <= 60 else value[:50] + "..."
    text = text if re.fullmatch(r"[!-~]+", text) else ascii(text)
    return text if len(value) <= 60 else f"{text} ({len(value)} characters)"


def is_number(text: str) -> bool:
    """Return whether `text` was meant as a number, legal or not (`nan`, `1e999`, `1_000`)."""
    return len(text) <= LONGEST_NUMBER and _NUMBER_LIKE.fullmatch(text) is not None


def parse_float(text: str) -> float:
    """Parse a finite number.

    Raises:
        BadValueError: for anything but ASCII digits with optional sign, point and exponent.
    """
    if len(text) > LONGEST_NUMBER:
        raise BadValueError(f"a number has at most {LONGEST_NUMBER} characters")
    if re.fullmatch(r"[+-]?(nan|inf(inity)?)", text, re.IGNORECASE):
        raise BadValueError("not a finite number")
    if not _NUMBER.fullmatch(text):
        meant = (value for value in _meant_numbers(text) if math.isfinite(value))
        raise BadValueError(
            "not a number; write it in plain ASCII digits", *(number(value) for value in meant)
        )
    value = float(text)
    if math.isinf(value):
        raise BadValueError("too large for a 64-bit float")
    if value == 0.0 and re.search("[1-9]", text.lower().split("e")[0]):
        raise BadValueError("too small for a 64-bit float; write 0 if that is meant")
    return value + 0.0  # no negative zero


def parse_int(text: str) -> int:
    """Parse a 64-bit integer.

    Raises:
        BadValueError: for anything but ASCII digits with an optional sign, such as `5e5` and
        `10.0`.
    """
    if len(text) > LONGEST_NUMBER:
        raise BadValueError(f"an integer has at most {LONGEST_NUMBER} characters")
    if not _INTEGER.fullmatch(text):
        meant = [
            value
            for value in _meant_numbers(text)
            if value.is_integer() and abs(value) <= LARGEST_INTEGER
        ]
        if not meant:
            raise BadValueError("not an integer; write it in plain ASCII digits")
        raise BadValueError("not an integer", *(str(int(value)) for value in meant))
    value = int(text)
    if abs(value) > LARGEST_INTEGER:
        raise BadValueError("too large for a 64-bit integer")
    return value


def _meant_numbers(text: str) -> list[float]:
    """Return the numbers that another notation may mean: 1_000, 1,000, 5e5, 10%, 8k (8000 or
    8192)."""
    plain = text.replace("_", "")
    if re.fullmatch(r"[+-]?0,[0-9]+", plain):  # a decimal comma
        plain = plain.replace(",", ".")
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+", plain):
        plain = plain.replace(",", "")
    match = re.fullmatch(rf"({_NUMBER.pattern})([kKmMgGbBtT%]?)", plain)
    if match is None:
        return []
    value, suffix = float(match[1]), match[2].lower()
    if suffix in ("", "%"):
        return [value / 100 if suffix else value]
    power = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4}[suffix]
    return (
        [value * 1000.0**power, value * 1024.0**power] if suffix == "k" else [value * 1000.0**power]
    )


def parse_bool(text: str) -> bool:
    """Parse 0, 1, true or false.

    Raises:
        BadValueError: for anything else.
    """
    values = {"0": False, "1": True, "false": False, "true": True}
    if text.lower() not in values:
        words = {
            "1": ("yes", "on", "y", "t", "enable", "enabled"),
            "0": ("no", "off", "n", "f", "disable", "disabled"),
        }
        meant = [value for value, spellings in words.items() if text.lower() in spellings]
        raise BadValueError("takes 0 or 1 (or false, true)", *meant)
    return values[text.lower()]


def parse_text(text: str, name: str = "") -> str:
    """Check that a text is printable and can be a file name; expand the ~ of an option of `PATHS`.

    The shell does not expand it in --flag=~/folder. Only an option of `REMOTE` takes a URL.

    Raises:
        BadValueError: if it is not.
    """
    if len(text) > LONGEST_TEXT:
        raise BadValueError(f"a text has at most {LONGEST_TEXT} characters")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise BadValueError("contains a control character (a line break or tab?); remove it")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise BadValueError("is not valid UTF-8; rename it")
    if name in PATHS - REMOTE and re.match(URL, text):
        raise BadValueError(LOCAL, "<local or mounted path>")
    return os.path.expanduser(text) if name in PATHS else text


LONGEST_LIST = 240  # characters of a message


def parse_choice(text: str, flag: Flag) -> str:
    """Parse one of the choices of `flag`, or an alias of one.

    Raises:
        BadValueError: for anything else.
    """
    value = flag.value_aliases.get(text, text)
    if value in flag.choices or re.fullmatch(flag.also, text):
        return value
    known = {
        word: flag.value_aliases.get(word, word) for word in (*flag.choices, *flag.value_aliases)
    }
    same = [value for word, value in known.items() if _letters(word) == _letters(text)]
    near = same[:1] or list(dict.fromkeys(known[word] for word in _meant_words(text, [*known])))
    choices = ", ".join(flag.choices)
    choices = choices if len(choices) <= LONGEST_LIST else "one of the names that --help_all lists"
    raise BadValueError(f"takes {choices}", *near[:3], guessed=not same)


def parse_by_block(text: str, flag: Flag) -> str:
    """Parse choices of `flag` with their numbers of blocks: `activation,full:8`. See `block_parts`.

    Raises:
        BadValueError: for anything else.
    """
    parts: list[tuple[str, str | None]] = []
    for value, number in block_parts(text):
        choice, count = _part(text, value, number, flag)
        if choice in dict(parts):
            raise BadValueError(f"{choice} is given twice; leave one out")
        parts.append((choice, count))
    rest = [choice for choice, count in parts if count is None]
    if len(rest) > 1:
        example = join_block_parts([(rest[0], None), *((choice, "8") for choice in rest[1:])])
        raise BadValueError(
            f"{' and '.join(rest)} have no number of blocks; only one part may have none", example
        )
    if not rest:
        unused = [choice for choice in flag.choices if choice not in dict(parts)][:1]
        examples = (join_block_parts([(choice, None), *parts]) for choice in unused)
        raise BadValueError("one part must have no number, for all other blocks", *examples)
    return join_block_parts(parts)


def _part(text: str, value: str, number: str | None, flag: Flag) -> tuple[str, str | None]:
    """Parse one part for `parse_by_block`; an error suggests the whole text, corrected."""
    try:
        choice = parse_choice(value, flag)
        count = None if number is None else parse_int(number)
    except BadValueError as error:
        wrong = value if value not in flag.choices else number or ""
        right = [text.replace(wrong, other, 1) for other in error.instead if wrong]
        raise BadValueError(
            f"{shown(wrong)}: {error.rule}", *right, guessed=error.guessed
        ) from None
    if count is not None and count < 1:
        raise BadValueError(f"{choice}:{count} takes no block", text.replace(f":{number}", ":1", 1))
    return choice, None if count is None else str(count)


def is_flag(text: str) -> bool:
    """Return whether a word is a flag, right or wrong, and not a value: dashes and a letter, but
    not `-inf`."""
    if re.fullmatch(r"-(inf(inity)?|nan)", text, re.IGNORECASE):
        return False
    return re.match(rf"--|[{DASHES}]+[A-Za-z]", text) is not None


def parse_list(flag: Flag, words: Sequence[str]) -> tuple[Any, ...] | None:
    """Parse a list; commas and spaces inside `words` separate items, too. `none` is a list that is
    empty by default.

    Raises:
        BadValueError: for an empty or illegal item.
    """
    text = " ".join(words).strip()
    if text.startswith("[") and text.endswith("]"):  # YAML's [a, "b"]
        text = re.sub(r"""[]["']""", "", text).strip() or "none"
    if not flag.default and text.lower() == "none":
        return flag.words or flag.default
    items = re.split(r"[ \t\r\n]*,[ \t\r\n]*|[ \t\r\n]+", text)
    if any(not item for item in items):
        example = "969,30,1" if flag.kind == "float" else "one or more items"
        raise BadValueError(f"an item is empty; write {example}")
    if flag.kind == "str":
        return tuple(
            parse_choice(item, flag) if flag.choices else parse_text(item, flag.name)
            for item in items
        )
    return tuple(_parse_number(flag, item) for item in items)


def parse_value(flag: Flag, text: str) -> Any:
    """Parse the value of a flag that is not a list.

    Raises:
        BadValueError: if `text` is not a value of this flag.
    """
    if not text:
        if flag.is_text and not flag.never_empty:  # an unset variable in an env string
            return flag.default
        raise BadValueError(
            "the value is empty (an unset variable?); write a value or leave the flag out"
        )
    if flag.optional and text.lower() == "none" not in flag.words:
        return None
    if flag.kind == "bool":
        return parse_bool(text)
    if flag.kind == "str":
        if flag.by_block and re.search("[,:]", text):
            return parse_by_block(text, flag)
        return parse_choice(text, flag) if flag.choices else parse_text(text, flag.name)
    return _parse_number(flag, text)


def _parse_number(flag: Flag, text: str) -> int | float | str:
    if text.lower() in flag.words:
        return text.lower()
    try:
        if flag.takes_share and re.search("[.%]|e-", text.lower()):
            value: int | float | str = parse_share(text)
        else:
            value = parse_int(text) if flag.kind == "int" else parse_float(text)
    except BadValueError as error:
        if near := similar(text.lower(), flag.words, 1, 0.7):
            raise BadValueError(f"must be {limits(flag)}", *near, guessed=True) from None
        rule = f"{error.rule} (must be {limits(flag)})" if limits(flag) else error.rule
        raise BadValueError(
            rule, *(other for other in error.instead if is_legal(flag, other))
        ) from None
    check_bounds(flag, value)
    return value


def parse_share(text: str) -> int | str:
    """Parse a share, 0.1 or 10%, in place of a number: `0.1`, as text; or 0.

    Raises:
        BadValueError: for anything else.
    """
    digits = text.removesuffix("%")
    value = parse_float(digits) / (1 if digits == text else 100)
    if not 0 <= value <= 1:
        raise BadValueError(
            "a fraction is between 0 and 1.0, or 0% and 100%; a number of iterations has no decimal point"
        )
    return str(value) if value else 0


def is_legal(flag: Flag, text: str) -> bool:
    """Return whether `flag` accepts this value, regardless of other flags."""
    try:
        parse_list(flag, [text]) if flag.is_list else parse_value(flag, text)
    except BadValueError:
        return False
    return True


def _letters(text: str) -> str:
    """Return the letters and digits of a word in lower case: RMSNorm and rms_norm are the same
    word."""
    return re.sub("[^a-z0-9]", "", text[:LONGEST_NUMBER].lower())


def _meant_words(text: str, words: Sequence[str]) -> list[str]:
    """Return the words that `text` begins (bfloat), is a part of (layer) or misspells, or the one
    it begins with."""
    plain, part = _letters(text), text[:LONGEST_NUMBER].lower()
    begun = [word for word in words if len(plain) > 1 and _letters(word).startswith(plain)]
    longer = [word for word in words if len(word) > 2 and plain.startswith(_letters(word))]
    return (
        begun
        or [word for word in words if part in re.split("[-_]", word)]
        or similar(part, words, 1, 0.7)
        or sorted(longer, key=len)[-1:]
    )


def similar(text: str, words: Iterable[str], count: int, cutoff: float) -> list[str]:
    """Return up to `count` words that share at least `cutoff` of their letters with `text`, most
    similar first."""
    import difflib  # only a mistake needs it

    return difflib.get_close_matches(text[:LONGEST_NUMBER], [*words], count, cutoff)


def limits(flag: Flag) -> str:
    """Return a number's rule in words, `>= 0 and < 1, or auto`; empty if every number is legal."""
    bounds = ((">=", flag.minimum), (">", flag.above), ("<=", flag.maximum), ("<", flag.below))
    rule = " and ".join(f"{sign} {number(bound)}" for sign, bound in bounds if bound is not None)
    if flag.minimum is not None and flag.minimum == flag.maximum:
        rule = number(flag.minimum)
    share = "a share as 0.1 or 10%" if flag.takes_share else ""
    return ", or ".join(text for text in (rule, *flag.words, share) if text)


def check_bounds(flag: Flag, value: Any) -> None:
    """Check a value, or every item of a list, against its flag's bounds, words or choices.

    Raises:
        BadValueError: if one is outside.
    """
    is_set = isinstance(value, tuple) and flag.choices and not flag.repeats
    if is_set and len(set(value)) < len(value):
        raise BadValueError("one is given twice; leave one out")
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str) and flag.by_block and re.search("[,:]", item):
            parse_by_block(item, flag)
        elif (
            isinstance(item, str)
            and flag.choices
            and item not in flag.choices
            and not re.fullmatch(flag.also, item)
        ):
            raise BadValueError(f"takes {', '.join(flag.choices)}")
        elif flag.pattern and not re.fullmatch(flag.pattern, item):
            raise BadValueError(flag.why)
        elif isinstance(item, (str, bool)) and (
            flag.kind not in ("int", "float") or item in flag.words
        ):
            continue
        elif isinstance(item, str) and flag.takes_share:
            parse_share(item)
        elif isinstance(item, str) or not _within(flag, item):
            why = f": {flag.why}" if flag.why else ""
            raise BadValueError(f"must be {limits(flag) or 'a finite number'}{why}")


def _within(flag: Flag, value: float) -> bool:
    over = (flag.minimum is None or value >= flag.minimum) and (
        flag.above is None or value > flag.above
    )
    under = (flag.maximum is None or value <= flag.maximum) and (
        flag.below is None or value < flag.below
    )
    return math.isfinite(value) and over and under


def number(value: float) -> str:
    """Return a number as a user would type it: 969 for 969.0, otherwise the shortest exact text."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def counted(number: int, noun: str) -> str:
    """Format a count: 1 stage, 2 stages, 3 micro-batches."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def written(value: Any) -> str:
    """Return a value as a user would type it after its flag, without a secret from an older run's
    address."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        numbers = all(isinstance(item, (int, float)) for item in value)
        return (
            ",".join(number(item) for item in value)
            if numbers
            else without_credentials(" ".join(value))
        )
    return number(value) if isinstance(value, float) else without_credentials(str(value))


def abridged(value: Any) -> str:
    """Return a value as a user would type it, cut if long, such as thousands of paths."""
    text = written(value)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]}..." + (
        f" ({len(value):,} words)" if isinstance(value, tuple) else ""
    )


def alike(config: Config, asked: Config) -> dict[str, list[str]]:
    """Return the options that must match on all ranks, by flag: [value, value as typed].

    config: resolved. asked: as typed.
    """
    given = flatten(asked)
    values = {name: value for name, value in flatten(config).items() if not FLAGS[name].may_differ}
    return {f"--{name}": [written(value), written(given[name])] for name, value in values.items()}


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of a JSON value, for comparison between ranks or starts."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def typed(options: object, *names: str) -> str:
    """Return these options with their values as typed: `--a=1, --b=2`."""
    return ", ".join(f"--{name}={abridged(getattr(options, name))}" for name in names)
