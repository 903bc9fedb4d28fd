"""Cross-checks between options, and derived values.

`resolve` returns a configuration with every derivable value filled in, or reports all
contradictions together, each with the flags, their values, the rule and the fix.
"""

from __future__ import annotations

from megatron_lite.config import Config, Draft, Options, flatten, unflatten
from megatron_lite.config.dimensions import ranks_per_sample
from megatron_lite.config.other_programs import refused_value
from megatron_lite.config.values import FLAGS, BadValueError, check_bounds, written
from megatron_lite.errors import UsageError
from megatron_lite.validation import areas
from megatron_lite.validation.batch import BATCH as BATCH
from megatron_lite.validation.batch import batch
from megatron_lite.validation.learning_rate import learning_rate
from megatron_lite.validation.rules import Problem, Problems, declared, reported
from megatron_lite.validation.sizes import (
    data_parallel_shard,
    data_ranks,
    expert_parallel,
    pipeline_parallel,
    sizes,
    tensor_parallel,
)
from megatron_lite.validation.warnings import warnings as warnings


def resolve(config: Config, world_size: int, nodes: int = 1) -> Config:
    """Check every option, individually and against the others, and fill in every derived value.

    Resolving it again for the same world size changes nothing. nodes: machines; 0: unknown.

    Raises:
        UsageError: with one line per problem.
    """
    resolved, problems = examine(config, world_size, nodes)
    if problems:
        raise UsageError("\n".join(problem.message for problem in problems))
    return resolved


def planned_world_size(config: Config, launched: int) -> int:
    """Return the number of ranks to resolve a configuration for: launched, or planned by a dry
    run."""
    distributed = config.distributed
    planned = distributed.world_size if distributed.dry_run else None
    return ranks_per_sample(distributed) if planned == "auto" else planned or launched


def examine(config: Config, world_size: int, nodes: int = 1) -> tuple[Config, list[Problem]]:
    """Return the result of `resolve` and the problems; if there are any, the configuration is only
    partly resolved."""
    assert world_size >= 1, world_size
    draft = Draft(**flatten(config))
    problems = reported(draft, _check_each(draft))
    if not problems:  # the rules rely on each value being sound
        problems = reported(draft, _cross_check(draft, world_size, nodes))
    return unflatten(vars(draft)), problems


# Options whose defaults depend on each other.
IN_ORDER = (
    ("norm_placement", "hybrid_norm"),
    ("rotary_base", "rotary_embedding_scale"),
    (
        "moe_router_bias_update_rate",
        "moe_router_choice_bias",
        "expert_auxiliary_loss_coefficient",
    ),
)


def defaults(config: Config) -> Options:
    """Return each option's value in a resolved configuration if only that option were unset.

    The batch options depend on each other, so each is derived from the preceding ones; so are others.
    """
    values, orders = flatten(config), ((*BATCH[:2], *sorted(BATCH[2:])), *IN_ORDER)
    found = {flag.name: flag.default for flag in FLAGS.values()}
    sizes = [
        values[name] for name in ("batch_size", "micro_batch_size", "sequential_micro_batches")
    ]
    ranks = -(-sizes[0] // (sizes[1] * sizes[2])) if None not in sizes else 1
    for name, default in list(found.items()):
        if default is None and values[name] is not None:
            order = next((order for order in orders if name in order), (name,))
            draft = Draft(**values | dict.fromkeys(order[order.index(name) :]))
            list(_cross_check(draft, ranks * ranks_per_sample(config.distributed)))
            found[name] = getattr(draft, name)
    return found


def _check_each(draft: Draft) -> Problems:
    """Check bounds and choices, because a configuration created in Python bypasses the command
    line."""
    for name in draft.changed(*FLAGS):
        try:
            check_bounds(FLAGS[name], getattr(draft, name))
        except BadValueError as error:
            yield name, refused_value(name, written(getattr(draft, name))) or str(error)


def _cross_check(draft: Draft, world_size: int, nodes: int = 1) -> Problems:
    """Apply every rule, and derive values. Buffer counts and loss chunks depend on the device, and
    come later."""
    yield from areas.source(draft)
    yield from areas.model(draft)
    yield from areas.performance(draft)
    yield from tensor_parallel(draft, world_size)
    yield from pipeline_parallel(draft, world_size)
    yield from data_parallel_shard(draft, world_size, nodes)
    yield from expert_parallel(draft, world_size)
    yield from batch(draft, data_ranks(draft, world_size))
    yield from areas.length(draft)
    yield from learning_rate(draft)
    yield from areas.update(draft)
    yield from areas.multi_stage(draft)
    yield from areas.profiles(draft, world_size)
    yield from areas.data(draft)
    yield from areas.files(draft)
    areas.tracking(draft)
    yield from sizes(draft)
    yield from declared(draft)
