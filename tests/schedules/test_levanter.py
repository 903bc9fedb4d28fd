"""Levanter's schedules, compared with its own scheduler: flags -> parsed -> resolved -> learning
rate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config
from megatron_lite.errors import UsageError
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve, warnings

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "levanter_lr_vectors.json").read_text("utf-8")
)
CASES = {case["name"]: case for case in VECTORS["cases"] + VECTORS["error_and_odd_cases"]}
TOLERANCE = 2e-7  # of the peak, as the file says
DEFAULTS = {"learning_rate": 6e-4, "min_lr_ratio": 0.1, "warmup": 0.01, "lr_schedule": "cosine"}
# A number up to 1 is a fraction there, any other is steps; here a flag says which it is.
LENGTHS = {
    "warmup": "lr_warmup",
    "decay": "lr_wsd_decay",
    "rewarmup": "lr_rewarmup",
    "cooldown": "lr_cooldown",
    "cycle_length": "lr_cycle",
}

# What is refused here, with the text that says why. In the first part Levanter, the older one at
# least, raises an error, too.
REFUSED = {
    "both_cycles_and_cycle_length": "--lr_num_cycles=2, --lr_cycle=100: exclude each other",
    "both_haps_and_cycle_length": "--lr_cycle_minima=100, --lr_cycle=100: exclude each other",
    "cycle_length_list_exceeds": "--lr_cycle_lengths=600,600: the cycles need 1200 iterations, but the schedule",
    "cycle_length_zero": "must be >= 1, or a share",
    "cycle_length_frac_nonint_gt1": "--lr_cycle_fraction=10.5: a fraction is between 0 and 1.0",
    "warmup_negative": "--lr_warmup_fraction=-0.1: a fraction is between 0 and 1.0",
    "warmup_nonint": "--lr_warmup_fraction=1.5: a fraction is between 0 and 1.0",
    "unknown_schedule": "--lr_decay_style=exponential: takes constant, linear, cosine",
    "inv_min_lr_zero": "--lr_decay_style=inv: the minimum determines",
    "cycles_list_unsorted_cosine": "300 follows 700",
    "cycles_list_starting_zero_cosine": "--lr_cycle_minima='0 500': must be >= 1",
    # Levanter accepts the rest, and computes something that nobody asked for.
    "cycles_zero": "--lr_num_cycles=0: must be >= 1",  # one cycle
    "cycles_negative": "--lr_num_cycles=-1: must be >= 1",  # one cycle
    "cycles_bool_true": "--lr_num_cycles=true: not an integer",  # one cycle
    "cycles_float": "--lr_num_cycles=2.0: not an integer (must be >= 1); write --lr_num_cycles=2",  # one cycle, not two
    "cycles_list_unsorted": "300 follows 700",  # the phases of a cycle of -400 steps
    "cycles_list_starting_zero_linear": "--lr_cycle_minima='0 500': must be >= 1",  # a cycle of no steps
    "cooldown_more_than_total": "nothing is left before the cooldown",  # cycles of -1000 steps
}
# A minimum beyond the run: one step after the last update, the newer Levanter jumps to the peak, as
# its list of boundaries is not sorted. Here the cycle goes on until its minimum, as in the older
# one.
LEFT_OUT = {"cycles_list_beyond_total_linear": 1000, "cycles_list_beyond_total_cosine": 1000}


def flags(args: dict[str, Any], num_train_steps: int) -> list[str]:
    """Write keyword arguments of Levanter's AdamConfig as a command line."""
    args = DEFAULTS | args
    words = [
        f"--train_iters={num_train_steps}",
        f"--lr={args['learning_rate']}",
        "--lr_step_offset=0",
    ]
    words += [f"--min_lr_ratio={args['min_lr_ratio']}", *style(args["lr_schedule"])]
    for name, flag in LENGTHS.items():
        value = args.get(name)
        if isinstance(value, list):
            words.append(f"--{flag}_lengths={','.join(map(str, value))}")
        elif value is not None and (value <= 1 or value % 1):
            words.append(f"--{flag}_fraction={value}")
        elif value is not None:
            words.append(f"--{flag}_iters={int(value)}")
    cycles = args.get("cycles")
    if isinstance(cycles, list):
        words += ["--lr_cycle_minima", *map(str, cycles)]
    elif cycles is not None:
        words.append(f"--lr_num_cycles={str(cycles).lower()}")
    if "haps" in args:
        words += ["--haps", *map(str, args["haps"])]
    return words


def style(lr_schedule: str | dict[str, Any]) -> Iterator[str]:
    """Read a name, or Levanter's object form with its parameters."""
    if isinstance(lr_schedule, str):
        yield f"--lr_decay_style={lr_schedule}"
        return
    yield f"--lr_decay_style={lr_schedule['type']}"
    if "timescale" in lr_schedule:
        yield f"--lr_inv_sqrt_timescale={lr_schedule['timescale']}"
    assert set(lr_schedule) <= {"type", "timescale"}, "no other object is in the file"


def resolved(words: list[str]) -> Config:
    return resolve(parse(["--dataset_source=random", *words]).config, 1)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_values_of_levanter(name: str) -> None:
    """Every point of every case matches to the tolerance of the file; where Levanter changed, its
    newer rule holds."""
    case = CASES[name]
    points = case.get("newer", case)["points"]
    config = resolved(flags(case["args"], case["num_train_steps"]))
    assert len(points) >= 6 and case.get("newer", case).get("raises") is None
    for step, expected in points:
        if step == LEFT_OUT.get(name):
            continue
        rate = learning_rate(config, step + 1)
        assert abs(rate - expected) <= TOLERANCE * config.learning_rate.lr, (step, rate, expected)


def test_a_minimum_beyond_the_run() -> None:
    """The cycle continues beyond the end of the schedule, as in the older Levanter, with a
    warning."""
    case = CASES["cycles_list_beyond_total_linear"]
    words = flags(case["args"], 1000)
    config = resolved(words)
    assert learning_rate(config, 1001) == pytest.approx(
        dict(map(tuple, case["points"]))[1000], rel=1e-6
    )
    assert learning_rate(config, 1500) == pytest.approx(6e-5 + 5.4e-4 / 1485, rel=1e-6)
    (caution,) = [line for line in warnings(config) if "lr_cycle_minima" in line]
    assert caution.startswith(
        "--lr_cycle_minima=1500: 1500 is beyond the end of the schedule (1000)"
    )


def test_two_spellings_of_one_list() -> None:
    """Levanter silently drops one of two lists; here both are one flag, and a warning names the
    dropped value."""
    case = CASES["haps_and_cycles_haps_wins"]
    (warning,) = parse(flags(case["args"], 1000)).warnings
    assert warning == "--lr_cycle_minima is given twice: 100 is used, 500 is not"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_cases_of_levanter(name: str) -> None:
    """Impossible schedules are errors with the reason, before any work starts."""
    case = CASES[name]
    words = flags(case["args"], case["num_train_steps"])
    with pytest.raises(UsageError) as error:
        resolved(words)
    assert REFUSED[name] in str(error.value)
