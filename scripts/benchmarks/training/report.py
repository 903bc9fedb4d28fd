"""Results of the training benchmark: rates, goals, and tables.

The JSON file is rewritten after every turn. Besides the keys of every result
(scripts/benchmarks/results.py) it has:

- `ranks`
- `parameters` of the model
- `model_flops_per_token`, `causal` and `full`
- `peak_tflops` of a GPU, or null
- `peak_rss_bytes`: peak resident memory of each rank (meaningful with one row only)
- `largest_loss_difference` of any two rows at any step
- `loss_tolerance`
- `goals`: lines with the goals that no report judges and their measured values; empty if sizes were
  changed

Keys of one row (a spread is null if no turn counts):

- `step_s`, spread of the step time in seconds
- `cpu_s`, spread of the processor time of all ranks
- `others`, spread of the share of the cores that other processes used meanwhile, in all turns
- `ratios`: spread of the ratio of step times, by the name of the other row
- `tokens_per_s`, over all ranks
- `tokens_per_s_per_rank`
- `model_tflops` of one rank, causal attention counted as half
- `model_tflops_full`
- `mfu`, causal, a fraction of 1
- `mfu_full`
- `peak_bytes` of GPU memory, largest rank and turn; null on CPUs
- `planned_peak_bytes`, by the planner (our rows on one GPU)
- `attention`, the backend (our rows only)
- `wire_bytes`, measured median; null on GPUs and with one rank
- `wire_counted_bytes`, counted by the engine in the last step (our rows only)
- `losses` at every step, with the warm-up (except one at a time)
- `weights_difference`: largest difference of any final weight from DDP's (one rank: plain torch's);
  fp32, side by side
- `weights_equal`: whether all final weights are bit-identical
- `state_bytes` of one rank
- `scratch_bytes`
- `state_bytes_by_kind`
- `profile_s`, seconds of a step by kind of operation on the first rank (with --profile)
- `kernels_s`, on a GPU: seconds of a step by name of kernel, the longest first
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lite.config.system import PIPELINE_SCHEDULES
from scripts.benchmarks.results import MIB, Result, Rows, spread_of
from scripts.benchmarks.tables import Column, Goal, number, over, remarks, spread, table
from scripts.benchmarks.turns import Turns
from scripts.docs.tables import markdown_table

# Rows that other rows are compared with, if they run.
REFERENCES = (
    "torch",
    "torch compiled",
    "torch compiled full logits",
    "DDP",
    "DDP compiled",
    "FSDP2",
    "FSDP2 all resharded",
    "FSDP2 no reshard",
    "FSDP2 compiled",
    "torch TP",
    "torch TP+SP",
    *(f"torch {schedule}" for schedule in PIPELINE_SCHEDULES),
    "ZeRO-1",
    "ZeRO-3",
)
RATIO_COLUMNS = REFERENCES[:-2]  # of the table
MEMORY = ("state", "scratch")


def summarize(
    turns: Turns,
    known: Mapping[str, dict[str, Any]],
    ranks: int,
    tokens: int,
    flops: Mapping[str, float],
    peak_tflops: float | None,
) -> dict[str, dict[str, Any]]:
    """Return the figures of each row that has not failed.

    Args:
        known: figures that need no measurement, by row.
        tokens: of all ranks in a step.
        flops: per token, with `causal` and `full` attention.
        peak_tflops: of one GPU.
    """
    result = {}
    for name, record in turns.sound().items():
        if name not in known:  # has had no turn yet
            continue
        kinds = known[name]["state_bytes_by_kind"]
        scratch = kinds.get("communication scratch", 0)
        step_s = record.spread("step_s")
        wire = [value for value in record.counted("wire_bytes") if value is not None]
        speed = tokens / step_s["median"] if step_s else None
        row: dict[str, Any] = {
            "step_s": step_s,
            "cpu_s": record.spread("cpu_s"),
            "others": spread_of(record.every("others")),
            "tokens_per_s": speed,
            "tokens_per_s_per_rank": speed and speed / ranks,
            "peak_bytes": max(
                (figures.get("peak_bytes", 0) for figures in record.turns if figures), default=0
            )
            or None,
            "wire_bytes": statistics.median(wire) if wire and ranks > 1 else None,
            "losses": [loss for losses in record.every("losses") for loss in losses],
            "state_bytes": sum(kinds.values()) - scratch,
            "scratch_bytes": scratch,
            **known[name],
            "ratios": {
                other: turns.ratio(name, other) for other in REFERENCES if other in turns.sound()
            },
        }
        for suffix, kind in (("", "causal"), ("_full", "full")):
            row[f"model_tflops{suffix}"] = tflops = speed and speed / ranks * flops[kind] / 1e12
            row[f"mfu{suffix}"] = tflops / peak_tflops if tflops and peak_tflops else None
        result[name] = row
    return result


# -- goals
# -----------------------------------------------------------------------------------------------------------


def _goals(
    row: str, peers: Sequence[str], goal: float, moonshot: float | None = None, **where: Any
) -> list[Goal]:
    known = {
        "device": "cpu",
        "model": "llama-39m",
        "dtype": "fp32",
        "accumulates": False,
        "ranks": "several",
    }
    known["data_parallel_shard"] = 0
    return [Goal(row, f"/ {peer}", goal, moonshot, where=known | where) for peer in peers]


_DDP = ("DDP",)
_FSDP = ("FSDP2", "FSDP2 all resharded")
_BREADTH = "ZeRO-3 breadth-first"
# Those that the reports of a CPU and of a GPU do not judge (cpu/render.py, gpu/render.py).
GOALS = (
    *_goals("ZeRO-2", _DDP, 0.90, 0.82),
    *_goals("ZeRO-1", _DDP, 0.92, 0.82, accumulates=True),
    *_goals(_BREADTH, _FSDP, 0.55, 0.48, accumulates=True),
    *_goals("ZeRO-3", _FSDP, 0.60, 0.50, dtype="bf16"),
    # The engine under the peers' own layers.
    *_goals("plain ZeRO-1", _DDP, 1.00),
    *_goals("plain ZeRO-2", _DDP, 1.00),
    *_goals("plain ZeRO-1", _DDP, 1.00, accumulates=True),
    *_goals("plain ZeRO-2", _DDP, 1.03, accumulates=True),
    *_goals("plain ZeRO-3", _FSDP, 0.60),
    *_goals("plain ZeRO-3", _FSDP, 0.66, accumulates=True),
    *_goals(f"plain {_BREADTH}", _FSDP, 0.58, accumulates=True),
)


# -- tables
# ----------------------------------------------------------------------------------------------------------


def time_columns(parameters: int) -> Iterator[Column]:
    """Yield the columns about a step, with traffic in units of 4 bytes per parameter."""
    yield spread("step, s", "step_s", 3)
    yield number("CPU, s", "cpu_s", ".2f")
    yield number("tokens/s per rank", "tokens_per_s_per_rank", ",.0f")
    yield number("model TFLOP/s", "model_tflops", ".3g")
    yield number("MFU causal", "mfu", ".1%")
    yield number("MFU full", "mfu_full", ".1%")
    yield number("peak, MiB", "peak_bytes", ",.0f", 1 / MIB)
    yield from (over(f"/ {name}", name) for name in RATIO_COLUMNS)
    yield number("wire", "wire_bytes", ".3f", 1 / (4 * parameters))
    yield number("counted", "wire_counted_bytes", ".3f", 1 / (4 * parameters))
    yield Column("weights", _weights)


def _weights(rows: Rows, name: str) -> str:
    if rows[name].get("weights_equal"):
        return "equal"
    return f"{rows[name]['weights_difference']:.0e}" if "weights_difference" in rows[name] else ""


def to_markdown(result: Result) -> str:
    """Return the tables of docs/benchmarks.md for one run."""
    settings, rows = result["settings"], result["rows"]
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    device = "GPU" if settings["device"] == "cuda" else f"threads: {settings['threads']}"
    lines = [
        f"{settings['model']}: {result['parameters']:,} parameters, {ranks} ({device}), "
        f"{settings['micro_batches']} x {settings['micro_batch_size']} x {settings['sequence_length']} tokens per rank "
        f"and step, {settings['dtype']}, {'one at a time, ' if settings['one_at_a_time'] else ''}medians (quartiles) "
        f"of {settings['turns']} turns or more of {settings['steps_per_turn']} steps; "
        f"torch {result['environment']['versions']['torch']}, {result['environment']['date']}",
        "",
        *table(rows, time_columns(result["parameters"])),
        "",
        *table(
            rows,
            (number(f"{kind}, MiB", f"{kind}_bytes", ".2f", 1 / MIB, zero=True) for kind in MEMORY),
        ),
        "",
        *([*profiled, ""] if (profiled := profile_table(rows)) else []),
        f"largest difference between losses at any step: {result['largest_loss_difference']:.1e} "
        f"(allowed: {result['loss_tolerance']:g})",
        *remarks(result),
        *result["goals"],
    ]
    return "\n".join(lines)


def profile_table(rows: Rows) -> list[str]:
    """Return the lines of a table of ms by kind of operation; empty if no row has a profile."""
    profiled = {name: row["profile_s"] for name, row in rows.items() if "profile_s" in row}
    kinds = list(
        dict.fromkeys(kind for parts in profiled.values() for kind in parts if parts[kind])
    )
    lines = [
        [
            name,
            f"{1000 * sum(parts.values()):.0f}",
            *(f"{1000 * parts.get(kind, 0):.1f}" for kind in kinds),
        ]
        for name, parts in profiled.items()
    ]
    return markdown_table(("", "profiled step, ms", *kinds), lines) if lines else []
