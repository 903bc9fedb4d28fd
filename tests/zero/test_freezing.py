"""Frozen parameters: they stay, nothing is spent on them, and the others train as if they were
constants."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import (
    Trajectory,
    layers_of,
    parameters_of,
    run_distributed,
    same_weights,
    tiny_config,
    train_tiny,
)
from tests.support.plain_gpt import PlainGPT, plain_adamw

Options = dict[str, Any]
ITERATIONS = 5

# Options, and the beginnings of the names that they freeze.
FREEZING: dict[str, tuple[Options, tuple[str, ...]]] = {
    "first stages": ({"freeze": ("embedding", "blocks.0")}, ("embedding.", "blocks.0.")),
    "a middle one": ({"freeze": ("blocks.1",)}, ("blocks.1.",)),
    "parts": (
        {"freeze": ("blocks.0.mlp", "blocks.2.attention"), "lr_scales": ("head:0",)},
        ("blocks.0.mlp.", "blocks.2.attention.", "head."),
    ),
    "all but the head": ({"freeze": ("embedding", "blocks")}, ("embedding.", "blocks.")),
    "all but the embedding": ({"freeze": ("blocks", "head")}, ("blocks.", "head.")),
    "a tied embedding": (
        {"freeze": ("embedding.word.weight",), "tie_word_embeddings": True},
        ("embedding.word.",),
    ),
    "all but a tied embedding": (
        {"freeze": ("blocks", "head"), "tie_word_embeddings": True},
        ("blocks.", "head."),
    ),
    "scales": (
        {"lr_scales": ("blocks:0.25", "blocks.1:3", "*.bias:0.5", "embedding:0")},
        ("embedding.",),
    ),
    "only a norm, faster": (
        {"lr_scales": ("*:0", "blocks.1.attention_norm:3")},
        ("embedding.", "blocks.0.", "blocks.1.attention.", "blocks.1.mlp", "blocks.2.", "head."),
    ),
}


def options_of(case: str, **more: Any) -> Options:
    return {
        "num_layers": 3,
        "tie_word_embeddings": False,
        "lr_warmup": 3,
        **FREEZING[case][0],
        **more,
    }


def several(distributed: Distributed, runs: Sequence[Options], iterations: int) -> list[Trajectory]:
    return [train_tiny(distributed, options, iterations) for options in runs]


def plain_loop(
    options: Options, initial: dict[str, np.ndarray]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The oracle: torch.nn with requires_grad False, and torch.optim.AdamW with a learning rate for
    each scale."""
    config = tiny_config(**options)
    scales = {
        parameter.spec.name: parameter.spec.lr_scale
        for layer in layers_of(config)
        for parameter in layer.parameters()
    }
    model = PlainGPT(config.model)
    model.load(initial)
    update, losses = plain_adamw(model, config.optimizer, scales), []
    for iteration, ((tokens, *_),) in enumerate(
        open_data(config, 0, 1).batches("training", 0, ITERATIONS), start=1
    ):
        loss = model.loss(tokens)
        update(loss, 1e-3 * min(1.0, iteration / 3))
        losses.append(loss.item())
    return losses, {name: weight.numpy() for name, weight in model.state_dict().items()}


MORE = {
    "a middle one",
    "all but the head",
    "all but the embedding",
    "all but a tied embedding",
    "only a norm, faster",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in MORE else []) for case in FREEZING],
)
def test_frozen_runs_equal_plain_torch(case: str) -> None:
    """Frozen weights keep every bit, all others move; losses and weights are those of requires_grad
    False.

    Two ranks, ZeRO 1, 2 and 3: bit-identical among themselves. Learning rates, and with them weight
    decay, have their scale.
    """
    runs = [options_of(case, zero_stage=zero_stage) for zero_stage in (1, 2, 3)]
    ours, *others = run_distributed(2, several, runs, ITERATIONS)[0]
    for other in others:
        assert other.losses == ours.losses and other.grad_norms == ours.grad_norms
        assert same_weights(other.weights, ours.weights)
    frozen = FREEZING[case][1]
    for name, weight in ours.weights.items():
        assert np.array_equal(weight, ours.initial[name]) == name.startswith(frozen), name
    losses, weights = plain_loop(runs[0], ours.initial)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)
    for name, weight in weights.items():
        difference = np.abs(ours.weights[name] - weight)
        if name.endswith("query_key_value.bias"):
            difference[32:64] = (
                0  # of keys: their exact gradient is zero, Adam makes noise of rounding
            )
        assert difference.max() < 1e-5, name


def frozen_storage(distributed: Distributed) -> list[tuple[Trajectory, Trajectory]]:
    """bf16 runs whose frozen shards are kept in fp32, and in bf16."""
    common = options_of("parts", training_dtype="bf16", hidden_dropout=0.1)
    return [
        tuple(
            train_tiny(
                distributed,
                common
                | {"zero_stage": stage, "store_frozen_weights_in_optimization_precision": precise},
                ITERATIONS,
            )
            for precise in (True, False)
        )
        for stage in (1, 3)
    ]


def test_the_precision_of_frozen_shards_changes_no_bit_of_a_run() -> None:
    """Layers always compute with the rounded weight: with dropout, and the same at every ZeRO
    stage."""
    (first, second), others = run_distributed(2, frozen_storage)[0]
    assert len(set(first.losses)) == ITERATIONS
    for run in (second, *others):
        assert run.losses == first.losses and same_weights(run.weights, first.weights)


# -- the learning rate of one update
# -----------------------------------------------------------------------------------


def update_of(scale: float, weight_decay: float) -> dict[str, torch.Tensor]:
    """How far one update moves each weight, with blocks at a scale."""
    options = {
        "num_layers": 2,
        "lr_scales": (f"blocks:{scale}",),
        "weight_decay": weight_decay,
        "clip_grad": 0.0,
    }
    engine = Engine(SimulatedRanks(), options)
    before = {name: weight.detach().double() for name, weight in engine.model.full_weights()}
    engine.step(1)
    return {
        name: weight.detach().double() - before[name]
        for name, weight in engine.model.full_weights()
    }


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_scale_multiplies_the_update(weight_decay: float) -> None:
    """The scale applies to matching weights, decay included; others move as without a scale."""
    plain, scaled = update_of(1.0, weight_decay), update_of(0.25, weight_decay)
    for name, change in plain.items():
        factor = 0.25 if name.startswith("blocks.") else 1.0
        torch.testing.assert_close(
            scaled[name], factor * change, rtol=0, atol=1e-6 if factor < 1 else 0.0
        )
        assert float(change.abs().max()) > 1e-3


# -- what is not done
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("case", "first", "reduced"),
    [
        ("first stages", 2, {2, 3, 4}),
        ("a middle one", 0, {0, 1, 3, 4}),
        ("parts", 0, {0, 1, 2, 3}),
        ("all but the head", 4, {4}),
        ("all but the embedding", 0, {0}),
        ("a tied embedding", 0, {0, 1, 2, 3, 4}),
        ("all but a tied embedding", 0, {0}),
    ],
)
def test_backward_ends_at_the_first_stage_with_something_to_train(
    case: str, first: int, reduced: set[int], zero_stage: int
) -> None:
    """No backward pass, gather for one, tape, or input gradient before it; reductions where
    something is trained."""
    model = Engine(
        SimulatedRanks(), options_of(case, zero_stage=zero_stage, depth_first_micro_batches=2)
    ).model
    backward = [step for step in model.training_schedule if step.kind == "backward"]
    assert {step.stage for step in backward} == set(range(first, 5))
    assert all(step.stage >= first for step in backward if step.needs)
    assert {stage for step in model.training_schedule for stage, _ in step.reduce} == reduced
    assert {stage.index for stage in model.stages if stage.gradients is not None} == reduced
    assert {stage.index for stage in model.stages if stage.runs_backward} == set(range(first, 5))
    assert {stage.index for stage in model.stages if stage.wants_input_gradient} == set(
        range(first + 1, 5)
    )


def test_nothing_remains_of_a_frozen_forward_pass() -> None:
    """No graph and no tape: activations of frozen stages in front are not kept."""
    engine = Engine(SimulatedRanks(), options_of("all but the head"))
    model, batch = engine.model, engine.batches(1, torch.tensor(1.0))[0]
    hidden = None
    for stage in model.stages[:-1]:
        stage.gather()
        hidden = stage.forward(hidden, batch, 0)
        assert not hidden.requires_grad and not stage._tape
    for _, part in model.parts():
        assert hasattr(part, "grad_shard") == (not part.frozen)
        assert set(part.moments) == (set() if part.frozen else {"exp_avg", "exp_avg_sq"})
        assert set(part.kinds()) == (
            {"weights"} if part.frozen else {"weights", "exp_avg", "exp_avg_sq"}
        )
    for name, parameter in parameters_of(model):
        assert (
            parameter.requires_grad == hasattr(parameter, "main_grad") == name.startswith("head.")
        ), name


def test_frozen_weights_are_evaluated_and_exported() -> None:
    """A loss of frozen and trained weights is that of the same weights loaded into the oracle."""
    engine = Engine(SimulatedRanks(), options_of("parts"))
    engine.run(2)
    plain = PlainGPT(engine.config.model)
    plain.load(
        {name: weight.detach().numpy().copy() for name, weight in engine.model.full_weights()}
    )
    (batch,) = engine.batches(5)
    tokens = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
    shifted = type(batch)(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss = float(engine.model.evaluate([shifted])) / shifted.labels.numel()
    assert abs(loss / plain.loss(tokens).item() - 1) < 1e-6


# -- patterns
# --------------------------------------------------------------------------------------------------------


def scales_of(**options: Any) -> dict[str, float]:
    layers = layers_of(tiny_config(num_layers=12, tie_word_embeddings=False, **options))
    return {p.spec.name: p.spec.lr_scale for layer in layers for p in layer.parameters()}


def test_patterns_match_names_prefixes_and_wildcards() -> None:
    """`blocks.1` is not `blocks.10`; the last match counts, and freezing wins over scales."""
    scales = scales_of(lr_scales=("blocks.1:0.5", "*.bias:2"))
    assert {scales[f"blocks.1.{part}.weight"] for part in ("mlp.up", "attention.output")} == {0.5}
    assert scales["blocks.1.mlp.up.bias"] == 2 and scales["blocks.10.mlp.up.weight"] == 1
    scales = scales_of(
        lr_scales=("blocks:0.5", "blocks.3:1", "head:0"),
        freeze=("blocks.1", "embedding.word.weight"),
    )
    assert scales["blocks.0.mlp.up.weight"] == 0.5 and scales["blocks.3.mlp.up.weight"] == 1
    assert (
        scales["blocks.1.mlp.up.weight"]
        == scales["head.norm.weight"]
        == scales["embedding.word.weight"]
        == 0
    )
    assert scales["embedding.position.weight"] == 1


def test_patterns_that_cannot_be_meant() -> None:
    with pytest.raises(
        UsageError, match="'block.0' matches no parameter; similar names: .*blocks.0"
    ):
        scales_of(freeze=("block.0",))
    with pytest.raises(UsageError, match="'blocks.12' matches no parameter"):
        scales_of(lr_scales=("blocks.12:0.5",))
    with pytest.raises(UsageError, match="every parameter is frozen; freeze fewer"):
        scales_of(freeze=("embedding", "blocks", "head"))
