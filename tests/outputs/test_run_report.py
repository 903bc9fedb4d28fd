"""The page at the end of a run: no failure of it ends the run, and no directory of another run is
written to."""

import errno
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite import pretrain
from megatron_lite.pretrain import leave_report


def fake_run(root: Path | None, rank: int = 0, report: bool = True, lost: bool = False) -> Any:
    """As much of a run as the page needs."""
    return SimpleNamespace(
        experiment=SimpleNamespace(root=root, is_lost=lambda: lost),
        config=SimpleNamespace(
            run=SimpleNamespace(report=report, experiment_dir="mine"),
            data=SimpleNamespace(tokenizer_file="byte"),
            adapters=SimpleNamespace(lora_rank=0),
        ),
        distributed=SimpleNamespace(rank=rank),
        logger=logging.getLogger("test of the page"),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with metrics."""
    records = [{"phase": "training", "iteration": i, "loss": 1.0, "run": 0} for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return tmp_path


def test_only_the_first_rank_of_a_run_with_metrics_writes(root: Path) -> None:
    """Not another rank, not with --report=0, not into a directory that another run may have taken
    over."""
    page = root / "report.html"
    (root / "empty").mkdir()
    idle = [
        fake_run(root, rank=1),
        fake_run(root, report=False),
        fake_run(root, lost=True),
        fake_run(None),
    ]
    for run in (*idle, fake_run(root / "empty")):
        leave_report(run, in_a_hurry=False)
        assert not page.exists() and not [*(root / "empty").iterdir()]
    leave_report(fake_run(root), in_a_hurry=True)
    assert page.is_file()


@pytest.mark.parametrize(
    "error", [OSError(errno.ESTALE, "Stale file handle"), MemoryError(), KeyError("x\ny")]
)
@pytest.mark.parametrize("place", ["is_lost", "write_report"])
def test_a_failure_is_one_warning(
    error: Exception,
    place: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which says how to write the page later."""

    def fail(*_: object) -> None:
        raise error

    run = fake_run(root)
    if place == "is_lost":
        run.experiment.is_lost = fail
    else:
        monkeypatch.setattr(pretrain, "write_report", fail)
    leave_report(run, in_a_hurry=True, failed=True)
    assert not caplog.records, "the lines about the failure stay the last"
    leave_report(run, in_a_hurry=False)
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING" and "\n" not in said and type(error).__name__ in said
    assert said.endswith(f"write it with: python scripts/report_run.py {root}")


@pytest.mark.parametrize(("in_a_hurry", "written"), [(False, True), (True, False)])
def test_a_stopped_run_leaves_a_long_page_for_later(
    in_a_hurry: bool,
    written: bool,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The time that a page takes follows from the size of metrics.jsonl."""
    monkeypatch.setattr(pretrain, "LARGEST_IN_A_HURRY_BYTES", 100)
    caplog.set_level(logging.INFO)
    leave_report(fake_run(root), in_a_hurry)
    assert (root / "report.html").exists() is written
    (record,) = caplog.records
    said = f"{root}/report.html shows this run; continue a text with: " if written else "no report"
    assert record.levelname == "INFO" and record.getMessage().startswith(said)
    assert record.getMessage().endswith(" --model mine --prompt TEXT") is written
