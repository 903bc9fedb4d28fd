"""Optimizers on the parts of parameters that tensor-parallel ranks have, against whole parameters
on one rank."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.kernels import adamw
from megatron_lite.optimizer.optimizer import rule_of
from megatron_lite.optimizer.rules.muon import describe
from megatron_lite.validation.sizes import CLIPPING_ALIGNMENT
from tests.support.engine_runs import Engine
from tests.support.harness import LLAMA, Trajectory, run_distributed, tiny_config, train_tiny
from tests.support.whole_parameters import Weights, fill_gradients, masters, together

Options = dict[str, Any]

STEPS = 3
SMALL: Options = {
    "sequence_length": 8,
    "clip_grad": 0.0,
    "batch_size": 4,
    "vocab_size": 61,
    "weight_decay": 0.3,
}
RATES: Options = {
    "freeze": ("blocks.0.mlp.up", "head"),
    "lr_scales": ("*.query_key_value.*:0.5", "embedding:0.1", "*.down.*:2", "*.bias:3"),
}
# By elements, or by whole matrices: equal gradients give equal bits in every layout.
EXACT: dict[str, Options] = {
    "muon": {"optimizer": "muon", "ema_type": "ema", **RATES},
    "muon, grouped heads": {
        "optimizer": "muon",
        **LLAMA,
        "qk_layernorm": True,
        "zero_stage": 3,
        "num_layers": 3,
    },
    "muon, stages of two": {"optimizer": "muon", **LLAMA, "num_layers": 3, "layers_per_stage": 2.0},
    "adamw": {"ema_type": "ema", "weight_decay_default_mask": "levanter", **RATES},
    "lion": {"optimizer": "lion", **LLAMA, "zero_stage": 2, "training_dtype": "bf16"},
    "sgd": {"optimizer": "sgd", **RATES, "split_master_weights": True, "training_dtype": "bf16"},
}
# By sums over all parameters, in the order of the ranks.
CLIPPED: dict[str, Options] = {
    "rms": {**LLAMA, "hidden_size": 64, "update_rms_clip": 0.3},
    "norm": {
        **LLAMA,
        "hidden_size": 64,
        "clip_update_norm_sigma": 0.1,
        "clip_update_norm_window": 4,
        "adam_beta1": 0.0,
    },
    "gradient norm": {**LLAMA, "hidden_size": 64, "clip_grad": 0.5},
}
CASES = EXACT | CLIPPED


class Trained(NamedTuple):
    """What one rank has after some updates."""

    weights: Weights
    averages: Weights
    losses: list[float]
    norms: list[float]
    record: dict[str, Any]
    text: str  # of the log, about Muon


def update(ranks: Distributed, options: Options) -> Trained:
    """Some updates from the same gradients in every layout; ranks of a tensor-parallel group differ
    in their loss."""
    torch.manual_seed(ranks.rank)
    engine = Engine(ranks, SMALL | options | {"tensor_parallel": ranks.tensor.world_size})
    engine.model.gather_ahead()
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        fill_gradients(engine, step, scale=4.0**step)
        loss = torch.tensor(1.0 + 1e-3 * ranks.tensor.rank)
        done = engine.optimizer.step(step, 0.02 / step, loss, engine.tokens, engine.model.updated)
        losses.append(float(done.loss))
        norms.append(float(done.grad_norm))
        engine.model.gather_ahead()
    engine.model.finish()
    averages = masters(engine, "average") if engine.model.memory.averages else {}
    text = (
        describe(engine.model.stages)
        if rule_of(engine.config.optimizer).declared.whole_matrices
        else ""
    )
    return Trained(masters(engine), averages, losses, norms, engine.optimizer.record(), text)


def overflow(ranks: Distributed) -> tuple[float, bool, bool]:
    """The loss scale, whether an update was dropped, whether weights stayed, if only the last rank
    has infinities."""
    options: Options = {
        "training_dtype": "fp16",
        "hysteresis": 1,
        "tensor_parallel": ranks.tensor.world_size,
    }
    engine = Engine(ranks, SMALL | options)
    engine.model.gather_ahead()
    fill_gradients(engine, 1)
    before, rank = masters(engine), ranks.data.rank
    for _, part in engine.model.parts():
        for slot, start, _ in (
            part.layout.pieces(rank) if ranks.rank == ranks.world_size - 1 else ()
        ):
            if slot.spec.split.dim == 1:
                part.grad_shard[slot.offset + start - rank * part.layout.shard_numel] = torch.inf
    done = engine.optimizer.step(1, 0.02, torch.tensor(1.0), engine.tokens, engine.model.updated)
    engine.model.finish()
    stays = all(
        np.array_equal(weight, before[name], equal_nan=True)
        for name, weight in masters(engine).items()
    )
    return float(engine.optimizer.loss_scale.scale), bool(done.verdict.skipped), stays


def update_all(
    ranks: Distributed, layouts: tuple[int, ...]
) -> tuple[dict[tuple[int, str], Trained], Any]:
    """Every case in every layout: tensor-parallel ranks of four. And `overflow` in the last
    layout."""
    found = {}
    for tensor_parallel in layouts:
        divide(ranks, dist.new_group, DistributedConfig(tensor_parallel=tensor_parallel))
        found |= {
            (tensor_parallel, name): update(ranks, options) for name, options in CASES.items()
        }
    return found, overflow(ranks)


@functools.cache
def on_one_rank(name: str) -> Trained:
    return update(Distributed(0, 1, 1, torch.device("cpu"), None, None), CASES[name])


@functools.cache
def everything() -> list[tuple[dict[tuple[int, str], Trained], Any]]:
    return run_distributed(4, update_all, (2, 4))


def on_four_ranks() -> list[dict[tuple[int, str], Trained]]:
    return [found for found, _ in everything()]


@pytest.mark.parametrize("tensor_parallel", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equal_gradients_move_weights_as_on_one_rank(name: str, tensor_parallel: int) -> None:
    """Weights and averages are those of one rank, to the bit where no sum decides; copies are
    equal."""
    one, ranks = on_one_rank(name), [rank[tensor_parallel, name] for rank in on_four_ranks()]
    for kind in ("weights", "averages"):
        of_ranks = [getattr(rank, kind) for rank in ranks]
        whole = together(of_ranks)
        assert whole.keys() == getattr(one, kind).keys() and (kind == "averages" or whole)
        for weight, expected in (
            (whole[name], expected) for name, expected in getattr(one, kind).items()
        ):
            if name in EXACT:
                np.testing.assert_array_equal(weight, expected)
            else:
                np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-7)
        for own in of_ranks:
            for parameter, weight in own.items():
                held = ~np.isnan(weight)
                np.testing.assert_array_equal(
                    weight[held], whole[parameter][held], err_msg=parameter
                )


@pytest.mark.parametrize("tensor_parallel", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_decide_by_the_same_numbers(name: str, tensor_parallel: int) -> None:
    """Norms count every element once, losses every data-parallel rank once; all ranks have the same
    bits."""
    one, ranks = on_one_rank(name), [rank[tensor_parallel, name] for rank in on_four_ranks()]
    for rank in ranks:
        assert (rank.losses, rank.norms, rank.record) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].record,
        )
    assert ranks[0].losses == [4 / tensor_parallel] * STEPS
    np.testing.assert_allclose(ranks[0].norms, one.norms, rtol=1e-6)
    assert ranks[0].record == pytest.approx(one.record, rel=1e-6)


def test_the_cases_clip() -> None:
    for name in ("rms", "norm"):
        assert on_one_rank(name).record["clipped_iters"] > 0


def test_copies_of_heads_that_begin_inside_of_a_range_are_refused() -> None:
    """One line with the numbers; a layout that fits, or one without copies of heads, is
    accepted."""
    assert CLIPPING_ALIGNMENT == adamw.ALIGNMENT
    biased: Options = {
        **LLAMA,
        "add_qkv_biases": True,
        "tensor_parallel": 4,
        "update_rms_clip": 1.0,
    }
    with pytest.raises(UsageError, match="after 8 elements of queries; clipping needs a multiple"):
        tiny_config(4, **biased)
    with pytest.raises(UsageError, match="after 16 elements of queries"):
        tiny_config(4, **biased | {"add_qkv_biases": False, "lora_rank": 2})
    for options in (
        {"kv_channels": 64},
        {"head_groups": 4},
        {"add_qkv_biases": False, "hidden_size": 64},
        {"lora_rank": 8},
    ):
        tiny_config(4, **biased | options)


def test_the_log_counts_whole_matrices() -> None:
    """And all ranks, which share the work."""
    for name in ("muon", "muon, grouped heads"):
        text, *others = (rank[4, name].text for rank in on_four_ranks())
        assert {*others} == {text} and text.startswith(on_one_rank(name).text)


def test_an_overflow_on_one_rank_drops_the_update_on_all() -> None:
    overflows = {result for _, result in everything()}
    assert overflows == {(2.0**15, True, True)}


def train_with_muon(ranks: Distributed, layouts: tuple[int, ...]) -> dict[int, Trajectory]:
    found = {}
    for size in layouts:
        divide(ranks, dist.new_group, DistributedConfig(tensor_parallel=size))
        options = {
            **LLAMA,
            "optimizer": "muon",
            "lr": 2e-3,
            "tensor_parallel": size,
            "sequence_tensor_parallel": size > 1,
        }
        found[size] = train_tiny(ranks, options)
    return found


@pytest.mark.slow
def test_muon_trains_as_on_data_parallel_ranks() -> None:
    """Over twenty iterations; orthogonalization in bf16 amplifies the rounding of gradients."""
    found = run_distributed(4, train_with_muon, (1, 2, 4))[0]
    for size in (2, 4):
        np.testing.assert_allclose(found[size].losses, found[1].losses, rtol=1e-4)
        for name, weight in found[1].weights.items():
            moved = np.abs(weight - found[1].initial[name]).max()
            np.testing.assert_allclose(
                found[size].weights[name], weight, rtol=0, atol=0.02 * moved, err_msg=name
            )
