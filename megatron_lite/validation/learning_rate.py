"""Rules about the learning rate: what excludes what, where the schedule ends, and cycles that fit into it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.config import LearningRateConfig
from megatron_lite.config.values import number
from megatron_lite.errors import UsageError
from megatron_lite.schedules.cycles import cooldown_steps, steps_of
from megatron_lite.schedules.stages import parse_stages
from megatron_lite.schedules.warnings import CYCLES, NAMES, given
from megatron_lite.validation.messages import Problem, fill, typed

PAIRS = ("lr_warmup", "lr_wsd_decay", "lr_rewarmup", "lr_cooldown")  # each in iterations or as a fraction
BESIDE_STAGES = ("lr_schedule", "lr_schedule_offset", "lr_step_offset", "default_lr_scale")
_END = ("train_iters", "lr_decay_iters", "lr_schedule_offset", "lr_cooldown_iters", "lr_cooldown_fraction")


def learning_rate(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Either the stages of lr_schedule, or lr with a decay, whose minimum and end are derived."""
    if values["lr_schedule"] is not None:
        yield from _stages(values)
        return
    for kind in PAIRS:
        yield from _exclusive(values, (f"{kind}_iters", f"{kind}_fraction"))
    yield from _exclusive(values, CYCLES)
    yield from _minimum(values)
    yield from _finite(values, "lr", values["lr"])
    fill(values, "lr_decay_iters", max(1, values["train_iters"]) + values["lr_schedule_offset"])
    if values["train_iters"] > 0:
        yield from _cycles(values)


def _exclusive(values: dict[str, Any], names: Sequence[str]) -> Iterator[Problem]:
    several = tuple(name for name in names if given(values, name))
    if len(several) > 1:
        yield Problem(several, f"{typed(values, *several)}: exclude each other; write one of them")


def _stages(values: dict[str, Any]) -> Iterator[Problem]:
    others = tuple(name for name in NAMES if name not in BESIDE_STAGES and given(values, name))
    if others:
        yield Problem(
            ("lr_schedule", *others),
            f"--lr_schedule, {typed(values, *others)}: the stages are the whole schedule; leave one or the other out",
        )
    try:
        stages = parse_stages(values["lr_schedule"])
    except UsageError as error:
        yield Problem(("lr_schedule",), str(error))
        return
    yield from _finite(values, "lr_schedule", max(max(stage.rate, stage.end_rate) for stage in stages))


def _finite(values: dict[str, Any], name: str, highest: float) -> Iterator[Problem]:
    """highest: of all rates that the option `name` sets, before --default_lr_scale."""
    if not math.isfinite(highest * values["default_lr_scale"]):
        names = (name, "default_lr_scale")
        yield Problem(names, f"{typed(values, *names)}: the product overflows; write a smaller factor")


def _minimum(values: dict[str, Any]) -> Iterator[Problem]:
    """The minimum at the end of a decay; resolved before, it is there beside its ratio."""
    peak, ratio, style = values["lr"], values["min_lr_ratio"], values["lr_decay_style"]
    names = ("min_lr", "lr") if ratio is None else ("min_lr_ratio", "lr")
    minimum = 0.0 if ratio is None else ratio * peak
    if ratio is not None and values["min_lr"] not in (None, minimum):
        yield Problem(
            ("min_lr", *names), f"{typed(values, 'min_lr', 'min_lr_ratio')}: exclude each other; write one of them"
        )
        return
    fill(values, "min_lr", minimum)
    minimum = values["min_lr"]
    rises = minimum > peak
    if not math.isfinite(minimum):
        yield Problem(names, f"{typed(values, *names)}: the product overflows; write a smaller ratio")
    elif rises and ratio is None:
        yield Problem(names, f"{typed(values, *names)}: the rate would grow; write a min_lr of at most lr")
    elif rises and style in ("inv", "inv_sqrt"):
        yield Problem(
            (*names, "lr_decay_style"),
            f"{typed(values, *names, 'lr_decay_style')}: this style only falls; write --min_lr_ratio of at most 1",
        )
    elif minimum == 0.0 and style == "inv":
        yield Problem(
            ("min_lr", "min_lr_ratio", "lr", "lr_decay_style"),
            "--lr_decay_style=inv without a minimum: how fast it falls follows from the minimum; "
            "write --min_lr or --min_lr_ratio above 0",
        )


def _cycles(values: dict[str, Any]) -> Iterator[Problem]:
    """The cooldown leaves something, and the cycles fit into what it leaves. `lr_decay_iters` is filled in."""
    options = LearningRateConfig(**{name: values[name] for name in NAMES})
    end, cooldown = values["lr_decay_iters"], cooldown_steps(options)
    total, has = end - cooldown, f"the schedule has {end} iterations"
    if cooldown:
        name = next(name for name in _END if name.startswith("lr_cooldown") and given(values, name))
        if total < 1:
            yield Problem(
                _END, f"{typed(values, name)}: nothing is left before the cooldown, as {has}; write a shorter one"
            )
            return
        has += f", {cooldown} of them the cooldown"
    count, lengths = values["lr_num_cycles"], values["lr_cycle_lengths"]
    if count > total:
        yield Problem(
            ("lr_num_cycles", *_END),
            f"{typed(values, 'lr_num_cycles')}: a cycle has at least one iteration, and {has}; write at most {total}",
        )
    if sum(lengths) > total:
        yield Problem(
            ("lr_cycle_lengths", *_END),
            f"{typed(values, 'lr_cycle_lengths')}: {sum(lengths)} iterations together, but {has}; write shorter ones",
        )
    if steps_of(None, values["lr_cycle_fraction"], total) == 0:
        yield Problem(
            ("lr_cycle_fraction", *_END),
            f"{typed(values, 'lr_cycle_fraction')}: less than one iteration, as {has}; "
            f"write at least {number(1 / total)}",
        )
    yield from _minima(values, total if cooldown else None, has)


def _minima(values: dict[str, Any], last: int | None, has: str) -> Iterator[Problem]:
    """last: the latest iteration that a minimum may have; None if any."""
    minima = values["lr_cycle_minima"]
    for before, after in zip(minima, minima[1:], strict=False):
        if after <= before:
            yield Problem(
                ("lr_cycle_minima",),
                f"{typed(values, 'lr_cycle_minima')}: {after} stands after {before}; "
                f"write the iterations in rising order",
            )
            return
    if last is not None and minima and minima[-1] > last:
        yield Problem(
            ("lr_cycle_minima", *_END),
            f"{typed(values, 'lr_cycle_minima')}: {minima[-1]} lies in the cooldown or beyond it, as {has}; "
            f"write at most {last}",
        )
