"""Start gloo ranks from pytest: every rank runs a plain function; no port, a time-out, nothing left
behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.config import Config, DistributedConfig, unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import join
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import Layer
from megatron_lite.parameter import Parameter
from megatron_lite.run.stop_signal import SIGNALS, StopSignal
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.threads import THREADS

if TYPE_CHECKING:
    from megatron_lite.outputs.run import Run

# A server process that has imported torch, and what test modules import, forks each rank in
# milliseconds. The first backward pass of a process imports symbolic_shapes, which takes a second.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the program does before it imports torch
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "tests.support.short_spins",
        "megatron_lite.pretrain",
        "megatron_lite.planner.report",
        "pytest",
        "torch.fx.experimental.symbolic_shapes",
        "tests.support.engine_runs",
        "tests.support.launch",
        "megatron_lite.cli.parse",
        "hypothesis",
        "safetensors.torch",
        "tests.support.preloaded",
    ]
)

TIMEOUT_S = 120.0


def layers_of(config: Config, groups: Any = None) -> list[Layer]:
    """The layers of a configuration on the meta device, computing as on the device that it
    names."""
    return model_layers(
        config, choose_kernels(config, torch.device(config.distributed.device)), groups
    )


def run_distributed(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deterministic: bool = False,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    pipeline_first: bool = False,
    data_parallel_shard: int = 0,
    expert_parallel: int = 1,
    distributed_timeout: float = 60.0,
) -> list[Any]:
    """Call function(distributed, *args) on `world_size` ranks; returns their results in rank
    order."""
    config = DistributedConfig(
        device="cpu",
        distributed_timeout=distributed_timeout,
        startup_timeout=60.0,
        deterministic=deterministic,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        pipeline_first=pipeline_first,
        data_parallel_shard=data_parallel_shard,
        expert_parallel=expert_parallel,
    )
    with tempfile.TemporaryDirectory() as directory:
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            FORKSERVER.Process(
                target=_run_rank,
                args=(
                    rank,
                    world_size,
                    f"{directory}/store",
                    config,
                    pipes[rank][1],
                    function,
                    args,
                ),
            )
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _results([_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)])
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _run_rank(
    rank: int,
    world_size: int,
    store: str,
    config: DistributedConfig,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(THREADS)
    try:
        distributed = join(
            config, rank, world_size, rank, meet=lambda: dist.FileStore(store, world_size)
        )
        result = function(distributed, *args)
        distributed.barrier()
        distributed.close()
        sender.send((True, result))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _receive(rank: int, receiver: Connection) -> tuple[bool, Any]:
    """Whether a rank succeeded, and its result or why it failed."""
    if not receiver.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} sent nothing for {TIMEOUT_S} s")
    try:
        good, result = receiver.recv()
    except EOFError:
        return False, f"rank {rank} died without a word"
    return good, result if good else f"rank {rank} failed:\n{result}"


def _results(received: Sequence[tuple[bool, Any]]) -> list[Any]:
    """The results of all ranks. Of several failures, raise the one of a rank that did not just lose
    another."""
    failures = [text for good, text in received if not good]
    if failures:
        raise RuntimeError(
            next((text for text in failures if "PeerError" not in text), failures[0])
        )
    return [result for _, result in received]


TINY = (
    dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, sequence_length=16)
    | dict(
        dataset_source="random", train_iters=20, lr=1e-3, lr_warmup=10, device="cpu", batch_size=4
    )
    | dict(num_workers=0, log_interval=1, weight_decay=0.1)
)


ROTARY_GATED: dict[str, Any] = dict(
    use_rotary_embeddings=True, gated=True, add_linear_biases=False, normalization_type="rms_norm"
)
LLAMA: dict[str, Any] = dict(
    **ROTARY_GATED, head_groups=2, tie_word_embeddings=False, ffn_hidden_size=88
)


def tiny_config(world_size: int = 1, **options: Any) -> Config:
    """A resolved configuration of a model small enough for a test; `options` override."""
    return resolve(unflatten({**TINY, **options}), world_size)


@dataclass(frozen=True)
class Trajectory:
    """Results of a short run."""

    losses: list[float]  # mean over the global batch, per iteration
    grad_norms: list[float]
    initial: dict[str, np.ndarray]  # full weights by name, as an export has them
    weights: dict[str, np.ndarray]
    memory_bytes: dict[str, int]


@contextlib.contextmanager
def usual_signals() -> Iterator[None]:
    """Take back at the end what a `StopSignal` has made of the signals in the block."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start_run(distributed: Distributed, config: Config) -> Run:
    """Build or resume a run as the program does; signals keep their usual effect."""
    from megatron_lite.run.experiment import Experiment
    from megatron_lite.setup_run import build

    experiment = Experiment(config, distributed.rank)
    experiment.share(distributed)
    with usual_signals():
        return build(config, distributed, experiment, StopSignal(), ())


def train_tiny(
    distributed: Distributed, options: dict[str, Any], iterations: int = 20
) -> Trajectory:
    """Train the tiny model with the program's own step; to be run by `run_distributed`."""
    from megatron_lite.train import train_step

    run = start_run(
        distributed, tiny_config(distributed.world_size, **{"train_iters": iterations, **options})
    )
    initial = full_weights(run.model)
    updates = [
        train_step(run, micro_batches, iteration)
        for iteration, micro_batches in enumerate(
            run.data.batches("training", 0, iterations), start=1
        )
    ]
    return Trajectory(
        losses=[float(update.loss) / update.tokens for update in updates],
        grad_norms=[float(update.grad_norm) for update in updates],
        initial=initial,
        weights=full_weights(run.model),
        memory_bytes=bytes_by_kind(run.model),
    )


def train_several(
    distributed: Distributed, runs: Sequence[dict[str, Any]], iterations: int
) -> list[Trajectory]:
    """Train the tiny model with each of several sets of options; to be run by `run_distributed`."""
    return [train_tiny(distributed, options, iterations) for options in runs]


def train_whole(distributed: Distributed, config: Config) -> Run:
    """A run to its end by the program's own loop, which saves and exports; to be run by
    `run_distributed`."""
    from megatron_lite.train import train

    run = start_run(distributed, config)
    code, message = train(run)
    assert code == 0, message
    run.data.close()
    run.model.finish()
    run.trackers.close(0)
    return run


def parameters_of(model: MultiStage) -> Iterator[tuple[str, Parameter]]:
    """(global name, full parameter) of this rank's stages."""
    for stage in model.stages:
        yield from stage.parameters()


def bytes_by_kind(model: MultiStage) -> dict[str, int]:
    """The table of a model's memory."""
    return {row.kind: row.bytes for row in model.memory.table()}


def full_weights(model: MultiStage) -> dict[str, np.ndarray]:
    """Name -> full weight; bf16 and fp16 values are exact in fp32."""
    return {name: weight.float().numpy().copy() for name, weight in model.full_weights()}


def same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
