"""docs/schedules.md: its commands print what stands below them, and its flags and tables are the program's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config.optimizer import DECAY_STYLES
from megatron_lite.config.values import SPELLINGS
from megatron_lite.schedules.cycles import boundaries
from megatron_lite.validation import resolve
from tests.support import warm_python

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "schedules.md").read_text("utf-8")
SHOWN = re.findall(r"^```bash\n(.*?)\n```\n\n```text\n(.*?)\n```$", GUIDE, re.M | re.S)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[f"command {index}" for index in range(len(SHOWN))])
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    """As typed into bash in a checkout: the same words, and the same numbers but for the last digits of a cosine."""
    for name in ("scripts", "megatron_lite"):
        (tmp_path / name).symlink_to(ROOT / name)
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=warm_python.environment(),
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed = result.stdout.rstrip()
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)


def test_every_command_is_run() -> None:
    """Each bash block has its output below it."""
    assert len(SHOWN) == GUIDE.count("```bash\n") == GUIDE.count("```text\n") == 3


def test_flags_of_the_guide_exist() -> None:
    """No flag is misspelled or has been renamed."""
    flags = set(re.findall(r"--(\w+)", GUIDE)) - {"csv", "png"}
    assert len(flags) > 20 and flags <= set(SPELLINGS)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_every_style_has_its_formula(style: str) -> None:
    """Each choice of --lr_decay_style has a row in the table of decays."""
    assert re.search(rf"^\| [^|]*`{style}`[^|]*\| [^|]+ \|", GUIDE, re.M)


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--lr_num_cycles=3", [333, 666, 1000]),
        ("--lr_cycle_iters=300", [300, 600, 1000]),
        ("--lr_cycle_fraction=0.3", [300, 600, 1000]),
        ("--lr_cycle_lengths 300 200", [300, 500, 1000]),
        ("--lr_cycle_minima 300 500", [300, 500, 1000]),
    ],
)
def test_ends_of_cycles(words: str, ends: list[int]) -> None:
    """The table of cycles, with T = 1000."""
    assert f"`{words}`" in GUIDE
    config = resolve(parse(["--dataset_source=random", "--train_iters=1000", *words.split()]).config, 1)
    count, boundary = boundaries(config.learning_rate)
    assert [boundary(index) for index in range(count + 1)] == [0, *ends]
