"""The progress of a script: one updated line on a terminal, few whole lines elsewhere."""

import itertools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.commands import convert_checkpoint, verify_checkpoint
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.run.progress_line import ProgressLine
from tests.support.harness import run_distributed, tiny_config, train_whole


def lines_after(
    seconds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a script prints that reports every second for so long."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    line = ProgressLine()
    for _ in range(seconds):
        line.update(lambda elapsed_s: f"after {elapsed_s:.0f} s")
    line.close()
    return capsys.readouterr().err


def test_lines_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every ten seconds at first, then ever rarer: a day of work is a page of lines."""
    assert lines_after(40, monkeypatch, capsys).splitlines() == [
        f"after {s} s" for s in (10, 20, 30, 40)
    ]
    assert len(lines_after(86_400, monkeypatch, capsys).splitlines()) < 150


def test_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is updated in place and erased at the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    printed = lines_after(3, monkeypatch, capsys)
    assert printed == "\r\x1b[Kafter 1 s\r\x1b[Kafter 2 s\r\x1b[Kafter 3 s\r\x1b[K"
    assert lines_after(0, monkeypatch, capsys) == "", "nothing to erase"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of every update, as if the last line were always old; no line is printed."""
    found: list[str] = []

    def update(line: ProgressLine, words: Callable[[float], str]) -> None:
        if not math.isinf(line._shown_s):
            found.append(words(2.0))

    monkeypatch.setattr(ProgressLine, "update", update)
    return found


def shares(shown: list[str]) -> dict[str, list[str]]:
    """The shares of each purpose, in their order."""
    found: dict[str, list[str]] = {}
    for words in shown:
        purpose, share = re.findall(r"^(.*): [\d.,]+(?: of [\d.,]+)? MB(?: \((\d+%)\))?", words)[0]
        found.setdefault(purpose, []).append(share)
    shown.clear()
    return found


def train_two_ranks(distributed: Distributed, root: str) -> None:
    """Save once, beside an export; ranks are processes here, so the words of each go to a file of
    its own."""
    with (
        Path(root, f"rank_{distributed.rank}.txt").open("w") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(
            ProgressLine,
            "update",
            lambda line, words: math.isinf(line._shown_s) or file.write(f"{words(2)}\n"),
        )
        options: dict[str, Any] = dict(
            experiment_dir=f"{root}/run", train_iters=1, export_interval=1
        )
        train_whole(distributed, tiny_config(distributed.world_size, **options))


def test_saving_converting_and_verifying_say_how_far_they_are(
    tmp_path: Path, shown: list[str]
) -> None:
    """Up to 100 %; a conversion checks how much it will read, too, without a share. Of a run, rank
    0 alone does."""
    run_distributed(2, train_two_ranks, str(tmp_path))
    first, second = ((tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2))
    run = tmp_path / "run"
    ends = {purpose: found[-1] for purpose, found in shares(first.splitlines()).items()}
    assert (
        ends == {"writing the export": "100%", f"saving {run}/checkpoints/1": "100%"} and not second
    )
    assert verify_checkpoint.main([str(run / "checkpoints" / "1"), "--values"]) == 0
    (steps,) = shares(shown).values()
    assert 90 <= int(steps[-1][:-1]) <= 100 and len(set(steps)) > 2, (
        "--values reads no headers again"
    )
    for number, kind in enumerate(("huggingface", "distributed")):
        words = [
            "--from",
            str(run / "checkpoints"),
            "--to",
            str(tmp_path / str(number)),
            "--format",
            kind,
        ]
        assert convert_checkpoint.main(words) == 0
        checked, written = shares(shown).values()
        assert set(checked) == {""} and written[-1] == "100%" and len(written) > 5, kind
