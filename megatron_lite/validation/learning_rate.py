"""Rules and warnings for the learning rate: exclusive options, the minimum, the end, and phase
lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from megatron_lite.config import Draft, LearningRateConfig
from megatron_lite.config.values import number, typed
from megatron_lite.schedules.cycles import (
    Cycle,
    boundaries,
    cooldown_steps,
    cycle,
    cycle_steps,
    steps_of,
    warmup_steps,
)
from megatron_lite.schedules.learning_rate import is_constant
from megatron_lite.schedules.stages import parse_stages
from megatron_lite.validation.rules import Problem, Problems, default, fill, parsing

CYCLES = ("lr_num_cycles", "lr_cycle_minima", "lr_cycle", "lr_cycle_lengths")  # alternatives
WITH_STAGES = ("lr_schedule", "lr_schedule_offset", "lr_step_offset", "default_lr_scale")
_END = "train_iters lr_decay_iters lr_schedule_offset lr_cooldown"


def learning_rate(draft: Draft) -> Problems:
    """Check the stages of lr_schedule, or lr and its decay, and derive the minimum and the end of
    the decay."""
    if draft.lr_schedule is not None:
        yield from _stages(draft, draft.lr_schedule)
        return
    several = draft.changed(*CYCLES)
    if len(several) > 1:
        yield " ".join(several), "exclude each other; write one of them"
    yield from _minimum(draft)
    yield from _finite(draft, "lr", draft.lr)
    fill(draft, lr_decay_iters=max(1, draft.train_iters) + draft.lr_schedule_offset)
    if draft.train_iters > 0:
        yield from _cycles(draft, draft.lr_decay_iters)


def _stages(draft: Draft, text: str) -> Problems:
    others = draft.changed(
        *(name for name in vars(LearningRateConfig()) if name not in WITH_STAGES)
    )
    if others:
        rule = "its stages are the whole schedule; leave out either lr_schedule or the others"
        yield Problem(("lr_schedule", *others), f"--lr_schedule, {typed(draft, *others)}: {rule}")
    problems = [*parsing("lr_schedule", parse_stages, text)]
    yield from problems
    if not problems:
        yield from _finite(
            draft,
            "lr_schedule",
            max(max(stage.rate, stage.end_rate) for stage in parse_stages(text)),
        )


def _finite(draft: Draft, name: str, highest: float) -> Problems:
    """Check the highest learning rate, set by the option `name`, after multiplication by
    --default_lr_scale."""
    if not math.isfinite(highest * draft.default_lr_scale):
        yield f"{name} default_lr_scale", "the product overflows; write a smaller factor"


def _minimum(draft: Draft) -> Problems:
    """Derive the minimum from its ratio. In a resolved configuration both are set and agree."""
    ratio, names = draft.min_lr_ratio, "min_lr lr"
    derived = 0.0
    if ratio is not None:
        names, derived = "min_lr_ratio lr", ratio * draft.lr
        if draft.min_lr not in (None, derived):
            yield "min_lr min_lr_ratio", "exclude each other; write one of them", "lr"
            return
    draft.min_lr = default(draft.min_lr, derived)
    rises = draft.min_lr > draft.lr
    if not math.isfinite(draft.min_lr):
        yield names, "the product overflows; write a smaller ratio"
    elif rises and ratio is None:
        yield names, "the learning rate would rise; write --min_lr of at most --lr"
    elif rises and draft.lr_decay_style in ("inv", "inv_sqrt"):
        rule = "this style can only lower the learning rate; write --min_lr_ratio of at most 1"
        yield f"{names} lr_decay_style", rule
    elif draft.min_lr == 0.0 and draft.lr_decay_style == "inv":
        rule = "the minimum determines how fast this style decays; write --min_lr or --min_lr_ratio above 0"
        yield "lr_decay_style", rule, "min_lr min_lr_ratio lr"


def _cycles(draft: Draft, end: int) -> Problems:
    """Check that the cooldown is shorter than the schedule and that the cycles fit before it."""
    cooldown = cooldown_steps(draft)
    total, length = end - cooldown, f"the schedule has {end} iterations"
    if cooldown:
        if total < 1:
            yield (
                "lr_cooldown",
                f"nothing is left before the cooldown, because {length}; write a shorter one",
                _END,
            )
            return
        length += f", {cooldown} of them the cooldown"
    if draft.lr_num_cycles > total:
        yield (
            "lr_num_cycles",
            f"each cycle needs at least one iteration, and {length}; write at most {total}",
            _END,
        )
    if sum(draft.lr_cycle_lengths) > total:
        rule = f"the cycles need {sum(draft.lr_cycle_lengths)} iterations, but {length}; write shorter ones"
        yield "lr_cycle_lengths", rule, _END
    if draft.lr_cycle is not None and steps_of(draft.lr_cycle, total) == 0:
        rule = f"a cycle would be shorter than one iteration, because {length}; write at least {number(1 / total)}"
        yield "lr_cycle", rule, _END
    minima = draft.lr_cycle_minima
    for before, after in itertools.pairwise(minima):
        if after <= before:
            yield "lr_cycle_minima", f"{after} follows {before}; sort the iterations"
            return
    if cooldown and minima and minima[-1] > total:
        rule = f"{minima[-1]} is not before the cooldown, because {length}; write at most {total}"
        yield "lr_cycle_minima", rule, _END


# --- Warnings


def schedule_warnings(options: Draft) -> Iterator[str]:
    """Yield one line per surprise in a resolved configuration's schedule."""
    if options.train_iters == 0 or options.lr_schedule is not None:
        return
    if (options.min_lr_ratio or 0.0) > 1.0:
        yield f"{typed(options, 'min_lr_ratio')}: above 1, so the learning rate rises where it would decay"
    if options.lr_decay_style != "constant":
        yield from _odd_cycles(options)
        yield from _flat_cooldown(options)
    yield from _cut(options)


def _odd_cycles(options: Draft) -> Iterator[str]:
    """Warn about cycles whose number or length differs from what the flag suggests."""
    total = cycle_steps(options)
    length = total if options.lr_cycle is None else steps_of(options.lr_cycle, total)
    if length > total:
        yield f"{typed(options, 'lr_cycle')}: one cycle, because the schedule has only {total} iterations"
    elif total % length:
        last = length + total % length
        yield f"{typed(options, 'lr_cycle')}: the last cycle also takes the remainder and has {last} iterations"
    beyond = [minimum for minimum in options.lr_cycle_minima if minimum > total]
    if beyond:
        yield (
            f"{typed(options, 'lr_cycle_minima')}: {beyond[0]} is beyond the end of the schedule ({total}): "
            f"the last cycle extends to there, and the run ends in the middle of it"
        )


def _flat_cooldown(options: Draft) -> Iterator[str]:
    falls = options.lr_decay_style in ("linear", "power", "cosine", "inv")
    count, _ = boundaries(options)
    if falls and cooldown_steps(options) and cycle(options, count - 1).decay:
        fix = "write --lr_wsd_decay instead, or --lr_decay_style=constant"
        yield f"{typed(options, 'lr_cooldown')}: the decay before it already ends at the minimum; {fix}"


def _cut(options: Draft) -> Iterator[str]:
    """Warn about phases that do not fit into the first cycle or the shortest later one."""
    count, boundary = boundaries(options)
    yield from _cut_in(options, cycle(options, 0), "lr_warmup")
    if count > 1 and options.lr_decay_style != "constant":
        # Lists are short; the equal cycles of a long schedule differ by one iteration, except the
        # last.
        candidates = range(1, min(count, 1000))
        shortest = min(candidates, key=lambda index: boundary(index + 1) - boundary(index))
        yield from _cut_in(options, cycle(options, shortest), "lr_rewarmup")


def _cut_in(options: Draft, current: Cycle, kind: str) -> Iterator[str]:
    """Warn about phases that do not fit into a cycle. kind: its warmup option, lr_warmup or
    lr_rewarmup."""
    asked = warmup_steps(options, current.number, current.length)
    count, _ = boundaries(options)
    where = f"cycle {current.number + 1} of {count}" if count > 1 else "the schedule"
    falls = options.lr_decay_style != "constant"
    if asked > current.length:
        rest = "; nothing is left for the decay" if falls else ""
        yield f"{typed(options, kind)}: {where} has only {current.length} iterations; the warmup is cut to them{rest}"
    if asked > current.length or not falls:
        return
    left = current.length - current.warmup
    decay = left if options.lr_wsd_decay is None else steps_of(options.lr_wsd_decay, current.length)
    if decay > left:
        yield (
            f"{typed(options, 'lr_wsd_decay')}: {decay} iterations, but the warmup leaves only {left} of the "
            f"{current.length} in {where}; the decay is cut to those"
        )
    elif current.decay == 0:
        name = kind if options.lr_wsd_decay is None or decay else "lr_wsd_decay"
        yield f"{typed(options, name)}: no decay in {where} ({current.length} iterations); the rate stays at lr"


def idle_schedule_options(options: Draft) -> Iterator[tuple[str, str]]:
    """Yield options without effect that `idle_unless` does not find, with the reason."""
    if options.lr_schedule is not None:
        return
    style, with_style = options.lr_decay_style, f"with --lr_decay_style={options.lr_decay_style}"
    if style in ("constant", "power_tokens") and not options.lr_cooldown:
        if options.min_lr_ratio is not None:
            yield "min_lr_ratio", with_style
        elif options.min_lr:
            yield "min_lr", with_style
    one_cycle = not options.changed(*CYCLES)
    if one_cycle or style == "constant":
        for name in options.changed("lr_rewarmup"):
            yield name, "with one cycle" if one_cycle else with_style
    if is_constant(options):
        decays = ("adamc_weight_decay",) if options.weight_decay else ()
        for name in options.changed("lr_schedule_offset", "lr_step_offset", *decays):
            yield (
                name,
                f"{with_style} and neither warmup nor cooldown: the learning rate never changes",
            )
    derived = max(1, options.train_iters) + options.lr_schedule_offset
    if options.lr_decay_iters != derived and not _end_matters(options, one_cycle):
        yield "lr_decay_iters", with_style


def _end_matters(options: Draft, one_cycle: bool) -> bool:
    """Return whether the rate depends on where the schedule ends."""
    warmup = options.lr_warmup
    if options.lr_cooldown or not isinstance(warmup, int) or warmup > options.lr_decay_iters:
        return True
    endless = options.lr_decay_style in ("inv_sqrt", "power_tokens") and one_cycle
    return options.lr_decay_style != "constant" and not (endless and options.lr_wsd_decay is None)
