"""Step time, traffic and state memory of ZeRO-1, 2 and 3 beside PyTorch's DistributedDataParallel and FSDP2.

    torchrun --nproc-per-node=2 scripts/benchmark.py --device=cpu --output=results.json
    torchrun --nproc-per-node=2 scripts/benchmark.py --device=cpu --layers=plain
    torchrun --nproc-per-node=2 scripts/benchmark.py --device=cpu --layers=plain --micro_batches=4

All configurations train the same model from the same weights on the same tokens in the same processes and take turns of
a few steps, so that whatever else the machine does falls on all of them alike. At every step their losses have to agree
to 1e-5, or the program fails (exit code 1). With --layers=plain our rows train the very torch.nn modules that the peers
train, so that only the engine differs. On a machine that others use too, --max_others=0.05 counts only turns during
which other processes took less than 5 % of the CPUs: it waits for such moments, and goes on until there are enough.
Rank 0 prints a Markdown table and writes JSON to --output. docs/benchmarks.md explains the columns. Memory while
training is measured by scripts/benchmark_memory.py, one configuration at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # runs from a plain checkout

import benchmark_model as plain  # noqa: E402
import benchmark_peers as peers  # noqa: E402
import benchmark_report as report  # noqa: E402
from benchmark_engine import Engine, PlainEngine  # noqa: E402
from benchmark_measure import Contestant, largest_difference, measure  # noqa: E402

from megatron_lite import distributed as launch  # noqa: E402
from megatron_lite.config import Config, unflatten  # noqa: E402
from megatron_lite.distributed import Distributed  # noqa: E402
from megatron_lite.validation import resolve  # noqa: E402

# Losses are near log(vocab_size): about 1e-6 relative.
LOSS_TOLERANCE = 1e-5
# Adam turns rounding into a full step where a gradient is nearly zero: a high rate would make losses drift apart.
LEARNING_RATE = 1e-4
# Far above any norm: it is computed, and gradients are multiplied by 1, so that weights can be compared to the bit.
CLIP_GRAD = 1e6
LLAMA: dict[str, Any] = dict(
    use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", add_linear_biases=False,
    tie_word_embeddings=False, dataset_source="random", num_workers=0, weight_decay=0.1,
)  # fmt: skip
LAYERS = ("engine", "plain", "both")
SHAPE = dict(
    num_layers=8, hidden_size=512, num_attention_heads=8, head_groups=2, ffn_hidden_size=1408, vocab_size=16384,
    sequence_length=256, micro_batch_size=2, micro_batches=1, turns=8, warmup_turns=1, steps_per_turn=3,
    threads=1, seed=1234,
)  # fmt: skip


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
    options = parse(argv)
    torch.set_num_threads(options.threads)
    distributed = launch.initialize(unflatten({"device": options.device}).distributed)
    settings = {name: getattr(options, name) for name in SHAPE}
    contestants = build(settings, options, distributed)
    specs = plain.parameter_specs(engine_config(settings, distributed, 1, 1))
    load_before = report.load_average()
    records = measure(contestants, settings, options.max_others, distributed)
    gathered = distributed.gather_objects({name: vars(record) for name, record in records.items()})
    peak_rss_bytes = distributed.gather_objects(report.peak_rss_bytes())
    difference = largest_difference([records[name].losses for name in records])
    result: dict[str, Any] = {
        "command": f"torchrun --nproc-per-node={distributed.world_size} scripts/benchmark.py {' '.join(argv)}".strip(),
        "date": datetime.date.today().isoformat(),
        "versions": report.versions(),
        "machine": report.machine(distributed.device, load_before),
        "settings": {
            **settings, "device": distributed.device.type, "layers": options.layers, "loss": options.loss,
            "linear": options.linear, "max_others": options.max_others,
        },
        "ranks": distributed.world_size,
        "parameters": sum(spec.numel for spec in specs.values()),
        "largest_loss_difference": difference,
        "loss_tolerance": LOSS_TOLERANCE,
        "peak_rss_bytes": peak_rss_bytes,
        "configurations": report.summarize(gathered, settings, books(contestants, distributed)),
    }
    for name, comparison in compare_weights(contestants).items():
        result["configurations"][name] |= comparison
    result["targets"] = report.targets(result["configurations"], settings["micro_batches"])
    if distributed.rank == 0:
        print(report.to_markdown(result), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    distributed.barrier()
    distributed.close()
    if difference <= LOSS_TOLERANCE:
        return 0
    if distributed.rank == 0:
        print(f"benchmark: losses differ by {difference:.2e}, more than {LOSS_TOLERANCE:g}", file=sys.stderr)
    return 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    layers_help = "of our rows: the engine's own, the peers' plain torch.nn modules, or a row of each"
    parser.add_argument("--layers", choices=LAYERS, default="engine", help=layers_help)
    loss_help, linear_help = "of the plain model; chunked is the engine's", "of the plain model; plain is nn.Linear"
    parser.add_argument("--loss", choices=plain.LOSSES, default="chunked", help=loss_help)
    parser.add_argument("--linear", choices=plain.LINEARS, default="plain", help=linear_help)
    parser.add_argument("--max_others", type=float, help="share of the CPUs that others may take in a turn that counts")
    parser.add_argument("--only", default="", help="comma-separated configurations, by the names of the table")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.turns < 2 or options.warmup_turns < 0 or min(options.micro_batches, options.steps_per_turn) < 1:
        parser.error(
            "--turns must be at least 2, --micro_batches and --steps_per_turn at least 1, --warmup_turns not negative"
        )
    return options


def engine_config(settings: dict[str, Any], distributed: Distributed, zero_stage: int, breadth_first: int) -> Config:
    """The resolved configuration of one of our rows."""
    own = ("micro_batches", "turns", "warmup_turns", "steps_per_turn", "threads")
    shape = {name: value for name, value in settings.items() if name not in own}
    values = {
        **LLAMA, **shape, "zero_stage": zero_stage, "device": distributed.device.type, "lr": LEARNING_RATE,
        "clip_grad": CLIP_GRAD, "breadth_first_micro_batches": breadth_first,
        "depth_first_micro_batches": settings["micro_batches"] // breadth_first,
        "train_iters": (settings["turns"] + settings["warmup_turns"]) * settings["steps_per_turn"],
    }  # fmt: skip
    return resolve(unflatten(values), distributed.world_size)


def row_names(layers: str, accumulates: bool) -> list[str]:
    """The configurations in the order in which they take turns."""
    own = ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
    if accumulates:
        own = ["ZeRO-1", "ZeRO-2", "ZeRO-2 breadth-first", "ZeRO-3", "ZeRO-3 breadth-first"]
    engine, plain_rows = own if layers != "plain" else [], own if layers != "engine" else []
    fsdp = ["FSDP2", "FSDP2 all resharded", "FSDP2 no reshard", *(["FSDP2 no sync"] if accumulates else [])]
    return ["DDP", *engine, *(f"plain {name}" for name in plain_rows), *fsdp]


def build(
    settings: dict[str, Any], options: argparse.Namespace, distributed: Distributed
) -> dict[str, Contestant]:
    """The configurations that take part."""
    names = row_names(options.layers, settings["micro_batches"] > 1)
    wanted = [name.strip() for name in options.only.split(",") if name.strip()] or names
    unknown = sorted(set(wanted) - {*names, "bare"})
    if unknown:
        raise SystemExit(f"benchmark: --only: no configuration is called {unknown}; there are {[*names, 'bare']}")
    order = [name for name in (*names, "bare") if name in wanted]
    return {name: make(name, settings, options, distributed) for name in order}


def make(name: str, settings: dict[str, Any], options: argparse.Namespace, distributed: Distributed) -> Contestant:
    """One configuration, ready to train."""
    zero_stage = next((stage for stage in (1, 2, 3) if f"ZeRO-{stage}" in name), 1)
    config = engine_config(
        settings, distributed, zero_stage, settings["micro_batches"] if "breadth-first" in name else 1
    )
    if name.startswith("ZeRO"):
        return Engine(config, distributed)
    model = plain.PlainGPT(config, options.loss, options.linear, distributed.device)
    if name == "bare":
        return Bare()
    if name.startswith("plain"):
        return PlainEngine(config, distributed, model)
    if name == "DDP":
        return peers.ddp(config, distributed, model)
    keeps_gradients = name == "FSDP2 no sync"
    reshard = not keeps_gradients and name != "FSDP2 no reshard"
    return peers.fsdp(config, distributed, model, reshard, name == "FSDP2 all resharded", keeps_gradients)


def books(contestants: dict[str, Contestant], distributed: Distributed) -> dict[str, dict[str, Any]]:
    """State memory of this rank by kind; for ours also what memory and traffic have to be by the books."""
    result: dict[str, dict[str, Any]] = {}
    for name, contestant in contestants.items():
        result[name] = {"state_bytes_by_kind": contestant.memory_bytes()}
        if isinstance(contestant, Engine):
            sizes = contestant.stage_sizes()
            formula = report.formula_bytes(sizes, contestant.zero_stage, distributed.world_size)
            result[name] |= {
                "formula_bytes": formula, "wire_theory_bytes": contestant.wire_bytes(),
                "wire_counted_bytes": contestant.counted_bytes,
            }  # fmt: skip
    return result


def compare_weights(contestants: dict[str, Contestant]) -> dict[str, dict[str, Any]]:
    """How far the final weights of each configuration are from DDP's; nothing where DDP does not take part."""
    if len(contestants) < 2 or "DDP" not in contestants:
        return {}
    expected = dict(contestants["DDP"].full_weights())
    result = {}
    for name, contestant in contestants.items():
        differences, identical = [], True
        for key, value in contestant.full_weights():
            differences.append(float((value - expected[key]).abs().max()))
            identical &= torch.equal(value.view(torch.int32), expected[key].view(torch.int32))
        result[name] = {"weights_to_ddp": max(differences), "weights_as_ddp": identical}
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
