"""Two runs side by side: how configuration, losses, speed and memory differ, as numbers.

Losses are compared where both runs logged the same iteration, speeds by their medians, because a stall of the machine
says nothing about the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.config.values import abridged
from megatron_lite.reports.series import Curve, Metrics

# Options that name a run; they differ between any two.
NAMES_OF_A_RUN = ("experiment_dir", "experiment_name", "wandb_id")
LOSSES = ("loss", "averaged_loss")
LOSS_OF_A_DATA_SET = "loss/"
SPEED = "tokens_per_sec_per_gpu"


class OptionDifference(NamedTuple):
    """An option that differs between two runs, with both values as text."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class LossDifference:
    """A loss of two runs. Differences are |second - first| / |first|; infinite where only one loss is a number."""

    phase: str
    name: str
    first: float  # the last one of the run
    second: float
    first_iteration: int  # of the last one
    second_iteration: int
    common: int  # iterations that both runs logged; with none, the numbers below are NaN
    median: float
    largest: float
    largest_iteration: int

    @property
    def label(self) -> str:
        """Return the name for readers: training loss, validation averaged_loss."""
        return f"{self.phase} {self.name}"


class NumberDifference(NamedTuple):
    """A metric of two runs; NaN if a run lacks it."""

    name: str  # in metrics.jsonl
    first: float
    second: float

    @property
    def change(self) -> float:
        """Return the relative increase from first to second; NaN if a run lacks the metric."""
        return self.second / self.first - 1 if self.first else math.nan


def compare_options(first: dict[str, Any], second: dict[str, Any]) -> list[OptionDifference]:
    """Return the options that differ between two config.json files, in file order."""
    names = [*first, *(name for name in second if name not in first)]
    texts = [(name, _text(first, name), _text(second, name)) for name in names if name not in NAMES_OF_A_RUN]
    return [
        OptionDifference(name, one, other)
        for name, one, other in texts
        if (first.get(name), name in first) != (second.get(name), name in second)
    ]


def _text(config: dict[str, Any], name: str) -> str:
    if name not in config:
        return "(absent)"
    value = config[name]
    if isinstance(value, list):
        value = tuple(map(str, value))
    return "(none)" if value in (None, ()) else abridged(value)


def compare_losses(first: Metrics, second: Metrics) -> Iterator[LossDifference]:
    """Yield every loss that both runs logged."""
    for phase in first.phases():
        for name in first.names(phase):
            one, other = first.curve(phase, name), second.curve(phase, name)
            if (name in LOSSES or name.startswith(LOSS_OF_A_DATA_SET)) and len(one) and len(other):
                yield _compare_curves(phase, name, one, other)


def _compare_curves(phase: str, name: str, one: Curve, other: Curve) -> LossDifference:
    common, places, other_places = np.intersect1d(one.iterations, other.iterations, return_indices=True)
    relative = relative_differences(one.values[places], other.values[other_places])
    worst = int(relative.argmax()) if len(common) else 0
    return LossDifference(
        phase,
        name,
        float(one.values[-1]),
        float(other.values[-1]),
        int(one.iterations[-1]),
        int(other.iterations[-1]),
        len(common),
        float(np.median(relative)) if len(common) else math.nan,
        float(relative[worst]) if len(common) else math.nan,
        int(common[worst]) if len(common) else 0,
    )


def relative_differences(first: Any, second: Any) -> Any:
    """Return |second - first| / |first|, (n,): 0 if both are equal or not finite, infinity if only one is finite."""
    both_lost = ~np.isfinite(first) & ~np.isfinite(second)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(second - first) / np.abs(first)
    return np.where((first == second) | both_lost, 0.0, np.where(np.isfinite(relative), relative, np.inf))


def compare_speeds(first: Metrics, second: Metrics) -> Iterator[NumberDifference]:
    """Yield the medians of speeds and times that a run has."""
    return _compare_numbers((SPEED, "step_time_ms", "data_wait_ms", "mfu"), median_speed, first, second)


def compare_memory(first: Metrics, second: Metrics) -> Iterator[NumberDifference]:
    """Yield the peaks of memory that a run has."""

    def peak(run: Metrics, name: str) -> float:
        values = run.curve("training", name).finite().values
        return float(values.max()) if len(values) else math.nan

    return _compare_numbers(("max_allocated_mib", "max_reserved_mib"), peak, first, second)


def _compare_numbers(
    names: Sequence[str], measure: Callable[[Metrics, str], float], *runs: Metrics
) -> Iterator[NumberDifference]:
    for name in names:
        first, second = (measure(run, name) for run in runs)
        if not (math.isnan(first) and math.isnan(second)):
            yield NumberDifference(name, first, second)


def median_speed(run: Metrics, name: str) -> float:
    """Return the median of a training metric, without the first line of each start if there are others; NaN if absent.

    The first line includes compilation and first allocations.
    """
    curve = run.curve("training", name).finite()
    # The first line of a start may be an evaluation.
    firsts = [int(curve.iterations.searchsorted(start.iteration)) for start in run.starts]
    steady = np.delete(curve.values, [place for place in firsts if place < len(curve)])
    values = steady if len(steady) else curve.values
    return float(np.median(values)) if len(values) else math.nan
