"""What the tries share: a real Slurm, and the table of what was seen."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm


@pytest.fixture(scope="session")
def folder() -> Path:
    """An empty folder, inside of namespaces of its own."""
    name = os.environ.get("MEGATRON_LITE_CLUSTER")
    if name is None:
        pytest.skip("bash scripts/cluster_tests.sh runs it, in namespaces")
    return Path(name)


@pytest.fixture(scope="session")
def slurm(folder: Path) -> Iterator[Slurm]:
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
    """Keep the summary of a try's docstring with its report."""
    outcome = yield
    summary, _, _ = (item.function.__doc__ or item.name).partition("\n\n")  # type: ignore[attr-defined]
    outcome.get_result().try_ = " ".join(summary.split())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a row for each try: what it does, how it ended, what was seen."""
    rows = []
    for result in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            if hasattr(report, "try_"):
                seen = "; ".join(
                    str(value) for name, value in report.user_properties if name == "seen"
                )
                rows.append(
                    (report.start, f"| {report.try_} | {result} | {seen} | {report.duration:.0f} |")
                )
    if rows:
        terminalreporter.write_line("\n| try | result | seen | s |\n| --- | --- | --- | --- |")
        for _, row in sorted(rows):
            terminalreporter.write_line(row)
