"""How the areas of `config/` declare their options. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Auto = Literal["auto"]  # instead of a number: the program chooses once it knows the device
All = Literal["all"]  # instead of a number: everything there is


class Area:
    """Base of the option dataclasses: `__init__` sets each attribute, and only a `Draft` can change it later."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in self.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"{name} is read-only; use dataclasses.replace")
        super().__setattr__(name, value)


@dataclass(frozen=True)
class Option:
    """What is known of one option besides its name, type and default, which the dataclass field carries."""

    help: str
    minimum: float | None = None  # inclusive
    above: float | None = None  # exclusive lower bound
    maximum: float | None = None  # inclusive
    below: float | None = None  # exclusive upper bound
    why: str = ""  # the reason for the bounds and what to write instead, where they do not speak for themselves
    choices: tuple[str, ...] = ()
    value_aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()  # other spellings of the flag
    unset: str = ""  # what None resolves to, in words
    basic: bool = False  # shown by --help; the others only by --help_all
    idle_unless: str = ""  # "clip_grad and device!=cpu", "optimizer=adamw|muon": else a changed value has no effect
    never_empty: bool = False  # an empty text is an error, and not the default: too much hangs on it
    secret: bool = False  # a JSON object of environment variables: the option holds their names, values go elsewhere


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare one option; see `Option` for the details."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **details)})


def debug_level(what: str, **details: Any) -> Any:
    """Declare one of the options that log tensors; the largest level has 2**27 samples, 512 MiB of fp32."""
    levels = "1: shape and dtype; 2: and mean and std; from 3 on: and 2**(level - 3) samples"
    return option(0, f"log {what} ({levels})", minimum=0, maximum=30, **details)
