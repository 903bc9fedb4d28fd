"""Two runs side by side: how configuration, losses, speed and memory differ, as numbers.

Losses are compared where both runs logged the same iteration, speeds by their medians, because a stall of the machine
says nothing about the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.config import unflatten
from megatron_lite.config.values import FLAGS, abridged
from megatron_lite.reports.watched_run import Curve, Metrics
from megatron_lite.validation import defaults

# Options that name a run; they differ between any two.
NAMES_OF_A_RUN = ("experiment_dir", "experiment_name", "wandb_id")
LOSSES = ("loss", "averaged_loss")
LOSS_OF_A_DATA_SET = "loss/"
SPEED = "tokens_per_sec_per_gpu"
SPEEDS = {"tokens_per_sec": "tokens/s", SPEED: "tokens/s per rank"}
SPEEDS |= {"step_time_ms": "step, ms", "data_wait_ms": "data wait, ms", "mfu": "MFU"}
MEMORY = {"max_allocated_mib": "allocated, MiB", "max_reserved_mib": "reserved, MiB"}


class OptionDifference(NamedTuple):
    """An option that differs between two runs, with both values as text."""

    name: str
    first: str
    second: str


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
        """Return the largest difference and its iteration; NaN and 0 without an iteration in common."""
        if not len(self.differences):
            return math.nan, 0
        place = int(self.differences.values.argmax())
        return float(self.differences.values[place]), int(self.differences.iterations[place])


class NumberDifference(NamedTuple):
    """A metric of two runs; NaN if a run lacks it."""

    label: str
    first: float
    second: float

    @property
    def change(self) -> float:
        """Return the relative increase from first to second; NaN if a run lacks the metric."""
        return self.second / self.first - 1 if self.first else math.nan


def compare_options(first: dict[str, Any], second: dict[str, Any]) -> list[OptionDifference]:
    """Return the options that differ between two config.json files, in file order."""
    one, other = usual_values(first), usual_values(second)
    return [
        OptionDifference(name, option_text(first, one, name), option_text(second, other, name))
        for name in dict.fromkeys([*first, *second])
        if name not in NAMES_OF_A_RUN
        if (first.get(name), name in first) != (second.get(name), name in second)
    ]


def usual_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return what each option of a config.json would be if it had not been given, as in JSON; nothing if damaged."""
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items() if name in FLAGS}
    try:
        usual = defaults(unflatten(read)).items()
    except Exception:  # the file may hold anything
        return {}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in usual}


def option_text(config: dict[str, Any], usual: dict[str, Any], name: str) -> str:
    """Return the value of an option as text; "(derived)" follows one that the other options imply."""
    if name not in config:
        return "(absent)"
    value = config[name]
    if value is None or value == []:
        return "(none)"
    derived = name in FLAGS and FLAGS[name].default is None and value == usual.get(name)
    return abridged(tuple(map(str, value)) if isinstance(value, list) else value) + " (derived)" * derived


def compare_losses(first: Metrics, second: Metrics) -> Iterator[LossDifference]:
    """Yield every loss that both runs logged."""
    for phase in first.phases():
        for name in first.names(phase):
            one, other = first.curve(phase, name), second.curve(phase, name)
            if (name in LOSSES or name.startswith(LOSS_OF_A_DATA_SET)) and len(one) and len(other):
                common, *places = np.intersect1d(one.iterations, other.iterations, return_indices=True)
                relative = relative_differences(one.values[places[0]], other.values[places[1]])
                yield LossDifference(f"{phase} {name}", one, other, Curve(common, relative))


def relative_differences(first: Any, second: Any) -> Any:
    """Return |second - first| / |first|, (n,): 0 if both are equal or not finite, infinity if only one is finite."""
    both_lost = ~np.isfinite(first) & ~np.isfinite(second)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(second - first) / np.abs(first)
    return np.where((first == second) | both_lost, 0.0, np.where(np.isfinite(relative), relative, np.inf))


def compare_numbers(
    labels: Mapping[str, str], measure: Callable[[Metrics, str], float], *runs: Metrics
) -> Iterator[NumberDifference]:
    """Yield the metrics that a run has. labels: by name in metrics.jsonl."""
    for name, label in labels.items():
        first, second = (measure(run, name) for run in runs)
        if not (math.isnan(first) and math.isnan(second)):
            yield NumberDifference(label, first, second)


def peak(run: Metrics, name: str) -> float:
    """Return the largest value of a training metric; NaN if absent."""
    values = run.curve("training", name).finite().values
    return float(values.max()) if len(values) else math.nan


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
