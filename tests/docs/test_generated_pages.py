"""Pages that scripts.docs writes are current and complete: flags, the catalogue of faults, the
planner's outputs."""

import json
import re
from pathlib import Path

import pytest

from megatron_lite.cli.unknown_flags import instead, refused
from megatron_lite.config.other_programs import table
from megatron_lite.config.values import FLAGS
from megatron_lite.planner.command import PLANNING
from scripts.benchmarks.cpu import render as cpu_render
from scripts.benchmarks.gpu import render as gpu_render
from scripts.docs import dry_runs, flags, reliability
from tests.faults.catalogue import read_catalogue
from tests.support import documents, warm_python

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flags.md"

# Every flag of Fast-LLM's flat-flag era, as its dataclasses had them.
_PARTS = json.loads((ROOT / "tests" / "vectors" / "fast_llm_options.json").read_text("utf-8"))
FAST_LLM_FLAGS = [name for part in _PARTS.values() for name in part]


def first_cells(text: str) -> list[str]:
    """Return the flags of all rows of the tables, without backticks and dashes."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `--")]
    return [cell.strip("|` ").removeprefix("--") for row in rows for cell in row.split(", `")]


def test_page_is_current() -> None:
    """The page is what the script writes, and so are the cells that it fills in the guides."""
    assert flags.main(["--check"]) == 0


def test_benchmarks_are_current() -> None:
    """docs/benchmarks.md shows what docs/cpu_report.json and docs/gpu_report.json hold."""
    assert cpu_render.main(["--check"]) == gpu_render.main(["--check"]) == 0


def test_every_flag_of_fast_llm_has_a_row() -> None:
    """It works, or is answered with a reason; never both, never neither."""
    answers = {**instead(), **{other: row.remark for other, row in refused().items()}}
    cells = first_cells(PAGE.read_text("utf-8"))
    names = {alias: flag.name for flag in FLAGS.values() for alias in flag.aliases}
    for name in (names.get(flag, flag) for flag in FAST_LLM_FLAGS):
        assert (name in FLAGS) != (name in answers), name
        assert name in cells and (name in FLAGS or len(answers[name]) > 10), name


def test_page_has_every_option_once() -> None:
    """There is one row for each option, refused flag, refused value and flag of another program."""
    cells = first_cells(PAGE.read_text("utf-8"))
    assert len(cells) == len(set(cells))
    assert set(FLAGS) <= set(cells)
    assert {*refused(), *instead(), *table().values} <= set(cells)
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 4, 7), line


RESULTS = """<testsuites><testsuite>
<testcase classname="tests.train.test_resume" name="test_killed[zero3-1]" />
<testcase classname="tests.train.test_resume" name="test_killed[zero3-2]"><failure message="x">y</failure></testcase>
<testcase classname="tests.train.test_resume" name="test_other"><skipped message="no strace" /></testcase>
</testsuite></testsuites>"""


def test_catalogue_is_current() -> None:
    """`python -m scripts.docs.reliability` was run after the catalogue changed, and no test had
    failed."""
    assert reliability.main(["--check"]) == 0
    cells = reliability.written_cells(reliability.TARGET.read_text("utf-8"))
    assert not [cell for cell in cells.values() if "FAILED" in cell]


def test_results_are_counted_by_row(tmp_path: Path) -> None:
    """One failed case fails its row; a test without a result is said not to have run."""
    path = tmp_path / "results.xml"
    path.write_text(RESULTS, "utf-8")
    results, row = reliability.read_results([path]), read_catalogue()[0]

    def cell(*tests: str) -> str:
        named = row._replace(tests=tuple(f"train/test_resume.py::{name}" for name in tests))
        return reliability.outcome(named, results)

    assert cell("test_killed") == "FAILED (1 case, 1 failed)"
    assert cell("test_other") == "not run (0 cases, 1 skipped)"
    assert (
        cell("test_killed", "test_other", "test_new")
        == "FAILED (1 case, 1 failed, 1 skipped, 1 not run)"
    )
    assert cell("test_new") == "not run"
    later = tmp_path / "later.xml"
    later.write_text(RESULTS.replace('<failure message="x">y</failure>', ""), "utf-8")
    assert reliability.read_results([path, later])["train/test_resume.py::test_killed"] == {
        "passed": 2
    }
    assert reliability.outcome(row._replace(tests=(), reason="none"), results) == "no promise: none"


PLANNER = documents.read("planner")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "multi_stage.md"))
        for name in dry_runs.DOCUMENTS
    ],
)
def test_outputs_are_current(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again, the dry runs of a document print what stands below them, and the published speeds
    are ours."""
    monkeypatch.setattr(dry_runs, "DOCUMENTS", (document,))
    monkeypatch.setattr(dry_runs, "PYTHON_FOLDER", warm_python.folder())
    assert dry_runs.main(["--check"]) == 0


def test_mistral_7b_gets_a_command_on_8_and_on_16_gpus() -> None:
    """Both worked outputs end with a launcher line that sets what fits."""
    outputs = [found[3] for found in dry_runs.SHOWN.finditer(PLANNER)]
    assert len(outputs) == 2
    for output, launcher in zip(
        outputs, ("--nproc-per-node=8", "--nnodes=2 --nproc-per-node=8"), strict=True
    ):
        assert (
            output.startswith("WARNING: does not fit")
            and "GPU-hours" in output
            and "a checkpoint" in output
        )
        command = output.rpartition("run this")[2]
        assert launcher in command and "--micro_batch_size=1" in command


def test_every_flag_of_a_plan_is_explained() -> None:
    """The page names each, and its table of predictions has each model within 15 %."""
    # With it come torch's distributed tensors, which no process should import to collect tests.
    from scripts.benchmarks.machine.predictions import MODELS

    assert not [name for name in PLANNING if f"--{name}" not in PLANNER]
    for name in MODELS:
        (ratio,) = re.findall(rf"^\| {re.escape(name)} \|[^|]*\|[^|]*\| ([\d.]+) \|", PLANNER, re.M)
        assert abs(float(ratio) - 1) <= 0.15
