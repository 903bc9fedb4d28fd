"""Rules about averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.messages import Problem, typed


def averaging(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What is exported must be there."""
    if values["export_weights"] != "average":
        return
    if values["ema_type"] == "none":
        yield Problem(
            ("export_weights", "ema_type"),
            f"{typed(values, 'export_weights', 'ema_type')}: no average is kept; write --ema_type=ema "
            f"(or ema_decay_sqrt) or --export_weights=raw",
        )
    if values["export_format"] == "distributed":
        yield Problem(
            ("export_weights", "export_format"),
            f"{typed(values, 'export_weights', 'export_format')}: a resumable checkpoint always holds weights and "
            f"averages; leave --export_weights out, or write --export_format=huggingface",
        )
