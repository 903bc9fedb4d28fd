"""Rules about exports: their sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.structured_values import size_bytes
from megatron_lite.errors import UsageError
from megatron_lite.validation.messages import Problem, typed


def export(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Sizes and dtypes that can be, and nothing given that no export would use."""
    try:
        size_bytes(values["export_shard_size"])
    except UsageError as error:
        yield Problem(("export_shard_size",), str(error))
    if values["export_dtype"] not in (None, values["training_dtype"]) and values["export_format"] == "distributed":
        yield Problem(
            ("export_dtype", "export_format"),
            f"{typed(values, 'export_dtype', 'export_format')}: a resumable checkpoint holds the fp32 masters; leave "
            f"--export_dtype out, or write --export_format=huggingface",
        )
