"""Read and write the rotary positions of a config.json, as in transformers 4 (rope_theta,
rope_scaling) and 5 (rope_parameters). Imports no torch."""

from __future__ import annotations

from typing import Any

from megatron_lite.config import JsonObject, ModelConfig, Options
from megatron_lite.config.values import FLAGS, LARGEST_INTEGER
from megatron_lite.huggingface.architectures import Architecture, shown

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
# Names in rope_parameters used by each type; ours begin with rope_, and are None for the other
# types.
_NAMES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", ORIGINAL, "short_factor", "long_factor", "attention_factor"),
}
ROPE_OPTIONS = tuple(dict.fromkeys(f"rope_{name}" for names in _NAMES.values() for name in names))
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def _rope_keys(architecture: Architecture) -> dict[str, str]:
    """Return the family's keys beside rope_parameters for some of its names; empty: has no such
    key."""
    has_other_base = "rotary_emb_base" in architecture.defaults
    part = architecture.key_of("rotary_percent")
    return {
        "rope_theta": "rotary_emb_base" if has_other_base else "rope_theta",
        "partial_rotary_factor": part if part in architecture.defaults else "",
        ORIGINAL: ORIGINAL if ORIGINAL in architecture.defaults else "",
    }


def read_rope(
    content: JsonObject, max_position_embeddings: Any, architecture: Architecture
) -> tuple[Options, list[str]]:
    """Return the rotary position options, and a list of problems.

    As in transformers 5, rope_scaling takes precedence over rope_parameters, and a base in either
    over rope_theta. Values given twice must agree, because another version of transformers would
    use the other one.
    """
    found: list[Options] = []
    problems: list[str] = []
    keys = _rope_keys(architecture)
    stated = {name: content.get(key) for name, key in keys.items()}
    if keys[ORIGINAL]:
        stated[ORIGINAL] = content.get(ORIGINAL, architecture.defaults[ORIGINAL])
    for key in ("rope_scaling", "rope_parameters"):
        given = content.get(key)
        if given is not None and not isinstance(given, dict):
            problems.append(f"{key} is {shown(given)}; it must be an object or null")
        elif given:
            values, wrong = _read_rope_object(key, given, stated, max_position_embeddings)
            found.append(values)
            problems += wrong
    if not found:
        is_stated = not {"rope_scaling", "rope_parameters"}.isdisjoint(content)
        given = {} if is_stated else architecture.defaults.get("rope_parameters", {})
        found.append(_read_rope_object("rope_scaling", given, stated, max_position_embeddings)[0])
    for values in found:
        if values["rotary_base"] is None:
            values["rotary_base"] = architecture.defaults.get("rope_theta", 10000.0)
        if values["rotary_percent"] is None:
            values["rotary_percent"] = architecture.defaults.get(keys["partial_rotary_factor"], 1.0)
    problems += [
        f"rope_scaling and rope_parameters contradict each other in {option}: "
        f"{shown(value)} and {shown(found[-1][option])}"
        for option, value in found[0].items()
        if found[-1][option] != value
    ]
    return found[0], problems


def _read_rope_object(
    key: str, given: JsonObject, stated: JsonObject, length: Any
) -> tuple[Options, list[str]]:
    """Read one of the two objects; `stated`: base and rotated part beside it, `length`:
    max_position_embeddings."""
    # Null counts as absent, but transformers reads a null `truncate` as false and an absent one as
    # true.
    given = {
        name: value for name, value in given.items() if value is not None or name == "truncate"
    }
    kind = given.pop("rope_type", given.get("type", "default"))
    problems = []
    if given.pop("type", kind) != kind:
        problems.append(f"{key}: type and rope_type differ")
    values: Options = {"rope_type": kind}
    for name, option in {
        "rope_theta": "rotary_base",
        "partial_rotary_factor": "rotary_percent",
    }.items():
        beside = stated[name]
        values[option] = given.pop(name, beside)
        if beside is not None and beside != values[option]:
            problems.append(f"{name} is {shown(beside)}, but {shown(values[option])} in {key}")
    values |= {option: FLAGS[option].default for option in ROPE_OPTIONS}
    if not isinstance(kind, str) or kind not in _NAMES:
        why = "rotates by the length of each text" if kind == "dynamic" else "is not known"
        problems.append(f"{key}: rope_type {shown(kind)} {why}; known: {', '.join(_NAMES)}")
        return values, problems
    # transformers ignores other types' names, and one that the first YaRN models have.
    known = (*ROPE_OPTIONS, "rope_finetuned")
    problems += [f"{key}: {name} is not known" for name in given if f"rope_{name}" not in known]
    problems += [
        f"{key}: rope_type {kind} needs {name}"
        for name in _REQUIRED.get(kind, ())
        if name not in given
    ]
    if ORIGINAL in _NAMES[kind]:
        beside = stated[ORIGINAL]
        given.setdefault(ORIGINAL, length if beside is None else beside)
        if beside not in (None, given[ORIGINAL]):
            problems.append(f"{ORIGINAL} is {shown(beside)}, but {shown(given[ORIGINAL])} in {key}")
    if kind in ("yarn", "longrope"):
        _derive_factor(given, length)
    if kind == "yarn":
        _derive_yarn(given)
    values |= {f"rope_{name}": given[name] for name in _NAMES[kind] if name in given}
    return values, problems


def _derive_factor(given: JsonObject, length: Any) -> None:
    original = given[ORIGINAL]
    if "factor" not in given and all(
        isinstance(n, int) and 0 < n <= LARGEST_INTEGER for n in (length, original)
    ):
        given["factor"] = length / original


def _derive_yarn(given: JsonObject) -> None:
    """Fill in the values that transformers derives, and drop those that it ignores."""
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        given[name] = given.get(name) or default
    given["truncate"] = given.get("truncate", True) or False
    scales = [given.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if "attention_factor" not in given and all(scales):  # otherwise the two have no effect
        given["mscale"], given["mscale_all_dim"] = scales


def write_rope(model: ModelConfig, architecture: Architecture) -> JsonObject:
    """Return the keys for both versions of transformers.

    Versions before 4.43 know only linear, as {"type", "factor"}; later versions also read this
    form.
    """
    kind, base = model.rope_type, model.rotary_base
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name in _NAMES[kind]
        if (value := getattr(model, f"rope_{name}")) is not None
    }
    scaling = (
        None if kind == "default" else {"type" if kind == "linear" else "rope_type": kind, **values}
    )
    parameters = {"rope_type": kind, "rope_theta": base, **values}
    keys = _rope_keys(architecture)
    if keys["partial_rotary_factor"]:
        parameters["partial_rotary_factor"] = model.rotary_percent
    found: JsonObject = {
        keys["rope_theta"]: base,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }
    if keys[ORIGINAL] and ORIGINAL in values:
        found[ORIGINAL] = values[ORIGINAL]
    if "window_rotary_base" not in architecture.fixed:
        own = model.window_rotary_base
        local = parameters if own is None else {"rope_type": "default", "rope_theta": own}
        found["rope_parameters"] = {"full_attention": parameters, "sliding_attention": local}
        if "rope_local_base_freq" in architecture.defaults:
            found["rope_local_base_freq"] = own or base
    return found
