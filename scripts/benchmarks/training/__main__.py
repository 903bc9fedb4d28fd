"""Step time, rates, traffic and memory of our configurations beside PyTorch's, Hugging Face's and compiled ones.

    torchrun --nproc-per-node=2 -m scripts.benchmarks.training --device=cpu --output=results.json
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=gpt2-124m --dtype=bf16
    torchrun --nproc-per-node=1 -m scripts.benchmarks.training --model=mistral-7b --dtype=bf16 --recompute

All configurations train the same model from the same weights on the same tokens in the same processes and take turns
of a few steps, so that whatever else the machine does falls on all of them alike. At every step their losses have to
agree, or the program fails (exit code 1), as it does if a configuration fails. With --layers=plain our rows train the
very torch.nn modules that the peers train, so that only the engine differs. On a machine that others use too,
--max_others=0.05 counts only turns during which other processes took less than 5 % of the CPUs: it waits for such
moments, and goes on until there are enough. Rank 0 prints Markdown tables and writes JSON to --output.
docs/benchmarks.md explains rows, columns and keys. Peak memory on CPUs is measured by memory.py, one
configuration at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed import process_group as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import known_peak_tflops, model_flops
from megatron_lite.run import exit_status
from scripts.benchmarks.training import machine, report
from scripts.benchmarks.training.engine import Engine
from scripts.benchmarks.training.measure import Contestant, Rounds, largest_difference
from scripts.benchmarks.training.model import PlainGPT, parameter_specs, tokens_per_rank
from scripts.benchmarks.training.rows import chosen, make, torchtitan, unavailable
from scripts.benchmarks.training.settings import engine_config, has_known_shape, parse
from scripts.benchmarks.training.targets import compare

# Losses are near log(vocab_size): about 1e-6 relative in fp32. docs/benchmarks.md says where the other comes from.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
BARE = "bare"


class Bare:
    """Nothing: what a process takes by itself that has imported all this, has its process group open, and has built the
    model without memory (which makes torch load more of itself).
    """

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        return torch.zeros(())

    def finish(self) -> None:
        return None

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def memory_bytes(self) -> dict[str, int]:
        return {}


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; returns the exit code."""
    options = parse(argv, __doc__)
    distributed = launch.initialize(unflatten({"device": options.device}).distributed)
    options.device = distributed.device.type
    machine.set_switches(options.threads, options.fp32_matmul)
    config = engine_config(options, distributed.world_size)
    rows = {} if options.only == BARE else chosen(options, distributed.world_size)
    missing = unavailable(rows, options, distributed.device)
    parameters = sum(spec.numel for spec in parameter_specs(config).values())
    if options.one_at_a_time is None:
        options.one_at_a_time = int(machine.is_crowded(parameters, len(rows), distributed.device))
    load_before = machine.load_average()

    def build(name: str) -> Contestant:
        if name == BARE:
            PlainGPT(config, options.loss, distributed.device)
            return Bare()
        return make(rows[name], options, distributed)

    names = [name for name in rows if name not in missing] or [BARE]
    rounds = Rounds(names, build, lambda contestant: books(contestant, options, distributed), options, distributed)
    result: dict[str, Any] = {}
    for _ in rounds.run():  # each round leaves a whole file, for a run that is cut short
        measured = {name: vars(record) for name, record in rounds.records.items()}
        result = describe(argv, options, config, distributed, measured)
        result["machine"] = machine.describe(distributed.device, load_before)
        result["unavailable"] = {**missing, **torchtitan()}
        write(result, options.output, distributed.rank)
    if options.dtype == "fp32":
        for name, comparison in compare_weights(rounds.contestants).items():
            result["configurations"][name] |= comparison
    write(result, options.output, distributed.rank)
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
    """What stands in the JSON file."""
    ranks, length = distributed.world_size, config.batch.sequence_length
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "only", "peak_tflops")}
    peak = options.peak_tflops
    if peak is None and distributed.device.type == "cuda":
        peak = known_peak_tflops(torch.cuda.get_device_name(distributed.device))
    flops = {kind: model_flops(config.model, length, 1, kind == "full") for kind in ("causal", "full")}
    facts = {
        "tokens_per_step": ranks * tokens_per_rank(config),
        "flops_per_token": flops,
        "peak_tflops": peak,
        "warmup_turns": 0 if options.one_at_a_time else options.warmup_turns,
    }
    configurations = report.summarize(distributed.gather_objects(measured), facts)
    command = f"torchrun --nproc-per-node={ranks} -m scripts.benchmarks.training {' '.join(argv)}".strip()
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": machine.versions(),
        "settings": settings,
        "ranks": ranks,
        "parameters": sum(spec.numel for spec in parameter_specs(config).values()),
        "model_flops_per_token": flops,
        "peak_tflops": peak,
        "largest_loss_difference": largest_difference([row["losses"] for row in configurations.values()]),
        "loss_tolerance": LOSS_TOLERANCE[options.dtype],
        "peak_rss_bytes": distributed.gather_objects(machine.peak_rss_bytes()),
        "failures": {name: one["failure"] for name, one in measured.items() if one["failure"] is not None},
        "configurations": configurations,
        "targets": compare(configurations, settings, ranks) if has_known_shape(options) else [],
    }


def write(result: dict[str, Any], output: Path | None, rank: int) -> None:
    """The JSON file, by rank 0."""
    if rank == 0 and output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def books(contestant: Contestant, options: argparse.Namespace, distributed: Distributed) -> dict[str, Any]:
    """State memory of this rank by kind; for ours also what memory and traffic have to be by the books."""
    result: dict[str, Any] = {"state_bytes_by_kind": contestant.memory_bytes()}
    if not isinstance(contestant, Engine):
        return result
    ranks = distributed.world_size
    result |= {"wire_theory_bytes": contestant.wire_bytes(), "wire_counted_bytes": contestant.counted_bytes}
    if not contestant.tied and not options.ours:
        sizes = contestant.stage_sizes()
        result["formula_bytes"] = report.formula_bytes(sizes, contestant.zero_stage, ranks, options.dtype)
    return result


def compare_weights(contestants: dict[str, Contestant]) -> dict[str, dict[str, Any]]:
    """How far the final weights of each configuration are from DDP's, or on one rank from plain torch's.

    Hugging Face's have other names, and are left out; so are all where neither takes part.
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
    """The exit code; rank 0 says why it is not 0."""
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
    # FSDP2's caches keep a process group, whose threads `Distributed.close` then cannot wait for.
    exit_status.leave(exit_code)
