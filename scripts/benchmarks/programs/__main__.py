"""Compare whole training programs on CPUs: ours, nanoGPT, picotron, Hugging Face's Trainer, litgpt
and DeepSpeed.

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
from scripts.benchmarks.programs.contestants import (
    COMPARED_WITH,
    OURS,
    PROGRAMS,
    Setting,
    write_inputs,
)
from scripts.benchmarks.programs.race import Command, Race
from scripts.benchmarks.results import (
    MIB,
    Result,
    argument_parser,
    environment,
    matching,
    write_json,
)
from scripts.benchmarks.tables import compared, number, remarks, spread, surroundings, table
from scripts.benchmarks.training.settings import MODELS, Sizes

# Two samples of 256 tokens: small steps show a program's overhead over the products.
MICRO_BATCH_SIZE = 2
COLUMNS = (
    spread("step, ms", "step_s", 0, 1e3),
    number("CPU, ms", "cpu_s", ".0f", 1e3),
    number("peak, MiB", "peak_rss_bytes", ",.0f", 1 / MIB),
    spread("first step after, s", "start_s", 1),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line and fill in the sizes of the model."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add(
        "--model",
        choices=("gpt2-11m", "llama-39m"),
        default="gpt2-11m",
        help="default gpt2-11m; to change its sizes:",
    )
    for name in Sizes._fields:
        add(
            f"--{name}",
            type=int,
            help="default 2" if name == "micro_batch_size" else "default: the model's",
        )
    add(
        "--ranks",
        type=int,
        default=1,
        help="processes of each program, under torchrun if more than 1 (default 1)",
    )
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
    isas = tuple(processor.ISAS)
    add(
        "--isa",
        choices=isas,
        default="all",
        help="instruction sets of the libraries: all, or none after AVX2",
    )
    add("--turns", type=int, default=6, help="rounds (default 6)")
    add("--steps_per_turn", type=int, default=20, help="default 20, after an untimed one")
    add(
        "--starts",
        type=int,
        default=1,
        help="starts of each program, for the time to the first step (default 1)",
    )
    add(
        "--max_others",
        type=float,
        help="count only turns in which other programs used at most this share of cores",
    )
    add(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds without a step after which a program has failed",
    )
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--picotron", type=Path, help="a checkout of picotron")
    add("--python", default=sys.executable, help="the peers' interpreter; default: this one")
    add("--ours", default="", help='more flags of our program: "--attention_backend=math ..."')
    only = partial(matching, PROGRAMS, "program")
    add(
        "--only",
        type=only,
        default="*",
        help="comma-separated programs, by their names in the table, or wildcards",
    )
    add("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if min(options.turns, options.steps_per_turn, options.starts, options.ranks) < 1:
        parser.error("--turns, --steps_per_turn, --starts and --ranks must be at least 1")
    for name in ("nanogpt", "picotron"):
        folder = getattr(options, name)
        if folder is not None and not (folder / "train.py").is_file():
            parser.error(f"--{name}: {folder} holds no train.py")
        setattr(options, name, folder and folder.resolve())
    options.micro_batch_size = options.micro_batch_size or MICRO_BATCH_SIZE
    for name, default in MODELS[options.model][0]._asdict().items():
        setattr(options, name, getattr(options, name) or default)
    return options


def commands_of(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the programs to run, and the reasons for those that cannot run here."""
    setting = Setting(options, folder)
    commands = {}
    missing = {}
    for name in options.only:
        made = PROGRAMS[name](setting)
        if isinstance(made, str):
            missing[name] = made
        elif made is not None:
            commands[name] = made
    return commands, missing


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
        head: Result = {
            "environment": environment(
                "python -m scripts.benchmarks.programs", argv, machine, options.python
            ),
            "settings": {name: value for name, value in vars(options).items() if name != "output"},
            "variables": variables,
            "missing": missing,
        }
        race = Race(
            commands,
            folder,
            options.timeout,
            options.turns,
            options.steps_per_turn,
            options.max_others,
        )
        result: Result = {}
        for _ in race.run(options.starts):
            result = head | {
                "rows": race.rows(OURS, COMPARED_WITH),
                "failures": race.turns.failed(),
            }
            # complete after every round, in case the run is cut short
            write_json(options.output, result)
    print(to_markdown(result), flush=True)
    return 1 if race.turns.failed() else 0


def to_markdown(result: Result) -> str:
    """Return the table of one run, with its settings above and the contestants that did not run
    below."""
    options = result["settings"]
    rows = {name: row for name, row in result["rows"].items() if row["step_s"]}
    threads = {None: "threads as each program chooses", 1: "1 thread"}.get(
        options["threads"], f"{options['threads']} threads"
    )
    ranks = "one process" if options["ranks"] == 1 else f"{options['ranks']} ranks"
    tokens = f"{options['micro_batch_size']} x {options['sequence_length']} tokens per rank and step, {options['dtype']}"
    steps = next((row["steps"] for row in rows.values()), 0)
    columns = (compared("ours / it"), *COLUMNS, number(f"loss at step {steps}", "loss", ".3f"))
    setting = (
        f"{options['model']}, {ranks}, {threads}, {tokens}. {surroundings(result['environment'])}."
    )
    return "\n".join([setting, "", *table(rows, columns), "", *remarks(result)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
