"""Results of a race: spreads, ratios, the machine, and a Markdown table."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks import instructions
from scripts.benchmarks.common import cores, markdown_table, spread_cell, spread_of
from scripts.benchmarks.programs.race import Record, ratios

MIB = 2**20
LAST_STEPS = 10  # a loss is the mean of this many
_VERSIONS = """
import importlib.metadata, json, platform
known = {"python": platform.python_version()}
for name in ("torch", "transformers", "accelerate", "litgpt", "deepspeed"):
    try:
        known[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(known))
"""


def summarize(records: Mapping[str, Record], ours: str, beside: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return spreads per program, ratios of our time to theirs by round, and the loss after equally many steps.

    `ours` is our program; `beside` names another of ours for the programs that are compared with that one.
    """
    lengths = [len(record.losses) for record in records.values() if record.failure is None]
    steps = min(lengths, default=0)
    result = {}
    for name, record in records.items():
        step_s, cpu_s = ([value for value in values if value is not None] for values in (record.step_s, record.cpu_s))
        losses = record.losses[max(0, steps - LAST_STEPS) : steps]
        own = beside.get(name, ours)
        compared = ratios(records[own].step_s, record.step_s) if own in records else []
        result[name] = {
            "step_s": _spread(step_s),
            "cpu_s": _spread(cpu_s),
            "ours_over_it": _spread(compared) if name != ours else None,
            "start_s": _spread(record.start_s),
            "others": _spread(record.others),
            "peak_rss_bytes": record.peak_rss_bytes,
            "loss": statistics.mean(losses) if losses else None,
            "steps": steps,
            "losses": record.losses,
            "failure": record.failure,
        }
    return result


def _spread(values: list[float]) -> dict[str, Any] | None:
    return {**spread_of(values), "values": values} if values else None


def versions(python: str) -> dict[str, str]:
    """Return the versions of the packages that the peers' interpreter has."""
    done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    known: dict[str, str] = json.loads(done.stdout)
    return known


def machine(environment: Mapping[str, str], python: str) -> dict[str, Any]:
    """Return the processor, the cores that this process may use, and the instruction sets of the libraries."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "device": names[0] if names else "unknown",
        "cores": len(cores()),
        "instruction_sets": instructions.instruction_sets(environment, python),
    }


def to_markdown(result: dict[str, Any]) -> str:
    """Return the table of one run, with its setting above and what did not run below."""
    return "\n".join([setting(result), "", *table(result), "", *remarks(result)])


def setting(result: dict[str, Any]) -> str:
    """Describe model, work, machine and versions."""
    options, machine, numbers = result["settings"], result["machine"], result["versions"]
    threads = "threads as each program chooses" if options["threads"] is None else f"{options['threads']} threads"
    ranks = "one process" if options["ranks"] == 1 else f"{options['ranks']} ranks"
    return (
        f"{options['model']}, {ranks}, {threads.replace('1 threads', '1 thread')}, "
        f"{options['micro_batch_size']} x {options['sequence_length']} tokens per rank and step, fp32. "
        f"{machine['device']}, {machine['cores']} cores; {instructions.sentence(machine['instruction_sets'])}. "
        f"{', '.join(f'{name} {version}' for name, version in numbers.items())}; commit {result['commit']}, "
        f"{result['date']}."
    )


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table: a row per program that trained."""
    sound = {name: row for name, row in result["programs"].items() if row["step_s"]}
    steps = next((row["steps"] for row in sound.values()), 0)
    header = ("", "ours / it", "step, ms", "CPU, ms", "peak, MiB", "first step after, s", f"loss at step {steps}")
    rows = []
    for name, row in sound.items():
        rows.append(
            [
                name,
                spread_cell(row["ours_over_it"], 2),
                spread_cell(_milliseconds(row["step_s"]), 0),
                f"{1000 * row['cpu_s']['median']:.0f}",
                f"{row['peak_rss_bytes'] / MIB:,.0f}",
                spread_cell(row["start_s"], 1),
                "" if row["loss"] is None else f"{row['loss']:.3f}",
            ]
        )
    return markdown_table(header, rows)


def remarks(result: dict[str, Any]) -> list[str]:
    """Return a line per program that failed or cannot run."""
    failures = [f"failed: {name}: {row['failure']}" for name, row in result["programs"].items() if row["failure"]]
    return [*failures, *(f"not run: {name}: {reason}" for name, reason in result["unavailable"].items())]


def _milliseconds(spread: dict[str, Any]) -> dict[str, Any]:
    return {"median": 1000 * spread["median"], "quartiles": [1000 * value for value in spread["quartiles"]]}
