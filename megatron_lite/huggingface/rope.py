"""Rotary positions in config.json, as in transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.config.values import LARGEST_INTEGER
from megatron_lite.huggingface.architectures import shown

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
# Names in rope_parameters that each type uses; ours begin with rope_, and are None for the other types.
_USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
OPTIONS = tuple(dict.fromkeys(f"rope_{name}" for names in _USED.values() for name in names))
_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def read(content: Mapping[str, Any], max_position_embeddings: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of rotary positions, and a list of problems.

    As in transformers 5, rope_scaling takes precedence over rope_parameters, and a base in either over rope_theta.
    Values given twice must agree, because another version of transformers would use the other one.
    """
    found: list[dict[str, Any]] = []
    problems: list[str] = []
    for key in ("rope_scaling", "rope_parameters"):
        given = content.get(key)
        if given is not None and not isinstance(given, dict):
            problems.append(f"{key} is {shown(given)}; it must be an object or null")
        elif given:
            values, wrong = _read_one(key, given, content.get("rope_theta"), max_position_embeddings)
            found.append(values)
            problems += wrong
    if not found:
        found.append(_read_one("rope_scaling", {}, content.get("rope_theta"), max_position_embeddings)[0])
    problems += [
        f"rope_scaling and rope_parameters contradict each other in {option}: "
        f"{shown(value)} and {shown(found[-1][option])}"
        for option, value in found[0].items()
        if found[-1][option] != value
    ]
    return found[0], problems


def _read_one(key: str, given: dict[str, Any], theta: Any, length: Any) -> tuple[dict[str, Any], list[str]]:
    """Read one of the two objects; `theta` and `length` are rope_theta and max_position_embeddings."""
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.pop("rope_type", given.get("type", "default"))
    problems = []
    if given.pop("type", kind) != kind:
        problems.append(f"{key}: type and rope_type differ")
    base = given.pop("rope_theta", theta if theta is not None else 10000.0)
    if theta is not None and theta != base:
        problems.append(f"rope_theta is {shown(theta)}, but {shown(base)} in {key}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{key}: partial_rotary_factor: this architecture rotates whole heads")
    values: dict[str, Any] = {"rope_type": kind, "rotary_base": base, "rotary_percent": 1.0}
    values |= dict.fromkeys(OPTIONS)
    if not isinstance(kind, str) or kind not in _USED:
        problems.append(f"{key}: rope_type {shown(kind)} is not known; known: {', '.join(_USED)}")
        return values, problems
    problems += [f"{key}: {name} has no effect with rope_type {kind}" for name in given if name not in _USED[kind]]
    problems += [f"{key}: rope_type {kind} needs {name}" for name in _REQUIRED.get(kind, ()) if name not in given]
    if _ORIGINAL in _USED[kind]:
        given.setdefault(_ORIGINAL, length)
    if kind == "yarn":
        _derive_yarn(given, length)
    values |= {f"rope_{name}": given[name] for name in _USED[kind] if name in given}
    return values, problems


def _derive_yarn(given: dict[str, Any], length: Any) -> None:
    """Fill in the values that transformers derives, and drop those that it ignores."""
    original = given[_ORIGINAL]
    if "factor" not in given and all(isinstance(n, int) and 0 < n <= LARGEST_INTEGER for n in (length, original)):
        given["factor"] = length / original
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        given[name] = given.get(name) or default
    given.setdefault("truncate", True)
    scales = [given.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if "attention_factor" not in given and all(scales):  # else the two have no effect
        given["mscale"], given["mscale_all_dim"] = scales


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the keys for both versions of transformers.

    Versions before 4.43 know only linear, as {"type", "factor"}; later versions also read this form.
    """
    kind, base = model.rope_type, model.rotary_base
    values = {name: getattr(model, f"rope_{name}") for name in _USED[kind]}
    values = {name: value for name, value in values.items() if value is not None}
    scaling = None if kind == "default" else {"type" if kind == "linear" else "rope_type": kind, **values}
    parameters = {"rope_type": kind, "rope_theta": base, **values}
    return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": parameters}
