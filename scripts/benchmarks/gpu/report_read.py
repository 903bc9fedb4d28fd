"""How report.py reads what its steps leave: a JSON file, or the lines of a log, whole or cut short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# A line of `pytest -v`, with and without pytest-xdist.
OUTCOME = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
TEST_LINE = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>{OUTCOME}) (?P<a>\S+::.*)|(?P<b>\S+::.*) (?P<last>{OUTCOME})(?: .*)?)$"
)
SUMMARY_LINE = re.compile(r"^(FAILED|ERROR) (tests/.*)$")
LEFT_OUT_OF_A_ROW = ("losses", "state_bytes_by_kind", "cpu_s", "others")


def read_json(output: Path, log: Path) -> Any:
    """The file itself; None where nothing was written."""
    return json.loads(output.read_text("utf-8")) if output.exists() else None


def read_smoke_test(output: Path, log: Path) -> Any:
    """The last line of the log that is a JSON object."""
    for line in reversed(log.read_text("utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def read_tests(output: Path, log: Path) -> dict[str, Any]:
    """Counts by outcome, and what the summary says of failures, out of the log of `pytest -v -rfE`."""
    counts: dict[str, int] = {}
    failures, failed = [], []
    for line in log.read_text("utf-8", errors="replace").splitlines():
        found = TEST_LINE.match(line)
        if found:
            outcome = (found["first"] or found["last"]).lower()
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome in ("failed", "error"):
                failed.append((found["a"] or found["b"]).strip())
        elif summary := SUMMARY_LINE.match(line):
            failures.append(summary[2][:300])
    return {"counts": counts, "failures": failures or failed}  # the summary is missing where it was stopped


def read_benchmark(output: Path, log: Path) -> Any:
    """The JSON of scripts/benchmarks/training without losses and the like."""
    result = read_json(output, log)
    if result is not None:
        for row in result["configurations"].values():
            for key in LEFT_OUT_OF_A_ROW:
                row.pop(key, None)
    return result
