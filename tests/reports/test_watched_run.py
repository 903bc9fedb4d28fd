"""metrics.jsonl is read back as the run was, whatever restarts and damage left in it; curves keep
their shape."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.errors import DataError
from megatron_lite.monitor.trackers.metrics_file import MetricsFile
from megatron_lite.reports.watched_run import (
    LONGEST_LINE_BYTES,
    Curve,
    Metrics,
    RunStart,
    sparkline,
    watched,
)


def line(
    iteration: Any, loss: Any = 1.0, phase: Any = "training", run: int = 0, **more: Any
) -> str:
    """Return one line as a run writes it."""
    return (
        json.dumps(
            {
                "phase": phase,
                "iteration": iteration,
                "loss": loss,
                "run": run,
                "time": 7.0 + run,
                **more,
            }
        )
        + "\n"
    )


def write(folder: Path, *lines: str, mode: str = "w") -> Path:
    """Write or append lines, and return the folder."""
    with (folder / "metrics.jsonl").open(mode, encoding="utf-8") as file:
        file.write("".join(lines))
    return folder


def losses(metrics: Metrics, phase: str = "training") -> dict[int, float]:
    """Return the losses by iteration."""
    curve = metrics.curve(phase, "loss")
    return dict(zip(curve.iterations.tolist(), curve.values.tolist(), strict=True))


def test_what_the_tracker_writes(tmp_path: Path) -> None:
    """The program's own file: numbers by phase, text apart, NaN for a number that was not
    finite."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(
        {
            "phase": "training",
            "iteration": 1,
            "loss": 3.0,
            "learning_rate": 1e-3,
            "skipped_iters": 0,
        }
    )
    file.log(
        {
            "phase": "training",
            "iteration": 2,
            "loss": math.inf,
            "skip_reason": "iteration 2: loss inf",
        }
    )
    file.log({"phase": "validation", "iteration": 2, "loss": 2.5, "loss/books": 2.25})
    file.close()
    run = watched(tmp_path).metrics
    assert run.phases() == ["training", "validation"] and run.names("validation") == [
        "iteration",
        "loss",
        "loss/books",
    ]
    assert losses(run)[1] == 3.0 and math.isnan(losses(run)[2])
    assert losses(run, "validation") == {2: 2.5} and len(run.curve("test", "loss")) == 0
    assert (
        run.dropped == {2: "iteration 2: loss inf"} and run.last["validation"]["loss/books"] == 2.25
    )
    assert run.curve("training", "loss").finite().iterations.tolist() == [1]


def test_a_later_start_replaces_what_it_repeats(tmp_path: Path) -> None:
    """The second start goes on after iteration 20 with another log interval: nothing of the first
    is left beyond."""
    first = [line(at, 10.0 + at) for at in (10, 20, 30, 40)] + [
        line(20, 5.0, "validation"),
        line(40, 4.0, "validation"),
    ]
    second = [line(25, 1.0, run=1), line(50, 2.0, run=1)]
    run = watched(write(tmp_path, *first, *second)).metrics
    assert losses(run) == {10: 20.0, 20: 30.0, 25: 1.0, 50: 2.0}
    assert losses(run, "validation") == {20: 5.0}
    assert run.starts == [RunStart(0, 10), RunStart(1, 25)]


def test_a_start_that_begins_with_an_evaluation_keeps_its_iteration(tmp_path: Path) -> None:
    """A stop came before the validation of iteration 20, so the next start makes up for it."""
    run = watched(
        write(
            tmp_path, line(20), line(30), line(20, 5.0, "validation", run=1), line(30, 2.0, run=1)
        )
    ).metrics
    assert losses(run) == {20: 1.0, 30: 2.0} and losses(run, "validation") == {20: 5.0}


def test_a_last_line_without_its_break(tmp_path: Path) -> None:
    """A whole record at the end of a finished run counts, a torn one does not."""
    assert losses(watched(write(tmp_path, line(1), line(2).rstrip())).metrics) == {1: 1.0, 2: 1.0}
    assert losses(watched(write(tmp_path, line(1), line(2)[:-3])).metrics) == {1: 1.0}


DAMAGES = (
    "\n",
    "not json\n",
    "[1, 2]\n",
    "3\n",
    "\x00\x00\n",
    "[" * 100_000 + "\n",
    "x" * (LONGEST_LINE_BYTES + 1) + "\n",
    line("one"),
    line(True),
    line(-1),
    line(2**70),
    line(1.5),
    line(3, phase=["training"]),
    line(3, phase=None),
    '{"phase": "training", "iteration": 3, "loss": "low"}\n',
    '{"phase": "training", "iteration": 3, "run": "x", "skip_reason": 5}\n',
)


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    """No line keeps the others from being read."""
    for damage in DAMAGES:
        assert losses(watched(write(tmp_path, line(1), damage, line(2))).metrics) == {
            1: 1.0,
            2: 1.0,
        }, damage[:50]


def test_numbers_that_json_allows(tmp_path: Path) -> None:
    """An integer beyond a float, NaN and infinities become NaN."""
    texts = ("1" + "0" * 400, "NaN", "Infinity", "-1e999", "null")
    lines = [
        f'{{"phase": "training", "iteration": {at}, "loss": {text}}}\n'
        for at, text in enumerate(texts)
    ]
    assert all(
        math.isnan(loss) for loss in losses(watched(write(tmp_path, *lines)).metrics).values()
    )


def test_runs_without_numbers(tmp_path: Path) -> None:
    """A missing file, a folder in its place and an empty file are one line."""
    with pytest.raises(
        DataError, match=r"metrics.jsonl: No such file or directory; give the --experiment_dir"
    ):
        watched(tmp_path)
    with pytest.raises(DataError, match="has no record yet; wait"):
        watched(write(tmp_path, "\n"))
    (tmp_path / "other" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match="Is a directory"):
        watched(tmp_path / "other")


def test_too_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that would fill the memory with columns is refused."""
    monkeypatch.setattr("megatron_lite.reports.watched_run.MOST_NAMES", 10)
    with pytest.raises(DataError, match="more than 10 names"):
        watched(write(tmp_path, *(line(at, **{f"x{at}": 1}) for at in range(20))))


@pytest.mark.slow
def test_a_million_lines(tmp_path: Path) -> None:
    """The numbers of a million lines take less than 400 MB."""
    import resource

    with (tmp_path / "metrics.jsonl").open("w") as file:
        for at in range(1, 1_000_001):
            file.write(line(at, 1.5, learning_rate=1e-3, grad_norm=1.0, tokens_per_sec_per_gpu=1e4))
    pid = os.fork()
    if pid == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run = watched(tmp_path).metrics
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os._exit(0 if len(run.curve("training", "loss")) == 10**6 and grown_kib < 400 * 1024 else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- curves


def curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values)), np.array(values, np.float64))


def test_a_thinned_curve_keeps_ends_and_extremes() -> None:
    """One spike among 100,000 points survives; the order stays."""
    values = np.random.default_rng(0).normal(size=100_000)
    values[54_321], values[12_345] = 100.0, -100.0
    thin = curve(list(values)).thinned(2000)
    assert 1000 < len(thin) <= 2000
    assert (np.diff(thin.iterations) > 0).all() and {0, 12_345, 54_321, 99_999} <= set(
        thin.iterations.tolist()
    )
    assert (thin.values == values[thin.iterations]).all()


def test_a_short_curve_stays() -> None:
    for length in (0, 1, 5):
        short = curve([1.0] * length)
        assert short.thinned(10) is short and len(short.smoothed()) == length


def test_a_smoothed_curve_has_the_plain_mean_of_its_neighbours() -> None:
    """Against means computed one by one; a straight line stays as it is."""
    values = np.random.default_rng(1).normal(size=500)
    smooth = curve(list(values)).smoothed()
    for index in (250, 100, 400):
        assert smooth.values[index] == pytest.approx(values[index - 5 : index + 6].mean())
    line = curve(list(range(300))).smoothed()
    assert line.values[10:-10] == pytest.approx(np.arange(10.0, 290.0))


def test_sparklines() -> None:
    """Eight heights, the mean of each share, blanks without a finite value."""
    ramp = np.arange(8.0)
    assert sparkline(ramp, 8) == "▁▂▃▄▅▆▇█" and sparkline(ramp, 8, unicode=False) == "_.-=+*%#"
    assert sparkline(np.arange(100.0), 4) == "▁▃▆█"
    assert sparkline(np.ones(3), 60) == "▁▁▁"
    assert sparkline(np.array([0.0, math.nan, math.inf, 7.0]), 4) == "▁  █"
    assert sparkline(np.array([math.nan] * 3), 2) == "  " and sparkline(np.array([]), 5) == ""
    assert sparkline(-ramp, 8) == "█▇▆▅▄▃▂▁" and len(sparkline(np.arange(61.0), 60)) == 60
