"""The time budget of a step that meets the goals of the GPU report: arithmetic, without measurements.

A whole Mistral-7B on one H200, one sample of 8,192 tokens per step, in bf16. `render.py` puts the table into
docs/benchmarks.md, and the report measures the ceilings and operations assumed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config import Config
from scripts.benchmarks.training.settings import engine_config, parse
from scripts.docs.tables import markdown_table

# Rates of an H200 at its limit of 700 W. A bf16 product of large random matrices reaches two thirds of the data sheet's
# 989 TFLOP/s; cuDNN's attention, forward and backward, half; a copy 85 % of 4.8 TB/s.
PRODUCT_FLOP_PER_S = 665e12
ATTENTION_FLOP_PER_S = 475e12
BYTES_PER_S = 4.1e12
MASTER, BF16 = 4, 2  # bytes per element


class Part(NamedTuple):
    """A part of a step: FLOPs or bytes, and the least time that they take."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    flop_per_s: float = PRODUCT_FLOP_PER_S

    @property
    def seconds(self) -> float:
        return self.flops / self.flop_per_s + self.bytes / BYTES_PER_S


def whole_mistral() -> Config:
    """Return the configuration of the report's rows."""
    return engine_config(parse(["--device=cuda", "--model=mistral-7b", "--dtype=bf16"]), 1)


def parts(config: Config) -> list[Part]:
    """Return the parts common to all rows, which are all that ZeRO-1 split with level `activation` computes."""
    model, tokens = config.model, config.batch.sequence_length
    h, f, d, layers = model.hidden_size, model.ffn_hidden_size, model.kv_channels, model.num_layers
    n, g = model.num_attention_heads, model.head_groups
    multiplied = layers * (2 * (n + g) * d * h + 3 * f * h) + model.vocab_size * h
    causal_scores = 2 * tokens * layers * n * d * tokens  # two products, half of the square each
    # Rows of h: a norm alone 2, a sum with norm 4, the sum after the MLP 3; backward 4 for each norm. Rotary positions
    # read and write queries and keys, and in backward also values. The activation moves 3 f; backward with
    # recomputation 6 f.
    moved = layers * tokens * (17 * h + 2 * (n + g) * d + 2 * (n + 2 * g) * d + 9 * f) * BF16
    moved += tokens * (3 * model.vocab_size + 8 * h) * BF16  # the loss and the ends of the model
    held = multiplied + model.vocab_size * h
    return [
        Part("products with weights, forward and backward", 6 * tokens * multiplied),
        Part("attention, with its scores once more", 3.5 * causal_scores, flop_per_s=ATTENTION_FLOP_PER_S),
        Part("norms, rotary positions, activations, loss", bytes=moved),
        Part("gradient norm and AdamW", bytes=held * (MASTER + 28)),
    ]


def more(config: Config) -> list[tuple[str, list[Part]]]:
    """Return the rows of the report that need less memory, with the work that each adds."""
    model, tokens = config.model, config.batch.sequence_length
    up = 2.0 * tokens * model.num_layers * model.hidden_size * 2 * model.ffn_hidden_size
    held = parts(config)[-1].bytes / (MASTER + 28)
    casts = Part("two casts of every weight to bf16", bytes=2 * held * (MASTER + BF16))
    return [
        ("ZeRO-1 split recompute quarter", [Part("the MLPs' first product again in a quarter of the blocks", up / 4)]),
        ("ZeRO-3 recompute full", [Part("the MLPs' first product again", up), casts]),
    ]


def table() -> list[str]:
    """Return the budget of a step, with the additional work of the rows that need less memory."""
    config = whole_mistral()
    plain = parts(config)
    tokens = config.batch.sequence_length
    # The model's work excludes the recomputed scores (1/7 of attention's FLOPs).
    work = plain[0].flops + plain[1].flops * 6 / 7
    rows = [_row(part) for part in plain]
    rows.append(_sum("ZeRO-1 split recompute activation", plain, work, tokens))
    for name, added in more(config):
        rows += [_row(part) for part in added]
        rows.append(_sum(name, [*plain, *added], work, tokens))
    header = ("at least", "TFLOP", "GB", "ms", "tokens/s", "model TFLOP/s")
    return markdown_table(header, rows)


def _row(part: Part) -> tuple[str, ...]:
    flops = f"{part.flops / 1e12:.1f}" if part.flops else ""
    moved = f"{part.bytes / 1e9:.0f}" if part.bytes else ""
    return part.name, flops, moved, f"{1e3 * part.seconds:.0f}", "", ""


def _sum(name: str, computed: Sequence[Part], work: float, tokens: int) -> tuple[str, ...]:
    seconds = sum(part.seconds for part in computed)
    return f"**{name}**", "", "", f"{1e3 * seconds:.0f}", f"{tokens / seconds:,.0f}", f"{work / seconds / 1e12:.0f}"
