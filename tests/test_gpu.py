"""What only a CUDA device can show: run with `pytest -m gpu tests/test_gpu.py`; skipped without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import TINY

from megatron_lite.config import DistributedConfig, unflatten
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.attention import attention
from megatron_lite.validation import resolve

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def one_gpu() -> Any:
    distributed = Distributed(DistributedConfig(device="cuda"), 0, 1, 0)
    yield distributed
    distributed.close()


def losses(distributed: Distributed, iterations: int = 20, **options: Any) -> list[float]:
    """The first losses of the tiny model on the device of `distributed`, by the program's own step."""
    from megatron_lite.build import build
    from megatron_lite.experiment import Experiment
    from megatron_lite.stop_signal import StopSignal
    from megatron_lite.train import train_step

    config = resolve(unflatten({**TINY, "device": distributed.device.type, "train_iters": iterations, **options}), 1)
    stop = StopSignal()
    run = build(config, distributed, Experiment(config, distributed), stop, ())
    stop.restore()
    batches = enumerate(run.data.batches("training", 0, iterations), start=1)
    return [float(train_step(run, batch, i).loss) / run.tokens_per_iteration for i, batch in batches]


@pytest.mark.parametrize("training_dtype", ["fp32", "bf16", "fp16"])
def test_zero_stages_agree_bit_for_bit_on_a_gpu(one_gpu: Distributed, training_dtype: str) -> None:
    torch.use_deterministic_algorithms(True)
    runs = [losses(one_gpu, zero_stage=stage, training_dtype=training_dtype, num_layers=3) for stage in (1, 2, 3)]
    torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) == 20


def test_bf16_tracks_fp32(one_gpu: Distributed) -> None:
    np.testing.assert_allclose(losses(one_gpu, training_dtype="bf16"), losses(one_gpu), rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 37, 700])
def test_attention_equals_the_formula(dtype: torch.dtype, window: int | None) -> None:
    """Grouped queries, windows over block borders, forward and backward, against float64 on the CPU."""
    from test_kernels import close

    torch.manual_seed(0)
    b, n, g, s, d = 1, 4, 2, 1500, 64
    inputs = [torch.randn(b, heads, s, d, dtype=torch.float64).to(dtype) for heads in (n, g, g)]
    ours = [tensor.cuda().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    key, value = (tensor.repeat_interleave(n // g, 1) for tensor in exact[1:])
    distance = torch.arange(s)[:, None] - torch.arange(s)
    allowed = (distance >= 0) & (distance < (window or s))
    formula = (exact[0] @ key.transpose(-1, -2) / d**0.5).masked_fill(~allowed, float("-inf")).softmax(-1) @ value
    output = attention(*ours, window, 0.0, None)
    grad = torch.randn(formula.shape, dtype=torch.float64)
    formula.backward(grad)
    output.backward(grad.to(dtype).cuda())
    close(output.cpu(), formula, dtype)
    for mine, reference in zip(ours, exact, strict=True):
        close(mine.grad.cpu(), reference.grad, dtype)


def test_windowed_attention_keeps_no_probabilities() -> None:
    """Mistral's attention, window 4096 over 8192 tokens: far below the 6.4 GB of all probabilities in fp32."""
    query = torch.randn(1, 32, 8192, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    key, value = (torch.randn(1, 8, 8192, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "kv")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(query, key, value, 4096, 0.0, None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**31


# -- two simulated ranks on one GPU; tests/zero/test_slow_collectives.py runs the same code on CPU -------------------

# Of nothing, on the stream of the collectives: about 5 ms, far more than a stage of the tiny model takes.
DELAY_CYCLES = 10_000_000


def gpu_layouts() -> list[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parent / "zero"))
    from test_slow_collectives import SOME

    return [options | {"device": "cuda"} for options in SOME]


def simulated(options: dict[str, Any], delay_cycles: int) -> Any:
    from engine_runs import Engine, SimulatedRanks

    torch.use_deterministic_algorithms(True)
    try:
        return Engine(SimulatedRanks("cuda", delay_cycles), options).run(3, evaluate_every=2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_slow_collectives_change_no_bit_on_a_stream() -> None:
    """Every collective on a stream of its own, late behind the computation: the numbers are the same."""
    for options in gpu_layouts():
        assert simulated(options, DELAY_CYCLES) == simulated(options, 0), options


@pytest.mark.parametrize("site", ["accumulate", "require_weights", "forward_backward"])
def test_a_missing_wait_is_noticed_on_a_stream(site: str) -> None:
    """The test above can fail: without any one of the waits the numbers are others."""
    options = next(options for options in gpu_layouts() if options.get("zero_stage") == 3)
    right = simulated(options, DELAY_CYCLES)
    from test_slow_collectives import removed_wait

    with removed_wait(site):
        assert simulated(options, DELAY_CYCLES) != right
