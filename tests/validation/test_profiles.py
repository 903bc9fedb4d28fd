"""Options of profiles: ranks that exist, and warnings for profiles that would leave nothing."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.errors import UsageError
from megatron_lite.validation import warnings
from tests.support.harness import tiny_config


def test_ranks_to_profile_exist() -> None:
    """The message has the ranks that there are."""
    assert tiny_config(4, profile_ranks=(0, 3), profile_cpu=True).profiling.profile_ranks == (0, 3)
    rule = "leave out profile_ranks to profile all"
    with pytest.raises(UsageError, match=f"--profile_ranks=0,4: the ranks are 0 to 3; {rule}"):
        tiny_config(4, profile_ranks=(0, 4), profile_cpu=True)
    with pytest.raises(UsageError, match=f"--profile_ranks=1: the only rank is 0; {rule}"):
        tiny_config(1, profile_ranks=(1,), profile_cpu=True)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"profile_cpu": True, "profile_averages": True}, None),
        ({"profile_schedule": True, "profile_export": False}, None),
        (
            {"profile_cpu": True, "profile_export": False},
            "--profile_cpu has no effect with --profile_export=0 and --profile_averages=0 and --profile_trace=0",
        ),
        ({"profile_cpu": True, "profile_skip": 19}, "no iteration is profiled, as the run ends after 20"),
        ({"profile_schedule": True, "experiment_dir": None, "profile_log": True}, None),
    ],
)
def test_profiles_without_a_result_are_pointed_out(options: dict[str, Any], warning: str | None) -> None:
    """One warning each, and none for what leaves a file or a line."""
    found = [line for line in warnings(tiny_config(1, **{"experiment_dir": "runs/x", **options})) if "profile" in line]
    assert len(found) == (warning is not None) and (not warning or warning in found[0]), found
