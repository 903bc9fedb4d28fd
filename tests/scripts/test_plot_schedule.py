"""scripts/plot_schedule.py: the rates and batch sizes of a run, without running it and without
torch."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve
from scripts import plot_schedule as script

pytestmark = pytest.mark.guides

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_schedule.py"
FLAGS = (
    "--train_iters=40 --lr=1e-3 --lr_decay_style=cosine --lr_num_cycles=2 --lr_warmup_fraction=0.2"
    " --lr_rewarmup_iters=3 --min_lr_ratio=0.1"
).split()


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_one_row_per_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From 1 to train_iters, the rates of the run to the last bit, through the parser of
    pretrain_gpt.py."""
    path = tmp_path / "new folder" / "schedule.csv"
    assert script.main([*FLAGS, "--csv", str(path), "--batch_size=12", "--micro_batch_size=3"]) == 0
    head, *rows = read(path)
    assert head == ["iteration", "learning_rate", "batch_size"]
    config = resolve(parse(["--dataset_source=random", *FLAGS]).config, 1)
    expected = [(iteration, learning_rate(config, iteration), 12) for iteration in range(1, 41)]
    assert [(int(iteration), float(rate), int(size)) for iteration, rate, size in rows] == expected
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first
        == "40 iterations; learning rate: first 0.00025, highest 0.001 (iteration 4), last 0.0001"
    )
    assert second == f"written: {path}"


def test_batch_sizes_of_a_schedule(tmp_path: Path) -> None:
    """The third column follows --batch_size_schedule."""
    assert (
        script.main([*FLAGS, f"--csv={tmp_path}/x", "--batch_size_schedule", "0:2", "5:3", "39:8"])
        == 0
    )
    assert [int(row[2]) for row in read(tmp_path / "x")[1:]] == [2] * 5 + [3] * 34 + [8]


def test_imports_no_torch(tmp_path: Path) -> None:
    """As the script runs it: torch and numpy are never loaded for the table."""
    code = (
        f"import sys, runpy; sys.argv = ['x', *{FLAGS!r}, '--csv={tmp_path}/x.csv']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        f"except SystemExit as exit: print(exit.code, [name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout.splitlines()[-1] == "0 []"
    assert len(read(tmp_path / "x.csv")) == 41


def test_picture(tmp_path: Path) -> None:
    """A PNG, whatever the file is called; with and without a changing batch size."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert script.main([*FLAGS, f"--png={tmp_path}/a", f"--csv={tmp_path}/a.csv"]) == 0
    rows = [script.Row(1, 1e-3, 8), script.Row(2, 2e-3, 16)]
    script.draw(rows).savefig(tmp_path / "b", format="png")
    for name in ("a", "b"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5_000


def test_words_keep_off_the_edge() -> None:
    """Title and labels are at least a tenth of an inch away from each side of the picture."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = script.draw([script.Row(1 + index, 1e-3, 8 << index // 50) for index in range(100)])
    figure.canvas.draw()
    words, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(words.x0, words.y0, width - words.x1, height - words.y1) >= 0.1, words


def test_batch_size_axis_can_be_read() -> None:
    """At least three whole numbers that differ."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for sizes in ((8, 16), (1, 2), (256, 2048)):
        figure = script.draw(
            [script.Row(1 + index, 1e-3, sizes[index // 50]) for index in range(100)]
        )
        figure.canvas.draw()
        low, high = figure.axes[1].get_ylim()
        labels = [
            t.get_text()
            for t in figure.axes[1].get_yticklabels()
            if low <= t.get_position()[1] <= high
        ]
        assert len(labels) >= 3 and len(set(labels)) == len(labels)


def test_default_file_and_a_picture_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --csv and --png: a picture in the experiment directory or the current folder; else a
    table.

    --png asks for matplotlib before anything is written.
    """
    monkeypatch.chdir(tmp_path)
    for flags, folder in ((FLAGS, tmp_path), ([*FLAGS, "--experiment_dir=run"], tmp_path / "run")):
        if importlib.util.find_spec("matplotlib"):
            assert script.main(flags) == 0
            assert (folder / "schedule.png").read_bytes().startswith(b"\x89PNG")
        with monkeypatch.context() as without:
            without.setattr(importlib.util, "find_spec", lambda *arguments: None)
            assert script.main(flags) == 0
            assert len(read(folder / "schedule.csv")) == 41
            assert "pip install matplotlib" in capsys.readouterr().out
            assert script.main([*FLAGS, "--png=a.png", "--csv=a.csv"]) == 2
            assert (
                "--png: matplotlib is not installed (pip install matplotlib)"
                in capsys.readouterr().err
            )
    assert not list(tmp_path.glob("a.*"))


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, with the exit code of its kind."""
    for words, code, message in (
        ([*FLAGS, "--csv"], 2, "ERROR: --csv: needs a file; write --csv=schedule.csv"),
        (["--csv", *FLAGS], 2, "ERROR: --csv: needs a file"),
        (["--csv=x"], 2, "ERROR: --train_iters=0: no iterations to show"),
        ([*FLAGS, "--csv=x", "--lr_cycle_iters=5"], 2, "exclude each other"),
        ([*FLAGS, "--csv=x", "--lr_decay=5", "--lr=-1"], 2, "ERROR: unknown flag --lr_decay"),
        ([*FLAGS, "--csv=/dev/null/x"], 8, "ERROR: --csv=/dev/null/x: cannot be written: "),
    ):
        assert script.main(words) == code, words
        printed = capsys.readouterr()
        assert printed.out == "" and message in printed.err, words


def test_warnings_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warnings of a run are printed, also about repeated flags; --help describes the script and
    lists the flags."""
    assert script.main([*FLAGS, "--lr=2e-3", "--lr_warmup_fraction=1", f"--csv={tmp_path}/x"]) == 0
    errors = capsys.readouterr().err
    assert "WARNING: --lr is given twice: 0.002 is used, 0.001 is not" in errors
    assert "WARNING: --lr_warmup=1.0: no decay in cycle 1 of 2 (20 iterations)" in errors
    assert script.main(["--help"]) == 0
    assert "--png=schedule.png" in (page := capsys.readouterr().out) and "--lr_decay_style" in page
