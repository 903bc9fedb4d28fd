"""Errors, derived values and warnings of learning-rate schedules."""

from typing import Any

import pytest

from megatron_lite.config import Config, unflatten
from megatron_lite.errors import UsageError
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve, warnings


def resolved(**options: Any) -> Config:
    given = {
        "dataset_source": "random",
        "train_iters": 1000,
        "experiment_dir": "/x",
        "lr": 1e-3,
        **options,
    }
    return resolve(unflatten(given), 1)


FLAT = "with --lr_decay_style=constant and neither warmup nor cooldown: the learning rate never changes"


def cautions(**options: Any) -> list[str]:
    return warnings(resolved(**options))


LINEAR: dict[str, Any] = {"lr_decay_style": "linear"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"min_lr": 2e-3},
            "--min_lr=0.002, --lr=0.001: the learning rate would rise; write --min_lr of at most --lr",
        ),
        (
            {"min_lr": 1e-5, "min_lr_ratio": 0.1},
            "--min_lr=1e-05, --min_lr_ratio=0.1: exclude each other",
        ),
        ({"min_lr_ratio": 1e308, "lr": 1e10}, "the product overflows"),
        (
            {"lr": 1e200, "default_lr_scale": 1e200},
            "--lr=1e+200, --default_lr_scale=1e+200: the product overflows",
        ),
        ({"lr_decay_style": "inv"}, "--lr_decay_style=inv: the minimum determines how fast"),
        (
            {"lr_decay_style": "inv_sqrt", "min_lr_ratio": 2.0},
            "--min_lr_ratio=2, --lr=0.001, --lr_decay_style=inv",
        ),
        (
            {"lr_decay_style": "inv", "min_lr_ratio": 2.0},
            "this style can only lower the learning rate; write --min_lr_ratio of at most 1",
        ),
        (
            {"lr_num_cycles": 2, "lr_cycle_minima": (5,)},
            "--lr_num_cycles=2, --lr_cycle_minima=5: exclude each other",
        ),
        ({"lr_cycle": 2, "lr_cycle_lengths": (5,)}, "--lr_cycle=2, --lr_cycle_lengths=5: exclude"),
        (
            {"lr_num_cycles": 1001},
            "each cycle needs at least one iteration, and the schedule has 1000 iterations; write",
        ),
        ({"lr_num_cycles": 901, "lr_cooldown": 100}, "100 of them the cooldown; write at most 900"),
        (
            {"lr_num_cycles": 11, "lr_decay_iters": 10},
            "the schedule has 10 iterations; write at most 10",
        ),
        (
            {"lr_cycle_minima": (300, 300)},
            "--lr_cycle_minima=300,300: 300 follows 300; sort the iterations",
        ),
        ({"lr_cycle_minima": (300, 950), "lr_cooldown": "0.1"}, "950 is not before the cooldown"),
        (
            {"lr_cycle_lengths": (500, 501)},
            "the cycles need 1001 iterations, but the schedule has 1000 iterations",
        ),
        (
            {"lr_cycle": "1e-4"},
            "--lr_cycle=1e-4: a cycle would be shorter than one iteration, because",
        ),
        ({"lr_cooldown": 1000}, "--lr_cooldown=1000: nothing is left before the cooldown"),
        ({"lr_cooldown": "1.0"}, "--lr_cooldown=1.0: nothing is left before the cooldown"),
    ],
)
def test_contradictions(options: dict[str, Any], text: str) -> None:
    """Every error is one line with the flags, their values, the rule and the fix."""
    with pytest.raises(UsageError) as error:
        resolved(**LINEAR | options)
    (line,) = str(error.value).splitlines()
    assert line.startswith("--") and text in line, line


@pytest.mark.parametrize(
    ("options", "end", "minimum"),
    [
        ({}, 1000, 0.0),
        ({"min_lr": 1e-4}, 1000, 1e-4),
        ({"min_lr_ratio": 0.3}, 1000, 0.3 * 1e-3),
        ({"min_lr_ratio": 0.0, "lr_decay_iters": 7}, 7, 0.0),
        ({"lr_schedule_offset": 50}, 1050, 0.0),
        ({"train_iters": 0}, 1, 0.0),
    ],
)
def test_the_end_and_the_minimum_are_filled_in(
    options: dict[str, Any], end: int, minimum: float
) -> None:
    """End and minimum follow from the given options; resolving again changes nothing, although
    min_lr is set now."""
    config = resolved(**LINEAR | options)
    assert (config.learning_rate.lr_decay_iters, config.learning_rate.min_lr) == (end, minimum)
    assert resolve(config, 1) == config


def test_a_run_without_iterations_has_no_schedule_to_check() -> None:
    """Without iterations there is no schedule to fit cycles into."""
    # nothing is trained
    assert len(cautions(train_iters=0, lr_num_cycles=5, lr_warmup=50, **LINEAR)) == 1


# Lengths that do not fit are cut, as in the newer Levanter. (options, the warning, {iteration:
# rate})
CUT: list[tuple[dict[str, Any], str, dict[int, float]]] = [
    (
        {"lr_warmup": 2000},
        "--lr_warmup=2000: the schedule has only 1000 iterations; the warmup is cut",
        {1: 1e-6, 500: 5e-4, 1000: 1e-3},
    ),
    (
        {"lr_warmup": 2000, "lr_decay_style": "constant"},
        "--lr_warmup=2000: the schedule has only 1000",
        {500: 5e-4, 1000: 1e-3},
    ),
    (
        {"lr_warmup": 1000},
        "--lr_warmup=1000: no decay in the schedule (1000 iterations); the rate stays at",
        {500: 5e-4, 1000: 1e-3, 2000: 1e-3},
    ),
    (
        {"lr_warmup": "1.0"},
        "--lr_warmup=1.0: no decay in the schedule (1000",
        {500: 5e-4, 2000: 1e-3},
    ),
    (
        {"lr_wsd_decay": 1500},
        "--lr_wsd_decay=1500: 1500 iterations, but the warmup leaves only 1000 of "
        "the 1000 in the schedule; the decay is cut to those",
        {500: 5e-4, 1000: 0.0},
    ),
    (
        {"lr_warmup": "0.6", "lr_wsd_decay": "0.6"},
        "--lr_wsd_decay=0.6: 600 iterations, but the warmup leaves only 400 of the 1000 in the schedule",
        {300: 5e-4, 600: 1e-3, 800: 5e-4},
    ),
    (
        {"lr_wsd_decay": 0},
        "--lr_wsd_decay=0: no decay in the schedule (1000 iterations); the rate stays at",
        {1: 1e-3, 1000: 1e-3},
    ),
    (
        {"lr_cycle_minima": (400, 500), "lr_rewarmup": 200},
        "--lr_rewarmup=200: cycle 2 of 3 has only 100 iterations; the warmup is cut to them",
        {450: 5e-4, 500: 1e-3, 600: 1e-3, 700: 1e-3, 850: 5e-4},
    ),
    (
        {"lr_cycle": 300},
        "--lr_cycle=300: the last cycle also takes the remainder and has 400 iterations",
        {599: 1e-3 / 300, 600: 1e-3, 800: 5e-4},
    ),
    ({"lr_cycle": "0.3"}, "--lr_cycle=0.3: the last cycle also takes the remainder", {800: 5e-4}),
    (
        {"lr_cycle": 5000},
        "--lr_cycle=5000: one cycle, because the schedule has only 1000",
        {500: 5e-4},
    ),
    (
        {"lr_cycle_minima": (200, 10**9), "lr_wsd_decay": 100},
        "--lr_cycle_minima=200,1000000000: 1000000000 is "
        "beyond the end of the schedule (1000): the last cycle extends to there",
        {150: 5e-4, 200: 1e-3, 1000: 1e-3},
    ),
    ({"min_lr_ratio": 2.0}, "--min_lr_ratio=2: above 1, so the learning rate rises", {500: 1.5e-3}),
    (
        {"lr_cooldown": 100},
        "--lr_cooldown=100: the decay before it already ends at the minimum",
        {450: 5e-4, 900: 0.0, 950: 0.0},
    ),
]


@pytest.mark.parametrize(("options", "text", "rates"), CUT)
def test_surprises(options: dict[str, Any], text: str, rates: dict[int, float]) -> None:
    """Lengths that do not fit are cut, one warning gives the numbers, and the rates match the
    warning."""
    config = resolved(**LINEAR | options)
    (line,) = warnings(config)
    assert text in line
    for iteration, rate in rates.items():
        assert learning_rate(config, iteration) == pytest.approx(rate, rel=1e-12), iteration


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"min_lr": 1e-5}, "min_lr", "with --lr_decay_style=constant"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio", "with --lr_decay_style=constant"),
        (
            {"min_lr_ratio": 0.1, "lr_decay_style": "power_tokens"},
            "min_lr_ratio",
            "with --lr_decay_style=power_tokens",
        ),
        ({"lr_decay_power": 2.0}, "lr_decay_power", "with --lr_decay_style=constant"),
        (
            {"lr_decay_power": 2.0, "lr_decay_style": "inv_sqrt"},
            "lr_decay_power",
            "with --lr_decay_style=inv_sqrt",
        ),
        (
            {"lr_cosine_exponent": 2.0, "lr_decay_style": "linear"},
            "lr_cosine_exponent",
            "with --lr_decay_style=linear",
        ),
        ({"lr_inv_sqrt_timescale": 2.0}, "lr_inv_sqrt_timescale", "with --lr_decay_style=constant"),
        ({"lr_power_a": 2.0}, "lr_power_a", "with --lr_decay_style=constant"),
        ({"lr_power_b": -1.0}, "lr_power_b", "with --lr_decay_style=constant"),
        ({"lr_wsd_decay": 5}, "lr_wsd_decay", "with --lr_decay_style=constant"),
        ({"lr_num_cycles": 5}, "lr_num_cycles", "with --lr_decay_style=constant"),
        ({"lr_cycle_minima": (5,)}, "lr_cycle_minima", "with --lr_decay_style=constant"),
        ({"lr_rewarmup": 5, "lr_decay_style": "linear"}, "lr_rewarmup", "with one cycle"),
        ({"lr_rewarmup": "0.5", "lr_decay_style": "linear"}, "lr_rewarmup", "with one cycle"),
        ({"lr_decay_iters": 5}, "lr_decay_iters", "with --lr_decay_style=constant"),
        (
            {"lr_decay_iters": 5, "lr_decay_style": "inv_sqrt"},
            "lr_decay_iters",
            "with --lr_decay_style=inv_sqrt",
        ),
        ({"lr_schedule_offset": 5}, "lr_schedule_offset", FLAT),
        ({"lr_step_offset": 0}, "lr_step_offset", FLAT),
        ({"adamc_weight_decay": True}, "adamc_weight_decay", FLAT),
    ],
)
def test_options_without_effect(options: dict[str, Any], name: str, reason: str) -> None:
    """Options without effect cause a warning, and really have no effect."""
    assert cautions(**options) == [f"--{name} has no effect {reason}"]
    others = {key: value for key, value in options.items() if key != name}
    for iteration in (1, 2, 5, 6, 500, 1000, 2000):
        assert learning_rate(resolved(**options), iteration) == learning_rate(
            resolved(**others), iteration
        )


@pytest.mark.parametrize(
    "options",
    [
        {"lr_cooldown": 10, "min_lr": 1e-5, "lr_decay_iters": 500},
        {"lr_warmup": "0.1", "lr_decay_iters": 500},
        {
            "lr_decay_style": "inv_sqrt",
            "lr_cooldown": "0.1",
            "lr_inv_sqrt_timescale": 100.0,
            "min_lr": 1e-9,
        },
        {"lr_decay_style": "inv_sqrt", "lr_num_cycles": 3, "lr_rewarmup": 3},
        {
            "lr_decay_style": "power_tokens",
            "lr_wsd_decay": 100,
            "lr_decay_iters": 500,
            "lr_power_b": -0.5,
        },
        {
            "lr_decay_style": "cosine",
            "lr_decay_power": 2.0,
            "lr_cosine_exponent": 2.0,
            "min_lr_ratio": 1.0,
        },
        {"lr_decay_style": "linear", "lr_cycle_lengths": (100, 200), "lr_wsd_decay": "0.1"},
    ],
)
def test_no_warning_without_reason(options: dict[str, Any]) -> None:
    """Options that are useful together cause no warning."""
    assert cautions(**options) == []
