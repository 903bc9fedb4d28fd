"""Write the lines that a run logs before training: derived numbers, the model, memory and the
device.

Some lines are pairs: the full line, and a shorter one for the console (empty: none).
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_lite.config import BatchConfig, Config
from megatron_lite.config.dimensions import DATA
from megatron_lite.config.mup import factors, width_ratio
from megatron_lite.config.values import counted
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import deterministic_ways
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.converted_products import computes_in_fp32
from megatron_lite.kernels.cross_entropy import held_logits
from megatron_lite.kernels.eight_bit import eight_bit_of
from megatron_lite.kernels.products import describe_products
from megatron_lite.model import adapters, parameter_patterns
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.model.gpt import active_numel, kind_of, parameters_of
from megatron_lite.model.layer import Layer
from megatron_lite.monitor.logging import MIB
from megatron_lite.monitor.schedule_picture import DrawnStep
from megatron_lite.parameter import DTYPES
from megatron_lite.run.host import available_bytes, available_cores, choose_threads
from megatron_lite.schedules.batch_size import BatchSchedule, Split, batch_schedule
from megatron_lite.zero.memory import MemoryRow
from megatron_lite.zero.multi_stage import MultiStage


def derived_numbers(
    config: Config,
    layers: Sequence[Layer],
    distributed: Distributed,
    data: Mapping[str, str],
    batches: BatchSchedule,
) -> dict[str, str]:
    """Return the run's derived numbers by name; `data` describes the data sets, `batches` all
    starts."""
    batch, sizes = config.batch, batch_schedule(config.batch).sizes
    ranks = distributed.samples.world_size
    shape = (batch.micro_batch_size, ranks, batch.breadth_first_micro_batches)
    micro_batches = _smallest_to_largest([Split(size, *shape).micro_steps for size in sizes])
    specs = [parameter.spec for parameter in parameters_of(layers)]
    parameters = sum(spec.numel for spec in specs if not spec.is_state)
    active = active_numel(
        ((spec.name, spec.numel) for spec in specs if not spec.is_state), config.model
    )
    why_threads = ""
    if distributed.device.type == "cpu":
        threads = choose_threads(config, distributed.local_world_size, distributed.sharing_cores)
        why_threads = f" ({threads.reason})" if threads.number == torch.get_num_threads() else ""
    return {
        "parameters": f"{parameters:,}"
        + (f", {active:,} of them for each token" if active < parameters else ""),
        "tokens per iteration": _smallest_to_largest(
            [size * batch.sequence_length for size in sizes]
        ),
        "total tokens": f"{batches.consumed_tokens(config.training.train_iters):,}{batches.since}",
        "micro-batches per rank": f"{micro_batches} of {batch.micro_batch_size} samples",
        "ranks": describe_ranks(distributed),
        "device": describe_device(distributed.device) + why_threads,
        "versions": f"torch {torch.__version__}, python {platform.python_version()}",
        **data,
    }


def describe_ranks(distributed: Distributed) -> str:
    """Return the number of ranks, with their groups if there are several: "8 (2 pipeline x 2 data x
    2 tensor)"."""
    shape = distributed.grid.shape
    sizes = {name: size for name, size in shape.items() if name == DATA or size > 1}
    grid = " x ".join(f"{size} {name}" for name, size in sizes.items())
    return f"{distributed.world_size}" + (f" ({grid})" if len(sizes) > 1 else "")


def _smallest_to_largest(numbers: Sequence[int]) -> str:
    return " to ".join(f"{number:,}" for number in dict.fromkeys((min(numbers), max(numbers))))


def choice_lines(
    config: Config, kernels: Kernels, layers: Sequence[Layer], device: torch.device
) -> Iterator[tuple[str, str]]:
    """Yield pairs about kernels, adapters, decayed parameters and deterministic algorithms."""
    yield kernels.describe(), kernels.describe()
    if trained := adapters.adapters_of(layers):
        yield (line := adapters.describe(trained, config.model.num_layers)), line
    if rounded := eight_bit_of(layers):
        line = f"8-bit products ({config.performance.eight_bit}) in {len(rounded)} linear layers"
        if not kernels.eight_bit_units:
            line += "; this device has no units for them, so they are no faster"
        yield line, line
    if config.training.train_iters > 0 and config.optimizer.weight_decay > 0:
        decay = parameter_patterns.describe(parameters_of(layers))
        yield decay, decay if config.optimizer.weight_decay_modules else decay.partition(": ")[0]
    if config.model.mup:
        yield from ((line, line) for line in mup_lines(config, layers))
    if config.distributed.deterministic:
        yield (ways := deterministic_ways(device, kernels.triton)), ways


def mup_lines(config: Config, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield a table of muP's factors on what the options state, one row per kind of tensors."""
    yield (
        f"muP for {width_ratio(config.model):g} times the width of the base model; factors on its values:"
    )
    titles = ("tensors", "parameters", "initial std", "learning rate", "weight decay", "output")
    yield "".join(f"{title:>15}" for title in titles)
    counts = Counter[str]()
    for parameter in parameters_of(layers):
        if not parameter.spec.is_state:
            counts[kind_of(parameter.spec)] += parameter.spec.numel
    for kind, (initial_std, rate, output) in factors(config).items():
        if count := counts[kind]:
            cells = (f"{factor:.6g}" for factor in (initial_std, rate, 1 / rate, output))
            yield "".join(f"{cell:>15}" for cell in (kind, f"{count:,}", *cells))


def stage_lines(model: MultiStage, batch: BatchConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs about stages, frozen parameters, this rank's state memory by kind, and
    products."""
    blocks = [len(stage) for stage in model.split[1:-1]]
    shown = ", ".join(map(str, blocks)) if len(set(blocks)) > 1 else f"{blocks[0]} each"
    weights, gradients = model.memory.buffer_counts()
    names = f"embedding, {sum(blocks)} blocks in {len(blocks)} stages ({shown}), head"
    buffers = f"{weights} weight and {gradients} gradient buffers"
    rows = [row for row in model.memory.table() if row.bytes]
    total = MemoryRow(
        "state memory per rank", sum(row.count for row in rows), sum(row.bytes for row in rows)
    )
    yield (
        f"{len(model.all_stages)} stages: {names}; {buffers}",
        f"{len(model.all_stages)} stages, {buffers}; {total.bytes / MIB:,.2f} MiB of {total.kind}",
    )
    if model.ranks.world_size > 1:
        yield (line := DrawnStep(model.order, batch).describe()), line
    if frozen := model.num_frozen:
        line = f"{frozen:,} of {model.num_parameters:,} parameters are frozen"
        yield line, line
    for row in (*rows, total):
        yield f"  {row.kind:.<24} {row.count:4d} {row.bytes / MIB:14,.2f} MiB", ""
    yield (
        describe_products(model.group.device, model.precision.training, model.precision.gradients),
        "",
    )


def placement_warnings(config: Config, distributed: Distributed) -> Iterator[str]:
    """Yield a warning if tensor-parallel ranks are on several machines."""
    ranks, local = config.distributed.tensor_parallel, distributed.local_world_size
    if local % ranks:
        yield (
            f"--tensor_parallel={ranks}: with {local} ranks on a machine, some tensor-parallel groups span "
            "machines, and every layer waits for the network; a divisor of the ranks on a machine is faster"
        )


def device_warnings(config: Config, device: torch.device) -> Iterator[str]:
    """Yield warnings about options that are slow or idle on the device, and about little memory for
    the logits."""
    name, tf32 = config.distributed.training_dtype, config.distributed.tf32
    if device.type == "cuda" and name == "fp32" and not tf32:
        yield (
            "--training_dtype=fp32: products use no tensor cores, which are 10 times as fast; write --training_dtype=bf16, or "
            "--tf32=1 for fp32 products of rounded factors"
        )
    if tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        yield f"--tf32=1 has no effect on {describe_device(device)}"
    if device.type == "cuda" and name != "fp32" and (rate := config.model.attention_dropout):
        yield (
            f"--attention_dropout={rate:g}: only the math backend drops attention weights, and takes 10 to 50 times as "
            "long as the others; for speed write --attention_dropout=0"
        )
    if computes_in_fp32(device, DTYPES[name]):
        yield (
            f"--training_dtype={name} saves memory but no time here: this CPU (as far as oneDNN may use it) has no "
            f"instructions for products in {name}, so they are computed in fp32 from converted blocks; a step takes as "
            "long as with --training_dtype=fp32, or up to a third longer"
        )
    if config.model.attention_softmax_in_fp32 and device.type == "cpu" and name != "fp32":
        yield "--attention_softmax_in_fp32 only chooses the math backend, which is fp32 on a CPU in any case"
    batch = config.batch
    performance = config.performance
    options = config.distributed
    columns = config.model.vocabulary_rows(
        options.tensor_parallel if options.parallel_embeddings else 1
    )
    vocab_size = min(columns, config.model.vocab_size)  # of this rank
    samples = batch.micro_batch_size
    if config.training.validation_iters and batch.eval_micro_batch_size is not None:
        samples = max(samples, batch.eval_micro_batch_size)
    tokens, itemsize = samples * batch.sequence_length, DTYPES[name].itemsize
    logits_bytes, free = tokens * vocab_size * itemsize, free_bytes(device)
    if logits_bytes > free:
        chunk = chunk_tokens(performance.cross_entropy_splits, tokens, device, itemsize)
        rows, columns = held_logits(tokens, columns, chunk, performance.cross_entropy_block_size)
        yield (
            f"the logits of one micro-batch ({tokens:,} tokens x {vocab_size:,} x {itemsize} bytes = "
            f"{logits_bytes / MIB:,.0f} MiB) exceed the free memory ({free / MIB:,.0f} MiB); only "
            f"{rows * columns * itemsize / MIB:,.0f} MiB of them are held at a time, but activations may not fit "
            "either: consider a smaller --micro_batch_size"
        )


def free_bytes(device: torch.device) -> int:
    """Return the memory that a device can still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def describe_device(device: torch.device) -> str:
    """Return a description of the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads, cores = torch.get_num_threads(), str(available_cores())
    if cores != str(os.cpu_count()):
        cores += f" of {os.cpu_count()}"
    return f"cpu, {cores} cores, {counted(threads, 'thread')} per rank"
