"""Measure everything in docs/benchmarks.md that needs a quiet CPU, and add it to one JSON file.

    python -m scripts.benchmarks.cpu --nanogpt=DIR --picotron=DIR
    python -m scripts.benchmarks.cpu --isa=avx2 --only="steps*" --max_others=0.05
    python -m scripts.benchmarks.cpu.render

Runs scripts.benchmarks.programs and scripts.benchmarks.training once per question and instruction
set. The file is rewritten after every run; a later call replaces only the runs that it repeats.
Failed runs are listed at the end, with exit code 1. `render` puts the tables into
docs/benchmarks.md. Linux only. Run from the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.commands import TORCHRUN, matching, measuring_parser, names_in
from scripts.benchmarks.pipeline import Result, read_json, write_json
from scripts.benchmarks.processor import ISAS
from scripts.docs.tables import ROOT

REPORT = ROOT / "docs" / "cpu_report.json"
# Long lists that no table shows, and paths of this machine.
DROPPED = {"losses", "values", "command", "settings"}
CORES = "all cores"
THREAD = "one thread"
RANKS = "two ranks"
BF16 = "bf16"
# on two ranks, two, and four
TENSOR = "tensor parallelism"
PIPELINE = "pipelines"
HYBRID = "hybrid shards"
GPT2, LLAMA = "gpt2-11m", "llama-39m"
_ONE_PROCESS = "torch,torch compiled,ZeRO-1,products,HF,HF compiled"
_HYBRID = "ZeRO-2,ZeRO-3,FSDP2,FSDP2 all resharded,FSDP2 no reshard"
_TWO_RANKS = (
    "DDP,DDP compiled,ZeRO-?,FSDP2,FSDP2 all resharded,FSDP2 compiled,HF DDP,HF DDP compiled"
)


_PIPELINE = "--pipeline_parallel=2 --micro_batches=8 --steps_per_turn=1"


@dataclass(frozen=True)
class Run:
    """One measurement. isa: limits it to one instruction set."""

    kind: str  # "programs" (whole programs) or "steps" (bare training steps)
    place: str  # all cores, one thread, two ranks of one thread; or a question of its own
    model: str
    flags: str = ""
    only: str = ""  # rows
    ranks: int = 1
    isa: str | None = None

    @property
    def name(self) -> str:
        """The key of the run in the report, which --only matches."""
        return f"{self.kind} {self.model} {self.place}"

    def arguments(self, isa: str = "all") -> list[str]:
        """Return the arguments of the benchmark, except paths.

        With AVX2 only, steps have no compiled rows: torch's compiler still vectorizes for all
        instruction sets of the processor, and its kernels abort the process.
        """
        rows = [row for row in names_in(self.only) if isa == "all" or "compiled" not in row]
        only = [f"--only={','.join(rows)}"] if rows else []
        common = ["--device=cpu", "--micro_batch_size=2"]
        if self.kind == "programs":
            common = [f"--ranks={self.ranks}"]
        return [f"--model={self.model}", *common, *self.flags.split(), *only]

    def command(self, options: argparse.Namespace, isa: str, output: Path) -> list[str]:
        """Return the command with local paths."""
        words = [*self.arguments(isa), f"--turns={options.turns}", f"--output={output}"]
        if options.max_others is not None:
            words.append(f"--max_others={options.max_others:g}")
        if self.kind == "programs":
            folders = {name: getattr(options, name) for name in ("nanogpt", "picotron", "python")}
            words += [f"--{name}={value}" for name, value in folders.items() if value is not None]
            return [sys.executable, "-m", "scripts.benchmarks.programs", *words, f"--isa={isa}"]
        launcher = [sys.executable, *TORCHRUN, f"--nproc-per-node={self.ranks}"]
        return [*launcher, "-m", "scripts.benchmarks.training", *words]


_LLAMA_PROGRAMS = "--steps_per_turn=10"  # steps take about a second
_PROFILED = "--steps_per_turn=4 --profile"
RUNS = (
    Run("programs", CORES, GPT2),
    Run("programs", CORES, LLAMA, _LLAMA_PROGRAMS),
    Run("programs", THREAD, GPT2, "--threads=1"),
    Run("programs", THREAD, LLAMA, f"--threads=1 {_LLAMA_PROGRAMS}"),
    Run("programs", RANKS, GPT2, "--threads=1", ranks=2),
    Run("programs", RANKS, LLAMA, f"--threads=1 {_LLAMA_PROGRAMS}", ranks=2),
    Run("steps", CORES, GPT2, f"--threads=0 {_PROFILED}", _ONE_PROCESS),
    Run("steps", CORES, LLAMA, f"--threads=0 {_PROFILED}", _ONE_PROCESS),
    Run("steps", THREAD, GPT2, _PROFILED, _ONE_PROCESS),
    Run("steps", THREAD, LLAMA, _PROFILED, _ONE_PROCESS),
    Run("steps", RANKS, LLAMA, "--steps_per_turn=4", _TWO_RANKS, 2),
    Run("steps", TENSOR, LLAMA, "--tensor_parallel=2 --steps_per_turn=4", "", 2, "all"),
    Run("steps", PIPELINE, LLAMA, _PIPELINE, "", 2, "all"),
    Run("steps", HYBRID, LLAMA, "--data_parallel_shard=2 --steps_per_turn=2", _HYBRID, 4, "all"),
    Run("steps", BF16, GPT2, "--dtype=bf16 --steps_per_turn=2", "ZeRO-1,ZeRO-1 fp32", isa="avx2"),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measuring_parser(__doc__, in_quiet=True, turns=6)
    parser.set_defaults(output=REPORT)
    isas = partial(matching, ISAS, "instruction set")
    runs = partial(matching, [run.name for run in RUNS], "run")
    parser.add_argument(
        "--isa", type=isas, default="*", help=f"comma-separated: {', '.join(ISAS)} (default: both)"
    )
    parser.add_argument(
        "--only", type=runs, default="*", help="comma-separated runs; * and ? are wildcards"
    )
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--picotron", type=Path, help="a checkout of picotron")
    parser.add_argument("--python", help="the interpreter of the other programs; default: this one")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure and write; return the exit code."""
    options = parse(argv)
    report: dict[str, Any] = read_json(options.output) or {}
    failed = []
    runs = [run for run in RUNS if run.name in options.only]
    for run, isa in ((run, isa) for run in runs for isa in options.isa if run.isa in (None, isa)):
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
        subprocess.run(
            run.command(options, isa, output),
            cwd=ROOT,
            env={**os.environ, **ISAS[isa]},
            stdout=subprocess.DEVNULL,
        )
        return read_json(output)


def compact(value: Any) -> Any:
    """Return a result without the lists that no table shows and without local paths."""
    if isinstance(value, dict):
        return {key: compact(one) for key, one in value.items() if key not in DROPPED}
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
