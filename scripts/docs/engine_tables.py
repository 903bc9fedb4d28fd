"""Write the tables of memory, traffic and choices in docs/multi_stage.md and docs/parallelism.md.

    python -m scripts.docs.engine_tables            write the tables
    python -m scripts.docs.engine_tables --check    compare only; exit code 1 if a document is stale

Each plan is a `MultiStage` on the meta device whose memory and collectives are counted, as in
`--dry_run=1`. The formulas next to the counts are those of the guide and depend on sizes only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from megatron_lite.cli.parse import parse as parse_flags
from megatron_lite.cli.parse import words_of
from megatron_lite.config import BatchConfig
from megatron_lite.distributed.traffic import Total
from megatron_lite.kernels.tensor_collectives import GATHER, REDUCE
from megatron_lite.monitor.schedule_picture import DrawnStep
from megatron_lite.planner.devices import PLANNED_GPU_BYTES, data_sheet
from megatron_lite.planner.plan import Plan, Planner
from megatron_lite.planner.work_time import predict_step
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.pipeline import Durations, place
from megatron_lite.zero.schedule import Order
from scripts.docs.tables import ROOT, markdown_table, with_tables, write_documents

DOCUMENTS = ("multi_stage.md", "parallelism.md")
MODEL = words_of((ROOT / "scripts" / "examples" / "mistral_7b.flags").read_text("utf-8"))
LEVELS = ("none", "activation", "full")
MIB, GIB = 2**20, 2**30
# header and cells; a float is shown with one decimal
Rows = Iterator[tuple[str | int | float, ...]]


@cache
def planner(ranks: int) -> Planner:
    """Return the planner of so many GPUs, which measures each layer once."""
    return Planner(ranks, "cuda")


def plan(ranks: int, levels: Sequence[str] = (), **flags: Any) -> Plan:
    """Plan the Mistral-7B example with additional flags, on GPUs. levels: more recompute levels to
    plan for."""
    words = [
        *MODEL,
        "--dry_run=1",
        f"--world_size={ranks}",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    return planner(ranks).plan(resolve(parse_flags(words).config, ranks), levels)


def needed(made: Plan, level: str) -> str:
    """Return the memory needed at a level of recomputation, in GiB."""
    size = made.needed_bytes(level)
    return f"{size / GIB:,.1f}{' (too much)' if size > PLANNED_GPU_BYTES else ''}"


# Bytes per parameter of state memory: (replicated, sharded over the ranks, in each shared buffer).
STATE_BYTES = {
    ("bf16", 1): (6, 12, 0),
    ("bf16", 2): (2, 16, 4),
    ("bf16", 3): (0, 16, 6),
    ("fp32", 1): (8, 8, 0),
    ("fp32", 2): (4, 12, 4),
    ("fp32", 3): (0, 16, 8),
}
# With one rank, buffers in a shard's dtype are the shards themselves. fp32 takes 16 bytes at every
# ZeRO stage.
ONE_RANK_BYTES = {("bf16", 1): (18, 0, 0), ("bf16", 2): (18, 0, 0), ("bf16", 3): (16, 0, 2)}


def formula_bytes(model: MultiStage, dtype: str, zero_stage: int, ranks: int) -> int:
    """Return a rank's state memory without padding and ties. A shared buffer is as large as its
    largest stage."""
    sizes = [
        sum(slot.numel for part in stage.parts for slot in part.layout.slots)
        for stage in model.stages
    ]
    whole, sharded, buffered = STATE_BYTES[dtype, zero_stage]
    if ranks == 1:
        whole, sharded, buffered = ONE_RANK_BYTES.get((dtype, zero_stage), (16, 0, 0))
    parameters, buffers = sum(sizes), sum(max(sizes[first::2], default=0) for first in range(2))
    return whole * parameters + sharded * parameters // ranks + buffered * buffers


def memory_table() -> Rows:
    """Compare state memory with the formula."""
    yield (
        "training dtype",
        "ZeRO",
        "ranks",
        "formula, bytes",
        "padding, bytes",
        "allocated, bytes",
        "MiB",
    )
    for dtype, zero_stage in STATE_BYTES:
        for ranks in (1, 2, 8, 64):
            made = plan(ranks, training_dtype=dtype, zero_stage=zero_stage)
            formula = formula_bytes(made.model, dtype, zero_stage, ranks)
            allocated = made.state_bytes
            yield dtype, zero_stage, ranks, formula, allocated - formula, allocated, allocated / MIB


def traffic_table() -> Rows:
    """Compare the collectives of a step with the formulas of the guide."""
    counts = "gathers", "formula", "reductions", "formula"
    yield "ZeRO", "micro-batches", *counts, "gathered, MiB", "reduced, MiB", "sent per rank, MiB"
    for zero_stage in (1, 2, 3):
        for depth, breadth in ((1, 1), (4, 1), (1, 4), (2, 2)):
            batch = {
                "batch_size": 4 * depth * breadth,
                "micro_batch_size": 1,
                "breadth_first_micro_batches": breadth,
            }
            made = plan(4, (), zero_stage=zero_stage, **batch)
            stages, (buffers, _) = len(made.model.stages), made.model.memory.buffer_counts()
            # The backward of the embedding needs no weights, so they are not gathered for it.
            gathers = stages + (2 * depth - 1) * (stages - buffers) - (1 if buffers < stages else 0)
            reductions = stages * (1 if zero_stage == 1 else depth)
            gathered, reduced = made.traffic["gather"], made.traffic["reduce"]
            sizes = gathered.bytes, reduced.bytes, gathered.wire_bytes + reduced.wire_bytes
            found = gathered.collectives, gathers, reduced.collectives, reductions
            yield zero_stage, f"{depth} x {breadth}", *found, *(size / MIB for size in sizes)


def buffers_table() -> Rows:
    """Show buffer counts between ZeRO-3 and plain data parallelism."""
    yield (
        "weight buffers",
        "gradient buffers",
        "state, GiB",
        "gathers",
        "reductions",
        "sent per rank, GiB",
    )
    for weights, gradients in ((1, 1), (2, 2), (4, 4), (8, 8), (17, 17), (34, 2), (34, 34)):
        made = plan(
            8,
            num_weight_buffers=weights,
            num_grad_buffers=gradients,
            batch_size=32,
            micro_batch_size=1,
        )
        gathered, reduced = made.traffic["gather"], made.traffic["reduce"]
        sent = (gathered.wire_bytes + reduced.wire_bytes) / GIB
        yield (
            weights,
            gradients,
            made.state_bytes / GIB,
            gathered.collectives,
            reduced.collectives,
            sent,
        )


def choices_table() -> Rows:
    """Show which configurations fit on how many GPUs."""
    memory = "state, GiB", "needed at level none", "activation", "full"
    yield "GPUs", "ZeRO", "micro-batches", *memory, "sent per rank, GiB per iteration"
    for ranks in (4, 8, 64, 128):
        for zero_stage in (1, 2, 3):
            for order in ("depth", "breadth") if ranks == 64 else ("depth",):
                count = 128 // ranks
                flags = {"zero_stage": zero_stage, f"{order}_first_micro_batches": count}
                made = plan(ranks, LEVELS, micro_batch_size=1, **flags)
                levels = [needed(made, level) for level in LEVELS]
                sent = sum(made.traffic[kind].wire_bytes for kind in ("gather", "reduce")) / GIB
                batches = f"{count} {order}-first" if count > 1 else 1
                yield ranks, zero_stage, batches, made.state_bytes / GIB, *levels, sent


# Tensor-parallel layouts: ranks, and whether sequence parallelism is on.
LAYOUTS = ((1, False), *((ranks, splits) for ranks in (2, 4, 8) for splits in (False, True)))


def tensor_plan(ranks: int, splits: bool, **flags: Any) -> Plan:
    """Plan the example on 8 GPUs with `ranks` tensor-parallel ranks; splits: sequence
    parallelism."""
    return plan(
        8, tensor_parallel=ranks, sequence_tensor_parallel=int(splits), micro_batch_size=1, **flags
    )


def tensor_memory_table() -> Rows:
    """Show the memory of a tensor-parallel rank and the predicted step times."""
    times = "s/step, predicted", "in halves"
    yield "T", "tokens", "state, GiB", "one block, MiB", "all layers, GiB", "needed, GiB", *times
    for ranks, splits in LAYOUTS:
        made, halves = (tensor_plan(ranks, splits, overlap_tensor_reduce=flag) for flag in (0, 1))
        memory, state = made.activations["none"], made.state_bytes / GIB
        sheet = data_sheet(made.config.distributed, "cuda", 8)
        seconds = [predict_step(each, sheet).seconds for each in (made, halves)]
        sizes = state, round(memory.saved[1].total() / MIB), memory.held / GIB
        yield ranks, "split" if splits else "whole", *sizes, needed(made, "none"), *seconds


def tensor_traffic_table() -> Rows:
    """Compare the collectives of tensor-parallel ranks with the formulas."""
    yield (
        "T",
        "tokens",
        "recomputed",
        "gathers",
        "sent",
        "formula",
        "sums",
        "sent",
        "formula",
        "by ZeRO",
    )
    for ranks, splits in LAYOUTS[1:]:
        for recomputed in (0, 32) if ranks == 2 else (0,):
            made = tensor_plan(ranks, splits, recompute_layers=recomputed)
            model, batch = made.config.model, made.config.batch
            assert batch.sequential_micro_batches
            hidden = batch.sequence_length * model.hidden_size * 2 * batch.sequential_micro_batches
            each = hidden * (ranks - 1) // ranks
            sums = each * (4 * model.num_layers + 2 * recomputed + 2) * (1 if splits else 2)
            gathers = each * (6 * model.num_layers + 2 * recomputed + 2) * splits
            gathered, summed = (made.traffic.get(kind, Total()) for kind in (GATHER, REDUCE))
            of_zero = sum(
                made.traffic[kind].wire_bytes
                for kind in ("gather", "reduce")
                if kind in made.traffic
            )
            gather_cells = (
                gathered.collectives,
                *(round(size / MIB) for size in (gathered.wire_bytes, gathers)),
            )
            sum_cells = (
                summed.collectives,
                *(round(size / MIB) for size in (summed.wire_bytes, sums, of_zero)),
            )
            yield ranks, "split" if splits else "whole", recomputed, *gather_cells, *sum_cells


TABLES: dict[str, Callable[[], Rows]] = {
    "memory": memory_table,
    "traffic": traffic_table,
    "buffers": buffers_table,
    "choices": choices_table,
    "tensor_memory": tensor_memory_table,
    "tensor_traffic": tensor_traffic_table,
}


PICTURES = {"breadth_first": 4, "one_f_one_b": 2, "interleaved": 4, "zero_bubble_v": 4}  # chunks


def schedules() -> Iterator[str]:
    """Draw the schedules of a pipeline of two ranks."""
    batch = BatchConfig(depth_first_micro_batches=1, breadth_first_micro_batches=4)
    yield "```"
    for name, chunks in PICTURES.items():
        pipeline = place(2, chunks + 2, name, "v" if name == "zero_bubble_v" else "loop")
        durations = [Durations(0, 0, 0), *[Durations()] * chunks, Durations(0, 0, 0)]
        yield name
        yield from [*DrawnStep(Order(pipeline, name, 0, (), durations), batch).lines()][1:]
    yield "```"


def render(name: str) -> list[str]:
    """Return the lines of one Markdown table, or of the pictures of schedules."""
    if name == "schedules":
        return [*schedules()]
    form = {float: "{:,.1f}", int: "{:,}", str: "{}"}
    header, *lines = [[form[type(cell)].format(cell) for cell in row] for row in TABLES[name]()]
    return markdown_table(header, lines)


def renewed(text: str) -> str:
    """Return a document with current tables."""
    names = re.findall(r"<!-- table: (\w+) -->", text)
    return with_tables(text, {name: partial(render, name) for name in names}, separated=False)


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables between `<!-- table: name -->` and `<!-- end -->`."""
    documents = {ROOT / "docs" / name: renewed for name in DOCUMENTS}
    return write_documents(documents, "--check" in argv, "python -m scripts.docs.engine_tables")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
