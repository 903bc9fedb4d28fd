"""Models and batches that tensor parallelism must not change, and short runs of them on ranks that
are threads."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.model.layer import MASKED, MicroBatch
from megatron_lite.zero.layout import FlatLayout
from tests.support import harness
from tests.support.engine_runs import Engine
from tests.support.thread_ranks import on_threads

Options = dict[str, Any]
LLAMA: Options = {**harness.LLAMA, "ffn_hidden_size": 96}
QWEN3: Options = {**LLAMA, "qk_layernorm": True, "tie_word_embeddings": True}
COMMON: Options = {"lr": 1e-3, "clip_grad": 0.5, "random_bias_init": True, "batch_size": 4}

# Options that are no flags of the program: of the batches.
BATCHES = ("documents", "reset_positions", "masks")

CASES: dict[str, Options] = {
    "gpt2": {"vocab_size": 61},
    "gpt2, untied": {"tie_word_embeddings": False, "layer_norm_init_range": 0.1},
    "gpt2, no biases": {"add_linear_biases": False},
    "gpt2, biases of queries alone": {
        "add_linear_biases": False,
        "add_qkv_biases": True,
        "head_groups": 2,
    },
    "llama, all heads": {**LLAMA, "head_groups": 4},
    "llama, grouped": LLAMA,
    "llama, multi-query": {**LLAMA, "head_groups": 1, "add_qkv_biases": True},
    "llama, tied": {
        **LLAMA,
        "tie_word_embeddings": True,
        "vocab_size": 61,
        "make_vocab_size_divisible_by": 8,
    },
    "qwen3": QWEN3,
    "qwen3, one group": {**QWEN3, "head_groups": 1, "tie_word_embeddings": False, "vocab_size": 61},
    "qk layer norms": {"qk_layernorm": True, "use_rotary_embeddings": True, "head_groups": 2},
    "windows": {**LLAMA, "window_size": 5},
    "documents": {**LLAMA, "documents": True},
    "documents, learned positions from 0": {"documents": True, "reset_positions": True},
    "documents, rotary positions from 0, windows": {
        **LLAMA,
        "documents": True,
        "reset_positions": True,
        "window_size": 3,
    },
    "positions from 0": {"reset_positions": True, "vocab_size": 61},
    "z-loss": {**LLAMA, "logit_z_loss": 0.1, "vocab_size": 61},
    "soft cap": {"logit_soft_cap": 0.5, "logit_z_loss": 0.1, "init_method_std_embed": 0.3},
    "factors": {
        **LLAMA,
        "embedding_scale": 5.0,
        "residual_scale": 0.3,
        "attention_scale": 0.7,
        "attention_soft_cap": 0.5,
        "logit_scale": 1.7,
    },
    "sinks": {**LLAMA, "head_groups": 1, "attention_sinks": True, "window_size": 5},
    "parallel branches": {"parallel_branches": "two_norms", "random_bias_init": True},
    "parallel branches, one norm": {**LLAMA, "parallel_branches": "one_norm"},
    "blocks of the vocabulary": {
        "cross_entropy_block_size": 7,
        "vocab_size": 61,
        "logit_z_loss": 0.1,
    },
    "chunks of tokens": {**LLAMA, "cross_entropy_splits": 5},
    "chunks and blocks": {
        "cross_entropy_splits": 3,
        "cross_entropy_block_size": 16,
        "logit_soft_cap": 1.0,
    },
    "whole embeddings": {**LLAMA, "parallel_embeddings": False, "vocab_size": 61},
    "whole embeddings, tied": {"parallel_embeddings": False, "vocab_size": 61},
    "whole embeddings, blocks": {
        "parallel_embeddings": False,
        "cross_entropy_block_size": 7,
        "logit_z_loss": 0.1,
    },
    "padded vocabulary": {
        "vocab_size": 61,
        "make_vocab_size_divisible_by": 4,
        "tie_word_embeddings": False,
    },
    "padded whole vocabulary": {
        "vocab_size": 61,
        "make_vocab_size_divisible_by": 16,
        "parallel_embeddings": False,
    },
    "hybrid norms": {**LLAMA, "hybrid_norm": True},
    "norms of outputs and of all heads": {
        **QWEN3,
        "norm_placement": "post",
        "qk_norm_scope": "all",
        "layer_norm_init_range": 0.3,
    },
    "norms of all heads, one group": {**QWEN3, "head_groups": 1, "qk_norm_scope": "all"},
    "patterns": {
        **LLAMA,
        "reset_positions": True,
        "window_size": 5,
        "attention_pattern": ("window", "full"),
        "rotary_pattern": ("rotary", "nope"),
        "window_rotary_base": 50.0,
    },
    "norm of the embedding": {"input_embedding_norm": True, "tie_word_embeddings": False},
    "norms without weights": {**LLAMA, "use_layer_norm_weight": False},
    "wide residual": {**LLAMA, "full_precision_residual": True},
    "frozen embedding": {"freeze": ("embedding",), "tie_word_embeddings": False},
    "frozen tied embedding": {"freeze": ("embedding.word.weight",)},
    "frozen head": {**LLAMA, "freeze": ("head",)},
    "frozen matrices": {"freeze": ("*.weight",), "tie_word_embeddings": False},
    "frozen parts": {"freeze": ("blocks.0.mlp", "blocks.1.attention", "*.bias")},
    "all but the down matrices": {
        "freeze": ("embedding", "head", "*norm*", "*attention*", "*.up.*")
    },
    "scaled rates": {
        "lr_scales": ("blocks:0.25", "*.bias:0.5", "embedding:2"),
        "tie_word_embeddings": False,
    },
    "masks": {**LLAMA, "masks": True, "logit_z_loss": 0.1},
    "masks, whole embeddings": {"masks": True, "parallel_embeddings": False},
    "depth-first": {"depth_first_micro_batches": 2, "batch_size": None, "micro_batch_size": 1},
    "breadth-first": {
        **LLAMA,
        "breadth_first_micro_batches": 2,
        "batch_size": None,
        "micro_batch_size": 1,
    },
    "both orders": {
        "depth_first_micro_batches": 2,
        "breadth_first_micro_batches": 2,
        "batch_size": None,
        "micro_batch_size": 1,
        "parallel_embeddings": False,
    },
    "recomputed layers": {**LLAMA, "recompute_layers": 1, "mlp_recompute_level": "activation"},
    "recomputed MLPs": {"mlp_recompute_level": "full", "tie_word_embeddings": False},
    "layers in twos": {"layers_per_stage": 2.0, "tie_word_embeddings": False},
    "scaled queries": {"scale_attn_by_inverse_layer_idx": True, "kv_channels": 16},
    "averages": {"ema_type": "ema"},
    "bf16": {**LLAMA, "training_dtype": "bf16"},
    "bf16, wide residual": {"training_dtype": "bf16", "full_precision_residual": True},
    "bf16, narrow gradients": {
        **LLAMA,
        "training_dtype": "bf16",
        "full_precision_gradients": False,
    },
    "bf16, split weights": {
        **LLAMA,
        "training_dtype": "bf16",
        "split_master_weights": True,
        "zero_stage": 1,
    },
    "fp16": {**LLAMA, "training_dtype": "fp16", "initial_loss_scale": 2.0**10},
    "in halves": {"sequence_length": 128, "overlap_tensor_reduce": True},
    "in halves, bf16": {
        **LLAMA,
        "sequence_length": 128,
        "overlap_tensor_reduce": True,
        "training_dtype": "bf16",
    },
}

# (data ranks, tensor ranks, tokens are split)
Layout = tuple[int, int, bool]


class CaseEngine(Engine):
    """Steps of a case. Data rank r of D takes the r-th part of each batch."""

    def __init__(self, ranks: Any, options: Options, **more: Any) -> None:
        self.kinds = {name: options.get(name, False) for name in BATCHES}
        flags = {
            name: value for name, value in {**COMMON, **options}.items() if name not in BATCHES
        }
        flags["cross_document_attention"] = not self.kinds["documents"]
        super().__init__(ranks, flags, **more)

    def batches(self, iteration: int, scale: Tensor | None = None) -> list[MicroBatch]:
        batch, vocab = self.config.batch, self.config.model.vocab_size
        assert batch.micro_batch_size and batch.sequential_micro_batches
        rows = batch.micro_batch_size
        length = batch.sequence_length
        ranks = self.ranks.data.world_size
        generator = torch.Generator().manual_seed(1000 + iteration)
        count = ranks * batch.sequential_micro_batches * rows
        tokens = torch.randint(vocab, (count, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if self.kinds["masks"]:
            labels[torch.rand(labels.shape, generator=generator) < 0.4] = MASKED
            labels[count // 2] = MASKED
        cuts = [
            sorted({0, *torch.randint(1, length, (3,), generator=generator).tolist(), length})
            for _ in range(count)
        ]
        first = self.ranks.data.rank * batch.sequential_micro_batches
        micro_batches = []
        for index in range(first, first + batch.sequential_micro_batches):
            part = slice(index * rows, (index + 1) * rows)
            sizes = [[end - start for start, end in itertools.pairwise(row)] for row in cuts[part]]
            micro_batches.append(
                MicroBatch(
                    tokens[part, :-1].contiguous(),
                    labels[part].contiguous(),
                    scale,
                    dropout_seed=7 * iteration + index,
                    documents=_documents(sizes) if self.kinds["documents"] else None,
                    positions=_positions(sizes) if self.kinds["reset_positions"] else None,
                )
            )
        return micro_batches

    def step(self, iteration: int) -> tuple[Tensor, Tensor]:
        """As `Engine.step`, with the learning rate of the configuration after a warm-up."""
        loss = self.gradients(iteration)
        rate = self.config.learning_rate.lr * min(1.0, iteration / 10)
        update = self.optimizer.step(iteration, rate, loss, self.tokens, self.model.updated)
        self.model.gather_ahead()
        return update.loss / self.tokens, update.grad_norm


def _documents(sizes: Sequence[Sequence[int]]) -> Documents:
    lengths = tuple(size for row in sizes for size in row)
    return Documents(
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), lengths
    )


def _positions(sizes: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(size) for size in row]) for row in sizes])


@dataclass(frozen=True)
class Shards:
    """What one rank holds of all parameters: (layout, shard in fp32) of each stage. Can be sent by
    a process."""

    data_rank: int
    tensor_rank: int
    parts: list[tuple[FlatLayout, np.ndarray]]


def shards_of(engine: CaseEngine, kind: str) -> Shards:
    """Return a rank's shards of the gradients or of the weights, frozen ones included."""
    parts = [
        (
            part.layout,
            (part.grad_shard if kind == "gradients" else part.read(kind))
            .detach()
            .float()
            .numpy()
            .copy(),
        )
        for _, part in engine.model.parts()
        if part.has_state or kind != "gradients"
    ]
    return Shards(engine.ranks.data.rank, engine.ranks.tensor.rank, parts)


def joined(ranks: Sequence[Shards]) -> dict[str, Tensor]:
    """Return whole values by name, put together from the shards of all ranks; copies must agree in
    every bit."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    of_data: dict[int, list[Shards]] = {}
    for rank in ranks:
        of_data.setdefault(rank.tensor_rank, []).append(rank)
    for some in of_data.values():
        some = sorted(some, key=lambda rank: rank.data_rank)
        for parts in zip(*(rank.parts for rank in some), strict=True):
            layout = parts[0][0]
            flat = torch.from_numpy(np.concatenate([shard for _, shard in parts]))
            for slot in layout.slots:
                spec = slot.spec
                if spec.name not in whole:
                    whole[spec.name] = flat.new_full(spec.shape, float("nan"))
                    seen[spec.name] = torch.zeros(spec.shape, dtype=torch.bool)
                mine = torch.zeros_like(whole[spec.name])
                here = torch.zeros(spec.shape, dtype=torch.bool)
                spec.place(flat[slot.offset : slot.end].view(spec.local_shape), mine)
                spec.place(torch.ones(spec.local_shape, dtype=torch.bool), here)
                twice = here & seen[spec.name]
                copies = mine[twice], whole[spec.name][twice]
                assert torch.allclose(*copies, rtol=0, atol=0, equal_nan=True), (
                    f"copies of {spec.name} differ"
                )
                whole[spec.name][here] = mine[here]
                seen[spec.name] |= here
    assert all(bool(where.all()) for where in seen.values()), "elements that no rank has"
    return whole


@dataclass(frozen=True)
class Result:
    """Whole values, from all ranks, of a short run."""

    losses: list[float]
    grad_norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the first iteration
    weights: dict[str, Tensor]


def run_rank(ranks: Any, options: Options, iterations: int) -> tuple[Any, ...]:
    """Return losses, gradient norms and shards of one rank."""
    engine = CaseEngine(ranks, options)
    initial = shards_of(engine, "weights")
    engine.model.gather_ahead()
    if not iterations:
        loss = ranks.data.sum_in_rank_order(engine.gradients(1).double())
        engine.model.finish()
        return [float(loss) / engine.tokens], [], initial, shards_of(engine, "gradients"), initial
    steps, gradients = [], None
    for iteration in range(1, iterations + 1):
        steps.append(engine.step(iteration))
        gradients = gradients or shards_of(engine, "gradients")
    engine.model.finish()
    losses, norms = ([float(value) for value in column] for column in zip(*steps, strict=True))
    return losses, norms, initial, gradients, shards_of(engine, "weights")


def run_case(options: Options, layout: Layout = (1, 1, False), iterations: int = 0) -> Result:
    """Run a case on ranks that are threads; without iterations, compute one iteration's
    gradients."""
    data, tensor, splits_tokens = layout
    options = {**options, "tensor_parallel": tensor, "sequence_tensor_parallel": splits_tokens}
    return result_of(on_threads(data, tensor, run_rank, options, iterations))


def result_of(ranks: Sequence[tuple[Any, ...]]) -> Result:
    """Put what the ranks return together; all must agree on every bit of what they have in
    common."""
    losses, norms, *shards = zip(*ranks, strict=True)
    assert all(
        np.array_equal(some, of_all[0], equal_nan=True)
        for of_all in (losses, norms)
        for some in of_all
    )
    return Result(losses[0], norms[0], *(joined(some) for some in shards))
