"""What is legal but surprising in a learning-rate schedule: lengths that are cut, options without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron_lite.config import LearningRateConfig
from megatron_lite.config.values import FLAGS, written
from megatron_lite.schedules.cycles import Cycle, boundaries, cooldown_steps, cycle, steps_of

NAMES = tuple(field.name for field in dataclasses.fields(LearningRateConfig))
CYCLES = ("lr_num_cycles", "lr_cycle_minima", "lr_cycle_iters", "lr_cycle_fraction", "lr_cycle_lengths")


def schedule_cautions(values: dict[str, Any]) -> Iterator[str]:
    """One line for each surprise in the schedule of a resolved configuration."""
    if values["train_iters"] == 0 or values["lr_schedule"] is not None:
        return
    options = LearningRateConfig(**{name: values[name] for name in NAMES})
    if (options.min_lr_ratio or 0.0) > 1.0:
        yield f"{_typed(values, 'min_lr_ratio')}: above 1, so the rate rises where it would decay"
    if options.lr_decay_style != "constant":
        yield from _odd_cycles(values, options)
        yield from _flat_cooldown(values, options)
    yield from _cut(values, options)


def idle_schedule_options(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that are set and change nothing, with the reason."""
    if values["lr_schedule"] is not None:
        return
    style = values["lr_decay_style"]
    with_style = f"with --lr_decay_style={style}"
    cooldown = given(values, "lr_cooldown_iters") or given(values, "lr_cooldown_fraction")
    idle: dict[str, bool] = {
        "lr_decay_power": style not in ("linear", "power", "cosine"),
        "lr_cosine_exponent": style != "cosine",
        "lr_inv_sqrt_timescale": style != "inv_sqrt",
        "lr_power_a": style != "power_tokens",
        "lr_power_b": style != "power_tokens",
        "min_lr_ratio": style in ("constant", "power_tokens") and not cooldown,
        **dict.fromkeys(("lr_wsd_decay_iters", "lr_wsd_decay_fraction", *CYCLES), style == "constant"),
    }
    for name in NAMES:
        if idle.get(name) and given(values, name):
            yield name, with_style
    if idle["min_lr_ratio"] and values["min_lr"] and values["min_lr_ratio"] is None:
        yield "min_lr", with_style
    one_cycle = not any(given(values, name) for name in CYCLES)
    for name in ("lr_rewarmup_iters", "lr_rewarmup_fraction"):
        if (one_cycle or style == "constant") and given(values, name):
            yield name, "with one cycle" if one_cycle else with_style
    derived = max(1, values["train_iters"]) + values["lr_schedule_offset"]
    if values["lr_decay_iters"] != derived and not _end_matters(values, cooldown, one_cycle):
        yield "lr_decay_iters", with_style


def _end_matters(values: dict[str, Any], cooldown: bool, one_cycle: bool) -> bool:
    """Whether the rate depends on where the schedule ends."""
    if cooldown or given(values, "lr_warmup_fraction") or values["lr_warmup_iters"] > values["lr_decay_iters"]:
        return True
    stable_phase = given(values, "lr_wsd_decay_iters") or given(values, "lr_wsd_decay_fraction")
    endless = values["lr_decay_style"] in ("inv_sqrt", "power_tokens") and one_cycle and not stable_phase
    return values["lr_decay_style"] != "constant" and not endless


def given(values: dict[str, Any], name: str) -> bool:
    """Whether an option differs from its default."""
    return bool(values[name] != FLAGS[name].default)


def _typed(values: dict[str, Any], kind: str) -> str:
    """`--name=value` of the option `kind`, or of that of a pair which is set."""
    pair = (kind,) if kind in values else (f"{kind}_fraction", f"{kind}_iters")
    name = next(name for name in pair if len(pair) == 1 or given(values, name) or name == pair[-1])
    return f"--{name}={written(values[name])}"


def _odd_cycles(values: dict[str, Any], options: LearningRateConfig) -> Iterator[str]:
    """Cycles whose number or length is not what the flag seems to say."""
    assert options.lr_decay_iters is not None, "resolved before"
    total = options.lr_decay_iters - cooldown_steps(options)
    length = steps_of(options.lr_cycle_iters, options.lr_cycle_fraction, total)
    if length is not None and length > total:
        yield f"{_typed(values, 'lr_cycle')}: one cycle, as the schedule has only {total} iterations"
    elif length is not None and total % length:
        last = length + total % length
        yield f"{_typed(values, 'lr_cycle')}: the last cycle takes the remainder, too, and has {last} iterations"
    beyond = [minimum for minimum in options.lr_cycle_minima if minimum > total]
    if beyond:
        yield (
            f"{_typed(values, 'lr_cycle_minima')}: {beyond[0]} is beyond the end of the schedule ({total}): "
            f"its last cycle goes on until there, as if the run were that long"
        )


def _flat_cooldown(values: dict[str, Any], options: LearningRateConfig) -> Iterator[str]:
    falls = options.lr_decay_style in ("linear", "power", "cosine", "inv")
    count, _ = boundaries(options)
    if falls and cooldown_steps(options) and cycle(options, count - 1).decay:
        yield (
            f"{_typed(values, 'lr_cooldown')}: the decay before it has reached the minimum already, where it stays; "
            f"write --lr_wsd_decay_iters instead, or --lr_decay_style=constant"
        )


def _cut(values: dict[str, Any], options: LearningRateConfig) -> Iterator[str]:
    """Lengths that do not fit into a cycle: of the first one, and of the shortest later one."""
    count, boundary = boundaries(options)
    yield from _cut_in(values, options, cycle(options, 0), "lr_warmup")
    if count > 1 and options.lr_decay_style != "constant":
        some = range(1, min(count, 1000))  # of a list, all; others are equal but for one iteration and the last
        shortest = min(some, key=lambda index: boundary(index + 1) - boundary(index))
        yield from _cut_in(values, options, cycle(options, shortest), "lr_rewarmup")


def _cut_in(values: dict[str, Any], options: LearningRateConfig, current: Cycle, kind: str) -> Iterator[str]:
    iters, fraction = values[f"{kind}_iters"], values[f"{kind}_fraction"]
    asked = steps_of(iters, fraction, current.length) or 0
    count, _ = boundaries(options)
    where = f"cycle {current.number + 1} of {count}" if count > 1 else "the schedule"
    falls = options.lr_decay_style != "constant"
    if asked > current.length:
        rest = "; nothing is left for the decay" if falls else ""
        yield f"{_typed(values, kind)}: {where} has only {current.length} iterations, to which the warmup is cut{rest}"
    if asked > current.length or not falls:
        return
    left = current.length - current.warmup
    decay = steps_of(options.lr_wsd_decay_iters, options.lr_wsd_decay_fraction, current.length)
    if decay is not None and decay > left:
        yield (
            f"{_typed(values, 'lr_wsd_decay')}: {decay} iterations, but {where} has {current.length}, of which the "
            f"warmup leaves {left}; the decay is cut to those"
        )
    elif current.decay == 0:
        name = "lr_wsd_decay" if decay == 0 else kind
        yield f"{_typed(values, name)}: no decay in {where} ({current.length} iterations); the rate stays at lr"
