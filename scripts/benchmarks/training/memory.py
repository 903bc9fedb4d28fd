"""Measure the peak resident memory of each configuration: ZeRO-1, 2 and 3, plain torch, DDP and
FSDP2.

    python -m scripts.benchmarks.training.memory --output=memory.json
    python -m scripts.benchmarks.training.memory --layers=plain --micro_batches=4

Runs scripts.benchmarks.training on two CPU ranks once per configuration, for a few steps, and once
bare: all imports, a process group, no model. The result is the largest rank's peak resident memory
(VmHWM) minus that of the bare process. Options not listed below are passed to
scripts.benchmarks.training. Prints a Markdown table; docs/benchmarks.md explains it. Run from the
checkout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.config.system import PIPELINE_SCHEDULES
from scripts.benchmarks.results import (
    MIB,
    ROOT,
    TORCHRUN,
    Result,
    argument_parser,
    names_in,
    read_json,
    spread_of,
)
from scripts.benchmarks.tables import Goal, number, over, publish, table
from scripts.benchmarks.training.settings import catalogue, parse

BARE = "bare"
REFERENCES = (
    *("torch", "DDP", "FSDP2", "FSDP2 all resharded", "torch TP", "torch TP+SP"),
    *(f"torch {schedule}" for schedule in PIPELINE_SCHEDULES),
)
GOALS = (
    Goal("ZeRO-1", "/ torch", 1.0),
    Goal("ZeRO-1", "/ DDP", 1.0),
    Goal("ZeRO-2", "/ DDP", 1.0),
    *(Goal("ZeRO-3", f"/ {peer}", 1.0) for peer in REFERENCES[2:4]),
    *(Goal("ZeRO-3 breadth-first", f"/ {peer}", 1.0) for peer in REFERENCES[2:4]),
    *(Goal("plain ZeRO-3", f"/ {peer}", 0.7) for peer in REFERENCES[2:4]),
    Goal("TP", "/ torch TP", 1.0),
    Goal("TP+SP", "/ torch TP+SP", 1.0),
    *(Goal(schedule, f"/ torch {schedule}", 1.0) for schedule in PIPELINE_SCHEDULES),
)
COLUMNS = (
    number("peak above bare, MiB", "peak_bytes", ".0f", 1 / MIB),
    number("state, MiB", "state_bytes", ".0f", 1 / MIB),
    *(over(f"/ {peer}", peer) for peer in REFERENCES),
)


def choose(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return the options, with `passed_on` for the benchmark, and the rows
    to measure."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument(
        "--only", default="", help="comma-separated rows; default: all of the chosen layers"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options, passed_on = parser.parse_known_args(argv)
    options.passed_on = passed_on
    rows = catalogue(parse(passed_on), options.ranks)
    # The memory of a compiler, or of a library that only one row imports, would be attributed to
    # that row.
    eager = [
        name
        for name, row in rows.items()
        if row.default and not row.compiled and "HF" not in row.model
    ]
    return options, names_in(options.only) or eager


def main(argv: Sequence[str]) -> int:
    """Measure all rows sequentially, print and write; return the exit code."""
    options, names = choose(argv)
    measured = {name: measure(name, options.ranks, options.passed_on) for name in (BARE, *names)}
    settings, bare_bytes = measured[BARE]["settings"], max(measured.pop(BARE)["peak_rss_bytes"])
    above = {name: max(one["peak_rss_bytes"]) - bare_bytes for name, one in measured.items()}
    rows = {
        name: {
            "peak_bytes": value,
            "state_bytes": measured[name]["rows"][name]["state_bytes"],
            "ratios": {
                peer: spread_of([value / above[peer]]) for peer in REFERENCES if peer in above
            },
        }
        for name, value in above.items()
    }
    about = f"a bare process: {bare_bytes / MIB:.0f} MiB; "
    more = {
        "about": about,
        "goals": GOALS,
        "settings": settings,
        "ranks": options.ranks,
        "bare_bytes": bare_bytes,
    }
    publish(
        "python -m scripts.benchmarks.training.memory",
        argv,
        options,
        rows,
        table(rows, COLUMNS),
        **more,
    )
    return 0


def measure(name: str, ranks: int, passed_on: Sequence[str]) -> Result:
    """Run the training benchmark with one row; return its result.

    Raises:
        SystemExit: if it fails, with its output.
    """
    print(f"memory: {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        short = ("--device=cpu", "--turns=3", "--steps_per_turn=2", "--warmup_turns=0", *passed_on)
        words = [
            "-m",
            "scripts.benchmarks.training",
            *short,
            f"--only={name}",
            f"--output={output}",
        ]
        command = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{done.stdout}{done.stderr}memory: {name}: exit code {done.returncode}"
            )
        return read_json(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
