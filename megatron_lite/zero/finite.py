"""Check that a model's weights and optimizer state are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.zero.multi_stage import MultiStage


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor, none of them empty, whether all its values are finite.

    Reads the device once. Extremes take a twentieth of the time of `isfinite` on a CPU, and show
    every NaN.
    """
    extremes = [torch.stack(torch.aminmax(values)).float() for values in tensors]
    return torch.stack(extremes).isfinite().all(dim=1).tolist() if extremes else []


def not_finite(model: MultiStage, saved_only: bool = False) -> str | None:
    """Return the first parameter on this rank with non-finite values, or its state ("exp_avg of
    <name>").

    Returns None if all are finite. Reads the device once, and a second time to find the name.
    saved_only: only of what checkpoints contain; the rest never changes.
    """
    parts = model.saved_parts() if saved_only else model.parts()
    kinds = [(part, kind) for _, part in parts for kind in part.kinds() if part.numel(kind)]
    finite = are_finite([part.read(kind) for part, kind in kinds])
    for (part, kind), is_finite in zip(kinds, finite, strict=True):
        if not is_finite:
            name = part.parameter_at(int(part.read(kind).isfinite().logical_not().nonzero()[0]))
            return name if kind == "weights" else f"{kind} of {name}"
    return None
