"""docs/optimizer.md: its flags and tables are the program's; test_guides.py runs its commands."""

import functools
import math
import re
from typing import Any

import pytest
import torch

from megatron_lite.cli.parse import parse
from megatron_lite.config import AveragingConfig, OptimizerConfig
from megatron_lite.model.gpt import parameters_of
from megatron_lite.optimizer.averaging import weight_in_sum
from megatron_lite.optimizer.guards import Guard
from megatron_lite.optimizer.rules.muon import orthogonalize_flops
from megatron_lite.planner.plan import make_plan
from tests.support import documents
from tests.support.harness import bytes_by_kind, layers_of, tiny_config

pytestmark = pytest.mark.guides

GUIDE = documents.read("optimizer")
NAN, INF = math.nan, math.inf


table = functools.partial(documents.table, GUIDE)


# -- memory: a model of which every parameter and shard is a multiple of the alignment, so that
# nothing is padded ------

HIDDEN = 256
VOCABULARY = 1024
LAYERS = 3


def memory(ranks: int, **options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind on one of these ranks, on GPUs; elements of `matrices`, of all `others`, and of
    these in `blocks`, and of the whole `block` and `embedding`."""
    sizes = dict(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        layers_per_stage=1.0,
        zero_stage=1,
    )
    plan = make_plan(
        tiny_config(ranks, **{"training_dtype": "bf16", **sizes, **options}), ranks, "cuda"
    )
    numbers = dict.fromkeys(("matrices", "others", "in blocks", "block", "embedding"), 0)
    for index, part in plan.model.parts():
        assert not part.layout.gaps
        for slot in part.layout.slots:
            in_block = slot.spec.name.startswith("blocks.")
            is_matrix = (
                in_block and "norm" not in slot.spec.name and slot.spec.name.endswith(".weight")
            )
            numbers["matrices" if is_matrix else "others"] += slot.numel
            numbers["in blocks"] += slot.numel if in_block and not is_matrix else 0
            numbers["block"] += slot.numel if index == 1 else 0
            numbers["embedding"] += slot.numel if index == 0 else 0
    return bytes_by_kind(plan.model), numbers


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory(ranks: int) -> None:
    """The table, and the sums for ZeRO-1, in which Muon's second moments of blocks are not divided
    by the ranks."""
    share = {
        row: int(cell.removesuffix("/N")) / ranks
        for row, cell, _ in table("kept for")
        if cell.endswith("/N")
    }
    assert len(share) == 5
    assert "6 + 12/N bytes with AdamW, 6 + 8/N with Lion or SGD, and 4/N more with an" in " ".join(
        GUIDE.split()
    )
    for optimizer, row in (
        ("adamw", "`adamw`"),
        ("lion", "`lion`, `sgd`"),
        ("sgd", "`lion`, `sgd`"),
    ):
        held, numbers = memory(ranks, optimizer=optimizer, ema_type="ema", tie_word_embeddings=True)
        every = numbers["matrices"] + numbers["others"]
        assert held["optimizer moments"] == share[row] * every
        assert held["averages"] == share["an average, with any optimizer"] * every
        largest = numbers["block"], numbers["embedding"]
        buffers = (largest[0] + (largest[0] if ranks > 1 else 0)) + largest[1]
        assert held["average buffers"] == 2 * buffers
        if ranks > 1:
            formula = 6 + (12 if optimizer == "adamw" else 8) / ranks + 4 / ranks
            assert sum(held.values()) - held["average buffers"] == formula * every
    held, numbers = memory(ranks, optimizer="muon")
    undivided = 4 * numbers["in blocks"] * (1 - 1 / ranks)
    expected = share["`muon`: matrices of the blocks"] * numbers["matrices"]
    expected += share["`muon`: everything else"] * numbers["others"] + undivided
    assert held["optimizer moments"] == expected
    assert held["update buffers"] == 2 * numbers["block"] * min(ranks, 2)


def test_traffic_of_muon() -> None:
    """4 (N - 1) / N bytes per weight of the blocks, norms and biases among them."""
    sizes = dict(hidden_size=HIDDEN, vocab_size=VOCABULARY, num_layers=LAYERS, optimizer="muon")
    for ranks in (1, 2, 4):
        plan = make_plan(tiny_config(ranks, **sizes), ranks, "cuda")
        slots = [slot for _, part in plan.model.parts() for slot in part.layout.slots]
        blocks = sum(slot.numel for slot in slots if "bl" in slot.spec.name)
        sent = sum(total.wire_bytes for kind, total in plan.traffic.items() if "muon" in kind)
        assert sent == 4 * (ranks - 1) / ranks * blocks, ranks


def test_cost_of_muon() -> None:
    """Five steps over a square matrix against the products of training with it: 6 multiplications
    and additions."""
    size, tokens = 4096, 2**20
    assert orthogonalize_flops(size, size, 5) / (6 * size**2 * tokens) == 5 * size / tokens


# -- decay, guards, averages
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_masks(tied: bool) -> None:
    """Which weights decay, by their names."""
    exempt = {"all": (), "all but norms and biases": ("norm", "bias")}
    exempt["all but norms, biases and embeddings; a tied head is an embedding"] = (
        "norm",
        "bias",
        "embedding",
    )
    rows = table("`--weight_decay_default_mask`")
    assert len(rows) == 3
    for mask, text in rows:
        name = re.findall(r"\w+", mask)[0]
        layers = layers_of(tiny_config(tie_word_embeddings=tied, weight_decay_default_mask=name))
        for parameter in parameters_of(layers):
            decays = not any(word in parameter.spec.name for word in exempt[text])
            assert parameter.spec.weight_decay == decays, (mask, parameter.spec.name)


# What is bad about a step: (loss, gradient norm), with a dynamic loss scale and without; usual are
# 5 and 1.
SPIKES = [(9.0, 1.0), (5.0, 3.0)]
KINDS: dict[str, dict[bool, list[tuple[float, float]]]] = {
    "NaN": {False: [(NAN, 1.0), (5.0, NAN)], True: [(NAN, 1.0), (NAN, INF)]},
    "infinity": {
        False: [(INF, 1.0), (-INF, 1.0), (5.0, INF), (5.0, 2e19)],
        True: [(INF, 1.0), (INF, INF)],
    },
    "spike": {False: SPIKES, True: SPIKES},
    "overflow": {True: [(5.0, NAN), (5.0, INF), (5.0, 2e19)]},
}


def verdict(options: OptimizerConfig, dynamic: bool, loss: float, norm: float) -> str:
    """The verdict of a guard that has seen ordinary steps."""
    guard = Guard(options, dynamic, torch.device("cpu"), train_iters=1000)
    guard.load_state({"usual": [[5.0 + step % 2 / 10, 1.0 + step % 3 / 10] for step in range(64)]})
    skipped = guard.judge(1, torch.tensor(loss, dtype=torch.float64), torch.tensor(norm)).skipped
    if guard.dropped.stop_reason() is not None:
        assert skipped
        return "stops"
    return "dropped" if skipped else "made"


def test_the_table_of_bad_steps() -> None:
    """The table of guards against the guard, for every combination of flags but those that have no
    effect."""
    rows = table("flags")
    asked = [frozenset(re.findall(r"--(\w+=\w+)", row[0])) for row in rows]
    crash = [
        frozenset(),
        {"crash_on_nan=1"},
        {"crash_on_inf=1"},
        {"crash_on_nan=1", "crash_on_inf=1"},
    ]
    going_on, skipping = [frozenset(some) for some in crash], frozenset({"skip_bad_steps=1"})
    abort = frozenset({"on_bad_step=abort"})
    assert set(asked) == {
        *going_on,
        *(some | skipping for some in going_on),
        abort,
        abort | skipping,
    }
    assert len(rows) == 10
    for flags, (_, *cells) in zip(asked, rows, strict=True):
        words = ["--dataset_source=random", *(f"--{flag}" for flag in sorted(flags))]
        options = parse(words).config.optimizer
        for (kind, cases), cell in zip(KINDS.items(), cells, strict=True):
            for dynamic, steps in cases.items():
                for loss, norm in steps:
                    assert verdict(options, dynamic, loss, norm) == cell, (
                        flags,
                        kind,
                        dynamic,
                        loss,
                        norm,
                    )


def test_the_limit_of_a_streak() -> None:
    """The number of dropped updates that ends any run, and how long --skip_bad_steps drops a
    lasting change."""
    options = OptimizerConfig(
        skip_bad_steps=True, skip_bad_steps_window=40, skip_bad_steps_sigma=2.0
    )
    limit = options.max_consecutive_bad_steps
    assert f"`--max_consecutive_bad_steps` dropped updates in a row (default {limit})" in GUIDE
    guard = Guard(options, False, torch.device("cpu"), train_iters=1000)
    guard.load_state({"usual": [[5.0 + step % 2 / 10, 1.0] for step in range(40)]})
    verdicts = [
        guard.judge(step, torch.tensor(9.0).double(), torch.tensor(1.0)).skipped
        for step in range(1, 41)
    ]
    assert sum(map(bool, verdicts)) == 40 // (1 + 2**2), "window / (1 + sigma^2)"


def test_weights_in_an_average() -> None:
    """The row of s, and how the rows count."""
    iterations, updates, weights = [
        row[1:] for row in [table_head("iteration"), *table("iteration")]
    ]
    assert [int(iteration) - 1 for iteration in iterations] == [int(update) for update in updates]
    config = AveragingConfig("ema_decay_sqrt", ema_switch_iter=4, ema_decay_iters=8)
    assert weights == [f"{weight_in_sum(config, int(update)):.3f}" for update in updates]


def table_head(first_cell: str) -> list[str]:
    """The head of the table that begins with this cell."""
    line = next(line for line in GUIDE.splitlines() if line.startswith(f"| {first_cell} |"))
    return [cell.strip() for cell in line[1:-1].split("|")]
