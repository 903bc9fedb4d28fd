"""What layers keep of one micro-batch from its forward to its backward pass. Exact bytes, no tensors.

That is what the functions of `kernels/` save, counted once where several of them save views of one tensor; the tests
compare it with what autograd holds. What is needed besides for a moment is in `transients.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import REFERENCES, Kernels

FP32_BYTES = 4


@dataclass(frozen=True)
class Pass:
    """One micro-batch on its way through a model, and the level of recomputation."""

    batch: int  # samples
    length: int  # tokens of a sample
    itemsize: int  # bytes of an element in the training dtype
    residual_itemsize: int  # in the residual stream
    grad_itemsize: int  # and in the gradient buffers
    on_gpu: bool  # where attention takes other ways
    chunk_tokens: int  # whose logits exist at a time
    trained: Collection[str]  # names of the parameters that are not frozen
    level: str  # mlp_recompute_level
    kernels: Kernels = REFERENCES

    @property
    def cast_itemsize(self) -> int:
        """Bytes of an element of a copy in the training dtype of something in fp32: none if that is fp32, too."""
        return 0 if self.itemsize == FP32_BYTES else self.itemsize

    @property
    def makes_weight_gradients(self) -> bool:
        """Whether a weight's gradient is made apart before it gets into its buffer: see `kernels/linear.py`."""
        return self.itemsize != self.grad_itemsize and not self.on_gpu

    @property
    def attention(self) -> str:
        """What computes attention; with documents, which cost nothing more, as without."""
        return "math" if self.length == 1 else self.kernels.attention

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def size(self, *channels: int) -> int:
        """Bytes of tensors with so many channels for each token, in the training dtype."""
        return self.tokens * sum(channels) * self.itemsize

    def residual(self, channels: int) -> int:
        """The same, in the residual stream."""
        return self.tokens * channels * self.residual_itemsize

    def trains(self, name: str) -> bool:
        """Whether a parameter, or any whose name begins so, is trained."""
        return any(trained.startswith(name) for trained in self.trained)


class Kept(dict[str, int]):
    """Bytes by what they are."""

    def add(self, what: str, size: int, condition: bool = True) -> None:
        """Count something, if there is any of it."""
        if condition and size:
            self[what] = self.get(what, 0) + size

    @property
    def total(self) -> int:
        return sum(self.values())


def kept_by_layer(model: ModelConfig, one: Pass, made: Sequence[Kept]) -> list[Kept]:
    """What is made, but of the first `recompute_layers` blocks the input alone: see `zero/recompute.py`."""
    kept = list(made)
    for index in range(1, one.kernels.recompute_layers + 1):
        kept[index] = Kept()
        runs_backward = bool(made[index]) or one.trains(f"blocks.{index - 1}.")
        kept[index].add("block inputs", one.residual(model.hidden_size), runs_backward)
    return kept


def made_by_layer(model: ModelConfig, one: Pass) -> list[Kept]:
    """Bytes that the backward passes of embedding, blocks and head read; none before the first trained layer."""
    embedding, reached = Kept(), one.trains("embedding.word.") or one.trains("embedding.position.")
    if model.input_embedding_norm:
        reached = _norm(embedding, model, one, "embedding.norm.", reached, one.residual(model.hidden_size))
    embedding.add("dropout masks", one.residual(model.hidden_size), reached and bool(model.embedding_dropout))
    layers = [embedding]
    for index in range(model.num_layers):
        block, reached = _block(model, one, f"blocks.{index}.", reached)
        layers.append(block)
    return [*layers, _head(model, one, reached)]


def _block(model: ModelConfig, one: Pass, name: str, reached: bool) -> tuple[Kept, bool]:
    """`reached`: whether the backward pass goes on to its input. Each part returns the same of its output."""
    kept, stream = Kept(), one.residual(model.hidden_size)
    branch = _norm(kept, model, one, f"{name}attention_norm.", reached, stream)
    branch = _attention(kept, model, one, f"{name}attention.", branch)
    branch = _branch(kept, model, one, f"{name}attention_output_norm.", branch)
    reached = reached or branch
    branch = _norm(kept, model, one, f"{name}mlp_norm.", reached, stream)
    branch = _mlp(kept, model, one, f"{name}mlp.", branch)
    branch = _branch(kept, model, one, f"{name}mlp_output_norm.", branch)
    return kept, reached or branch


def _norm(
    kept: Kept, model: ModelConfig, one: Pass, name: str, reached: bool, size: int, what: str = "norm inputs"
) -> bool:
    """Its input of `size` bytes and its statistics."""
    reached = reached or one.trains(name)
    kept.add(what, size, reached)
    kept.add("norm statistics", _statistics(model, one), reached)
    return reached


def _statistics(model: ModelConfig, one: Pass, heads: int = 1) -> int:
    """In fp32: 1 / rms, or mean and 1 / deviation, of each token or each of its heads."""
    return one.tokens * heads * FP32_BYTES * (1 if model.normalization_type == "rms_norm" else 2)


def _branch(kept: Kept, model: ModelConfig, one: Pass, norm: str, reached: bool) -> bool:
    """What is between a branch's last product and the residual stream."""
    if model.hybrid_norm:
        reached = _norm(kept, model, one, norm, reached, one.size(model.hidden_size), what="branch norm inputs")
    kept.add("dropout masks", one.size(model.hidden_size), reached and model.hidden_dropout > 0)
    return reached


def _attention(kept: Kept, model: ModelConfig, one: Pass, name: str, reached: bool) -> bool:
    """Its input, query, key and value, and the context; with that, kernels of a GPU keep a number of each row.

    Norms of queries and keys keep the projection, in which the values are, and queries and keys are beside it.
    """
    assert model.head_groups and model.kv_channels
    query, group = model.num_attention_heads * model.kv_channels, model.head_groups * model.kv_channels
    kept.add("linear inputs", one.size(model.hidden_size), one.trains(f"{name}query_key_value.weight"))
    reached = reached or one.trains(f"{name}query_key_value.")
    if model.qk_layernorm:
        reached = reached or one.trains(f"{name}query_norm.") or one.trains(f"{name}key_norm.")
        kept.add("normalized query, key", one.size(query, group), reached)
        kept.add("norm statistics", _statistics(model, one, model.num_attention_heads + model.head_groups), reached)
    output = one.trains(f"{name}output.weight")
    fused = reached and one.attention != "math"
    kept.add("query, key, value", one.size(query, group, group), reached)
    kept.add("attention outputs", one.size(query), output or fused)
    kept.add("attention statistics", one.tokens * model.num_attention_heads * FP32_BYTES, fused)
    return reached or one.trains(f"{name}output.")


def _mlp(kept: Kept, model: ModelConfig, one: Pass, name: str, reached: bool) -> bool:
    """See `kernels/mlp.py`: what is kept of input, up output and activation, level by level."""
    assert model.ffn_hidden_size is not None
    up_size = model.ffn_hidden_size * (2 if model.gated else 1)
    up, down = (one.trains(f"{name}{weight}.weight") for weight in ("up", "down"))
    passes_through = reached or one.trains(f"{name}up.")
    reads_hidden = passes_through or (down and one.level != "none")
    kept.add("linear inputs", one.size(model.hidden_size), up or (reads_hidden and one.level == "full"))
    kept.add("MLP up outputs", one.size(up_size), reads_hidden and one.level != "full")
    kept.add("MLP activations", one.size(model.ffn_hidden_size), down and one.level == "none")
    return passes_through or one.trains(f"{name}down.")


def _head(model: ModelConfig, one: Pass, reached: bool) -> Kept:
    """Its norm, and the gradient of the hidden states, which the loss makes in the forward pass."""
    kept = Kept()
    normed = _norm(kept, model, one, "head.norm.", reached, one.residual(model.hidden_size))
    kept.add("gradient made by the loss", one.size(model.hidden_size), normed)
    return kept
