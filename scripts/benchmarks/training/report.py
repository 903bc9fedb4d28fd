"""Results of the training benchmark: spreads, ratios, rates, the memory formula, targets, and Markdown tables.

The JSON file is rewritten after every round. Keys of the file:

- `command` as typed
- `date`
- `commit` of this checkout, with "+" if files are changed
- `versions` of python, torch, megatron_lite and, where installed, CUDA, cuDNN, triton, transformers, liger_kernel,
  torchtitan
- `machine`: device, cores, load averages before and after, and the instruction sets of torch, oneDNN and MKL
- `settings`: every option of the program
- `ranks`
- `parameters` of the model
- `model_flops_per_token`, `causal` and `full`
- `peak_tflops` of a GPU, or null
- `peak_rss_bytes`: peak resident memory of each rank (meaningful with one configuration only)
- `largest_loss_difference` of any two configurations at any step
- `loss_tolerance`
- `unavailable`: rows that cannot run here, each with the reason
- `failures`: rows that failed, each with the error
- `configurations`: one entry per row of the tables
- `targets`: goals with their measured values: `row`, `measure` (a peer: ratio of step times), `value`, `goal`,
  `moonshot`, `at_least`, `met`; empty if sizes were changed

Keys of one configuration (a spread has `median`, `quartiles` and `values`, and is null if fewer than two turns count):

- `step_s`, spread of the step time in seconds
- `cpu_s`, spread of the processor time of all ranks
- `others`, spread of the share of the CPUs that other processes used meanwhile
- `ratios`: spread of the ratio of step times, by the name of the other row
- `tokens_per_s`, over all ranks
- `tokens_per_s_per_rank`
- `model_tflops` of one rank, causal attention counted as half
- `model_tflops_full`
- `mfu`, causal, a fraction of 1
- `mfu_full`
- `peak_bytes` of GPU memory, largest rank and turn; null on CPUs
- `wire_bytes`, measured median; null on GPUs and with one rank
- `wire_theory_bytes`, from the schedule (our rows only, without tensor parallelism)
- `wire_counted_bytes`, counted by the engine in the last step (our rows only)
- `losses` at every step, with the warm-up (except one at a time)
- `weights_difference`: largest difference of any final weight from DDP's (one rank: plain torch's); fp32, side by side
- `weights_equal`: whether all final weights are bit-identical
- `state_bytes` of one rank
- `scratch_bytes`
- `state_bytes_by_kind`
- `formula_bytes` (our rows only, without ties, `--ours` and tensor parallelism)
- `padding_bytes` (likewise)
- `profile_s`, seconds of a step by kind of operation on the first rank (with --profile)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.common import markdown_table, spread_cell, spread_of

MIB = 2**20
# Rows that the others are compared with, where they run.
REFERENCES = (
    "torch",
    "torch compiled",
    "torch compiled full logits",
    "DDP",
    "DDP compiled",
    "FSDP2",
    "FSDP2 all resharded",
    "FSDP2 compiled",
    "torch TP",
    "torch TP+SP",
    "ZeRO-1",
    "ZeRO-3",
)
# The table shows these ratios; the JSON file has all.
RATIO_COLUMNS = REFERENCES[:-2]


@dataclass(frozen=True)
class Facts:
    """Numbers of the run that all rows share."""

    tokens_per_step: int
    flops_per_token: dict[str, float]  # "causal" and "full" attention
    peak_tflops: float | None
    warmup_turns: int


def summarize(gathered: Sequence[dict[str, Any]], facts: Facts) -> dict[str, dict[str, Any]]:
    """Return spreads over the counted turns per row. A step takes as long as its slowest rank.

    `gathered` holds the records of each rank by row.
    """
    first_rank, ranks = gathered[0], len(gathered)
    sound = {name: record for name, record in first_rank.items() if record["failure"] is None}
    seconds = {}  # seconds a step per turn; None where the turn does not count
    for name, record in sound.items():
        turns = zip(*(rank[name]["seconds"] for rank in gathered), strict=True)
        seconds[name] = _counted([max(turn) for turn in turns], record)
    result = {}
    for name, record in sound.items():
        step_s = spread(seconds[name])
        kinds = record["books"]["state_bytes_by_kind"]
        scratch = kinds.get("communication scratch", 0)
        wire = [value for value in record["wire_bytes"][facts.warmup_turns :] if value is not None]
        row: dict[str, Any] = {
            "step_s": step_s,
            "cpu_s": spread(_counted(record["cpu_seconds"], record)),
            "others": spread(_counted(record["others"], record)),
            **rates(step_s["median"] if step_s else None, facts, ranks),
            "peak_bytes": max(max(rank[name]["peak_bytes"], default=0) for rank in gathered) or None,
            "wire_bytes": statistics.median(wire) if wire and ranks > 1 else None,
            "losses": record["losses"],
            "state_bytes": sum(kinds.values()) - scratch,
            "scratch_bytes": scratch,
            **record["books"],
            "ratios": {other: spread(_ratios(seconds[name], seconds[other])) for other in REFERENCES if other in sound},
        }
        if "formula_bytes" in row:
            row["padding_bytes"] = row["state_bytes"] - row["formula_bytes"]
        result[name] = row
    return result


def rates(step_s: float | None, facts: Facts, ranks: int) -> dict[str, Any]:
    """Return tokens per second, model TFLOP/s of one rank, and its MFU, for causal and full attention."""
    per_rank = None if step_s is None else facts.tokens_per_step / step_s / ranks
    result = {"tokens_per_s": None if per_rank is None else per_rank * ranks, "tokens_per_s_per_rank": per_rank}
    for suffix, kind in (("", "causal"), ("_full", "full")):
        tflops = None if per_rank is None else per_rank * facts.flops_per_token[kind] / 1e12
        mfu = tflops / facts.peak_tflops if tflops and facts.peak_tflops else None
        result |= {f"model_tflops{suffix}": tflops, f"mfu{suffix}": mfu}
    return result


def _counted(values: Sequence[float], record: dict[str, Any]) -> list[float | None]:
    return [value if count else None for value, count in zip(values, record["counts"], strict=True)]


def _ratios(times: Sequence[float | None], references: Sequence[float | None]) -> list[float | None]:
    """Divide the times of the rounds in which both count."""
    pairs = zip(times, references, strict=True)
    return [None if own is None or other is None else own / other for own, other in pairs]


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return median, quartiles and the counted values, or None if fewer than two turns count."""
    known = [value for value in values if value is not None]
    return {**spread_of(known), "values": known} if len(known) > 1 else None


# Bytes per parameter of state memory: (on every rank, divided by the ranks, in each shared buffer).
STATE_BYTES = {
    ("bf16", 1): (6, 12, 0),
    ("bf16", 2): (2, 16, 4),
    ("bf16", 3): (0, 16, 6),
    ("fp32", 1): (8, 8, 0),
    ("fp32", 2): (4, 12, 4),
    ("fp32", 3): (0, 16, 8),
}
# With one rank, buffers in the dtype of a shard are the shards themselves. fp32 takes 16 bytes at every ZeRO stage.
ONE_RANK_BYTES = {("bf16", 1): (18, 0, 0), ("bf16", 2): (18, 0, 0), ("bf16", 3): (16, 0, 2)}


def formula_bytes(stage_sizes: Sequence[int], dtype: str, zero_stage: int, ranks: int) -> int:
    """Return the state memory of a rank without padding and ties. A shared buffer is as large as its largest stage."""
    whole, sharded, buffered = STATE_BYTES[dtype, zero_stage]
    if ranks == 1:
        whole, sharded, buffered = ONE_RANK_BYTES.get((dtype, zero_stage), (16, 0, 0))
    parameters, buffers = sum(stage_sizes), sum(max(stage_sizes[first::2], default=0) for first in range(2))
    return whole * parameters + sharded * parameters // ranks + buffered * buffers


# -- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A goal for one of our rows: a ratio of step times (at most `goal`) or a rate (at least `goal`)."""

    row: str
    measure: str  # a peer's row: ratio of step times; or "model_tflops", "tokens_per_s_per_rank"
    goal: float
    moonshot: float | None = None
    where: dict[str, Any] = field(default_factory=dict)  # settings of the runs that it applies to

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.measure in ("model_tflops", "tokens_per_s_per_rank")

    def value(self, rows: dict[str, dict[str, Any]]) -> float | None:
        """Return the measured rate or median ratio, or None if it was not measured."""
        row = rows.get(self.row, {})
        found = row.get(self.measure) if self.is_rate else row.get("ratios", {}).get(self.measure)
        return found["median"] if isinstance(found, dict) else found


def _cpu(accumulates: bool, ranks: str = "several", dtype: str = "fp32") -> dict[str, Any]:
    return {"device": "cpu", "model": "llama-39m", "dtype": dtype, "accumulates": accumulates, "ranks": ranks}


def _gpu(model: str, **more: Any) -> dict[str, Any]:
    return {"device": "cuda", "model": model, "dtype": "bf16", "ranks": "one", **more}


_FSDP, _SAVING = ("FSDP2", "FSDP2 all resharded"), "ZeRO-3 recompute full"
_COMPILED = ("torch compiled", "torch compiled full logits")
TARGETS = (
    *(Target(row, "DDP", 0.90, 0.82, _cpu(False)) for row in ("ZeRO-1", "ZeRO-2")),
    Target("ZeRO-1", "DDP", 0.92, 0.82, _cpu(True)),
    *(Target("ZeRO-3", peer, 0.65, 0.55, _cpu(False)) for peer in _FSDP),
    Target("ZeRO-3", "ZeRO-1", 1.04, 1.00, _cpu(False)),
    *(Target("ZeRO-3 breadth-first", peer, 0.55, 0.48, _cpu(True)) for peer in _FSDP),
    *(Target("ZeRO-3", peer, 0.60, 0.50, _cpu(False, dtype="bf16")) for peer in _FSDP),
    Target("ZeRO-1", "torch", 0.90, 0.80, _cpu(False, "one")),
    # The engine under the peers' own layers.
    *(Target(row, "DDP", 1.00, None, _cpu(False)) for row in ("plain ZeRO-1", "plain ZeRO-2")),
    Target("plain ZeRO-1", "DDP", 1.00, None, _cpu(True)),
    Target("plain ZeRO-2", "DDP", 1.03, None, _cpu(True)),
    *(Target("plain ZeRO-3", peer, 0.60, None, _cpu(False)) for peer in _FSDP),
    *(Target("plain ZeRO-3", peer, 0.66, None, _cpu(True)) for peer in _FSDP),
    *(Target("plain ZeRO-3 breadth-first", peer, 0.58, None, _cpu(True)) for peer in _FSDP),
    # One GPU: 1.10 and 1.15 times a peer's speed; recomputation costs 0.4 % and 10 % of the speed.
    *(Target(row, "model_tflops", 540.0, None, _gpu("mistral-7b")) for row in ("ZeRO-1", "ZeRO-3", _SAVING)),
    Target("ZeRO-3", "tokens_per_s_per_rank", 11000.0, 12000.0, _gpu("mistral-7b", num_layers=32)),
    Target(_SAVING, "tokens_per_s_per_rank", 11000.0, 12000.0, _gpu("mistral-7b", num_layers=32)),
    Target("ZeRO-1", "FSDP2 compiled", 1 / 1.15, None, _gpu("llama-3-8b-8l")),
    *(Target("ZeRO-1", peer, 1 / 1.10, None, _gpu("gpt2-124m")) for peer in _COMPILED),
    *(Target(f"{row} recompute activation", row, 1 / 0.996, None, _gpu("mistral-7b")) for row in ("ZeRO-1", "ZeRO-3")),
    *(Target(f"{row} recompute full", row, 1 / 0.90, None, _gpu("mistral-7b")) for row in ("ZeRO-1", "ZeRO-3")),
)


def compare(rows: dict[str, dict[str, Any]], settings: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the targets that apply to this run, with their measured values."""
    known = settings | {"ranks": "one" if ranks == 1 else "several", "accumulates": settings["micro_batches"] > 1}
    result = []
    for target in TARGETS:
        value = target.value(rows)
        if value is None or any(known[name] != wanted for name, wanted in target.where.items()):
            continue
        result.append(
            {
                "row": target.row,
                "measure": target.measure,
                "value": value,
                "goal": target.goal,
                "moonshot": target.moonshot,
                "at_least": target.is_rate,
                "met": value >= target.goal if target.is_rate else value <= target.goal,
            }
        )
    return result


def verdict(target: dict[str, Any]) -> str:
    """Format one compared target as a line."""
    measured = f"{target['row']}{', ' if target['at_least'] else ' / '}{target['measure']}: {target['value']:.4g}"
    goal = f"at {'least' if target['at_least'] else 'most'} {target['goal']:.4g}"
    moonshot = "" if target["moonshot"] is None else f", moonshot {target['moonshot']:.4g}"
    return f"{measured}, goal: {goal}{moonshot}: {'met' if target['met'] else 'missed'}"


# -- Markdown --------------------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any]) -> str:
    """Return the tables of docs/benchmarks.md for one run."""
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
        *([*profiled, ""] if (profiled := profile_table(rows)) else []),
        f"largest difference between losses at any step: {result['largest_loss_difference']:.1e} "
        f"(allowed: {result['loss_tolerance']:g})",
        *(f"not run: {name}: {reason}" for name, reason in result["unavailable"].items()),
        *(f"failed: {name}: {reason}" for name, reason in result["failures"].items()),
        *map(verdict, result["targets"]),
    ]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of a Markdown table without the columns in which every cell is empty."""
    header = [name for name in (rows[0] if rows else {}) if not name or any(row[name] for row in rows)]
    return markdown_table(header, [[row[name] for name in header] for row in rows])


def profile_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table of ms by kind of operation; no lines if no row has a profile."""
    profiled = {name: row["profile_s"] for name, row in rows.items() if "profile_s" in row}
    kinds = list(dict.fromkeys(kind for parts in profiled.values() for kind in parts if parts[kind]))
    lines = [
        [name, f"{1000 * sum(parts.values()):.0f}", *(f"{1000 * parts.get(kind, 0):.1f}" for kind in kinds)]
        for name, parts in profiled.items()
    ]
    return markdown_table(("", "profiled step, ms", *kinds), lines) if lines else []


def _times(row: dict[str, Any], parameters: int) -> dict[str, str]:
    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(row[key] / scale, form) if row.get(key) else ""

    weights = f"{row['weights_difference']:.0e}" if "weights_difference" in row else ""
    return {
        "step, s": spread_cell(row["step_s"], 3),
        "CPU, s": "" if row["cpu_s"] is None else f"{row['cpu_s']['median']:.2f}",
        "tokens/s per rank": number("tokens_per_s_per_rank", ",.0f"),
        "model TFLOP/s": number("model_tflops", ".3g"),
        "MFU causal": number("mfu", ".1%"),
        "MFU full": number("mfu_full", ".1%"),
        "peak, MiB": number("peak_bytes", ",.0f", MIB),
        **{f"/ {name}": spread_cell(row["ratios"].get(name), 2) for name in RATIO_COLUMNS},
        "wire": number("wire_bytes", ".3f", 4 * parameters),
        "by the schedule": number("wire_theory_bytes", ".3f", 4 * parameters),
        "weights": "equal" if row.get("weights_equal") else weights,
    }


def _memory(row: dict[str, Any]) -> dict[str, str]:
    kinds = ("state", "formula", "padding", "scratch")
    return {f"{kind}, MiB": f"{row[f'{kind}_bytes'] / MIB:.2f}" if f"{kind}_bytes" in row else "" for kind in kinds}
