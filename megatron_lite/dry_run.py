"""`--dry_run=1`: what a run would need, printed on any machine. No process group, no device, no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from megatron_lite import exits
from megatron_lite.automatic import GIB, MIB, RESERVE, Note, device_memory_bytes, resolve_auto
from megatron_lite.cautions import warnings
from megatron_lite.config import Config
from megatron_lite.errors import EXIT_DONE
from megatron_lite.planning import Plan, make_plan

# What A100 and H100 cards of 80 GB report, rounded down. A dry run looks at no device.
PLANNED_GPU_BYTES = 79 * GIB


def dry_run(config: Config, world_size: int, notes: Sequence[str]) -> int:
    """Print the plan of a resolved configuration for `world_size` ranks; returns the exit code.

    `notes` are warnings of the command line. `--device=auto` plans for GPUs.

    Raises:
        UsageError: if a pattern of --freeze or --lr_scales matches nothing.
    """
    device_type = "cpu" if config.distributed.device == "cpu" else "cuda"
    on_gpu = device_type == "cuda"
    memory = PLANNED_GPU_BYTES if on_gpu else device_memory_bytes(torch.device("cpu"), world_size)
    multi_stage, choices = resolve_auto(config, world_size, device_type, memory)
    plan = make_plan(dataclasses.replace(config, multi_stage=multi_stage), world_size, device_type)
    cautions = [f"WARNING {text}" for text in (*notes, *warnings(config))]
    exits.print_page("\n".join([*describe(plan, memory, choices), *cautions]))
    return EXIT_DONE


def describe(plan: Plan, device_bytes: int, choices: Sequence[Note]) -> list[str]:
    """The page that a dry run prints."""
    kind = "80 GB GPUs" if plan.device_type == "cuda" else "CPU"
    ranks = f"{plan.world_size:,} rank{'s' if plan.world_size > 1 else ''}"
    return [
        f"dry run: {ranks} on {kind}, {plan.config.distributed.training_dtype}; numbers are those of each rank",
        *_model(plan),
        *(f"  {'WARNING ' if choice.is_warning else ''}{choice.text}" for choice in choices),
        *_batch(plan),
        *_state(plan),
        *_activations(plan, device_bytes),
        *_traffic(plan),
    ]


def _title(name: str, *columns: str) -> str:
    return f"{name:<26}" + "".join(f"{column:>18}" for column in columns)


def _row(name: str, *cells: str) -> str:
    return f"{'  ' + name:<26}" + "".join(f"{cell:>18}" for cell in cells)


def _mib(size: float) -> str:
    return f"{size / MIB:,.2f}"


def _model(plan: Plan) -> Iterator[str]:
    """Parameters, and stages in runs of equal ones."""
    model = plan.model
    frozen = sum(slot.numel for _, part in model.parts() if part.frozen for slot in part.layout.slots)
    total = model.num_parameters
    yield f"parameters: {total:,} ({total - frozen:,} trainable, {frozen:,} frozen)"
    weights, gradients = model.buffer_counts()
    yield _title("stages", "elements", "padded", "weights, MiB")
    run: list[int] = []
    for stage in [*model.stages, None]:
        if run and (stage is None or _shape(plan, stage.index) != _shape(plan, run[0])):
            yield _stage_row(plan, run)
            run = []
        if stage is not None:
            run.append(stage.index)
    yield (
        f"  {len(model.stages)} stages, {weights} weight buffer{_s(weights)}, {gradients} gradient buffer{_s(gradients)} "
        f"(zero_stage {plan.config.multi_stage.zero_stage}, layers_per_stage {plan.config.multi_stage.layers_per_stage:g})"
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _shape(plan: Plan, index: int) -> tuple[int, ...]:
    """What makes stages alike: kind and number of layers, sizes."""
    stage = plan.model.stages[index]
    ends = 0 < index < len(plan.model.stages) - 1
    return ends, len(stage.layers), _elements(plan, index), stage.numel, stage.grad_numel


def _elements(plan: Plan, index: int) -> int:
    return sum(slot.numel for part in plan.model.stages[index].parts for slot in part.layout.slots)


def _stage_row(plan: Plan, run: Sequence[int]) -> str:
    stages = [plan.model.stages[index] for index in run]
    layers = [str(layer.name) for stage in stages for layer in stage.layers]
    name = layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1].rpartition('.')[2]}"
    each = f" ({len(run)} x {len(stages[0].layers)})" if len(layers) > 1 else ""
    padded = stages[0].numel
    itemsize = plan.model.precision.training.itemsize
    return _row(name + each, f"{_elements(plan, run[0]):,}", f"{padded:,}", _mib(padded * itemsize))


def _batch(plan: Plan) -> Iterator[str]:
    batch, iterations = plan.config.batch, plan.config.training.train_iters
    assert batch.batch_size is not None
    tokens = batch.batch_size * batch.sequence_length
    yield (
        f"batch: {batch.batch_size:,} samples = micro_batch_size {batch.micro_batch_size:,} x depth-first "
        f"{batch.depth_first_micro_batches:,} x breadth-first {batch.breadth_first_micro_batches:,} x ranks "
        f"{plan.world_size:,}"
    )
    yield f"  {tokens:,} tokens an iteration of {batch.sequence_length:,} a sample"
    if iterations:
        yield f"  {tokens * iterations:,} tokens in {iterations:,} iterations"
    else:
        yield "  --train_iters=0: such a run would only evaluate; these are the numbers of training"


def _state(plan: Plan) -> Iterator[str]:
    rows = [row for row in plan.model.memory_table() if row.bytes]
    yield _title("state", "count", "bytes", "MiB")
    for row in rows:
        yield _row(row.kind, f"{row.count:,}", f"{row.bytes:,}", _mib(row.bytes))
    yield _row("in all", f"{sum(row.count for row in rows):,}", f"{plan.state_bytes:,}", _mib(plan.state_bytes))


def _activations(plan: Plan, device_bytes: int) -> Iterator[str]:
    """One column for each level of recomputation, in MiB."""
    chosen = plan.config.model.mlp_recompute_level
    levels = list(plan.activations.values())
    breadth = plan.config.batch.breadth_first_micro_batches or 1
    usable = int(device_bytes * (1 - RESERVE))
    yield _title(
        "activations, MiB", *(f"{level.level}{' (chosen)' if level.level == chosen else ''}" for level in levels)
    )
    yield _row("a block, a micro-batch", *(_mib(max(kept.total for kept in level.kept[1:-1])) for level in levels))
    yield _row(f"held, {breadth} micro-batch{'es' if breadth > 1 else ''}", *(_mib(level.held) for level in levels))
    yield _row("and for a moment", *(_mib(level.peak - level.held) for level in levels))
    yield _row("in", *(level.peak_at for level in levels))
    peaks = [plan.peak_bytes(level.level) for level in levels]
    yield _row("with the state: peak", *(_mib(peak) for peak in peaks))
    yield _row(
        f"of {_mib(usable)} usable", *("fits" if peak <= usable else f"over by {_mib(peak - usable)}" for peak in peaks)
    )


def _traffic(plan: Plan) -> Iterator[str]:
    yield _title("traffic of a step", "collectives", "elements", "MiB", "MiB sent by a rank")
    for kind, total in sorted(plan.traffic.items()):
        yield _row(f"{kind}s", f"{total.collectives:,}", f"{total.elements:,}", _mib(total.bytes), _mib(total.wire_bytes))
    if not plan.traffic:
        yield "  none: one rank"
