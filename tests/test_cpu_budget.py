"""The plugin that counts seconds of CPU: what it counts, what it lists, and what a budget refuses."""

import subprocess
import sys
import time

import pytest

from tests.support import warm_python
from tests.support.cpu_budget import cpu_s
from tests.support.harness import FORKSERVER

pytest_plugins = ["pytester"]

SPIN = "import time\nwhile time.process_time() < 0.2: pass"
CASES = """
import pytest

@pytest.fixture(scope="module")
def shared(): pass

@pytest.mark.slow
def test_slow(): pass

def test_one(shared): pass

def test_two(shared): pass

def test_failing(): assert False
"""


def spin() -> None:
    exec(SPIN, {})


def others_s() -> float:
    """Return what is counted of other processes."""
    return cpu_s() - time.process_time()


@pytest.mark.parametrize("how", ["child", "warm interpreter", "rank"])
def test_other_processes_count(how: str) -> None:
    """A warm interpreter counts once its server has collected it."""
    programs = {"child": sys.executable, "warm interpreter": str(warm_python.folder() / "python")}
    before_s = others_s()
    if how == "rank":
        process = FORKSERVER.Process(target=spin)
        process.start()
        process.join()
    else:
        subprocess.run([programs[how], "-c", SPIN], check=True)
    deadline = time.monotonic() + 60
    while others_s() < before_s + 0.15:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_this_process_counts() -> None:
    before_s = cpu_s()
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    assert cpu_s() >= before_s + 0.09


@pytest.mark.parametrize("budget, failed", [(None, 1), (1e6, 1), (-1, 3)])
def test_a_budget_fails_what_is_dearer(
    pytester: pytest.Pytester, budget: float | None, failed: int
) -> None:
    """A slow case has none; a case that fails anyway says why it failed. The list in a file has all
    of them."""
    pytester.makepyfile(CASES)
    more = [] if budget is None else [f"--cpu_budget={budget}"]
    result = pytester.runpytest_inprocess(
        "-p", "tests.support.cpu_budget", "-rA", "--cpu_list=listed.txt", *more
    )
    result.assert_outcomes(passed=4 - failed, failed=failed)
    listed = result.stdout.str().partition("dearest in seconds of CPU")[2]
    for what in ("::test_slow", "::test_one", "::test_two", "::test_failing", ".py: shared"):
        assert what in listed and what in (pytester.path / "listed.txt").read_text()
    assert "test_failing - assert False" in result.stdout.str()
    refused = " s of CPU, more than -1 s" in result.stdout.str()
    assert refused == (failed == 3)
