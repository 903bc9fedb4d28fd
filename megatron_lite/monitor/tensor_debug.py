"""Log tensors to find where a run goes wrong: --debug_layer_outputs and its siblings.

Every rank takes part, in the same order, because collectives assemble global tensors, which only
rank 0 logs; with a pipeline, the first rank of each pipeline rank logs its stages' tensors.
Everything here reads the device and is slow. With every level at 0 there is no debugger, and steps
cost nothing extra.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import Config, RunConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.processes import proc_file
from megatron_lite.monitor.hashes import BITS
from megatron_lite.monitor.logging import MIB
from megatron_lite.monitor.tensor_log import TensorEntry, summarize, write_tensor_log
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.replicas import Replicas, assembled

LEVELS = tuple(
    """
    debug_layer_outputs debug_layer_gradients debug_param_init debug_param_gradients debug_all_param_gradients
    debug_param_update
    """.split()
)


class CopyCheck:
    """Compares, bit by bit, what must match within a tensor-parallel group
    (--debug_tensor_parallel).

    Weights and reduced gradients are compared on the shards, where several ranks have copies; layer
    outputs and the gradients of layer inputs unless the ranks split their tokens. All ranks take
    part, in the same order.

    splits_tokens: each rank has some tokens' hidden states.
    """

    def __init__(
        self, distributed: Distributed, logger: logging.Logger, splits_tokens: bool
    ) -> None:
        self._distributed = distributed
        self._logger = logger
        self._splits_tokens = splits_tokens
        self._found: list[str] = []  # in this rank's group, on its first rank
        self._compared = 0  # tensors

    def layer(self, name: str, tensor: Tensor) -> None:
        """Compare a layer's output or its input's gradient."""
        if tensor.dim() and self._splits_tokens:
            return
        copies = self._distributed.tensor.gathered(tensor.detach().contiguous(), "debug")
        self._compare(name, copies, tuple(range(len(copies))))

    def shard(self, what: str, replicas: Replicas | None, shard: Tensor) -> None:
        """Compare a shard's elements with copies on several ranks. what: "init", "gradient" or
        "update"."""
        if replicas is None or not replicas.copied:
            return
        own = torch.cat([shard[tile.offset : tile.end] for tile in replicas.copied])
        gathered = self._distributed.tensor.gathered(own, "debug")
        sizes = [tile.numel for tile in replicas.copied]
        for tile, copies in zip(replicas.copied, gathered.split(sizes, dim=1), strict=True):
            self._compare(f"{tile.name} {what}", copies, tile.holders)

    def report(self, phase: str) -> None:
        """Log the differences since the last report, on rank 0."""
        found, compared = self._found, self._compared
        self._found, self._compared = [], 0
        everyone, counts = zip(*self._distributed.gather_objects([found, compared]), strict=True)
        if self._distributed.rank != 0:
            return
        compared = sum(
            counts[rank]
            for rank in range(self._distributed.world_size)
            if self._distributed.grid.place(rank)["layers"] == 0
        )
        for rank, lines in enumerate(everyone):
            for line in lines:
                self._logger.error(
                    "%s | MISMATCH %s, between rank %d and its group", phase, line, rank
                )
        if not any(everyone):
            self._logger.info(
                "%s | the copies of %d tensors are equal in all tensor-parallel groups",
                phase,
                compared,
            )

    def _compare(self, name: str, copies: Tensor, holders: tuple[int, ...]) -> None:
        """Compare these ranks' copies, (ranks, ...)."""
        self._compared += 1
        bits = copies.view(BITS[copies.itemsize])
        differs = torch.zeros_like(bits[0], dtype=torch.bool)
        for rank in holders[1:]:
            differs |= bits[rank] != bits[holders[0]]
        if (count := int(differs.sum())) and self._distributed.tensor.rank == holders[0]:
            self._found.append(f"{name}: {count:,} / {differs.numel():,} elements")


def open_debugger(
    config: Config, logger: logging.Logger, distributed: Distributed, artifacts: Path | None
) -> TensorDebugger | None:
    """Return the debugger for the debug options, or None if none is set.

    artifacts: the folder for --save_tensor_logs, or None to write nothing.
    """
    run = config.run
    artifacts = artifacts if run.save_tensor_logs else None
    is_kept = artifacts is not None or run.show_tensor_logs
    levels = {name: getattr(run, name) if is_kept else 0 for name in LEVELS}
    splits_tokens = config.distributed.sequence_tensor_parallel
    copies = None
    if run.debug_tensor_parallel and distributed.tensor.world_size > 1:
        copies = CopyCheck(distributed, logger, splits_tokens)
    if not any(levels.values()) and not run.debug_activation_memory and copies is None:
        return None
    micro_batches = config.batch.sequential_micro_batches or 1
    split_length = config.batch.sequence_length if splits_tokens else None
    return TensorDebugger(
        run, logger, distributed, levels, artifacts, micro_batches, split_length, copies
    )


@dataclass(eq=False)
class TensorDebugger:
    """Logs tensors inside `phase`; `attach` makes it the stages' observer.

    The model may be anything with the `observe` and `parts` of `zero.MultiStage`. split_length: the
    sequence length, if tensor-parallel ranks split the tokens; None: each rank has all tokens.
    """

    config: RunConfig
    logger: logging.Logger
    distributed: Distributed
    levels: Mapping[str, int]  # by option; 0 is off
    artifacts: Path | None
    micro_batches: int
    split_length: int | None = None
    copies: CopyCheck | None = None  # of --debug_tensor_parallel
    _phase: str | None = None
    _entries: list[TensorEntry] = field(default_factory=list)
    _device: torch.device = torch.device("cpu")  # of the layers, once one has reported

    def attach(self, model: Any) -> None:
        """Make the stages report their layers, if an option needs that."""
        layers = self.levels["debug_layer_outputs"] or self.levels["debug_layer_gradients"]
        if layers or self.config.debug_activation_memory or self.copies is not None:
            model.observe(self)

    @contextlib.contextmanager
    def phase(self, name: str, micro_batches: int | None = None) -> Iterator[None]:
        """Log tensors under this name ("init", "train_00003") inside the block, and write their
        file at its end."""
        self._phase, self._entries = name, []
        self.micro_batches = micro_batches or self.micro_batches
        try:
            yield
            if self.copies is not None:
                self.copies.report(name)
        finally:
            self._phase = None
        if self.artifacts is not None and self._entries:
            self._save(self.artifacts, name)

    def _save(self, artifacts: Path, phase: str) -> None:
        """Write a phase's file; a full disk costs the file, not the run."""
        path = artifacts / f"tensor_logs_{phase}_rank_{self.distributed.rank:03d}.safetensors"
        ranks = {"rank": str(self.distributed.rank), "world_size": str(self.distributed.world_size)}
        about = {"phase": phase, **ranks, "global": str(int(self.config.debug_global_tensors))}
        try:
            write_tensor_log(path, self._entries, about)
        except OSError as error:
            self.logger.warning(
                "cannot write %s: %s; the run continues without it", path, error.strerror or error
            )
        self._entries = []

    # -- reported by the stages
    # ------------------------------------------------------------------------------------

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        """Log a layer's output: (b, s, h), or the summed loss, () (--debug_layer_outputs)."""
        self._layer(f"{name} fw", output, self.levels["debug_layer_outputs"], micro_batch)

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        """Log d loss / d input of a layer, (b, s, h); None if the input has no gradient
        (--debug_layer_gradients)."""
        self._layer(f"{name} bw", gradient, self.levels["debug_layer_gradients"], micro_batch)

    def _layer(self, name: str, tensor: Tensor | None, level: int, micro_batch: int) -> None:
        if self._phase is None:  # an evaluation
            return
        name = f"{name}, mb={micro_batch + 1}/{self.micro_batches}"
        if tensor is not None:
            self._device = tensor.device
        if self.config.debug_activation_memory:  # before anything here allocates memory
            self.logger.info("%s | %s | memory: %s", self._phase, name, memory_in_use(self._device))
        if self.copies is not None and tensor is not None:
            self.copies.layer(name, tensor)
        if level and tensor is not None:
            if self.config.debug_global_tensors:
                tensor = self._joined(
                    self.distributed.layers.gathered(tensor.detach().contiguous(), "debug")
                )
            self._log(name, tensor, level)

    def _joined(self, tensors: Tensor) -> Tensor:
        """Join the tensors of a stage's ranks, (ranks, ...), where a tensor-parallel group's ranks
        are adjacent."""
        if self.split_length is not None and tensors.dim() > 1:
            return tensors.view(-1, self.split_length, tensors.shape[-1])
        return join_ranks(tensors[:: self.distributed.tensor.world_size])  # equal within a group

    # -- parameters and their gradients
    # ---------------------------------------------------------------------------

    def parameters(self, model: Any, when: str) -> None:
        """Log each parameter: "init", initial or loaded weights, or "update", after the optimizer's
        step.

        See --debug_param_init and --debug_param_update.
        """
        level = self.levels[f"debug_param_{when}"]
        for _, part in model.parts() if level or self.copies is not None else ():
            if self.copies is not None:
                self.copies.shard(when, part.replicas, part.read("weights"))
            for name, tensor in self._pieces(part, part.read("weights")) if level else ():
                self._log(f"{name} {when}", tensor, level)

    def gradients_reduced(self, model: Any) -> None:
        """Log gradients summed over ranks and micro-batches, still multiplied by the loss scale.

        In one tensor per stage, without padding (--debug_param_gradients), and per parameter
        (--debug_all_param_gradients).
        """
        whole, each = self.levels["debug_param_gradients"], self.levels["debug_all_param_gradients"]
        for stage, part in model.parts():
            if not part.has_state:  # frozen
                continue
            if self.copies is not None:
                self.copies.shard("gradient", part.replicas, part.grad_shard)
            if not whole and not each:
                continue
            pieces = list(self._pieces(part, part.grad_shard))
            if whole:
                flat = torch.cat(
                    [part.grad_shard[:0], *(tensor.reshape(-1) for _, tensor in pieces)]
                )
                self._log(
                    f"stage {stage} gradient shard{'s' if self.config.debug_global_tensors else ''}",
                    flat,
                    whole,
                )
            for name, tensor in pieces if each else ():
                self._log(f"{name} gradient", tensor, each)

    def _pieces(self, part: FlatShard, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of the parameters in a flat shard, (shard_numel,).

        Global: full parameters, on the first rank only. Otherwise this rank's pieces, named by the
        indices of the tensor-parallel rank and, if they are partial, by their bounds in its
        flattened part.
        """
        layout, rank = part.layout, part.rank
        if self.config.debug_global_tensors:
            ranks, size = self.distributed.layers, part.split_over.world_size
            shards = ranks.gathered(shard.detach(), "debug")
            firsts = [
                size * layout.holder(number)
                for number in range(layout.world_size if ranks.rank == 0 else 0)
            ]
            flats = [
                torch.cat([shards[first + place] for first in firsts])
                for place in range(size if firsts else 0)
            ]
            for slot in layout.slots if flats else ():
                bounds = slice(slot.offset, slot.offset + slot.spec.padded_numel)
                yield slot.spec.name, assembled(slot.spec, [flat[bounds] for flat in flats])
            return
        low = layout.start(rank)
        for slot, start, end in layout.pieces(rank):
            piece = shard[slot.offset + start - low : slot.offset + end - low]
            name = slot.spec.local_name
            if end - start == slot.numel:
                yield name, piece.view(slot.spec.local_shape)
            else:
                yield f"{name}[{start}:{end}]", piece

    def _log(self, name: str, tensor: Tensor, level: int) -> None:
        if self.distributed.layers.rank != 0 and self.config.debug_global_tensors:
            return
        entry = summarize(name, tensor, level)
        if self.config.show_tensor_logs:
            self.logger.info("%s | %s", self._phase, entry.line())
        if self.artifacts is not None:
            self._entries.append(entry)


def join_ranks(tensors: Tensor) -> Tensor:
    """Reshape (ranks, b, ...) to (ranks * b, ...), or add up scalars, (ranks,), which are sums over
    tokens (the loss)."""
    return tensors.flatten(0, 1) if tensors.dim() > 1 else tensors.double().sum().to(tensors.dtype)


def memory_in_use(device: torch.device) -> str:
    """Describe the memory in use: PyTorch's on a GPU, the whole process's on CPU."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        return f"allocated {allocated / MIB:,.1f} MiB, reserved {reserved / MIB:,.1f} MiB"
    if pages := proc_file("self", "statm").split()[1:]:
        return f"resident set of the process {int(pages[0]) * os.sysconf('SC_PAGE_SIZE') / MIB:,.1f} MiB"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return f"largest resident set of the process so far {peak / MIB:,.1f} MiB"
