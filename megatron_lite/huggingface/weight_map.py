"""Map each row of our parameters to the tensors of a Hugging Face model: one table for both
directions.

Ours            GPT-2, GPTBigCode, GPT-NeoX    the others
q, k, v rows    one tensor (GPT-NeoX, and      three tensors (Phi-3: one)
                GPTBigCode with as many key
                as query heads: q, k, v of a
                head together)
gate, up rows                                  two tensors (Phi-3, GLM-4: one)
an expert's rows                               tensors of its own (Granite, gpt-oss, and files with
                                               the names in memory: one tensor for all experts)
a tied head     none of its own                none of its own

GPT-2 stores its linear layers ("Conv1D") transposed: (inputs, outputs).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.huggingface.architectures import ARCHITECTURES, biases_of
from megatron_lite.model.gpt import build_gpt, shapes_of


class MappedRows(NamedTuple):
    """Rows of one of our parameters, and their place in a Hugging Face tensor:

        theirs[their_first_row :: step][:rows] = ours[first_row : first_row + rows] + plus

    If `transposed`, `theirs` is the transpose of their tensor, or of one matrix of a stack.
    """

    name: str  # theirs
    first_row: int
    rows: int
    their_first_row: int
    their_shape: tuple[int, ...]  # as stored
    transposed: bool = False
    plus: float = 0.0
    step: int = 1
    matrix: int = 0  # of a stack

    def place(self, theirs: Tensor, like: Tensor) -> Tensor:
        """Return a view of these rows in their tensor. like: rows of ours."""
        if self.transposed:
            rows = theirs.view(-1, *theirs.shape[-2:])[self.matrix].t()
        else:
            rows = theirs.view(-1, *like.shape[1:])
        return rows[self.their_first_row :: self.step][: self.rows]


class Constant(NamedTuple):
    """A Hugging Face tensor that none of our parameters fills: every element is `value`."""

    name: str
    shape: tuple[int, ...]
    value: float


# Columns: our module, GPT-2's and GPTBigCode's, and the other architectures' ("-": none, or several
# tensors; *: the number of an expert). The name of one of our parameters is that of their tensor. The
# second part of the table is inside a block. The table of architectures has other names.
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
    mlp.gate                   -                 mlp.gate_proj
    mlp.up                     mlp.c_fc          mlp.up_proj
    mlp.down                   mlp.c_proj        mlp.down_proj
    mlp.shared.gate            -                 mlp.shared_experts.gate_proj
    mlp.shared.up              -                 mlp.shared_experts.up_proj
    mlp.shared.down            -                 mlp.shared_experts.down_proj
    mlp.experts.gate           -                 mlp.experts.*.gate_proj
    mlp.experts.up             -                 mlp.experts.*.up_proj
    mlp.experts.down           -                 mlp.experts.*.down_proj
    mlp.router                 -                 mlp.gate
    mlp.router.balance         -                 mlp.gate.e_score_correction_bias
    attention.sinks            -                 self_attn.sinks
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
    name: str,
    shape: tuple[int, ...],
    architecture: str,
    model: ModelConfig,
    in_memory: bool = False,
) -> list[MappedRows]:
    """Split one of our parameters into pieces, in order, that cover its rows.

    in_memory: for files with transformers' own names of the parameters; see `_FAMILIES`.

    Raises:
        KeyError: if the architecture has no such parameter.
    """
    owner, kind = name.rsplit(".", 1)  # kind: weight or bias
    modules = _modules(architecture)
    if in_memory:
        modules = {**modules, **ARCHITECTURES[architecture].names_in_memory}
    is_weight_of_norm = owner.endswith("norm") and kind == "weight"
    plus = _ones(architecture) * (is_weight_of_norm and model.zero_centered_normalization)
    if not owner.startswith("blocks."):
        return [MappedRows(f"{modules[owner]}.{kind}", 0, shape[0], 0, shape, plus=plus)]
    _, index, part = owner.split(".", 2)
    prefix = f"{_prefix(modules)}{'h' if architecture in _MODULES else 'layers'}.{index}"
    if part.startswith("mlp.experts.") and (whole := modules.get(f"{part}.{kind}")):
        transposed = ARCHITECTURES[architecture].transposed_experts
        return list(_stacked(f"{prefix}.{whole}", part, shape, transposed, model))
    if whole := modules.get(f"{part}.{kind}"):
        return [MappedRows(f"{prefix}.{whole}", 0, shape[0], 0, shape)]
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
    count = model.num_experts if "*" in modules[part] else 1
    fused = part == "mlp.up" and modules[part] != "mlp.up_proj"
    names = [modules[part]]
    if part.endswith(".up") and model.gated and not fused:
        names.insert(0, modules[part.replace(".up", ".gate")])
    rows //= count * len(names)
    each = [name.replace("*", str(expert)) for expert in range(count) for name in names]
    return [(name, index * rows, rows, 0) for index, name in enumerate(each)]


def _stacked(
    theirs: str, part: str, shape: tuple[int, ...], transposed: bool, model: ModelConfig
) -> Iterator[MappedRows]:
    """Map a parameter of all experts to one tensor. transposed: see `_FAMILIES`."""
    rows = shape[0] // model.num_experts
    their_shape = (model.num_experts, rows, *shape[1:])
    if not transposed:
        yield MappedRows(theirs, 0, shape[0], 0, their_shape)
        return
    is_weight, turns = len(shape) == 2, 2 if part == "mlp.experts.up" else 1
    if is_weight:
        their_shape = (model.num_experts, shape[1], rows)
    for first in range(0, shape[0], rows // turns):
        expert, half = divmod(first, rows)
        turn = half * turns // rows
        yield MappedRows(
            *(theirs, first, rows // turns),
            turn if is_weight else expert * rows + turn,
            their_shape,
            transposed=is_weight,
            step=turns,
            matrix=expert,
        )


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


def always_fp32(name: str, architecture: str) -> bool:
    """Return whether a tensor of theirs is in fp32 in every file."""
    modules = _modules(architecture)
    return any(f".{modules[module]}." in name for module in ARCHITECTURES[architecture].fp32)


def extra_layer(name: str, architecture: str, model: ModelConfig) -> int | None:
    """Return the number of a tensor's layer if that follows the model's layers and predicts later
    tokens, else None."""
    if "num_nextn_predict_layers" not in ARCHITECTURES[architecture].defaults:
        return None
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found and int(found[1]) >= model.num_layers else None


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
