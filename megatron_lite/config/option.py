"""How the areas of `config/` declare their options. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

Auto = Literal["auto"]  # instead of a number: the program chooses once it knows the device
All = Literal["all"]  # instead of a number: everything there is

# Numbers with bounds: plain int and float to mypy, while the parser and `validation` hold their bounds.
PositiveInt = Annotated[int, {"minimum": 1}]
NonNegativeInt = Annotated[int, {"minimum": 0}]
LONGEST_WINDOW = 10_000
WindowLength = Annotated[int, {"minimum": 2, "maximum": LONGEST_WINDOW}]
PositiveFloat = Annotated[float, {"above": 0.0}]
NonNegativeFloat = Annotated[float, {"minimum": 0.0}]
Fraction = Annotated[float, {"minimum": 0.0, "maximum": 1.0}]
ProperFraction = Annotated[float, {"minimum": 0.0, "below": 1.0}]


class Area:
    """Base of the option dataclasses: `__init__` sets each attribute, and only a `Draft` can change it later."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in self.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"{name} is read-only; use dataclasses.replace")
        super().__setattr__(name, value)


class Rule(NamedTuple):
    """A condition on other options, for an option that differs from its default.

    Conditions are written like `Option.idle_unless`.
    """

    condition: str
    why: str  # the reason, for the message
    when: str = ""  # the rule counts only if this holds, too: a condition on this option's value or on others
    fix: str = ""  # the end of the message, if it is not to meet the condition or to leave an option out


@dataclass(frozen=True)
class Option:
    """Details of one option besides its name, type and default, which the dataclass field holds.

    The bounds may also come from the type, as in `PositiveInt`.
    """

    help: str
    minimum: float | None = None  # inclusive
    above: float | None = None  # exclusive lower bound
    maximum: float | None = None  # inclusive
    below: float | None = None  # exclusive upper bound
    why: str = ""  # the reason for the bounds and what to write instead, unless they are obvious
    choices: tuple[str, ...] = ()
    by_block: bool = False  # choices for parts of the blocks, too: see the end of `config/model.py`
    value_aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    aliases: str = ""  # other spellings of the flag, here and in other programs, separated by spaces
    unset: str = ""  # what None resolves to, in words
    basic: bool = False  # shown by --help; other options only by --help_all
    idle_unless: str = ""  # as "clip_grad and device!=cpu" or "optimizer=adamw|muon"; else warn that it has no effect
    needs: tuple[Rule, ...] = ()  # conditions that must hold; else the command line is refused
    excludes: tuple[Rule, ...] = ()  # conditions that must not hold
    never_empty: bool = False  # refuse an empty text instead of using the default
    secret: bool = False  # a JSON object of environment variables; the option holds only their names


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare one option; see `Option` for the details."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **details)})


def optional(help: str, unset: str, **details: Any) -> Any:
    """Declare an option whose default is None; `unset` says what None means."""
    return option(None, help, unset=unset, **details)


def derived(help: str, rule: str, **details: Any) -> Any:
    """Declare an option that `validation.resolve` derives by `rule` unless it is given.

    Only a `Draft` holds None, so the type of the option is that of a resolved configuration.
    """
    return option(None, help, unset=rule, **details)


def idle_unless(condition: str) -> Callable[..., Any]:
    """Return a function like `option`, for options that have no effect unless `condition` holds."""
    return functools.partial(option, idle_unless=condition)


low_precision_option = idle_unless("training_dtype!=fp32")
SAVED = (Rule("experiment_dir", "there is nowhere to save", when="dry_run=0"),)


def debug_level(what: str, training: bool = False) -> Any:
    """Declare an option that logs tensors; the highest level logs 2**27 samples, 512 MiB of fp32.

    training: the tensors exist only while training.
    """
    condition = "show_tensor_logs or save_tensor_logs" + (" and train_iters" if training else "")
    levels = "1: shape and dtype; 2: also mean and std; 3 and above: also 2**(level - 3) samples"
    return option(0, f"log {what} ({levels})", minimum=0, maximum=30, idle_unless=condition)
