"""Commands of all documents that start a run have legal flags as written, with sizes that no test trains."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron_lite import validation
from megatron_lite.cli import parse
from tests.support import documents
from tests.support.documents import ROOT

pytestmark = pytest.mark.guides
UNKNOWN = ("$", "<", "...", "@", "--world_size", "pretrained", "--dry_run", "--load_")  # run, or resolved, elsewhere


def commands() -> list[tuple[str, str]]:
    """Document and command, for each command that says everything itself."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in documents.blocks(path.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if "pretrain_gpt.py --" in line and not any(word in line for word in UNKNOWN):
                    found.append((path.name, " ".join(line.split())))
    return found


def test_flags_are_legal() -> None:
    assert len(commands()) >= 10
    for document, command in commands():
        launcher, _, flags = command.partition("pretrain_gpt.py ")
        ranks = re.search(r"--nproc-per-node=(\d+)", launcher)
        config = parse.parse(shlex.split(flags, comments=True)).config
        assert validation.resolve(config, int(ranks[1]) if ranks else 1), document
