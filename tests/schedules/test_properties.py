"""Properties of random legal schedules, and a comparison with a naive second implementation."""

import dataclasses
import json
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.optimizer import DECAY_STYLES
from megatron_lite.errors import UsageError
from megatron_lite.schedules.learning_rate import learning_rate, peak_learning_rate
from megatron_lite.validation import resolve, warnings

# Every style of --lr_decay_style belongs to one of these: at the end of a decay the rate is at its
# minimum, or not.
REACH_MINIMUM = ("linear", "cosine", "power", "inv")
END_ELSEWHERE = ("constant", "inv_sqrt", "power_tokens")
FAR = (10**5, 10**9, 2**53 + 1, 2**62)

cheap = settings(max_examples=60, derandomize=True)


@st.composite
def schedules(
    draw: st.DrawFn, styles: tuple[str, ...] = DECAY_STYLES, plain: bool = False
) -> Config:
    """Draw a resolved configuration. plain: without exponents, which make curves arbitrarily
    steep."""
    total = draw(st.integers(1, 300))
    options: dict[str, Any] = {
        "train_iters": total,
        "lr": draw(st.floats(1e-6, 10.0)),
        "lr_decay_style": draw(st.sampled_from(styles)),
        "lr_step_offset": draw(st.integers(0, 1)),
        "dataset_source": "random",
        "dry_run": True,
        "batch_size": draw(st.integers(1, 2**20)),
        "sequence_length": draw(st.integers(1, 2**17)),
    }
    options["min_lr_ratio"] = draw(st.sampled_from((0.05, 0.1, 1.0)) | st.floats(1e-3, 1.0))
    options |= draw(_length("lr_warmup", total)) | draw(_length("lr_rewarmup", total))
    options |= draw(_length("lr_wsd_decay", total) | st.just({}))
    cooldown = draw(st.just({}) | _length("lr_cooldown", total - 1, largest_share=0.5))
    options |= cooldown
    main = total - steps(cooldown.get("lr_cooldown", 0), total)
    options |= draw(_cycles(main, beyond=not cooldown))
    if not plain:
        for name in ("lr_decay_power", "lr_cosine_exponent"):
            options[name] = draw(st.sampled_from((1.0, 0.5, 2.0)))
        options["lr_inv_sqrt_timescale"] = draw(st.floats(0.1, 1000.0))
        options["lr_decay_iters"] = draw(st.sampled_from((None, total)))
    try:
        return resolve(unflatten(options), 1)
    except UsageError as error:
        # less than one iteration: the only rule not respected above
        assert "--lr_cycle=" in str(error), error
        assume(False)
        raise


def steps(length: int | str, whole: int) -> int:
    """Read a number, or a share in text."""
    return length if isinstance(length, int) else int(float(length) * whole)


def _length(kind: str, most: int, largest_share: float = 1.0) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a length in iterations, perhaps too many, or as a share."""
    if kind != "lr_cooldown":
        most += 10
    return st.one_of(
        st.just({}),
        st.integers(0, most).map(lambda iters: {kind: iters}),
        st.floats(0.0, largest_share).map(lambda share: {kind: str(share)}),
    )


def _cycles(total: int, beyond: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Draw one of the options for the ends of cycles, within `total`; minima also beyond it if
    allowed."""
    last = total + (50 if beyond else 0)
    minima = st.lists(st.integers(1, last), min_size=1, max_size=5, unique=True).map(sorted)
    lengths = st.lists(st.integers(1, max(1, total // 5)), min_size=1, max_size=5).filter(
        lambda x: sum(x) <= total
    )
    return st.one_of(
        st.just({}),
        st.integers(1, total).map(lambda count: {"lr_num_cycles": count}),
        minima.map(lambda points: {"lr_cycle_minima": tuple(points)}),
        st.integers(1, total + 10).map(lambda iters: {"lr_cycle": iters}),
        st.floats(1e-3, 1.0).map(lambda share: {"lr_cycle": str(share)}),
        lengths.map(lambda each: {"lr_cycle_lengths": tuple(each)}) if total > 1 else st.just({}),
    )


# --- A second implementation: every step of the run, phase after phase


def minima_of(values: dict[str, Any], total: int) -> list[int]:
    """List 0 and the ends of all cycles."""
    if values["lr_num_cycles"] > 1:
        return [
            int(total / values["lr_num_cycles"] * i) for i in range(values["lr_num_cycles"])
        ] + [total]
    length = steps(values["lr_cycle"] or 0, total)
    if length:
        return [i * length for i in range(max(1, total // length))] + [total]
    points = [0, *values["lr_cycle_minima"]]
    for each in values["lr_cycle_lengths"]:
        points.append(points[-1] + each)
    return points if points[-1] >= total else [*points, total]


class Phases(NamedTuple):
    """Steps of one cycle."""

    start: int
    warmup: int
    decay: int
    stop: int


def phases(config: Config) -> tuple[list[float], list[Phases]]:
    """Compute the rates of all steps up to 20 beyond the end, and the cycles."""
    values = flatten(config)
    peak = values["lr"]
    floor = values["min_lr"]
    end = values["lr_decay_iters"]

    def length(kind: str, whole: int) -> int | None:
        return None if values[kind] is None else steps(values[kind], whole)

    cooldown = length("lr_cooldown", end) or 0
    ends = minima_of(values, end - cooldown)
    rates: list[float] = []
    cycles: list[Phases] = []
    before = 0.0
    for start, stop in zip(ends, ends[1:], strict=False):
        whole = stop - start
        warmup = min(length("lr_rewarmup" if cycles else "lr_warmup", whole) or 0, whole)
        asked = length("lr_wsd_decay", whole)
        decay = whole - warmup if asked is None else min(asked, whole - warmup)
        rates += [before + (peak - before) * step / warmup for step in range(warmup)]
        rates += [peak] * (whole - warmup - decay)
        rates += [decayed(values, warmup, decay, step) for step in range(decay)]
        before = decayed(values, warmup, decay, decay)
        cycles.append(Phases(start, warmup, decay, stop))
    rates += [before + (floor - before) * step / cooldown for step in range(cooldown)]
    rates += [
        floor if cooldown else decayed(values, warmup, decay, decay + step) for step in range(20)
    ]
    return rates, cycles


def decayed(values: dict[str, Any], warmup: int, decay: int, step: int) -> float:
    """Compute the rate straight from the formulas."""
    peak = values["lr"]
    floor = values["min_lr"]
    style = values["lr_decay_style"]
    if decay == 0 or style == "constant":
        return peak
    over = (min(step, decay) / decay) ** values["lr_decay_power"]
    if style == "cosine":
        return (
            floor
            + (peak - floor) * ((1 + math.cos(math.pi * over)) / 2) ** values["lr_cosine_exponent"]
        )
    if style in ("linear", "power"):
        return peak - (peak - floor) * over
    if style == "inv_sqrt":
        return max(
            floor, peak * min(1, math.sqrt(values["lr_inv_sqrt_timescale"] / max(1, step + warmup)))
        )
    if style == "inv":
        return max(floor, peak / (1 + (peak / floor - 1) * max(1, step) / decay))
    assert style == "power_tokens", (
        f"write the formula of {style} here, from its definition and not from the program"
    )
    if step == 0:
        return peak
    tokens = step * values["batch_size"] * values["sequence_length"]
    return min(peak, values["batch_size"] * values["lr_power_a"] * tokens ** values["lr_power_b"])


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_every_style_of_the_option_is_computed_and_checked(style: str) -> None:
    """Each choice of --lr_decay_style has a formula in the program and one here, and a place in the
    lists above."""
    options = dict(
        train_iters=20,
        lr=1.0,
        min_lr=0.1,
        lr_decay_style=style,
        batch_size=8,
        dataset_source="random",
    )
    config = resolve(unflatten({**options, "dry_run": True}), 1)
    rates, _ = phases(config)
    steps = range(config.learning_rate.lr_step_offset, len(rates))
    assert [at_step(config, step) for step in steps] == pytest.approx(
        [rates[step] for step in steps], rel=1e-12
    )
    assert (style in REACH_MINIMUM) != (style in END_ELSEWHERE)
    assert (rates[-1] == pytest.approx(0.1)) == (style in REACH_MINIMUM)


@cheap
@given(schedules())
def test_every_step_against_a_naive_implementation(config: Config) -> None:
    """Rates agree for all iterations and some beyond, whichever options set warmup, decay and
    cycles."""
    rates, _ = phases(config)
    for step in range(config.learning_rate.lr_step_offset, len(rates)):
        assert at_step(config, step) == pytest.approx(rates[step], rel=1e-12, abs=1e-300), step


def at_step(config: Config, step: int) -> float:
    """Return the rate of a step, counted from 0."""
    return learning_rate(config, step + 1 - config.learning_rate.lr_step_offset)


@cheap
@given(schedules())
def test_never_above_the_peak_and_always_finite(config: Config) -> None:
    """With min_lr_ratio <= 1 the rate stays within [0, peak] to the last bit, also long after the
    end."""
    for iteration in (*range(1, config.training.train_iters + 20), *FAR):
        assert (
            0.0
            <= learning_rate(config, iteration)
            <= peak_learning_rate(config)
            == config.learning_rate.lr
        )


@cheap
@given(schedules(styles=("constant", "linear", "cosine"), plain=True))
def test_continuous_but_for_jumps_to_the_peak(config: Config) -> None:
    """Each step changes the rate by no more than its phase allows; the rate jumps only where a
    cycle starts without warmup."""
    options, (_, cycles) = config.learning_rate, phases(config)
    assert options.min_lr is not None
    falls = 0.0 if options.lr_decay_style == "constant" else options.lr - options.min_lr
    jumps = {cycle.start for cycle in cycles if cycle.warmup == 0}
    for cycle in cycles:
        for step in range(max(cycle.start, options.lr_step_offset), cycle.stop):
            limit = 0.0
            if step < cycle.start + cycle.warmup:
                limit = (falls if cycle.start else options.lr) / cycle.warmup
            elif step >= cycle.stop - cycle.decay:
                limit = falls * math.pi / 2 / cycle.decay
            if step + 1 not in jumps:
                moved = abs(at_step(config, step + 1) - at_step(config, step))
                assert moved <= limit * (1 + 1e-9) + 1e-12 * options.lr, step


@cheap
@given(schedules(styles=REACH_MINIMUM))
def test_the_minimum_is_reached(config: Config) -> None:
    """The rate is at its minimum where a rewarmup starts, at the end of the last cycle, and
    afterwards."""
    minimum, (_, cycles) = config.learning_rate.min_lr, phases(config)
    for cycle, after in zip(cycles, [*cycles[1:], None], strict=True):
        if cycle.decay and (after is None or after.warmup):
            assert at_step(config, cycle.stop) == pytest.approx(minimum, rel=1e-12)
        if cycle.decay and after is None:
            assert all(
                learning_rate(config, far) == pytest.approx(minimum, rel=1e-12) for far in FAR
            )


@cheap
@given(schedules(), st.data())
def test_a_resumed_run_has_the_same_rates(config: Config, data: st.DataObject) -> None:
    """The rate depends only on the configuration and the iteration, not on earlier calls or the
    object."""
    rates = [
        learning_rate(config, iteration) for iteration in range(1, config.training.train_iters + 1)
    ]
    saved = json.loads(json.dumps(flatten(config)))
    resumed = unflatten(
        {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    )
    start = data.draw(st.integers(0, len(rates) - 1))
    assert [
        learning_rate(resumed, start + 1 + place) for place in range(len(rates) - start)
    ] == rates[start:]
    assert resolve(resumed, 1) == config


@cheap
@given(schedules(), st.integers(1, 200))
def test_offset_and_scale(config: Config, offset: int) -> None:
    """lr_schedule_offset shifts every schedule, default_lr_scale multiplies it."""
    options = dataclasses.replace(config.learning_rate, lr_schedule_offset=offset)
    moved = dataclasses.replace(config, learning_rate=options)
    for iteration in (1, 2, 7, config.training.train_iters):
        assert learning_rate(moved, iteration) == learning_rate(config, iteration + offset)
    scaled = dataclasses.replace(
        config, learning_rate=dataclasses.replace(options, default_lr_scale=0.3)
    )
    for iteration in (1, 2, 7, config.training.train_iters, 10**6):
        assert learning_rate(scaled, iteration) == 0.3 * learning_rate(moved, iteration)
    assert peak_learning_rate(scaled) == 0.3 * peak_learning_rate(moved)


@cheap
@given(schedules())
def test_warnings_are_sentences(config: Config) -> None:
    """Warnings never repeat a line or print None."""
    lines = [
        line for line in warnings(config) if line.startswith("--lr") or line.startswith("--min_lr")
    ]
    assert len(set(lines)) == len(lines)
    assert all("None" not in line and "none" not in line for line in lines), lines
