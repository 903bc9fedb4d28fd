"""Peaks where Triton kernels run, against what their callers allocate: the kernels themselves are
not launched."""

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
from tests.planner.test_plan import LEVELS, PEAK_CASES, SIZES
from tests.support.harness import tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import a_model, measured_peak, micro_batches, some
from tests.support.plans import planned_memory


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


@pytest.mark.parametrize(("level", "options"), some(PEAK_CASES, LEVELS, each=31), ids=str)
@pytest.mark.usefixtures("no_launches")
def test_peaks_with_triton_kernels(options: dict[str, Any], level: str) -> None:
    """Nothing but the values differs from a step with kernels: the plan is within half a percent of
    the peak."""
    config = tiny_config(1, **{**SIZES, "mlp_recompute_level": level, **options})
    with products_in_fp32(False):
        planned = planned_memory(config).peak
        model = a_model(config, model_layers(config, triton_kernels(config, torch.device("cpu"))))
        assert planned == pytest.approx(measured_peak(model, micro_batches(config)), rel=0.005)
