"""Read and write the keys of config.json that say what differs between blocks: windows and rotary
positions."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_lite.config import JsonObject, ModelConfig, Options
from megatron_lite.config.model import repeating
from megatron_lite.huggingface.architectures import Architecture, shown


class Keys(Protocol):
    """A config.json that is being read; see `config_file`."""

    architecture: Architecture
    problems: list[str]

    def get(self, key: str) -> Any:
        """Return the value of a key, or the default of transformers."""

    def flag(self, key: str) -> bool:
        """Return the value of a key that must be true or false."""


def read_blocks(keys: Keys) -> Options:
    """Return what differs between blocks: the window, which blocks have it and rotate, and which have
    experts."""
    return _windows_and_rotation(keys) | _dense_layers(keys)


def _dense_layers(keys: Keys) -> Options:
    """Return how many blocks, from the first on, have no experts, if a list says so."""
    if "mlp_only_layers" not in keys.architecture.defaults:
        return {}
    layers = keys.get("mlp_only_layers") or []
    if not isinstance(layers, list) or sorted(map(str, layers)) != sorted(
        map(str, range(len(layers)))
    ):
        keys.problems.append(
            f"mlp_only_layers is {shown(layers)}; only the first layers can have no experts"
        )
        layers = []
    return {"moe_first_dense_layers": len(layers)}


def _windows_and_rotation(keys: Keys) -> Options:
    defaults = keys.architecture.defaults
    if "sliding_window" not in defaults:
        return {"window_size": None, **_rotary_pattern(keys)}
    window = keys.get("sliding_window")
    if "use_sliding_window" in defaults and not keys.flag("use_sliding_window"):
        window = None
    if "layer_types" not in defaults:
        return {"window_size": window}
    windows = _with_window(keys, window)
    if any(windows) and window is None:
        keys.problems.append(
            "layer_types says sliding_attention, but there is no window (use_sliding_window)"
        )
    found: Options = {"window_size": None, **_rotary_pattern(keys)}
    if any(windows):
        kinds = ["window" if has_window else "full" for has_window in windows]
        found |= {"window_size": window, "attention_pattern": repeating(kinds, "window")}
    if keys.architecture.rotates_windows:
        rotates_all = window is None and not keys.architecture.never_rotates_others
        kinds = ["rotary" if has_window or rotates_all else "nope" for has_window in windows]
        found["rotary_pattern"] = repeating(kinds, "rotary")
    return found


def _with_window(keys: Keys, window: Any) -> list[bool]:
    """Return which blocks have a window: listed in layer_types, or by other keys."""
    types, num_layers = keys.get("layer_types"), keys.get("num_hidden_layers")
    if not is_count(num_layers):
        return []  # reported by `checked`
    numbers = range(num_layers)
    if types is None and window is None:
        return [False] * num_layers
    if types is None and "no_rope_layers" in keys.architecture.defaults:
        return [not rotates for rotates in _rotating(keys)]
    if types is None and "max_window_layers" in keys.architecture.defaults:
        first = keys.get("max_window_layers")
        if isinstance(first, int):
            return [number >= first for number in numbers]
        keys.problems.append(f"max_window_layers is {shown(first)}; it must be a number")
        return []
    if types is None:
        every = keys.architecture.full_every or keys.get("sliding_window_pattern")
        if is_count(every):
            return [(number + 1) % every != 0 for number in numbers]
        keys.problems.append(f"sliding_window_pattern is {shown(every)}; it must be a number")
        return []
    kinds = ("sliding_attention", "full_attention", "attention")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in kinds for kind in types)
    ):
        keys.problems.append(
            f"layer_types {shown(types)}: it must be {' or '.join(kinds[:2])} for each layer"
        )
        return []
    return [kind == "sliding_attention" for kind in types]


def _rotary_pattern(keys: Keys) -> Options:
    if "no_rope_layers" not in keys.architecture.defaults:
        return {}
    kinds = ["rotary" if rotates else "nope" for rotates in _rotating(keys)]
    return {"rotary_pattern": repeating(kinds, "rotary")}


def _rotating(keys: Keys) -> list[bool]:
    """Return which blocks rotate, by no_rope_layers (1: rotates) or no_rope_layer_interval."""
    layers, every = keys.get("no_rope_layers"), keys.get("no_rope_layer_interval")
    num_layers = keys.get("num_hidden_layers")
    if not is_count(num_layers):
        return []  # reported by `checked`
    if layers is None and is_count(every):
        return [(number + 1) % every != 0 for number in range(num_layers)]
    if isinstance(layers, list) and len(layers) >= num_layers and {*map(str, layers)} <= {*"01"}:
        return [bool(int(layer)) for layer in layers[:num_layers]]
    key, value = (
        ("no_rope_layers", layers) if layers is not None else ("no_rope_layer_interval", every)
    )
    keys.problems.append(
        f"{key} is {shown(value)}; it must say 0 or 1 for each layer, or a number >= 1"
    )
    return []


def write_blocks(architecture: Architecture, model: ModelConfig) -> JsonObject:
    """Return the keys for what differs between blocks."""
    windows = [window is not None for window in model.windows]
    window = model.window_size if any(windows) else None
    if window is None and architecture.needs_window:
        window = architecture.defaults["sliding_window"]
    found: JsonObject = {
        "use_sliding_window": any(windows),
        "sliding_window": window,
        "max_window_layers": windows.index(True) if any(windows) else model.num_layers,
        "layer_types": [f"{'sliding' if window else 'full'}_attention" for window in windows],
        "mlp_only_layers": [*range(model.moe_first_dense_layers)],
        "no_rope_layers": [int(model.rotates(block)) for block in range(model.num_layers)],
    }
    return {key: value for key, value in found.items() if key in architecture.defaults}


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
