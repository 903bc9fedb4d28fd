"""scripts/compare_runs.py: what it calls a difference, and the exit code that CI reads."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.commands import compare_runs as script
from megatron_lite.commands.compare_runs import (
    MEMORY,
    compare_losses,
    compare_options,
    median_speed,
    number_rows,
    peak,
)
from megatron_lite.config import flatten
from megatron_lite.reports.charts import SPEEDS
from megatron_lite.reports.watched_run import watched
from megatron_lite.validation import resolve
from tests.support import documents

CONFIG = {
    "lr": 3e-4,
    "zero_stage": 1,
    "gated": False,
    "data_path": ["a", "b"],
    "experiment_dir": "one",
}


def write(
    folder: Path, config: dict[str, Any] | None = None, records: list[dict[str, Any]] | None = None
) -> Path:
    """A run of 40 iterations, logged every 10, validated at the end: the first line is slow."""
    folder.mkdir()
    if records is None:
        records = [
            {
                "phase": "training",
                "iteration": at,
                "loss": 4.0 - at / 10,
                "tokens_per_sec_per_gpu": 1000.0 + at,
            }
            for at in (10, 20, 30, 40)
        ]
        records[0]["tokens_per_sec_per_gpu"] = 10.0
        records.append({"phase": "validation", "iteration": 40, "loss": 2.0, "averaged_loss": 1.9})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"run": 0, **one}) + "\n" for one in records)
    )
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def scaled(folder: Path, other: Path, **factors: float) -> Path:
    """The same run with some numbers multiplied."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.update(
            {name: record[name] * factor for name, factor in factors.items() if name in record}
        )
    return write(other, records=records)


def test_a_run_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing differs, so every tolerance is kept, even none at all."""
    one = write(tmp_path / "one")
    other = write(tmp_path / "two", CONFIG | {"experiment_dir": "two"})
    assert script.main([str(one), str(other), "--loss_tolerance=0", "--speed_tolerance=0"]) == 0
    out = capsys.readouterr().out
    assert "configuration: the same" in out
    assert "--loss_tolerance=0: kept: all losses are equal" in out
    assert "--speed_tolerance=0: kept: both are as fast" in out
    assert re.search(r"^training loss +0\.00000 at 40 +0\.00000 at 40 +4 +0 +0$", out, re.M)
    assert re.search(r"^validation averaged_loss +1\.90000 at 40 ", out, re.M)


def test_tolerances_decide_the_exit_code(tmp_path: Path) -> None:
    """A loss may differ in neither direction; only a slower run fails."""
    one, speed = write(tmp_path / "one"), "tokens_per_sec_per_gpu"
    cases: list[tuple[dict[str, float], str, int]] = [
        ({"averaged_loss": 1.02}, "", 0),
        ({"averaged_loss": 1.02}, "--loss_tolerance=0.021", 0),
        ({"averaged_loss": 1.02}, "--loss_tolerance=0.019", 1),
        ({"averaged_loss": 0.98}, "--loss-tolerance 0.019", 1),
        ({"loss": 1 + 2**-50}, "--loss_tolerance=0", 1),
        ({speed: 0.9}, "--speed_tolerance=0.11 --loss_tolerance=0", 0),
        ({speed: 0.9}, "--speed_tolerance=0.09 --loss_tolerance=0", 1),
        ({speed: 3.0}, "--speed_tolerance=0", 0),
    ]
    for index, (factors, flags, code) in enumerate(cases):
        other = scaled(one, tmp_path / str(index), **factors)
        assert script.main([str(one), str(other), *flags.split()]) == code, (factors, flags)


def test_the_report_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options as they would be typed, memory, and which limit was exceeded where."""
    config = CONFIG | {"lr": 6e-4, "gated": True, "data_path": [], "new": None}
    records = [{"phase": "training", "iteration": 10, "loss": 3.0, "max_reserved_mib": 2048.0}]
    one = write(tmp_path / "one", records=records)
    other = write(
        tmp_path / "two", config, [records[0] | {"loss": 3.3, "max_reserved_mib": 3072.0}]
    )
    assert script.main([str(one), str(other), "--loss_tolerance=0.05"]) == 1
    out = capsys.readouterr().out
    for row in (
        r"--lr +0\.0003 +0\.0006",
        r"--gated +0 +1",
        r"--data_path +a b +\(none\)",
        r"--new +\(absent\) +\(none\)",
        r"reserved, MiB +2,048 +3,072 +\+50\.0%",
    ):
        assert re.search(f"^{row}$", out, re.M), (row, out)
    assert "--loss_tolerance=0.05: EXCEEDED: training loss differs by 0.1 at iteration 10" in out
    assert "--zero_stage" not in out and "--experiment_dir" not in out


def test_losses_are_compared_at_common_iterations(tmp_path: Path) -> None:
    """Lines of another interval are left out; a loss that is lost in one run alone differs without
    bound."""

    def run(name: str, losses: dict[int, float | None]) -> Path:
        return write(
            tmp_path / name,
            records=[{"phase": "training", "iteration": i, "loss": x} for i, x in losses.items()],
        )

    one = watched(run("one", {5: 9.0, 10: 4.0, 20: 2.0, 30: 1.0, 40: None})).metrics
    other = watched(run("two", {10: 4.0, 20: 2.2, 25: 9.0, 30: 1.3, 40: None, 50: 0.5})).metrics
    (loss,) = compare_losses(one, other)
    assert loss.differences.iterations.tolist() == [10, 20, 30, 40]
    assert loss.differences.values == pytest.approx([0, 0.1, 0.3, 0]) and loss.largest == (
        pytest.approx(0.3),
        30,
    )
    ends = [float(cell.split()[0]) for cell in script.loss_row(loss)[1:3]]
    assert math.isnan(ends[0]) and ends[1] == 0.5 and script.loss_row(loss)[4] == "5.00e-02"
    lost = watched(run("three", {10: 4.0, 20: None})).metrics
    (loss,) = compare_losses(one, lost)
    assert loss.largest == (math.inf, 20)


def test_derived_values_are_marked(tmp_path: Path) -> None:
    """A value that follows from other options is told from one that does not, in each run by
    itself."""
    configs = [
        flatten(resolve(parse(["--dataset_source=random", "--train_iters=9", *words]).config, 1))
        for words in (
            ["--hidden_size=128"],
            ["--hidden_size=256", "--ffn_hidden_size=999", "--batch_size=4"],
        )
    ]
    found = {name: values for name, *values in compare_options(*json.loads(json.dumps(configs)))}
    assert found["hidden_size"] == ["128", "256"] and found["ffn_hidden_size"] == [
        "512 (derived)",
        "999",
    ]
    assert found["kv_channels"] == ["16 (derived)", "32 (derived)"]
    assert found["batch_size"] == ["1 (derived)", "4"]
    assert compare_options({"batch_size": [{}]}, {"batch_size": 1})[0][1] == "{}", "a damaged file"


def test_the_first_line_of_a_start_is_no_speed(tmp_path: Path) -> None:
    """Compilation and first allocations are in it; a run of a single line has nothing else."""
    speeds = {10: 1.0, 20: 100.0, 30: 1.0, 40: 102.0}
    records = [
        {"phase": "training", "iteration": at, "run": int(at > 20), "tokens_per_sec_per_gpu": speed}
        for at, speed in speeds.items()
    ]
    assert (
        median_speed(
            watched(write(tmp_path / "two_starts", records=records)).metrics,
            "tokens_per_sec_per_gpu",
        )
        == 101.0
    )
    run = watched(write(tmp_path / "one_line", records=records[:1]))
    assert median_speed(run.metrics, "tokens_per_sec_per_gpu") == 1.0 and math.isnan(
        median_speed(run.metrics, "mfu")
    )
    assert [*number_rows(SPEEDS, median_speed, (run, run))] == [
        ("tokens/s per rank", "1", "1", "+0.0%")
    ]
    assert not [*number_rows(MEMORY, peak, (run, run))]


def test_runs_that_cannot_be_compared_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a missing run nor a tolerance without numbers passes."""
    one = write(tmp_path / "one")
    later = write(tmp_path / "later", records=[{"phase": "training", "iteration": 45, "loss": 1.0}])
    empty = write(tmp_path / "empty", records=[])
    calls: list[tuple[list[str], int, str]] = [
        ([str(one), str(tmp_path / "nowhere")], 3, "nowhere"),
        ([str(empty), str(one)], 3, "no record yet"),
        ([str(one), str(later)], 0, ""),
        ([str(one), str(later), "--loss_tolerance=1"], 3, "no iteration with a loss in common"),
        ([str(one), str(later), "--speed_tolerance=1"], 3, "tokens_per_sec_per_gpu"),
    ]
    for words, code, message in calls:
        assert script.main(words) == code, words
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == (code != 0), words


def test_hostile_files_neither_break_nor_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any JSON may be in the folder of a run."""
    record = {"phase": "training\x1b[2J", "iteration": 1, "loss": 1.0, "loss/{0}\x1b[2J": 2.0}
    config = {
        "lr": {"a": [1]},
        "x\x1b[2J": [None, {"b": 1}],
        "long": "y" * 10**5,
        "data_path": [1, "a"],
    }
    one = write(tmp_path / "one", config, [record])
    other = write(tmp_path / "two", {}, [record | {"loss/{0}\x1b[2J": 3.0}])
    (other / "exit.json").write_text('{"status": ["\\u001b"]}')
    assert script.main([str(one), str(other), "--loss_tolerance=0.1"]) == 1
    (other / "config.json").write_text('{"lr": 1e999}')
    assert script.main([str(one), str(other), "--loss_tolerance=0.1"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.splitlines())) < 200 and "no config.json" in out


def test_options_that_name_a_run_are_left_out() -> None:
    """A value is told from an absent one, and True from 1 by neither."""
    compare: Callable[..., list[tuple[str, ...]]] = compare_options  # type: ignore[assignment]
    first, second = CONFIG, {**CONFIG, "experiment_dir": "x", "wandb_id": "y", "lr": None}
    assert compare(first, second) == [("lr", "0.0003", "(none)")]
    assert compare({"a": None}, {}) == [("a", "(none)", "(absent)")]


@pytest.mark.guides
def test_the_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, with the columns that the guide shows."""
    section = documents.section(documents.read("monitoring"), "Comparing runs\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    write(Path("runs/one"), CONFIG | {"lr": 1e-3})
    scaled(Path("runs/one"), Path("runs/two"), loss=1.001, tokens_per_sec_per_gpu=1.1)
    commands = re.findall(r"^python scripts/compare_runs.py (.*)$", section, re.M)
    assert len(commands) == 2
    for command in commands:
        assert script.main(shlex.split(command)) == 0
    out = " ".join(capsys.readouterr().out.split())
    for head in re.findall(r"^(?:run|configuration|loss|speed, median) .*$", section, re.M):
        assert " ".join(head.split()) in out, head
