"""Compare whole training programs on CPUs: ours, nanoGPT, picotron, Hugging Face's Trainer and
litgpt.

    python -m scripts.benchmarks.programs --nanogpt=DIR --threads=1 --max_others=0.05
    python -m scripts.benchmarks.programs --model=llama-39m --picotron=DIR --ranks=2 --isa=avx2 --output=results.json

Every program runs from its own command line, with its own loop, data loader and log. Programs are
started once and take turns of a few steps, while the others are stopped (SIGSTOP). A step lasts
from one log line to the next. Ratios compare two turns of the same round. nanoGPT and picotron run
unchanged from checkouts, the others from the packages of --python. Missing and failed programs are
listed with the reason. docs/benchmarks.md explains the table. Linux only. Run from the checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.benchmarks import processor
from scripts.benchmarks.commands import matching, measuring_parser
from scripts.benchmarks.pipeline import (
    MIB,
    Result,
    compared,
    describe,
    number,
    publish,
    spread,
    table,
    write_json,
)
from scripts.benchmarks.programs.contestants import (
    COMPARED_WITH,
    OURS,
    PROGRAMS,
    WITH_ADAPTERS,
    Setting,
    write_inputs,
)
from scripts.benchmarks.programs.race import Command, Race
from scripts.benchmarks.training.settings import add_sizes, set_sizes

# Two samples of 256 tokens: small steps show a program's overhead over the products.
MICRO_BATCH_SIZE = 2
TIMEOUT_S = 300.0  # a program without a step for so long has failed


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line and fill in the sizes of the model."""
    parser = measuring_parser(__doc__, in_quiet=True, ranks=1, turns=6, steps_per_turn=20)
    add = parser.add_argument
    add_sizes(parser, ["gpt2-11m", "llama-39m", "gpt2-124m"])
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 keeps fp32 weights; default fp32",
    )
    add(
        "--threads",
        type=int,
        help="OMP_NUM_THREADS of each process; default: unset, as each program chooses",
    )
    add(
        "--isa",
        choices=tuple(processor.ISAS),
        default="all",
        help="instruction sets of the libraries: all, or none after AVX2",
    )
    add(
        "--lora_rank",
        type=int,
        default=0,
        help="train adapters of all linear layers instead, ours and Trainer's with peft",
    )
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--picotron", type=Path, help="a checkout of picotron")
    add("--python", default=sys.executable, help="the peers' interpreter; default: this one")
    only = partial(matching, PROGRAMS, "program")
    add("--only", type=only, default="*", help="comma-separated programs, or wildcards")
    options = parser.parse_args(argv)
    for name in ("nanogpt", "picotron"):
        folder = getattr(options, name)
        if folder is not None and not (folder / "train.py").is_file():
            parser.error(f"--{name}: {folder} holds no train.py")
        setattr(options, name, folder and folder.resolve())
    options.micro_batch_size = options.micro_batch_size or MICRO_BATCH_SIZE
    set_sizes(options)
    return options


def commands_of(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the programs to run, and the reasons for those that cannot run here."""
    setting = Setting(options, folder)
    names = [name for name in options.only if not options.lora_rank or name in WITH_ADAPTERS]
    made = {name: PROGRAMS[name](setting) for name in names}
    commands = {name: one for name, one in made.items() if isinstance(one, Command)}
    return commands, {name: one for name, one in made.items() if isinstance(one, str)}


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also ends the programs
    threads = {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
    variables = {**processor.ISAS[options.isa], **threads}  # of all programs
    os.environ.update(variables)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
        folder = Path(name)
        write_inputs(folder, options.vocab_size)
        commands, missing = commands_of(options, folder)
        machine = {"instruction_sets": processor.instruction_sets(variables, options.python)}
        command = "python -m scripts.benchmarks.programs"
        head = describe(command, argv, vars(options), machine, options.python)
        head["missing"] = missing
        race = Race(
            commands, folder, TIMEOUT_S, options.turns, options.steps_per_turn, options.max_others
        )
        result: Result = {}
        for _ in race.run():  # a complete file after every round, in case the run is cut short
            rows = race.rows(OURS, COMPARED_WITH)
            result = head | {"rows": rows, "failures": race.turns.failures}
            write_json(options.output, result)
    show(result, options)
    return 1 if race.turns.failures else 0


def show(result: Result, options: argparse.Namespace) -> None:
    """Write the result and print its table."""
    rows = {name: row for name, row in result["rows"].items() if row["step_s"]}
    steps = next((row["steps"] for row in rows.values()), 0)
    columns = (
        compared("ours / it"),
        spread("step, ms", "step_s", 0, 1e3),
        number("peak, MiB", "peak_rss_bytes", ",.0f", 1 / MIB),
        number("first step after, s", "start_s", ".1f"),
        number(f"loss at step {steps}", "loss", ".3f"),
    )
    threads = options.threads or "as each program chooses"
    about = f"{options.model}, ranks: {options.ranks}, threads: {threads}, "
    about += f"{options.micro_batch_size} x {options.sequence_length} tokens per rank and step, {options.dtype}. "
    if options.lora_rank:
        about += f"Adapters of rank {options.lora_rank} in all linear layers. "
    publish(result, options.output, about, table(rows, columns))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
