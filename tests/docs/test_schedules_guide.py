"""docs/schedules.md: its flags and tables are the program's; test_guides.py runs its commands."""

from __future__ import annotations

import re

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config.optimizer import DECAY_STYLES
from megatron_lite.schedules.cycles import boundaries
from megatron_lite.validation import resolve
from tests.support import documents

pytestmark = pytest.mark.guides

GUIDE = documents.read("schedules")


def test_every_style_has_its_formula() -> None:
    """Each choice of --lr_decay_style has a row in the table of decays."""
    for style in DECAY_STYLES:
        assert re.search(rf"^\| [^|]*`{style}`[^|]*\| [^|]+ \|", GUIDE, re.M), style


CYCLES = {
    "--lr_num_cycles=3": [333, 666, 1000],
    "--lr_cycle_iters=300": [300, 600, 1000],
    "--lr_cycle_fraction=0.3": [300, 600, 1000],
    "--lr_cycle_lengths 300 200": [300, 500, 1000],
    "--lr_cycle_minima 300 500": [300, 500, 1000],
}


def test_ends_of_cycles() -> None:
    """The table of cycles, with T = 1000."""
    for words, ends in CYCLES.items():
        assert f"`{words}`" in GUIDE
        config = resolve(parse(["--dataset_source=random", "--train_iters=1000", *words.split()]).config, 1)
        count, boundary = boundaries(config.learning_rate)
        assert [boundary(index) for index in range(count + 1)] == [0, *ends], words
