"""The options that a preset or a pretrained folder sets, in place of those that were not typed. Imports no torch."""

from __future__ import annotations

from typing import Any

from megatron_lite.flags import written
from megatron_lite.note import Note
from megatron_lite.presets import PRESETS


def with_source(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The options that were typed and those that their --model stands for, with a note on the latter.

    given: the typed options by name; they win.
    """
    name = given.get("model")
    if name is None:
        return given, ()
    preset = PRESETS[name]
    flags = " ".join(f"--{option}={written(value)}" for option, value in preset.items())
    overridden = [f"--{option}={written(given[option])}" for option in preset if option in given]
    others = f"; overridden: {' '.join(overridden)}" if overridden else ""
    return {**preset, **given}, (Note(f"--model={name} stands for {flags}{others}"),)
