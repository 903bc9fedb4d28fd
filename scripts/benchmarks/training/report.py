"""Results of the training benchmark.

The JSON file is rewritten after every round. Besides the keys of every result
(scripts/benchmarks/pipeline.py) it has:

- `ranks`
- `parameters` of the model
- `peak_rss_bytes`: peak resident memory of each rank (meaningful with one row only)
- `largest_loss_difference` of any two rows at any step
- `loss_tolerance`

Keys of one row (a spread is null if no turn counts):

- `step_s`, spread of the step time in seconds
- `ratios`: spread of the ratio of step times, by the name of the other row
- `tokens_per_s`, over all ranks
- `model_tflops` of one rank, causal attention counted as half
- `mfu`, causal, a fraction of 1; on a known GPU
- `mfu_full`, with full attention
- `peak_bytes` of GPU memory, largest rank and turn; on GPUs
- `planned_peak_bytes`, by the planner (our rows on one GPU)
- `attention`, the backend (our rows only)
- `wire_bytes`, spread of the measured traffic; null on GPUs and with one rank
- `wire_counted_bytes`, counted by the engine in the last step (our rows only)
- `losses` at every step, with the warm-up (except one at a time)
- `state_bytes` of one rank
- `profile_s`, seconds of a step by kind of operation on the first rank (with --profile)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lite.config import Config
from megatron_lite.monitor.metrics import model_flops
from scripts.benchmarks.pipeline import (
    MIB,
    Column,
    Result,
    Rows,
    number,
    over,
    profile_table,
    publish,
    spread,
    table,
)
from scripts.benchmarks.training.measure import Rounds


def summarize(
    rounds: Rounds, config: Config, ranks: int, tokens: int, peak_tflops: float | None
) -> dict[str, dict[str, Any]]:
    """Return the figures of each row that has not failed.

    Args:
        tokens: of all ranks in a step.
        peak_tflops: of one GPU; None if unknown.
    """
    sound = rounds.turns.sound()
    measured = rounds.turns.rows("step_s", "wire_bytes", others=lambda name: sound)
    rows = {name: measured[name] | rounds.books[name] for name in sound}
    length = config.batch.sequence_length
    for row in rows.values():
        if row["step_s"] is None:
            continue
        row["tokens_per_s"] = tokens / row["step_s"]["median"]
        causal, full = (
            row["tokens_per_s"] / ranks * model_flops(config.model, length, 1, kind) / 1e12
            for kind in (False, True)
        )
        row["model_tflops"] = causal
        if peak_tflops is not None:
            row |= {"mfu": causal / peak_tflops, "mfu_full": full / peak_tflops}
    return rows


def columns(rows: Rows, parameters: int) -> Iterator[Column]:
    """Yield the columns of a table, with traffic in units of 4 bytes per parameter."""
    yield spread("step, s", "step_s", 3)
    yield number("tokens/s", "tokens_per_s", ",.0f")
    yield number("model TFLOP/s", "model_tflops", ".3g")
    yield number("MFU causal", "mfu", ".1%")
    yield number("MFU full", "mfu_full", ".1%")
    yield number("peak, MiB", "peak_bytes", ",.0f", 1 / MIB)
    yield from (over(f"/ {name}", name) for name in rows if "attention" not in rows[name])
    yield number("wire", "wire_bytes", ".3f", 1 / (4 * parameters))
    yield number("counted", "wire_counted_bytes", ".3f", 1 / (4 * parameters))
    yield number("state, MiB", "state_bytes", ".2f", 1 / MIB)


def show(result: Result, output: Path | None) -> None:
    """Write a result and print its tables."""
    settings, rows = result["settings"], result["rows"]
    device = "GPU" if settings["device"] == "cuda" else f"threads: {settings['threads']}"
    publish(
        result,
        output,
        f"{settings['model']}: {result['parameters']:,} parameters, {result['ranks']} ranks ({device}), "
        f"{settings['micro_batches']} x {settings['micro_batch_size']} x {settings['sequence_length']} tokens per rank "
        f"and step, {settings['dtype']}; ",
        table(rows, columns(rows, result["parameters"])),
        profile_table(rows),
        note=f"largest difference between losses at any step: {result['largest_loss_difference']:.1e} "
        f"(allowed: {result['loss_tolerance']:g})",
    )
