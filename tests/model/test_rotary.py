"""Rotary frequencies against Hugging Face's own functions, and what the table of a model holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.rotary import rotary_table
from megatron_lite.model.rotary import Rotary, attention_factor, rotary_frequencies
from tests.support.harness import tiny_config

CPU = torch.device("cpu")
THEIR_NAMES = {
    "rope_factor": "factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_truncate": "truncate",
}


def resolved(**options: Any) -> ModelConfig:
    """A model of one head of 64 channels."""
    sizes = dict(hidden_size=64, num_attention_heads=1, use_rotary_embeddings=True)
    return tiny_config(1, **{**sizes, **options}).model


def theirs(model: ModelConfig, left_out: Container[str] = ()) -> LlamaConfig:
    """The same rope as Hugging Face has it; those of our names in `left_out` are not in its dict, or null."""
    parameters: dict[str, Any] = {"rope_type": model.rope_type, "rope_theta": model.rotary_base}
    if model.rotary_percent != 1.0:
        parameters["partial_rotary_factor"] = model.rotary_percent
    for ours, their in THEIR_NAMES.items():
        if ours in left_out:
            parameters |= {"factor": None} if their == "factor" else {}
        elif getattr(model, ours) is not None:
            parameters[their] = getattr(model, ours)
    return LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        head_dim=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=parameters,
    )


ROPES: list[dict[str, Any]] = [
    *(
        dict(rope_type="linear", rope_factor=factor, rotary_base=base)
        for factor in (1.0, 2.5, 8.0)
        for base in (10000.0, 500000.0)
    ),
    dict(rope_type="linear", rope_factor=3.0, rotary_percent=0.5),
    dict(rope_type="llama3", rope_factor=8.0, rope_original_max_position_embeddings=8192, rotary_base=500000.0),  # 3.1
    dict(rope_type="llama3", rope_factor=32.0, rope_original_max_position_embeddings=8192, rotary_base=500000.0),  # 3.2
    dict(rope_type="llama3", rope_factor=4.0, rope_original_max_position_embeddings=40),
    *(
        dict(
            rope_type="llama3",
            rope_factor=5.0,
            rope_low_freq_factor=low,
            rope_high_freq_factor=high,
            kv_channels=128,
            rope_original_max_position_embeddings=original,
        )
        for low, high in ((0.5, 0.75), (1.0, 64.0), (3.0, 9.0))
        for original in (100, 4096)
    ),
    *(
        dict(
            rope_type="yarn",
            rope_factor=factor,
            rope_original_max_position_embeddings=original,
            rotary_base=base,
            rope_truncate=truncate,
        )
        for factor, original, base, truncate in itertools.product(
            (1.0, 1.7, 4.0, 40.0), (4, 2048, 32768), (100.0, 1e6), (True, False)
        )
    ),
    *(
        dict(
            rope_type="yarn",
            rope_factor=40.0,
            rope_original_max_position_embeddings=4096,
            rope_mscale=mscale,
            rope_mscale_all_dim=all_dim,
        )
        for mscale, all_dim in ((1.0, 1.0), (0.707, 1.0), (1.0, 0.3))
    ),  # DeepSeek's
    dict(
        rope_type="yarn",
        rope_factor=1.0,
        rope_original_max_position_embeddings=64,
        rope_mscale=2.0,
        rope_mscale_all_dim=1.0,
    ),
    dict(rope_type="yarn", rope_factor=16.0, rope_original_max_position_embeddings=4096, rope_attention_factor=0.9),
    dict(rope_type="yarn", rope_factor=4.0, rope_beta_fast=20.0, rope_beta_slow=2.5, rotary_percent=0.75),
    dict(
        rope_type="yarn",
        rope_factor=4.0,
        rope_beta_fast=3.0,
        rope_beta_slow=3.0,
        rope_truncate=False,
        rope_original_max_position_embeddings=1000,
    ),  # a ramp of no length
    dict(rope_type="yarn", rope_original_max_position_embeddings=500, max_position_embeddings=2000),
    dict(rope_type="yarn", rope_original_max_position_embeddings=500, max_position_embeddings=1999, kv_channels=2),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ROPES, ids=str)
def test_frequencies_and_factor_are_hugging_faces(options: dict[str, Any]) -> None:
    """To the last bit; for every type and parameter."""
    model = resolved(**options)
    expected, factor = ROPE_INIT_FUNCTIONS[model.rope_type](theirs(model), CPU)
    assert torch.equal(rotary_frequencies(model, model.rotated_channels, CPU), expected)
    assert attention_factor(model) == factor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        dict(rope_type="yarn", rope_factor=4.0),
        dict(rope_type="yarn", rope_original_max_position_embeddings=500),
        dict(rope_type="llama3", rope_factor=8.0),
    ],
    ids=str,
)
def test_missing_rope_options_are_filled_in_as_in_transformers(options: dict[str, Any]) -> None:
    """Original length, factor of yarn, ends of the ramp, rounding: from a dict that has only what was given."""
    model = resolved(**options, max_position_embeddings=3000)
    config = theirs(model, [name for name in THEIR_NAMES if name not in options and "freq" not in name])
    expected, factor = ROPE_INIT_FUNCTIONS[model.rope_type](config, CPU)
    assert (
        torch.equal(rotary_frequencies(model, model.rotated_channels, CPU), expected)
        and attention_factor(model) == factor
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(rotary_base=123.0),
        dict(rope_type="llama3", rope_factor=8.0, rope_original_max_position_embeddings=100),
        dict(rope_type="yarn", rope_factor=8.0, rope_original_max_position_embeddings=100),
    ],
    ids=str,
)
def test_cos_and_sin_are_those_of_a_llama(options: dict[str, Any]) -> None:
    """Tables for positions in order and for any positions agree to the last bit."""
    model = resolved(**options, max_position_embeddings=800)
    rotary = Rotary(model, 800)
    for positions, table in (
        (torch.arange(800)[None], rotary.table(torch.empty(0))),
        (torch.tensor([[799, 3], [0, 77]]), rotary.at(torch.tensor([[799, 3], [0, 77]]))),
    ):
        expected = LlamaRotaryEmbedding(theirs(model))(torch.empty(0, dtype=torch.float32), positions)
        for ours, exact in zip(table, expected, strict=True):
            half = exact[..., : exact.shape[-1] // 2]
            assert torch.equal(ours.expand_as(half), half) and ours.is_contiguous()


def test_plain_tables_are_as_ever() -> None:
    """A factor of 1 multiplies nothing, and the table is made once."""
    model = resolved()
    rotary = Rotary(model, 9)
    found, expected = rotary.table(torch.empty(0)), rotary_table(9, 64, 10000.0, CPU)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(a is b for a, b in zip(found, rotary.table(torch.empty(0)), strict=True))
    stretched = dataclasses.replace(model, rope_type="linear", rope_factor=2.0)
    halved = Rotary(stretched, 9).table(torch.empty(0))
    assert all(torch.equal(a[::2], b[:5]) for a, b in zip(halved, expected, strict=True))
