"""The peers of scripts/benchmark.py: a plain torch.nn model under DistributedDataParallel and under FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from benchmark_model import PlainGPT, initialize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.config import Config
from megatron_lite.distributed import Distributed


class Peer:
    """One peer ready to train: the usual loop of zero_grad, backward per micro-batch, clip, step."""

    def __init__(
        self, config: Config, distributed: Distributed, module: nn.Module, keep_gradients: bool = False
    ) -> None:
        self._config, self._distributed, self._module = config, distributed, module
        self._keep_gradients = keep_gradients  # FSDP2: whole gradients until the last micro-batch
        named = list(module.named_parameters())
        decayed = [parameter for name, parameter in named if "norm" not in name]
        exempt = [parameter for name, parameter in named if "norm" in name]
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": exempt, "weight_decay": 0.0}],
            lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps, fused=True,
        )  # fmt: skip

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """One update from micro-batches (b, s + 1); returns this rank's mean loss over its own tokens, ()."""
        tokens = sum(part.shape[0] * (part.shape[1] - 1) for part in micro_batches)
        scale = torch.tensor(1.0 / tokens, device=self._distributed.device)  # DDP and FSDP2 average over ranks
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._distributed.device)
        for index, part in enumerate(micro_batches):
            part = part.to(self._distributed.device)
            with self._synchronized(index == len(micro_batches) - 1):
                value = self._module(part[:, :-1].contiguous(), part[:, 1:].contiguous(), scale)
                value.backward()
            loss += value.detach()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._config.optimizer.clip_grad)
        self.optimizer.step()
        return loss

    def finish(self) -> None:
        """Nothing is left under way."""

    @contextlib.contextmanager
    def _synchronized(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged after the last micro-batch only, where the peer can do that."""
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
            return
        if isinstance(self._module, FSDPModule) and self._keep_gradients:
            self._module.set_requires_gradient_sync(last)
        yield

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(global name, full weight). Every rank has to iterate to the end."""
        for name, parameter in self._module.named_parameters():
            value = parameter.detach()
            yield name.removeprefix("module."), value.full_tensor() if isinstance(value, DTensor) else value

    def memory_bytes(self) -> dict[str, int]:
        """State that this rank holds between steps, by kind; what a step allocates for a while is not in it."""
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [value for state in self.optimizer.state.values() for value in state.values() if value.dim() > 0]
        return {
            "weights": sum(local_bytes(parameter) for parameter in parameters),
            "gradients": sum(local_bytes(gradient) for gradient in gradients),
            "Adam moments": sum(local_bytes(value) for value in moments),
        }


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the part of a tensor that lies on this rank."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def ddp(config: Config, distributed: Distributed, model: PlainGPT) -> Peer:
    """DistributedDataParallel as its documentation recommends: gradients live in the buckets."""
    initialize(model, config, distributed.device)
    module = DistributedDataParallel(model, process_group=distributed.group, gradient_as_bucket_view=True)
    return Peer(config, distributed, module)


def fsdp(
    config: Config,
    distributed: Distributed,
    model: PlainGPT,
    reshard: bool = True,
    whole: bool = False,
    keep_gradients: bool = False,
) -> Peer:
    """FSDP2, as its documentation recommends: one group per block, the rest in the root's, which stays gathered.

    `whole`: embedding and head are groups of their own, so that every weight is freed after its forward pass.
    """
    mesh = DeviceMesh.from_group(distributed.group, distributed.device.type)
    ends = [model.embedding["word"], model.head] if whole else []
    for layer in (*ends, *model.blocks):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    initialize(model, config, distributed.device)
    return Peer(config, distributed, model, keep_gradients)
