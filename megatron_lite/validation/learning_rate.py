"""Rules for the learning rate: options that exclude each other, the minimum, the end, and cycles that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_lite.config import Draft
from megatron_lite.config.values import number, typed
from megatron_lite.schedules.cycles import cooldown_steps, steps_of
from megatron_lite.schedules.stages import parse_stages
from megatron_lite.schedules.warnings import CYCLES, NAMES
from megatron_lite.validation.messages import Problem, default, parsing, problem

# Each group holds alternatives for the same length.
ALTERNATIVES = (
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_fraction"),
    ("lr_rewarmup_iters", "lr_rewarmup_fraction"),
    ("lr_cooldown_iters", "lr_cooldown_fraction"),
    CYCLES,
)
BESIDE_STAGES = ("lr_schedule", "lr_schedule_offset", "lr_step_offset", "default_lr_scale")
_END = "train_iters lr_decay_iters lr_schedule_offset lr_cooldown_iters lr_cooldown_fraction"


def learning_rate(draft: Draft) -> Iterator[Problem]:
    """Check the stages of lr_schedule, or lr with a decay, and derive the minimum and the end of the decay."""
    if draft.lr_schedule is not None:
        yield from _stages(draft, draft.lr_schedule)
        return
    for names in ALTERNATIVES:
        several = draft.changed(*names)
        if len(several) > 1:
            yield problem(draft, " ".join(several), "exclude each other; write one of them")
    yield from _minimum(draft)
    yield from _finite(draft, "lr", draft.lr)
    draft.lr_decay_iters = default(draft.lr_decay_iters, max(1, draft.train_iters) + draft.lr_schedule_offset)
    if draft.train_iters > 0:
        yield from _cycles(draft, draft.lr_decay_iters)


def _stages(draft: Draft, text: str) -> Iterator[Problem]:
    others = draft.changed(*(name for name in NAMES if name not in BESIDE_STAGES))
    if others:
        rule = "its stages are the whole schedule; leave out either lr_schedule or the others"
        yield Problem(("lr_schedule", *others), f"--lr_schedule, {typed(draft, *others)}: {rule}")
    problems = [*parsing("lr_schedule", parse_stages, text)]
    yield from problems
    if not problems:
        yield from _finite(draft, "lr_schedule", max(max(stage.rate, stage.end_rate) for stage in parse_stages(text)))


def _finite(draft: Draft, name: str, highest: float) -> Iterator[Problem]:
    """highest: the highest learning rate that the option `name` sets, before --default_lr_scale."""
    if not math.isfinite(highest * draft.default_lr_scale):
        yield problem(draft, f"{name} default_lr_scale", "the product overflows; write a smaller factor")


def _minimum(draft: Draft) -> Iterator[Problem]:
    """Derive the minimum from its ratio. In a resolved configuration both are set, and agree."""
    ratio, names = draft.min_lr_ratio, "min_lr lr"
    derived = 0.0
    if ratio is not None:
        names, derived = "min_lr_ratio lr", ratio * draft.lr
        if draft.min_lr not in (None, derived):
            yield problem(draft, "min_lr min_lr_ratio", "exclude each other; write one of them", also="lr")
            return
    draft.min_lr = default(draft.min_lr, derived)
    rises = draft.min_lr > draft.lr
    if not math.isfinite(draft.min_lr):
        yield problem(draft, names, "the product overflows; write a smaller ratio")
    elif rises and ratio is None:
        yield problem(draft, names, "the learning rate would rise; write --min_lr of at most --lr")
    elif rises and draft.lr_decay_style in ("inv", "inv_sqrt"):
        rule = "this style can only lower the learning rate; write --min_lr_ratio of at most 1"
        yield problem(draft, f"{names} lr_decay_style", rule)
    elif draft.min_lr == 0.0 and draft.lr_decay_style == "inv":
        rule = "the minimum determines how fast this style decays; write --min_lr or --min_lr_ratio above 0"
        yield problem(draft, "lr_decay_style", rule, also="min_lr min_lr_ratio lr")


def _cycles(draft: Draft, end: int) -> Iterator[Problem]:
    """Check that the cooldown leaves something, and that the cycles fit into what it leaves."""
    cooldown = cooldown_steps(draft)
    total, length = end - cooldown, f"the schedule has {end} iterations"
    if cooldown:
        (name, *_) = draft.changed("lr_cooldown_iters", "lr_cooldown_fraction")
        if total < 1:
            rule = f"nothing is left before the cooldown, because {length}; write a shorter one"
            yield problem(draft, name, rule, also=_END)
            return
        length += f", {cooldown} of them the cooldown"
    if draft.lr_num_cycles > total:
        rule = f"each cycle needs at least one iteration, and {length}; write at most {total}"
        yield problem(draft, "lr_num_cycles", rule, also=_END)
    if sum(draft.lr_cycle_lengths) > total:
        rule = f"the cycles need {sum(draft.lr_cycle_lengths)} iterations, but {length}; write shorter ones"
        yield problem(draft, "lr_cycle_lengths", rule, also=_END)
    if steps_of(None, draft.lr_cycle_fraction, total) == 0:
        rule = f"a cycle would be shorter than one iteration, because {length}; write at least {number(1 / total)}"
        yield problem(draft, "lr_cycle_fraction", rule, also=_END)
    minima = draft.lr_cycle_minima
    for before, after in zip(minima, minima[1:], strict=False):
        if after <= before:
            yield problem(draft, "lr_cycle_minima", f"{after} follows {before}; write the iterations in rising order")
            return
    if cooldown and minima and minima[-1] > total:
        rule = f"{minima[-1]} lies in or beyond the cooldown, because {length}; write at most {total}"
        yield problem(draft, "lr_cycle_minima", rule, also=_END)
