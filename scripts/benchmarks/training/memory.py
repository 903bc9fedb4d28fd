"""Measure the peak resident memory of each configuration: ZeRO-1, 2 and 3, plain torch, DDP and
FSDP2.

    python -m scripts.benchmarks.training.memory --output=memory.json
    python -m scripts.benchmarks.training.memory --micro_batches=4

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

from scripts.benchmarks.commands import TORCHRUN, measuring_parser, names_in
from scripts.benchmarks.pipeline import (
    MIB,
    Result,
    describe,
    number,
    over,
    publish,
    read_json,
    spread_of,
    table,
)
from scripts.benchmarks.training.settings import catalogue, parse
from scripts.docs.tables import ROOT

BARE = "bare"


def choose(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return the options, with `passed_on` for the benchmark, and the rows
    to measure."""
    parser = measuring_parser(__doc__, ranks=2)
    parser.add_argument("--only", default="", help="comma-separated rows; default: all")
    options, passed_on = parser.parse_known_args(argv)
    options.passed_on = passed_on
    # The memory of a compiler, or of a library that only one row imports, would be attributed to
    # that row.
    eager = [
        name
        for name, row in catalogue(parse(passed_on), options.ranks).items()
        if row.default and "compiled" not in name and "HF" not in name
    ]
    return options, names_in(options.only) or eager


def main(argv: Sequence[str]) -> int:
    """Measure all rows sequentially, print and write; return the exit code."""
    options, names = choose(argv)
    measured = {name: measure(name, options.ranks, options.passed_on) for name in (BARE, *names)}
    bare = measured.pop(BARE)
    bare_bytes = max(bare["peak_rss_bytes"])
    above = {name: max(one["peak_rss_bytes"]) - bare_bytes for name, one in measured.items()}
    rows = {
        name: {
            "peak_bytes": above[name],
            "ratios": {other: spread_of([above[name] / above[other]]) for other in names},
            **{key: one["rows"][name].get(key) for key in ("state_bytes", "attention")},
        }
        for name, one in measured.items()
    }
    columns = (
        number("peak above bare, MiB", "peak_bytes", ".0f", 1 / MIB),
        number("state, MiB", "state_bytes", ".0f", 1 / MIB),
        *(over(f"/ {name}", name) for name, row in rows.items() if row["attention"] is None),
    )
    command = "python -m scripts.benchmarks.training.memory"
    result = describe(command, argv, bare["settings"] | {"ranks": options.ranks})
    result |= {"rows": rows, "bare_bytes": bare_bytes}
    about = f"a bare process: {bare_bytes / MIB:.0f} MiB; "
    publish(result, options.output, about, table(rows, columns))
    return 0


def measure(name: str, ranks: int, passed_on: Sequence[str]) -> Result:
    """Run the training benchmark with one row; return its result.

    Raises:
        SystemExit: if it fails, with its output.
    """
    print(f"memory: {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        command = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}"]
        command += ["-m", "scripts.benchmarks.training", f"--only={name}", f"--output={output}"]
        command += ["--device=cpu", "--turns=3", "--steps_per_turn=2", "--warmup_turns=0"]
        done = subprocess.run([*command, *passed_on], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{done.stdout}{done.stderr}memory: {name}: exit code {done.returncode}"
            )
        return read_json(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
