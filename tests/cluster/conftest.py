"""What the tries share: a folder, a real Slurm, and the table of what was seen."""

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm

Seen = Callable[[str, object], None]


@pytest.fixture(scope="session")
def folder() -> Path:
    """An empty folder, inside of namespaces of its own."""
    name = os.environ.get("MEGATRON_LITE_CLUSTER")
    if name is None:
        pytest.skip("bash scripts/cluster_tests.sh runs it, in namespaces")
    return Path(name)


def needs(*programs: str) -> None:
    """Skip a try whose programs are not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="session")
def slurm(folder: Path) -> Iterator[Slurm]:
    needs("slurmctld", "slurmd", "munged", "ip")
    with Slurm(folder) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    """End all jobs after a try, and bring back nodes that it has cut off."""
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").restore()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep a row of the table with the report of each try, and show it."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or not report.passed and report.when == "setup":
        text = inspect.getdoc(item.function) or item.name  # type: ignore[attr-defined]
        words = text.split("\n\n")[0].replace("\n", " ")
        fault, what = re.fullmatch(r"(?:([0-9 and]+): )?(.*)", words).groups("")
        seen = "; ".join(str(value) for name, value in report.user_properties if name == "seen")
        cells = (fault, what, report.outcome, seen, f"{report.duration:.0f}")
        report.row = f"| {' | '.join(cells)} |"
        print(f"\n{report.row}", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: the number of a fault in docs/reliability.md, if any, what a try does, how
    it ended, what was seen, and how long it took."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    rows = {report.start: report.row for report in reports if hasattr(report, "row")}
    if rows:
        terminalreporter.write_line(
            "\n| fault | try | result | seen | s |\n| --- | --- | --- | --- | --- |"
        )
        for _, row in sorted(rows.items()):
            terminalreporter.write_line(row)
