"""The time budget of a step that meets the goals of the GPU report: the planner's counts, without measurements.

A whole Mistral-7B on one H200, one sample of 8,192 tokens per step, in bf16. `render.py` puts the table into
docs/benchmarks.md, and the report measures the ceilings and operations assumed here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatron_lite.monitor.metrics import model_flops
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.speeds import Attention, Pass, Product
from megatron_lite.planner.work_time import UPDATE_BYTES, micro_batch_work
from scripts.benchmarks.training.settings import chosen, engine_config, parse, row_config
from scripts.docs.tables import markdown_table

# Rates of an H200 at its limit of 700 W. A bf16 product of large random matrices reaches two thirds of the data sheet's
# 989 TFLOP/s; cuDNN's attention, forward and backward, half; a copy 85 % of 4.8 TB/s.
PRODUCT_FLOP_PER_S = 665e12
ATTENTION_FLOP_PER_S = 475e12
BYTES_PER_S = 4.1e12
MASTER, BF16 = 4, 2  # bytes per element
# The row that computes least, then those that need less memory, each with the name of the product that it repeats.
PLAIN = "ZeRO-1 split recompute activation"
REPEATED = {
    "ZeRO-1 split recompute quarter": "the MLPs' first product again in a quarter of the blocks",
    "ZeRO-3 recompute full": "the MLPs' first product again",
}


class Part(NamedTuple):
    """A part of a step: FLOPs or bytes, and the least time that they take."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    flop_per_s: float = PRODUCT_FLOP_PER_S

    @property
    def seconds(self) -> float:
        return self.flops / self.flop_per_s + self.bytes / BYTES_PER_S


@functools.cache
def parts() -> dict[str, list[Part]]:
    """Return the parts of the first row's step, and those that each other row adds, by row."""
    options = parse(["--device=cuda", "--model=mistral-7b", "--dtype=bf16", f"--only={PLAIN},{','.join(REPEATED)}"])
    found: dict[str, list[Part]] = {}
    for name, row in chosen(options, 1).items():
        plan = make_plan(row_config(row, options, 1), 1, "cuda")
        items = list(micro_batch_work(plan).elements())
        products = sum(item.flops for item in items if isinstance(item, Product))
        weights = sum(slot.numel for _, part in plan.model.parts() for slot in part.layout.slots)
        if name in REPEATED:
            found[name] = [Part(REPEATED[name], products - found[PLAIN][0].flops)]
            if plan.config.multi_stage.zero_stage == 3:
                casts = 2 * weights * (MASTER + BF16)
                found[name].append(Part("two casts of every weight to bf16", bytes=casts))
            continue
        scores = sum(item.flops for item in items if isinstance(item, Attention))
        passes = sum(item.num_bytes for item in items if isinstance(item, Pass))
        found[name] = [
            Part("products with weights, forward and backward", products),
            Part("attention, with its scores once more", scores, flop_per_s=ATTENTION_FLOP_PER_S),
            Part("norms, rotary positions, activations, loss", bytes=passes),
            Part("gradient norm and AdamW", bytes=weights * (MASTER + UPDATE_BYTES["adamw"])),
        ]
    return found


def table() -> list[str]:
    """Return the budget of a step, with the additional work of the rows that need less memory."""
    config = engine_config(parse(["--device=cuda", "--model=mistral-7b", "--dtype=bf16"]), 1)
    tokens, rows = config.batch.sequence_length, []
    for name, own in parts().items():
        for part in own:
            flops, moved = f"{part.flops / 1e12:.1f}", f"{part.bytes / 1e9:.0f}"
            cells = flops if part.flops else "", moved if part.bytes else "", f"{1e3 * part.seconds:.0f}"
            rows.append((part.name, *cells, "", ""))
        seconds = sum(part.seconds for part in (*parts()[PLAIN], *(own if name != PLAIN else ())))
        tflops = model_flops(config.model, tokens, tokens) / seconds / 1e12
        rows.append((f"**{name}**", "", "", f"{1e3 * seconds:.0f}", f"{tokens / seconds:,.0f}", f"{tflops:.0f}"))
    return markdown_table(("at least", "TFLOP", "GB", "ms", "tokens/s", "model TFLOP/s"), rows)
