"""Planners that tests share, and with them what these have measured, which is most of the time of a
plan."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from megatron_lite.planner import auto, plan, search


@contextlib.contextmanager
def shared_planners() -> Iterator[None]:
    """Let all searches and plans take one planner for as many ranks of a device.

    A planner keeps what it measures by all options that this depends on:
    `planner/test_search.py` compares searches with planners of their own.
    """
    shared = functools.cache(plan.Planner)
    with pytest.MonkeyPatch.context() as patch:
        for module in (auto, plan, search):
            patch.setattr(module, "Planner", shared)
        yield
