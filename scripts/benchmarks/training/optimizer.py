"""Time an optimizer step on a CPU against torch.optim.AdamW(fused=True) on the same parameters.

    python -m scripts.benchmarks.training.optimizer --threads=1 --output=optimizer.json
    python -m scripts.benchmarks.training.optimizer --threads=2 --max_others=0.05

Only the optimizer runs, in one process. Gradients are random and rescaled to the same norm before
every step, untimed. Each of our rows takes turns with both peers, in rotating order, and ratios
compare times within a turn. If a row and a peer compute the same update, their final weights must
agree, or the exit code is 1. --max_others counts only turns in which other processes used at most
that share of the CPUs. Prints a Markdown table. Run from the checkout.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import unflatten
from megatron_lite.distributed import startup as launch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.validation import resolve
from scripts.benchmarks.commands import measured_alone, measuring_parser
from scripts.benchmarks.pipeline import Figures, Turns, describe, over, publish, spread, table
from scripts.benchmarks.processor import load
from scripts.benchmarks.training.engine import built
from scripts.benchmarks.training.settings import MODELS, Sizes, add_sizes, set_sizes

HERE = "scripts.benchmarks.training.optimizer"
RATE = 1e-4
DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0  # as in training; gradients have one of these norms:
LARGE, SMALL = 10.0, 0.5
PLAIN, CLIPPED = "AdamW(fused)", "clip_grad_norm_ + AdamW(fused)"


class Row(NamedTuple):
    """One of our rows."""

    options: dict[str, Any]
    norm: float  # gradient norm
    same_as: str | None = None  # the peer with the same update


GUARDED = {"clip_grad": CLIP, "skip_bad_steps": True}
ROWS = {
    "clip_grad=0": Row({"clip_grad": 0.0}, LARGE, PLAIN),
    "clip_grad=1 skip_bad_steps=1, every step clipped": Row(GUARDED, LARGE, CLIPPED),
    "clip_grad=1 skip_bad_steps=1, none clipped": Row(GUARDED, SMALL, CLIPPED),
    "clip_grad=0 adam_nesterov=1": Row({"clip_grad": 0.0, "adam_nesterov": True}, LARGE),
    "clip_grad=0 update_rms_clip=0.1": Row({"clip_grad": 0.0, "update_rms_clip": 0.1}, LARGE),
    "clip_grad=0 clip_update_norm_sigma=3": Row(
        {"clip_grad": 0.0, "clip_update_norm_sigma": 3.0}, LARGE
    ),
    "clip_grad=0 ema_type=ema": Row({"clip_grad": 0.0, "ema_type": "ema"}, LARGE),
}
COLUMNS = (
    spread("ms", "step_s", 2, 1e3),
    spread("fused ms", "fused_s", 2, 1e3),
    over("ours / fused", PLAIN),
    over("ours / clipped and fused", CLIPPED),
)


class Contestant(NamedTuple):
    """An optimizer. gradients: in the order of names; they and the weights are not copies."""

    gradients: list[Tensor]
    weights: dict[str, Tensor]
    update: Callable[[], object]


def turn(contestant: Contestant, norm: float, steps: int) -> Figures:
    """Run some steps; return their mean time and the share of the cores used by other processes."""
    gradients = contestant.gradients
    step_s, before = 0.0, load()
    for _ in range(steps):
        # Clipping changes the gradients. All contestants rescale, so that all find the same cache.
        torch._foreach_mul_(gradients, norm / torch.stack(torch._foreach_norm(gradients)).norm())
        start_s = time.perf_counter()
        contestant.update()
        step_s += (time.perf_counter() - start_s) / steps
    return {"step_s": step_s, "others": load().since(before).others}


def ours(row: Row, sizes: Mapping[str, Any], distributed: Distributed) -> Contestant:
    """Return the engine's optimizer on the stages of a model that never runs."""
    values = {
        **MODELS["llama-39m"][1],
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
    model, optimizer, _ = built(resolve(unflatten(values), 1), distributed)
    optimizer.averaging.start()
    iterations, loss = itertools.count(1), torch.tensor(1.0)
    named = sorted(pair for stage in model.stages for pair in stage.parameters())
    gradients = [parameter.main_grad for _, parameter in named]
    update = lambda: optimizer.step(next(iterations), RATE, loss, 1, model.updated)  # noqa: E731
    return Contestant(gradients, dict(model.full_weights()), update)


def peer(weights: dict[str, Tensor], clips: bool) -> Contestant:
    """Return torch.optim.AdamW(fused=True), with or without clip_grad_norm_ before it."""
    parameters = {name: torch.nn.Parameter(weights[name].clone()) for name in sorted(weights)}
    gradients = [torch.zeros_like(parameter) for parameter in parameters.values()]
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient
    adamw = torch.optim.AdamW(
        parameters.values(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True
    )

    def update() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        adamw.step()

    return Contestant(gradients, {name: one.detach() for name, one in parameters.items()}, update)


def measure(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one row: its time, its peers', and the largest difference of final
    weights. given: the options."""
    row, options = ROWS[name], argparse.Namespace(**given)
    torch.set_num_threads(options.threads)
    distributed = launch.initialize(unflatten({"device": "cpu"}).distributed)
    own = ours(row, {name: given[name] for name in Sizes._fields}, distributed)
    contestants = {name: own, PLAIN: peer(own.weights, False), CLIPPED: peer(own.weights, True)}
    for contestant in contestants.values():
        generator = torch.Generator().manual_seed(1)
        for gradient in contestant.gradients:
            gradient.normal_(generator=generator)
    turns = Turns(
        contestants,
        lambda one, _: turn(contestants[one], row.norm, options.steps_per_turn),
        options.turns,
        main="step_s",
        warm_up=1,
        max_others=options.max_others,
    )
    result: dict[str, Any] = turns.measured("step_s", others=lambda _: (PLAIN, CLIPPED))[name]
    result["fused_s"] = turns.spread(PLAIN, "step_s")
    if row.same_as is not None:
        theirs = contestants[row.same_as].weights
        differences = (float((own.weights[key] - theirs[key]).abs().max()) for key in theirs)
        rounds = len(turns.counted[name])
        # Each update moves a weight by about the rate; rounding must stay far below.
        result["largest_difference"] = max(differences)
        result["allowed_difference"] = 1e-3 * RATE * rounds * options.steps_per_turn
    distributed.close()
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measuring_parser(__doc__, in_quiet=True, threads=1, turns=15, steps_per_turn=3)
    add_sizes(parser, ["llama-39m"])
    parser.add_argument("--only", default="", help="run rows whose names contain this text")
    options = parser.parse_args(argv)
    set_sizes(options)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    # One process per row: memory freed by an earlier row made later rows up to a third slower.
    rows = {
        name: measured_alone(HERE, "measure", name, vars(options))
        for name in ROWS
        if options.only in name
    }
    result = describe(f"python -m {HERE}", argv, vars(options)) | {"rows": rows}
    publish(result, options.output, f"{options.threads} thread(s), fp32; ", table(rows, COLUMNS))
    wrong = {
        name: row["largest_difference"]
        for name, row in rows.items()
        if "allowed_difference" in row and row["largest_difference"] > row["allowed_difference"]
    }
    for name, difference in wrong.items():
        print(f"{name}: weights differ from the peer's by {difference:.1e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
