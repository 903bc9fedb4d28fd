"""Times of the program's own operations: products by shape, attention by length, the update, and
collectives.

Operands come from a pool larger than the caches, as in a step, where other layers evict them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.products import add_product, affine, product
from megatron_lite.parameter import backward
from megatron_lite.planner.speeds import AXES, PRODUCT_KINDS, Attention
from megatron_lite.planner.work_time import UPDATE_BYTES
from scripts.benchmarks.gpu.operation import Shape
from scripts.benchmarks.gpu.ops_table import make_adamw, make_gradient_norm

POOL_BYTES = 96 * 2**20
# A call is repeated until this much time has been spent, so short calls get many turns.
FEWEST_TURNS = 7
MOST_TURNS = 60
LONG_ENOUGH_S = 0.05
SIZES = {
    "cpu": {"tokens": (64, 512, 4096), "inputs": (64, 256, 1024), "outputs": (64, 256, 1024, 4096)},
    "cuda": {
        "tokens": (256, 2048, 8192),
        "inputs": (256, 1024, 4096),
        "outputs": (256, 1024, 4096, 32768),
    },
}
MOST_FLOPS = {"cpu": 2.2e9, "cuda": 2e12}  # per measured product; larger ones are as fast
LENGTHS = (64, 256, 1024, 4096)
HEADS = 8
CHANNELS = 64
ATTENTION_TOKENS = {"cpu": 2048, "cuda": 32768}
UPDATED = {"cpu": 2**20, "cuda": 2**26}
# of a full buffer, fp32
SMALL_NUMEL = {"cpu": 2**10, "cuda": 2**14}
LARGE_NUMEL = {"cpu": 2**21, "cuda": 2**26}
COLLECTIVE_TURNS = 7
SIDE = {"cpu": 512, "cuda": 8192}  # of the square products that overlap with a collective


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock: process time if a single thread computes, which other programs hardly affect;
    else wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


class Timer:
    """Measures the shortest times of calls on a device, because other programs can only add
    time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.clock = device, clock_of(device)

    def seconds(
        self, call: Callable[[Any], Any], before: Callable[[], Any] = lambda: None
    ) -> float:
        """Return the shortest time of `call` on the operands that `before` prepares, untimed, for
        each turn."""
        times: list[float] = []
        for turn in range(MOST_TURNS + 1):
            operands = before()
            self.wait()
            start_s = self.clock()
            result = call(operands)
            self.wait()
            if turn:  # the first may compile or allocate
                times.append(self.clock() - start_s)
            del operands, result
            if len(times) >= FEWEST_TURNS and sum(times) >= LONG_ENOUGH_S:
                break
        return min(times)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Operations:
    """All measurements in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, triton: bool) -> None:
        self.device = device
        self.dtype = dtype
        self.triton = triton
        self.timer, self.kind = Timer(device), device.type
        self._pool = torch.empty(POOL_BYTES // dtype.itemsize, device=device, dtype=dtype).uniform_(
            -0.5, 0.5
        )
        self._next = 0

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the least recently used part of the pool, or a new tensor in another dtype."""
        numel = torch.Size(shape).numel()
        if (dtype or self.dtype) != self.dtype or numel > self._pool.numel():
            return torch.zeros(shape, device=self.device, dtype=dtype or self.dtype)
        if self._next + numel > self._pool.numel():
            self._next = 0
        part = self._pool[self._next : self._next + numel].view(shape)
        self._next += -(-numel // 1024) * 1024
        return part

    # -- products
    # --------------------------------------------------------------------------------------------------

    def products(self) -> dict[str, Any]:
        """Return the FLOP/s of the three products of linear layers on a grid of sizes."""
        axes = SIZES[self.kind]
        rates = {
            kind: [
                [
                    [
                        self._product_rate(kind, tokens, inputs, outputs)
                        for outputs in axes["outputs"]
                    ]
                    for inputs in axes["inputs"]
                ]
                for tokens in axes["tokens"]
            ]
            for kind in PRODUCT_KINDS
        }
        return {**{name: list(axes[name]) for name in AXES}, "flops_per_s": rates}

    def _product_rate(self, kind: str, tokens: int, inputs: int, outputs: int) -> float:
        most = int(MOST_FLOPS[self.kind] / (2 * inputs * outputs))
        tokens = max(64, min(tokens, most))
        total = torch.zeros(outputs, inputs, device=self.device)
        runs: dict[str, Callable[[Any], Any]] = {
            "forward": lambda t: affine(t[0], t[1]),
            "input gradient": lambda t: product(t[2], t[1].t()),
            "weight gradient": lambda t: add_product(total, t[2].t(), t[0], True),
        }
        shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
        seconds = self.timer.seconds(runs[kind], lambda: [self.tensor(*shape) for shape in shapes])
        return 2.0 * tokens * inputs * outputs / seconds

    # -- attention
    # -------------------------------------------------------------------------------------------------

    def attention(self) -> dict[str, list[list[float]]]:
        """Return (length, FLOP/s) of causal attention, forward and backward, fused and with the
        math backend."""
        curves: dict[str, list[list[float]]] = {}
        for (name, backend), length in itertools.product(
            (("fused", "auto"), ("math", "math")), LENGTHS
        ):
            for direction, seconds in zip(
                ("forward", "backward"), self._attention_seconds(backend, length), strict=True
            ):
                work = Attention(
                    f"{name} {direction}", self._samples(length) * HEADS, length, CHANNELS, length
                )
                curves.setdefault(work.kind, []).append([length, work.flops / seconds])
        return curves

    def _samples(self, length: int) -> int:
        return max(1, ATTENTION_TOKENS[self.kind] // length)

    def _attention_seconds(self, backend: str, length: int) -> tuple[float, float]:
        shape = (self._samples(length), length, HEADS, CHANNELS)
        query, key, value = (
            self.tensor(*shape).detach().transpose(1, 2).requires_grad_() for _ in range(3)
        )
        grad = self.tensor(*shape).transpose(1, 2)

        def forward(_: Any = None) -> Tensor:
            return attention(query, key, value, None, 0.0, None, backend=backend)

        return self.timer.seconds(forward), self.timer.seconds(
            lambda output: backward(output, grad), forward
        )

    # -- the update
    # ------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, float]:
        """Return the seconds per byte of the two parts of an update."""
        shape = Shape(shard=UPDATED[self.kind], dtype=self.dtype, device=self.kind)
        name = "triton" if self.triton else "torch"
        calls = (
            make(shape)[name] for make in (partial(make_adamw, split=False), make_gradient_norm)
        )
        update_s, norm_s = (self.timer.seconds(lambda _: call()) for call in calls)  # noqa: B023
        # per element
        moved = UPDATE_BYTES["adamw"] + (0 if self.dtype == torch.float32 else self.dtype.itemsize)
        return {
            "update adamw": update_s / shape.shard / moved,
            "gradient norm": norm_s / shape.shard / 4,
        }


# -- collectives
# -------------------------------------------------------------------------------------------------------


def measure_collectives(distributed: Distributed) -> dict[str, Any]:
    """Return latency and bytes/s of gathers and reductions, and the fraction that overlaps; nothing
    for one rank."""
    if distributed.world_size == 1:
        return {"collectives": {}, "overlap": 0.0}
    found, hidden = {}, []
    for kind, start in (("gather", distributed.all_gather), ("reduce", distributed.reduce_scatter)):
        seconds = []
        for numel in (SMALL_NUMEL, LARGE_NUMEL):
            size = numel[distributed.device.type] // distributed.world_size * distributed.world_size
            buffer = torch.zeros(size, device=distributed.device)
            seconds.append(_seconds(distributed, lambda: start(buffer).wait()))  # noqa: B023
        sent = buffer.nbytes * (distributed.world_size - 1) / distributed.world_size
        found[kind] = {
            "latency_s": seconds[0],
            "bytes_per_s": sent / max(seconds[1] - seconds[0], 1e-9),
        }
        hidden.append(_hidden_share(distributed, lambda: start(buffer), seconds[1]))  # noqa: B023
    return {"collectives": found, "overlap": min(hidden)}


def _hidden_share(distributed: Distributed, start: Callable[[], Any], alone_s: float) -> float:
    """Return the fraction of a collective's time that is hidden by overlapped products."""
    side = SIDE[distributed.device.type]
    a, b = (torch.ones(side, side, device=distributed.device) for _ in range(2))
    out = torch.empty_like(a)
    once_s = _seconds(distributed, lambda: torch.mm(a, b, out=out))
    times = max(1, round(1.5 * alone_s / once_s))

    def multiply() -> Tensor:
        for _ in range(times):
            torch.mm(a, b, out=out)
        return out

    def both() -> None:
        work = start()
        multiply()
        work.wait()

    products_s, both_s = _seconds(distributed, multiply), _seconds(distributed, both)
    return min(max((products_s + alone_s - both_s) / alone_s, 0.0), 1.0)


def _seconds(distributed: Distributed, call: Callable[[], Any]) -> float:
    """Return the median time of a call that all ranks start together."""
    times = []
    for turn in range(COLLECTIVE_TURNS + 1):
        distributed.barrier()
        distributed.wait_for_device()
        start_s = time.perf_counter()
        call()
        distributed.wait_for_device()
        if turn:
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)
