"""Rules about where a model comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.messages import Problem, typed


def source(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What is taken from a pretrained checkpoint. Without one these options are idle: no more than a warning."""
    if values["pretrained_checkpoint_path"] is None:
        return
    if values["load_pretrained_optimizer"] and values["pretrained_checkpoint_type"] == "huggingface":
        names = ("load_pretrained_optimizer", "pretrained_checkpoint_type")
        yield Problem(
            names,
            f"{typed(values, *names)}: a Hugging Face folder holds no optimizer; leave load_pretrained_optimizer out",
        )
    if values["load_pretrained_optimizer"] and not values["load_pretrained_weights"]:
        names = ("load_pretrained_optimizer", "load_pretrained_weights")
        yield Problem(
            names,
            f"{typed(values, *names)}: moments belong to the weights that they were made with; leave one of them out",
        )
    use, ignore, load = "use_pretrained_config", "ignore_pretrained_config", "load_pretrained_weights"
    if not values[use] and values[ignore] and not values[load]:
        yield Problem(
            ("pretrained_checkpoint_path", use, ignore, load),
            f"{typed(values, use, ignore, load)}: nothing of --pretrained_checkpoint_path would be used; leave it out, "
            "or one of these",
        )
