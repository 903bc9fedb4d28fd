"""Planners that the cases of a file share."""

from collections.abc import Iterator

import pytest

from tests.support import shared_planners as helper


@pytest.fixture(scope="module")
def shared_planners() -> Iterator[None]:
    with helper.shared_planners():
        yield
