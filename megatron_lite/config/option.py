"""Declare options in the areas of `config/`. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

Auto = Literal["auto"]  # instead of a number: the program chooses once it knows the device
All = Literal["all"]  # instead of a number: everything
Share = str  # instead of a number: a share of the whole, from 0.0 to 1.0, as text, so that 1.0 differs from 1

# Bounded numbers: plain int and float to mypy; the parser and `validation` enforce the bounds.
PositiveInt = Annotated[int, {"minimum": 1}]
NonNegativeInt = Annotated[int, {"minimum": 0}]
LONGEST_WINDOW = 10_000
WindowLength = Annotated[int, {"minimum": 2, "maximum": LONGEST_WINDOW}]
PositiveFloat = Annotated[float, {"above": 0.0}]
NonNegativeFloat = Annotated[float, {"minimum": 0.0}]
Fraction = Annotated[float, {"minimum": 0.0, "maximum": 1.0}]
PositiveFraction = Annotated[float, {"above": 0.0, "maximum": 1.0}]
ProperFraction = Annotated[float, {"minimum": 0.0, "below": 1.0}]
LossScale = Annotated[float, {"minimum": 2.0**-100, "maximum": 2.0**100}]


class Area:
    """Base of the option dataclasses: `__init__` sets each attribute; only a `Draft` may change it
    later."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in self.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"{name} is read-only; use dataclasses.replace")
        super().__setattr__(name, value)


class Rule(NamedTuple):
    """A condition on other options that an option needs or excludes once it differs from its
    default.

    `validation.rules` defines the syntax of conditions.
    """

    condition: str
    why: str  # reason, for the message
    when: str = ""  # apply the rule only if this condition holds
    fix: str = ""  # end of the message; default: meet the condition or omit an option


@dataclass(frozen=True)
class Flag:
    """An option and its flag; `values.FLAGS` adds the dataclass field's facts: name, type, bounds,
    default."""

    help: str
    name: str = ""
    kind: str = ""  # int, float, bool or str; of a list, that of its items
    is_list: bool = False
    default: Any = None
    optional: bool = False  # accepts `none`
    area: str = ""
    words: tuple[
        str, ...
    ] = ()  # accepted instead of a number: auto, all; none if it is not the default
    takes_share: bool = False  # instead of a number: 0.1, or 10%
    minimum: float | None = None  # inclusive
    above: float | None = None  # exclusive lower bound
    maximum: float | None = None  # inclusive
    below: float | None = None  # exclusive upper bound
    why: str = ""  # reason for the bounds and what to write instead, unless obvious
    choices: tuple[str, ...] = ()
    repeats: bool = False  # a list may have a choice several times: a pattern over the blocks
    also: str = "(?!)"  # regular expression of texts that are accepted besides the choices
    pattern: str = ""  # regular expression of each text without choices; `why` says it in words
    by_block: bool = False  # the choice may differ between blocks: see the end of `config/model.py`
    value_aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()  # other spellings of the flag, here and in other programs
    unset: str = ""  # what None resolves to, in words
    basic: bool = False  # shown by --help; other options only by --help_all
    idle_unless: str = (
        ""  # condition, as "clip_grad and device!=cpu"; if it fails, warn of no effect
    )
    needs: tuple[Rule, ...] = ()  # conditions that must hold; otherwise the command line is refused
    excludes: tuple[Rule, ...] = ()  # conditions that must not hold
    never_empty: bool = False  # refuse an empty text instead of using the default
    may_differ: bool = (
        False  # between ranks; any other difference between ranks is refused at the start
    )
    secret: bool = False  # JSON object of environment variables; the option stores only their names

    @property
    def is_text(self) -> bool:
        """Whether the value is free text rather than one of `choices`."""
        return self.kind == "str" and not self.choices and not self.is_list


def option(default: Any, help: str, aliases: str = "", **details: Any) -> Any:
    """Declare one option; see `Flag` for the details, and separate aliases by spaces."""
    return dataclasses.field(
        default=default, metadata={"flag": Flag(help, aliases=tuple(aliases.split()), **details)}
    )


def optional(help: str, unset: str, **details: Any) -> Any:
    """Declare an option that defaults to None; `unset` describes None.

    If `validation.resolve` derives the option, only a `Draft` may contain None, and the type is the
    resolved value's.
    """
    return option(None, help, unset=unset, **details)


def idle_unless(condition: str) -> Callable[..., Any]:
    """Return a variant of `option` for options that have no effect unless `condition` holds."""
    return functools.partial(option, idle_unless=condition)


low_precision_option = idle_unless("training_dtype!=fp32")
SAVED = (Rule("experiment_dir", "there is nowhere to save", when="dry_run=0"),)


def debug_level(what: str, training: bool = False) -> Any:
    """Declare an option that logs tensors; the highest level samples 2**27 elements, 512 MiB in
    fp32.

    training: whether the tensors exist only during training.
    """
    condition = "show_tensor_logs or save_tensor_logs" + (" and train_iters" if training else "")
    levels = "1: shape and dtype; 2: also mean and std; 3 and above: also 2**(level - 3) samples"
    return option(0, f"log {what} ({levels})", minimum=0, maximum=30, idle_unless=condition)
