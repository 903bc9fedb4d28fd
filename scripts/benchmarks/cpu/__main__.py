"""Measure everything in docs/benchmarks.md that needs a quiet CPU, and add it to one JSON file.

    python -m scripts.benchmarks.cpu --nanogpt=DIR --picotron=DIR
    python -m scripts.benchmarks.cpu --isa=avx2 --only="steps*" --max_others=0.05
    python -m scripts.benchmarks.cpu.render

Runs scripts.benchmarks.programs and scripts.benchmarks.training once per question and instruction set. The file is
rewritten after every run; a later call replaces only the runs that it repeats. Failed runs are listed at the end, with
exit code 1. `render` puts the tables into docs/benchmarks.md. Linux only. Run from the checkout.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.cpu.runs import RUNS, Run
from scripts.benchmarks.processor import ISAS
from scripts.benchmarks.results import ROOT, Result, argument_parser, names_in, read_json, write_json

REPORT = ROOT / "docs" / "cpu_report.json"
# Long lists that no table shows, and paths of this machine.
DROPPED = {"losses", "values", "command", "settings"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--isa", default=",".join(ISAS), help=f"comma-separated: {', '.join(ISAS)} (default: both)")
    parser.add_argument("--only", default="*", help="comma-separated runs; * and ? are wildcards")
    parser.add_argument("--turns", type=int, default=6, help="rounds of every run (default 6)")
    parser.add_argument("--max_others", type=float, help="count only turns with less of the cores taken by others")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--picotron", type=Path, help="a checkout of picotron")
    parser.add_argument("--python", help="the interpreter of the other programs; default: this one")
    parser.add_argument("--output", type=Path, default=REPORT, help="default docs/cpu_report.json")
    options = parser.parse_args(argv)
    options.isa = names_in(options.isa)
    if not set(options.isa) <= set(ISAS):
        parser.error(f"--isa: choose from {', '.join(ISAS)}")
    options.runs = [run for run in RUNS if any(fnmatch.fnmatch(run.name, one) for one in names_in(options.only))]
    if not options.runs:
        parser.error(f"--only: no run is called {options.only!r}; choose from {[run.name for run in RUNS]}")
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write; return the exit code."""
    options = parse(argv)
    report: dict[str, Any] = read_json(options.output) or {}
    failed = []
    for run in options.runs:
        for isa in options.isa:
            if run.isa in (None, isa):
                before = time.monotonic()
                result = measure(run, isa, options)
                print(f"cpu_report: {run.name} ({isa}): {time.monotonic() - before:.0f} s", flush=True)
                if result is None:
                    failed.append(f"{run.name} ({isa})")
                else:
                    report.setdefault(run.name, {})[isa] = compact(result)
                    write_json(options.output, report)
    for name in failed:
        print(f"cpu_report: failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def measure(run: Run, isa: str, options: argparse.Namespace) -> Result | None:
    """Return the results of one run, including failed rows, or None if it wrote none."""
    with tempfile.TemporaryDirectory(prefix="cpu_report_") as folder:
        output = Path(folder, "result.json")
        command = run.command(options, isa, output)
        subprocess.run(command, cwd=ROOT, env={**os.environ, **ISAS[isa]}, stdout=subprocess.DEVNULL)
        return read_json(output)


def compact(value: Any) -> Any:
    """Return a result without the lists that no table shows and without local paths."""
    if isinstance(value, dict):
        return {key: compact(one) for key, one in value.items() if key not in DROPPED}
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
