"""Write the tables of docs/multi_stage.md: memory, traffic and choices, counted by the engine itself.

    python -m scripts.docs.engine_tables            write the tables
    python -m scripts.docs.engine_tables --check    compare only; exit code 1 if the document is stale

Each plan is a `MultiStage` on the meta device whose memory and collectives are counted, as in `--dry_run=1`. The
formulas beside the counts are those of the guide and use only sizes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.cli.parse import parse as parse_flags
from megatron_lite.cli.parse import read_words
from megatron_lite.planner.plan import Plan, make_plan
from megatron_lite.planner.runtime import PLANNED_GPU_BYTES
from megatron_lite.validation import resolve
from scripts.benchmarks.common import markdown_table
from scripts.benchmarks.training.report import STATE_BYTES, formula_bytes

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = REPOSITORY / "docs" / "multi_stage.md"
MODEL = read_words(str(REPOSITORY / "scripts" / "examples" / "mistral_7b.flags"))
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


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "memory": memory_table,
    "traffic": traffic_table,
    "buffers": buffers_table,
    "choices": choices_table,
}


def render(name: str) -> str:
    """Return one table in Markdown."""
    header, *rows = TABLES[name]()
    return "\n".join(markdown_table(header, rows))


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables between `<!-- table: name -->` and `<!-- end -->`."""
    text = TARGET.read_text("utf-8")
    current = re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{render(found[2])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )
    if "--check" in argv:
        if text == current:
            return 0
        print(f"{TARGET} is out of date: run python -m scripts.docs.engine_tables", file=sys.stderr)
        return 1
    TARGET.write_text(current, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
