"""Measure the peak resident memory of each configuration by itself: ZeRO-1, 2 and 3, plain torch, DDP and FSDP2.

    python -m scripts.benchmarks.training.memory --output=memory.json
    python -m scripts.benchmarks.training.memory --layers=plain --micro_batches=4

Runs scripts.benchmarks.training on two CPU ranks once per configuration, for a few steps, and once bare: all imports, a
process group, no model. The result is the kernel's peak of resident memory (VmHWM) of the largest rank less that of the
bare process. Options not listed below are passed to scripts.benchmarks.training. Prints a Markdown table;
docs/benchmarks.md explains it. Run from the checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import argument_parser, names_in, write_json
from scripts.benchmarks.training.report import MIB, table
from scripts.benchmarks.training.settings import catalogue, parse

BARE = "bare"
REFERENCES = ("torch", "DDP", "FSDP2", "FSDP2 all resharded", "torch TP", "torch TP+SP")
# (row, peer, largest ratio of peaks)
TARGETS = (
    ("ZeRO-1", "torch", 1.0),
    ("ZeRO-1", "DDP", 1.0),
    ("ZeRO-2", "DDP", 1.0),
    *(("ZeRO-3", peer, 1.0) for peer in REFERENCES[2:4]),
    *(("ZeRO-3 breadth-first", peer, 1.0) for peer in REFERENCES[2:4]),
    *(("plain ZeRO-3", peer, 0.7) for peer in REFERENCES[2:4]),
    ("TP", "torch TP", 1.0),
    ("TP+SP", "torch TP+SP", 1.0),
)


def choose(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return the options, with `passed_on` for the benchmark, and the rows to measure."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--only", default="", help="comma-separated rows; default: all of the chosen layers")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options, passed_on = parser.parse_known_args(argv)
    options.passed_on = passed_on
    rows = catalogue(parse(passed_on), options.ranks)
    # A compiler, or a library that only one row imports, would count as memory of that row.
    eager = [name for name, row in rows.items() if row.default and not row.compiled and "HF" not in row.model]
    return options, names_in(options.only) or eager


def main(argv: Sequence[str]) -> int:
    """Measure one row after the other, print and write; return the exit code."""
    options, names = choose(argv)
    measured = {name: measure(name, options.ranks, options.passed_on) for name in (BARE, *names)}
    bare = measured.pop(BARE)
    result = {
        "command": f"python -m scripts.benchmarks.training.memory {' '.join(argv)}".strip(),
        "settings": bare["settings"],
        "versions": bare["versions"],
        "ranks": options.ranks,
        "bare_bytes": max(bare["peak_rss_bytes"]),
        "configurations": compare(measured, max(bare["peak_rss_bytes"])),
    }
    print(to_markdown(result), flush=True)
    write_json(options.output, result)
    return 0


def measure(name: str, ranks: int, passed_on: Sequence[str]) -> dict[str, Any]:
    """Run the training benchmark with one row; return its JSON.

    Raises:
        SystemExit: if it fails, with its output.
    """
    print(f"memory: {name}", file=sys.stderr, flush=True)
    torchrun = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    short = ("--device=cpu", "--turns=3", "--steps_per_turn=2", "--warmup_turns=0")
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        program = (*torchrun, f"--nproc-per-node={ranks}", "-m", "scripts.benchmarks.training", *short, *passed_on)
        command = [sys.executable, *program, f"--only={name}", f"--output={output}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}{done.stderr}memory: {name}: exit code {done.returncode}")
        result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return result


def compare(measured: dict[str, dict[str, Any]], bare_bytes: int) -> dict[str, dict[str, Any]]:
    """Return each row's peak above a bare process and its ratios to the peers."""
    above = {name: max(one["peak_rss_bytes"]) - bare_bytes for name, one in measured.items()}
    return {
        name: {
            "peak_bytes": value,
            "state_bytes": measured[name]["configurations"][name]["state_bytes"],
            "ratios": {peer: value / above[peer] for peer in REFERENCES if peer in above},
        }
        for name, value in above.items()
    }


def to_markdown(result: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks.md."""
    rows = [
        {
            "": name,
            "peak above bare, MiB": f"{row['peak_bytes'] / MIB:.0f}",
            "state, MiB": f"{row['state_bytes'] / MIB:.0f}",
            **{f"/ {peer}": f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in REFERENCES},
        }
        for name, row in result["configurations"].items()
    ]
    lines = [*table(rows), "", f"a bare process: {result['bare_bytes'] / MIB:.0f} MiB"]
    for name, peer, limit in TARGETS:
        ratio = result["configurations"].get(name, {}).get("ratios", {}).get(peer)
        if ratio is not None:
            verdict = "met" if ratio <= limit else "missed"
            lines.append(f"{name} / {peer}: {ratio:.3f}, goal: at most {limit:g}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
