"""Charts of one or several runs, for pages and pictures: which metrics share a chart, and which
lines to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config import JsonObject
from megatron_lite.reports.watched_run import Curve, WatchedRun

POINTS = 2000  # per line; on a page, divided among the runs
FEWEST_POINTS = 300
MOST_MARKS = 200  # starts and dropped updates per run
SMOOTHED_FROM = (
    150  # points; longer curves of noisy metrics have a smooth line in front of the raw one
)
NOISY = ("loss", "grad_norm")  # in training
COLORS = 8
SPEED = "tokens_per_sec_per_gpu"
SPEEDS = {
    "tokens_per_sec": "tokens/s",
    SPEED: "tokens/s per rank",
    "step_time_ms": "step, ms",
    "data_wait_ms": "data wait, ms",
    "mfu": "MFU",
}


class Metric(NamedTuple):
    """A metric in a chart."""

    name: str  # in metrics.jsonl
    label: str
    phase: str = "training"
    dashes: tuple[int, ...] = ()  # where colors distinguish runs
    marker: str = ""  # o: dots, D: diamonds; empty: none

    @property
    def short(self) -> str:
        """Return the label without its phase."""
        return self.label.rpartition(", ")[2]


class Chart(NamedTuple):
    """Metrics that share an axis."""

    title: str
    unit: str
    metrics: tuple[Metric, ...]
    log: bool = False
    wide: bool = False


LOSSES = Chart(
    "Loss",
    "nats per token",
    (
        Metric("loss", "training"),
        Metric("loss", "validation", "validation", (6, 3), "o"),
        Metric("averaged_loss", "validation, averaged weights", "validation", (2, 3), "o"),
        Metric("loss", "test", "test", (8, 3, 2, 3), "D"),
    ),
    wide=True,
)
LEARNING_RATE = Chart("Learning rate", "", (Metric("learning_rate", "learning rate"),))
CHARTS = (
    LOSSES,
    LEARNING_RATE,
    Chart("Gradient norm", "", (Metric("grad_norm", "gradient norm"),), log=True),
    Chart(
        "Throughput", "tokens/s", (Metric("tokens_per_sec", "all ranks"), Metric(SPEED, "per rank"))
    ),
    Chart(
        "Time of a step",
        "ms",
        (Metric("step_time_ms", "step"), Metric("data_wait_ms", "wait for data", dashes=(6, 3))),
    ),
    Chart("Model FLOPs utilization", "share of the peak", (Metric("mfu", "MFU"),)),
    Chart(
        "Memory",
        "MiB",
        (
            Metric("max_allocated_mib", "allocated"),
            Metric("max_reserved_mib", "reserved", dashes=(6, 3)),
        ),
    ),
    Chart("Batch size", "samples", (Metric("batch_size", "batch size"),)),
)


class Drawn(NamedTuple):
    """A run's metric in a chart."""

    run: WatchedRun
    metric: Metric
    curve: Curve  # all finite values
    lines: list[Curve]  # thinned; a raw line precedes its smooth one
    color: int  # number in a palette
    dashes: tuple[int, ...]
    widen: float = 1.0  # factor of the line's width, which shows it on both sides of equal curves of later runs


def draw_chart(chart: Chart, runs: Sequence[WatchedRun], points: int = POINTS) -> Iterator[Drawn]:
    """Yield the metrics that the runs have. With several runs, colors distinguish runs, and dashes
    metrics."""
    alone, found = len(runs) == 1, list[Drawn]()
    for number, run in enumerate(runs):
        for place, metric in enumerate(chart.metrics):
            curve = run.metrics.curve(metric.phase, metric.name).finite()
            if not len(curve) or (
                metric.name == "batch_size" and (curve.values == curve.values[0]).all()
            ):
                continue  # a constant batch size says nothing
            if metric.name == SPEED and len(run.metrics.curve("training", "tokens_per_sec")) == len(
                curve
            ):
                continue  # drawn only for older runs without the total
            lines = [curve]
            if metric.phase == "training" and metric.name in NOISY and len(curve) > SMOOTHED_FROM:
                lines.append(curve.smoothed())
            lines = [line.thinned(points) for line in lines]
            color = (place if alone else number) % COLORS
            found.append(Drawn(run, metric, curve, lines, color, () if alone else metric.dashes))
    for place, drawn in enumerate(found):
        later = [other.curve.values for other in found[place + 1 :] if other.metric == drawn.metric]
        equal = [
            (drawn.curve.values[: len(one)] == one[: len(drawn.curve)]).mean() > 0.5
            for one in later
        ]
        yield drawn._replace(widen=1 + 1.5 * sum(equal))


def page_data(runs: Sequence[WatchedRun]) -> JsonObject:
    """Return the charts with data, and each run's marks, as JSON."""
    charts = [drawn for chart in CHARTS if (drawn := _chart_data(chart, runs))["series"]]
    return {"runs": [_marks(run) for run in runs], "charts": charts}


def _marks(run: WatchedRun) -> JsonObject:
    starts = run.metrics.starts[1:]
    named = [
        [start.iteration, f"start {start.number}, iteration {start.iteration:,}"]
        for start in starts
    ]
    dropped = [[iteration, reason[:200]] for iteration, reason in run.metrics.dropped.items()]
    return {"starts": named[-MOST_MARKS:], "dropped": dropped[-MOST_MARKS:]}


def _chart_data(chart: Chart, runs: Sequence[WatchedRun]) -> JsonObject:
    series: list[JsonObject] = []
    legend: list[JsonObject] = []
    for drawn in draw_chart(chart, runs, max(POINTS // len(runs), FEWEST_POINTS)):
        name = drawn.metric.label if len(runs) == 1 else f"{drawn.run.name}: {drawn.metric.label}"
        style = {
            "color": drawn.color,
            "dash": " ".join(map(str, drawn.dashes)),
            "widen": drawn.widen,
        }
        for line in drawn.lines:
            raw = line is not drawn.lines[-1]
            values = [float(f"{value:.6g}") for value in line.values.tolist()]
            words = {"raw": raw, "name": "" if raw else name, "legend": len(legend)}
            series.append({**style, "x": line.iterations.tolist(), "y": values, **words})
        legend.append({**style, "name": name})
    title = {"title": chart.title, "unit": chart.unit, "log": chart.log, "wide": chart.wide}
    return {**title, "series": series, "legend": legend}
