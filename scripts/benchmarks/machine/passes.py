"""Seconds per byte of torch's operations, in the forward and backward pass of two small models.

A plan counts the bytes of every operation of a layer by its name; here the same operations are timed on the device. On
a GPU most of them are kernels of our own, which move bytes as fast as a copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.planner.meter import is_attention, moved_bytes, product_of, tensors_in
from scripts.benchmarks.machine.host import micro_batches, single_rank_model
from scripts.benchmarks.machine.operations import Timer
from scripts.benchmarks.training.settings import GPT2, LLAMA

SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(num_layers=2, hidden_size=512, num_attention_heads=8, sequence_length=512, vocab_size=4096),
    "cuda": dict(num_layers=2, hidden_size=2048, num_attention_heads=16, sequence_length=4096, vocab_size=32768),
}
SMALLEST = 2**16  # bytes of a timed operation; calling a smaller one takes longer than its pass
WARM_UP, TURNS = 1, 8


class _Timed(TorchDispatchMode):
    """Adds up the time and the bytes of every operation but products and attention, by name."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._timer = Timer(device)
        self.seconds, self.bytes = defaultdict[str, float](float), Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = [*tensors_in([*args, *(kwargs or {}).values()])]
        self._timer.wait()
        start_s = self._timer.clock()
        result = function(*args, **(kwargs or {}))
        self._timer.wait()
        seconds, moved = self._timer.clock() - start_s, moved_bytes(function, operands, [*tensors_in((result,))])
        if moved >= SMALLEST and product_of(function, args) is None and not is_attention():
            self.seconds[function._opname] += seconds
            self.bytes[function._opname] += moved
        return result


def seconds_per_byte(device: torch.device, dtype: str) -> dict[str, float]:
    """Return the shortest seconds per byte of each operation."""
    shortest: dict[str, float] = {}
    for family in (GPT2 | {"hidden_dropout": 0.1}, LLAMA):
        config, model, _ = single_rank_model({**family, **SIZES[device.type], "training_dtype": dtype}, device)
        batches = micro_batches(config, device, torch.ones((), device=device))
        for turn in range(WARM_UP + TURNS):
            with _Timed(device) as timed:
                model.forward_backward(batches)
            if turn >= WARM_UP:
                for name, seconds in timed.seconds.items():
                    shortest[name] = min(shortest.get(name, seconds), seconds / timed.bytes[name])
    return shortest
