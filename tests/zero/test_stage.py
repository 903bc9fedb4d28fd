"""Buffers, guards and the reduction of a real multi-rank model."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.gpt import build_gpt
from megatron_lite.model.layer import MicroBatch
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import run_distributed, tiny_config
from tests.support.memory_meters import a_model, micro_batches


def build(distributed: Distributed, **options: Any) -> MultiStage:
    config = tiny_config(distributed.world_size, **options)
    layers = build_gpt(config.model, config.batch.sequence_length)
    model = MultiStage(
        layers, config.multi_stage, config.batch, config.distributed.training_dtype, distributed
    )
    model.initialize(config.distributed.seed)
    return model


def a_batch(scale: float = 1.0) -> MicroBatch:
    tokens = torch.arange(2 * 17).view(2, 17) % 61
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.tensor(scale))


def compute_with_a_foreign_buffer(distributed: Distributed) -> list[str]:
    """Skip a gather and a change of gradient buffer on purpose: what does the stage say?"""
    model = build(distributed, zero_stage=3, num_layers=3)
    said = []
    first, second = model.stages[1], model.stages[3]
    assert first.weights is second.weights and first.gradients is second.gradients
    for stage in model.stages[:2]:
        stage.gather()
        stage.require_weights()
    hidden = model.stages[0].forward(None, a_batch(), 0)
    first.forward(hidden, a_batch(), 0)
    for wrong in (lambda: second.forward(hidden, a_batch(), 1), lambda: first.backward(hidden, 0)):
        try:
            wrong()
        except AssertionError as error:
            said.append(str(error))
    return said


def test_computing_with_another_stages_buffer_is_caught() -> None:
    """Autograd cannot see a wrong buffer behind a parameter; the guards can, in forward and
    backward."""
    assert run_distributed(2, compute_with_a_foreign_buffer)[0] == [
        "stage 3 would compute with the weights of stage 1",
        "stage 1 would add its gradients to those of stage None",
    ]


def padding_after_reduction(distributed: Distributed) -> list[float]:
    """Fill all gradient memory with NaN, run an iteration, and look at every shard whole."""
    model = build(
        distributed,
        zero_stage=2,
        vocab_size=61,
        hidden_size=36,
        num_attention_heads=3,
        num_layers=3,
        batch_size=6,
    )
    for stage in model.stages:
        assert stage.gradients is not None and stage.trainable
        stage.gradients.data.fill_(float("nan"))
        stage.trainable[0].grad_shard.fill_(float("nan"))
    model.forward_backward([a_batch()])
    return [float(part.grad_shard.square().sum()) for _, part in model.parts()]


def test_padding_is_zero_before_each_reduction() -> None:
    """NaN left in a buffer by whoever used it last reaches neither shard nor norm."""
    for norms in run_distributed(3, padding_after_reduction):
        assert np.isfinite(norms).all() and sum(norms) > 0


def initial_weights(distributed: Distributed, options: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: weight.numpy().copy() for name, weight in build(distributed, **options).full_weights()
    }


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    """The same bits for every rank count, stage grouping and ZeRO stage; others for another
    seed."""
    layouts = [(1, {}), (2, {"zero_stage": 3}), (3, {"layers_per_stage": 2.0, "batch_size": 6})]
    options = {"random_bias_init": True, "layer_norm_init_range": 0.1}
    results = [
        run_distributed(ranks, initial_weights, {**layout, **options})[0]
        for ranks, layout in layouts
    ]
    for other in results[1:]:
        assert all(np.array_equal(results[0][name], other[name]) for name in results[0])
    reseeded = run_distributed(1, initial_weights, {**options, "seed": 5})[0]
    same = [name for name in results[0] if np.array_equal(results[0][name], reseeded[name])]
    assert all(name.endswith("norm.bias") for name in same), (
        "only norm biases start from a constant here"
    )
    word = results[0]["embedding.word.weight"]
    assert abs(word.std() / 32**-0.5 - 1) < 0.05 and abs(word.mean()) < 0.01


def gather_and_agree(
    distributed: Distributed,
) -> tuple[list[float], list[Any], Any, int, list[float]]:
    buffer = torch.full((distributed.world_size * 3,), -1.0)
    buffer.view(-1, 3)[distributed.rank] = float(distributed.rank)
    handle = distributed.all_gather(buffer)
    handle.wait()
    handle.wait()
    objects = distributed.gather_objects({"rank": distributed.rank, "text": "é" * distributed.rank})
    word = distributed.broadcast_object(["from", distributed.rank])
    total = distributed.sum_in_rank_order(torch.tensor([1.0, float(distributed.rank)]))
    return (
        buffer.tolist(),
        objects,
        word,
        distributed.agree_max(distributed.rank * 2),
        total.tolist(),
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_gathers_and_agreement(ranks: int) -> None:
    for buffer, objects, word, largest, total in run_distributed(ranks, gather_and_agree):
        assert buffer == [float(rank) for rank in range(ranks) for _ in range(3)]
        assert objects == [{"rank": rank, "text": "é" * rank} for rank in range(ranks)]
        assert word == ["from", 0] and largest == 2 * (ranks - 1)
        assert total == [ranks, sum(range(ranks))]


@pytest.mark.parametrize(("architecture", "most"), [("gpt2", 500), ("llama", 520)])
def test_a_block_makes_few_calls(architecture: str, most: int) -> None:
    """Calls of Python and of C from Python in a block's forward and backward pass: they cost more
    than small kernels.

    One more wrapper around each product is 12 calls, the wrapper of torch.autograd.Function is 120.
    """
    families: dict[str, dict[str, Any]] = {
        "gpt2": {},
        "llama": {
            "use_rotary_embeddings": True,
            "normalization_type": "rms_norm",
            "gated": True,
            "add_linear_biases": False,
        },
    }
    config = tiny_config(num_layers=3, **families[architecture])
    model, calls = a_model(config), 0
    stage, batches = model.stages[2], micro_batches(config)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def counted(verb: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            sys.setprofile(count)
            try:
                return verb(*arguments)
            finally:
                sys.setprofile(None)

        return run

    model.forward_backward(batches)
    stage.forward, stage.backward = counted(stage.forward), counted(stage.backward)  # type: ignore[method-assign]
    model.forward_backward(batches)
    assert 200 < calls <= most, calls
