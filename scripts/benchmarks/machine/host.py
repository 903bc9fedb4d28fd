"""The host overhead of a step: Python, autograd and library calls.

A tiny model is trained with two numbers of blocks. Its operations take almost no time, so the difference is the host
overhead of the blocks, and the rest that of the step. `predictions` times larger models with the same steps.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Traffic
from megatron_lite.model.layer import MicroBatch
from megatron_lite.validation import resolve
from scripts.benchmarks.machine.operations import clock_of
from scripts.benchmarks.training.engine import built

WARM_UP, STEPS = 3, 8

FEW_BLOCKS, MORE_BLOCKS = 2, 10
TINY: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=2, sequence_length=16, vocab_size=64, batch_size=1, train_iters=100
)


def host_times(device: torch.device, dtype: str) -> dict[str, float]:
    """Return the host's seconds per block (forward and backward), and for the rest of a step."""
    few, more = (
        step_seconds({**TINY, "num_layers": blocks, "training_dtype": dtype}, device)[1]
        for blocks in (FEW_BLOCKS, MORE_BLOCKS)
    )
    block_s = max(more - few, 0.0) / (MORE_BLOCKS - FEW_BLOCKS)
    return {"block_s": block_s, "step_s": max(few - FEW_BLOCKS * block_s, 0.0)}


class OneRank(Group):
    """A single-rank run without a process group: every rank measures its own steps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1, device, None, Traffic())
        self.data = self.tensor = self


def step_seconds(options: dict[str, Any], device: torch.device, steps: int = STEPS) -> tuple[Config, float]:
    """Return a model's configuration, and its shortest step time on random tokens without data loading and logs."""
    config = resolve(unflatten({"dataset_source": "random", "device": device.type, **options}), 1)
    model, optimizer, _ = built(config, OneRank(device))
    batch = config.batch
    assert batch.micro_batch_size and batch.sequential_micro_batches and batch.batch_size
    shape = (batch.sequential_micro_batches, 2, batch.micro_batch_size, batch.sequence_length)
    tokens, count = (
        torch.randint(config.model.vocab_size, shape, device=device),
        batch.batch_size * batch.sequence_length,
    )
    times, clock = [], clock_of(device)
    for step in range(WARM_UP + steps):
        start_s = clock()
        scale = optimizer.loss_scale.scale / count
        loss = model.forward_backward([MicroBatch(inputs, labels, scale, step) for inputs, labels in tokens])
        optimizer.step(step + 1, 1e-4, loss, count, model.updated)
        model.gather_ahead()
        float(loss)  # waits for the device
        times.append(clock() - start_s)
    return config, min(times[WARM_UP:])
