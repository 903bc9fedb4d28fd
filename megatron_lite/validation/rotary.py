"""Rules about rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron_lite.config.model import rotary_base
from megatron_lite.config.values import written
from megatron_lite.validation.messages import Problem, fill, typed

# For each option the types of --rope_type that read it, and what it is for these if it is not given: None where it
# stays unset, or where a rule below says what.
_USES: Mapping[str, tuple[tuple[str, ...], Any]] = MappingProxyType(
    {
        "rope_factor": (("linear", "llama3", "yarn"), None),
        "rope_original_max_position_embeddings": (("llama3", "yarn"), None),
        "rope_low_freq_factor": (("llama3",), 1.0),
        "rope_high_freq_factor": (("llama3",), 4.0),
        "rope_beta_fast": (("yarn",), 32.0),
        "rope_beta_slow": (("yarn",), 1.0),
        "rope_attention_factor": (("yarn",), None),
        "rope_mscale": (("yarn",), None),
        "rope_mscale_all_dim": (("yarn",), None),
        "rope_truncate": (("yarn",), True),
    }
)


def rotary(values: dict[str, Any]) -> Iterator[Problem]:
    """Base, channels and stretched frequencies. Needs kv_channels and max_position_embeddings."""
    yield from _base(values)
    if values["use_rotary_embeddings"]:
        yield from _channels(values)
    elif values["rotary_percent"] != 1.0 or values["rope_type"] != "default":
        yield from _without_rotation(values)
        return
    kind, ignored = values["rope_type"], False
    for name, (types, default) in _USES.items():
        if kind in types:
            fill(values, name, default)
        elif values[name] is not None:
            ignored = True
            yield Problem(
                (name, "rope_type"),
                f"{typed(values, name)}: --rope_type={kind} does not use it; leave it out, or write --rope_type="
                f"{' or '.join(types)}",
            )
    if kind != "default" and not ignored:
        yield from _stretched(values)


def _base(values: dict[str, Any]) -> Iterator[Problem]:
    """Given as it is or as minus its logarithm."""
    base, scale = values["rotary_base"], values["rotary_embedding_scale"]
    if base is None:
        values["rotary_base"] = 10000.0 if scale is None else rotary_base(scale)
    fill(values, "rotary_embedding_scale", -math.log(values["rotary_base"]))
    if abs(values["rotary_embedding_scale"] + math.log(values["rotary_base"])) > 1e-9:
        yield Problem(
            ("rotary_base", "rotary_embedding_scale"),
            f"{typed(values, 'rotary_base', 'rotary_embedding_scale')}: two names of one number (the scale is minus "
            "the base's logarithm), and they differ; write one of them",
        )


def _channels(values: dict[str, Any]) -> Iterator[Problem]:
    """Those that rotate do so in pairs."""
    channels, part = values["kv_channels"], values["rotary_percent"]
    if part == 1.0 and channels % 2:
        yield Problem(
            ("kv_channels", "use_rotary_embeddings", "hidden_size", "num_attention_heads"),
            f"--use_rotary_embeddings=1: a head of {channels} channels (kv_channels) cannot be rotated in "
            f"pairs; write an even --kv_channels",
        )
    turned = int(channels * part)
    if part < 1.0 and (turned % 2 or turned == 0):
        fits = [even for even in (turned - 1, turned + 1, 2) if even % 2 == 0 and 0 < even <= channels]
        advice = f"--rotary_percent={_percent(fits[0], channels)} rotates {fits[0]}" if fits else "more --kv_channels"
        yield Problem(
            ("rotary_percent", "kv_channels"),
            f"{typed(values, 'rotary_percent')}: of the {channels} channels of a head (kv_channels) {turned} would be "
            f"rotated, and they are in pairs; write an even part of them: {advice}",
        )


def _percent(turned: int, channels: int) -> str:
    """The shortest decimal fraction that makes so many of the channels."""
    parts = (math.ceil(turned / channels * 10**digits) / 10**digits for digits in range(1, 16))
    return next((written(part) for part in parts if int(channels * part) == turned), f"{turned} / {channels}")


def _without_rotation(values: dict[str, Any]) -> Iterator[Problem]:
    for name, plain in (("rotary_percent", 1.0), ("rope_type", "default")):
        if values[name] != plain:
            yield Problem(
                (name, "use_rotary_embeddings"),
                f"{typed(values, name)}: nothing is rotated; write --use_rotary_embeddings=1, or leave it out",
            )


def _stretched(values: dict[str, Any]) -> Iterator[Problem]:
    """Fill in as Hugging Face does: the original length is max_position_embeddings, yarn's factor their quotient."""
    kind, longest, original = values["rope_type"], "max_position_embeddings", "rope_original_max_position_embeddings"
    derives = kind == "yarn" and values[original] is not None
    if values["rope_factor"] is None and not derives:
        also = f" or --{original}=<positions>" if kind == "yarn" else ""
        yield Problem(
            ("rope_type", "rope_factor"),
            f"--rope_type={kind}: by how much is not said; write --rope_factor=<times>{also}",
        )
        return
    if derives and values["rope_factor"] is None:
        if values[longest] < values[original]:
            yield Problem(
                (original, longest, "rope_factor"),
                f"{typed(values, longest, original)}: rope_factor, their quotient, must be >= 1; write "
                f"--{longest}=<the stretched length>, or --rope_factor",
            )
            return
        values["rope_factor"] = values[longest] / values[original]
    if kind != "linear":
        fill(values, original, values[longest])
    yield from _ordered(values)


def _ordered(values: dict[str, Any]) -> Iterator[Problem]:
    if values["rope_type"] == "llama3" and values["rope_high_freq_factor"] <= values["rope_low_freq_factor"]:
        yield Problem(
            ("rope_high_freq_factor", "rope_low_freq_factor"),
            f"{typed(values, 'rope_high_freq_factor', 'rope_low_freq_factor')}: the high one must be greater, for the "
            "frequencies between them are interpolated; 4 and 1 are usual",
        )
    if values["rope_type"] != "yarn":
        return
    if values["rope_beta_fast"] < values["rope_beta_slow"]:
        yield Problem(
            ("rope_beta_fast", "rope_beta_slow"),
            f"{typed(values, 'rope_beta_fast', 'rope_beta_slow')}: turns of the fast end of the ramp, and of its slow "
            "end; the fast one must be at least the slow one; 32 and 1 are usual",
        )
    scales = ("rope_mscale", "rope_mscale_all_dim")
    given = [name for name in scales if values[name] is not None]
    if len(given) == 1:
        other = next(name for name in scales if name not in given)
        yield Problem(
            scales,
            f"{typed(values, *given)}: has an effect only together with {other}; write --{other}, too, or leave it out",
        )
    if given and values["rope_attention_factor"] is not None:
        yield Problem(
            ("rope_attention_factor", *given),
            f"{typed(values, 'rope_attention_factor', *given)}: the factor is given, and the mscales are there to "
            "derive it; leave out the one or the others",
        )
