"""Rows of zeros behind the vocabulary (--make_vocab_size_divisible_by) change memory, never what is
trained."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import model_flops
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.report import describe
from tests.support.harness import run_distributed, tiny_config
from tests.support.memory_meters import a_model

VOCABULARY, ITERATIONS = 61, 4
Result = tuple[list[float], dict[str, np.ndarray], dict[str, int], int]


def padding_of(values: torch.Tensor, name: str, rank: int, part: Any) -> torch.Tensor:
    """The elements of a parameter's rows of zeros in a shard, or, with rank 0, in a whole range."""
    (slot,) = (slot for slot in part.layout.slots if slot.spec.name == name)
    low = rank * part.layout.shard_numel
    end = slot.offset + slot.spec.padded_numel
    return values[max(slot.end - low, 0) : max(end - low, 0)]


def train(distributed: Distributed, cases: list[dict[str, Any]]) -> list[Result]:
    """For each case: losses, weights, elements of padded rows that are not zero by kind, and all of
    their weights."""
    from tests.support.engine_runs import Engine

    results = []
    for options in cases:
        engine = Engine(distributed, {"vocab_size": VOCABULARY, "logit_z_loss": 1e-3, **options})
        for _, part in engine.model.parts():
            if part.has_state:
                part.full_gradients.fill_(torch.nan)
                part.grad_shard.fill_(torch.nan)
        losses = engine.run(ITERATIONS, evaluate_every=2).losses
        weights = {
            name: weight.float().numpy().copy() for name, weight in engine.model.full_weights()
        }
        found: dict[str, list[torch.Tensor]] = {}
        for _, part in engine.model.parts():
            for slot in part.layout.slots:
                if slot.spec.padding_rows:
                    name, rank = slot.spec.name, distributed.rank
                    for kind in part.kinds():
                        found.setdefault(kind, []).append(
                            padding_of(part.read(kind), name, rank, part)
                        )
                    if part.has_state:
                        found.setdefault("gradients", []).append(
                            padding_of(part.grad_shard, name, rank, part)
                        )
        joined = {kind: torch.cat(values) for kind, values in found.items()}
        broken = {kind: int((values != 0).sum()) for kind, values in joined.items()}  # NaN is not 0
        results.append((losses, weights, broken, joined["weights"].numel() if joined else 0))
    return results


LAYOUTS: dict[str, dict[str, Any]] = {
    "tied, zero 1": {"zero_stage": 1},
    "untied, zero 3": {
        "zero_stage": 3,
        "tie_word_embeddings": False,
        "cross_entropy_block_size": 25,
    },
    "untied, bf16, zero 2, lion, averaged": {
        "zero_stage": 2,
        "tie_word_embeddings": False,
        "training_dtype": "bf16",
        "optimizer": "lion",
        "ema_type": "ema",
    },
    "tied, frozen, bf16, muon": {
        "training_dtype": "bf16",
        "optimizer": "muon",
        "freeze": ("embedding",),
    },
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_padding_changes_no_training(ranks: int) -> None:
    """Losses and weights are those without it, to rounding; its own weights, gradients and moments
    stay zero.

    Biases of keys, which have no gradient but rounding, are left out by having none. AdamW's
    epsilon is large: it would turn the rounding of a gradient near zero into a whole update.
    """
    paddings = (1, 100)
    cases = [
        {
            "add_qkv_biases": False,
            "adam_eps": 1e-4,
            "make_vocab_size_divisible_by": padding,
            **options,
        }
        for options in LAYOUTS.values()
        for padding in paddings
    ]
    by_rank = run_distributed(ranks, train, cases)
    for index, options in enumerate(cases):
        losses, weights, broken, _ = by_rank[0][index]
        plain_losses, plain_weights, *_ = by_rank[0][index - index % len(paddings)]
        rounding = 1e-2 if "training_dtype" in options else 1e-6
        np.testing.assert_allclose(losses, plain_losses, rtol=rounding, err_msg=str(options))
        assert weights.keys() == plain_weights.keys()
        for name, weight in weights.items():
            assert weight.shape == plain_weights[name].shape
            difference = float(np.abs(weight - plain_weights[name]).max())
            assert difference <= 10 * rounding, (name, options)
        padding = options["make_vocab_size_divisible_by"]
        rows = (padding - VOCABULARY % padding) % padding
        count = sum(result[index][3] for result in by_rank)
        assert count == rows * 32 * (1 if options.get("tie_word_embeddings", True) else 2)
        for result in by_rank:
            assert not any(result[index][2].values()), (result[index][2], options)
        if rows:
            assert "weights" in broken and ("gradients" in broken) == ("freeze" not in options)


def test_initial_weights_and_counts_leave_it_out() -> None:
    """As published: parameters, FLOPs and the head of a dry run; memory has it."""
    plain, padded = (tiny_config(make_vocab_size_divisible_by=padding) for padding in (1, 100))
    models = [a_model(config) for config in (plain, padded)]
    for (name, weight), (_, other) in zip(*(model.full_weights() for model in models), strict=True):
        assert torch.equal(weight, other), name
    assert models[0].num_parameters == models[1].num_parameters
    assert model_flops(plain.model, 16, 64) == model_flops(padded.model, 16, 64)
    plans = [make_plan(config, 1, "cpu") for config in (plain, padded)]
    pages = [describe(plan, 2**30, ()) for plan in plans]
    counts = [next(line for line in page if line.startswith("parameters")) for page in pages]
    assert counts[0] == counts[1]
    assert plans[1].state_bytes - plans[0].state_bytes == 36 * 32 * 16


def test_logits_are_those_of_the_vocabulary() -> None:
    """No sampling can find an entry of the padding; the soft cap is on the logits that it sees."""
    config = tiny_config(make_vocab_size_divisible_by=100, logit_soft_cap=0.5, init_method_std=1.0)
    model = a_model(config)
    for _ in model.full_weights():
        pass
    head = model.stages[-1].layers[-1]
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    logits = head.logits(hidden)
    exact = head.norm(hidden).detach().double() @ head.weight.detach().double().t()
    assert logits.shape == (2, 3, 64) and float(exact.abs().max()) > 1
    torch.testing.assert_close(
        logits.detach().double(), 0.5 * (exact / 0.5).tanh(), rtol=0, atol=1e-5
    )
