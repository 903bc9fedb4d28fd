"""The charts of a report: which numbers of the runs stand together, thinned, as data for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lite.reports.curves import Curve
from megatron_lite.reports.series import Metrics
from megatron_lite.reports.watched_run import WatchedRun

POINTS = 2000  # of one curve, divided among many runs
FEWEST_POINTS = 300
MOST_MARKS = 200  # starts and dropped updates of a run
SMOOTHED_FROM = 150  # points; longer curves of noisy numbers have a smooth line before the raw one
NOISY = ("loss", "grad_norm")  # of training
COLORS = 8
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # of a run's curves in one chart, where colors tell the runs apart


class Kind(NamedTuple):
    """A curve of a chart."""

    phase: str
    name: str  # in metrics.jsonl
    label: str


class Chart(NamedTuple):
    """A chart of the page."""

    title: str
    unit: str
    kinds: tuple[Kind, ...]
    log: bool = False
    wide: bool = False


CHARTS = (
    Chart(
        "Loss",
        "nats per token",
        (
            Kind("training", "loss", "training"),
            Kind("validation", "loss", "validation"),
            Kind("validation", "averaged_loss", "validation, averaged weights"),
            Kind("test", "loss", "test"),
        ),
        wide=True,
    ),
    Chart("Learning rate", "", (Kind("training", "learning_rate", "learning rate"),)),
    Chart("Gradient norm", "", (Kind("training", "grad_norm", "gradient norm"),), log=True),
    Chart("Throughput", "tokens/s per rank", (Kind("training", "tokens_per_sec_per_gpu", "tokens/s"),)),
    Chart(
        "Time of a step",
        "ms",
        (Kind("training", "step_time_ms", "step"), Kind("training", "data_wait_ms", "wait for data")),
    ),
    Chart("Model FLOPs utilization", "share of the peak", (Kind("training", "mfu", "MFU"),)),
    Chart(
        "Memory",
        "MiB",
        (Kind("training", "max_allocated_mib", "allocated"), Kind("training", "max_reserved_mib", "reserved")),
    ),
    Chart("Batch size", "samples", (Kind("training", "batch_size", "batch size"),)),
)


@dataclass(frozen=True)
class NamedRun:
    """A run of the report, as its folder shows it."""

    name: str
    run: WatchedRun

    @property
    def metrics(self) -> Metrics:
        return self.run.metrics


def page_data(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the charts that have data, and the marks of each run, as JSON."""
    charts = [drawn for chart in CHARTS if (drawn := _chart(chart, runs))["series"]]
    return {"runs": [_marks(run.metrics) for run in runs], "charts": charts}


def _marks(metrics: Metrics) -> dict[str, Any]:
    starts = [[start.iteration, f"start {start.number}, iteration {start.iteration:,}"] for start in metrics.starts[1:]]
    dropped = [[iteration, reason[:200]] for iteration, reason in metrics.dropped.items()]
    return {"starts": starts[-MOST_MARKS:], "dropped": dropped[-MOST_MARKS:]}


def _chart(chart: Chart, runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return one chart; with several runs, colors tell the runs apart, dashes the kinds."""
    series: list[dict[str, Any]] = []
    legend: list[dict[str, Any]] = []
    points = max(POINTS // len(runs), FEWEST_POINTS)
    for number, run in enumerate(runs):
        for place, kind in enumerate(chart.kinds):
            curve = run.metrics.curve(kind.phase, kind.name).finite()
            if not len(curve) or _is_dull(chart, curve):
                continue
            name = kind.label if len(runs) == 1 else f"{run.name}: {kind.label}"
            style = {
                "color": (place if len(runs) == 1 else number) % COLORS,
                "dash": "" if len(runs) == 1 else DASHES[place],
            }
            for drawn in _drawn(kind, curve, points):
                series.append({**style, **drawn, "name": "" if drawn["raw"] else name, "legend": len(legend)})
            legend.append({**style, "name": name})
    title = {"title": chart.title, "unit": chart.unit, "log": chart.log, "wide": chart.wide}
    return {**title, "series": series, "legend": legend}


def _is_dull(chart: Chart, curve: Curve) -> bool:
    """Whether a curve says nothing: a batch size that never changes."""
    return chart.title == "Batch size" and bool((curve.values == curve.values[0]).all())


def _drawn(kind: Kind, curve: Curve, points: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of a curve: a long one of a noisy number is pale, with a smooth line before it."""
    smooth = kind.phase == "training" and kind.name in NOISY and len(curve) > SMOOTHED_FROM
    yield {**_numbers(curve.thinned(points)), "raw": smooth}
    if smooth:
        yield {**_numbers(curve.smoothed().thinned(points)), "raw": False}


def _numbers(curve: Curve) -> dict[str, Any]:
    return {"x": curve.iterations.tolist(), "y": [float(f"{value:.6g}") for value in curve.values.tolist()]}
