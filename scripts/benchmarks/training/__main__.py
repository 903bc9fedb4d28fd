"""Train the same model in many configurations, ours and PyTorch's, and compare step time, traffic
and memory.

    torchrun --nproc-per-node=2 -m scripts.benchmarks.training --device=cpu --output=results.json
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=gpt2-124m --dtype=bf16

All rows train the same model from the same weights on the same tokens in the same processes. They
take turns of a few steps, so that other load on the machine affects all rows alike. Their losses
must agree at every step; otherwise, or if a row fails, the exit code is 1. On a shared machine,
--max_others=0.05 counts only turns in which other processes used at most 5 % of the CPUs, and
repeats turns until enough count. Rank 0 prints Markdown tables and writes JSON to --output.
docs/benchmarks.md explains rows, columns and keys. For peak memory on CPUs, see
scripts.benchmarks.training.memory. Run from the checkout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import known_peak_tflops
from megatron_lite.planner.plan import make_plan
from megatron_lite.run import exit_status
from scripts.benchmarks import processor
from scripts.benchmarks.pipeline import Result, Turns, describe, write_json
from scripts.benchmarks.training import report
from scripts.benchmarks.training.measure import Contestant, Rounds, largest_difference
from scripts.benchmarks.training.model import PlainGPT, parameter_specs, tokens_per_rank
from scripts.benchmarks.training.profile import REST, seconds_by_kind
from scripts.benchmarks.training.settings import (
    chosen,
    engine_config,
    parse,
    row_config,
    unavailable,
)

# Losses are near log(vocab_size), so 1e-5 is about 1e-6 relative. docs/benchmarks.md derives the
# bf16 tolerance.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
BARE = "bare"


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv, __doc__)
    config = engine_config(options, int(os.environ.get("WORLD_SIZE", 1)))
    distributed = launch.initialize(config.distributed)
    ranks = distributed.world_size
    options.device = distributed.device.type
    torch.set_num_threads(options.threads)
    # Rows share the code of their blocks, so torch.compile must not reach its recompilation limit.
    torch._dynamo.config.recompile_limit = 64
    rows = {} if options.only == BARE else chosen(options, ranks)
    if any(row.changes.get("deterministic") for row in rows.values()):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first used
    missing = unavailable(rows, options, distributed.device)

    def build(name: str) -> Contestant:
        if name == BARE:  # all imports, a process group, and a model on the meta device
            PlainGPT(config, "chunked", distributed.device)
            return Contestant()
        return rows[name].build(row_config(rows[name], options, ranks), distributed)

    names = [name for name in rows if name not in missing] or [BARE]
    rounds = Rounds(names, build, options, distributed)
    head = head_of(argv, options, distributed) | {
        "missing": missing,
        "ranks": ranks,
        "parameters": sum(spec.numel for spec in parameter_specs(config).values()),
        "loss_tolerance": LOSS_TOLERANCE[options.dtype],
    }
    peak_tflops = known_peak_tflops(head["environment"]["machine"]["device"])
    tokens = distributed.data.world_size * tokens_per_rank(config)
    output = options.output if distributed.rank == 0 else None
    result: Result = {}
    for _ in rounds.run():  # a complete file after every round, in case the run is cut short
        measured = report.summarize(rounds, config, ranks, tokens, peak_tflops)
        losses = [
            row["losses"]
            for name, row in measured.items()
            if name not in rows or rows[name].trains_the_model
        ]
        result = head | {
            "largest_loss_difference": largest_difference(losses),
            "peak_rss_bytes": distributed.gather_objects(processor.memory_bytes("VmHWM")),
            "failures": rounds.turns.failures,
            "rows": measured,
        }
        write_json(output, result)
    measured = result["rows"]
    if options.profile:
        for name, seconds in profiles(rounds, options, distributed).items():
            measured[name]["profile_s"] = seconds
    if options.device == "cuda" and ranks == 1:
        for name in measured:
            if name in rows and rows[name].ours:
                plan = make_plan(row_config(rows[name], options, 1), 1, "cuda")
                measured[name]["planned_peak_bytes"] = plan.peak_bytes()
    if distributed.rank == 0:
        report.show(result, output)
    distributed.barrier()
    distributed.close()
    return verdict(result, distributed.rank)


def head_of(argv: Sequence[str], options: argparse.Namespace, distributed: Distributed) -> Result:
    """Return the result without rows."""
    machine: dict[str, Any] = {}
    if options.device == "cuda":
        machine["device"] = torch.cuda.get_device_name(distributed.device)
    elif distributed.rank == 0:
        machine["instruction_sets"] = processor.instruction_sets({})
    command = f"torchrun --nproc-per-node={distributed.world_size} -m scripts.benchmarks.training"
    return describe(command, argv, vars(options), machine)


def profiles(
    rounds: Rounds, options: argparse.Namespace, distributed: Distributed
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by kind of operation of each row, from more turns.

    Medians over all turns except the first, in which the profiler starts.
    """
    turns = Turns(
        rounds.contestants,
        lambda name, turn: seconds_by_kind(
            rounds.contestants[name], rounds.steps(turn), distributed
        ),
        options.turns,
        main=REST,
        warm_up=1,
        prints=False,
    )
    for _ in turns.run():
        pass
    return {
        name: {
            kind: statistics.median(turn[kind] for turn in counted if turn) for kind in counted[-1]
        }
        for name, counted in turns.counted.items()
        if counted[-1]
    }


def verdict(result: Result, rank: int) -> int:
    """Return the exit code; rank 0 prints the problems."""
    difference, allowed = result["largest_loss_difference"], result["loss_tolerance"]
    problems = [f"{name}: {reason}" for name, reason in result["failures"].items()]
    if not difference <= allowed:
        problems.append(f"losses differ by {difference:.2e}, more than {allowed:g}")
    if rank == 0:
        for problem in problems:
            print(f"benchmark: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        exit_code = 1
    # FSDP2's caches keep a process group, and `Distributed.close` cannot wait for its threads.
    exit_status.leave(exit_code)
