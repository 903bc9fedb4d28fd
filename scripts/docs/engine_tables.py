"""Write the tables of docs/multi_stage.md and docs/parallelism.md: memory, traffic, choices, as the engine counts them.

    python -m scripts.docs.engine_tables            write the tables
    python -m scripts.docs.engine_tables --check    compare only; exit code 1 if a document is stale

Each plan is a `MultiStage` on the meta device whose memory and collectives are counted, as in `--dry_run=1`. The
formulas beside the counts are those of the guide and use only sizes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron_lite.cli.parse import parse as parse_flags
from megatron_lite.cli.parse import read_words
from megatron_lite.distributed.traffic import Total
from megatron_lite.kernels.tensor_collectives import GATHER, REDUCE
from megatron_lite.planner.devices import gpu_sheet
from megatron_lite.planner.plan import Plan, make_plan
from megatron_lite.planner.runtime import PLANNED_GPU_BYTES
from megatron_lite.planner.work_time import predict_step
from megatron_lite.validation import resolve
from scripts.benchmarks.results import ROOT
from scripts.benchmarks.training.report import STATE_BYTES, formula_bytes
from scripts.docs.tables import markdown_table, with_tables, write_documents

DOCUMENTS = ("multi_stage.md", "parallelism.md")
MODEL = read_words(str(ROOT / "scripts" / "examples" / "mistral_7b.flags"))
MIB, GIB = 2**20, 2**30


def plan(ranks: int, **flags: Any) -> Plan:
    """Plan the Mistral-7B example with more flags, on GPUs."""
    words = [*MODEL, "--dry_run=1", f"--world_size={ranks}", *(f"--{name}={value}" for name, value in flags.items())]
    return make_plan(resolve(parse_flags(words).config, ranks), ranks, "cuda")


def stage_sizes(model: Any) -> list[int]:
    """Return the elements of each stage, without padding."""
    return [sum(slot.numel for part in stage.parts for slot in part.layout.slots) for stage in model.stages]


def memory_table() -> Iterator[tuple[str, ...]]:
    """Compare state memory with the formula."""
    yield "training dtype", "ZeRO", "ranks", "formula, bytes", "padding, bytes", "allocated, bytes", "MiB"
    for dtype, zero_stage in STATE_BYTES:
        for ranks in (1, 2, 8, 64):
            made = plan(ranks, training_dtype=dtype, zero_stage=zero_stage)
            formula = formula_bytes(stage_sizes(made.model), dtype, zero_stage, ranks)
            allocated = made.state_bytes
            numbers = (f"{number:,}" for number in (formula, allocated - formula, allocated))
            yield dtype, str(zero_stage), str(ranks), *numbers, f"{allocated / MIB:,.1f}"


def traffic_table() -> Iterator[tuple[str, ...]]:
    """Compare the collectives of a step with the formulas."""
    yield (
        "ZeRO",
        "micro-batches",
        "gathers",
        "formula",
        "reductions",
        "formula",
        "gathered, MiB",
        "reduced, MiB",
        "sent per rank, MiB",
    )
    for zero_stage in (1, 2, 3):
        for depth, breadth in ((1, 1), (4, 1), (1, 4), (2, 2)):
            made = plan(
                4,
                zero_stage=zero_stage,
                batch_size=4 * depth * breadth,
                micro_batch_size=1,
                breadth_first_micro_batches=breadth,
            )
            stages, (buffers, _) = len(made.model.stages), made.model.memory.buffer_counts()
            # The backward of the embedding needs no weights, so they are not gathered for it.
            gathers = stages + (2 * depth - 1) * (stages - buffers) - (1 if buffers < stages else 0)
            reductions = stages * (1 if zero_stage == 1 else depth)
            gathered, reduced = made.traffic["gather"], made.traffic["reduce"]
            yield (
                str(zero_stage),
                f"{depth} x {breadth}",
                str(gathered.collectives),
                str(gathers),
                str(reduced.collectives),
                str(reductions),
                f"{gathered.bytes / MIB:,.1f}",
                f"{reduced.bytes / MIB:,.1f}",
                f"{(gathered.wire_bytes + reduced.wire_bytes) / MIB:,.1f}",
            )


def buffers_table() -> Iterator[tuple[str, ...]]:
    """Show buffer counts between ZeRO-3 and plain data parallelism."""
    yield "weight buffers", "gradient buffers", "state, GiB", "gathers", "reductions", "sent per rank, GiB"
    for weights, gradients in ((1, 1), (2, 2), (4, 4), (8, 8), (17, 17), (34, 2), (34, 34)):
        made = plan(8, num_weight_buffers=weights, num_grad_buffers=gradients, batch_size=32, micro_batch_size=1)
        gathered, reduced = made.traffic["gather"], made.traffic["reduce"]
        sent = (gathered.wire_bytes + reduced.wire_bytes) / GIB
        yield (
            str(weights),
            str(gradients),
            f"{made.state_bytes / GIB:,.1f}",
            str(gathered.collectives),
            str(reduced.collectives),
            f"{sent:,.1f}",
        )


def choices_table() -> Iterator[tuple[str, ...]]:
    """Show which configurations fit on how many GPUs."""
    yield (
        "GPUs",
        "ZeRO",
        "micro-batches",
        "state, GiB",
        "needed at level none",
        "activation",
        "full",
        "sent per rank, GiB per iteration",
    )
    for ranks in (4, 8, 64, 128):
        for zero_stage in (1, 2, 3):
            for order in ("depth", "breadth") if ranks == 64 else ("depth",):
                sequential = 128 // ranks
                made = plan(
                    ranks, zero_stage=zero_stage, micro_batch_size=1, **{f"{order}_first_micro_batches": sequential}
                )
                needed = [made.needed_bytes(level) for level in ("none", "activation", "full")]
                sent = sum(made.traffic[kind].wire_bytes for kind in ("gather", "reduce")) / GIB
                yield (
                    str(ranks),
                    str(zero_stage),
                    f"{sequential} {order}-first" if sequential > 1 else "1",
                    f"{made.state_bytes / GIB:,.1f}",
                    *(f"{size / GIB:,.1f}{' (too much)' if size > PLANNED_GPU_BYTES else ''}" for size in needed),
                    f"{sent:,.1f}",
                )


# Shapes of --tensor_parallel: ranks, and whether they split the tokens.
SHARED = ((1, False), *((ranks, splits) for ranks in (2, 4, 8) for splits in (False, True)))


def shared_plan(ranks: int, splits: bool, **flags: Any) -> Plan:
    """Plan the example on 8 GPUs, of which so many share each layer."""
    layout = {"tensor_parallel": ranks, "sequence_tensor_parallel": int(splits)}
    return plan(8, **layout, micro_batch_size=1, **flags)


def tensor_memory_table() -> Iterator[tuple[str, ...]]:
    """Show what ranks that share layers hold, and how long a step takes."""
    yield "T", "tokens", "state, GiB", "one block, MiB", "all layers, GiB", "needed, GiB", "s/step, predicted"
    for ranks, splits in SHARED:
        made = shared_plan(ranks, splits)
        memory, config = made.activations["none"], made.config
        speeds = gpu_sheet(config.distributed, 8)
        time = predict_step(made, speeds)
        needed = made.needed_bytes("none")
        yield (
            str(ranks),
            "split" if splits else "whole",
            f"{made.state_bytes / GIB:,.1f}",
            f"{memory.saved[1].total() / MIB:,.0f}",
            f"{memory.held / GIB:,.1f}",
            f"{needed / GIB:,.1f}{' (too much)' if needed > PLANNED_GPU_BYTES else ''}",
            f"{time.seconds:,.1f}",
        )


def tensor_traffic_table() -> Iterator[tuple[str, ...]]:
    """Compare the exchanges of ranks that share layers with the formulas."""
    yield "T", "tokens", "recomputed", "gathers", "sent", "formula", "sums", "sent", "formula", "by ZeRO"
    for ranks, splits in SHARED[1:]:
        for recomputed in (0, 32) if ranks == 2 else (0,):
            made = shared_plan(ranks, splits, recompute_layers=recomputed)
            model, batch = made.config.model, made.config.batch
            assert batch.sequential_micro_batches
            hidden = batch.sequence_length * model.hidden_size * 2 * batch.sequential_micro_batches
            each = hidden * (ranks - 1) // ranks
            sums = each * (4 * model.num_layers + 2 * recomputed + 2) * (1 if splits else 2)
            gathers = each * (6 * model.num_layers + 2 * recomputed + 2) * splits
            gathered, summed = (made.traffic.get(kind, Total()) for kind in (GATHER, REDUCE))
            of_zero = sum(made.traffic[kind].wire_bytes for kind in ("gather", "reduce") if kind in made.traffic)
            yield (
                str(ranks),
                "split" if splits else "whole",
                str(recomputed),
                f"{gathered.collectives:,}",
                *(f"{size / MIB:,.0f}" for size in (gathered.wire_bytes, gathers)),
                f"{summed.collectives:,}",
                *(f"{size / MIB:,.0f}" for size in (summed.wire_bytes, sums, of_zero)),
            )


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "memory": memory_table,
    "traffic": traffic_table,
    "buffers": buffers_table,
    "choices": choices_table,
    "tensor_memory": tensor_memory_table,
    "tensor_traffic": tensor_traffic_table,
}


def render(name: str) -> list[str]:
    """Return the lines of one table in Markdown."""
    header, *rows = TABLES[name]()
    return markdown_table(header, rows)


def renewed(text: str) -> str:
    """Return a document with its tables written anew."""
    names = re.findall(r"<!-- table: (\w+) -->", text)
    return with_tables(text, {name: partial(render, name) for name in names}, separated=False)


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables between `<!-- table: name -->` and `<!-- end -->`."""
    documents = {ROOT / "docs" / name: renewed for name in DOCUMENTS}
    return write_documents(documents, "--check" in argv, "python -m scripts.docs.engine_tables")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
