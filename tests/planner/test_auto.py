"""The choices of `auto`: at device sizes between two predictions, and in runs."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels import matmul_library
from megatron_lite.planner.auto import (
    blocks_per_stage,
    device_memory_bytes,
    resolve_auto,
    worthwhile_bytes,
)
from megatron_lite.planner.plan import Planner
from megatron_lite.setup_run import _choose_products
from tests.support.harness import Trajectory, run_distributed, same_weights, tiny_config, train_tiny

MIB = 2**20


def a_config(ranks: int, **options: Any) -> Config:
    sizes = dict(
        num_layers=16, hidden_size=256, training_dtype="bf16", batch_size=ranks, zero_stage="auto"
    )
    return tiny_config(ranks, **{**sizes, **options})


def needed(config: Config, ranks: int) -> list[int]:
    """The predicted memory of each ZeRO stage."""
    stages = [dataclasses.replace(config.multi_stage, zero_stage=stage) for stage in (1, 2, 3)]
    plans = [
        Planner(ranks, "cuda").plan(dataclasses.replace(config, multi_stage=stage))
        for stage in stages
    ]
    return [plan.needed_bytes() for plan in plans]


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow), 128])
def test_the_lowest_stage_that_fits(ranks: int) -> None:
    """A device that just holds the memory of a stage gets that stage; a smaller device gets the
    next one."""
    config = a_config(ranks, num_layers=6)
    first, second, third = needed(config, ranks)
    assert first > second > third

    def chosen(device_bytes: int) -> tuple[Any, bool, str]:
        resolved, (note,) = resolve_auto(config, ranks, "cuda", device_bytes)
        return resolved.multi_stage.zero_stage, note.is_warning, note.text

    assert chosen(first)[:2] == (1, False)
    assert chosen(first - 2)[:2] == chosen(second)[:2] == (2, False)
    assert chosen(second - 2)[:2] == chosen(third)[:2] == (3, False)
    stage, warns, text = chosen(third - 100 * MIB)
    assert (
        (stage, warns) == (3, True)
        and "0.1 GiB too much" in text
        and "--mlp_recompute_level=full" in text
    )


def test_split_master_weights_leave_two_stages() -> None:
    """Split master weights need one weight buffer per stage, which ZeRO-3 does not have."""
    resolved, (note,) = resolve_auto(a_config(8, split_master_weights=True), 8, "cuda", MIB)
    assert resolved.multi_stage.zero_stage == 2 and note.is_warning


def test_recomputation_and_micro_batches_count() -> None:
    """Smaller activations allow a lower stage."""
    much = a_config(8, sequence_length=4096, batch_size=32, vocab_size=4096)
    less = a_config(
        8, sequence_length=4096, batch_size=32, vocab_size=4096, mlp_recompute_level="full"
    )
    least = a_config(8, sequence_length=4096, batch_size=32, vocab_size=4096, micro_batch_size=1)
    memory = needed(less, 8)[0]
    stages = [
        resolve_auto(config, 8, "cuda", memory)[0].multi_stage.zero_stage
        for config in (much, less, least)
    ]
    assert stages == [3, 1, 1]


def test_nothing_automatic_changes_nothing() -> None:
    config = tiny_config(4, zero_stage=2, layers_per_stage=1.5)
    assert resolve_auto(config, 4, "cpu", 1) == (config, ())


@pytest.mark.parametrize(
    ("ranks", "device_type", "sizes", "expected"),
    [
        (1, "cuda", dict(), 1),
        (8, "cuda", dict(hidden_size=4096, num_layers=32), 1),  # a block has 416 MiB
        (
            8,
            "cuda",
            dict(hidden_size=768, num_attention_heads=12),
            3,
        ),  # 13.5 MiB a block: three are 40.5
        (8, "cuda", dict(hidden_size=768, num_attention_heads=12, training_dtype="fp32"), 2),
        (
            64,
            "cuda",
            dict(hidden_size=768, num_attention_heads=12),
            4,
        ),  # 63 MiB would be five: a quarter of 16
        (64, "cuda", dict(hidden_size=768, num_attention_heads=12, num_layers=48), 5),
        (8, "cuda", dict(num_layers=3), 1),
        (
            8,
            "cuda",
            dict(hidden_size=768, num_attention_heads=12, pipeline_parallel=2),
            2,
        ),  # of 8 on a rank
        (2, "cpu", dict(), 1),
        (4, "cpu", dict(hidden_size=128), 4),
    ],
)
def test_blocks_per_stage(
    ranks: int, device_type: str, sizes: dict[str, Any], expected: int
) -> None:
    """They make a gather worth its latency, are at most a quarter of a rank's blocks, and end up in
    the options."""
    config = a_config(ranks, **{"zero_stage": 1, "layers_per_stage": "auto", **sizes})
    blocks, note = blocks_per_stage(config, ranks, device_type)
    assert blocks == expected, note.text
    resolved, notes = resolve_auto(config, ranks, device_type, 80 * 2**30)
    assert resolved.multi_stage.layers_per_stage == float(expected) and notes == (note,)


def test_latency_is_a_tenth_of_a_gather() -> None:
    """The numbers in the docstring follow from its rule."""
    assert worthwhile_bytes(8, "cuda") == 32 * MIB
    assert [round(worthwhile_bytes(ranks, "cuda") / MIB) for ranks in (64, 128)] == [63, 118]
    assert round(worthwhile_bytes(2, "cpu") / MIB, 1) == 1.3
    latency_s = 20e-6 + 127 * 2e-6
    transfer_s = worthwhile_bytes(128, "cuda") / 50e9
    assert latency_s / (latency_s + transfer_s) == pytest.approx(0.1)


def test_a_rank_gets_its_part_of_the_machine() -> None:
    whole, half = (device_memory_bytes(torch.device("cpu"), ranks) for ranks in (1, 2))
    assert half == whole // 2 > 2**27


def test_auto_trains_like_what_it_chose() -> None:
    """Two ranks agree on values for `auto` and train as with these values."""
    sizes = {"num_layers": 8, "hidden_size": 64}
    cases = [
        dict(sizes, zero_stage="auto", layers_per_stage="auto"),
        dict(sizes, zero_stage=1, layers_per_stage=2.0),
    ]
    (auto, plain), _ = run_distributed(2, train_each, cases)
    assert auto.memory_bytes == plain.memory_bytes and auto.losses == plain.losses
    assert same_weights(auto.weights, plain.weights)


def train_each(distributed: Distributed, cases: list[dict[str, Any]]) -> list[Trajectory]:
    return [train_tiny(distributed, options, 4) for options in cases]


def test_ranks_on_different_processors_take_one_library() -> None:
    """oneDNN only if it is the choice on every rank; config.json says which it is."""
    for own, expected in (
        (("onednn", "blas"), "blas"),
        (("blas", "onednn"), "blas"),
        (("onednn",) * 2, "onednn"),
    ):
        assert run_distributed(2, agreed_library, own) == [expected] * 2


def agreed_library(distributed: Distributed, own: tuple[str, ...]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_library, "library_for", lambda wanted: own[distributed.rank])
        return _choose_products(tiny_config(2), distributed).performance.cpu_matmul
