"""Start gloo ranks from pytest: every rank runs a plain function; no port, a time-out, nothing left behind."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config import Config, DistributedConfig, unflatten
from megatron_lite.distributed import Distributed

# A server process that has imported torch already forks each rank in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "megatron_lite.zero.multi_stage", "numpy"])

TIMEOUT_S = 120.0


def run_distributed(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(distributed, *args) on `world_size` ranks; returns their results in rank order."""
    with tempfile.TemporaryDirectory() as directory:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _CONTEXT.Process(
                target=_run_rank, args=(rank, world_size, f"file://{directory}/store", pipes[rank][1], function, args)
            )
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return [_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _run_rank(
    rank: int, world_size: int, init_method: str, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        config = DistributedConfig(device="cpu", distributed_timeout=60.0, startup_timeout=60.0)
        distributed = Distributed(config, rank, world_size, rank, init_method)
        result = function(distributed, *args)
        distributed.barrier()
        distributed.close()
        sender.send((True, result))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _receive(rank: int, receiver: Connection) -> Any:
    if not receiver.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} sent nothing for {TIMEOUT_S} s")
    try:
        good, result = receiver.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a word") from None
    if not good:
        raise RuntimeError(f"rank {rank} failed:\n{result}")
    return result


TINY = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, sequence_length=16, dataset_source="random",
    train_iters=20, lr=1e-3, lr_warmup_iters=10, device="cpu", batch_size=4, num_workers=0, log_interval=1,
    weight_decay=0.1,
)  # fmt: skip


def tiny_config(world_size: int = 1, **options: Any) -> Config:
    """A resolved configuration of a model small enough for a test; `options` override."""
    from megatron_lite.validation import resolve

    return resolve(unflatten({**TINY, **options}), world_size)
