"""tanh for kernels, in fp32 to a few units in the last place, also under Triton's interpreter: Triton has none itself.

|x| < 0.3: the Taylor series, as 1 - e loses digits there        else: sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
"""

from __future__ import annotations

from megatron_lite.kernels.triton_support import jit, tl


@jit
def tanh(x):
    """Of fp32 values. NaN stays NaN, infinities become 1 and -1."""
    square = x * x
    series = x + x * square * (
        -0.3333333333333333
        + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
    )
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0.0, -far, far))
