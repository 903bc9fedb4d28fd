"""Rules for the optimizer, the loss scale, weight decay and averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config import Draft
from megatron_lite.config.structured_values import decay_expression
from megatron_lite.validation.messages import Problem, default, parsing, problem


def optimizer(draft: Draft) -> Iterator[Problem]:
    """Check the update and its guards; derive the loss scale."""
    clips = draft.changed("update_rms_clip", "clip_update_norm_sigma")
    if len(clips) == 2:
        rule = "updates are clipped by each parameter's root mean square or by their norm; leave one of the two out"
        yield problem(draft, " ".join(clips), rule)
    for name in clips:
        if draft.optimizer != "adamw":
            yield problem(draft, f"{name} optimizer", f"only AdamW's updates can be clipped; leave {name} out")
    dynamic = draft.training_dtype == "fp16" and draft.loss_scale is None
    if dynamic and draft.initial_loss_scale < draft.min_loss_scale:
        rule = "the first loss scale is below the smallest; write --min_loss_scale of at most the first"
        yield problem(draft, "initial_loss_scale min_loss_scale", rule, also="training_dtype loss_scale")
    elif not dynamic:
        draft.loss_scale = default(draft.loss_scale, 1.0)


def weight_decay(draft: Draft) -> Iterator[Problem]:
    """Check which parameters decay, as far as possible without their names; derive the default mask."""
    for pattern in draft.weight_decay_modules:
        yield from parsing("weight_decay_modules", decay_expression, pattern)
    if not draft.weight_decay_modules:
        draft.weight_decay_default_mask = default(draft.weight_decay_default_mask, "fast_llm")
    elif draft.weight_decay_default_mask == "off":
        rule = (
            "without a mask all weights decay, whatever the patterns select; leave weight_decay_default_mask out to "
            "decay only what they select, or weight_decay_modules to decay everything"
        )
        yield problem(draft, "weight_decay_modules weight_decay_default_mask", rule)


def averaging(draft: Draft) -> Iterator[Problem]:
    """Check that exports of the averages have averages to export."""
    if draft.export_weights != "average":
        return
    if draft.ema_type == "none":
        rule = "no average is kept; write --ema_type=ema (or ema_decay_sqrt) or --export_weights=raw"
        yield problem(draft, "export_weights ema_type", rule)
    if draft.export_format == "distributed":
        rule = "a resumable checkpoint always holds weights and averages; leave one of the two out"
        yield problem(draft, "export_weights export_format", rule)
