"""A pytest plugin that counts the seconds of CPU of each case, prints the dearest, with
`--cpu_list=FILE` writes all of them to a file, and with `--cpu_budget=2` fails each case above 2 s
that is not marked slow.

It counts the set-up and the call of a case: the process of the tests, its children that have ended,
and what its two servers have forked, but not the start of these servers, which many cases share.
A fixture of a wider scope counts by itself, with the budgets of all cases that use it: which case
pays for it depends on the order. Seconds of CPU depend on the machine and on what else it does, so
no budget is enforced unless asked for.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

PRINTED = 10
SECONDS = "cpu_s"  # the name among a report's user_properties; the value is (what, seconds)


def cpu_s() -> float:
    """Return the seconds of CPU that count so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + sum(_ticks_of_children(server) for server in _servers()) / os.sysconf("SC_CLK_TCK")


def _servers() -> Iterator[int | None]:
    """The processes that fork for this one, as far as they have been started."""
    yield getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    warm_python = sys.modules.get("tests.support.warm_python")
    if warm_python is not None:
        yield warm_python.server_process()


def _ticks_of_children(process: int | None) -> int:
    """Clock ticks of a process's children that have ended; 0 where /proc says nothing."""
    try:
        words = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[13]) + int(words[14])


def _shared_name(item: pytest.Item, fixture: str) -> str:
    """Name a shared fixture by the file of a case that uses it."""
    return f"{item.nodeid.partition('::')[0]}: {fixture}"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail a case that takes more seconds of CPU, unless it is marked slow"
    parser.addoption("--cpu_budget", type=float, metavar="SECONDS", help=text)
    text = "write the seconds of CPU of each case and shared fixture to FILE, dearest first"
    parser.addoption("--cpu_list", type=Path, metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    options = config.getoption("cpu_budget"), config.getoption("cpu_list")
    config.pluginmanager.register(CpuBudget(*options))


class CpuBudget:
    """Counts in the process that runs a case, lists in the one that prints."""

    def __init__(self, budget_s: float | None, file: Path | None) -> None:
        self.budget_s = budget_s
        self.file = file
        self._cases: Counter[str] = Counter()  # that use a shared fixture
        self._begun_s = 0.0
        self._shared: dict[str, float] = {}  # seconds of shared fixtures that the case has set up
        self._listed: dict[str, float] = {}  # seconds of cases and shared fixtures

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            names = getattr(item, "fixturenames", ())
            self._cases.update(_shared_name(item, name) for name in names)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = cpu_s()
        inner = sum(self._shared.values())
        try:
            return (yield)
        finally:
            # Fixtures that it uses are set up within.
            inner = sum(self._shared.values()) - inner
            name = _shared_name(request._pyfuncitem, fixturedef.argname)
            self._shared[name] = self._shared.get(name, 0.0) + cpu_s() - before - inner

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self._begun_s = cpu_s()
        self._shared = {}
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Add the seconds to the report of the call, and fail a case that passes but is dear."""
        try:
            yield
        finally:
            spent = cpu_s() - self._begun_s - sum(self._shared.values())
            seconds = {item.nodeid: spent, **self._shared}
            item.user_properties.extend((SECONDS, list(pair)) for pair in seconds.items())
        if self.budget_s is None or item.get_closest_marker("slow"):
            return
        for name, spent in seconds.items():
            budget_s = self.budget_s * max(1, self._cases[name])
            if spent > budget_s:
                pytest.fail(f"{name} took {spent:.1f} s of CPU, more than {budget_s:g} s", False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == SECONDS:
                    what, seconds = value  # type: ignore[misc]
                    self._listed[what] = max(self._listed.get(what, 0.0), seconds)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._listed:
            return
        terminalreporter.section("dearest in seconds of CPU")
        dearest = sorted(self._listed.items(), key=lambda pair: -pair[1])
        lines = [f"{seconds:8.2f}  {what}" for what, seconds in dearest]
        for line in lines[:PRINTED]:
            terminalreporter.line(line)
        if self.file is not None:
            self.file.write_text("\n".join([*lines, ""]), "utf-8")
