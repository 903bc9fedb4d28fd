"""Tensors in the log, for finding out where a run goes wrong: --debug_layer_outputs and its siblings.

Every rank takes part, in the same order, because global tensors are put together by collectives; only rank 0 logs them.
Everything here reads the device and is slow. At level 0 nothing looks on, and nothing costs anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import Config, RunConfig
from megatron_lite.monitor.tensor_log import TensorEntry, summarize, unique_names, write_tensor_log

MIB = 2**20
LEVELS = (
    "debug_layer_outputs",
    "debug_layer_gradients",
    "debug_param_init",
    "debug_param_gradients",
    "debug_all_param_gradients",
    "debug_param_update",
)


def open_debugger(
    config: Config,
    logger: logging.Logger,
    rank: int,
    world_size: int,
    gather: Callable[[Tensor], list[Tensor]],
    artifacts: Path | None,
) -> TensorDebugger | None:
    """Return the debugger that the debug options ask for, or None if they ask for nothing.

    Args:
        gather: maps a tensor, of the same shape and dtype on all ranks, to the list of all ranks' tensors.
        artifacts: the folder for --save_tensor_logs, or None to write nothing.
    """
    run, micro_batches = config.run, config.batch.sequential_micro_batches or 1
    artifacts = artifacts if run.save_tensor_logs else None
    debugger = TensorDebugger(run, logger, rank, world_size, gather, artifacts, micro_batches)
    return debugger if debugger.wanted else None


class TensorDebugger:
    """Logs tensors inside of `phase`; an observer of stages, see `attach`.

    The model is anything with the `observe` and `parts` of `zero.MultiStage`.
    """

    def __init__(
        self,
        config: RunConfig,
        logger: logging.Logger,
        rank: int,
        world_size: int,
        gather: Callable[[Tensor], list[Tensor]],
        artifacts: Path | None,
        micro_batches: int,
    ) -> None:
        self._config, self._logger, self._rank, self._world_size = config, logger, rank, world_size
        self._gather, self._artifacts, self._micro_batches = gather, artifacts, micro_batches
        self._global = config.debug_global_tensors
        self._levels = dict.fromkeys(LEVELS, 0)
        if artifacts is not None or config.show_tensor_logs:
            self._levels = {name: getattr(config, name) for name in LEVELS}
        self.wanted = any(self._levels.values()) or config.debug_activation_memory
        self._phase: str | None = None
        self._entries: list[TensorEntry] = []
        self._device = torch.device("cpu")  # where the layers compute, once one has been seen

    def attach(self, model: Any) -> None:
        """Have the stages report their layers, if anything of them is wanted."""
        layers = self._levels["debug_layer_outputs"] or self._levels["debug_layer_gradients"]
        if layers or self._config.debug_activation_memory:
            model.observe(self)

    @contextlib.contextmanager
    def phase(self, name: str, micro_batches: int | None = None) -> Iterator[None]:
        """Log what happens inside, under this name ("init", "train_00003"), and write its file at the end."""
        self._phase, self._entries = name, []
        self._micro_batches = micro_batches or self._micro_batches
        try:
            yield
        finally:
            self._phase = None
        if self._artifacts is not None and self._entries:
            self._save(self._artifacts, name)

    def _save(self, artifacts: Path, phase: str) -> None:
        """A full disk costs the file, not the run."""
        path = artifacts / f"tensor_logs_{phase}_rank_{self._rank:03d}.safetensors"
        about = {
            "phase": phase,
            "rank": str(self._rank),
            "world_size": str(self._world_size),
            "global": str(int(self._global)),
        }
        try:
            write_tensor_log(path, list(unique_names(self._entries)), about)
        except OSError as error:
            self._logger.warning("cannot write %s: %s; the run goes on without it", path, error.strerror or error)
        self._entries = []

    # -- what the stages report -----------------------------------------------------------------------------------

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        """The output of a layer: (b, s, h), or the summed loss, () (--debug_layer_outputs)."""
        self._layer(f"{name} fw", output, self._levels["debug_layer_outputs"], micro_batch)

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        """d loss / d input of a layer, (b, s, h); None for one whose input has none (--debug_layer_gradients)."""
        self._layer(f"{name} bw", gradient, self._levels["debug_layer_gradients"], micro_batch)

    def _layer(self, name: str, tensor: Tensor | None, level: int, micro_batch: int) -> None:
        if self._phase is None:  # an evaluation
            return
        name = f"{name}, mb={micro_batch + 1}/{self._micro_batches}"
        if tensor is not None:
            self._device = tensor.device
        if self._config.debug_activation_memory:  # before anything here takes memory
            self._logger.info("%s | %s | memory: %s", self._phase, name, memory_in_use(self._device))
        if level and tensor is not None:
            if self._global:
                tensor = join_ranks(self._gather(tensor.detach().contiguous()))
            if self._rank == 0 or not self._global:
                self._log(name, tensor, level)

    # -- parameters and their gradients ---------------------------------------------------------------------------

    def parameters_initialized(self, model: Any) -> None:
        """Each parameter as a run begins: its initial value, or what was loaded (--debug_param_init)."""
        self._parameters(model, "init", self._levels["debug_param_init"])

    def parameters_updated(self, model: Any) -> None:
        """Each parameter after the optimizer's step (--debug_param_update)."""
        self._parameters(model, "update", self._levels["debug_param_update"])

    def _parameters(self, model: Any, what: str, level: int) -> None:
        if not level:
            return
        for _, part in model.parts():
            for name, tensor in self._pieces(part.layout, part.read("weights")):
                self._log(f"{name} {what}", tensor, level)

    def gradients_reduced(self, model: Any) -> None:
        """Gradients summed over ranks and micro-batches, still times the loss scale.

        Those of a stage in one (--debug_param_gradients), without padding, and each parameter's
        (--debug_all_param_gradients).
        """
        whole, each = self._levels["debug_param_gradients"], self._levels["debug_all_param_gradients"]
        if not whole and not each:
            return
        for stage, part in model.parts():
            if not part.has_state:  # frozen
                continue
            pieces = list(self._pieces(part.layout, part.grad_shard))
            if whole and (self._rank == 0 or not self._global):
                flat = torch.cat([part.grad_shard[:0], *(tensor.reshape(-1) for _, tensor in pieces)])
                self._log(f"stage {stage} gradient shard{'s' if self._global else ''}", flat, whole)
            for name, tensor in pieces if each else ():
                self._log(f"{name} gradient", tensor, each)

    def _pieces(self, layout: Any, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, values) of what a flat shard holds: (shard_numel,).

        Global: whole parameters, on rank 0 alone. Otherwise this rank's pieces, with their bounds in the name where
        they are not the whole.
        """
        if self._global:
            flat = torch.cat(self._gather(shard.detach()))
            for slot in layout.slots if self._rank == 0 else ():
                yield slot.spec.name, flat[slot.offset : slot.end].view(slot.spec.shape)
            return
        low = self._rank * layout.shard_numel
        for slot, start, end in layout.pieces(self._rank):
            piece = shard[slot.offset + start - low : slot.offset + end - low]
            if end - start == slot.numel:
                yield slot.spec.name, piece.view(slot.spec.shape)
            else:
                yield f"{slot.spec.name}[{start}:{end}]", piece

    def _log(self, name: str, tensor: Tensor, level: int) -> None:
        entry = summarize(name, tensor, level)
        if self._config.show_tensor_logs:
            self._logger.info("%s | %s", self._phase, entry.line(self._config.tensor_logs_show_elements))
        if self._artifacts is not None:
            self._entries.append(entry)


def join_ranks(tensors: list[Tensor]) -> Tensor:
    """(b, ...) of each rank -> (ranks * b, ...). A scalar is a sum over tokens (the loss): () -> (), their sum."""
    if tensors[0].dim():
        return torch.cat(tensors)
    return torch.stack(tensors).double().sum().to(tensors[0].dtype)


def memory_in_use(device: torch.device) -> str:
    """The memory in use, in words: PyTorch's on a GPU; on CPU that of the whole process."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return f"allocated {allocated / MIB:,.1f} MiB, reserved {reserved / MIB:,.1f} MiB"
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return f"resident set of the process {resident / MIB:,.1f} MiB"
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return f"largest resident set of the process so far {peak / MIB:,.1f} MiB"
