"""Rotary frequencies against Hugging Face's own functions, and what the table of a model holds."""

import dataclasses
import itertools
from collections.abc import Container
from typing import Any

import pytest
import torch

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.rotary import angle_table, wavelengths
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


def theirs(model: ModelConfig, left_out: Container[str] = ()) -> Any:
    """A LlamaConfig of the same rope; those of our names in `left_out` are not in its dict, or
    null."""
    from transformers import LlamaConfig

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


def rope(
    kind: str, factor: float | None, original: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return options; those of scaling in `more` without "rope_"."""
    given = {"type": kind, "factor": factor, "original_max_position_embeddings": original, **more}
    plain = ("rotary_base", "rotary_percent", "kv_channels", "max_position_embeddings")
    return {
        name if name in plain else f"rope_{name}": value
        for name, value in given.items()
        if value is not None
    }


ROPES: list[dict[str, Any]] = [
    *(
        rope("linear", factor, rotary_base=base)
        for factor in (1.0, 2.5, 8.0)
        for base in (10000.0, 500000.0)
    ),
    rope("linear", 3.0, rotary_percent=0.5),
    *(rope("llama3", factor, 8192, rotary_base=500000.0) for factor in (8.0, 32.0)),  # 3.1 and 3.2
    rope("llama3", 4.0, 40),
    *(
        rope("llama3", 5.0, original, low_freq_factor=low, high_freq_factor=high, kv_channels=128)
        for low, high in ((0.5, 0.75), (1.0, 64.0), (3.0, 9.0))
        for original in (100, 4096)
    ),
    *(
        rope("yarn", factor, original, rotary_base=base, truncate=truncate)
        for factor, original, base, truncate in itertools.product(
            (1.0, 1.7, 4.0, 40.0), (4, 2048, 32768), (100.0, 1e6), (True, False)
        )
    ),
    *(  # DeepSeek's
        rope("yarn", 40.0, 4096, mscale=mscale, mscale_all_dim=all_dim)
        for mscale, all_dim in ((1.0, 1.0), (0.707, 1.0), (1.0, 0.3))
    ),
    rope("yarn", 1.0, 64, mscale=2.0, mscale_all_dim=1.0),
    rope("yarn", 16.0, 4096, attention_factor=0.9),
    rope("yarn", 4.0, beta_fast=20.0, beta_slow=2.5, rotary_percent=0.75),
    rope("yarn", 4.0, 1000, beta_fast=3.0, beta_slow=3.0, truncate=False),  # a ramp of no length
    rope("yarn", None, 500, max_position_embeddings=2000),
    rope("yarn", None, 500, max_position_embeddings=1999, kv_channels=2),
]


def check_frequencies(
    options: dict[str, Any], model: ModelConfig, left_out: Container[str] = ()
) -> None:
    """Compare frequencies and factor with those of transformers, to the last bit."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS[model.rope_type](theirs(model, left_out), CPU)
    assert torch.equal(rotary_frequencies(model, model.rotated_channels, CPU), expected), options
    assert attention_factor(model) == factor, options


@pytest.mark.filterwarnings("ignore")
def test_frequencies_and_factor_are_hugging_faces() -> None:
    """For every type and parameter."""
    for options in ROPES:
        check_frequencies(options, resolved(**options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [rope("yarn", 4.0), rope("yarn", None, 500), rope("llama3", 8.0)], ids=str
)
def test_missing_rope_options_are_filled_in_as_in_transformers(options: dict[str, Any]) -> None:
    """Original length, factor of yarn, ends of the ramp, rounding: from a dict that has only what
    was given."""
    model = resolved(**options, max_position_embeddings=3000)
    check_frequencies(
        options, model, [name for name in THEIR_NAMES if name not in options and "freq" not in name]
    )


@pytest.mark.parametrize(
    "options",
    [dict(), dict(rotary_base=123.0), rope("llama3", 8.0, 100), rope("yarn", 8.0, 100)],
    ids=str,
)
def test_cos_and_sin_are_those_of_a_llama(options: dict[str, Any]) -> None:
    """Tables for positions in order and for any positions agree to the last bit."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = resolved(**options, max_position_embeddings=800)
    rotary = Rotary(model, 800)
    for positions, table in (
        (torch.arange(800)[None], rotary.tables(torch.empty(0)).full),
        (torch.tensor([[799, 3], [0, 77]]), rotary.at(torch.tensor([[799, 3], [0, 77]])).window),
    ):
        expected = LlamaRotaryEmbedding(theirs(model))(
            torch.empty(0, dtype=torch.float32), positions
        )
        for ours, exact in zip(table, expected, strict=True):
            half = exact[..., : exact.shape[-1] // 2]
            assert torch.equal(ours.expand_as(half), half) and ours.is_contiguous()


def test_plain_tables_are_as_ever() -> None:
    """A factor of 1 multiplies nothing, and the table is made once."""
    model = resolved()
    rotary = Rotary(model, 9)
    found = rotary.tables(torch.empty(0)).full
    expected = angle_table(1.0 / wavelengths(64, 10000.0, CPU), 9)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(a is b for a, b in zip(found, rotary.tables(torch.empty(0)).window, strict=True))
    stretched = dataclasses.replace(model, rope_type="linear", rope_factor=2.0)
    halved = Rotary(stretched, 9).tables(torch.empty(0)).full
    assert all(torch.equal(a[::2], b[:5]) for a, b in zip(halved, expected, strict=True))


def test_longrope_frequencies_are_those_of_transformers() -> None:
    """Short and long factors by the length of the table, and the factor on cos and sin."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short, long = ([scale + pair / 8 for pair in range(24)] for scale in (1.0, 2.0))
    more = dict(rotary_percent=0.75, rope_original_max_position_embeddings=16)
    more |= dict(rope_short_factor=tuple(short), rope_long_factor=tuple(long))
    model = resolved(rope_type="longrope", max_position_embeddings=64, **more)
    rope = dict(rope_type="longrope", short_factor=short, long_factor=long)
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope | dict(partial_rotary_factor=0.75),
    )
    for length in (16, 17):
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=length)
        found = rotary_frequencies(model, 48, CPU, length > 16)
        assert torch.equal(found, expected) and attention_factor(model) == factor
        cos, _ = Rotary(model, length).tables(torch.empty(0)).full
        assert torch.equal(cos, angle_table(expected, length)[0] * factor)
