"""When a run saves, what it keeps and what it loads, as flags of whole runs."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import TINY, run
from tests.support.results import assert_all_good, checkpoints


def test_by_time_and_by_rules(tmp_path: Path) -> None:
    """A minute is over after every iteration but the first: two ranks save each time, and keep what a rule names."""
    policy = ["--checkpoint_minutes=1e-9", "--keep_checkpoints=3:3 2:4", "--max_checkpoints=1", "--train_iters=7"]
    outcome = run([*TINY, f"--experiment_dir={tmp_path}", *policy], ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert outcome.output.count("saved ") == 7, outcome.output
    assert checkpoints(tmp_path) == [3, 4, 7]
    assert_all_good(tmp_path)
