"""Experts shared out among ranks train as on one rank, in every layout, and a rank that hangs in an
exchange ends the others."""

import functools
import time
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed, peer_errors
from megatron_lite.errors import PeerError
from tests.support.harness import Trajectory, run_distributed, same_weights, train_several
from tests.train import test_experts

EXPERTS: dict[str, Any] = test_experts.EXPERTS | {
    "num_experts": 4,
    "lr_warmup": 0,
    "batch_size": 8,
    "clip_grad": 0.5,
    "adam_eps": 1e-4,  # Adam divides small gradients, and their rounding, by themselves
}
STEPS = 5
# ranks, sizes of the grid, and options of several runs
Layout = tuple[int, dict[str, int], list[dict[str, Any]]]
ZERO: list[dict[str, Any]] = [{"zero_stage": stage} for stage in (1, 2, 3)]
LAYOUTS: dict[str, Layout] = {
    "E=2": (2, {}, ZERO),
    "E=2 N=4": (4, {}, ZERO),
    "E=4": (4, {"expert_parallel": 4}, ZERO),
    "E=2 T=2": (4, {"tensor_parallel": 2}, [*ZERO, {"sequence_tensor_parallel": True}]),
    "E=2 P=2": (4, {"pipeline_parallel": 2}, ZERO),
    "E=2 S=2": (4, {"data_parallel_shard": 2}, ZERO),
    "E=2 P=2 T=2": (8, {"pipeline_parallel": 2, "tensor_parallel": 2}, ZERO[2:]),
}


@functools.cache
def one_rank() -> Trajectory:
    """Train on one rank."""
    return run_distributed(1, train_several, [EXPERTS], STEPS)[0][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "E=2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_every_layout_trains_as_one_rank(name: str) -> None:
    """Losses, norms and weights to rounding; initial weights, and biases by counts, to the bit. The
    ZeRO stage changes no bit."""
    ranks, grid, several = LAYOUTS[name]
    grid = {"expert_parallel": 2} | grid
    runs = [EXPERTS | grid | options for options in several]
    expected, found = one_rank(), run_distributed(ranks, train_several, runs, STEPS, **grid)[0]
    for run in found:
        np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-6)
        np.testing.assert_allclose(run.grad_norms, expected.grad_norms, rtol=1e-6)
        assert same_weights(run.initial, expected.initial)
        for key, weight in expected.weights.items():
            atol = 0 if key.endswith(".balance") else 1e-6
            np.testing.assert_allclose(run.weights[key], weight, rtol=0, atol=atol, err_msg=key)
    for run in found[1 : len(ZERO)]:
        assert run.losses == found[0].losses and same_weights(run.weights, found[0].weights)
        assert run.grad_norms == found[0].grad_norms


def hang(distributed: Distributed) -> str:
    """Let the last rank stay away from an exchange; return the error of another one."""
    group = distributed.expert
    counts = torch.ones(group.world_size, dtype=torch.int64)
    ones = [1] * group.world_size
    group.all_to_all(counts, ones, ones)[1].wait()
    if group.rank == group.world_size - 1:
        time.sleep(4)
        return ""
    with pytest.raises(PeerError) as error, peer_errors():
        group.all_to_all(counts, ones, ones)[1].wait()
    return str(error.value)


def test_a_rank_that_hangs_ends_the_others() -> None:
    """An exchange ends after --distributed_timeout."""
    start_s = time.monotonic()
    errors = run_distributed(2, hang, expert_parallel=2, distributed_timeout=1.0)
    assert "another rank" in errors[0] and time.monotonic() - start_s < 30
