"""Options that save memory, for a run that ran out of it: each alone with its saving, and the fastest combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_lite.config import RECOMPUTE_LEVELS, Config
from megatron_lite.config.values import written
from megatron_lite.errors import Remedy
from megatron_lite.planner.runtime import GIB
from megatron_lite.planner.search import TENSOR, TENSOR_PARALLEL, Changes, Search, divisors, fewest_changes, recommended

# The share of the plan that an option must save: a run that ran out of memory needs more than a trifle.
SMALLEST_SAVING = 0.002
# The combination of options that is advised needs at most this share of the plan of the run.
ADVISED_SHARE = 0.9


def remedies(search: Search) -> list[Remedy]:
    """Return the options that save memory, each applied alone, found in time: the least costly in speed come first."""
    config, needed = search.resolved({}), search.needed_bytes({})
    if config is None or needed is None:
        return []
    found: list[Remedy] = []
    for name, changes in _single_options(search, config):
        if search.is_over:
            return found
        saving = needed - (search.needed_bytes(changes) or needed)
        if saving >= SMALLEST_SAVING * needed:
            value = changes[name] if type(changes[name]) is int else written(changes[name])
            found.append(Remedy(name, value, saving, flags(changes)))
    for ranks in search.larger_sizes()[:1]:
        saving = needed - (dataclasses.replace(search, world_size=ranks).needed_bytes({}) or needed)
        if saving >= SMALLEST_SAVING * needed:
            found.append(Remedy("world_size", ranks, saving, ""))
    return found


def less_memory(search: Search) -> str:
    """Return what to append to a command that ran out of memory, although its plan may fit: "" if nothing helps."""
    if (needed := search.needed_bytes({})) is None:
        return ""
    limit = min(search.device_bytes, int(needed * ADVISED_SHARE))
    smaller = dataclasses.replace(search, device_bytes=limit)
    if not smaller.layouts:
        return ""
    config = search.resolved({})
    assert config is not None, "planned"
    best = recommended(smaller.layouts, config)
    planned = f"{best.plan.needed_bytes() / GIB:,.1f} GiB instead of {needed / GIB:,.1f} GiB"
    return f"to plan {planned}, append {flags(fewest_changes(search.asked, best))}"


def flags(changes: Changes) -> str:
    """Return changed options as a user types them."""
    return " ".join(f"--{name}={written(value)}" for name, value in changes.items())


def _single_options(search: Search, config: Config) -> Iterator[tuple[str, Changes]]:
    """Yield an option that saves memory, and all changes that it takes. config: of the run, resolved."""
    asked, batch, stages = search.asked, config.batch, search.asked.multi_stage
    assert batch.micro_batch_size and isinstance(config.multi_stage.zero_stage, int), "resolved"
    # The batch stays, also where it followed from the micro-batches; their order follows again.
    given = asked.batch.batch_size or asked.batch.batch_size_schedule
    order = ("depth_first_micro_batches", "sequential_micro_batches")
    same_batch: Changes = {} if given else {"batch_size": search.batch_size}
    same_batch.update({name: None for name in order if getattr(asked.batch, name)})
    for size in [size for size in divisors(search.share) if size <= batch.micro_batch_size // 2][-1:]:
        yield "micro_batch_size", {**same_batch, "micro_batch_size": size}
    if (asked.batch.breadth_first_micro_batches or 1) > 1:
        yield "breadth_first_micro_batches", {**same_batch, "breadth_first_micro_batches": None}
    if asked.batch.eval_micro_batch_size is not None:
        yield "eval_micro_batch_size", {"eval_micro_batch_size": None}
    blocks = config.model.num_layers
    present = {RECOMPUTE_LEVELS.index(level) for level in config.performance.mlp_levels(blocks)}
    for level in RECOMPUTE_LEVELS[max(min(present) + 1, max(present)) :]:
        yield "mlp_recompute_level", {"mlp_recompute_level": level}
    if config.performance.recompute_layers < blocks:
        yield "recompute_layers", {"recompute_layers": blocks}
    buffers = {name: None for name in ("num_weight_buffers", "num_grad_buffers") if (getattr(stages, name) or 0) > 2}
    for zero_stage in range(config.multi_stage.zero_stage + 1, 4):
        yield "zero_stage", {"zero_stage": zero_stage, **buffers}
    for size in TENSOR_PARALLEL:
        if size > search.tensor_parallel and search.world_size % size == 0:
            tensor = dict(zip(TENSOR, (size, True), strict=True))
            yield "tensor_parallel", {**tensor, **same_batch, "micro_batch_size": batch.micro_batch_size}
            break
    if config.distributed.training_dtype == "bf16" and not stages.split_master_weights:
        yield "split_master_weights", {"split_master_weights": True}
