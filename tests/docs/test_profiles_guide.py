"""docs/monitoring.md on profiles and watch_run: its commands run as written, and leave the files that it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import launch, warm_python
from tests.support.loading import loaded

pytestmark = pytest.mark.guides
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
GUIDE = TEXT.partition("\n## Profiles\n")[2].partition("\n## ")[0]
WATCHING = TEXT.partition("\n## The bar and watch_run\n")[2].partition("\n## ")[0]


def test_the_commands_leave_the_files(tmp_path: Path) -> None:
    """Every file of profiles/ that the guide names is there, and its table has the columns that it explains."""
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    (tmp_path / "megatron_lite").symlink_to(ROOT / "megatron_lite")
    commands = re.findall(r"^```bash\n(.*?)\n```$", GUIDE, re.M | re.S)
    assert len(commands) == 2
    for command in commands:
        command = command.replace("--nproc-per-node=2", "--standalone --nproc-per-node=2")
        words = ["bash", "-c", command]
        result = subprocess.run(
            words, cwd=tmp_path, env=warm_python.environment(), capture_output=True, text=True, timeout=180
        )
        assert result.returncode == 0, result.stdout + result.stderr
    names = set(re.findall(r"`(iteration\w+-?\w*\.[\w.]+)`", GUIDE))
    there = {path.name: path for path in tmp_path.glob("runs/*/profiles/*")}
    assert names == {
        "iterations_3-7_rank_000.schedule.txt",
        "iterations_3-7_rank_000.schedule.json.gz",
        "iterations_3-7_rank_000.schedule.html",
        "iteration_3_rank_000.trace.json.gz",
    }
    assert names < there.keys() and "iterations_3-7_rank_001.schedule.txt" in there
    assert "iteration_3_rank_000.averages.txt" in there
    table = there["iterations_3-7_rank_000.schedule.txt"].read_text("utf-8").splitlines()
    for row in re.findall(r"^(?:part|step|collective)  .*$", GUIDE, re.M):
        assert row.split() in [line.split() for line in table]


def test_watch_run_shows_the_rows_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a run of a moment, the page has each row of the guide; without a terminal the command ends by itself."""
    flags = [f"--experiment_dir={tmp_path / 'mine'}", "--validation_iters=1", "--lr_warmup_iters=2000"]
    assert launch.run([*launch.TINY, *flags]).codes == [0]
    kinds, blocks = zip(*re.findall(r"^```(\w*)\n(.*?)\n```$", WATCHING, re.M | re.S), strict=True)
    sample = blocks[1]
    assert kinds == ("bash", "") and blocks[0] == "python scripts/watch_run.py runs/mine"
    with loaded("watch_run") as script:
        assert script.main([str(tmp_path / "mine")]) == 0
    shown = capsys.readouterr().out
    assert shown.split(" | ")[:2] == sample.split(" | ")[:2]
    for label in re.findall(r"^(\w[\w/ ]*?) {2,}[\d.,e-]+ ", sample, re.M):
        assert re.search(rf"^{re.escape(label)} {{2,}}", shown, re.M), label
    for words in ("ms/step | data wait", "checkpoints: ", "--lr_warmup_iters=2000: the schedule has only"):
        assert words in sample and words in shown
