"""The inputs of a step."""

import pytest

from megatron_lite.outputs.step_inputs import loss_weights
from megatron_lite.schedules.batch_size import Split


def test_weights_of_the_micro_steps() -> None:
    """Thirteen samples in micro-steps of 4, and a fifth of padding: all means, or all samples, have
    the same weight."""
    split = Split(13, 2, 2, breadth_first=5)
    counted = [split.real_samples(step) for step in range(5)]
    assert counted == [4, 4, 4, 1, 0] and loss_weights(counted, "token") == [1.0] * 5
    sums = [8.0, 4.0, 2.0, 5.0, 0.0]
    weighted = sum(
        weight * loss
        for weight, loss in zip(loss_weights(counted, "micro_mean"), sums, strict=True)
    )
    assert weighted / 13 == pytest.approx((8 / 4 + 4 / 4 + 2 / 4 + 5 / 1) / 4)
    assert loss_weights([6] * 8, "micro_mean") == [1.0] * 8, "exactly, where nothing is padded"
