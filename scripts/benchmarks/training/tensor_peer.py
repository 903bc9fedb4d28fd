"""The tensor-parallel peer: the plain model under
`torch.distributed.tensor.parallel.parallelize_module`.

As in PyTorch's tutorial and torchtitan: column- and row-parallel products, vocabulary-parallel
embedding and head, `loss_parallel`, and with sequence parallelism `SequenceParallel` norms and
`PrepareModuleInput`. Query, key and value stay fused, and so do gate and up; their rows are ordered
by rank, so that each rank holds whole heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.tensor_parallel import tensor_parallel
from megatron_lite.parameter import ParameterSpec
from scripts.benchmarks.training.model import Attention, Head, PlainGPT, initialize, parameter_specs
from scripts.benchmarks.training.peers import Peer


class SplitHead(Head):
    """The vocabulary-parallel head, under `loss_parallel`."""

    def forward(
        self, hidden: Tensor, labels: Tensor, tied: Tensor | None, scale: Tensor | float
    ) -> Tensor:
        assert self.output is not None
        logits = self.output(self.norm(hidden)).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, labels.flatten(), reduction="sum") * scale
        assert isinstance(loss, DTensor)
        return loss.to_local()


class TensorPeer(Peer):
    """A parallelized model. Parameters that its plan does not name stay ordinary tensors."""

    def clip(self, max_norm: float) -> None:
        """Clip like `clip_grad_norm_`, which cannot mix DTensors and plain tensors."""
        gradients = [
            parameter.grad for parameter in self._module.parameters() if parameter.grad is not None
        ]
        kinds = [
            [one for one in gradients if isinstance(one, DTensor) == kind] for kind in (False, True)
        ]
        norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
        total = torch.stack(
            [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        ).norm()
        for kind in (False, True):
            parameters = [
                one for one in self._module.parameters() if isinstance(one, DTensor) == kind
            ]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)


def parallelized(config: Config, distributed: Distributed, splits_tokens: bool) -> TensorPeer:
    """Train the plain model with tensor parallelism. splits_tokens: with sequence parallelism."""
    ranks, model = distributed.tensor.world_size, PlainGPT(config, "full", distributed.device)
    with torch.device("meta"):
        model.head = SplitHead(config.model, "full")
    for module in model.modules():
        if isinstance(module, Attention):
            queries, keys, values = (size // ranks for size in module.sizes)
            module.sizes = (queries, keys, values)
    mesh = DeviceMesh.from_group(distributed.tensor.group, distributed.device.type)
    specs = parameter_specs(config, tensor_parallel(config, distributed))
    whole: nn.Module = parallelize_module(model, mesh, plan(splits_tokens))
    initialize(whole, config, distributed.device, lambda name, value: by_rank(specs[name], value))
    return TensorPeer(config, distributed, whole, loss_parallel)


def plan(splits_tokens: bool) -> dict[str, ParallelStyle]:
    """Return the styles of all parallelized modules."""
    residual, whole = Shard(1) if splits_tokens else Replicate(), Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding.word": RowwiseParallel(input_layouts=whole, output_layouts=residual),
        "blocks.*.attention.query_key_value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=residual),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=residual),
        "head.output": ColwiseParallel(
            input_layouts=residual, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if splits_tokens:
        norms = ("blocks.*.attention_norm", "blocks.*.mlp_norm", "head.norm")
        branches = ("blocks.*.attention", "blocks.*.mlp")
        styles |= {name: SequenceParallel() for name in norms}
        styles |= {
            name: PrepareModuleInput(input_layouts=residual, desired_input_layouts=whole)
            for name in branches
        }
    return styles


def by_rank(spec: ParameterSpec, value: Tensor) -> Tensor:
    """Return a whole parameter with its rows or columns ordered by tensor-parallel rank."""
    parts = [spec.on(rank).local(value) for rank in range(spec.split.ranks)]
    return torch.cat(parts, spec.split.dim) if spec.split.blocks else value
