"""The charts of a report: which metrics share a chart, and their thinned curves as data for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_lite.reports.series import Curve, Metrics
from megatron_lite.reports.watched_run import WatchedRun

POINTS = 2000  # of one curve, divided among many runs
FEWEST_POINTS = 300
MOST_MARKS = 200  # starts and dropped updates of a run
SMOOTHED_FROM = 150  # points; longer curves of noisy numbers have a smooth line before the raw one
NOISY = ("loss", "grad_norm")  # of training
COLORS = 8
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # of a run's curves in one chart, where colors tell the runs apart


class ChartCurve(NamedTuple):
    """A curve of a chart."""

    name: str  # in metrics.jsonl
    label: str
    phase: str = "training"


class Chart(NamedTuple):
    """A chart of the page."""

    title: str
    unit: str
    curves: tuple[ChartCurve, ...]
    log: bool = False
    wide: bool = False


CHARTS = (
    Chart(
        "Loss",
        "nats per token",
        (
            ChartCurve("loss", "training"),
            ChartCurve("loss", "validation", "validation"),
            ChartCurve("averaged_loss", "validation, averaged weights", "validation"),
            ChartCurve("loss", "test", "test"),
        ),
        wide=True,
    ),
    Chart("Learning rate", "", (ChartCurve("learning_rate", "learning rate"),)),
    Chart("Gradient norm", "", (ChartCurve("grad_norm", "gradient norm"),), log=True),
    Chart("Throughput", "tokens/s per rank", (ChartCurve("tokens_per_sec_per_gpu", "tokens/s"),)),
    Chart("Time of a step", "ms", (ChartCurve("step_time_ms", "step"), ChartCurve("data_wait_ms", "wait for data"))),
    Chart("Model FLOPs utilization", "share of the peak", (ChartCurve("mfu", "MFU"),)),
    Chart("Memory", "MiB", (ChartCurve("max_allocated_mib", "allocated"), ChartCurve("max_reserved_mib", "reserved"))),
    Chart("Batch size", "samples", (ChartCurve("batch_size", "batch size"),)),
)


def page_data(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Return the charts that have data, and the marks of each run, as JSON."""
    charts = [drawn for chart in CHARTS if (drawn := _chart(chart, runs))["series"]]
    return {"runs": [_marks(run.metrics) for run in runs], "charts": charts}


def _marks(metrics: Metrics) -> dict[str, Any]:
    starts = [[start.iteration, f"start {start.number}, iteration {start.iteration:,}"] for start in metrics.starts[1:]]
    dropped = [[iteration, reason[:200]] for iteration, reason in metrics.dropped.items()]
    return {"starts": starts[-MOST_MARKS:], "dropped": dropped[-MOST_MARKS:]}


def _chart(chart: Chart, runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Return one chart; with several runs, colors tell the runs apart, dashes the curves."""
    series: list[dict[str, Any]] = []
    legend: list[dict[str, Any]] = []
    points, alone = max(POINTS // len(runs), FEWEST_POINTS), len(runs) == 1
    for number, run in enumerate(runs):
        for place, drawn in enumerate(chart.curves):
            curve = run.metrics.curve(drawn.phase, drawn.name).finite()
            if not len(curve) or (drawn.name == "batch_size" and (curve.values == curve.values[0]).all()):
                continue  # a batch size that never changes says nothing
            name = drawn.label if alone else f"{run.name}: {drawn.label}"
            style = {"color": (place if alone else number) % COLORS, "dash": "" if alone else DASHES[place]}
            lines = [curve]
            if drawn.phase == "training" and drawn.name in NOISY and len(curve) > SMOOTHED_FROM:
                lines.append(curve.smoothed())  # before the raw line, which is pale
            for line in lines:
                raw = line is not lines[-1]
                words = {"raw": raw, "name": "" if raw else name, "legend": len(legend)}
                series.append({**style, **_numbers(line.thinned(points)), **words})
            legend.append({**style, "name": name})
    title = {"title": chart.title, "unit": chart.unit, "log": chart.log, "wide": chart.wide}
    return {**title, "series": series, "legend": legend}


def _numbers(curve: Curve) -> dict[str, Any]:
    return {"x": curve.iterations.tolist(), "y": [float(f"{value:.6g}") for value in curve.values.tolist()]}
