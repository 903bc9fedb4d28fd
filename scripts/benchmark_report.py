"""What scripts/benchmark.py makes of its measurements: statistics, the memory formula, the table, the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import megatron_lite

MIB = 2**20
REFERENCES = {
    "ratio_to_ddp": "DDP", "ratio_to_fsdp2": "FSDP2", "ratio_to_fsdp2_all_resharded": "FSDP2 all resharded",
}  # fmt: skip
# name -> (configuration, which ratio, at most with one micro-batch, with several; None: no aim)
TARGETS: dict[str, tuple[str, str, float | None, float | None]] = {
    "zero_1_to_ddp": ("ZeRO-1", "ratio_to_ddp", 1.0, 1.0),
    "zero_3_to_fsdp2": ("ZeRO-3", "ratio_to_fsdp2", 0.7, 0.7),
    "plain_zero_1_to_ddp": ("plain ZeRO-1", "ratio_to_ddp", 1.0, 1.0),
    "plain_zero_2_to_ddp": ("plain ZeRO-2", "ratio_to_ddp", 1.0, 1.03),
    "plain_zero_3_to_fsdp2": ("plain ZeRO-3", "ratio_to_fsdp2", 0.60, 0.66),
    "plain_zero_3_to_fsdp2_all": ("plain ZeRO-3", "ratio_to_fsdp2_all_resharded", 0.60, 0.66),
    "plain_zero_3_breadth_first_to_fsdp2": ("plain ZeRO-3 breadth-first", "ratio_to_fsdp2", None, 0.58),
    "plain_zero_3_breadth_first_to_fsdp2_all": (
        "plain ZeRO-3 breadth-first", "ratio_to_fsdp2_all_resharded", None, 0.58
    ),
}


def summarize(
    gathered: Sequence[dict[str, Any]], settings: dict[str, Any], memory: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Per configuration: spreads over the turns that count. A step takes as long as its slowest rank."""
    tokens = len(gathered) * settings["micro_batches"] * settings["micro_batch_size"] * settings["sequence_length"]
    first_rank = gathered[0]
    # Per turn: seconds a step, or None where the turn does not count.
    seconds: dict[str, list[float | None]] = {
        name: _counted([max(step) for step in zip(*(rank[name]["seconds"] for rank in gathered), strict=True)], counts)
        for name, counts in ((name, record["counts"]) for name, record in first_rank.items())
    }
    result = {}
    for name, times in seconds.items():
        record = first_rank[name]
        step_s = spread(times)
        kinds = memory[name]["state_bytes_by_kind"]
        scratch = kinds.get("communication scratch", 0)
        row: dict[str, Any] = {
            "step_s": step_s,
            "cpu_s": spread(_counted(record["cpu_seconds"], record["counts"])),
            "others": spread(_counted(record["others"], record["counts"])),
            "tokens_per_s": tokens / step_s["median"] if step_s else None,
            "wire_bytes": _median(record["wire_bytes"][settings["warmup_turns"] :]),
            "losses": record["losses"],
            "state_bytes": sum(kinds.values()) - scratch,
            "scratch_bytes": scratch,
            **memory[name],
        }
        for label, reference in REFERENCES.items():
            row[label] = spread(_ratios(times, seconds[reference])) if reference in seconds else None
        if "formula_bytes" in row:
            row["padding_bytes"] = row["state_bytes"] - row["formula_bytes"]
        result[name] = row
    return result


def _counted(values: Sequence[float], counts: Sequence[bool]) -> list[float | None]:
    return [value if count else None for value, count in zip(values, counts, strict=True)]


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


def formula_bytes(stage_sizes: Sequence[int], zero_stage: int, world_size: int) -> int:
    """State memory per rank of fp32 training without padding: 8 + 8/N, 4 + 12/N or 16/N bytes a parameter, and shared
    buffers in ZeRO-2 (4 bytes) and ZeRO-3 (8 bytes), two of them, each as large as its largest stage.
    """
    parameters = sum(stage_sizes)
    if world_size == 1:
        return 16 * parameters
    buffers = sum(max(stage_sizes[first::2], default=0) for first in range(2))
    whole, sharded, shared = {1: (8, 8, 0), 2: (4, 12, 4), 3: (0, 16, 8)}[zero_stage]
    return whole * parameters + sharded * parameters // world_size + shared * buffers


def targets(configurations: dict[str, dict[str, Any]], micro_batches: int) -> dict[str, dict[str, Any]]:
    """The ratios that we aim at, with what was measured (paired: the median of the ratios of each round)."""
    result = {}
    for name, (own, label, single, several) in TARGETS.items():
        ratio, limit = configurations.get(own, {}).get(label), single if micro_batches == 1 else several
        if ratio is not None and limit is not None:
            result[name] = {"ratio": ratio["median"], "at_most": limit, "met": ratio["median"] <= limit}
    return result


TIME_HEADER = (
    "", "step, s", "quartiles", "CPU, s", "tokens/s", "/ DDP", "quartiles", "/ FSDP2", "quartiles", "/ FSDP2 all",
    "wire", "by the books", "weights",
)  # fmt: skip
MEMORY_HEADER = ("", "state, MiB", "formula, MiB", "padding, MiB", "scratch, MiB")


def to_markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    settings, versions, rows = result["settings"], result["versions"], result["configurations"]
    lines = [
        f"{result['parameters']:,} parameters, {result['ranks']} ranks with {settings['threads']} thread each, "
        f"{settings['micro_batches']} x {settings['micro_batch_size']} x {settings['sequence_length']} tokens per rank "
        f"and step, fp32, medians of {settings['turns']} turns or more of {settings['steps_per_turn']} steps; "
        f"torch {versions['torch']}, {result['date']}",
        "",
        *table(TIME_HEADER, [[name, *_times(row, result["parameters"])] for name, row in rows.items()]),
        "",
        *table(MEMORY_HEADER, [[name, *_memory(row)] for name, row in rows.items()]),
        "",
        f"largest difference between losses at any step: {result['largest_loss_difference']:.1e}",
    ]
    for name, target in result["targets"].items():
        own, label, *_ = TARGETS[name]
        verdict = "met" if target["met"] else "missed"
        ratio = f"{own} / {REFERENCES[label]}: {target['ratio']:.3f}"
        lines.append(f"{ratio}, aim: at most {target['at_most']:g}: {verdict}")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _times(row: dict[str, Any], parameters: int) -> list[str]:
    def cells(key: str, digits: int) -> list[str]:
        if row[key] is None:
            return ["", ""]
        low, high = row[key]["quartiles"]
        return [f"{row[key]['median']:.{digits}f}", f"{low:.{digits}f}-{high:.{digits}f}"]

    def wire(key: str, digits: int) -> str:
        value = row.get(key)
        return "" if value is None or not parameters else f"{value / (4 * parameters):.{digits}f}"

    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
    weights = f"{row['weights_to_ddp']:.0e}" if "weights_to_ddp" in row else ""
    weights = "equal" if row.get("weights_as_ddp") else weights
    ratios = [
        *cells("ratio_to_ddp", 2), *cells("ratio_to_fsdp2", 2), cells("ratio_to_fsdp2_all_resharded", 2)[0],
    ]  # fmt: skip
    traffic = [wire("wire_bytes", 3), wire("wire_theory_bytes", 3)]
    return [*cells("step_s", 3), cells("cpu_s", 2)[0], speed, *ratios, *traffic, weights]


def _memory(row: dict[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return f"{row[key] / MIB:.2f}" if key in row else ""

    return [mib("state_bytes"), mib("formula_bytes"), mib("padding_bytes"), mib("scratch_bytes")]


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback device since boot, by all processes; None where that cannot be read."""
    try:
        with open("/proc/net/dev", encoding="ascii") as file:
            fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in file)}
        return int(fields["lo"][8])
    except (OSError, KeyError, IndexError, ValueError):
        return None


def peak_rss_bytes() -> int | None:
    """The most memory that this process has had resident; None where that cannot be read."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = [line for line in file if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def busy_seconds() -> float:
    """CPU time that the whole machine has spent since boot, in seconds; 0 where that cannot be read."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(max_busy: float, at_most_s: float = 60.0, sample_s: float = 0.5) -> None:
    """Sleep until all processes together take less than a share of the CPUs, or the time is up."""
    deadline, busy_s = time.monotonic() + at_most_s, busy_seconds()
    while time.monotonic() < deadline:
        time.sleep(sample_s)
        before, busy_s = busy_s, busy_seconds()
        if busy_s - before <= max_busy * sample_s * (os.cpu_count() or 1):
            return


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes."""
    try:
        return list(os.getloadavg())
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Of everything that computes."""
    return {"python": platform.python_version(), "torch": torch.__version__, "megatron_lite": megatron_lite.__version__}


def machine(device: torch.device, load_before: list[float] | None) -> dict[str, Any]:
    """The processor or GPU, and how busy the machine was."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    return {"device": name, "cores": os.cpu_count(), "load_before": load_before, "load_after": load_average()}
