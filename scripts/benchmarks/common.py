"""Helpers that all benchmarks share: command lines, JSON files, spreads and Markdown tables. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.run.durable_files import replace_file

ROOT = Path(__file__).resolve().parents[2]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the description as written and accepts no abbreviated flags."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result file in one step, so that readers never see half of it; without a path do nothing."""
    if path is not None:
        replace_file(path, (json.dumps(result, indent=1, default=str) + "\n").encode())


def commit() -> str:
    """Return the commit of this checkout, with "+" if files are changed, or "unknown"."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cores() -> Collection[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def busy_seconds() -> float:
    """Return the time that all processes have used on these cores since boot, or 0 if unknown."""
    own = {f"cpu{core}" for core in cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    except OSError:
        return 0.0
    used = (fields for fields in lines if fields and fields[0] in own)
    # user, nice, system, idle, iowait, irq, softirq, steal
    return sum(sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in used) / os.sysconf("SC_CLK_TCK")


def resident_bytes(reset: bool = False) -> int:
    """Return the highest resident memory since the last reset, or the present one and reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmRSS:" if reset else "VmHWM:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reason_of(error: Exception) -> str:
    """Describe an error in at most 500 characters."""
    return f"{type(error).__name__}: {error}"[:500]


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles of one or more values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return {"median": median, "quartiles": [low, high]}


def spread_cell(spread: dict[str, Any] | None, digits: int) -> str:
    """Format a spread as "median (low-high)", or as the median where rounding makes all three equal."""
    if spread is None:
        return ""
    low, high = (f"{value:.{digits}f}" for value in spread["quartiles"])
    median = f"{spread['median']:.{digits}f}"
    return median if low == high else f"{median} ({low}-{high})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
