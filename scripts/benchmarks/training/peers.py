"""The peers: the plain torch.nn model and Hugging Face's, in one process, under DDP and under
FSDP2.

Peers run as their documentation recommends: fused AdamW, gradients as views of DDP's buckets,
`no_sync`, one FSDP2 group per block, autocast or FSDP2's MixedPrecisionPolicy for bf16, and the
fastest attention kernels on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.huggingface.export_folder import their_tensor
from megatron_lite.huggingface.weight_map import by_tensor, pieces
from megatron_lite.parameter import DTYPES
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import (
    PlainGPT,
    initial_value,
    initialize,
    parameter_specs,
    tokens_per_rank,
)


class Peer(Contestant):
    """A peer ready to train with the usual loop: zero_grad, backward per micro-batch, clip,
    step."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        module: nn.Module,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """context: makes the context in which this peer runs."""
        self._config = config
        self._device = distributed.device
        self._module = module
        self._autocast = config.distributed.training_dtype == "bf16" and not isinstance(
            module, FSDPModule
        )
        self._context = context
        options = config.optimizer
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # norms and biases are not decayed
        for parameter in module.parameters():
            groups.setdefault((parameter.dim() > 1, isinstance(parameter, DTensor)), []).append(
                parameter
            )
        self.optimizer = torch.optim.AdamW(
            [
                {"params": some, "weight_decay": options.weight_decay if decayed else 0.0}
                for (decayed, _), some in groups.items()
            ],
            lr=config.learning_rate.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            fused=True,
        )

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step on micro-batches (b, s + 1); return the mean loss over this rank's tokens,
        ()."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        for index, part in enumerate(micro_batches):
            part = part.to(self._device, non_blocking=True)
            with (
                self._synchronized(index == len(micro_batches) - 1),
                fastest_attention(self._device),
                self._context(),
            ):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                    value = self._module(part[:, :-1].contiguous(), part[:, 1:].contiguous())
                value.backward()
            loss += value.detach()
        self.clip(self._config.optimizer.clip_grad)
        self.optimizer.step()
        return loss

    def clip(self, max_norm: float) -> None:
        """Clip the norm of all gradients."""
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), max_norm)

    @contextlib.contextmanager
    def _synchronized(self, last: bool) -> Iterator[None]:
        """Reduce gradients only after the last micro-batch, if the peer supports it."""
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
            return
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_all_reduce(last)  # across the replicas of hybrid shards
        yield

    def books(self) -> dict[str, Any]:
        """Return this rank's memory between steps, without temporaries: weights, gradients and
        moments."""
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        moments = [value for value in states if value.dim() > 0]
        return {"state_bytes": sum(map(local_bytes, (*parameters, *gradients, *moments)))}


class Products(Contestant):
    """Output, input gradient and weight gradient of every linear layer and of the head, by
    torch.mm: a lower bound.

    Each layer has its own weights and gradients, which come from memory as in a step. Attention's
    own products are not included. Nothing is trained, so there is no loss.
    """

    def __init__(self, config: Config, distributed: Distributed) -> None:
        device, dtype = distributed.device, DTYPES[config.distributed.training_dtype]
        tied, generator = config.model.tie_word_embeddings, torch.Generator(device).manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self._weights = [
            matrix(*spec.shape)
            for name, spec in parameter_specs(config).items()
            if len(spec.shape) == 2
            and (not name.startswith("embedding.") or (tied and name == "embedding.word.weight"))
        ]
        self._gradients = [torch.empty_like(weight) for weight in self._weights]
        # inputs and output gradients (tokens, width), drawn at the first call
        self._wide = functools.cache(matrix)

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Compute all products once per micro-batch; return 0."""
        for micro_batch in micro_batches:
            tokens = micro_batch.shape[0] * (micro_batch.shape[1] - 1)
            for weight, gradient in zip(self._weights, self._gradients, strict=True):
                outputs, inputs = (self._wide(tokens, width) for width in weight.shape)
                inputs @ weight.t()
                outputs @ weight
                torch.mm(outputs.t(), inputs, out=gradient)
        return torch.zeros(())


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def fastest_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Prefer cuDNN attention over flash attention on a GPU, as torchtitan does."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


class HuggingFace(nn.Module):
    """The model of this shape in transformers, with its own loss and the engine's initial weights.

    `forward` takes and returns the same as PlainGPT's.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        values = hugging_face_config(config, {}) | {
            "dtype": "float32",
            "torch_dtype": "float32",
            "use_cache": False,
        }
        architecture = values.pop("model_type")
        described = transformers.AutoConfig.for_model(architecture, **values)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                described, attn_implementation="sdpa"
            )
        self.model.train()
        self.tokens = tokens_per_rank(config)
        with torch.no_grad():
            for name, spec in parameter_specs(config).items():
                value = initial_value(spec, config, device)
                parts = by_tensor(pieces(name, tuple(value.shape), architecture, config.model))
                for own_name, rows in parts.items():
                    self.model.get_parameter(own_name).copy_(their_tensor(value, rows))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks."""
        body = self.model.base_model
        return body.h if hasattr(body, "h") else body.layers

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        # shift_labels: the labels are shifted already; the summed loss is divided by
        # num_items_in_batch.
        output = self.model(
            input_ids=tokens,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=self.tokens,
            use_cache=False,
        )
        return output.loss


def compile_model(model: PlainGPT | HuggingFace, whole: bool) -> None:
    """Compile the whole model, or each block and the loss (as torchtitan does under FSDP2 and DDP).

    Only `forward` is compiled, so that the hooks of DDP and FSDP2 stay outside.
    """
    compiled = functools.partial(torch.compile, dynamic=False)
    if whole:
        model.forward = compiled(model.forward)  # type: ignore[method-assign]
        return
    for block in model.blocks:
        block.forward = compiled(block.forward, fullgraph=isinstance(model, PlainGPT))
    if isinstance(model, PlainGPT):
        model.head.function = compiled(model.head.function, fullgraph=True)


def shard_mesh(distributed: Distributed) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over: all ranks, (N,), or those of hybrid shards, (R,
    S)."""
    shard = distributed.shard
    replicate = distributed.replicate
    kind = distributed.device.type
    if replicate.world_size == 1:
        return DeviceMesh.from_group(distributed.group, kind)
    ranks = torch.arange(distributed.world_size).view(replicate.world_size, shard.world_size)
    return DeviceMesh.from_group(
        [replicate.group, shard.group], kind, ranks, mesh_dim_names=("replicate", "shard")
    )


def peer(
    config: Config,
    distributed: Distributed,
    *,
    model: str = "plain",
    under: str = "",
    compiled: bool = False,
    loss: str = "chunked",
    reshard: bool = True,
    separate_ends: bool = False,
) -> Peer:
    """Build a row of PyTorch's: a plain or Hugging Face model in one process, under DDP or under
    FSDP2.

    DDP has gradients as bucket views. FSDP2 is used as documented: one group per block; the rest is
    in the root's group, which stays gathered. With `separate_ends` embedding and head are separate
    groups, so that every weight is freed after its forward pass. With --data_parallel_shard its
    mesh has two dimensions (HSDP).

    Args:
        model: "plain" or "HF".
        under: "DDP", "FSDP2", or neither.
        loss: of the plain model, "chunked" or "full".
        reshard: FSDP2's reshard_after_forward.
    """
    device = distributed.device
    plain = PlainGPT(config, loss, device) if model == "plain" else None
    made: PlainGPT | HuggingFace = plain or HuggingFace(config, device)
    if compiled:
        compile_model(made, whole=not under)
    if under == "FSDP2":
        mesh = shard_mesh(distributed)
        policy = MixedPrecisionPolicy()
        if config.distributed.training_dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ends = [plain.embedding, plain.head] if separate_ends and plain is not None else []
        for layer in (*ends, *made.blocks):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(made, mesh=mesh, mp_policy=policy)
    if plain is not None:
        initialize(plain, config, device)
    module: nn.Module = made
    if under == "DDP":
        module = DistributedDataParallel(
            made, process_group=distributed.group, gradient_as_bucket_view=True
        )
    return Peer(config, distributed, module)
