"""Send large fp32 products on a CPU through the library that `matmul_library.py` chose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_lite.kernels.matmul_library import (
    SMALLEST_ONEDNN_PRODUCT,
    goes_through_onednn,
    through_onednn,
)


def in_its_library(
    operation: Callable[..., Any], factor: Tensor, columns: int
) -> Callable[..., Any]:
    """Return the operation, bound to the chosen library for a large fp32 product on a CPU.

    Not a context manager: right after a product, which evicts everything from the caches, each
    Python call costs several us.

    Args:
        operation: computes the product.
        factor: one operand of the product.
        columns: the product's dimension that this operand lacks.
    """
    if factor.numel() * columns < SMALLEST_ONEDNN_PRODUCT or not goes_through_onednn(
        factor.device, factor.dtype
    ):
        return operation
    return functools.partial(through_onednn, operation)
