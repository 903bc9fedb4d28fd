"""docs/sweeps.md: its command runs as written, on fewer iterations, and prints the table."""

import shlex
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.commands import sweep
from tests.support import documents

pytestmark = pytest.mark.guides
GUIDE = documents.read("sweeps")
SMALLER = {
    "--lr=1e-3,3e-3,1e-2": "--lr=1e-3,1e-2",
    "--weight_decay=0,0.1": "--weight_decay=0.1",
    "--hidden_size=64": "--hidden_size=16",
    "--train_iters=200": "--train_iters=4",
    "_interval=50": "_interval=2",
}


def test_the_command_is_valid() -> None:
    """It has six combinations."""
    (command,) = documents.blocks(GUIDE)
    words = shlex.split(command)[2:]
    before, shared = words[: words.index("--")], words[words.index("--") + 1 :]
    trials = sweep.combinations(sweep.varied(before), shared, parse(shared), 1)
    assert len(trials) == 6 and f"`{trials[0].folder}`" in GUIDE


@pytest.mark.slow
def test_the_command_ranks_its_runs(tmp_path: Path) -> None:
    documents.make_checkout(tmp_path)
    (tmp_path / "docs").symlink_to(documents.ROOT / "docs")
    (command,) = documents.blocks(GUIDE)
    printed = documents.run(documents.smaller(command, SMALLER), tmp_path).splitlines()
    (shown,) = documents.blocks(GUIDE, "text")
    head = printed.index(next(line for line in printed if line.startswith("lr ")))
    assert printed[head].split() == shown.splitlines()[0].split()
    assert [row.split()[0] for row in printed[head + 1 : head + 3]] == ["0.01", "0.001"]
    assert (tmp_path / "sweeps" / "one" / "lr=0.001,weight_decay=0.1").is_dir()
