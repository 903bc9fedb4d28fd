"""What ranks on one machine send: their plans, what they count, and the loopback device of a
network of their own."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.support import loopback
from tests.support.launch import ROOT


@pytest.mark.slow
def test_the_loopback_device_carries_what_is_planned_and_counted() -> None:
    """All ranks together send the bytes of their plans, and 0.5 percent at most for headers; they
    count these bytes, and a few of gradient norms."""
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, "ip link set lo up"], capture_output=True).returncode
    ):
        pytest.skip("no network namespaces")
    program = f"ip link set lo up && exec {sys.executable} -m tests.support.loopback"
    done = subprocess.run([*alone, program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == sum(len(options) for *_, options in loopback.LAYOUTS)
    for ranks, options, planned, counted, carried in cases:
        assert 0 <= counted - planned < 100 * ranks, (ranks, options)
        assert 1 <= carried / planned < 1.005, (ranks, options)
