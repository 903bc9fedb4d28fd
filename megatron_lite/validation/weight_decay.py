"""Rules about which parameters decay, as far as they are known without the parameters' names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.structured_values import decay_expression
from megatron_lite.errors import UsageError
from megatron_lite.validation.messages import Problem, fill, typed


def weight_decay(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Without `weight_decay_modules` the mask is Fast-LLM's; beside them, none that leaves them nothing to say."""
    modules = values["weight_decay_modules"]
    for pattern in modules:
        try:
            decay_expression(pattern)
        except UsageError as error:
            yield Problem(("weight_decay_modules",), str(error))
    if not modules:
        fill(values, "weight_decay_default_mask", "fast_llm")
    elif values["weight_decay_default_mask"] == "off":
        names = ("weight_decay_modules", "weight_decay_default_mask")
        yield Problem(
            names,
            f"{typed(values, *names)}: without a mask everything decays, whatever the patterns select; leave "
            f"weight_decay_default_mask out for them alone, or weight_decay_modules for everything",
        )
