"""A run that waits for its data says so once, with what to do about it."""

import pytest

from megatron_lite.config import DataConfig
from megatron_lite.data.loader import Waiting


def warnings(waits: list[float], step_s: float, **options: object) -> list[tuple[int, str]]:
    """Return (iteration, warning) of a run whose iterations wait as long and then compute for
    `step_s`."""
    now = 0.0
    waiting, found = Waiting(DataConfig(**options), lambda: now), []  # type: ignore[arg-type]
    for number, wait in enumerate(waits):
        now += wait
        if (warning := waiting.add(wait)) is not None:
            found.append((number, warning))
        now += step_s
    return found


def test_said_once_after_fifty_iterations() -> None:
    """Workers that give two batches at a time, half of the iterations without a wait, are a
    bottleneck, too."""
    ((number, warning),) = warnings([0.04, 0.0] * 100, 0.08, num_workers=2)
    assert number == 50
    assert warning.startswith(
        "data is the bottleneck: the last 50 iterations waited 20.0 of 100.0 ms each for it; use "
    )
    assert "--num_workers=4" in warning
    ((_, warning),) = warnings([0.01] * 60, 0.08, num_workers=0)
    assert warning.endswith("use --num_workers=2")


@pytest.mark.parametrize(
    ("waits", "step_s", "options"),
    [
        ([0.008] * 200, 0.08, {}),  # below a tenth
        ([0.0005] * 200, 0.0005, {}),  # a tiny model
        ([0.02] * 20 + [0.0] * 150, 0.08, {}),  # only for a while
        ([1.0] + [0.0] * 200, 0.9, {}),  # one long wait, of which there is a warning of its own
        ([0.02] * 200, 0.08, {"dataset_source": "random"}),
    ],
)
def test_not_said(waits: list[float], step_s: float, options: dict[str, object]) -> None:
    """What is no bottleneck, or cannot be changed, is not worth a line."""
    assert warnings(waits, step_s, **options) == []
