"""Join the reports of several calls into one: a machine that is lent for minutes measures a part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SAME = ("machine", "versions")  # of all parts of a report: numbers of two machines or commits do not belong together


def difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Return the first property of machine or software in which two reports differ, or None."""
    for area in SAME:
        first, second = a.get(area) or {}, b.get(area) or {}
        for name in [*first, *(name for name in second if name not in first)]:
            if first.get(name) != second.get(name):
                return f"{name} {first.get(name)} and {second.get(name)}"
    return None


def merged(reports: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Return one report with the steps of all, in this order; of a step in several reports, the last counts.

    Raises:
        ValueError: if the reports are of different machines or versions.
    """
    steps: dict[str, Any] = {}
    for report in reports:
        if (found := difference(reports[0], report)) is not None:
            raise ValueError(f"the reports are of different machines or versions: {found}")
        steps |= report.get("steps", {})
    names = [*(name for name in order if name in steps), *(name for name in steps if name not in order)]
    return {
        **reports[-1],
        "ok": bool(steps) and all(step["status"] == "ok" for step in steps.values()),
        "seconds": round(sum(report.get("seconds", 0.0) for report in reports), 1),
        "steps": {name: steps[name] for name in names},
    }
