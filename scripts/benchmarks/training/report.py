"""What the benchmark makes of its measurements: spreads, ratios, rates, the memory formula, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scripts.benchmarks.training.targets import verdicts

MIB = 2**20
# Whom the others are compared with, where they take part.
REFERENCES = (
    "torch",
    "torch compiled",
    "torch compiled full logits",
    "DDP",
    "DDP compiled",
    "FSDP2",
    "FSDP2 all resharded",
    "FSDP2 compiled",
    "ZeRO-1",
    "ZeRO-3",
)
# Columns of the table with ratios; the JSON has all.
RATIO_COLUMNS = REFERENCES[:-2]


def summarize(gathered: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Per configuration: spreads over the turns that count. A step takes as long as its slowest rank.

    `gathered` has a rank's records by name, `facts` tokens_per_step, flops_per_token, peak_tflops and warmup_turns.
    """
    first_rank = gathered[0]
    sound = {name: record for name, record in first_rank.items() if record["failure"] is None}
    # Per turn: seconds a step, or None where the turn does not count.
    seconds = {
        name: _counted([max(step) for step in zip(*(rank[name]["seconds"] for rank in gathered), strict=True)], record)
        for name, record in sound.items()
    }
    result = {}
    for name, record in sound.items():
        step_s = spread(seconds[name])
        kinds = record["books"]["state_bytes_by_kind"]
        scratch = kinds.get("communication scratch", 0)
        peaks = [max(rank[name]["peak_bytes"], default=0) for rank in gathered]
        row: dict[str, Any] = {
            "step_s": step_s,
            "cpu_s": spread(_counted(record["cpu_seconds"], record)),
            "others": spread(_counted(record["others"], record)),
            **rates(step_s["median"] if step_s else None, facts, len(gathered)),
            "peak_bytes": max(peaks) or None,
            "wire_bytes": _median(record["wire_bytes"][facts["warmup_turns"] :]) if len(gathered) > 1 else None,
            "losses": record["losses"],
            "state_bytes": sum(kinds.values()) - scratch,
            "scratch_bytes": scratch,
            **record["books"],
            "ratios": {
                other: spread(_ratios(seconds[name], seconds[other])) for other in REFERENCES if other in seconds
            },
        }
        if "formula_bytes" in row:
            row["padding_bytes"] = row["state_bytes"] - row["formula_bytes"]
        result[name] = row
    return result


def rates(step_s: float | None, facts: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Tokens and model TFLOP/s of one rank, and their share of the device's peak, in both conventions."""
    per_rank = None if step_s is None else facts["tokens_per_step"] / step_s / ranks
    result = {"tokens_per_s": None if per_rank is None else per_rank * ranks, "tokens_per_s_per_rank": per_rank}
    for suffix, flops in (("", facts["flops_per_token"]["causal"]), ("_full", facts["flops_per_token"]["full"])):
        tflops, peak = None if per_rank is None else per_rank * flops / 1e12, facts["peak_tflops"]
        result |= {f"model_tflops{suffix}": tflops, f"mfu{suffix}": tflops / peak if tflops and peak else None}
    return result


def _counted(values: Sequence[float], record: dict[str, Any]) -> list[float | None]:
    return [value if count else None for value, count in zip(values, record["counts"], strict=True)]


def _ratios(times: Sequence[float | None], references: Sequence[float | None]) -> list[float | None]:
    """Of the rounds in which both count."""
    pairs = zip(times, references, strict=True)
    return [None if own is None or other is None else own / other for own, other in pairs]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median, quartiles and the values themselves, without those that do not count; None if fewer than two are left."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    low, median, high = statistics.quantiles(known, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "values": known}


def formula_bytes(stage_sizes: Sequence[int], zero_stage: int, world_size: int, dtype: str) -> int:
    """State memory per rank without padding and ties: bytes for every parameter, bytes shared by the ranks, and bytes
    for each of two buffers, each as large as the largest stage in it (the table of docs/benchmarks.md).
    """
    kept = {"fp32": {1: (8, 8, 0), 2: (4, 12, 4), 3: (0, 16, 8)}, "bf16": {1: (6, 12, 0), 2: (2, 16, 4), 3: (0, 16, 6)}}
    whole, sharded, shared = kept[dtype][zero_stage]
    if world_size == 1:  # buffers of a shard's own dtype are the shards themselves
        whole, shared = whole if zero_stage < 3 else 0, {"fp32": 0, "bf16": 2}[dtype] if zero_stage == 3 else 0
        sharded = (18 if dtype == "bf16" and zero_stage < 3 else 16) - whole
    buffers = sum(max(stage_sizes[first::2], default=0) for first in range(2))
    return whole * sum(stage_sizes) + sharded * sum(stage_sizes) // world_size + shared * buffers


def to_markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    settings, versions, rows = result["settings"], result["versions"], result["configurations"]
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    device = "GPU" if settings["device"] == "cuda" else f"threads: {settings['threads']}"
    lines = [
        f"{settings['model']}: {result['parameters']:,} parameters, {ranks} ({device}), "
        f"{settings['micro_batches']} x {settings['micro_batch_size']} x {settings['sequence_length']} tokens per rank "
        f"and step, {settings['dtype']}, {'one at a time, ' if settings['one_at_a_time'] else ''}medians (quartiles) "
        f"of {settings['turns']} turns or more of {settings['steps_per_turn']} steps; torch {versions['torch']}, "
        f"{result['date']}",
        "",
        *table([{"": name, **_times(row, result["parameters"])} for name, row in rows.items()]),
        "",
        *table([{"": name, **_memory(row)} for name, row in rows.items()]),
        "",
        f"largest difference between losses at any step: {result['largest_loss_difference']:.1e} "
        f"(allowed: {result['loss_tolerance']:g})",
        *(f"not run: {name}: {reason}" for name, reason in result["unavailable"].items()),
        *(f"failed: {name}: {reason}" for name, reason in result["failures"].items()),
        *verdicts(result["targets"]),
    ]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table, without the columns in which every cell is empty."""
    header = [name for name in (rows[0] if rows else {}) if not name or any(row[name] for row in rows)]
    cells = [header, ["---"] * len(header), *([row[name] for name in header] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells]


def _times(row: dict[str, Any], parameters: int) -> dict[str, str]:
    def wire(key: str) -> str:
        return f"{row[key] / (4 * parameters):.3f}" if row.get(key) else ""

    def number(key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    weights = f"{row['weights_difference']:.0e}" if "weights_difference" in row else ""
    return {
        "step, s": spread_cell(row["step_s"], 3),
        "CPU, s": "" if row["cpu_s"] is None else f"{row['cpu_s']['median']:.2f}",
        "tokens/s per rank": number("tokens_per_s_per_rank", ",.0f"),
        "model TFLOP/s": number("model_tflops", ".3g"),
        "MFU causal": number("mfu", ".1%"),
        "MFU full": number("mfu_full", ".1%"),
        "peak, MiB": "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:,.0f}",
        **{f"/ {name}": spread_cell(row["ratios"].get(name), 2) for name in RATIO_COLUMNS},
        "wire": wire("wire_bytes"),
        "by the books": wire("wire_theory_bytes"),
        "weights": "equal" if row.get("weights_equal") else weights,
    }


def spread_cell(values: dict[str, Any] | None, digits: int) -> str:
    """Median and quartiles; the median alone where they are one."""
    if values is None:
        return ""
    low, high = (f"{value:.{digits}f}" for value in values["quartiles"])
    median = f"{values['median']:.{digits}f}"
    return median if low == high else f"{median} ({low}-{high})"


def _memory(row: dict[str, Any]) -> dict[str, str]:
    return {
        f"{kind}, MiB": f"{row[f'{kind}_bytes'] / MIB:.2f}" if f"{kind}_bytes" in row else ""
        for kind in ("state", "formula", "padding", "scratch")
    }
