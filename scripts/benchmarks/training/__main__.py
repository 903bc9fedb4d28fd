"""Train the same model in many configurations, ours and PyTorch's, and compare step time, traffic and memory.

    torchrun --nproc-per-node=2 -m scripts.benchmarks.training --device=cpu --output=results.json
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=gpt2-124m --dtype=bf16
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=mistral-7b --dtype=bf16 --recompute

All rows train the same model from the same weights on the same tokens in the same processes. They take turns of a few
steps, so other load on the machine slows all rows alike. At every step their losses must agree; if they do not, or if a
row fails, the exit code is 1. --layers=plain trains the peers' torch.nn modules with our engine, so that only the
engine differs. On a shared machine, --max_others=0.05 counts only turns during which other processes used less than 5 %
of the CPUs; it waits for quiet moments and repeats turns until enough count. Rank 0 prints Markdown tables and writes
JSON to --output. docs/benchmarks.md explains rows, columns and keys. For peak memory on CPUs, see
scripts.benchmarks.training.memory. Run from the checkout.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import known_peak_tflops, model_flops
from megatron_lite.run import exit_status
from scripts.benchmarks import instructions
from scripts.benchmarks.common import commit, write_json
from scripts.benchmarks.training import measure, profile, report
from scripts.benchmarks.training.engine import Engine
from scripts.benchmarks.training.model import PlainGPT, parameter_specs, tokens_per_rank
from scripts.benchmarks.training.products import NAME as PRODUCTS
from scripts.benchmarks.training.settings import (
    chosen,
    engine_config,
    has_known_shape,
    make,
    parse,
    torchtitan,
    unavailable,
)

# Losses are near log(vocab_size), so 1e-5 is about 1e-6 relative. docs/benchmarks.md derives the bf16 tolerance.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
BARE = "bare"


class Bare:
    """No training: the footprint of a process with all imports, a process group, and a model on the meta device."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        return torch.zeros(())

    def finish(self) -> None:
        return None

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def memory_bytes(self) -> dict[str, int]:
        return {}


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv, __doc__)
    flags = {"device": options.device, "tensor_parallel": options.tensor_parallel}
    distributed = launch.initialize(unflatten(flags).distributed)
    options.device = distributed.device.type
    if options.profile and options.device != "cpu":
        raise ValueError("--profile: operations are timed on CPUs only; add --device=cpu")
    measure.set_switches(options.threads, options.fp32_matmul)
    config = engine_config(options, distributed.world_size)
    rows = {} if options.only == BARE else chosen(options, distributed.world_size)
    missing = unavailable(rows, options, distributed.device)
    parameters = sum(spec.numel for spec in parameter_specs(config).values())
    if options.one_at_a_time is None:
        options.one_at_a_time = int(measure.is_crowded(parameters, len(rows), distributed.device))
    load_before = os.getloadavg()
    on_cpu = distributed.device.type == "cpu" and distributed.rank == 0
    libraries = instructions.instruction_sets({}) if on_cpu else {}

    def build(name: str) -> measure.Contestant:
        if name == BARE:
            PlainGPT(config, options.loss, distributed.device)
            return Bare()
        return make(rows[name], options, distributed)

    names = [name for name in rows if name not in missing] or [BARE]
    rounds = measure.Rounds(
        names, build, lambda contestant: books(contestant, options, distributed), options, distributed
    )
    output = options.output if distributed.rank == 0 else None
    result: dict[str, Any] = {}
    for _ in rounds.run():  # a complete file after every round, in case the run is cut short
        measured = {name: vars(record) for name, record in rounds.records.items()}
        result = describe(argv, options, config, distributed, measured)
        result["machine"] = measure.describe(distributed.device, load_before) | {"instruction_sets": libraries}
        result["unavailable"] = {**missing, **torchtitan()}
        write_json(output, result)
    if options.dtype == "fp32":
        for name, comparison in compare_weights(rounds.contestants).items():
            result["configurations"][name] |= comparison
    if options.profile:
        steps = [measure.make_tokens(options, step, distributed) for step in range(options.steps_per_turn)]
        for name, seconds in profile.profile_in_turns(rounds.contestants, [steps] * (options.turns + 1)).items():
            result["configurations"][name]["profile_s"] = seconds
    write_json(output, result)
    if distributed.rank == 0:
        print(report.to_markdown(result), flush=True)
    distributed.barrier()
    distributed.close()
    return verdict(result, distributed.rank)


def describe(
    argv: Sequence[str],
    options: argparse.Namespace,
    config: Config,
    distributed: Distributed,
    measured: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the contents of the JSON file."""
    ranks, length = distributed.world_size, config.batch.sequence_length
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "only", "peak_tflops")}
    peak = options.peak_tflops
    if peak is None and distributed.device.type == "cuda":
        peak = known_peak_tflops(torch.cuda.get_device_name(distributed.device))
    facts = report.Facts(
        tokens_per_step=distributed.data.world_size * tokens_per_rank(config),
        flops_per_token={kind: model_flops(config.model, length, 1, kind == "full") for kind in ("causal", "full")},
        peak_tflops=peak,
        warmup_turns=0 if options.one_at_a_time else options.warmup_turns,
    )
    configurations = report.summarize(distributed.gather_objects(measured), facts)
    command = f"torchrun --nproc-per-node={ranks} -m scripts.benchmarks.training {' '.join(argv)}".strip()
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": measure.versions(),
        "settings": settings,
        "ranks": ranks,
        "parameters": sum(spec.numel for spec in parameter_specs(config).values()),
        "model_flops_per_token": facts.flops_per_token,
        "peak_tflops": peak,
        "largest_loss_difference": measure.largest_difference(
            [row["losses"] for name, row in configurations.items() if name != PRODUCTS]
        ),
        "loss_tolerance": LOSS_TOLERANCE[options.dtype],
        "peak_rss_bytes": distributed.gather_objects(measure.peak_rss_bytes()),
        "failures": {name: one["failure"] for name, one in measured.items() if one["failure"] is not None},
        "configurations": configurations,
        "targets": report.compare(configurations, settings, ranks) if has_known_shape(options) else [],
    }


def books(contestant: measure.Contestant, options: argparse.Namespace, distributed: Distributed) -> dict[str, Any]:
    """Return the state memory of this rank by kind and, for our rows, the expected memory and traffic."""
    result: dict[str, Any] = {"state_bytes_by_kind": contestant.memory_bytes()}
    if isinstance(contestant, Engine):
        result["wire_counted_bytes"] = contestant.counted_bytes
        if options.tensor_parallel == 1:
            result["wire_theory_bytes"] = contestant.wire_bytes()
        if not contestant.tied and not options.ours and options.tensor_parallel == 1:
            sizes, zero_stage = contestant.stage_sizes(), contestant.zero_stage
            result["formula_bytes"] = report.formula_bytes(sizes, options.dtype, zero_stage, distributed.world_size)
    return result


def compare_weights(contestants: dict[str, measure.Contestant]) -> dict[str, dict[str, Any]]:
    """Compare the final weights of each row with DDP's, or with plain torch's on one rank.

    Hugging Face's rows are left out, because their weights have other names. Without DDP or torch the result is empty.
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


def verdict(result: dict[str, Any], rank: int) -> int:
    """Return the exit code; rank 0 prints the reasons if it is not 0."""
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
