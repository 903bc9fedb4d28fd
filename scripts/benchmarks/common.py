"""Helpers that all benchmarks share: command lines, JSON files, spreads and Markdown tables. Imports no torch."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.run.durable_files import replace_file


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
