"""Masters gathered window by window equal the gathered weights of a run in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.huggingface import export
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import layers_of, run_distributed, tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3, two blocks a stage": {"zero_stage": 3, "layers_per_stage": 2.0},
    "frozen": {"zero_stage": 2, "freeze": ("embedding", "*.bias")},
    "split": {"zero_stage": 1, "training_dtype": "bf16", "split_master_weights": True},
}


def gathered(distributed: Distributed, options: dict[str, Any], window: int) -> dict[str, np.ndarray]:
    """Return all masters, gathered in windows of N elements, after comparing them with `full_weights`."""
    export.WINDOW_NUMEL = window  # of this process alone
    config = tiny_config(distributed.world_size, **options)
    split = config.multi_stage.split_master_weights
    model = MultiStage(
        layers_of(config), config.multi_stage, config.batch, config.distributed.training_dtype, distributed
    )
    model.initialize(3)
    found = {name: value.numpy().copy() for name, value in export.master_weights(model, distributed)}
    for name, weight in model.full_weights():
        if distributed.rank == 0:
            rounded = found[name] if not split else found[name].astype(np.float32)
            assert np.allclose(rounded, weight.float().numpy(), rtol=2**-8 if split else 0, atol=0), name
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_are_whole_whatever_the_windows(ranks: int) -> None:
    """Windows that divide nothing, every layout: bit for bit the same fp32 numbers on rank 0, nothing on the others."""
    expected = run_distributed(1, gathered, LAYOUTS["ZeRO 1"], 2**24)[0]
    for options in LAYOUTS.values():
        first, *others = run_distributed(ranks, gathered, options, 1000)
        assert first.keys() == expected.keys()
        assert all(np.array_equal(first[name], value) for name, value in expected.items()), options
        assert all(value.size == 0 for other in others for value in other.values())
