"""Which steps are dropped and which stop a run: the guard against brute force and against
Levanter's own decisions."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.config import OptimizerConfig
from megatron_lite.optimizer.bad_steps import Report
from megatron_lite.optimizer.guards import Guard, Verdict
from megatron_lite.optimizer.rolling import RollingStatistics
from megatron_lite.validation import warnings
from tests.support.harness import tiny_config

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "levanter_optim_vectors.json"
CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
LARGE = 2e19  # its square is not finite in fp32
SKIPPING: dict[str, Any] = {
    "skip_bad_steps": True,
    "skip_bad_steps_window": 8,
    "skip_bad_steps_sigma": 4.0,
}


def guard(dynamic_loss_scale: bool = False, train_iters: int = 10**6, **options: Any) -> Guard:
    return Guard(OptimizerConfig(**options), dynamic_loss_scale, CPU, train_iters)


def judge(a_guard: Guard, iteration: int, loss: float, grad_norm: float) -> Verdict:
    numbers = torch.tensor(loss, dtype=torch.float64), torch.tensor(grad_norm, dtype=torch.float32)
    return a_guard.judge(iteration, *numbers)


def feed(a_guard: Guard, steps: list[tuple[float, float]], first: int = 1) -> list[bool]:
    """Which of these (loss, norm) are skipped."""
    return [
        bool(judge(a_guard, iteration, *step).skipped)
        for iteration, step in enumerate(steps, first)
    ]


def limits(a_guard: Guard) -> list[float]:
    """Return the limits of the next step by NumPy: mean + 4 standard deviations of the last 8
    steps."""
    rows = np.array(a_guard.state()["usual"])
    assert rows.shape == (8, 2)
    return [float(limit) for limit in rows.mean(0) + 4 * rows.std(0)]


def usual_steps(count: int, seed: int = 0) -> list[tuple[float, float]]:
    generator = np.random.default_rng(seed)
    return [
        (float(loss), float(np.float32(norm)))
        for loss, norm in generator.normal([5.0, 1.0], 0.1, (count, 2))
    ]


def expected_decisions(steps: list[tuple[float, float]], window: int, sigma: float) -> list[bool]:
    """The rule in plain NumPy: Levanter's, but steps that are not finite are not remembered."""
    history: list[tuple[float, float]] = []
    decisions = []
    for loss, norm in steps:
        broken = (
            not math.isfinite(loss)
            or not math.isfinite(float(np.float32(norm)) ** 2)
            or norm >= LARGE
        )
        bad = broken
        if len(history) >= max(2, window // 2):
            rows = np.array(history[-window:])
            bad |= not np.all(
                np.array([loss, norm]) <= rows.mean(0) + sigma * np.maximum(rows.std(0), 1e-6)
            )
        decisions.append(bad)
        history += [] if broken else [(loss, norm)]
    return decisions


@pytest.mark.parametrize("window, sigma", [(2, 1.0), (8, 4.0), (20, 2.0)])
@pytest.mark.parametrize("seed", range(3))
def test_decisions_are_those_of_the_plain_rule(window: int, sigma: float, seed: int) -> None:
    """Spikes of either number, a level that changes for good, and steps that are not finite, at
    random places."""
    generator, steps = np.random.default_rng(seed), usual_steps(120, seed)
    for index in generator.choice(120, 30, replace=False):
        loss, norm = steps[index]
        steps[index] = [
            (loss, 30.0),
            (9.0, norm),
            (NAN, norm),
            (loss, INF),
            (-INF, NAN),
            (loss, LARGE),
            (2.0, 0.1),
        ][int(generator.integers(7))]
    steps[80:] = [(loss + 3.0, norm) for loss, norm in steps[80:]]
    options = {**SKIPPING, "skip_bad_steps_window": window, "skip_bad_steps_sigma": sigma}
    decisions = feed(guard(**options), steps)
    assert decisions == expected_decisions(steps, window, sigma)
    assert 10 < sum(decisions) < 110


def test_decisions_are_levanters() -> None:
    """Its own run: the losses and gradients that it was given, and the steps at which its
    parameters did not move."""
    vectors = json.loads(VECTORS.read_text("utf-8"))
    inputs = vectors["about"]
    case = vectors["cases"]["skip_bad_steps_n6_s3"]
    norms = [
        math.sqrt(sum(np.square(gradient).sum() for gradient in step.values()))
        for step in inputs["grads"]
    ]
    a_guard = guard(skip_bad_steps=True, skip_bad_steps_window=6, skip_bad_steps_sigma=3.0)
    decisions = feed(a_guard, list(zip(inputs["loss"], norms, strict=True)))
    assert [step for step, skipped in enumerate(decisions) if skipped] == case["skipped"] == [8, 10]


def test_nothing_but_numbers_that_are_not_finite_is_dropped_by_default() -> None:
    a_guard = guard()
    steps = [
        *usual_steps(200),
        (1e9, 1e9),
        (NAN, 1.0),
        (INF, 1.0),
        (-INF, 1.0),
        (1.0, NAN),
        (1.0, INF),
        (1.0, LARGE),
    ]
    assert feed(a_guard, steps) == [False] * 201 + [True] * 6


def test_an_overflow_is_of_the_gradient_alone() -> None:
    """A loss scale learns only of overflows: neither a spike nor a loss that is not finite concerns
    it."""
    a_guard = guard(True, **SKIPPING)
    feed(a_guard, usual_steps(8))
    for loss, norm, overflow in (
        (NAN, 1.0, False),
        (99.0, 99.0, False),
        (5.0, NAN, True),
        (NAN, INF, True),
    ):
        verdict = judge(a_guard, 9, loss, norm)
        assert (bool(verdict.skipped), bool(verdict.overflow)) == (True, overflow), (loss, norm)


# -- stopping
# --------------------------------------------------------------------------------------------------------

CASES: list[tuple[float, float]] = [
    (5.0, 1.0),
    (NAN, 1.0),
    (INF, 1.0),
    (5.0, NAN),
    (5.0, INF),
    (5.0, LARGE),
    (NAN, NAN),
    (INF, NAN),
    (99.0, 1.0),
    (5.0, 99.0),
    (99.0, INF),
]
# Policy -> for each of the cases whether it stops the run; then the same with a dynamic loss scale.
STOPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({}, "-----------", "-----------"),
    "abort": ({"on_bad_step": "abort"}, "-XXXXXXX--X", "-XX---XX---"),
    "abort, spikes": ({"on_bad_step": "abort", **SKIPPING}, "-XXXXXXXXXX", "-XX---XXXXX"),
    "spikes": (SKIPPING, "-----------", "-----------"),
    "nan": ({"crash_on_nan": True}, "-X-X--XX---", "-X----X----"),
    "inf": ({"crash_on_inf": True}, "--X-XX-X--X", "--X----X---"),
    "both": ({"crash_on_nan": True, "crash_on_inf": True}, "-XXXXXXX--X", "-XX---XX---"),
    "both, spikes": (
        {"crash_on_nan": True, "crash_on_inf": True, **SKIPPING},
        "-XXXXXXX--X",
        "-XX---XX---",
    ),
}


@pytest.mark.parametrize("policy", STOPS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_which_steps_stop_the_run(policy: str, dynamic: bool) -> None:
    """Each flag alone and together; an overflow with a loss that is fine belongs to the search of a
    dynamic scale."""
    options, plain, searching = STOPS[policy]
    for case, expected in zip(CASES, searching if dynamic else plain, strict=True):
        a_guard = guard(dynamic, **options)
        feed(a_guard, usual_steps(8))
        skipped = judge(a_guard, 9, *case).skipped
        message = a_guard.dropped.stop_reason()
        assert (message is not None) == (expected == "X"), case
        assert message is None or skipped
        judge(a_guard, 10, 5.0, 1.0)
        assert a_guard.dropped.stop_reason() == message == a_guard.dropped.close().stop, (
            "until the next log line"
        )


def test_the_message_names_flag_iteration_value_and_limit() -> None:
    a_guard = guard(on_bad_step="abort", **SKIPPING)
    feed(a_guard, usual_steps(8))
    limit = limits(a_guard)[1]
    judge(a_guard, 9, 5.0, 99.0)
    judge(a_guard, 10, NAN, 1.0)
    message = a_guard.dropped.stop_reason()
    assert message is not None
    assert (
        f"--on_bad_step=abort: iteration 9: gradient norm 99 above {limit:.6g} (mean + 4 sd)"
        in message
    )
    assert "(and 1 more since)" in message
    for option, loss in (("crash_on_nan", NAN), ("crash_on_inf", -INF)):
        a_guard = guard(**{option: True})
        judge(a_guard, 123, loss, 1.0)
        message = a_guard.dropped.stop_reason()
        assert message is not None and f"--{option}=1: iteration 123: loss {loss}. " in message


# -- the log
# ---------------------------------------------------------------------------------------------------------


def test_reports_between_log_lines() -> None:
    """Counts since the start, the last dropped step of the lines since the last report, and nothing
    older."""
    a_guard = guard(**SKIPPING)
    feed(a_guard, usual_steps(8))
    assert a_guard.dropped.close() == Report(0, 0, 0, None, None)
    feed(a_guard, [(NAN, 1.0), (5.0, INF), (5.0, 1.0)], first=9)
    report = a_guard.dropped.close()
    assert (report.skipped, report.nan, report.new, report.reason) == (
        2,
        1,
        2,
        "iteration 10: gradient norm inf",
    )
    assert (report := a_guard.dropped.close()).reason is None and (report.skipped, report.new) == (
        2,
        0,
    )
    loss_limit, norm_limit = limits(a_guard)
    judge(a_guard, 12, 41.25, 7.0)
    assert a_guard.dropped.close().reason == (
        f"iteration 12: loss 41.25 above {loss_limit:.6g} (mean + 4 sd), gradient norm 7 above {norm_limit:.6g} "
        "(mean + 4 sd)"
    )
    plain = guard()
    judge(plain, 13, 5.0, LARGE)
    assert (
        plain.dropped.close().reason == "iteration 13: gradient norm 2e+19, too large to be squared"
    )
    fp16 = guard(True)
    judge(fp16, 14, 5.0, INF)
    assert fp16.dropped.close().reason == "iteration 14: gradient norm inf; the loss scale follows"


@pytest.mark.parametrize(
    "step, options, train_iters, needed",
    [
        ((5.0, NAN), {}, 10**6, 100),
        ((5.0, NAN), {}, 200, 100),
        ((5.0, NAN), {}, 100, 51),
        ((5.0, NAN), {}, 2, 2),
        ((5.0, NAN), {}, 1, 1),
        ((5.0, NAN), {"max_consecutive_bad_steps": 7}, 10**6, 7),
        ((5.0, NAN), {**SKIPPING, "max_consecutive_bad_steps": 30}, 10**6, 30),
        ("growing", {**SKIPPING, "max_consecutive_bad_steps": 30}, 10**6, 30),
    ],
)
def test_a_streak_of_bad_steps_stops_the_run(
    step: Any, options: dict[str, Any], train_iters: int, needed: int
) -> None:
    """After --max_consecutive_bad_steps, or over half of a shorter run, and through a resume; one
    good update begins the count anew."""
    a_guard = guard(train_iters=train_iters, **options)
    feed(a_guard, usual_steps(60))
    for index in range(needed):
        assert a_guard.dropped.close().stop is a_guard.dropped.stop_reason() is None
        bad = (10.0 ** (2 + index), 1.0) if step == "growing" else step
        assert judge(a_guard, 61 + index, *bad).skipped
        if index == needed // 2:
            state, a_guard = a_guard.state(), guard(train_iters=train_iters, **options)
            a_guard.load_state(json.loads(json.dumps(state)))
    stop = a_guard.dropped.stop_reason()
    assert stop is not None and stop.startswith(f"the last {needed} updates were dropped")
    assert "nothing was learned after iteration 60: " in stop
    assert ("--skip_bad_steps_sigma" in stop) == (step == "growing")
    assert ("more than half of --train_iters" in stop) == (needed == train_iters // 2 + 1)
    assert a_guard.dropped.close().stop == stop
    judge(a_guard, 61 + needed, 5.0, 1.0)
    assert a_guard.dropped.close().stop is None


def test_the_search_of_a_loss_scale_is_no_streak_of_bad_steps() -> None:
    """Overflows that lower a dynamic scale never end a run, however short; once the scale is at its
    minimum, or if the loss itself is not finite, they count as every other dropped update."""
    cases = {((5.0, INF), True): None, ((5.0, INF), False): 3, ((NAN, INF), True): 3}
    for (step, can_shrink), needed in cases.items():
        a_guard = guard(True, train_iters=4)
        for iteration in range(1, 30):
            numbers = torch.tensor(step[0], dtype=torch.float64), torch.tensor(step[1])
            assert a_guard.judge(iteration, *numbers, torch.tensor(can_shrink)).skipped
            ended = a_guard.dropped.stop_reason() is not None
            assert ended == (needed is not None and iteration >= needed), (
                step,
                can_shrink,
                iteration,
            )


def test_a_checkpoint_of_before_counts_its_whole_streak() -> None:
    """Checkpoints without the count of bad steps: all of the streak was bad."""
    a_guard = guard(max_consecutive_bad_steps=4)
    feed(a_guard, [(NAN, 1.0)] * 3)
    state = a_guard.state()
    del state["dropped"]["bad"]
    resumed = guard(max_consecutive_bad_steps=4)
    resumed.load_state(state)
    assert resumed.dropped.stop_reason() is None
    judge(resumed, 4, NAN, 1.0)
    assert resumed.dropped.stop_reason() is not None


# -- checkpoints
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 3, 12, 40])
def test_a_resumed_guard_is_the_guard(cut: int) -> None:
    """State through JSON at any step: the same verdicts to the last bit and the same reports."""
    steps = usual_steps(60)
    steps[12], steps[30], steps[35], steps[41] = (NAN, 1.0), (9.0, 1.0), (5.0, 9.0), (5.0, INF)
    whole, resumed = guard(**SKIPPING), guard(**SKIPPING)
    feed(whole, steps[:cut])
    resumed.load_state(json.loads(json.dumps(whole.state(), allow_nan=False)))
    for iteration, step in enumerate(steps[cut:], cut + 1):
        assert torch.equal(
            judge(whole, iteration, *step).skipped, judge(resumed, iteration, *step).skipped
        )
        if iteration % 10 == 0:
            assert whole.dropped.close() == resumed.dropped.close()
    assert whole.state() == resumed.state() and whole.state()["dropped"]["skipped"] == 4


def test_state_of_a_run_without_history_or_with_another_window() -> None:
    """The newest values that fit are kept; without any, or any state at all, the guard begins to
    learn."""
    plain = guard()
    wide = guard(**SKIPPING)
    narrow = guard(**{**SKIPPING, "skip_bad_steps_window": 4})
    feed(plain, [(NAN, 1.0), *usual_steps(8)])
    feed(wide, usual_steps(8))
    narrow.load_state(wide.state())
    assert narrow.state()["usual"] == wide.state()["usual"][-4:]
    wide.load_state(plain.state())
    assert wide.state()["usual"] == [] and wide.state()["dropped"]["nan"] == 1
    assert feed(wide, [*usual_steps(4), (9.0, 1.0)]) == [False] * 4 + [True]
    fresh = guard(**SKIPPING)
    fresh.load_state({})
    assert fresh.state() == guard(**SKIPPING).state()
    plain.load_state(narrow.state())
    assert not any(feed(plain, [(99.0, 99.0)]))


# -- clipping
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0 - 1e-7, 1.0, 1.0 + 1e-6, 40.0, 1e18])
def test_clipping_factors(norm: float) -> None:
    """`torch`: what torch.nn.utils.clip_grad_norm_ multiplies with, to the last bit. `levanter`:
    exactly 1 up to the maximum, the maximum above. 0: off."""
    grad_norm = torch.tensor(norm, dtype=torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = grad_norm.view(1).clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    factor = guard(clip_grad_style="torch").clipping_factor(grad_norm)
    assert float(factor * grad_norm) == float(parameter.grad)
    factor = guard(clip_grad_style="levanter").clipping_factor(grad_norm)
    assert float(factor) == (
        1.0 if float(grad_norm) <= 1.0 else pytest.approx(1.0 / float(grad_norm), rel=1e-7)
    )
    for style in ("torch", "levanter"):
        assert guard(clip_grad=0.0, clip_grad_style=style).clipping_factor(grad_norm) == 1.0


# -- the command line
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, caution",
    [
        (
            {"on_bad_step": "abort", "max_consecutive_bad_steps": 9},
            "--max_consecutive_bad_steps has no effect with --on_bad_step=abort and --training_dtype=fp32",
        ),
        ({"on_bad_step": "abort", "max_consecutive_bad_steps": 9, "training_dtype": "fp16"}, None),
        ({"max_consecutive_bad_steps": 9}, None),
        (
            {"skip_bad_steps": True},
            "--skip_bad_steps_window=128: the run ends before half of the window is filled",
        ),
        ({**SKIPPING, "clip_grad_style": "levanter", "crash_on_nan": True}, None),
        ({**SKIPPING, "on_bad_step": "abort"}, None),
    ],
)
def test_idle_options_give_a_warning(options: dict[str, Any], caution: str | None) -> None:
    named = ("bad_step", "crash_on", "clip_grad")
    found = [
        line for line in warnings(tiny_config(**options)) if any(name in line for name in named)
    ]
    assert len(found) == (caution is not None) and all(
        line.startswith(caution or "") for line in found
    ), found


# -- recent losses and norms
# ----------------------------------------------------------------------------------------


def expected(history: list[list[float]], window: int, sigma: float) -> np.ndarray:
    """mean + sigma * std over the newest `window` rows, infinite before half of them are there."""
    if len(history) < max(2, window // 2):
        return np.full(2, np.inf)
    rows = np.array(history[-window:])
    return rows.mean(0) + sigma * np.maximum(rows.std(0, ddof=0), 1e-6)


@pytest.mark.parametrize("window, sigma", [(2, 1.0), (3, 6.0), (7, 0.5), (128, 6.0)])
def test_thresholds_are_those_of_a_plain_list(window: int, sigma: float) -> None:
    """Before and after the window is full; values that are kept out, NaN among them, leave no
    trace."""
    generator = np.random.default_rng(window)
    statistics, history = RollingStatistics(window, sigma, CPU, width=2), []
    for _ in range(3 * window):
        assert statistics.threshold().numpy() == pytest.approx(
            expected(history, window, sigma), rel=1e-12
        )
        values, kept = generator.normal([10.0, 1e-3], [0.1, 1e4]), bool(generator.random() < 0.8)
        statistics.add(
            torch.tensor(values if kept else [np.nan, 1.0], dtype=torch.float64), torch.tensor(kept)
        )
        history += [values.tolist()] if kept else []
    assert statistics.state() == history[-window:]


def test_equal_values_keep_a_margin() -> None:
    """The standard deviation is at least 1e-6, and its rounding is far below that for values of any
    size."""
    for value in (0.0, 3.0, 1e5):
        statistics = RollingStatistics(10, 6.0, CPU)
        for _ in range(10):
            statistics.add(torch.tensor([value], dtype=torch.float64), torch.tensor(True))
        assert statistics.threshold().item() - value == pytest.approx(6e-6, rel=1e-4)


@pytest.mark.parametrize("seen", [0, 1, 4, 9])
@pytest.mark.parametrize("window", [2, 4, 6])
def test_state_goes_through_json(seen: int, window: int) -> None:
    """Bit for bit into the same window; into a larger or smaller one the newest values that fit.
    Then what comes pushes out the oldest, and nothing before the window is full.
    """
    values = np.random.default_rng(seen).normal(size=(seen, 2)).tolist()
    first = RollingStatistics(4, 3.0, CPU, 2)
    second = RollingStatistics(window, 3.0, CPU, 2)
    whole = values[-4:]
    for row in values:
        first.add(torch.tensor(row, dtype=torch.float64), torch.tensor(True))
        second.add(torch.tensor([7.0, 7.0], dtype=torch.float64), torch.tensor(True))
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == whole[-window:]
    assert second.threshold().numpy() == pytest.approx(
        expected(whole[-window:], window, 3.0), rel=1e-12
    )
    for row in np.random.default_rng(10 + seen).normal(size=(7, 2)).tolist():
        if window == 4:
            assert torch.equal(first.threshold(), second.threshold())
        whole.append(row)
        for statistics in (first, second):
            statistics.add(torch.tensor(row, dtype=torch.float64), torch.tensor(True))
        assert second.state() == whole[-window:]
