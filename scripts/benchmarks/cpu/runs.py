"""The runs of the report, one command per question. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.results import TORCHRUN

CORES, THREAD, RANKS, BF16 = "all cores", "one thread", "two ranks", "bf16"
TENSOR = "tensor parallelism"  # on two ranks
GPT2, LLAMA = "gpt2-11m", "llama-39m"
PLACES = (CORES, THREAD, RANKS)
_ONE_PROCESS = "torch,torch compiled,ZeRO-1,products,HF,HF compiled"
_TWO_RANKS = "DDP,DDP compiled,ZeRO-?,FSDP2,FSDP2 all resharded,FSDP2 compiled,HF DDP,HF DDP compiled"


@dataclass(frozen=True)
class Run:
    """One measurement. isa: limits it to one instruction set."""

    kind: str  # "programs" (whole programs) or "steps" (bare training steps)
    place: str  # one process with all cores or one thread, two ranks of one thread; or a question of its own
    model: str
    isa: str | None = None

    @property
    def name(self) -> str:
        """The key of the run in the report, which --only matches."""
        return f"{self.kind} {self.model} {self.place}"

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return 2 if self.place in (RANKS, TENSOR) else 1

    def arguments(self, isa: str = "all") -> list[str]:
        """Return the arguments of the benchmark, except paths.

        With AVX2 only, steps have no compiled rows: torch's compiler still vectorizes for all instruction sets of the
        processor, and its kernels abort the process.
        """
        words = [f"--model={self.model}"]
        if self.kind == "programs":
            words += ["--steps_per_turn=10"] if self.model == LLAMA else []  # steps take about a second
            return [*words, *{CORES: [], THREAD: ["--threads=1"], RANKS: ["--threads=1", "--ranks=2"]}[self.place]]
        words += ["--device=cpu", "--micro_batch_size=2", f"--threads={0 if self.place == CORES else 1}"]
        if self.place == TENSOR:
            return [*words, "--tensor_parallel=2", "--steps_per_turn=4"]
        if self.place == BF16:
            return [*words, "--dtype=bf16", "--steps_per_turn=2", "--only=ZeRO-1,ZeRO-1 fp32"]
        rows = (_ONE_PROCESS if self.ranks == 1 else _TWO_RANKS).split(",")
        only = [name for name in rows if isa == "all" or "compiled" not in name]
        return [*words, "--steps_per_turn=4", *(["--profile"] if self.ranks == 1 else []), f"--only={','.join(only)}"]

    def command(self, options: argparse.Namespace, isa: str, output: Path) -> list[str]:
        """Return the command with local paths."""
        words = [*self.arguments(isa), f"--turns={options.turns}", f"--output={output}"]
        if options.max_others is not None:
            words.append(f"--max_others={options.max_others:g}")
        if self.kind == "programs":
            folders = {"nanogpt": options.nanogpt, "picotron": options.picotron, "python": options.python}
            words += [f"--{name}={value}" for name, value in folders.items() if value is not None]
            return [sys.executable, "-m", "scripts.benchmarks.programs", *words, f"--isa={isa}"]
        launcher = [sys.executable, *TORCHRUN, f"--nproc-per-node={self.ranks}"]
        return [*launcher, "-m", "scripts.benchmarks.training", *words]


RUNS = (
    *(Run("programs", place, model) for place in PLACES for model in (GPT2, LLAMA)),
    *(Run("steps", place, model) for place in (CORES, THREAD) for model in (GPT2, LLAMA)),
    Run("steps", RANKS, LLAMA),
    Run("steps", TENSOR, LLAMA, isa="all"),
    Run("steps", BF16, GPT2, isa="avx2"),
)
