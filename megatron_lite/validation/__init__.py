"""Cross-checks between options, and the values that follow from others.

`resolve` either returns a configuration in which everything that can be known beforehand is filled in, or reports all
contradictions at once, each with the flags, their values, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.foreign_values import REFUSED_VALUES
from megatron_lite.config.structured_values import lr_scale_patterns as lr_scale_patterns
from megatron_lite.config.structured_values import weighted_paths as weighted_paths
from megatron_lite.config.values import FLAGS, BadValueError, check_bounds, written
from megatron_lite.errors import UsageError
from megatron_lite.validation.averaging import averaging
from megatron_lite.validation.batch import BATCH as BATCH
from megatron_lite.validation.batch import batch
from megatron_lite.validation.data import data, training
from megatron_lite.validation.export import export
from megatron_lite.validation.learning_rate import learning_rate
from megatron_lite.validation.messages import Problem, fill, typed
from megatron_lite.validation.model import model, performance
from megatron_lite.validation.optimizer import optimizer
from megatron_lite.validation.samples import samples
from megatron_lite.validation.source import source
from megatron_lite.validation.system import distributed, multi_stage, run
from megatron_lite.validation.warnings import warnings as warnings
from megatron_lite.validation.weight_decay import weight_decay

PREFETCH_FACTOR = 2
RULES = (
    source,
    model,
    batch,
    learning_rate,
    optimizer,
    weight_decay,
    averaging,
    performance,
    multi_stage,
    distributed,
    data,
    training,
    export,
    samples,
    run,
)


def resolve(config: Config, world_size: int) -> Config:
    """Fill in every derived value, and check each option on its own and against the others.

    Resolving a resolved configuration again for the same world size changes nothing.

    Raises:
        UsageError: with one line for every problem.
    """
    resolved, problems = examine(config, world_size)
    if problems:
        raise UsageError("\n".join(problem.message for problem in problems))
    return resolved


def planned_world_size(config: Config, launched: int) -> int:
    """The number of ranks to resolve a configuration for: those that were launched, or those of the dry run."""
    distributed = config.distributed
    return distributed.world_size if distributed.dry_run and distributed.world_size else launched


def examine(config: Config, world_size: int) -> tuple[Config, list[Problem]]:
    """As `resolve`, but returns the problems; with problems, the configuration is only partly resolved."""
    assert world_size >= 1, world_size
    values = flatten(config)
    problems = list(_check_each(values))
    if not problems:  # the rules below rely on each value being sound
        for rule in RULES:
            problems += rule(values, world_size)
        _fill_the_rest(values)
    return unflatten(values), problems


def _check_each(values: dict[str, Any]) -> Iterator[Problem]:
    """Bounds and choices: the command line has been through this, a configuration made in Python has not."""
    for name, value in values.items():
        if value is None and FLAGS[name].optional:
            continue
        try:
            check_bounds(FLAGS[name], value)
        except BadValueError as error:
            reason = REFUSED_VALUES.get((name, written(value)), str(error))
            yield Problem((name,), f"{typed(values, name)}: {reason}")


def _fill_the_rest(values: dict[str, Any]) -> None:
    """Derived values without a rule of their own. Buffer counts and loss chunks depend on stages and device: later."""
    fill(values, "zero_stage", 1)
    if values["num_workers"] > 0:
        fill(values, "prefetch_factor", PREFETCH_FACTOR)
