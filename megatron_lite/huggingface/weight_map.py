"""Map each row of our parameters to the tensors of a Hugging Face model: one table for both
directions.

Ours            GPT-2, GPTBigCode, GPT-NeoX    the others
q, k, v rows    one tensor (GPT-NeoX, and      three tensors (Phi-3: one)
                GPTBigCode with as many key
                as query heads: q, k, v of a
                head together)
gate, up rows                                  two tensors (Phi-3, GLM-4: one)
a tied head     none of its own                none of its own

GPT-2 stores its linear layers ("Conv1D") transposed: (inputs, outputs).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.config import ModelConfig
from megatron_lite.huggingface.architectures import ARCHITECTURES, biases_of
from megatron_lite.model.gpt import build_gpt, shapes_of


class MappedRows(NamedTuple):
    """Rows of one of our parameters, and their place in a Hugging Face tensor:

        theirs[their_first_row : their_first_row + rows] = ours[first_row : first_row + rows] + plus

    If `transposed`, `theirs` is the transpose of their tensor.
    """

    name: str  # theirs
    first_row: int
    rows: int
    their_first_row: int
    their_shape: tuple[int, ...]  # as stored
    transposed: bool = False
    plus: float = 0.0


class Constant(NamedTuple):
    """A Hugging Face tensor that none of our parameters fills: every element is `value`."""

    name: str
    shape: tuple[int, ...]
    value: float


# Columns: our module, GPT-2's and GPTBigCode's, and the other architectures' ("-": none, or several
# tensors). The second part of the table is inside a block. The table of architectures has other
# names.
_TABLE = """
    embedding.word             transformer.wte   model.embed_tokens
    embedding.position         transformer.wpe   -
    head.norm                  transformer.ln_f  model.norm
    head.output                lm_head           lm_head

    attention_norm             ln_1              input_layernorm
    attention.query_key_value  attn.c_attn       -
    attention.query_norm       -                 self_attn.q_norm
    attention.key_norm         -                 self_attn.k_norm
    attention.output           attn.c_proj       self_attn.o_proj
    attention_output_norm      -                 post_attention_layernorm
    mlp_norm                   ln_2              post_attention_layernorm
    mlp_output_norm            -                 post_feedforward_layernorm
    mlp.up                     mlp.c_fc          mlp.up_proj
    mlp.down                   mlp.c_proj        mlp.down_proj
"""
_ROWS = [line.split() for line in _TABLE.splitlines() if line]
_GPT, _OTHERS = ({row[0]: row[column] for row in _ROWS if row[column] != "-"} for column in (1, 2))
_MODULES = MappingProxyType({"gpt2": _GPT, "gpt_bigcode": _GPT})
# Suffixes of buffers that older versions of transformers saved with the weights.
_BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".rotary_emb.inv_freq",
)


def pieces(
    name: str, shape: tuple[int, ...], architecture: str, model: ModelConfig
) -> list[MappedRows]:
    """Split one of our parameters into pieces, in order, that cover its rows.

    Raises:
        KeyError: if the architecture has no such parameter.
    """
    owner, kind = name.rsplit(".", 1)  # kind: weight or bias
    modules = _modules(architecture)
    is_weight_of_norm = owner.endswith("norm") and kind == "weight"
    plus = _ones(architecture) * (is_weight_of_norm and model.zero_centered_normalization)
    if not owner.startswith("blocks."):
        return [MappedRows(f"{modules[owner]}.{kind}", 0, shape[0], 0, shape, plus=plus)]
    _, index, part = owner.split(".", 2)
    prefix = f"{_prefix(modules)}{'h' if modules is _GPT else 'layers'}.{index}"
    parts = _parts(part, shape[0], modules, architecture, model)
    transposed, found = architecture == "gpt2" and len(shape) == 2, []
    totals: Counter[str] = Counter()  # rows by tensor
    for theirs, _, rows, _ in parts:
        totals[theirs] += rows
    for theirs, first, rows, their_first in parts:
        their_shape = (*shape[1:], totals[theirs]) if transposed else (totals[theirs], *shape[1:])
        theirs_name = f"{prefix}.{theirs}.{kind}"
        found.append(
            MappedRows(theirs_name, first, rows, their_first, their_shape, transposed, plus)
        )
    return found


def _modules(architecture: str) -> dict[str, str]:
    return _MODULES.get(architecture) or _OTHERS | ARCHITECTURES[architecture].names


def _prefix(modules: dict[str, str]) -> str:
    """Return what the names of all tensors but the head's begin with: `model.`"""
    return modules["embedding.word"].split(".")[0] + "."


def _ones(architecture: str) -> float:
    """Return the number in files for a norm's weight of 1."""
    return 0.0 if ARCHITECTURES[architecture].only.get("zero_centered_normalization") else 1.0


def by_tensor(found: Iterable[MappedRows]) -> dict[str, list[MappedRows]]:
    """Group pieces by tensor name."""
    tensors: dict[str, list[MappedRows]] = {}
    for piece in found:
        tensors.setdefault(piece.name, []).append(piece)
    return tensors


def _parts(
    part: str, rows: int, modules: dict[str, str], architecture: str, model: ModelConfig
) -> list[tuple[str, int, int, int]]:
    """Split one part of a block into (their layer, our first row, rows, their first row)."""
    if part == "attention.query_key_value":
        return list(_query_key_value(modules.get(part), architecture, model))
    if part == "mlp.up" and modules[part] == "mlp.up_proj" and model.gated:
        return [("mlp.gate_proj", 0, rows // 2, 0), ("mlp.up_proj", rows // 2, rows // 2, 0)]
    return [(modules[part], 0, rows, 0)]


def _query_key_value(
    fused: str | None, architecture: str, model: ModelConfig
) -> Iterator[tuple[str, int, int, int]]:
    heads = model.num_attention_heads
    groups = model.head_groups
    channels = model.kv_channels
    sizes = (heads * channels, groups * channels, groups * channels)
    firsts = (0, sizes[0], sizes[0] + sizes[1])
    if fused and architecture in ("gpt_bigcode", "gpt_neox") and groups == heads:
        for which, first in enumerate(firsts):
            for head in range(heads):
                yield (
                    fused,
                    first + head * channels,
                    channels,
                    (3 * head + which) * channels,
                )
    elif fused:
        yield fused, 0, sum(sizes), 0
    else:
        for letter, first, size in zip("qkv", firsts, sizes, strict=True):
            parts = [(0, size, 0)]
            if ARCHITECTURES[architecture].interleaved and letter != "v":
                parts = _interleaved(size, channels, model.rotated_channels)
            for ours, rows, theirs in parts:
                yield f"self_attn.{letter}_proj", first + ours, rows, theirs


def _interleaved(size: int, channels: int, rotated: int) -> list[tuple[int, int, int]]:
    """Return (our first row, rows, their first row) for heads of which files rotate channels 2 j and
    2 j + 1 together, and we j and j + r / 2: scores do not depend on the order of channels."""
    found = []
    for head in range(0, size, channels):
        for row in range(rotated):
            half, pair = divmod(row, rotated // 2)
            found.append((head + row, 1, head + 2 * pair + half))
        if rotated < channels:
            found.append((head + rotated, channels - rotated, head + rotated))
    return found


def constants(architecture: str, model: ModelConfig) -> Iterator[Constant]:
    """Yield the architecture's tensors that no parameter of the model fills.

    Norm weights are ones and biases are zeros, which is exact.
    """
    theirs = dataclasses.replace(
        model, use_layer_norm_weight=True, **biases_of(architecture, model)
    )
    ours = shapes_of(build_gpt(model, 1))
    for name, shape in shapes_of(build_gpt(theirs, 1)).items():
        if name not in ours:
            tensors = {
                piece.name: piece.their_shape for piece in pieces(name, shape, architecture, model)
            }
            value = _ones(architecture) if name.endswith("norm.weight") else 0.0
            yield from (
                Constant(theirs_name, theirs_shape, value)
                for theirs_name, theirs_shape in tensors.items()
            )


def known_name(name: str, architecture: str, model: ModelConfig) -> str | None:
    """Return the name that `pieces` uses for a tensor in a file; None if the tensor is not a
    weight.

    Files of a model without its head, such as the original GPT-2, omit the first part of every
    name. Buffers, the head of a model that ties it to the embedding, and what reads images are not
    weights.
    """
    # of a Gemma 3 of texts and images; transformers has had two places for its text part
    name = name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    if architecture == "gpt_neox" and name == "embed_out.weight":  # before transformers 5
        name = "lm_head.weight"
    if name.endswith(_BUFFERS) or (name == "lm_head.weight" and model.tie_word_embeddings):
        return None
    prefix = _prefix(_modules(architecture))
    return name if name.startswith((prefix, "lm_head.")) else prefix + name
