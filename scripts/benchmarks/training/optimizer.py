"""Time of one optimizer step on CPU beside torch.optim.AdamW(fused=True) on the same parameters.

    python -m scripts.benchmarks.training.optimizer --threads=1 --output=optimizer.json
    python -m scripts.benchmarks.training.optimizer --threads=2 --max_others=0.05

Only the optimizer runs, in one process: gradients are random, and brought back to the same norm before every step,
outside of the clock. Each row of ours takes turns with both peers, in an order that rotates, so that whatever else the
machine does falls on all alike; a ratio is one of times within a turn. Where ours and a peer do the same, their weights
have to agree at the end, or the program fails (exit code 1). With --max_others only turns count during which other
processes took less than that share of the CPUs; it waits for such moments. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import unflatten
from megatron_lite.distributed import process_group as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.training import machine
from scripts.benchmarks.training.settings import COMMON, MODELS

RATE, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.95)
CLIP = 1.0  # as in training; gradients have these norms:
LARGE, SMALL = 10.0, 0.5
MAX_REPEATS = 20  # of the turns asked for, where many do not count
PLAIN, CLIPPED = "AdamW(fused)", "clip_grad_norm_ + AdamW(fused)"


class Row(NamedTuple):
    """One of ours."""

    name: str
    options: dict[str, Any]
    norm: float  # of the gradient
    same_as: str | None = None  # the peer that does the same


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
    """The engine's optimizer on the stages of a model that is never run."""

    def __init__(self, row: Row, options: argparse.Namespace, distributed: Distributed) -> None:
        sizes, rest = MODELS["llama-39m"]
        sizes = {name: getattr(options, name, None) or size for name, size in sizes.items()}
        config = resolve(
            unflatten(
                {
                    **COMMON,
                    **rest,
                    **sizes,
                    "device": "cpu",
                    "lr": RATE,
                    "weight_decay": DECAY,
                    "adam_beta1": BETAS[0],
                    "adam_beta2": BETAS[1],
                    "weight_decay_default_mask": "off",
                    "train_iters": 1,
                    **row.options,
                }
            ),
            1,
        )
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
        self._gradients = {name: parameter.main_grad for name, parameter in self.model.parameters()}
        self._iteration, self._loss = 0, torch.tensor(1.0)

    def gradients(self) -> dict[str, Tensor]:
        """By name, live."""
        return self._gradients

    def weights(self) -> dict[str, Tensor]:
        """By name, live."""
        return {name: weight for name, weight in self.model.full_weights()}

    def step(self) -> None:
        """One update, and what belongs to it."""
        self._iteration += 1
        self._optimizer.step(self._iteration, RATE, self._loss, 1, self.model.updated)


class Peer:
    """torch.optim.AdamW(fused=True), perhaps behind clip_grad_norm_."""

    def __init__(self, weights: dict[str, Tensor], clips: bool) -> None:
        self._parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._clips, together = clips, list(self._parameters.values())
        self._adamw = torch.optim.AdamW(together, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)

    def gradients(self) -> dict[str, Tensor]:
        """By name, live."""
        return {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        """By name, live."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def step(self) -> None:
        """One update, and what belongs to it."""
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), CLIP)
        self._adamw.step()


class Contestant:
    """Ours or a peer, its gradients and its times."""

    def __init__(self, optimizer: Ours | Peer, norm: float) -> None:
        self.optimizer, self._norm = optimizer, norm
        self._gradients, self.seconds = list(optimizer.gradients().values()), list[float]()
        generator = torch.Generator().manual_seed(1)
        for _, gradient in sorted(optimizer.gradients().items()):
            gradient.normal_(generator=generator)

    def turn(self, steps: int) -> None:
        """Some steps; their mean time is one of the times."""
        elapsed_s = 0.0
        for _ in range(steps):
            # Clipping may have changed them. Done for all, so that all find the same in the cache.
            norm = torch.stack(torch._foreach_norm(self._gradients)).norm()
            torch._foreach_mul_(self._gradients, self._norm / norm)
            start_s = time.perf_counter()
            self.optimizer.step()
            elapsed_s += time.perf_counter() - start_s
        self.seconds.append(elapsed_s / steps)


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Times of one row and its peers in seconds, by turn, and how far the weights are apart in the end."""
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
        if turn > 0 and (options.max_others is None or others <= options.max_others):  # the first one warms up
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
    """Returns the share of the CPUs that others took meanwhile."""
    if options.max_others is not None:
        machine.wait_until_quiet(options.max_others)
    busy_s, own_s, start_s = machine.busy_seconds(), time.process_time(), time.perf_counter()
    for contestant in contestants:
        contestant.turn(options.steps_per_turn)
    elapsed_s = time.perf_counter() - start_s
    others_s = machine.busy_seconds() - busy_s - (time.process_time() - own_s)
    return max(0.0, others_s) / (elapsed_s * (os.cpu_count() or 1))


def to_markdown(result: dict[str, Any]) -> str:
    """The table, and what it was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['date']}, {result['machine']['device']}, {result['threads']} thread(s); {versions}; "
        f"{result['rows'][0]['parameters']:,} parameters in fp32.",
        "",
        f"| ours | ms | {PLAIN} ms | {CLIPPED} ms | ours / {PLAIN} | ours / {CLIPPED} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        seconds = row["seconds"]
        if not seconds["ours"]:
            lines.append(f"| {row['name']} | no turn counted | | | | |")
            continue
        times = " | ".join(f"{1e3 * statistics.median(seconds[name]):.2f}" for name in ("ours", PLAIN, CLIPPED))
        ratios = " | ".join(quartiles(seconds["ours"], seconds[name]) for name in (PLAIN, CLIPPED))
        lines.append(f"| {row['name']} | {times} | {ratios} |")
    return "\n".join([*lines, "", "Medians over turns; ratios within a turn: median (quartiles)."])


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median and quartiles of the ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add: Callable[..., Any] = parser.add_argument
    for name, default in (("threads", 1), ("turns", 15), ("steps_per_turn", 3)):
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
        add(f"--{name}", type=int, help="default: that of llama-39m")
    add("--only", default="", help="rows whose names contain this")
    add("--max_others", type=float, help="share of the CPUs that others may take in a turn that counts")
    add("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if min(options.threads, options.turns, options.steps_per_turn) < 1:
        parser.error("--threads, --turns and --steps_per_turn must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; returns the exit code."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    load_before = machine.load_average()
    # Each row in a process of its own: memory that an earlier row has freed made a later one up to a third slower.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "scripts.benchmarks.training.model"])  # which import what takes time
    with context.Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (row, options)) for row in ROWS if options.only in row.name]
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": machine.versions(),
        "threads": options.threads,
        "machine": machine.describe(torch.device("cpu"), load_before),
        "rows": rows,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(to_markdown(result), flush=True)
    # Each update moves a weight by about the rate, and rounding must stay far below.
    apart = [one for one in rows if one.get("largest_difference", 0.0) > 1e-3 * RATE * one.get("steps", 0)]
    for one in apart:
        print(f"{one['name']}: weights differ from the peer's by {one['largest_difference']:.1e}", file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
