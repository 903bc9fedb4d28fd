"""docs/monitoring.md on profiles and watch_run: its commands run as written, and leave the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import watch_run
from tests.support import documents, launch

pytestmark = pytest.mark.guides
GUIDE = documents.section(documents.read("monitoring"), "Profiles\n")
WATCHING = documents.section(documents.read("monitoring"), "The bar and watch_run\n")
SMALLER = {
    "--nproc-per-node=2": "--standalone --nproc-per-node=2",
    "--hidden_size=256": "--hidden_size=32",
    "--vocab_size=4096": "--vocab_size=256",
    "--sequence_length=256": "--sequence_length=32",
}


def test_the_commands_leave_the_files(tmp_path: Path) -> None:
    """Every file of profiles/ that the guide names is there, and its table has the columns that it explains."""
    documents.make_checkout(tmp_path)
    commands = documents.blocks(GUIDE)
    assert len(commands) == 2
    for command in commands:
        for written, smaller in SMALLER.items():
            command = command.replace(written, smaller)
        documents.run(command, tmp_path)
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
    assert watch_run.main([str(tmp_path / "mine")]) == 0
    shown = capsys.readouterr().out
    assert shown.split(" | ")[:2] == sample.split(" | ")[:2]
    for label in re.findall(r"^(\w[\w/ ]*?) {2,}[\d.,e-]+ ", sample, re.M):
        assert re.search(rf"^{re.escape(label)} {{2,}}", shown, re.M), label
    for words in ("ms/step | data wait", "checkpoints: ", "--lr_warmup_iters=2000: the schedule has only"):
        assert words in sample and words in shown
