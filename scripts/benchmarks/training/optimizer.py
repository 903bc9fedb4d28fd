"""Time one optimizer step on a CPU beside torch.optim.AdamW(fused=True) on the same parameters.

    python -m scripts.benchmarks.training.optimizer --threads=1 --output=optimizer.json
    python -m scripts.benchmarks.training.optimizer --threads=2 --max_others=0.05

Only the optimizer runs, in one process. Gradients are random and get the same norm before every step, outside of the
timed section. Each of our rows takes turns with both peers, in a rotating order, and ratios compare times within a
turn. Where a row and a peer compute the same update, their final weights must agree, or the exit code is 1.
--max_others counts only turns during which other processes used less than that share of the CPUs, and waits for them.
Prints a Markdown table. Run from the checkout.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import unflatten
from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.common import argument_parser, busy_seconds, markdown_table, spread_cell, spread_of, write_json
from scripts.benchmarks.training import measure as machine
from scripts.benchmarks.training.settings import MODELS

RATE, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.95)
CLIP = 1.0  # as in training; gradients have one of these norms:
LARGE, SMALL = 10.0, 0.5
MAX_REPEATS = 20  # of --turns, where few turns count
PLAIN, CLIPPED = "AdamW(fused)", "clip_grad_norm_ + AdamW(fused)"


class Row(NamedTuple):
    """One of our rows."""

    name: str
    options: dict[str, Any]
    norm: float  # of the gradient
    same_as: str | None = None  # the peer with the same update


GUARDED = {"clip_grad": CLIP, "skip_bad_steps": True}
ROWS = (
    Row("clip_grad=0", {"clip_grad": 0.0}, LARGE, PLAIN),
    Row("clip_grad=1 skip_bad_steps=1, every step clipped", GUARDED, LARGE, CLIPPED),
    Row("clip_grad=1 skip_bad_steps=1, none clipped", GUARDED, SMALL, CLIPPED),
    Row("clip_grad=0 adam_nesterov=1", {"clip_grad": 0.0, "adam_nesterov": True}, LARGE),
    Row("clip_grad=0 update_rms_clip=0.1", {"clip_grad": 0.0, "update_rms_clip": 0.1}, LARGE),
    Row("clip_grad=0 clip_update_norm_sigma=3", {"clip_grad": 0.0, "clip_update_norm_sigma": 3.0}, LARGE),
    Row("clip_grad=0 ema_type=ema", {"clip_grad": 0.0, "ema_type": "ema"}, LARGE),
)


class Ours:
    """The engine's optimizer on the stages of a model that never runs."""

    def __init__(self, row: Row, options: argparse.Namespace, distributed: Distributed) -> None:
        sizes, model_options = MODELS["llama-39m"]
        values = {
            **model_options,
            **{name: getattr(options, name, None) or size for name, size in sizes._asdict().items()},
            "device": "cpu",
            "lr": RATE,
            "weight_decay": DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "weight_decay_default_mask": "off",
            "train_iters": 1,
            **row.options,
        }
        config = resolve(unflatten(values), 1)
        kernels = choose_kernels(config, distributed.device)
        self.model = MultiStage(
            model_layers(config, kernels),
            config.multi_stage,
            config.batch,
            "fp32",
            distributed,
            moments=config.optimizer.moments,
            averaged=config.averaging.ema_type != "none",
        )
        self.model.initialize(1234)
        self._optimizer = Optimizer(config, self.model.stages, distributed, kernels)
        self._optimizer.averaging.start()
        self._iteration, self._loss = 0, torch.tensor(1.0)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name, not copied."""
        return {name: parameter.main_grad for name, parameter in self.model.parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name, not copied."""
        return dict(self.model.full_weights())

    def step(self) -> None:
        """Update once."""
        self._iteration += 1
        self._optimizer.step(self._iteration, RATE, self._loss, 1, self.model.updated)


class Peer:
    """torch.optim.AdamW(fused=True), with or without clip_grad_norm_ before it."""

    def __init__(self, weights: dict[str, Tensor], clips: bool) -> None:
        self._parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._clips, parameters = clips, list(self._parameters.values())
        self._adamw = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name, not copied."""
        return {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name, not copied."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def step(self) -> None:
        """Clip if asked to, and update once."""
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), CLIP)
        self._adamw.step()


class Contestant:
    """Our optimizer or a peer, with its gradients and its times."""

    def __init__(self, optimizer: Ours | Peer, norm: float) -> None:
        self.optimizer, self._norm, self.seconds = optimizer, norm, list[float]()
        gradients = optimizer.gradients()
        generator = torch.Generator().manual_seed(1)
        for name in sorted(gradients):
            gradients[name].normal_(generator=generator)
        self._gradients = list(gradients.values())

    def turn(self, steps: int) -> None:
        """Run some steps and record their mean time."""
        elapsed_s = 0.0
        for _ in range(steps):
            # A clipped step changes the gradients. Everyone rescales, so that everyone finds the same cache.
            norm = torch.stack(torch._foreach_norm(self._gradients)).norm()
            torch._foreach_mul_(self._gradients, self._norm / norm)
            start_s = time.perf_counter()
            self.optimizer.step()
            elapsed_s += time.perf_counter() - start_s
        self.seconds.append(elapsed_s / steps)


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds per turn of one row and its peers, and the largest difference of their final weights."""
    torch.set_num_threads(options.threads)
    distributed = launch.initialize(unflatten({"device": "cpu"}).distributed)
    ours = Ours(row, options, distributed)
    weights = ours.weights()
    contestants = {
        "ours": Contestant(ours, row.norm),
        PLAIN: Contestant(Peer(weights, False), row.norm),
        CLIPPED: Contestant(Peer(weights, True), row.norm),
    }
    names, counted = list(contestants), list[int]()
    for turn in range(1 + options.turns * (1 if options.max_others is None else MAX_REPEATS)):
        others = _turn([contestants[name] for name in names], options)
        names = names[1:] + names[:1]
        if turn > 0 and (options.max_others is None or others <= options.max_others):  # the first turn warms up
            counted.append(turn)
        if len(counted) == options.turns:
            break
    result: dict[str, Any] = {
        "name": row.name,
        "options": row.options,
        "gradient_norm": row.norm,
        "same_as": row.same_as,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "seconds": {name: [one.seconds[turn] for turn in counted] for name, one in contestants.items()},
    }
    if row.same_as is not None:
        theirs, mine = contestants[row.same_as].optimizer.weights(), ours.weights()
        result["largest_difference"] = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
        result["steps"] = len(contestants["ours"].seconds) * options.steps_per_turn
    distributed.close()
    return result


def _turn(contestants: Sequence[Contestant], options: argparse.Namespace) -> float:
    """Run one turn of each; return the share of the CPUs that other processes used meanwhile."""
    if options.max_others is not None:
        machine.wait_until_quiet(options.max_others)
    busy_s, own_s, start_s = busy_seconds(), time.process_time(), time.perf_counter()
    for contestant in contestants:
        contestant.turn(options.steps_per_turn)
    others_s = busy_seconds() - busy_s - (time.process_time() - own_s)
    return machine.share_of_cpus(others_s, time.perf_counter() - start_s)


def to_markdown(result: dict[str, Any]) -> str:
    """Return the table, with the machine and versions above it."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = []
    for row in result["rows"]:
        ours, *theirs = (row["seconds"][name] for name in ("ours", PLAIN, CLIPPED))
        if ours:
            times = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (ours, *theirs)]
            ratios = [[a / b for a, b in zip(ours, peer, strict=True)] for peer in theirs]
            rows.append([row["name"], *times, *(spread_cell(spread_of(ratio), 2) for ratio in ratios)])
        else:
            rows.append([row["name"], "no turn counted", "", "", "", ""])
    header = ("ours", "ms", f"{PLAIN} ms", f"{CLIPPED} ms", f"ours / {PLAIN}", f"ours / {CLIPPED}")
    lines = [
        f"{result['date']}, {result['machine']['device']}, {result['threads']} thread(s); {versions}; "
        f"{result['rows'][0]['parameters']:,} parameters in fp32.",
        "",
        *markdown_table(header, rows),
        "",
        "Medians over turns; ratios within a turn: median (quartiles).",
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    for name, default in (("threads", 1), ("turns", 15), ("steps_per_turn", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
        parser.add_argument(f"--{name}", type=int, help="default: that of llama-39m")
    parser.add_argument("--only", default="", help="run rows whose names contain this text")
    parser.add_argument(
        "--max_others", type=float, help="count only turns during which other processes used less of the CPUs"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if min(options.threads, options.turns, options.steps_per_turn) < 1:
        parser.error("--threads, --turns and --steps_per_turn must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()
    # A process per row: memory that an earlier row had freed made a later row up to a third slower.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "scripts.benchmarks.training.settings"])  # slow imports
    with context.Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (row, options)) for row in ROWS if options.only in row.name]
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": machine.versions(),
        "threads": options.threads,
        "machine": machine.describe(torch.device("cpu"), load_before),
        "rows": rows,
    }
    write_json(options.output, result)
    print(to_markdown(result), flush=True)
    # Each update moves a weight by about the rate; rounding must stay far below.
    wrong = [row for row in rows if row.get("largest_difference", 0.0) > 1e-3 * RATE * row.get("steps", 0)]
    for row in wrong:
        print(f"{row['name']}: weights differ from the peer's by {row['largest_difference']:.1e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
