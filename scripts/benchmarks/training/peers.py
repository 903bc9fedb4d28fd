"""The peers: the plain torch.nn model and Hugging Face's, in one process, under DDP and under
FSDP2.

Peers run as their documentation recommends: fused AdamW, gradients as views of DDP's buckets,
`no_sync`, one FSDP2 group per block, autocast or FSDP2's MixedPrecisionPolicy for bf16, and the
fastest attention kernels on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

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
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import (
    PlainGPT,
    initial_value,
    initialize,
    parameter_specs,
    tokens_per_rank,
)

PRODUCTS = "products"  # the row without training


@dataclass(frozen=True)
class Row:
    """One row of the table: a model, its trainer, and whether it is compiled."""

    trainer: (
        str  # "engine", "torch" (one process), "DDP", "FSDP2", "torch TP", "torch PP" or "products"
    )
    model: str = "plain"  # "engine" (its own layers), "plain", "HF" or "HF Liger"
    compiled: bool = False
    # engine options of our rows, and of their peers
    changes: Mapping[str, Any] = field(default_factory=dict)
    # FSDP2: reshard_after_forward; separate groups for embedding and head; gradients reduced every
    # micro-batch
    reshard: bool = True
    separate_ends: bool = False
    sync: bool = True
    # Plain model: overrides --loss
    loss: str | None = None
    default: bool = True  # runs unless --only says otherwise

    @property
    def trains_the_model(self) -> bool:
        """Whether the row's losses must equal the other rows'."""
        return self.trainer != PRODUCTS and "window_size" not in self.changes


class Peer(Contestant):
    """A peer ready to train with the usual loop: zero_grad, backward per micro-batch, clip,
    step."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        module: nn.Module,
        patch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        keep_gradients: bool = False,
    ) -> None:
        """patch: makes the context in which this peer runs."""
        self._config = config
        self._device = distributed.device
        self._module = module
        self._keep_gradients = keep_gradients  # FSDP2: full gradients until the last micro-batch
        self._autocast = config.distributed.training_dtype == "bf16" and not isinstance(
            module, FSDPModule
        )
        self._patch = patch
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
                self._patch(),
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
            if self._keep_gradients:
                self._module.set_requires_gradient_sync(last)
        yield

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (the peer's own name, full weight). Every rank must iterate to the end."""
        for name, parameter in self._module.named_parameters():
            value = parameter.detach()
            yield (
                name.removeprefix("module."),
                value.full_tensor() if isinstance(value, DTensor) else value,
            )

    def books(self) -> dict[str, Any]:
        """Return this rank's memory by kind between steps, without temporaries."""
        parameters = list(self._module.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kinds: dict[str, list[Tensor]] = {
            "weights": [*parameters],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "Adam moments": [value for value in states if value.dim() > 0],
        }
        return {
            "state_bytes_by_kind": {
                kind: sum(map(local_bytes, tensors)) for kind, tensors in kinds.items()
            }
        }


class Products(Contestant):
    """Output, input gradient and weight gradient of every linear layer and of the head, by
    torch.mm: a lower bound.

    Each layer has its own weights and gradients, which come from memory as in a step. Attention's
    own products are not included. Nothing is trained, so there is no loss.
    """

    def __init__(self, config: Config, dtype: torch.dtype, device: torch.device) -> None:
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

    def __init__(self, config: Config, attention: str, device: torch.device) -> None:
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
                described, attn_implementation=attention
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


def liger_kernels(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """Put Liger's kernels into a Hugging Face model; return the context in which they are active.

    Liger also replaces functions of transformers' module. Outside the context other rows find its
    own.
    """
    module = importlib.import_module(type(model).__module__)
    before, kind = dict(vars(module)), module.__name__.rpartition("_")[2]  # modeling_llama: llama
    getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}")(
        model=model
    )
    changed = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    vars(module).update({name: before[name] for name in changed if name in before})
    return functools.partial(mock.patch.dict, vars(module), changed)


def compile_model(model: PlainGPT | HuggingFace, whole: bool, mode: str, backend: str) -> None:
    """Compile the whole model, or each block and the loss (as torchtitan does under FSDP2 and DDP).

    Only `forward` is compiled, so that the hooks of DDP and FSDP2 stay outside.
    """
    options: dict[str, Any] = {"backend": backend, "dynamic": False}
    if backend == "inductor":
        options["mode"] = mode
    if whole:
        model.forward = torch.compile(model.forward, **options)  # type: ignore[method-assign]
        return
    for block in model.blocks:
        block.forward = torch.compile(
            block.forward, fullgraph=isinstance(model, PlainGPT), **options
        )
    if isinstance(model, PlainGPT):
        model.head.function = torch.compile(model.head.function, fullgraph=True, **options)


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


def peer(row: Row, options: argparse.Namespace, config: Config, distributed: Distributed) -> Peer:
    """Build a row of PyTorch's: a plain or Hugging Face model in one process, under DDP or under
    FSDP2.

    DDP has gradients as bucket views. FSDP2 is used as documented: one group per block; the rest is
    in the root's group, which stays gathered. With `separate_ends` embedding and head are separate
    groups, so that every weight is freed after its forward pass. With --data_parallel_shard its
    mesh has two dimensions (HSDP).
    """
    device = distributed.device
    model: PlainGPT | HuggingFace
    if row.model == "plain":
        model = PlainGPT(config, row.loss or options.loss, device)
    else:
        model = HuggingFace(config, options.hf_attention, device)
    patch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if isinstance(model, HuggingFace) and row.model == "HF Liger":
        patch = liger_kernels(model.model)
    if row.compiled:
        compile_model(model, row.trainer == "torch", options.compile_mode, options.compile_backend)
    if row.trainer == "FSDP2":
        mesh = shard_mesh(distributed)
        policy = MixedPrecisionPolicy()
        if config.distributed.training_dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ends = (
            [model.embedding, model.head]
            if row.separate_ends and isinstance(model, PlainGPT)
            else []
        )
        for layer in (*ends, *model.blocks):
            fully_shard(layer, mesh=mesh, reshard_after_forward=row.reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if isinstance(model, PlainGPT):
        initialize(model, config, device)
    module: nn.Module = model
    if row.trainer == "DDP":
        module = DistributedDataParallel(
            model, process_group=distributed.group, gradient_as_bucket_view=True
        )
    return Peer(config, distributed, module, patch, keep_gradients=not row.sync)
