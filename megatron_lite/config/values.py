"""The flags: one for every option of `config/`, and what the text behind a flag means as a value.

A flag is never guessed at: its value is legal, or `BadValueError` says which rule it breaks and what to write instead.
Numbers are plain ASCII numerals, because Python's own `int` and `float` also take `nan`, `1_000` and full-width
digits, round `1e999` to infinity, and need seconds for a hundred thousand digits.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from megatron_lite.config import AREAS
from megatron_lite.config.option import All, Auto, Option

LARGEST_INTEGER = 2**63 - 1
LONGEST_NUMBER = 64  # characters
LONGEST_TEXT = 4096  # characters; also the longest path of Linux

# The same option with the same values under its name in Megatron-LM, Levanter or Hugging Face's Trainer.
OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "head_groups": ("num_key_value_heads", "num_kv_heads"),
        "kv_channels": ("head_dim",),
        "ffn_hidden_size": ("intermediate_size", "intermediate_dim"),
        "hidden_size": ("hidden_dim",),
        "num_attention_heads": ("num_heads",),
        "layer_norm_eps": ("layer_norm_epsilon",),
        "sequence_length": ("seq_len",),
        "micro_batch_size": ("per_device_train_batch_size",),
        "adam_beta1": ("beta1",),
        "adam_beta2": ("beta2",),
        "adam_eps": ("adam_epsilon", "epsilon"),
        "clip_grad": ("max_grad_norm",),
        "update_rms_clip": ("update_rms_clipping",),
        "logit_z_loss": ("z_loss_weight",),
        "full_precision_gradients": ("accumulate_allreduce_grads_in_fp32",),
        "deterministic": ("deterministic_mode",),
        "train_iters": ("num_train_steps",),
        "validation_interval": ("steps_per_eval",),
        "stop_interval": ("exit_interval",),
        "wandb_entity_name": ("wandb_entity",),
        "wandb_project_name": ("wandb_project",),
        "wandb_group_name": ("wandb_group",),
        "experiment_name": ("wandb_exp_name",),
    }
)


class BadValueError(ValueError):
    """A value that its flag cannot take; the text is the rule and the fix, without the name of the flag."""


@dataclass(frozen=True)
class Flag:
    """One option as the command line sees it."""

    name: str
    kind: str  # int, float, bool, str, list of str, list of float, list of int
    optional: bool  # takes `none`
    default: Any
    area: str
    option: Option
    words: tuple[str, ...] = ()  # that a number may be instead

    @property
    def is_list(self) -> bool:
        return self.kind.startswith("list of ")

    @property
    def is_text(self) -> bool:
        """Free text, as opposed to a name out of `Option.choices`."""
        return self.kind == "str" and not self.option.choices

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.option.aliases + OTHER_SPELLINGS.get(self.name, ())


def _flags() -> dict[str, Flag]:
    kinds = {
        "int": "int",
        "float": "float",
        "bool": "bool",
        "str": "str",
        "tuple[str, ...]": "list of str",
        "tuple[float, ...]": "list of float",
        "tuple[int, ...]": "list of int",
    }
    words = {"Auto": get_args(Auto), "All": get_args(All)}
    flags = {}
    for area, owner in AREAS.items():
        for field in dataclasses.fields(owner):
            kind, *others = str(field.type).split(" | ")  # config/ keeps its annotations as text
            flags[field.name] = Flag(
                field.name,
                kinds[kind],
                "None" in others,
                field.default,
                area,
                field.metadata["option"],
                tuple(word for other in others if other != "None" for word in words[other]),
            )
    return flags


FLAGS: Mapping[str, Flag] = MappingProxyType(_flags())
SPELLINGS: Mapping[str, Flag] = MappingProxyType(
    {spelling: flag for flag in FLAGS.values() for spelling in (flag.name, *flag.aliases)}
)

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NUMBER_LIKE = re.compile(r"[+-]?(?:nan|inf(?:inity)?)|[+-]?\.?\d[\d_.,]*(?:e[+-]?\d*)?", re.IGNORECASE)


def shown(value: str) -> str:
    """`value` as an error message can print it: bare if it is harmless, else quoted and escaped; never long."""
    text = value if len(value) <= 60 else value[:50] + "..."
    text = text if re.fullmatch(r"[!-~]+", text) else ascii(text)
    return text if len(value) <= 60 else f"{text} ({len(value)} characters)"


def is_number(text: str) -> bool:
    """Whether `text` was meant as a number, be it a legal one or not (`nan`, `1e999`, `1_000`)."""
    return len(text) <= LONGEST_NUMBER and _NUMBER_LIKE.fullmatch(text) is not None


def parse_float(text: str) -> float:
    """A finite number out of ASCII numerals.

    Raises:
        BadValueError: for anything else.
    """
    if len(text) > LONGEST_NUMBER:
        raise BadValueError(f"a number has at most {LONGEST_NUMBER} characters")
    if re.fullmatch(r"[+-]?(nan|inf(inity)?)", text, re.IGNORECASE):
        raise BadValueError("not a finite number")
    if not _NUMBER.fullmatch(text):
        raise BadValueError("not a number" + _plain_spelling(text, integer=False))
    value = float(text)
    if math.isinf(value):
        raise BadValueError("too large for a 64-bit float")
    if value == 0.0 and re.search("[1-9]", text.lower().split("e")[0]):
        raise BadValueError("too small for a 64-bit float; write 0 if that is meant")
    return value + 0.0  # no negative zero


def parse_int(text: str) -> int:
    """A 64-bit integer out of ASCII numerals.

    Raises:
        BadValueError: for anything else, `5e5` and `10.0` included.
    """
    if len(text) > LONGEST_NUMBER:
        raise BadValueError(f"an integer has at most {LONGEST_NUMBER} characters")
    if not _INTEGER.fullmatch(text):
        raise BadValueError("not an integer" + _plain_spelling(text, integer=True))
    value = int(text)
    if abs(value) > LARGEST_INTEGER:
        raise BadValueError("too large for a 64-bit integer")
    return value


def _plain_spelling(text: str, integer: bool) -> str:
    """What a number with separators, full-width digits or an exponent should have been, as the end of a message."""
    try:
        digits = "".join(str(int(c)) if c.isdecimal() else c for c in text if c not in "_, '")
        if integer and _NUMBER.fullmatch(digits):
            value = float(digits)
            if value.is_integer() and abs(value) <= LARGEST_INTEGER:
                return f"; write {int(value)}"
        elif _NUMBER.fullmatch(digits) and math.isfinite(float(digits)):
            return f"; write {digits}"
    except (ValueError, OverflowError):
        pass
    return "; write it in plain digits, as in " + ("1000" if integer else "0.001 or 1e-3")


def parse_bool(text: str) -> bool:
    """0, 1, true or false.

    Raises:
        BadValueError: for anything else.
    """
    values = {"0": False, "1": True, "false": False, "true": True}
    if text.lower() not in values:
        raise BadValueError("takes 0 or 1 (or false, true)")
    return values[text.lower()]


def parse_text(text: str) -> str:
    """Text that can be a file name and can be printed.

    Raises:
        BadValueError: if it cannot.
    """
    if len(text) > LONGEST_TEXT:
        raise BadValueError(f"a text has at most {LONGEST_TEXT} characters")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise BadValueError("contains a control character (a line break or tab?); write it without")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise BadValueError("is not valid UTF-8; rename it")
    return text


def parse_choice(text: str, option: Option) -> str:
    """One of the names that `option` offers, or an alias of one.

    Raises:
        BadValueError: for anything else.
    """
    value = option.value_aliases.get(text, text)
    if value in option.choices:
        return value
    near = difflib.get_close_matches(text[:LONGEST_NUMBER].lower(), [*option.choices, *option.value_aliases], n=1)
    raise BadValueError(f"takes {', '.join(option.choices)}" + (f"; did you mean {near[0]}?" if near else ""))


def parse_list(flag: Flag, words: Sequence[str]) -> tuple[Any, ...]:
    """The items of all `words`, which commas or spaces may separate as well.

    Raises:
        BadValueError: for an empty or illegal item.
    """
    items = re.split(r"[ \t\r\n]*,[ \t\r\n]*|[ \t\r\n]+", " ".join(words).strip())
    if any(not item for item in items):
        example = "969,30,1" if flag.kind == "list of float" else "one or more items"
        raise BadValueError(f"an item is empty; write {example}")
    if flag.kind == "list of str":
        return tuple(parse_text(item) for item in items)
    return tuple(_parse_number(flag, item) for item in items)


def parse_value(flag: Flag, text: str) -> Any:
    """The value of a flag that is no list.

    Raises:
        BadValueError: if `text` is not a value of this flag.
    """
    if not text:
        if flag.is_text and not flag.option.never_empty:  # an unset variable in an env string
            return flag.default
        raise BadValueError("the value is empty (an unset variable?); write a value or leave the flag out")
    if flag.optional and text.lower() == "none":
        return None
    if flag.kind == "bool":
        return parse_bool(text)
    if flag.kind == "str":
        return parse_choice(text, flag.option) if flag.option.choices else parse_text(text)
    return _parse_number(flag, text)


def _parse_number(flag: Flag, text: str) -> int | float | str:
    if text.lower() in flag.words:
        return text.lower()
    try:
        value = parse_int(text) if flag.kind in ("int", "list of int") else parse_float(text)
    except BadValueError as error:
        near = difflib.get_close_matches(text[:LONGEST_NUMBER].lower(), flag.words, n=1)
        if near:
            raise BadValueError(f"must be {limits(flag)}; did you mean {near[0]}?") from None
        raise BadValueError(f"{error} (must be {limits(flag)})" if limits(flag) else str(error)) from None
    check_bounds(flag, value)
    return value


def bounds(option: Option) -> str:
    """The range of a number in words: `>= 0 and < 1`; empty if every number is legal."""
    if option.minimum is not None and option.minimum == option.maximum:
        return number(option.minimum)
    limits = ((">=", option.minimum), (">", option.above), ("<=", option.maximum), ("<", option.below))
    return " and ".join(f"{sign} {number(limit)}" for sign, limit in limits if limit is not None)


def limits(flag: Flag) -> str:
    """What a number must be, in words: its bounds, or one of the words that may stand for it."""
    return ", or ".join(text for text in (bounds(flag.option), *flag.words) if text)


def check_bounds(flag: Flag, value: Any) -> None:
    """Hold a value, or every item of a list, against the bounds, the words or the choices of its option.

    Raises:
        BadValueError: if it is outside.
    """
    option = flag.option
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str) and option.choices and item not in option.choices:
            raise BadValueError(f"takes {', '.join(option.choices)}")
        if isinstance(item, (str, bool)) and (flag.kind not in ("int", "float") or item in flag.words):
            continue
        if isinstance(item, str) or not _within(option, item):
            raise BadValueError(
                f"must be {limits(flag) or 'a finite number'}" + (f": {option.why}" if option.why else "")
            )


def _within(option: Option, value: float) -> bool:
    return (
        math.isfinite(value)
        and (option.minimum is None or value >= option.minimum)
        and (option.above is None or value > option.above)
        and (option.maximum is None or value <= option.maximum)
        and (option.below is None or value < option.below)
    )


def number(value: float) -> str:
    """A number as one would type it: 969 for 969.0, else the shortest text that reads back as the same number."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def written(value: Any) -> str:
    """Any value as one would type it behind its flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        numbers = all(isinstance(item, (int, float)) for item in value)
        return ",".join(number(item) for item in value) if numbers else " ".join(value)
    return number(value) if isinstance(value, float) else str(value)


def typed(options: object, *names: str) -> str:
    """These options with their values as one would type them: `--a=1, --b=2`."""
    return ", ".join(f"--{name}={written(getattr(options, name))}" for name in names)
