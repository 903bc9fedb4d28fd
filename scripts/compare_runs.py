"""Compare two runs: configuration, losses, speed, memory.

    python scripts/compare_runs.py RUN_A RUN_B [--loss_tolerance=1e-4] [--speed_tolerance=0.05]

Each run is an --experiment_dir with a metrics.jsonl and may still be training. Differences are relative to RUN_A.
--loss_tolerance bounds the relative difference of every loss at each iteration that both runs logged (0: equal).
--speed_tolerance bounds how much slower RUN_B may be, by the median tokens per second and device; a faster run passes.
Exit codes: 0 within the tolerances, 1 beyond one, 2 usage, 3 a run has no numbers to compare.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
import numpy as np

from megatron_lite.cli.script_parser import ScriptParser, number
from megatron_lite.errors import DataError, RunError
from megatron_lite.reports.comparison import (
    MEMORY,
    SPEED,
    SPEEDS,
    LossDifference,
    NumberDifference,
    compare_losses,
    compare_numbers,
    compare_options,
    median_speed,
    peak,
)
from megatron_lite.reports.watched_run import WatchedRun, printable, watched

LONGEST_CELL = 40  # characters
Row = Sequence[str]


def table(title: str, head: Row, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table; the first column is left-aligned, the others are right-aligned."""
    if not rows:
        return []
    cells = [[_printable(cell) for cell in row] for row in ((title, *head), *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in cells
    ]
    return ["", *lines]


def _printable(text: str) -> str:
    """Replace control characters and cut long text in the middle, because paths differ at their ends."""
    text = printable(text)
    half = (LONGEST_CELL - 3) // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]}...{text[-half:]}"


def describe(letter: str, run: WatchedRun) -> Row:
    """Return the table row of a run."""
    metrics = run.metrics
    last = metrics.last.get("training", {}).get("iteration", 0)
    status = str(run.ending.get("status", "no ending yet"))
    return letter, f"{last:,}", str(len(metrics.starts)), str(len(metrics.dropped)), status, str(run.root)


def loss_row(loss: LossDifference) -> Row:
    """Return the table row of a loss."""
    ends = [f"{curve.values[-1]:.5f} at {curve.iterations[-1]:,}" for curve in (loss.first, loss.second)]
    if not (common := len(loss.differences)):
        return loss.label, *ends, "0", "-", "-"
    median, (largest, iteration) = np.median(loss.differences.values), loss.largest
    shown = f"{largest:.2e} at {iteration:,}" if largest else "0"
    return loss.label, *ends, f"{common:,}", f"{median:.2e}" if median else "0", shown


def number_row(row: NumberDifference) -> Row:
    """Return the table row of a speed or a memory size."""
    first, second = ("-" if math.isnan(value) else _number(value) for value in (row.first, row.second))
    return row.label, first, second, "-" if math.isnan(row.change) else f"{row.change:+.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def report(runs: tuple[WatchedRun, WatchedRun]) -> Iterator[str]:
    """Yield the lines of the report."""
    first, second = (run.metrics for run in runs)
    head = ("iterations", "starts", "dropped", "ending", "folder")
    yield from table("run", head, [describe(letter, run) for letter, run in zip("AB", runs, strict=True)])[1:]
    if missing := [str(run.root) for run in runs if not run.config]:
        yield from ("", f"configuration: no config.json in {_printable(' and '.join(missing))}")
    elif options := compare_options(runs[0].config, runs[1].config):
        yield from table("configuration", ("A", "B"), [(f"--{name}", *values) for name, *values in options])
    else:
        yield from ("", "configuration: the same")
    head = ("A, last", "B, last", "in common", "median difference", "largest difference")
    yield from table("loss", head, [loss_row(loss) for loss in compare_losses(first, second)])
    for title, labels, measure in (("speed, median", SPEEDS, median_speed), ("memory, largest", MEMORY, peak)):
        rows = [number_row(row) for row in compare_numbers(labels, measure, first, second)]
        yield from table(title, ("A", "B", "B to A"), rows)


def check_losses(runs: tuple[WatchedRun, WatchedRun], tolerance: float) -> tuple[bool, str]:
    """Return whether all losses are within the tolerance, and a description of the largest difference.

    Raises:
        DataError: if there is nothing to compare.
    """
    losses = [loss for loss in compare_losses(runs[0].metrics, runs[1].metrics) if len(loss.differences)]
    if not losses:
        raise DataError("the runs have no iteration with a loss in common; give both the same --log_interval")
    worst = max(losses, key=lambda loss: loss.largest[0])
    largest, iteration = worst.largest
    if not largest:
        return True, "all losses are equal"
    return largest <= tolerance, f"{_printable(worst.label)} differs by {largest:.3g} at iteration {iteration:,}"


def check_speed(runs: tuple[WatchedRun, WatchedRun], tolerance: float) -> tuple[bool, str]:
    """Return whether the second run is at most `tolerance` slower, and a description of the difference.

    Raises:
        DataError: if a run logged no speed.
    """
    change = NumberDifference(SPEED, *(median_speed(run.metrics, SPEED) for run in runs)).change
    if math.isnan(change):
        raise DataError(f"a run has no {SPEED} in its metrics.jsonl, which --speed_tolerance compares")
    words = f"RUN_B is {abs(change):.1%} {'slower' if change < 0 else 'faster'}" if change else "both are as fast"
    return change >= -tolerance, words


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    parser = ScriptParser(
        description="Compare two runs: configuration, losses, speed, memory.",
        epilog="Exit codes: 0 within the tolerances, 1 beyond one, 2 usage, 3 a run has no numbers to compare.",
    )
    parser.add_argument("run_a", type=Path, help="the --experiment_dir of a run")
    parser.add_argument("run_b", type=Path, help="the run to compare with it")
    share = number(float, 0)
    parser.add_argument(
        "--loss_tolerance", type=share, help="largest relative loss difference at a common iteration; 0: equal"
    )
    parser.add_argument("--speed_tolerance", type=share, help="fraction by which RUN_B may be slower, such as 0.05")
    options = parser.parse_args(arguments)
    try:
        runs = watched(options.run_a), watched(options.run_b)
        for line in report(runs):
            print(line)
        return _check(runs, options.loss_tolerance, options.speed_tolerance)
    except RunError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code


def _check(runs: tuple[WatchedRun, WatchedRun], loss: float | None, speed: float | None) -> int:
    """Check the runs against the given tolerances; return the exit code."""
    checks = (("loss_tolerance", loss, check_losses), ("speed_tolerance", speed, check_speed))
    given = [(name, tolerance, check) for name, tolerance, check in checks if tolerance is not None]
    if given:
        print()
    all_passed = True
    for name, tolerance, check in given:
        passed, words = check(runs, tolerance)
        print(f"--{name}={tolerance:g}: {'kept' if passed else 'EXCEEDED'}: {words}")
        all_passed &= passed
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
