"""Whether a model's weights and optimizer state are finite."""

from __future__ import annotations

import torch

from megatron_lite.zero.multi_stage import MultiStage


def not_finite(model: MultiStage) -> str | None:
    """Return the first parameter on this rank with non-finite values, or its state ("exp_avg of
    <name>").

    None: all are finite. Reads the device once, and a second time to find the name.
    """
    kinds = [(part, kind) for _, part in model.parts() for kind in part.kinds() if part.numel(kind)]
    extremes = [torch.stack(torch.aminmax(part.read(kind))).float() for part, kind in kinds]
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist() if kinds else []
    for (part, kind), is_finite in zip(kinds, finite, strict=True):
        if not is_finite:
            name = part.parameter_at(int(part.read(kind).isfinite().logical_not().nonzero()[0]))
            return name if kind == "weights" else f"{kind} of {name}"
    return None
