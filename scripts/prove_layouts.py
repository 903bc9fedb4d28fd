#!/usr/bin/env python3
"""Prove that every layout computes the same: train a tiny model in random layouts, and compare with
one rank.

    python scripts/prove_layouts.py [--ranks=4] [--count=N] [--minutes=M] [--seed=S] [--output=FILE]
    python scripts/prove_layouts.py --like="$MODEL_ARGS $TRAINING_ARGS $PERFORMANCE_ARGS"

Without --like, models and options are drawn as well. Each line of the table is a run in one layout,
with the largest differences to one rank. docs/parallelism.md says what to expect.
A difference beyond that is reduced to the fewest options, with the command that shows it again.
Exit codes: 0 every layout computes the same, 5 one does not, 2 usage.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
import torch

from megatron_lite.cli.script_parser import ScriptParser, number
from megatron_lite.errors import EXIT_DONE, NumericsError, UsageError
from megatron_lite.run.exit_status import print_failure
from megatron_lite.run.host import prepare_libraries
from megatron_lite.run.progress_line import ProgressLine, format_duration
from scripts.benchmarks.pipeline import write_json
from scripts.proof.cases import Case, Flags, case_of, flags_of, text_of
from scripts.proof.comparison import Judge, Verdict, limits_of, reduced
from scripts.proof.like import shrunk
from scripts.proof.pairs import Draws
from scripts.proof.ranks import Prepare, Ranks

DEFAULT_MINUTES = 2.5
MOST_SHOWN = 90  # characters of the options
SHOWN = ("loss", "norm", "gradient", "update of the weights")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = ScriptParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=number(int, 0), default=1, help="of the draws (default 1)")
    parser.add_argument(
        "--count", type=number(int, 1), help="layouts (default: as many as --minutes allow)"
    )
    parser.add_argument(
        "--minutes",
        type=number(float, 0, above=True),
        help=f"stop after (default {DEFAULT_MINUTES:g} without --count)",
    )
    parser.add_argument(
        "--ranks", type=number(int, 1, 64), help="most ranks of a layout (default 4; one a GPU)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu, with gloo)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--like", metavar="FLAGS", help="flags of a run: prove layouts of this model, shrunk"
    )
    which.add_argument("--case", metavar="FLAGS", help="run this case alone, on --ranks ranks")
    parser.add_argument(
        "--then",
        metavar="RANKS...",
        help="ranks, and flags, with which the case goes on after a restart",
    )
    parser.add_argument("--output", type=Path, help="also write all differences as JSON")
    options = parser.parse_args(arguments)
    if options.then is not None and options.case is None:
        parser.error("--then continues a --case; write both, or leave it out")
    options.ranks = options.ranks or (
        4 if options.device == "cpu" else max(1, torch.cuda.device_count())
    )
    return options


def main(arguments: Sequence[str] | None = None, prepare: Prepare | None = None) -> int:
    """Draw, run, compare and print; return the exit code. prepare: for tests, see `Ranks`."""
    options = parse(arguments)
    try:
        prepare_libraries()
        prove(options, prepare)
    except Exception as error:
        return print_failure(error, "give fewer --ranks")
    return EXIT_DONE


def prove(options: argparse.Namespace, prepare: Prepare | None) -> None:
    """Run cases until one does not compute what it should (NumericsError), or enough do."""
    fixed = {"device": options.device, "deterministic": str(int(options.device == "cuda"))}
    minutes = options.minutes or (math.inf if options.count or options.case else DEFAULT_MINUTES)
    count = options.count or (1 if options.case else math.inf)
    start_s = time.monotonic()
    verdicts = list[Verdict]()
    bar = ProgressLine()
    with Ranks(options.device, prepare) as ranks:
        judge, (cases, common, draws) = Judge(ranks, fixed), chosen(options, fixed)
        for case in cases:
            verdicts.append(judge(case))
            bar.close()
            print("\n".join(rows(verdicts[-1], common, head=len(verdicts) == 1)), flush=True)
            if verdicts[-1].problem:
                print(f"\nDIFFERENT: {verdicts[-1].problem}\nreducing the options ...", flush=True)
                verdicts[-1] = reduced(verdicts[-1], judge)
                break
            minutes_so_far = (time.monotonic() - start_s) / 60
            share = max(len(verdicts) / count, minutes_so_far / minutes)
            if share >= 1:
                break
            bar.update(
                lambda s: (
                    f"[{'#' * round(20 * share):20}] "  # noqa: B023
                    f"{len(verdicts)} layouts, {format_duration(s)}"
                )
            )
        bar.close()
    report: dict[str, object] = {"command": shlex.join(sys.argv)}
    report["cases"] = [record(verdict, fixed) for verdict in verdicts]
    problem = verdicts[-1].problem
    coverage = draws and not verdicts[-1].problem and draws.coverage()
    if coverage:
        report["pairs"] = coverage.record()
    write_json(options.output, report)
    if problem:
        raise NumericsError(
            f"the smallest case: {problem}\nshown again by: {verdicts[-1].case.command(fixed)}"
        )
    print("\n".join(summary(verdicts, time.monotonic() - start_s)))
    if coverage:
        print(coverage)
    print("every layout computes the same (docs/parallelism.md, What is equal)")


def chosen(options: argparse.Namespace, fixed: Flags) -> tuple[Iterable[Case], Flags, Draws | None]:
    """Return the cases to run, options that all have, and what draws them: --case, or that of
    --like and drawn ones."""
    if options.case is not None:
        return [case_of(flags_of(options.case), options.ranks, options.then)], {}, None
    if options.like is None:
        draws = Draws(options.seed, options.ranks, [], fixed)
        return draws, {}, draws
    flags = shlex.split(options.like)
    like, remarks = shrunk(flags, options.ranks)
    choices = [like.options, shrunk(flags, options.ranks, training_dtype="fp32")[0].options]
    first = [like] if like.layout.flags else []
    try:
        like.parts(fixed)
    except UsageError as error:
        remarks = [*remarks, f"not this layout itself, {text_of(like.layout.flags)}: {error}"]
        first = []
    print("\n".join([f"model and options: {text_of(like.options)}", *remarks, ""]))
    draws = Draws(options.seed, options.ranks, choices, fixed)
    return itertools.chain(first, draws), dict(choices[0].items() & choices[1].items()), draws


def line(layout: str, *cells: str) -> str:
    """Return a line of the table."""
    *numbers, text = cells
    return f"{layout:<56} {' '.join(f'{cell:>8}' for cell in numbers)}  {text}".rstrip()


def rows(verdict: Verdict, common: Flags, head: bool) -> Iterator[str]:
    """Yield the lines of a case. common: options not to show. head: begin with the head of the
    table."""
    if head:
        yield line("layout", "loss", "norm", "gradient", "update", "bits", "options")
    case, worst = verdict.case, verdict.worst
    numbers = [f"{worst[what].error:.1e}" if what in worst else "" for what in SHOWN]
    shown = " ".join(
        f"{name}={value}" for name, value in case.options.items() if name not in common
    )
    then = "" if case.then is None else ", then"
    bits = "same" if verdict.twin else ""
    yield line(f"{case.layout}{then}", *numbers, bits, shown[:MOST_SHOWN])
    if verdict.flips:
        yield f"  {verdict.flips:,} choices of experts flipped; above, with those of one rank"
    if case.then is not None:
        yield f"  {case.then}"


def record(verdict: Verdict, fixed: Flags) -> dict[str, object]:
    """Return all of a case for JSON. fixed: flags of all runs."""
    worst = {what: found._asdict() for what, found in verdict.worst.items()}
    twin = verdict.twin and str(verdict.twin.layout)
    return {
        "command": verdict.case.command(fixed),
        "same_bits_as": twin,
        "problem": verdict.problem,
        "flips": verdict.flips,
        "worst": worst,
    }


def summary(verdicts: Sequence[Verdict], elapsed_s: float) -> Iterator[str]:
    """Yield the lines below the table."""
    yield f"\n{len(verdicts)} layouts in {format_duration(elapsed_s)}. Largest differences to one rank, and limits:"
    for kind, limits in sorted({limits_of(verdict.case.options) for verdict in verdicts}):
        some = [verdict for verdict in verdicts if limits_of(verdict.case.options)[0] == kind]
        worst = [
            max((v.worst[what].error for v in some if what in v.worst), default=0.0)
            for what in SHOWN
        ]
        yield line(f"{len(some)} in {kind}", *(f"{error:.1e}" for error in worst), "", "")
        yield line(
            "",
            *(f"{limit:.0e}" for limit in limits[: len(SHOWN)]),
            "",
            "or measured" * kind.endswith(("8 bits", "experts")),
        )
    if flipped := [verdict for verdict in verdicts if verdict.flips]:
        yield f"experts: {sum(v.flips for v in flipped):,} choices flipped in {len(flipped)} layouts, which were compared"
        yield "  with the choices of one rank (--moe_replay_routing); counts and biases are equal to the bit"
    same = sum(v.twin is not None for v in verdicts)
    restarts = sum(v.case.then is not None for v in verdicts)
    yield "to rounding: other ranks and micro-batches, because they sum in another order"
    yield f"to the bit: initial weights, copies of a parameter, what {restarts} restarts read from a checkpoint;"
    yield f"  {same} layouts (same) have the bits of ZeRO-1, without recomputation and restart, on the same ranks"


if __name__ == "__main__":
    sys.exit(main())
