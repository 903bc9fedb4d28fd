"""Peaks where Triton kernels run, against what their callers allocate: the kernels themselves are not launched."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.kernels.choice import Kernels, choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.planner import plan
from megatron_lite.planner.plan import make_plan
from tests.planner.test_plan import LEVELS, PEAK_CASES
from tests.support.harness import tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import AllocatorMeter, a_model, micro_batches


class NoKernel:
    """A kernel that returns without a result; what it should have written stays as it is."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None


def triton_kernels(config: Config, device: torch.device, **options: Any) -> Kernels:
    """The choice of a GPU for everything but attention and products."""
    return dataclasses.replace(choose_kernels(config, device), triton=True, cross_entropy="triton")


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron_lite.kernels."):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, NoKernel())
                replaced += 1
    assert replaced >= 9
    monkeypatch.setattr(plan, "choose_kernels", triton_kernels)


# One level of a few cases; all others are slow.
CASES = [
    pytest.param(options, level, marks=[] if number % 12 == 3 and level == "activation" else pytest.mark.slow)
    for number, options in enumerate(PEAK_CASES)
    for level in LEVELS
]


@pytest.mark.parametrize(("options", "level"), CASES, ids=str)
@pytest.mark.usefixtures("no_launches")
def test_peaks_with_triton_kernels(options: dict[str, Any], level: str) -> None:
    """Nothing but the values differs from a step with kernels: the plan is within half a percent of the peak."""
    sizes = dict(num_layers=4, batch_size=2, hidden_size=128, sequence_length=256, vocab_size=512)
    config = tiny_config(1, **{**sizes, "mlp_recompute_level": level, **options})
    with products_in_fp32(False):
        planned = make_plan(config, 1, "cpu").activations[level].peak
        model = a_model(config, model_layers(config, triton_kernels(config, torch.device("cpu"))))
        batches = micro_batches(config)
        for _ in range(2):
            for batch in batches:
                batch.shared.clear()
            with AllocatorMeter() as meter:
                model.forward_backward(batches)
    assert planned == pytest.approx(meter.peak, rel=0.005)
