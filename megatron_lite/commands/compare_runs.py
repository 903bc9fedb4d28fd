"""Compare two runs: configuration, losses, speed, memory.

    megatron_lite compare_runs RUN_A RUN_B [--loss_tolerance=1e-4] [--speed_tolerance=0.05]

Each run is an --experiment_dir with a metrics.jsonl and may still be training. Differences are
relative to RUN_A. --loss_tolerance bounds the relative difference of every loss at each iteration
that both runs logged (0: equal). --speed_tolerance bounds how much slower RUN_B may be, by the
median tokens per second and device; a faster run passes. Losses are compared where both runs logged
the same iteration, speeds by their medians, because a stall of the machine says nothing about the
program.
Exit codes: 0 within the tolerances, 1 beyond one, 2 usage, 3 a run has no numbers to compare.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.checkpoint.compatibility import NAMES_OF_A_RUN
from megatron_lite.cli.script_parser import ScriptParser, number
from megatron_lite.errors import DataError, RunError
from megatron_lite.reports.charts import SPEED, SPEEDS
from megatron_lite.reports.report import option_text, usual_values
from megatron_lite.reports.watch_page import short
from megatron_lite.reports.watched_run import Curve, Metrics, WatchedRun, watched
from megatron_lite.run.exit_status import print_failure, print_page
from megatron_lite.run.progress_line import aligned, printed

Row = Sequence[str]
Runs = tuple[WatchedRun, WatchedRun]
LOSSES = ("loss", "averaged_loss")
LOSS_OF_A_DATA_SET = "loss/"
MEMORY = {"max_allocated_mib": "allocated, MiB", "max_reserved_mib": "reserved, MiB"}


# -- the differences as numbers
# --------------------------------------------------------------------------------------


class LossDifference(NamedTuple):
    """A loss of two runs, and |second - first| / |first| where both logged an iteration.

    A difference is infinite where only one loss is a number.
    """

    label: str  # training loss, validation averaged_loss
    first: Curve
    second: Curve
    differences: Curve

    @property
    def largest(self) -> tuple[float, int]:
        """Return the largest difference and its iteration, of at least one in common."""
        place = int(self.differences.values.argmax())
        return float(self.differences.values[place]), int(self.differences.iterations[place])


def compare_options(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the options that differ between two config.json files, in file order, with both values
    as text."""
    one, other = usual_values(first), usual_values(second)
    return [
        (name, option_text(first, one, name), option_text(second, other, name))
        for name in dict.fromkeys([*first, *second])
        if name not in NAMES_OF_A_RUN
        if first.get(name, ...) != second.get(name, ...)  # which no JSON has: the option is absent
    ]


def compare_losses(first: Metrics, second: Metrics) -> Iterator[LossDifference]:
    """Yield every loss that both runs logged."""
    for phase in first.phases():
        for name in first.names(phase):
            one, other = first.curve(phase, name), second.curve(phase, name)
            if (name in LOSSES or name.startswith(LOSS_OF_A_DATA_SET)) and len(one) and len(other):
                common, *places = np.intersect1d(
                    one.iterations, other.iterations, return_indices=True
                )
                relative = relative_differences(one.values[places[0]], other.values[places[1]])
                yield LossDifference(f"{phase} {name}", one, other, Curve(common, relative))


def relative_differences(first: Any, second: Any) -> Any:
    """Return |second - first| / |first|, (n,): 0 if both are equal or not finite, infinity if only
    one is finite."""
    both_lost = ~np.isfinite(first) & ~np.isfinite(second)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(second - first) / np.abs(first)
    return np.where(
        (first == second) | both_lost, 0.0, np.where(np.isfinite(relative), relative, np.inf)
    )


def change(first: float, second: float) -> float:
    """Return the relative increase from first to second; NaN if one of them is, or the first is
    0."""
    return second / first - 1 if first else math.nan


def peak(run: Metrics, name: str) -> float:
    """Return the largest value of a training metric; NaN if absent."""
    return max(run.curve("training", name).finite().values.tolist(), default=math.nan)


def last_result(run: Metrics, name: str) -> float:
    """Return the newest result of `evaluate --tasks`; NaN if absent."""
    return float([math.nan, *run.curve("tasks", name).values][-1])


def median_speed(run: Metrics, name: str) -> float:
    """Return the median of a training metric, without the first line of each start if there are
    others; NaN if absent.

    The first line includes compilation and first allocations.
    """
    curve = run.curve("training", name).finite()
    # The first line of a start may be an evaluation.
    firsts = [int(curve.iterations.searchsorted(start.iteration)) for start in run.starts]
    steady = np.delete(curve.values, [place for place in firsts if place < len(curve)])
    values = steady if len(steady) else curve.values
    return float(np.median(values)) if len(values) else math.nan


# -- the report
# ------------------------------------------------------------------------------------------------------


def table(title: str, head: Row, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table; the first column is left-aligned, the others are
    right-aligned."""
    if not rows:
        return []
    return ["", *aligned([[printed(cell) for cell in row] for row in ((title, *head), *rows)])]


def describe(letter: str, run: WatchedRun) -> Row:
    """Return the table row of a run."""
    metrics = run.metrics
    last = metrics.last.get("training", {}).get("iteration", 0)
    status = str(run.ending.get("status", "no ending yet"))
    return (
        letter,
        f"{last:,}",
        str(len(metrics.starts)),
        str(len(metrics.dropped)),
        status,
        str(run.root),
    )


def loss_row(loss: LossDifference) -> Row:
    """Return the table row of a loss."""
    ends = [
        f"{curve.values[-1]:.5f} at {curve.iterations[-1]:,}" for curve in (loss.first, loss.second)
    ]
    if not (common := len(loss.differences)):
        return loss.label, *ends, "0", "-", "-"
    median, (largest, iteration) = np.median(loss.differences.values), loss.largest
    shown = f"{largest:.2e} at {iteration:,}" if largest else "0"
    return loss.label, *ends, f"{common:,}", f"{median:.2e}" if median else "0", shown


def number_rows(
    labels: Mapping[str, str], measure: Callable[[Metrics, str], float], runs: Runs
) -> Iterator[Row]:
    """Yield a table row for each metric that a run has. labels: by name in metrics.jsonl."""
    for name, label in labels.items():
        values = [measure(run.metrics, name) for run in runs]
        if not all(map(math.isnan, values)):
            numbers = zip((short, short, "{:+.1%}".format), (*values, change(*values)), strict=True)
            yield label, *("-" if math.isnan(value) else show(value) for show, value in numbers)


def report(runs: Runs) -> Iterator[str]:
    """Yield the lines of the report."""
    first, second = (run.metrics for run in runs)
    head = ("iterations", "starts", "dropped", "ending", "folder")
    yield from table(
        "run", head, [describe(letter, run) for letter, run in zip("AB", runs, strict=True)]
    )[1:]
    if missing := [str(run.root) for run in runs if not run.config]:
        yield from ("", f"configuration: no config.json in {printed(' and '.join(missing))}")
    elif options := compare_options(runs[0].config, runs[1].config):
        yield from table(
            "configuration", ("A", "B"), [(f"--{name}", *values) for name, *values in options]
        )
    else:
        yield from ("", "configuration: the same")
    head = ("A, last", "B, last", "in common", "median difference", "largest difference")
    yield from table("loss", head, [loss_row(loss) for loss in compare_losses(first, second)])
    tasks = {name: name for run in (first, second) for name in run.task_results()}
    for title, labels, measure in (
        ("task, last", tasks, last_result),
        ("speed, median", SPEEDS, median_speed),
        ("memory, largest", MEMORY, peak),
    ):
        yield from table(title, ("A", "B", "B to A"), [*number_rows(labels, measure, runs)])


def check_losses(runs: Runs, tolerance: float) -> tuple[bool, str]:
    """Return whether all losses are within the tolerance, and a description of the largest
    difference.

    Raises:
        DataError: if there is nothing to compare.
    """
    losses = [
        loss for loss in compare_losses(runs[0].metrics, runs[1].metrics) if len(loss.differences)
    ]
    if not losses:
        raise DataError(
            "the runs have no iteration with a loss in common; give both the same --log_interval"
        )
    worst = max(losses, key=lambda loss: loss.largest[0])
    largest, iteration = worst.largest
    if not largest:
        return True, "all losses are equal"
    return (
        largest <= tolerance,
        f"{printed(worst.label)} differs by {largest:.3g} at iteration {iteration:,}",
    )


def check_speed(runs: Runs, tolerance: float) -> tuple[bool, str]:
    """Return whether the second run is at most `tolerance` slower, and a description of the
    difference.

    Raises:
        DataError: if a run logged no speed.
    """
    increase = change(*(median_speed(run.metrics, SPEED) for run in runs))
    if math.isnan(increase):
        raise DataError(
            f"a run has no {SPEED} in its metrics.jsonl, which --speed_tolerance compares"
        )
    words = (
        f"RUN_B is {abs(increase):.1%} {'slower' if increase < 0 else 'faster'}"
        if increase
        else "both are as fast"
    )
    return increase >= -tolerance, words


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Compare and print; return the exit code."""
    parser = ScriptParser(__doc__, prog=program)
    parser.add_argument("run_a", type=Path, help="the --experiment_dir of a run")
    parser.add_argument("run_b", type=Path, help="the run to compare with it")
    share = number(float, 0)
    parser.add_argument(
        "--loss_tolerance",
        type=share,
        help="largest relative loss difference at a common iteration; 0: equal",
    )
    parser.add_argument(
        "--speed_tolerance", type=share, help="fraction by which RUN_B may be slower, such as 0.05"
    )
    options = parser.parse_args(arguments)
    try:
        runs = watched(options.run_a), watched(options.run_b)
        for line in report(runs):
            print_page(line)
        return _check(runs, options)
    except RunError as error:
        return print_failure(error)


def _check(runs: Runs, options: argparse.Namespace) -> int:
    """Check the runs against the given tolerances; return the exit code."""
    all_passed = True
    for name, check in (("loss_tolerance", check_losses), ("speed_tolerance", check_speed)):
        if (tolerance := getattr(options, name)) is not None:
            passed, words = check(runs, tolerance)
            print_page(f"\n--{name}={tolerance:g}: {'kept' if passed else 'EXCEEDED'}: {words}")
            all_passed &= passed
    return 0 if all_passed else 1
