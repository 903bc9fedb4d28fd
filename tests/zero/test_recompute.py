"""Whole-layer recompute: the same bits in losses and gradients, each block run once more, each
output seen once."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.attention import cpu as attention_on_cpu
from megatron_lite.kernels.attention.cpu import piece_length
from megatron_lite.zero.stage import Observer
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import (
    Trajectory,
    layers_of,
    run_distributed,
    same_weights,
    tiny_config,
    train_tiny,
)
from tests.support.memory_meters import a_model, micro_batches

CASES: list[dict[str, Any]] = [
    {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    {
        "zero_stage": 3,
        "breadth_first_micro_batches": 2,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.1,
    },
    {
        "zero_stage": 2,
        "depth_first_micro_batches": 2,
        "layers_per_stage": 2.0,
        "gated": True,
        "normalization_type": "rms_norm",
        "use_rotary_embeddings": True,
        "mlp_recompute_level": "activation,full:1",
    },
    {
        "zero_stage": 3,
        "training_dtype": "bf16",
        "freeze": ("embedding", "blocks.1.mlp"),
        "tie_word_embeddings": False,
    },
    {"freeze": ("embedding", "*.weight", "head"), "tie_word_embeddings": False},  # biases alone
]


def runs(
    distributed: Distributed, cases: list[dict[str, Any]], numbers: tuple[int, ...]
) -> list[list[Trajectory]]:
    """Train each case briefly with each number of recomputed layers."""
    common = {"num_layers": 3, "batch_size": 8, "lr_warmup": 0}
    return [
        [
            train_tiny(distributed, {**common, **options, "recompute_layers": number}, 2)
            for number in numbers
        ]
        for options in cases
    ]


@pytest.mark.parametrize(
    ("ranks", "cases", "numbers"), [(1, CASES[:1], (0, 1, 3)), (2, CASES, (0, 2))]
)
def test_recomputation_changes_no_bit(
    ranks: int, cases: list[dict[str, Any]], numbers: tuple[int, ...]
) -> None:
    """Losses, gradient norms and weights without and with it: dropout, freezing, every ZeRO stage,
    accumulation."""
    for results in run_distributed(ranks, runs, cases, numbers):
        for options, (plain, *others) in zip(cases, results, strict=True):
            assert len(set(plain.losses)) == len(plain.losses), (
                "the losses do not move: nothing is trained"
            )
            for other in others:
                assert other.losses == plain.losses and other.grad_norms == plain.grad_norms, (
                    options
                )
                assert same_weights(other.weights, plain.weights), options


def test_long_sequences_give_the_same_bits_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes attention in pieces from 256 positions on: ZeRO stages, buffers and recomputation
    change no bit."""
    pieces: set[tuple[int, bool]] = set()

    def watched(scores: int, length: int, channels: int, backward: bool) -> int:
        rows = piece_length(scores, length, channels, backward)
        pieces.add((rows, backward))
        return rows

    monkeypatch.setattr(attention_on_cpu, "piece_length", watched)
    common = {
        "sequence_length": 320,
        "kv_channels": 64,
        "micro_batch_size": 2,
        "attention_dropout": 0.0,
    }
    layouts: list[dict[str, Any]] = [
        {"zero_stage": 1},
        {"zero_stage": 2, "mlp_recompute_level": "activation"},
        {"zero_stage": 3, "recompute_layers": 1},
        {
            "num_weight_buffers": 1,
            "num_grad_buffers": 3,
            "recompute_layers": 2,
            "mlp_recompute_level": "full",
        },
    ]
    first, *others = (Engine(SimulatedRanks(), {**common, **layout}).run(2) for layout in layouts)
    assert pieces == {(64, False), (128, True)}
    assert first.losses[0] != first.losses[1], "nothing is trained"
    for layout, other in zip(layouts[1:], others, strict=True):
        assert other == first, layout


class Notes(Observer):
    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.gradients: list[str] = []

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        self.outputs.append(name)

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        self.gradients.append(name)


@pytest.mark.parametrize("recompute_layers", [0, 2, 3])
def test_blocks_run_twice_and_are_seen_once(recompute_layers: int) -> None:
    """The first blocks' forward runs again in the backward pass, and not in an evaluation;
    observers see one each."""
    config = tiny_config(1, num_layers=3, batch_size=1, recompute_layers=recompute_layers)
    layers = layers_of(config)
    counts = Counter[str]()
    notes = Notes()
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: counts.update([str(layer.name)]))
    model = a_model(config, layers)
    model.observe(notes)
    names = [str(layer.name) for layer in layers]
    model.forward_backward(micro_batches(config))
    assert counts == {name: 2 if name in names[1 : 1 + recompute_layers] else 1 for name in names}
    assert notes.outputs == names and notes.gradients == names[::-1]
    counts.clear()
    model.evaluate(micro_batches(config))
    assert set(counts.values()) == {1}
