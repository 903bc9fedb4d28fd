"""Time an optimizer step on a CPU against torch.optim.AdamW(fused=True) on the same parameters.

    python -m scripts.benchmarks.training.optimizer --threads=1 --output=optimizer.json
    python -m scripts.benchmarks.training.optimizer --threads=2 --max_others=0.05

Only the optimizer runs, in one process. Gradients are random and rescaled to the same norm before
every step, untimed. Each of our rows takes turns with both peers, in rotating order, and ratios
compare times within a turn. If a row and a peer compute the same update, their final weights must
agree, or the exit code is 1. --max_others waits for and counts only turns in which other processes
used at most that share of the CPUs. Prints a Markdown table. Run from the checkout.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import unflatten
from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.validation import resolve
from scripts.benchmarks.processor import load, wait_until_quiet
from scripts.benchmarks.results import argument_parser
from scripts.benchmarks.tables import over, publish, spread, table
from scripts.benchmarks.training.engine import built
from scripts.benchmarks.training.settings import MODELS
from scripts.benchmarks.turns import Figures, Turns

RATE = 1e-4
DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0  # as in training; gradients have one of these norms:
LARGE, SMALL = 10.0, 0.5
REPEATS = 20  # rounds at most, in multiples of --turns, if few turns count
PLAIN, CLIPPED = "AdamW(fused)", "clip_grad_norm_ + AdamW(fused)"


class Row(NamedTuple):
    """One of our rows."""

    name: str
    options: dict[str, Any]
    norm: float  # gradient norm
    same_as: str | None = None  # the peer with the same update


GUARDED = {"clip_grad": CLIP, "skip_bad_steps": True}
ROWS = (
    Row("clip_grad=0", {"clip_grad": 0.0}, LARGE, PLAIN),
    Row("clip_grad=1 skip_bad_steps=1, every step clipped", GUARDED, LARGE, CLIPPED),
    Row("clip_grad=1 skip_bad_steps=1, none clipped", GUARDED, SMALL, CLIPPED),
    Row("clip_grad=0 adam_nesterov=1", {"clip_grad": 0.0, "adam_nesterov": True}, LARGE),
    Row("clip_grad=0 update_rms_clip=0.1", {"clip_grad": 0.0, "update_rms_clip": 0.1}, LARGE),
    Row(
        "clip_grad=0 clip_update_norm_sigma=3",
        {"clip_grad": 0.0, "clip_update_norm_sigma": 3.0},
        LARGE,
    ),
    Row("clip_grad=0 ema_type=ema", {"clip_grad": 0.0, "ema_type": "ema"}, LARGE),
)


class Contestant(NamedTuple):
    """An optimizer. gradients: in the order of names; they and the weights are not copies."""

    gradients: list[Tensor]
    weights: dict[str, Tensor]
    update: Callable[[], object]


def turn(contestant: Contestant, norm: float, options: argparse.Namespace) -> Figures:
    """Run some steps; return their mean time and the share of the cores used by other processes."""
    if options.max_others is not None:
        wait_until_quiet(options.max_others)
    gradients = contestant.gradients
    step_s, before = 0.0, load()
    for _ in range(options.steps_per_turn):
        # Clipping changes the gradients. All contestants rescale, so that all find the same cache.
        torch._foreach_mul_(gradients, norm / torch.stack(torch._foreach_norm(gradients)).norm())
        start_s = time.perf_counter()
        contestant.update()
        step_s += (time.perf_counter() - start_s) / options.steps_per_turn
    return {"step_s": step_s, "others": load().since(before).others}


def ours(row: Row, options: argparse.Namespace, distributed: Distributed) -> Contestant:
    """Return the engine's optimizer on the stages of a model that never runs."""
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
    model, optimizer, _ = built(resolve(unflatten(values), 1), distributed)
    optimizer.averaging.start()
    iterations, loss = itertools.count(1), torch.tensor(1.0)
    named = sorted(pair for stage in model.stages for pair in stage.parameters())
    gradients = [parameter.main_grad for _, parameter in named]
    update = lambda: optimizer.step(next(iterations), RATE, loss, 1, model.updated)  # noqa: E731
    return Contestant(gradients, dict(model.full_weights()), update)


def peer(weights: dict[str, Tensor], clips: bool) -> Contestant:
    """Return torch.optim.AdamW(fused=True), with or without clip_grad_norm_ before it."""
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [
        gradient for name in sorted(parameters) if (gradient := parameters[name].grad) is not None
    ]
    adamw = torch.optim.AdamW(
        [*parameters.values()], lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True
    )

    def update() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        adamw.step()

    return Contestant(gradients, {name: one.detach() for name, one in parameters.items()}, update)


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one row: its times, its peers' times, and the largest difference of
    final weights."""
    torch.set_num_threads(options.threads)
    distributed = launch.initialize(unflatten({"device": "cpu"}).distributed)
    own = ours(row, options, distributed)
    contestants = {row.name: own, PLAIN: peer(own.weights, False), CLIPPED: peer(own.weights, True)}
    for contestant in contestants.values():
        generator = torch.Generator().manual_seed(1)
        for gradient in contestant.gradients:
            gradient.normal_(generator=generator)
    turns = Turns(
        list(contestants),
        lambda name, _: turn(contestants[name], row.norm, options),
        options.turns,
        main="step_s",
        warm_up=1,
        max_others=options.max_others,
        repeats=REPEATS,
    )
    rounds = len(list(turns.run()))
    result: dict[str, Any] = {
        "options": row.options,
        "gradient_norm": row.norm,
        "parameters": sum(weight.numel() for weight in own.weights.values()),
        "step_s": turns.records[row.name].spread("step_s"),
        **{name: turns.records[name].spread("step_s") for name in (PLAIN, CLIPPED)},
        "ratios": {name: turns.ratio(row.name, name) for name in (PLAIN, CLIPPED)},
    }
    if row.same_as is not None:
        theirs = contestants[row.same_as].weights
        result["largest_difference"] = max(
            float((own.weights[name] - theirs[name]).abs().max()) for name in theirs
        )
        result["steps"] = rounds * options.steps_per_turn
    distributed.close()
    return result


COLUMNS = (
    spread("ms", "step_s", 2, 1e3),
    *(spread(f"{name} ms", name, 2, 1e3) for name in (PLAIN, CLIPPED)),
    *(over(f"ours / {name}", name) for name in (PLAIN, CLIPPED)),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__)
    for name, default in (("threads", 1), ("turns", 15), ("steps_per_turn", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
        parser.add_argument(f"--{name}", type=int, help="default: that of llama-39m")
    parser.add_argument("--only", default="", help="run rows whose names contain this text")
    parser.add_argument(
        "--max_others",
        type=float,
        help="count only turns during which other processes used less of the CPUs",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if min(options.threads, options.turns, options.steps_per_turn) < 1:
        parser.error("--threads, --turns and --steps_per_turn must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    # One process per row: memory freed by an earlier row made later rows up to a third slower.
    context = multiprocessing.get_context("forkserver")
    # slow imports
    context.set_forkserver_preload(["torch", "scripts.benchmarks.training.settings"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        rows = {
            row.name: pool.apply(measure, (row, options))
            for row in ROWS
            if options.only in row.name
        }
    parameters = next(iter(rows.values()))["parameters"]
    about = f"{options.threads} thread(s), {parameters:,} parameters in fp32; "
    publish(
        "python -m scripts.benchmarks.training.optimizer",
        argv,
        options,
        rows,
        table(rows, COLUMNS),
        about=about,
    )
    # Each update moves a weight by about the rate; rounding must stay far below.
    wrong = {
        name: row["largest_difference"]
        for name, row in rows.items()
        if row.get("largest_difference", 0.0) > 1e-3 * RATE * row.get("steps", 0)
    }
    for name, difference in wrong.items():
        print(f"{name}: weights differ from the peer's by {difference:.1e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
