"""Legal but surprising learning-rate schedules: lengths that are cut, and options without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_lite.config import Draft, LearningRateConfig
from megatron_lite.config.values import typed
from megatron_lite.schedules.cycles import Cycle, boundaries, cooldown_steps, cycle, cycle_steps, steps_of, warmup_steps
from megatron_lite.schedules.learning_rate import is_constant

NAMES = tuple(field.name for field in dataclasses.fields(LearningRateConfig))
CYCLES = ("lr_num_cycles", "lr_cycle_minima", "lr_cycle_iters", "lr_cycle_fraction", "lr_cycle_lengths")
COOLDOWN = ("lr_cooldown_iters", "lr_cooldown_fraction")
STABLE_PHASE = ("lr_wsd_decay_iters", "lr_wsd_decay_fraction")


def schedule_warnings(options: Draft) -> Iterator[str]:
    """Yield one line for each surprise in the schedule of a resolved configuration."""
    if options.train_iters == 0 or options.lr_schedule is not None:
        return
    if (options.min_lr_ratio or 0.0) > 1.0:
        yield f"{_typed(options, 'min_lr_ratio')}: above 1, so the rate rises where it would decay"
    if options.lr_decay_style != "constant":
        yield from _odd_cycles(options)
        yield from _flat_cooldown(options)
    yield from _cut(options)


def idle_schedule_options(options: Draft) -> Iterator[tuple[str, str]]:
    """Yield options that have no effect, with the reason, beyond those that `idle_unless` finds."""
    if options.lr_schedule is not None:
        return
    with_style = f"with --lr_decay_style={options.lr_decay_style}"
    needs_minimum = options.lr_decay_style not in ("constant", "power_tokens") or options.changed(*COOLDOWN)
    if options.min_lr_ratio is not None and not needs_minimum:
        yield "min_lr_ratio", with_style
    elif options.min_lr and not needs_minimum:
        yield "min_lr", with_style
    one_cycle = not options.changed(*CYCLES)
    if one_cycle or options.lr_decay_style == "constant":
        for name in options.changed("lr_rewarmup_iters", "lr_rewarmup_fraction"):
            yield name, "with one cycle" if one_cycle else with_style
    if is_constant(options):
        decays = ("adamc_weight_decay",) if options.weight_decay else ()
        for name in options.changed("lr_schedule_offset", "lr_step_offset", *decays):
            yield name, f"{with_style} and neither warmup nor cooldown: the learning rate is always the same"
    derived = max(1, options.train_iters) + options.lr_schedule_offset
    if options.lr_decay_iters != derived and not _end_matters(options, one_cycle):
        yield "lr_decay_iters", with_style


def _end_matters(options: Draft, one_cycle: bool) -> bool:
    """Return whether the rate depends on where the schedule ends."""
    assert options.lr_decay_iters is not None, "resolved before"
    if options.changed(*COOLDOWN, "lr_warmup_fraction") or options.lr_warmup_iters > options.lr_decay_iters:
        return True
    endless = options.lr_decay_style in ("inv_sqrt", "power_tokens") and one_cycle
    return options.lr_decay_style != "constant" and not (endless and not options.changed(*STABLE_PHASE))


def _typed(options: Draft, kind: str) -> str:
    """Write `--name=value` of the option `kind`, or of the given one of <kind>_fraction and <kind>_iters."""
    if hasattr(options, kind):
        return typed(options, kind)
    return typed(options, *(options.changed(f"{kind}_fraction", f"{kind}_iters") or [f"{kind}_iters"])[:1])


def _odd_cycles(options: Draft) -> Iterator[str]:
    """Warn about cycles whose number or length is not what the flag seems to say."""
    total = cycle_steps(options)
    length = steps_of(options.lr_cycle_iters, options.lr_cycle_fraction, total)
    if length is not None and length > total:
        yield f"{_typed(options, 'lr_cycle')}: one cycle, because the schedule has only {total} iterations"
    elif length is not None and total % length:
        last = length + total % length
        yield f"{_typed(options, 'lr_cycle')}: the last cycle also takes the remainder and has {last} iterations"
    beyond = [minimum for minimum in options.lr_cycle_minima if minimum > total]
    if beyond:
        yield (
            f"{_typed(options, 'lr_cycle_minima')}: {beyond[0]} is beyond the end of the schedule ({total}): "
            f"the last cycle is planned up to there, and the run ends in the middle of it"
        )


def _flat_cooldown(options: Draft) -> Iterator[str]:
    falls = options.lr_decay_style in ("linear", "power", "cosine", "inv")
    count, _ = boundaries(options)
    if falls and cooldown_steps(options) and cycle(options, count - 1).decay:
        fix = "write --lr_wsd_decay_iters instead, or --lr_decay_style=constant"
        yield f"{_typed(options, 'lr_cooldown')}: the decay before it already ends at the minimum; {fix}"


def _cut(options: Draft) -> Iterator[str]:
    """Warn about lengths that do not fit into the first cycle, or into the shortest later one."""
    count, boundary = boundaries(options)
    yield from _cut_in(options, cycle(options, 0), "lr_warmup")
    if count > 1 and options.lr_decay_style != "constant":
        # Lists are short; the equal cycles of a long schedule differ by one iteration, except the last.
        candidates = range(1, min(count, 1000))
        shortest = min(candidates, key=lambda index: boundary(index + 1) - boundary(index))
        yield from _cut_in(options, cycle(options, shortest), "lr_rewarmup")


def _cut_in(options: Draft, current: Cycle, kind: str) -> Iterator[str]:
    """kind: lr_warmup or lr_rewarmup, the warmup of this cycle."""
    asked = warmup_steps(options, current.number, current.length)
    count, _ = boundaries(options)
    where = f"cycle {current.number + 1} of {count}" if count > 1 else "the schedule"
    falls = options.lr_decay_style != "constant"
    if asked > current.length:
        rest = "; nothing is left for the decay" if falls else ""
        yield f"{_typed(options, kind)}: {where} has only {current.length} iterations; the warmup is cut to them{rest}"
    if asked > current.length or not falls:
        return
    left = current.length - current.warmup
    decay = steps_of(options.lr_wsd_decay_iters, options.lr_wsd_decay_fraction, current.length)
    if decay is not None and decay > left:
        yield (
            f"{_typed(options, 'lr_wsd_decay')}: {decay} iterations, but the warmup leaves only {left} of the "
            f"{current.length} in {where}; the decay is cut to those"
        )
    elif current.decay == 0:
        name = "lr_wsd_decay" if decay == 0 else kind
        yield f"{_typed(options, name)}: no decay in {where} ({current.length} iterations); the rate stays at lr"
