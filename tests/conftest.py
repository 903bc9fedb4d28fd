"""Shared by all tests: helpers in `support`, and the threads of a process (see
`support/threads.py`).

Where there is no GPU, Triton kernels run under Triton's interpreter, which has to be on before they
are imported. Where there is one, some tests ask for deterministic algorithms; whether cuBLAS
permits them torch finds out once, at the first product of the process.

Tests that the catalogue of faults names get the marker `faults`.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from tests.faults.catalogue import read_catalogue
from tests.support.short_spins import torch
from tests.support.threads import THREADS

pytest_plugins = ["tests.support.cpu_budget"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.set_num_threads(THREADS)
# However long a busy machine takes for an example or for drawing one, no test fails.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


@pytest.fixture(autouse=True, scope="module")
def no_process_of_templates() -> Iterator[None]:
    """End the process that a program keeps for chat templates: later tests look for processes that
    are left."""
    yield
    confined = sys.modules.get("megatron_lite.corpus.confined")
    if confined is not None:
        confined.end_process()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected, some millions of objects, out of every search for garbage: that took
    a third of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the catalogue, before -m chooses among the markers."""
    named = {f"tests/{name}" for row in read_catalogue() for name in row.tests}
    for item in items:
        if item.nodeid.partition("[")[0] in named:
            item.add_marker("faults")
