"""docs/monitoring.md: its commands run as written, and leave the files and rows that it names."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_lite.commands import watch_run
from megatron_lite.config.monitoring import TRACKERS, WATCHED
from tests.support import documents, launch
from tests.support.metrics import read_metrics

pytestmark = pytest.mark.guides

PROFILES = documents.section(documents.read("monitoring"), "Profiles\n")
WATCHING = documents.section(documents.read("monitoring"), "The bar and watch_run\n")
SMALLER = {
    "--nproc-per-node=2": "--standalone --nproc-per-node=2",
    "--hidden_size=256": "--hidden_size=32",
    "--vocab_size=4096": "--vocab_size=256",
    "--sequence_length=256": "--sequence_length=32",
}


def test_the_commands_leave_the_files(tmp_path: Path) -> None:
    """Every file of profiles/ that the guide names is there, and its table has the columns that it
    explains."""
    documents.make_checkout(tmp_path)
    commands = documents.blocks(PROFILES)
    assert len(commands) == 2
    for command in commands:
        documents.run(documents.smaller(command, SMALLER), tmp_path)
    names = set(re.findall(r"`(iteration\w+-?\w*\.[\w.]+)`", PROFILES))
    there = {path.name: path for path in tmp_path.glob("runs/*/profiles/*")}
    assert names == {
        "iterations_3-7_rank_000.schedule.txt",
        "iterations_3-7_rank_000.schedule.json.gz",
        "iterations_3-7_rank_000.schedule.html",
        "iteration_3_rank_000.trace.json.gz",
        "iteration_3_rank_000.averages.txt",
    }
    assert names < there.keys() and "iterations_3-7_rank_001.schedule.txt" in there
    assert "iteration_3_rank_000.averages.txt" in there
    table = there["iterations_3-7_rank_000.schedule.txt"].read_text("utf-8").splitlines()
    for row in re.findall(r"^(?:part|step|collective)  .*$", PROFILES, re.M):
        assert row.split() in [line.split() for line in table]


def test_watch_run_shows_the_rows_of_the_guide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a run of a moment, the page has each row of the guide; without a terminal the command ends
    by itself."""
    flags = [
        f"--experiment_dir={tmp_path / 'mine'}",
        "--validation_iters=1",
        "--lr_warmup_iters=2000",
    ]
    assert launch.run([*launch.TINY, *flags]).codes == [0]
    kinds, blocks = zip(*re.findall(r"^```(\w*)\n(.*?)\n```$", WATCHING, re.M | re.S), strict=True)
    sample = blocks[1]
    assert kinds == ("bash", "") and blocks[0] == "python scripts/watch_run.py runs/mine"
    assert watch_run.main([str(tmp_path / "mine")]) == 0
    shown = capsys.readouterr().out
    assert shown.split(" | ")[:2] == sample.split(" | ")[:2]
    for label in re.findall(r"^(\w[\w/ ]*?) {2,}[\d.,e-]+ ", sample, re.M):
        assert re.search(rf"^{re.escape(label)} {{2,}}", shown, re.M), label
    for words in (
        "ms/step | data wait",
        "checkpoints: ",
        "--lr_warmup=2000: the schedule has only",
    ):
        assert words in sample and words in shown


TRACKING = documents.section(documents.read("monitoring"), "Trackers\n")
WATCH = documents.section(documents.read("monitoring"), "Watching gradients")


def commands(text: str) -> list[list[str]]:
    """The words of each command that starts a run."""
    lines = [
        line for block in documents.blocks(text) for line in block.replace("\\\n", "").splitlines()
    ]
    return [shlex.split(line)[2:] for line in lines if line.startswith("python pretrain_gpt.py ")]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Run a command on a tiny model, for 20 iterations, in a folder; returns the experiment
    directory."""
    monkeypatch.chdir(folder)
    changed = [
        word
        for word in words
        if not word.startswith(("--model=", "--sequence_length=", "--train_iters="))
    ]
    assert len(changed) == len(words) - 3
    assert launch.run([*launch.TINY, "--train_iters=20", *changed]).codes == [0]
    return folder / "runs" / "mine"


def test_tables_name_every_choice() -> None:
    """Each tracker and each word of --watch has a row."""
    rows = re.findall(r"^\| `(\w+)` \|", TRACKING + WATCH, re.M)
    assert rows == [*TRACKERS, *WATCHED]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command leaves event files with the keys of metrics.jsonl."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard, *_ = commands(TRACKING)
    folder = run(tensorboard, monkeypatch, tmp_path)
    tags = EventAccumulator(str(folder / "tensorboard")).Reload().Tags()["scalars"]
    keys = set(re.findall(r"`(training/\w+)`", TRACKING)) - {"training/language_model_loss"}
    assert len(keys) == 3 and keys <= set(tags)


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one, without a key, leaves the run's files in the folder that the guide names."""
    _, wandb, _ = commands(TRACKING)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = run(wandb, monkeypatch, tmp_path)
    assert (folder / "wandb.json").exists() and list(
        (folder / "runs" / "0" / "wandb").glob("offline-run-*/*.wandb")
    )


def test_a_tracker_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of the guide writes the losses of metrics.jsonl; one without its methods is refused
    in one line."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", TRACKING, re.M | re.S)
    (tmp_path / "my_tracker.py").write_text(code)
    (tmp_path / "no_tracker.py").write_text(code.replace("def close", "def end"))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "mine"
    words = [*launch.TINY, "--train_iters=20", f"--experiment_dir={folder}"]
    assert launch.run([*words, *re.findall(r"`(--trackers=\S+:\w+)`", TRACKING)]).codes == [0]
    records = read_metrics(folder / "metrics.jsonl")
    losses = [
        f"{record['iteration']},{record['loss']}"
        for record in records
        if record["phase"] == "training"
    ]
    assert losses and (folder / "losses.csv").read_text().splitlines() == losses
    for name, reason in (
        ("no_tracker:Losses", "no attribute 'close'"),
        ("absent:Losses", "No module named 'absent'"),
    ):
        outcome = launch.run([*words, f"--trackers={name}"])
        assert outcome.codes == [2] and re.search(
            f"^ERROR: --trackers={name}: .*{reason}.*needs$", outcome.output, re.M
        )


def test_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the guide are those of the files, and grads/norm is the gradient norm of the
    log."""
    (watch,) = commands(WATCH)
    folder = run(watch, monkeypatch, tmp_path)
    *_, training, record = sorted(
        read_metrics(folder / "metrics.jsonl"), key=lambda record: record["phase"]
    )
    assert (training["phase"], record["phase"], record["iteration"]) == ("training", "watch", 20)
    assert (
        record["grads/norm"] == pytest.approx(training["grad_norm"], rel=1e-6)
        and "updates/rms" in record
    )
    (line,) = read_metrics(folder / "watch.jsonl")
    assert line["statistics"] == re.findall(r"`(norm|rms|largest|zeros)`", WATCH)[:4]
    assert {"parameters", "layers"} < line.keys() and "embedding" in line["layers"]["grads"]
    assert [*line["parameters"]] == ["grads", "params", "updates", "exp_avg", "exp_avg_sq"]
