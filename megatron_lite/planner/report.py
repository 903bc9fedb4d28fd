"""Print a run's needs on any machine, without a process group or the device (`--dry_run=1`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_lite.checkpoint.writing import host_copy_bytes
from megatron_lite.config import Config, DistributedConfig, changed
from megatron_lite.config.values import counted
from megatron_lite.distributed.traffic import KINDS
from megatron_lite.errors import EXIT_DONE, UsageError
from megatron_lite.kernels.expert_exchange import PLANNED_LOAD
from megatron_lite.model.gpt import active_numel
from megatron_lite.monitor.schedule_picture import DrawnStep
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.auto import device_memory_bytes, resolve_auto
from megatron_lite.planner.devices import (
    DEFAULT_GPU,
    GIB,
    MIB,
    PLANNED_GPU_BYTES,
    gpu_of,
    planned_type,
)
from megatron_lite.planner.plan import Plan, make_plan
from megatron_lite.planner.recommendation import recommendation, smallest_world, wrapped
from megatron_lite.planner.search import Changes, Search, recommended
from megatron_lite.planner.stage_costs import Saved
from megatron_lite.run import exit_status
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.validation import resolve
from megatron_lite.validation.rules import Note
from megatron_lite.validation.warnings import warnings
from megatron_lite.zero.stage import Stage


def dry_run(
    config: Config,
    asked: Config,
    world_size: int,
    notes: Sequence[Note],
    argv: Sequence[str],
    prints: bool,
) -> int:
    """Plan a resolved configuration for `world_size` ranks, print the plan if `prints`, and return
    the exit code.

    The plan ends with layouts that fit and a command that runs the best one.

    asked: `config` as typed. notes, argv: the command line's notes and words.

    Raises:
        UsageError: if a pattern of --freeze or --lr_scales matches nothing, or a tensor is too
        large to address.
    """
    device_type = planned_type(config.distributed)
    memory, _ = planned_memory(config.distributed, world_size)
    search = Search(asked, config.batch.batch_size, world_size, device_type, memory)
    changes = Changes()
    try:
        if asked.distributed.world_size == "auto":
            search = smallest_world(dataclasses.replace(search, world_size=search.together))
            config, changes = _asked_or_recommended(search, config)
        config, choices = resolve_auto(config, search.world_size, device_type, memory, search.nodes)
        plan = make_plan(config, search.world_size, device_type)
        answer = recommendation(plan, changes, search, argv)
    except (
        RuntimeError,
        OverflowError,
    ) as error:  # a tensor above 2**63 bytes, even on the meta device
        raise UsageError(
            f"--dry_run=1: {error}; write smaller sizes (--hidden_size, --vocab_size ...)"
        ) from error
    if prints:
        more = wrapped(*notes, *(Note(text, is_warning=True) for text in warnings(config)))
        exit_status.print_page("\n".join([*describe(plan, memory, choices), *more, *answer]))
    return EXIT_DONE


def _asked_or_recommended(search: Search, config: Config) -> tuple[Config, Changes]:
    """Return the options and their changes: the requested ones if they fit the search's ranks,
    otherwise the recommended ones.

    config: resolved for another number of ranks.
    """
    changes = {**search.wide, "batch_size": search.batch_size}
    if (search.needed_bytes(changes) or math.inf) <= search.usable_bytes:
        return resolve(changed(search.asked, changes), search.world_size, nodes=0), changes
    best = recommended(search.layouts, search.resolved(changes) or config, search.usable_bytes)
    return best.config, best.changes


def planned_memory(distributed: DistributedConfig, world_size: int) -> tuple[int, str]:
    """Return the planned device's bytes, and the source of the number."""
    if distributed.device_memory_gib is not None:
        return int(distributed.device_memory_gib * GIB), "--device_memory_gib"
    if planned_type(distributed) == "cpu":
        return device_memory_bytes(
            torch.device("cpu"), world_size
        ), "a rank's share of this machine's memory"
    size, name = gpu_of(distributed).memory_bytes, distributed.gpu or DEFAULT_GPU
    return (
        size,
        "what torch reports of a GPU of 80 GB" if size == PLANNED_GPU_BYTES else f"those of {name}",
    )


def describe(plan: Plan, device_bytes: int, choices: Sequence[Note]) -> list[str]:
    """Return the lines that a dry run prints."""
    distributed = plan.config.distributed
    if plan.device_type == "cuda":
        name = distributed.gpu or DEFAULT_GPU
        ranks = f"{counted(plan.world_size, 'GPU')} ({name}), {device_bytes / GIB:.1f} GiB each"
    else:
        ranks = f"{counted(plan.world_size, 'rank')} on CPU, {device_bytes / GIB:.1f} GiB each"
    return [
        f"dry run for {ranks} (--device={distributed.device}), {distributed.training_dtype}; numbers are per rank",
        *wrapped(*choices),
        *_model(plan),
        *_batch(plan),
        *_state(plan),
        *_activations(plan, device_bytes),
        *_host(plan),
        *_traffic(plan),
    ]


def _title(name: str, *columns: str) -> str:
    return f"{name:<28}" + "".join(f" {column:>20}" for column in columns)


def _row(name: str, *cells: str) -> str:
    return _title("  " + name, *cells)


def _mib(size: float) -> str:
    return f"{size / MIB:,.2f}"


def _model(plan: Plan) -> Iterator[str]:
    """Yield parameter counts and one row per series of equal stages."""
    model, options = plan.model, plan.config.multi_stage
    total, frozen = model.num_parameters, model.num_frozen
    yield f"parameters: {total:,} ({total - frozen:,} trainable, {frozen:,} frozen)"
    if plan.config.model.num_experts > 1:
        active = active_numel(
            ((spec.name, spec.numel) for spec in model.specs() if not spec.is_state),
            plan.config.model,
        )
        yield f"active parameters: {active:,} for each token"
    weights, gradients = model.memory.buffer_counts()
    yield (
        f"{counted(len(model.stages), 'stage')}, {counted(weights, 'weight buffer')}, "
        f"{counted(gradients, 'gradient buffer')} (zero_stage {options.zero_stage}, "
        f"layers_per_stage {options.layers_per_stage:g})"
    )
    several, drawn = model.ranks.world_size > 1, plan.config.run.debug_schedule
    if several or drawn:
        step = DrawnStep(plan.order, plan.config.batch)
        if several:
            yield f"of pipeline rank {model.ranks.rank}, which needs the most memory; {step.describe()}"
        yield from step.lines() if drawn else ()
    yield _title("stages", "layers each", "elements each", "with padding", "weights each, MiB")
    for _, run in itertools.groupby(model.stages, key=functools.partial(_shape, plan)):
        yield _stage_row(plan, list(run))


def _shape(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Return a key: consecutive stages with equal keys share a row; the two ends remain
    separate."""
    in_the_middle = 0 < stage.index < len(plan.model.all_stages) - 1
    # differs between chunks of a pipeline rank
    place = plan.model.stages.index(stage) - stage.index
    return in_the_middle, place, len(stage.layers), _elements(stage), stage.numel, stage.grad_numel


def _elements(stage: Stage) -> int:
    return sum(slot.numel for part in stage.parts for slot in part.layout.slots)


def _stage_row(plan: Plan, run: Sequence[Stage]) -> str:
    names = [str(layer.name) for stage in run for layer in stage.layers]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]}"
    size = run[0].numel * plan.model.precision.training.itemsize
    return _row(
        name, str(len(run[0].layers)), f"{_elements(run[0]):,}", f"{run[0].numel:,}", _mib(size)
    )


def _batch(plan: Plan) -> Iterator[str]:
    """Describe the planned batch: the largest of a schedule."""
    batch, training = plan.config.batch, plan.config.training
    iterations, tokens = training.train_iters, batch.batch_size * batch.sequence_length
    ranks, tensor = plan.model.group.world_size, plan.model.tensor.world_size
    padding = batch.micro_batch_size * batch.sequential_micro_batches * ranks - batch.batch_size
    groups = (
        counted(ranks, "rank")
        if tensor == 1
        else f"{counted(ranks, 'group')} of {tensor} tensor-parallel ranks"
    )
    yield (
        f"{'largest batch' if batch.batch_size_schedule else 'batch'}: {batch.batch_size:,} samples = "
        f"{batch.micro_batch_size:,} per micro-batch x {batch.depth_first_micro_batches:,} depth-first x "
        f"{batch.breadth_first_micro_batches:,} breadth-first x {groups}"
        + (f" - {padding:,} padding" if padding else "")
    )
    in_all = f"{batch_schedule(batch).consumed_tokens(iterations):,} tokens in {counted(iterations, 'iteration')}"
    if not iterations:
        in_all = "--train_iters=0 trains nothing: the plan below is for a run that trains"
    yield f"  {tokens:,} tokens per iteration, {batch.sequence_length:,} per sample; {in_all}"
    if batch.batch_size_schedule:
        yield f"  schedule (iterations done:samples per iteration from there on): {' '.join(batch.batch_size_schedule)}"
    if batch.eval_micro_batch_size and (training.validation_iters or training.test_iters):
        yield f"  {batch.eval_micro_batch_size:,} samples per micro-batch of a validation"
    if training.sample_interval is not None:
        yield (
            f"  samples (--sample_interval) keep up to {_cache_bytes(plan):,} bytes of keys and values per text of "
            f"{batch.sequence_length:,} tokens, 8 texts at a time"
        )


def _cache_bytes(plan: Plan) -> int:
    """Return the bytes of the keys and values of the longest text, in all blocks."""
    model, length = plan.config.model, plan.config.batch.sequence_length
    tokens = sum(min(window or length, length) for window in model.windows)
    key_heads = max(1, model.head_groups // plan.model.tensor.world_size)
    itemsize = DTYPES[plan.config.distributed.training_dtype].itemsize
    return 2 * tokens * key_heads * model.kv_channels * itemsize


def _state(plan: Plan) -> Iterator[str]:
    rows = [row for row in plan.model.memory.table() if row.bytes]
    yield _title("state", "count", "bytes", "MiB")
    for row in rows:
        yield _row(row.kind, f"{row.count:,}", f"{row.bytes:,}", _mib(row.bytes))
    yield _row(
        "total",
        f"{sum(row.count for row in rows):,}",
        f"{plan.state_bytes:,}",
        _mib(plan.state_bytes),
    )


def _activations(plan: Plan, device_bytes: int) -> Iterator[str]:
    """Yield the activation table: one column per recompute level, in MiB; a block's saved tensors
    by kind."""
    chosen = plan.config.performance.mlp_recompute_level
    levels = list(plan.activations.values())
    blocks = [max(level.saved[1:-1], key=Saved.total) for level in levels]
    held = counted(plan.config.batch.breadth_first_micro_batches or 1, "micro-batch")
    needed = [plan.needed_bytes(level.level) for level in levels]
    yield _title(
        "activations, MiB, at level", *(_level_title(level.level, chosen) for level in levels)
    )
    for kind in blocks[0]:
        yield _row(kind, *(_mib(block.get(kind, 0)) for block in blocks))
    yield _row("one block, one micro-batch", *(_mib(block.total()) for block in blocks))
    if recomputed := plan.config.performance.recompute_layers:
        inputs = (_mib(level.saved[recomputed].total()) for level in levels)
        yield _row(f"each of the first {recomputed:,}", *inputs)
    yield _row(f"all layers, {held}", *(_mib(level.held) for level in levels))
    yield _row("peak", *(_mib(level.peak) for level in levels))
    yield _row("  reached in", *(level.peak_at for level in levels))
    yield _row("peak with state", *(_mib(plan.peak_bytes(level.level)) for level in levels))
    for name, size in plan.runtime.items():
        yield _row(name, *[_mib(size)] * len(levels))
    yield _row("needed", *map(_mib, needed))
    fits = (
        "fits" if size <= device_bytes else f"{(size - device_bytes) / GIB:,.1f} GiB too much"
        for size in needed
    )
    yield _row(f"of {_mib(device_bytes)}", *fits)
    _, origin = planned_memory(plan.config.distributed, plan.world_size)
    yield f"  * --mlp_recompute_level={chosen}; {device_bytes / GIB:.1f} GiB are {origin}"
    if (ranks := plan.config.distributed.expert_parallel) > 1:
        yield (
            f"  experts get up to {PLANNED_LOAD} times the mean number of tokens on a rank; one of {ranks} that gets "
            "more needs more"
        )


def _level_title(level: str, chosen: str) -> str:
    """Return a column title. Levels by block are printed below the table; their column shows the
    largest block."""
    return ("by block" if "," in level else level) + " *" * (level == chosen)


def _host(plan: Plan) -> Iterator[str]:
    """Yield rows for the mirror and, on a GPU, for the host memory of asynchronous checkpoints (on
    a CPU in another table)."""
    if (mirror := plan.config.checkpoint.mirror) is not None:
        yield f"mirror: {mirror} gets checkpoints and exports; a start restores from there what is missing here"
    copy = host_copy_bytes(plan.config, plan.model)
    if copy and plan.device_type == "cuda":
        yield f"host memory of each rank for --async_checkpoint=1: {copy:,} bytes, {copy / GIB:,.2f} GiB"


def _traffic(plan: Plan) -> Iterator[str]:
    if not plan.traffic:
        yield "traffic: none with one rank"
        return
    yield _title("traffic per step", "collectives", "elements", "MiB", "sent per rank, MiB")
    for kind, total in sorted(plan.traffic.items()):
        sizes = (_mib(total.bytes), _mib(total.wire_bytes))
        yield _row(KINDS[kind], f"{total.collectives:,}", f"{total.elements:,}", *sizes)
