"""`--dry_run=1`: what a run would need, printed on any machine. No process group, no device, no memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import textwrap
from collections.abc import Iterator, Sequence

import torch

from megatron_lite.config import Config
from megatron_lite.errors import EXIT_DONE, UsageError
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.auto import GIB, MIB, RESERVE, device_memory_bytes, resolve_auto
from megatron_lite.planner.plan import Plan, make_plan
from megatron_lite.run import exit_status
from megatron_lite.schedules.batch_size import consumed_tokens
from megatron_lite.validation.messages import Note
from megatron_lite.validation.warnings import warnings
from megatron_lite.zero.stage import Stage

# What A100 and H100 cards of 80 GB report, rounded down. A dry run looks at no device.
PLANNED_GPU_BYTES = 79 * GIB
WIDTH = 118


def dry_run(config: Config, world_size: int, notes: Sequence[Note], prints: bool) -> int:
    """Print the plan of a resolved configuration for `world_size` ranks, if this process `prints`; the exit code.

    `notes` are those of the command line. `--device=auto` plans for GPUs.

    Raises:
        UsageError: if a pattern of --freeze or --lr_scales matches nothing, or no address reaches to a tensor's end.
    """
    device_type = "cpu" if config.distributed.device == "cpu" else "cuda"
    on_gpu = device_type == "cuda"
    memory = PLANNED_GPU_BYTES if on_gpu else device_memory_bytes(torch.device("cpu"), world_size)
    try:
        multi_stage, choices = resolve_auto(config, world_size, device_type, memory)
        plan = make_plan(dataclasses.replace(config, multi_stage=multi_stage), world_size, device_type)
    except (RuntimeError, OverflowError) as error:  # of a tensor of more than 2**63 bytes, be it on the meta device
        raise UsageError(f"--dry_run=1: {error}; write smaller sizes (--hidden_size, --vocab_size ...)") from error
    cautions = [*notes, *(Note(text, is_warning=True) for text in warnings(config))]
    if prints:
        exit_status.print_page("\n".join([*describe(plan, memory, choices), *_notes(cautions)]))
    return EXIT_DONE


def describe(plan: Plan, device_bytes: int, choices: Sequence[Note]) -> list[str]:
    """The page that a dry run prints."""
    device = "GPU of 80 GB" if plan.device_type == "cuda" else f"rank on CPU, {device_bytes / GIB:.1f} GiB each"
    distributed = plan.config.distributed
    ranks = f"{plan.world_size:,} {device if plan.world_size == 1 else device.replace('GPU', 'GPUs', 1)}"
    ranks = ranks if plan.world_size == 1 else ranks.replace("rank", "ranks", 1)
    return [
        f"dry run for {ranks} (--device={distributed.device}), {distributed.training_dtype}: numbers of each rank",
        *_notes(choices),
        *_model(plan),
        *_batch(plan),
        *_state(plan),
        *_activations(plan, device_bytes),
        *_traffic(plan),
    ]


def _notes(notes: Sequence[Note]) -> Iterator[str]:
    for note in notes:
        text = f"WARNING: {note.text}" if note.is_warning else note.text
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _title(name: str, *columns: str) -> str:
    return f"{name:<28}" + "".join(f" {column:>20}" for column in columns)


def _row(name: str, *cells: str) -> str:
    return _title("  " + name, *cells)


def _mib(size: float) -> str:
    return f"{size / MIB:,.2f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def _model(plan: Plan) -> Iterator[str]:
    """Parameters, and stages in runs of equal ones."""
    model, options = plan.model, plan.config.multi_stage
    frozen = sum(slot.numel for _, part in model.parts() if part.frozen for slot in part.layout.slots)
    total = model.num_parameters
    yield f"parameters: {total:,} ({total - frozen:,} trainable, {frozen:,} frozen)"
    weights, gradients = model.buffer_counts()
    yield (
        f"{_count(len(model.stages), 'stage')}, {_count(weights, 'weight buffer')}, "
        f"{_count(gradients, 'gradient buffer')} (zero_stage {options.zero_stage}, "
        f"layers_per_stage {options.layers_per_stage:g})"
    )
    yield _title("stages", "layers in each", "elements of each", "with padding", "weights of each, MiB")
    for _, run in itertools.groupby(model.stages, key=functools.partial(_shape, plan)):
        yield _stage_row(plan, list(run))


def _shape(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """What makes neighbours alike: being an end or not, the number of layers, sizes."""
    in_the_middle = 0 < stage.index < len(plan.model.stages) - 1
    return in_the_middle, len(stage.layers), _elements(stage), stage.numel, stage.grad_numel


def _elements(stage: Stage) -> int:
    return sum(slot.numel for part in stage.parts for slot in part.layout.slots)


def _stage_row(plan: Plan, run: Sequence[Stage]) -> str:
    names = [str(layer.name) for stage in run for layer in stage.layers]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]}"
    size = run[0].numel * plan.model.precision.training.itemsize
    return _row(name, str(len(run[0].layers)), f"{_elements(run[0]):,}", f"{run[0].numel:,}", _mib(size))


def _batch(plan: Plan) -> Iterator[str]:
    """What the rest of the page is for: of a schedule the largest batch."""
    batch, training = plan.config.batch, plan.config.training
    assert batch.batch_size and batch.micro_batch_size and batch.sequential_micro_batches
    iterations, tokens = training.train_iters, batch.batch_size * batch.sequence_length
    padding = batch.micro_batch_size * batch.sequential_micro_batches * plan.world_size - batch.batch_size
    yield (
        f"{'largest batch' if batch.batch_size_schedule else 'batch'}: {batch.batch_size:,} samples = "
        f"{batch.micro_batch_size:,} in a micro-batch x {batch.depth_first_micro_batches:,} depth-first x "
        f"{batch.breadth_first_micro_batches:,} breadth-first x {_count(plan.world_size, 'rank')}"
        + (f" - {padding:,} of padding" if padding else "")
    )
    yield f"  {tokens:,} tokens an iteration, {batch.sequence_length:,} a sample; " + (
        f"{consumed_tokens(batch, iterations):,} tokens in {_count(iterations, 'iteration')}"
        if iterations
        else "with --train_iters=0 nothing is trained: what follows is for a run that trains"
    )
    if batch.batch_size_schedule:
        yield f"  iterations done and samples of those that follow: {' '.join(batch.batch_size_schedule)}"
    if batch.eval_micro_batch_size and (training.validation_iters or training.test_iters):
        yield f"  {batch.eval_micro_batch_size:,} samples in a micro-batch of a validation"
    if training.sample_interval is not None:
        yield f"  samples (--sample_interval) keep {_kept_of_a_token(plan):,} bytes for each token of 8 texts at a time"


def _kept_of_a_token(plan: Plan) -> int:
    """Bytes of keys and values of one token in all blocks."""
    model, dtype = plan.config.model, DTYPES[plan.config.distributed.training_dtype]
    assert model.head_groups and model.kv_channels
    return 2 * model.num_layers * model.head_groups * model.kv_channels * dtype.itemsize


def _state(plan: Plan) -> Iterator[str]:
    rows = [row for row in plan.model.memory_table() if row.bytes]
    yield _title("state", "count", "bytes", "MiB")
    for row in rows:
        yield _row(row.kind, f"{row.count:,}", f"{row.bytes:,}", _mib(row.bytes))
    yield _row("in all", f"{sum(row.count for row in rows):,}", f"{plan.state_bytes:,}", _mib(plan.state_bytes))


def _activations(plan: Plan, device_bytes: int) -> Iterator[str]:
    """One column for each level of recomputation, in MiB; what a block keeps kind by kind."""
    chosen = plan.config.performance.mlp_recompute_level
    levels = list(plan.activations.values())
    blocks = [max(level.kept[1:-1], key=lambda kept: kept.total) for level in levels]
    held = _count(plan.config.batch.breadth_first_micro_batches or 1, "micro-batch")
    usable = int(device_bytes * (1 - RESERVE))
    peaks = [plan.peak_bytes(level.level) for level in levels]
    yield _title("activations, MiB, with", *(level.level + " *" * (level.level == chosen) for level in levels))
    for kind in blocks[0]:
        yield _row(kind, *(_mib(block.get(kind, 0)) for block in blocks))
    yield _row("a block, a micro-batch", *(_mib(block.total) for block in blocks))
    if recomputed := plan.config.performance.recompute_layers:
        inputs = (_mib(level.kept[recomputed].total) for level in levels)
        yield _row(f"of the first {recomputed:,}, each", *inputs)
    yield _row(f"all layers, {held}", *(_mib(level.held) for level in levels))
    yield _row("most at any time", *(_mib(level.peak) for level in levels))
    yield _row("  namely in the", *(level.peak_at for level in levels))
    yield _row("with the state", *(_mib(peak) for peak in peaks))
    fits = ("fits" if peak <= usable else f"{(peak - usable) / GIB:,.1f} GiB too much" for peak in peaks)
    yield _row(f"in {_mib(usable)}", *fits)
    yield f"  * --mlp_recompute_level={chosen}; {RESERVE:.0%} of {device_bytes / GIB:.1f} GiB left to the runtime"


def _traffic(plan: Plan) -> Iterator[str]:
    if not plan.traffic:
        yield "traffic: none with one rank"
        return
    yield _title("traffic of a step", "collectives", "elements", "MiB", "sent by a rank, MiB")
    for kind, total in sorted(plan.traffic.items()):
        sizes = (_mib(total.bytes), _mib(total.wire_bytes))
        yield _row(f"{kind}s", f"{total.collectives:,}", f"{total.elements:,}", *sizes)
