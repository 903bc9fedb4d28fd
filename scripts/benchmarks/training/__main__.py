"""Train the same model in many configurations, ours and PyTorch's, and compare step time, traffic
and memory.

    torchrun --nproc-per-node=2 -m scripts.benchmarks.training --device=cpu --output=results.json
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=gpt2-124m --dtype=bf16
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=mistral-7b --dtype=bf16 --recompute

All rows train the same model from the same weights on the same tokens in the same processes. They
take turns of a few steps, so that other load on the machine affects all rows alike. Their losses
must agree at every step; otherwise, or if a row fails, the exit code is 1. --layers=plain trains
the peers' torch.nn modules with our engine, so that only the engine differs. On a shared machine,
--max_others=0.05 waits for quiet moments, counts only turns in which other processes used at most 5
% of the CPUs, and repeats turns until enough count. Rank 0 prints Markdown tables and writes JSON
to --output. docs/benchmarks.md explains rows, columns and keys. For peak memory on CPUs, see
scripts.benchmarks.training.memory. Run from the checkout.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import known_peak_tflops, model_flops
from megatron_lite.planner.plan import make_plan
from megatron_lite.run import exit_status
from scripts.benchmarks import processor
from scripts.benchmarks.processor import memory_bytes
from scripts.benchmarks.results import Result, environment, write_json
from scripts.benchmarks.tables import verdicts
from scripts.benchmarks.training import measure, profile, report
from scripts.benchmarks.training.model import PlainGPT, parameter_specs, tokens_per_rank
from scripts.benchmarks.training.settings import (
    Row,
    chosen,
    engine_config,
    has_known_shape,
    make,
    parse,
    row_config,
    torchtitan,
    unavailable,
)

# Losses are near log(vocab_size), so 1e-5 is about 1e-6 relative. docs/benchmarks.md derives the
# bf16 tolerance.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
BARE = "bare"
FLOPS = ("causal", "full")  # attention


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv, __doc__)
    config = engine_config(options, int(os.environ.get("WORLD_SIZE", 1)))
    distributed = launch.initialize(config.distributed)
    options.device = distributed.device.type
    measure.set_switches(options.threads, options.fp32_matmul)
    rows = {} if options.only == BARE else chosen(options, distributed.world_size)
    if any(row.changes.get("deterministic") for row in rows.values()):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
            ":4096:8"  # for all rows, before cuBLAS is first used
        )
    missing = unavailable(rows, options, distributed.device)
    parameters = sum(spec.numel for spec in parameter_specs(config).values())
    if options.one_at_a_time is None:
        options.one_at_a_time = int(measure.is_crowded(parameters, len(rows), distributed.device))

    def build(name: str) -> measure.Contestant:
        if name == BARE:  # all imports, a process group, and a model on the meta device
            PlainGPT(config, options.loss, distributed.device)
            return measure.Contestant()
        return make(rows[name], options, distributed)

    names = [name for name in rows if name not in missing] or [BARE]
    rounds = measure.Rounds(names, build, options, distributed)
    output = options.output if distributed.rank == 0 else None
    head = describe(argv, options, distributed, parameters) | {
        "missing": {**missing, **torchtitan()}
    }
    result: Result = {}
    for _ in rounds.run():  # a complete file after every turn, in case the run is cut short
        result = head | summary(rounds, rows, options, distributed)
        write_json(output, result)
    measured = result["rows"]
    if options.dtype == "fp32":
        for name, comparison in compare_weights(rounds.contestants).items():
            measured[name] |= comparison
    if options.profile and options.device == "cuda":
        for name, contestant in rounds.contestants.items():
            steps = [
                measure.make_tokens(options, step, distributed)
                for step in range(options.steps_per_turn)
            ]
            measured[name]["kernels_s"] = found = profile.kernels(contestant, steps)
            measured[name]["profile_s"] = profile.by_kind(found)
    elif options.profile:
        steps = [
            measure.make_tokens(options, step, distributed)
            for step in range(options.steps_per_turn)
        ]
        for name, seconds in profile.profile_in_turns(
            rounds.contestants, [steps] * (options.turns + 1)
        ).items():
            measured[name]["profile_s"] = seconds
    if options.device == "cuda" and distributed.world_size == 1:
        for name in measured:
            if name in rows and rows[name].trainer == "engine":
                plan = make_plan(row_config(rows[name], options, 1), 1, "cuda")
                measured[name]["planned_peak_bytes"] = plan.peak_bytes()
    write_json(output, result)
    if distributed.rank == 0:
        print(report.to_markdown(result), flush=True)
    distributed.barrier()
    distributed.close()
    return verdict(result, distributed.rank)


def describe(
    argv: Sequence[str], options: argparse.Namespace, distributed: Distributed, parameters: int
) -> Result:
    """Return the facts of the run that need no measurement."""
    machine: dict[str, Any] = {"load": os.getloadavg()}
    if options.device == "cuda":
        machine["device"] = torch.cuda.get_device_name(distributed.device)
        options.peak_tflops = options.peak_tflops or known_peak_tflops(machine["device"])
    elif distributed.rank == 0:
        machine["instruction_sets"] = processor.instruction_sets({})
    command = f"torchrun --nproc-per-node={distributed.world_size} -m scripts.benchmarks.training"
    return {
        "environment": environment(command, argv, machine),
        "settings": {
            name: value for name, value in vars(options).items() if name not in ("output", "only")
        },
        "ranks": distributed.world_size,
        "parameters": parameters,
        "peak_tflops": options.peak_tflops,
        "loss_tolerance": LOSS_TOLERANCE[options.dtype],
    }


def summary(
    rounds: measure.Rounds,
    rows: dict[str, Row],
    options: argparse.Namespace,
    distributed: Distributed,
) -> Result:
    """Return the results so far."""
    config = engine_config(options, distributed.world_size)
    ranks = distributed.world_size
    settings = vars(options)
    flops = {
        kind: model_flops(config.model, config.batch.sequence_length, 1, kind == "full")
        for kind in FLOPS
    }
    tokens = distributed.data.world_size * tokens_per_rank(config)
    measured = report.summarize(
        rounds.turns, rounds.books, ranks, tokens, flops, options.peak_tflops
    )
    where = settings | {
        "ranks": "one" if ranks == 1 else "several",
        "accumulates": options.micro_batches > 1,
    }
    compared = [
        row["losses"]
        for name, row in measured.items()
        if name not in rows or rows[name].trains_the_model
    ]
    return {
        "model_flops_per_token": flops,
        "largest_loss_difference": measure.largest_difference(compared),
        "peak_rss_bytes": distributed.gather_objects(memory_bytes("VmHWM")),
        "failures": rounds.turns.failed(),
        "rows": measured,
        "goals": list(verdicts(report.GOALS, measured, where)) if has_known_shape(options) else [],
    }


def compare_weights(contestants: dict[str, measure.Contestant]) -> dict[str, dict[str, Any]]:
    """Compare each row's final weights with DDP's, or with plain torch's on one rank.

    Hugging Face's rows are skipped, because their weights have other names. Without DDP or torch
    the result is empty.
    """
    reference = next((name for name in ("DDP", "torch") if name in contestants), None)
    if reference is None or len(contestants) < 2:
        return {}
    expected = {name: value.clone() for name, value in contestants[reference].full_weights()}
    result = {}
    for name, contestant in contestants.items():
        differences, identical = [], True
        for key, value in contestant.full_weights():
            if key in expected:
                differences.append(float((value - expected[key]).abs().max()))
                identical &= torch.equal(value.view(torch.int32), expected[key].view(torch.int32))
        if len(differences) == len(expected):
            result[name] = {"weights_difference": max(differences), "weights_equal": identical}
    return result


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
