"""Steps of small models: the host overhead of a step, and the seconds per byte of torch's
operations.

A tiny model is trained with two numbers of blocks. Its operations take almost no time, so the
difference is the host overhead of the blocks (Python, autograd and library calls), and the rest
that of the step. `predictions` times larger models with the same steps. A plan counts the bytes of
every operation of a layer by its name; in the forward and backward pass of two small models the
same operations are timed on the device. On a GPU most of them are kernels of our own, which move
bytes as fast as a copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed.grid import Groups, divide
from megatron_lite.distributed.traffic import Traffic
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.planner.meter import is_attention, moved_bytes, product_of, tensors_in
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.machine.operations import Timer, clock_of
from scripts.benchmarks.training.engine import built
from scripts.benchmarks.training.settings import GPT2, LLAMA

WARM_UP, STEPS = 3, 8
FEW_BLOCKS, MORE_BLOCKS = 2, 10
TINY: dict[str, Any] = dict(
    hidden_size=32,
    num_attention_heads=2,
    sequence_length=16,
    vocab_size=64,
    batch_size=1,
    train_iters=100,
)
SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(
        num_layers=2, hidden_size=512, num_attention_heads=8, sequence_length=512, vocab_size=4096
    ),
    "cuda": dict(
        num_layers=2,
        hidden_size=2048,
        num_attention_heads=16,
        sequence_length=4096,
        vocab_size=32768,
    ),
}
SMALLEST = 2**16  # bytes of a timed operation; calling a smaller one takes longer than its pass
PASS_WARM_UP, PASSES = 1, 8


def host_times(device: torch.device, dtype: str) -> dict[str, float]:
    """Return the host's seconds per block (forward and backward), and for the rest of a step."""
    few, more = (
        step_seconds({**TINY, "num_layers": blocks, "training_dtype": dtype}, device)[1]
        for blocks in (FEW_BLOCKS, MORE_BLOCKS)
    )
    block_s = max(more - few, 0.0) / (MORE_BLOCKS - FEW_BLOCKS)
    return {"block_s": block_s, "step_s": max(few - FEW_BLOCKS * block_s, 0.0)}


def single_rank_model(
    options: dict[str, Any], device: torch.device
) -> tuple[Config, MultiStage, Optimizer]:
    """Return a configuration for one rank, and its engine with initial weights."""
    config = resolve(unflatten({"dataset_source": "random", "device": device.type, **options}), 1)
    alone = Groups(0, 1, device, None, Traffic())
    divide(alone, dist.new_group, config.distributed)
    model, optimizer, _ = built(config, alone)
    return config, model, optimizer


def micro_batches(
    config: Config, device: torch.device, scale: Tensor, seed: int = 0
) -> list[MicroBatch]:
    """Return an iteration's micro-batches of random tokens."""
    batch = config.batch
    assert batch.micro_batch_size and batch.sequential_micro_batches
    shape = (batch.sequential_micro_batches, 2, batch.micro_batch_size, batch.sequence_length)
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    return [MicroBatch(inputs, labels, scale, seed) for inputs, labels in tokens]


def step_seconds(options: dict[str, Any], device: torch.device) -> tuple[Config, float]:
    """Return a model's configuration, and its shortest step time on random tokens without data
    loading and logs."""
    config, model, optimizer = single_rank_model(options, device)
    assert config.batch.batch_size
    count = config.batch.batch_size * config.batch.sequence_length
    times = []
    clock = clock_of(device)
    for step in range(WARM_UP + STEPS):
        batches = micro_batches(config, device, optimizer.loss_scale.scale / count, step)
        start_s = clock()
        loss = model.forward_backward(batches)
        optimizer.step(step + 1, 1e-4, loss, count, model.updated)
        model.gather_ahead()
        float(loss)  # waits for the device
        times.append(clock() - start_s)
    return config, min(times[WARM_UP:])


class _Timed(TorchDispatchMode):
    """Adds up the time and the bytes of every operation but products and attention, by name."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._timer = Timer(device)
        self.seconds, self.bytes = defaultdict[str, float](float), Counter[str]()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operands = [*tensors_in([*args, *(kwargs or {}).values()])]
        self._timer.wait()
        start_s = self._timer.clock()
        result = function(*args, **(kwargs or {}))
        self._timer.wait()
        seconds = self._timer.clock() - start_s
        moved = moved_bytes(function, operands, [*tensors_in((result,))])
        if moved >= SMALLEST and product_of(function, args) is None and not is_attention():
            self.seconds[function._opname] += seconds
            self.bytes[function._opname] += moved
        return result


def seconds_per_byte(device: torch.device, dtype: str) -> dict[str, float]:
    """Return the shortest seconds per byte of each operation."""
    shortest: dict[str, float] = {}
    for family in (GPT2 | {"hidden_dropout": 0.1}, LLAMA):
        config, model, _ = single_rank_model(
            {**family, **SIZES[device.type], "training_dtype": dtype}, device
        )
        batches = micro_batches(config, device, torch.ones((), device=device))
        for turn in range(PASS_WARM_UP + PASSES):
            with _Timed(device) as timed:
                model.forward_backward(batches)
            if turn >= PASS_WARM_UP:
                for name, seconds in timed.seconds.items():
                    shortest[name] = min(shortest.get(name, seconds), seconds / timed.bytes[name])
    return shortest
