"""Rules about the optimizer and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.messages import Problem, typed


def optimizer(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """The update and what guards it."""
    yield from _update_clipping(values)
    if values["training_dtype"] == "fp16" and values["loss_scale"] is None:
        if values["initial_loss_scale"] < values["min_loss_scale"]:
            yield Problem(
                ("initial_loss_scale", "min_loss_scale", "training_dtype", "loss_scale"),
                f"{typed(values, 'initial_loss_scale', 'min_loss_scale')}: "
                f"the first loss scale is below the smallest; write --min_loss_scale of at most the first",
            )
    elif values["loss_scale"] is None:
        values["loss_scale"] = 1.0


def _update_clipping(values: dict[str, Any]) -> Iterator[Problem]:
    """Updates of AdamW may be clipped, in one way."""
    both = [name for name in ("update_rms_clip", "clip_update_norm_sigma") if values[name] is not None]
    if len(both) == 2:
        yield Problem(
            tuple(both),
            f"{typed(values, *both)}: updates are clipped by the root mean square of each parameter, or by their norm; "
            f"leave one of the two out",
        )
    for name in both:
        if values["optimizer"] != "adamw":
            yield Problem(
                (name, "optimizer"),
                f"{typed(values, name, 'optimizer')}: only updates of AdamW are clipped; leave {name} out",
            )
