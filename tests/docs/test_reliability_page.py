"""docs/reliability.md has the rows of the catalogue, with results of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs.reliability import TARGET, main, outcome, read_results, written_cells
from tests.faults.catalogue import read_catalogue

pytestmark = pytest.mark.guides

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.train.test_resume" name="test_killed[zero3-1]" />
<testcase classname="tests.train.test_resume" name="test_killed[zero3-2]"><failure message="x">y</failure></testcase>
<testcase classname="tests.train.test_resume" name="test_other"><skipped message="no strace" /></testcase>
</testsuite></testsuites>"""


def test_page_is_current() -> None:
    """`python -m scripts.docs.reliability` was run after the catalogue changed, and no test had failed."""
    assert main(["--check"]) == 0
    assert not [cell for cell in written_cells(TARGET.read_text("utf-8")).values() if "FAILED" in cell]


def test_results_are_counted_by_row(tmp_path: Path) -> None:
    """One failed case fails its row; a test without a result is said not to have run."""
    path = tmp_path / "results.xml"
    path.write_text(RESULTS, "utf-8")
    results, row = read_results([path]), read_catalogue()[0]

    def cell(*tests: str) -> str:
        return outcome(row._replace(tests=tuple(f"train/test_resume.py::{name}" for name in tests)), results)

    assert cell("test_killed") == "FAILED (1 case, 1 failed)"
    assert cell("test_other") == "not run (0 cases, 1 skipped)"
    assert cell("test_killed", "test_other", "test_new") == "FAILED (1 case, 1 failed, 1 skipped, 1 not run)"
    assert cell("test_new") == "not run"
    later = tmp_path / "later.xml"
    later.write_text(RESULTS.replace('<failure message="x">y</failure>', ""), "utf-8")
    assert read_results([path, later])["train/test_resume.py::test_killed"] == {"passed": 2}
    assert outcome(row._replace(tests=(), reason="none"), results) == "no promise: none"
