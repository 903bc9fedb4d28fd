"""Read a run's metrics.jsonl."""

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in the order of their iterations.

    The last line of a phase and iteration counts (a resumed run repeats some). Numbers that were
    not finite are None. Lines that are not JSON objects (a torn last line, a damaged disk) are left
    out.
    """
    records: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records[record.get("phase"), record.get("iteration")] = record
    return sorted(records.values(), key=lambda record: record.get("iteration") or 0)
