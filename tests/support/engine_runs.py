"""Short runs of the engine alone - stages, schedule, optimizer, no data set - over any group of
ranks, and groups whose collectives are slow, late or simulated."""

import copy
import functools
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.distributed.expert_group import NOT_SHARED
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.rank_group import alone
from megatron_lite.distributed.traffic import Handle, Traffic
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.optimizer import Optimizer, rule_of
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import layers_of, tiny_config

DELAY_S = 0.1  # a step of the tiny model takes a few milliseconds


@dataclass(frozen=True)
class Outcome:
    """Results of a short run, to be compared bit for bit."""

    losses: list[float]
    grad_norms: list[float]
    evaluated: list[float]
    averaged: list[float]  # the same with the averages of the weights, if there are any
    weights: str  # digest of all full weights
    state: str  # digest of this rank's shards: weights, moments, averages


class Engine:
    """A model and its optimizer, and steps on random tokens that depend on the iteration and the
    rank only.

    `ranks` does what the optimizer needs (`sum_in_rank_order`); `group`, by default the same, what
    the stages need.
    """

    def __init__(
        self, ranks: Any, options: dict[str, Any], group: Any = None, training: bool = True
    ) -> None:
        self.config: Config = tiny_config(ranks.world_size, **options)
        self.ranks, dtype = ranks, self.config.distributed.training_dtype
        self.model = MultiStage(
            layers_of(self.config, ranks),
            self.config.multi_stage,
            self.config.batch,
            dtype,
            group or ranks,
            training,
            state=rule_of(self.config.optimizer).declared,
            averaged=self.config.averaging.enabled,
        )
        self.model.initialize(self.config.distributed.seed)
        kernels = choose_kernels(self.config, ranks.device)
        self.optimizer = Optimizer(self.config, self.model.all_stages, ranks, kernels)
        self.optimizer.averaging.start()

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        assert self.config.batch.batch_size is not None
        return self.config.batch.batch_size * self.config.batch.sequence_length

    def batches(self, iteration: int, scale: Tensor | None = None) -> list[MicroBatch]:
        """One iteration's micro-batches of this rank."""
        batch = self.config.batch
        assert batch.micro_batch_size and batch.sequential_micro_batches
        generator = torch.Generator().manual_seed(1000 * iteration + self.ranks.data.rank)
        shape = (batch.sequential_micro_batches, 2, batch.micro_batch_size, batch.sequence_length)
        tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator).to(
            self.ranks.device
        )
        return [MicroBatch(inputs, labels, scale) for inputs, labels in tokens]

    def gradients(self, iteration: int) -> Tensor:
        """One iteration's gradients, into the shards; returns the loss."""
        scale = self.optimizer.loss_scale.scale / self.tokens
        return self.model.forward_backward(self.batches(iteration, scale))

    def step(self, iteration: int) -> tuple[Tensor, Tensor]:
        """As `train_step`: (loss, gradient norm), () each; the next step's gathers are under
        way."""
        loss = self.gradients(iteration)
        update = self.optimizer.step(iteration, 1e-2, loss, self.tokens, self.model.updated)
        self.model.gather_ahead()
        return update.loss, update.grad_norm

    def run(self, iterations: int, evaluate_every: int = 0) -> Outcome:
        """Train, with evaluations in between; nothing is read on the host before the end."""
        self.model.gather_ahead()
        steps = []
        evaluated = []
        averaged = []
        for iteration in range(1, iterations + 1):
            steps.append(self.step(iteration))
            if evaluate_every and iteration % evaluate_every == 0:
                evaluated.append(self.model.evaluate(self.batches(0)))
                if self.config.averaging.enabled:
                    with self.model.averaged():
                        averaged.append(self.model.evaluate(self.batches(0)))
        return Outcome(
            [float(loss) for loss, _ in steps],
            [float(norm) for _, norm in steps],
            [float(loss) for loss in evaluated],
            [float(loss) for loss in averaged],
            digest(weight for _, weight in self.model.full_weights()),
            digest(part.read(kind) for _, part in self.model.parts() for kind in part.kinds()),
        )


def digest(tensors: Iterator[Tensor]) -> str:
    """One short word for all bits of all tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# -- groups
# ----------------------------------------------------------------------------------------------------------


class Wrapped:
    """A group that passes everything on."""

    symmetric_memory = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.device = inner.device
        self.data = self.shard = self
        self.tensor = getattr(inner, "tensor", None) or alone(inner.device)
        self.replicate = alone(inner.device)
        self.expert = getattr(inner, "expert", NOT_SHARED)
        self.layers = self
        self.pipeline = getattr(inner, "pipeline", None) or PipelineGroup(
            0, 1, inner.device, None, Traffic()
        )

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        return self.inner.sum_in_rank_order(values)  # type: ignore[no-any-return]

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return int(self.inner.reduction_scratch_bytes(shard_numel, dtype))

    def wait_for(self, event: Any) -> None:
        self.inner.wait_for(event)


class LateGroup(Wrapped):
    """Nothing is sent before somebody waits, and then its input must be what it was when it was
    started."""

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        return Late(self.inner.all_gather, buffer, buffer.view(self.world_size, -1)[self.rank])

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        return Late(self.inner.reduce_scatter, buffer, buffer)

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return Late(functools.partial(self.inner.all_reduce, kind=kind), buffer, buffer)


class Late:
    """Handle of a collective that starts when it is waited for."""

    def __init__(self, start: Callable[[Tensor], Handle], buffer: Tensor, reads: Tensor) -> None:
        self._start = start
        self._buffer = buffer
        self._reads = reads
        self._before = reads.clone()
        self._handle: Handle | None = None

    def wait(self) -> None:
        if self._handle is None:
            assert torch.equal(self._reads, self._before), (
                "written while a collective still reads it"
            )
            self._handle = self._start(self._buffer)
        self._handle.wait()


class DelayedGroup(Wrapped):
    """A thread sends and receives while the main thread computes: each collective in the order of
    the calls, a little later, and those that are chosen DELAY_S later.

    The thread has a process group, tags and scratch of its own: messages are matched by the order
    in which ranks hand out their tags, and what the main thread sends meanwhile (a gradient norm)
    must not come in between.
    """

    def __init__(self, distributed: Any, group: Any = None) -> None:
        """group: for the thread; by default, one of all ranks is made."""
        super().__init__(distributed)
        self._side = copy.copy(distributed)
        self._side.group = group or dist.new_group(backend="gloo")
        self._side.traffic = Traffic()
        self._side._tag = 0
        self._side._scratch = None
        self._side._reduction = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._chosen: Collection[int] = ()
        self._started = 0
        self._last: _Job | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def choose(self, chosen: Collection[int]) -> None:
        """Delay these of the collectives from here on, counted from 0."""
        self._chosen, self._started = chosen, 0

    def drain(self) -> None:
        """Until everything that was started is done, whoever has forgotten to wait for it."""
        while self._last is not None and not self._last.is_done:
            time.sleep(0.001)

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        return self._queue(self._side.all_gather, buffer)

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        return self._queue(self._side.reduce_scatter, buffer)

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return self._queue(functools.partial(self._side.all_reduce, kind=kind), buffer)

    def _queue(self, start: Callable[[Tensor], Handle], buffer: Tensor) -> Handle:
        job = _Job(start, buffer, DELAY_S if self._started in self._chosen else 0.002)
        self._started += 1
        self._last = job
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while True:
            self._jobs.get().run()


class _Job:
    def __init__(self, start: Callable[[Tensor], Handle], buffer: Tensor, delay_s: float) -> None:
        self._start = start
        self._buffer = buffer
        self._delay_s = delay_s
        self._done, self._error = threading.Event(), ""

    def run(self) -> None:
        time.sleep(self._delay_s)
        try:
            self._start(self._buffer).wait()
        except RuntimeError as error:
            self._error = str(error)
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        assert self._done.wait(60), "a collective was not done within a minute"
        assert not self._error, self._error


class SimulatedRanks:
    """Rank 0 of two on one device, without processes: the other rank has the same shards.

    A gather copies the own slice to the other one; a reduction adds the other slice to the own one
    (so its numbers mean nothing, but depend on everything that real ones depend on). On a GPU both
    happen on a stream of their own, behind `delay_cycles` clock cycles of nothing; on CPU at once.
    """

    rank, world_size = 0, 2
    symmetric_memory = None

    def __init__(self, device: str = "cpu", delay_cycles: int = 0) -> None:
        self.device, self._delay_cycles = torch.device(device), delay_cycles
        self.layers = self.data = self.shard = self
        self.tensor = self.replicate = alone(self.device)
        self.expert = NOT_SHARED
        self.pipeline = PipelineGroup(0, 1, self.device, None, Traffic())
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        own, other = buffer.view(2, -1)
        return self._run(lambda: other.copy_(own))

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        own, other = buffer.view(2, -1)
        return self._run(lambda: own.add_(other))

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return self._run(lambda: buffer.mul_(2))

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        return 2 * values

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return 0

    def _run(self, operation: Callable[[], Any]) -> Handle:
        if self._stream is None:
            operation()
            return _OnStream(None)
        # as NCCL does: what was queued before comes first
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._delay_cycles:
                torch.cuda._sleep(self._delay_cycles)
            operation()
            event = torch.cuda.Event()
            event.record()
        return _OnStream(event)


class _OneRank(SimulatedRanks):
    """A group of one on any device, without a process group."""

    world_size = 1

    def _run(self, operation: Callable[[], Any]) -> Handle:
        return _OnStream(None)


def simulated_tensor_ranks(device: str = "cpu", delay_cycles: int = 0) -> SimulatedRanks:
    """Rank 0 of two that share each layer, and hold the same parts of everything."""
    ranks = SimulatedRanks(device)
    ranks.data = ranks.shard = _OneRank(device)
    ranks.tensor = SimulatedRanks(device, delay_cycles)
    return ranks


class _OnStream:
    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
