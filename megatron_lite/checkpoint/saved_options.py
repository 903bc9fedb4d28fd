"""The options in a manifest: each by the type, bounds and choices that the command line applies to its flag.

Options that this version does not know are left alone, and absent ones count as their defaults: a checkpoint may come
from another version of the program.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.structured_values import keep_rules
from megatron_lite.config.values import (
    FLAGS,
    LARGEST_INTEGER,
    LONGEST_TEXT,
    BadValueError,
    Flag,
    check_bounds,
    parse_text,
)
from megatron_lite.errors import DamagedError, RunError
from megatron_lite.schedules.batch_options import parse_schedule
from megatron_lite.schedules.stages import parse_stages

MOST_OPTIONS = 2000
LONGEST_NAME = 200  # characters
MOST_ITEMS = 100_000  # of a list


def check_options(config: Any) -> None:
    """Check the flat configuration of a checkpoint, whose tuples are lists.

    Raises:
        DamagedError: names the first option whose value its flag cannot take.
    """
    if not isinstance(config, dict):
        raise DamagedError("config is not an object")
    if len(config) > MOST_OPTIONS or any(len(name) > LONGEST_NAME for name in config):
        raise DamagedError("config has too many options, or one with too long a name")
    for name, value in config.items():
        if name not in FLAGS:
            continue
        try:
            _check_value(FLAGS[name], value)
            if name == "batch_size_schedule" and value:
                parse_schedule(tuple(value))
            elif name == "keep_checkpoints":
                keep_rules(value)
            elif name == "lr_schedule" and value is not None:
                parse_stages(value)
        except (BadValueError, RunError) as error:
            raise DamagedError(f"config: {name}: {' '.join(str(error).split())}") from None


def _check_value(flag: Flag, value: Any) -> None:
    """Check the type of a value, then its bounds or choices.

    Raises:
        BadValueError: if either is wrong.
    """
    if value is None:
        if not flag.optional:
            raise BadValueError("is null")
        return
    if flag.is_list:
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise BadValueError("is not a list of a sensible length")
        for item in value:
            _check_item(flag, flag.kind.removeprefix("list of "), item)
        check_bounds(flag, tuple(value))
        return
    if type(value) is str and value in flag.words:
        return
    _check_item(flag, flag.kind, value)
    check_bounds(flag, value)


def _check_item(flag: Flag, kind: str, value: Any) -> None:
    types = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[kind]
    if type(value) not in types:
        raise BadValueError(f"is not of type {kind}")
    if type(value) is int and abs(value) > LARGEST_INTEGER:
        raise BadValueError("is too large for a 64-bit integer")
    if type(value) is str:
        parse_text(value[:LONGEST_TEXT] if flag.option.secret else value)  # a list of names may be longer
