"""Rules about the samples that a run writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.messages import Problem, typed


def samples(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Samples need prompts, a tokenizer and room; options of samples need samples."""
    if values["sample_interval"] is None:
        idle = [name for name in ("sample_prompts", "sample_top_k") if values[name] is not None]
        idle += [name for name, off in (("sample_temperature", 0.0), ("sample_top_p", 1.0)) if values[name] != off]
        for name in idle:
            message = f"{typed(values, name)}: no samples are written; set --sample_interval, or leave {name} out"
            yield Problem((name, "sample_interval"), message)
        return
    greedy = values["sample_temperature"] == 0
    for name in ("sample_prompts", "tokenizer_file"):
        if values[name] is None:
            need = f"samples need --{name}; give it, or leave sample_interval out"
            yield Problem(("sample_interval", name), f"{typed(values, 'sample_interval')}: {need}")
    if values["sample_tokens"] >= values["sequence_length"]:
        yield Problem(
            ("sample_tokens", "sequence_length"),
            f"{typed(values, 'sample_tokens', 'sequence_length')}: with its prompt a sample is no longer than "
            f"sequence_length; write at most --sample_tokens={values['sequence_length'] - 1}",
        )
    for name in ("sample_top_k", "sample_top_p"):
        if greedy and values[name] not in (None, 1.0):
            yield Problem(
                (name, "sample_temperature"),
                f"{typed(values, name)}: nothing is drawn at --sample_temperature=0; set that, or leave {name} out",
            )
