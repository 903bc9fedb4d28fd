"""How a weight gradient reaches `main_grad`: the first of an accumulation is written, later ones are added.

A buffer that is taken over from another stage or step is therefore never zeroed first.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lite.parameter import Parameter


def accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """main_grad = gradient, the first time; main_grad += gradient afterwards. Dtypes may differ."""
    if parameter.begin_gradient():
        parameter.main_grad.copy_(gradient)
    else:
        parameter.main_grad.add_(gradient)
