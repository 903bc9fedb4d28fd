"""Check muP: how far activations move at several widths, or which learning rate is best at each.

    python scripts/check_mup.py [--widths 64 128 256 512] [--plot=mup.png] -- <training flags>
    python scripts/check_mup.py --rates 0.001 0.002 0.004 0.008 -- --train_iters=60 <training flags>

The training flags are those of pretrain_gpt.py, with the data; --mup=0 among them shows the
difference. The models have two blocks unless flags say otherwise, heads of 16 channels, more in wider
models, and the first width is the base. The coordinate check (Yang et al. 2022, appendix D) prints
the root mean square of each output's change over --train_iters updates, 8 by default, and the slope
of its logarithm over that of the width: near 0 with muP. With several --rates, each width has its
losses in the last quarter of the updates, and its best rate, at the minimum of the parabola through
the lowest loss and its neighbors over the rate's logarithm.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
import numpy as np
import torch
from torch import Tensor

from megatron_lite.cli.parse import parse
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.config import DistributedConfig
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import initialize
from megatron_lite.errors import RunError
from megatron_lite.model.layer import MicroBatch
from megatron_lite.run.exit_status import report
from megatron_lite.validation import resolve
from scripts.benchmarks.training.engine import Engine

Row = Sequence[float]
USUAL = (
    "--mup=1 --num_layers=2 --sequence_length=32 --batch_size=8 --adam_beta2=0.95 --weight_decay=0 "
    "--train_iters=8 --num_workers=0 --device=cpu"
)


@torch.no_grad()
def activations(engine: Engine, tokens: Tensor) -> dict[str, Tensor]:
    """Return outputs for tokens (b, s): of layers and their branches, and the logits."""
    layers: list[Any] = [layer for stage in engine.model.stages for layer in stage.layers]
    found: dict[str, Tensor] = {}

    def keep(name: str, module: object, inputs: object, output: Tensor) -> None:
        found[name] = output

    hidden = None
    for layer in layers[:-1]:
        for name, module in layer.named_modules(prefix=layer.name):
            if name.endswith((layer.name, ".attention", ".mlp")):
                module.register_forward_hook(functools.partial(keep, name))
        hidden = layer(hidden, MicroBatch(tokens, tokens))
    return found | {"logits": layers[-1].logits(hidden)}


def trial(flags: Sequence[str], distributed: Distributed) -> tuple[float, dict[str, float]]:
    """Train with these flags; return the loss in the last quarter of the updates, and the root mean
    square of each output's change."""
    config = resolve(parse(flags).config, 1)
    engine, updates = Engine(config, distributed), config.training.train_iters
    steps = list(open_data(config, 0, 1).batches("training", 0, updates))
    tokens = steps[0][0].tokens[:, :-1]
    before = activations(engine, tokens)
    losses = [float(engine.step([part.tokens for part in step])) for step in steps]
    changes = {
        name: float((value - before[name]).square().mean().sqrt())
        for name, value in activations(engine, tokens).items()
    }
    return float(np.mean(losses[-(updates // 4) :])), changes


def slope(columns: Row, values: Row) -> float:
    """Return the slope of the regression line in logarithms."""
    return float(np.polyfit(np.log(columns), np.log(values), 1)[0])


def best(columns: Row, values: Row) -> float:
    """Return the learning rate at the parabola's minimum; NaN if the lowest loss is at an end."""
    lowest = int(np.argmin(values))
    near = slice(lowest - 1, lowest + 2)
    if not 0 < lowest < len(columns) - 1:
        return math.nan
    curvature, gradient, _ = np.polyfit(np.log(columns[near]), values[near], 2)
    return math.exp(-gradient / curvature / 2)


def main(argv: Sequence[str]) -> None:
    """Train all models, print the table and plot it."""
    parser = ScriptParser(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="hidden sizes")
    add("--rates", type=float, nargs="+", default=[0.004], help="learning rates")
    add("--plot", type=Path, help="file of a picture (needs matplotlib)")
    add("flags", nargs="*", help="flags of pretrain_gpt.py")
    options = parser.parse_args(argv)
    widths, rates = options.widths, options.rates
    distributed = initialize(DistributedConfig(device="cpu"))
    found = {}
    for width, rate in itertools.product(widths, rates):
        sizes = f"--hidden_size={width} --num_attention_heads={width // 16} --lr={rate}"
        words = f"{USUAL} --mup_base_hidden_size={widths[0]} {sizes}".split()
        found[width, rate] = trial([*words, *options.flags], distributed)
    distributed.close()
    if len(rates) == 1:
        moved = {width: found[width, rates[0]][1] for width in widths}
        rows = {name: [moved[width][name] for width in widths] for name in moved[widths[0]]}
        columns, sums_up = widths, slope
    else:
        rows = {f"loss at {width}": [found[width, rate][0] for rate in rates] for width in widths}
        columns, sums_up = rates, best
    print(" " * 20, *(f"{column:>10.4g}" for column in columns), f"{sums_up.__name__:>10}")
    for name, values in rows.items():
        print(f"{name:<20}", *(f"{value:>10.4g}" for value in (*values, sums_up(columns, values))))
    if options.plot is not None:
        from matplotlib import pyplot

        pyplot.loglog(columns, np.transpose([*rows.values()]), marker="o", label=[*rows])
        pyplot.legend()
        pyplot.savefig(options.plot)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RunError as error:
        sys.exit(report(error, None, prints=True))
