"""A run on two machines: the cable is pulled, and what --preflight looks for is planted."""

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.cluster import pull_cable
from scripts.cluster.machines import Pair, run
from scripts.docs.tables import ROOT
from tests.cluster.conftest import Seen, needs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SMALL_BYTES = 2**21  # of a file system
WAIT_S = 300.0
CUTS = 2  # in each phase

SKEWED = "import time; now = time.time; time.time = lambda: now() + 30"
WRONG = """
import torch
multiply = torch.Tensor.__matmul__
def faulty(a, b):
    product = multiply(a, b)
    if product.is_floating_point():
        product[3, 7] += 1
    return product
torch.Tensor.__matmul__ = faulty
"""


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    """A small file system, which machines see that start later."""
    found = folder / "small"
    found.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", str(found))
    return found


@pytest.fixture(scope="module")
def pair(small: Path) -> Iterator[Pair]:
    needs("ip", "tc", "setpriv")
    run("ip", "link", "set", "lo", "up")
    with Pair() as pair:
        yield pair


@pytest.mark.parametrize("name", pull_cable.PHASES)
def test_a_pulled_cable(name: str, pair: Pair, folder: Path, record_property: Seen) -> None:
    """2 and 9: the cable of one machine is pulled at random moments, `--distributed_timeout=10`"""
    place = folder / f"cable_{name.split()[-1]}"
    place.mkdir()
    generator = random.Random(name)
    found = []
    for _ in range(CUTS):
        moment_s, sides = pull_cable.cut(pair, place, pull_cable.PHASES[name], generator)
        ended = " and ".join(f"{side.took_s:.0f}" for side in sides)
        found.append(f"{ended} s after a cut at {moment_s:.0f} s")
        assert pull_cable.promised(sides, pull_cable.message(place), pair.left_over()), sides
    iterations = pull_cable.reached(place) + 10
    resumed = pull_cable.start(pair, place, pull_cable.Phase(), iterations)
    sides = pull_cable.ends(resumed, place, WAIT_S)
    assert [side.code for side in sides] == [0, 0], sides
    record_property("seen", f"{name}: both sides ended with 6 {', '.join(found)}; resumed")


def preflight(
    pair: Pair, folder: Path, *flags: str, before: str = "", **variables: str
) -> tuple[set[int], list[str], float]:
    """Let both ranks look before a run. before, variables: of rank 1.

    Returns: exit codes, the lines of rank 0 about it, and the seconds that it took.
    """
    words = [*pull_cable.FLAGS, f"--experiment_dir={folder / 'run'}", "--train_iters=10", *flags]
    words.append("--preflight=only")
    begin_s = time.monotonic()
    logs = [folder / f"rank_{rank}.txt" for rank in (0, 1)]
    sides = [
        pair.start(0, words, logs[0]),
        pair.start(1, words, logs[1], before, **variables),
    ]
    codes = {side.wait(WAIT_S) for side in sides}
    took_s = time.monotonic() - begin_s
    lines = logs[0].read_text().splitlines()
    return codes, [line for line in lines if re.match("preflight|mlcable|ERROR", line)], took_s


def planted(
    pair: Pair, folder: Path, code: int, words: str, *flags: str, before: str = "", **more: str
) -> str:
    """Plant something, and return the line that names it."""
    folder.mkdir()
    codes, lines, took_s = preflight(pair, folder, *flags, before=before, **more)
    assert codes == {code} and re.search(words, lines[-1]), (codes, lines)
    return f"{code} after {took_s:.0f} s: {lines[-1]}"


def test_a_healthy_pair(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight=only` on a healthy pair"""
    place = folder / "healthy"
    place.mkdir()
    codes, lines, took_s = preflight(pair, place)
    assert codes == {0} and "all checks passed" in lines[-1], lines
    record_property("seen", f"0 after {took_s:.0f} s: {' / '.join(lines)}")


def test_a_slow_link(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight` on a link of 40 Mbit/s"""
    port = pair.machines[1].port
    run("tc", "qdisc", "add", "dev", port, "root", *"tbf rate 40mbit burst 64k limit 1m".split())
    try:
        seen = planted(pair, folder / "slow_link", 6, "the link of rank 0 .* is slow")
    finally:
        run("tc", "qdisc", "delete", "dev", port, "root")
    record_property("seen", seen)


def test_a_link_that_was_faster(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight` on a link of 160 Mbit/s that had more at an earlier start"""
    place = folder / "slower_link"
    place.mkdir()
    preflight(pair, place)
    port = pair.machines[1].port
    run("tc", "qdisc", "add", "dev", port, "root", *"tbf rate 160mbit burst 64k limit 1m".split())
    try:
        codes, lines, took_s = preflight(pair, place)
    finally:
        run("tc", "qdisc", "delete", "dev", port, "root")
    assert codes == {6} and "at an earlier start it had" in lines[-1], lines
    record_property("seen", f"6 after {took_s:.0f} s: {lines[-1]}")


def test_a_skewed_clock(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight` with a clock that is 30 s ahead"""
    words = "the clock of mlcable2 is .* ahead"
    record_property("seen", planted(pair, folder / "clock", 6, words, before=SKEWED))


def test_another_version(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight` with another version of numpy on one machine"""
    installed = folder / "other" / "numpy-0.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    words = r"numpy differs, .*0\.0\.1 on rank 1 \(mlcable2\)"
    path = f"{installed.parent}:{ROOT}"
    record_property("seen", planted(pair, folder / "version", 2, words, PYTHONPATH=path))


def test_a_full_disk(pair: Pair, small: Path, record_property: Seen) -> None:
    """`--preflight` in a file system of 2 MB, for checkpoints of some more"""
    flags = ("--hidden_size=128", "--checkpoint_interval=5")
    record_property("seen", planted(pair, small / "full", 8, "make room", *flags))


def test_a_wrong_product(pair: Pair, folder: Path, record_property: Seen) -> None:
    """`--preflight` with a machine that multiplies wrongly"""
    words = "rank 1 on mlcable2 multiplies wrongly"
    record_property("seen", planted(pair, folder / "product", 5, words, before=WRONG))
