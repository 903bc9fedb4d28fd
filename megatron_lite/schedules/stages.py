"""Fast-LLM's learning-rate stages as one string: `linear,1000,0,1e-4;cosine,9000,1e-4,1e-5`.
Imports no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from megatron_lite.config.values import BadValueError, number, parse_float, parse_int, shown
from megatron_lite.errors import UsageError

Value = TypeVar("Value")

KINDS = ("constant", "linear", "power", "cosine")
FORM = "type,iters,lr[,end_lr[,power]]"
NUMBERS = ("lr", "end_lr", "power")


class Stage(NamedTuple):
    """Steps from `begin` up to `end` (None: forever), and the rates at both."""

    kind: str
    begin: int
    end: int | None
    rate: float
    end_rate: float
    power: float


@functools.cache  # called every step
def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse the stages of --lr_schedule; each begins where the previous one ends.

    Raises:
        UsageError: if a stage breaks a rule; names its number, its text and the fix.
    """
    stages: list[Stage] = []
    words = text.split(";")
    for place, word in enumerate(words, start=1):
        stage = f"--lr_schedule: stage {place} of {len(words)}, {shown(word.strip()) if word.strip() else 'empty'}"
        begin = stages[-1].end if stages else 0
        if begin is None:
            raise UsageError(
                f"{stage}: the previous stage never ends; give it a number of iterations > 0"
            )
        try:
            stages.append(_parse_stage([item.strip() for item in word.split(",")], begin))
        except BadValueError as error:
            raise UsageError(f"{stage}: {error}") from None
    return tuple(stages)


def stage_rate(stages: Sequence[Stage], step: int) -> float:
    """Return a step's rate, counted from 0; after the last stage, its end rate.

    The rate is interpolated with the elapsed fraction of the stage, raised to its power.
    """
    stage = next((stage for stage in stages if stage.end is None or step < stage.end), None)
    if stage is None:
        return stages[-1].end_rate
    if stage.end is None or stage.kind == "constant":
        return stage.rate
    over = ((step - stage.begin) / (stage.end - stage.begin)) ** stage.power
    if stage.kind == "cosine":
        over = 0.5 * (1.0 - math.cos(math.pi * over))
    else:
        assert stage.kind in ("linear", "power"), stage.kind
    return stage.rate + over * (stage.end_rate - stage.rate)


def _parse_stage(items: Sequence[str], begin: int) -> Stage:
    kind = items[0]
    if items == [""]:
        raise BadValueError(f"write {FORM}, or remove the semicolon")
    if kind not in KINDS:
        raise BadValueError(f"type {shown(kind)}: takes {', '.join(KINDS)}")
    constant = kind == "constant"
    if len(items) < (3 if constant else 4):
        raise BadValueError(
            f"{'lr' if constant else 'lr or end_lr'} is missing; write {_form(kind)}"
        )
    if len(items) > (3 if constant else 5):
        raise BadValueError(
            f"{len(items)} items; write {_form(kind)}" + (", or type linear" if constant else "")
        )
    iters = _item("iters", items[1], parse_int)
    if iters == 0:
        raise BadValueError("iters 0: leave the stage out, or write a number > 0")
    if iters < 0 and not constant:
        raise BadValueError(
            f"iters {iters}: only a constant stage can last forever; write a number > 0"
        )
    if iters < -1:
        raise BadValueError(
            f"iters {iters}: write -1 for a stage that lasts forever, or a number > 0"
        )
    numbers = {
        name: _item(name, text, parse_float) for name, text in zip(NUMBERS, items[2:], strict=False)
    }
    for name, value in numbers.items():
        if value < 0 or (name == "power" and value == 0.0):
            raise BadValueError(
                f"{name} {number(value)}: must be {'>' if name == 'power' else '>='} 0"
            )
    rate, end = numbers["lr"], begin + iters if iters > 0 else None
    return Stage(kind, begin, end, rate, numbers.get("end_lr", rate), numbers.get("power", 1.0))


def _form(kind: str) -> str:
    return f"{kind},iters,lr" + ("" if kind == "constant" else ",end_lr[,power]")


def _item(name: str, text: str, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(text)
    except BadValueError as error:
        raise BadValueError(f"{name} {shown(text)}: {error}") from None
