"""docs/monitoring.md on trackers and --watch: its commands run as written, and leave the files that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_lite.config.monitoring import TRACKERS, WATCHED
from megatron_lite.monitor.trackers import read_metrics
from tests.support import documents, launch

pytestmark = pytest.mark.guides
TRACKING = documents.section(documents.read("monitoring"), "Trackers\n")
WATCH = documents.section(documents.read("monitoring"), "Watching gradients")


def commands(text: str) -> list[list[str]]:
    """The words of each command that starts a run."""
    lines = [line for block in documents.blocks(text) for line in block.replace("\\\n", "").splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("python pretrain_gpt.py ")]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Run a command on a tiny model, for 20 iterations, in a folder; returns the experiment directory."""
    monkeypatch.chdir(folder)
    changed = [word for word in words if not word.startswith(("--model=", "--sequence_length=", "--train_iters="))]
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

    tensorboard, _ = commands(TRACKING)
    folder = run(tensorboard, monkeypatch, tmp_path)
    tags = EventAccumulator(str(folder / "tensorboard")).Reload().Tags()["scalars"]
    keys = set(re.findall(r"`(training/\w+)`", TRACKING)) - {"training/language_model_loss"}
    assert len(keys) == 3 and keys <= set(tags)


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one, without a key, leaves the run's files in the folder that the guide names."""
    _, wandb = commands(TRACKING)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = run(wandb, monkeypatch, tmp_path)
    assert (folder / "wandb.json").exists() and list((folder / "runs" / "0" / "wandb").glob("offline-run-*/*.wandb"))


def test_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the guide are those of the files, and grads/norm is the gradient norm of the log."""
    (watch,) = commands(WATCH)
    folder = run(watch, monkeypatch, tmp_path)
    *_, training, record = sorted(read_metrics(folder / "metrics.jsonl"), key=lambda record: record["phase"])
    assert (training["phase"], record["phase"], record["iteration"]) == ("training", "watch", 20)
    assert record["grads/norm"] == pytest.approx(training["grad_norm"], rel=1e-6) and "updates/rms" in record
    (line,) = read_metrics(folder / "watch.jsonl")
    assert line["statistics"] == re.findall(r"`(norm|rms|largest|zeros)`", WATCH)[:4]
    assert {"parameters", "layers"} < line.keys() and "embedding" in line["layers"]["grads"]
    assert [*line["parameters"]] == ["grads", "params", "updates", "exp_avg", "exp_avg_sq"]
