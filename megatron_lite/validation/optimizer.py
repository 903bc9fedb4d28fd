"""Rules about the learning rate, the optimizer and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.problem import Problem, fill, typed


def learning_rate(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """The learning rate as a function of the iteration."""
    ratio = values["min_lr_ratio"]
    fill(values, "min_lr", 0.0 if ratio is None else ratio * values["lr"])
    if values["min_lr"] > values["lr"]:
        yield Problem(
            ("min_lr", "lr"), f"{typed(values, 'min_lr', 'lr')}: the rate would grow; write a min_lr of at most lr"
        )
    iterations, warmup = values["train_iters"], values["lr_warmup_iters"]
    given = values["lr_decay_iters"] is not None
    fill(values, "lr_decay_iters", max(1, iterations))
    decay, constant = values["lr_decay_iters"], values["lr_decay_style"] == "constant"
    if iterations and warmup > iterations:
        yield Problem(
            ("lr_warmup_iters", "train_iters"),
            f"{typed(values, 'lr_warmup_iters', 'train_iters')}: the run would end during the warmup; "
            f"write --lr_warmup_iters of at most {iterations}",
        )
    elif iterations and not constant and decay <= warmup:
        source = "" if given else " (train_iters, as it is not set)"
        yield Problem(
            ("lr_warmup_iters", "lr_decay_iters", "train_iters", "lr_decay_style"),
            f"{typed(values, 'lr_decay_iters')}{source}, {typed(values, 'lr_warmup_iters', 'lr_decay_style')}: "
            f"lr_decay_iters is the absolute end of the decay and must come after the warmup; "
            f"write --lr_decay_iters={max(iterations, warmup + 1)} or a shorter warmup",
        )


def optimizer(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """The update and what guards it."""
    if values["training_dtype"] == "fp16" and values["loss_scale"] is None:
        if values["initial_loss_scale"] < values["min_loss_scale"]:
            yield Problem(
                ("initial_loss_scale", "min_loss_scale", "training_dtype", "loss_scale"),
                f"{typed(values, 'initial_loss_scale', 'min_loss_scale')}: "
                f"the first loss scale is below the smallest; write --min_loss_scale of at most the first",
            )
    elif values["loss_scale"] is None:
        values["loss_scale"] = 1.0
