"""The types of a run's state in a manifest (optimizer, guards, log, data), and a check of its
options.

New checkpoint state must be added to `RUN_STATE`: `manifest.dump` refuses to write what could not
be read back. Optional keys are missing in older versions' checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from megatron_lite.checkpoint.decoding import Count, PositiveCount, Rule
from megatron_lite.config import JsonObject
from megatron_lite.config.optimizer import EMA_TYPES
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
from megatron_lite.schedules.batch_size import parse_schedule
from megatron_lite.schedules.stages import parse_stages

LARGEST_FP32 = (2 - 2**-23) * 2.0**127
# Options of earlier versions that changed no number of a resumed run.
REMOVED = frozenset(
    """
    pipeline_delay checkpoint_offset stop_offset log_timestamps enable_all_loggers show_all_options
    tensor_logs_show_elements data_sample_warn_time_ms data_batch_warn_time_ms profile_wait profile_warmup
    profile_cycles profile_export profile_averages profile_trace profile_log profile_column_width
    load_pretrained_weights load_pretrained_optimizer
    """.split()
)


def _is_hex(value: str) -> bool:
    """Return whether a string is a result of `float.hex`, including NaN and infinities."""
    try:
        return len(value) <= 32 and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        return False


def _is_iteration(value: str) -> bool:
    return (
        _is_hex(value) and float.fromhex(value).is_integer() and 0 <= float.fromhex(value) <= 2**53
    )


Finite = Annotated[float, Rule("a finite number", math.isfinite)]
NotNegative = Annotated[float, Rule("a finite number >= 0", lambda value: 0 <= value < math.inf)]
Scale = Annotated[
    float,
    Rule(
        "a number > 0 that fits fp32", lambda value: 0 < value <= LARGEST_FP32 or value == math.inf
    ),
]
# A scale for 8-bit factors, and the ages and sizes of the magnitudes that may determine it.
Magnitude = Annotated[
    float, Rule("a number >= 0 that fits fp32", lambda value: 0 <= value <= LARGEST_FP32)
]
DelayedScale = tuple[Scale, list[tuple[Count, Magnitude]]]
HexFloat = Annotated[str, Rule("a hexadecimal float", _is_hex)]
HexIteration = Annotated[str, Rule("a hexadecimal float that is an iteration", _is_iteration)]
Digest = Annotated[str, Rule("16 hexadecimal digits", re.compile("[0-9a-f]{16}").fullmatch)]
EmaType = Annotated[str, Rule(f"one of {', '.join(EMA_TYPES)}", EMA_TYPES.__contains__)]
Sha256 = Annotated[str, Rule("64 hexadecimal digits", re.compile("[0-9a-f]{64}").fullmatch)]
TokenDtype = Annotated[
    str,
    Rule(
        "the dtype of tokens", {"uint8", "int8", "int16", "int32", "int64", "uint16"}.__contains__
    ),
]
_TOKENIZER = {"tokenizer_sha256?": Sha256, "tokenizer_size?": Count}  # of the data


# A run's state outside its shards. Each class's `state` returns its part: `LossScale`, `Guard`, the
# clipping of the optimizer's rule, `Averaging`, `LogWindow`, `BestEvaluation`, `History`; the
# data's is `data.fingerprint.identity`.
RUN_STATE = {
    "optimizer": {
        "updates": Count,
        "loss_scale": {"dynamic": bool, "scale": Scale, "good": Count, "patience": int},
        "guard?": {
            "usual?": list[tuple[Finite, Finite]],
            "dropped?": {
                **dict.fromkeys(("skipped", "nan", "new", "streak", "bad?"), Count),
                "last": tuple[HexFloat, HexFloat, HexFloat, HexFloat, HexIteration],
            },
        },
        "rule?": {
            "clipping?": {"clipped?": Count, "norm?": NotNegative, "norms?": list[tuple[Finite]]}
        },
        "averaging?": {"type": EmaType, "updates": Count, "total": NotNegative},
        # for input, weight and gradient
        "scales?": dict[str, tuple[DelayedScale, DelayedScale, DelayedScale]],
        # by router: tokens that chose each expert in the newest step, and all tokens
        "balance?": dict[str, list[Count]],
    },
    "window": {"loss": HexFloat, "tokens": Count},
    "evaluation_due?": bool,
    "origin?": JsonObject,  # see `huggingface.origin`
    "base?": str,  # see `frozen_base`
    "pinned?": dict[str, str],  # see `remote_copy.pin_of`
    "history?": {"run": Digest, "changes": list[tuple[Count, Digest]]},
    "counts?": {
        # start, size and length of `schedules.batch_size.Segment`
        "stages?": list[tuple[Count, Count, Count]],
        "sets?": list[tuple[Digest, str, PositiveCount, PositiveCount, Count]],
        "skipped?": list[tuple[Count, PositiveCount]],  # `data.skipped.Skipped.ranges`
    },
    "best?": {
        "measured": Digest,
        "value": HexFloat,
        "iteration": Count,
        "seen": Count,
        "bad": Count,
    },
    "data?": {
        "sets": list[tuple[Count, Count, TokenDtype, Digest]],
        "tokenizer": Digest | None,
        "masks?": list[Digest | None],
        "evaluated?": dict[str, Digest],
        "evaluation_order?": str,  # see `data.open_data`
        **_TOKENIZER,
    },
}
# An export's record of its training, as far as known: see `WeightSource.training`.
TRAINING = {"sequence_length?": PositiveCount, **_TOKENIZER}


def training_facts(sequence_length: int, data: JsonObject) -> JsonObject:
    """Return what is known about a training, see `TRAINING`. data: the part of RUN_STATE."""
    return {"sequence_length": sequence_length} | {
        key: data[key] for key in data if f"{key}?" in _TOKENIZER
    }


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "batch_size_schedule": lambda value: value and parse_schedule(tuple(value)),
    "keep_checkpoints": keep_rules,
    "lr_schedule": parse_stages,
}


def with_current_names(config: JsonObject) -> JsonObject:
    """Return a flat saved configuration with today's names, without `REMOVED` ones.

    In earlier versions each length of the schedule was two options: iterations, and a share that
    took precedence.
    """
    current = {name: value for name, value in config.items() if name not in REMOVED}
    for flag in FLAGS.values():
        if flag.takes_share and flag.aliases[0] in config:
            length, share = (current.pop(name, None) for name in flag.aliases)
            current[flag.name] = length if share is None else str(share)
    return current


def check_options(config: JsonObject) -> None:
    """Check a flat saved configuration, with lists for tuples, by its flags' types, bounds and
    choices.

    Ignores unknown options and uses defaults for missing ones: another version of the program may
    have written the checkpoint.

    Raises:
        DamagedError: names the first option whose flag does not accept its value.
    """
    if not isinstance(config, dict):
        raise DamagedError("config is not an object")
    for name, value in config.items():
        if name not in FLAGS or (value is None and FLAGS[name].optional):
            continue
        try:
            check_value(FLAGS[name], value)
            if name in _PARSERS:
                _PARSERS[name](value)
        except (BadValueError, RunError) as error:
            raise DamagedError(f"config: {name}: {' '.join(str(error).split())}") from None


def check_value(flag: Flag, value: Any) -> None:
    """Check a JSON value by its flag's type, bounds and choices.

    Raises:
        BadValueError: if the flag does not accept it.
    """
    if flag.is_list and type(value) is not list:
        raise BadValueError("must be a list")
    for item in value if flag.is_list else (value,):
        if type(item) is str and (item in flag.words or flag.takes_share):
            continue
        if type(item) not in _TYPES[flag.kind]:
            raise BadValueError(f"must be of type {flag.kind}")
        if type(item) is int and abs(item) > LARGEST_INTEGER:
            raise BadValueError("too large for a 64-bit integer")
        if type(item) is str:
            # a list of names may be longer
            parse_text(item[:LONGEST_TEXT] if flag.secret else item)
    check_bounds(flag, tuple(value) if flag.is_list else value)
