"""TensorBoard: events read back with its own reader, restarts that replace steps, and a writer that
blocks or fails."""

import sys
import threading
import time
from importlib.util import find_spec

import pytest

from megatron_lite.config import Config, TrackingConfig
from megatron_lite.errors import EXIT_PREEMPTED, UsageError
from megatron_lite.monitor.logging import start_logging, stop_logging
from megatron_lite.monitor.trackers.opening import check_trackers, open_trackers
from megatron_lite.monitor.trackers.queued_tracker import TensorBoardTracker
from megatron_lite.monitor.watch import Histogram, Summary, Watched
from tests.support.metrics import read_metrics

pytestmark = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
CONFIG = Config(tracking=TrackingConfig(trackers=("jsonl", "tensorboard")))


@pytest.fixture(autouse=True)
def log_to_the_console():
    start_logging(None, to_console=True)
    yield
    stop_logging()


def training(iteration, loss):
    return {
        "phase": "training",
        "iteration": iteration,
        "train_iters": 9,
        "loss": loss,
        "skip_reason": "none",
    }


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalars(folder, tag):
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_events_are_those_of_metrics_jsonl(tmp_path):
    """Every number by phase and key, at its iteration and time; what goes with a record, histograms
    included."""
    trackers = open_trackers(CONFIG, tmp_path, 0)
    trackers.log(training(1, 2.5))
    trackers.log({"phase": "validation", "iteration": 1, "loss": None, "perplexity": 7})
    histogram = Histogram(counts=[0, 2, 0, 1, 0], edges=[-4, -2, -1, 1, 2, 4], squares=5.0)
    watched = Watched(
        {"grads": {"head": Summary(1.5, 0.5, 1.0, 0.25)}}, counts={"grads": {"head": histogram}}
    )
    trackers.log({"phase": "watch", "iteration": 1, "grads/norm": 1.5}, watched)
    trackers.close(0)
    found = events(tmp_path / "tensorboard")
    assert sorted(found.Tags()["scalars"]) == [
        "training/loss",
        "training/run",
        "validation/perplexity",
        "validation/run",
        *(
            f"watch/grads/{name}"
            for name in ("largest/head", "norm", "norm/head", "rms/head", "zeros/head")
        ),
        "watch/run",
    ]
    (loss,), (record, *_) = found.Scalars("training/loss"), read_metrics(tmp_path / "metrics.jsonl")
    assert (loss.step, loss.value, loss.wall_time) == (1, 2.5, record["time"])
    (event,) = found.Histograms("watch/grads/histogram/head")
    value = event.histogram_value
    assert (event.step, value.num, value.sum_squares, value.min, value.max) == (1, 3, 5.0, -2, 2)
    assert (value.bucket_limit, value.bucket) == ([-1, 1, 2], [2, 0, 1])


def test_a_restart_replaces_what_it_repeats(tmp_path):
    """The reader shows the first start up to the checkpoint, then the second one; a new run shows
    itself only."""
    for done, losses in ((0, (5.0, 4.0, 3.0)), (2, (2.5, 2.0))):
        trackers = open_trackers(CONFIG, tmp_path, 0, iteration=done)
        for number, loss in enumerate(losses, done + 1):
            trackers.log(training(number, loss))
        trackers.close(0)
    assert scalars(tmp_path / "tensorboard", "training/loss") == [
        (1, 5.0),
        (2, 4.0),
        (3, 2.5),
        (4, 2.0),
    ]
    trackers = open_trackers(CONFIG, tmp_path, 2)
    trackers.log(training(1, 6.0))
    trackers.close(0)
    assert scalars(tmp_path / "tensorboard", "training/loss") == [(1, 6.0)]


def test_another_folder(tmp_path):
    """--tensorboard_dir needs no experiment directory."""
    tracking = TrackingConfig(trackers=("tensorboard",), tensorboard_dir=str(tmp_path / "tb"))
    trackers = open_trackers(Config(tracking=tracking), None, 0)
    trackers.log(training(1, 2.5))
    trackers.close(0)
    assert scalars(tmp_path / "tb", "training/loss") == [(1, 2.5)]


def test_a_missing_package_is_named_before_work(monkeypatch):
    """One line with the command that helps."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        UsageError, match="--trackers=tensorboard .*python -m pip install tensorboard"
    ):
        check_trackers(CONFIG)


def hanging_writer(never):
    """A writer whose first call hangs until the event is set."""

    class Writer:
        def __init__(self, folder, flush_secs):
            pass

        def add_event(self, event):
            never.wait(20)

        def close(self):
            pass

    return Writer


def test_a_stopped_run_does_not_wait_for_a_writer_that_hangs(monkeypatch, capsys):
    """Who stops a run may kill it soon."""
    monkeypatch.setattr("megatron_lite.monitor.trackers.queued_tracker.STOPPED_LIMIT_S", 0.1)
    never, start_s = threading.Event(), time.perf_counter()
    TensorBoardTracker(hanging_writer(never), "nowhere", 0, keeps_lines=False).close(EXIT_PREEMPTED)
    assert time.perf_counter() - start_s < 5 and "does not answer" in capsys.readouterr().out
    never.set()


def test_a_writer_that_hangs_costs_no_time(monkeypatch, capsys):
    """A thousand records, of which the first blocks, take the time of filling a queue; the rest is
    counted."""
    monkeypatch.setattr("megatron_lite.monitor.trackers.queued_tracker.CLOSE_TIMEOUT_S", 0.1)
    never = threading.Event()
    tracker = TensorBoardTracker(hanging_writer(never), "nowhere", 0, keeps_lines=False)
    start = time.perf_counter()
    for iteration in range(1, 1201):
        tracker.log({**training(iteration, 1.0), "time": 0.0})
    spent_ms = 1e3 * (time.perf_counter() - start) / 1200
    tracker.close(0)
    never.set()
    out = capsys.readouterr().out
    assert spent_ms < 1.0 and out.count("too slow") == 1
    assert "does not answer" in out and "points did not reach TensorBoard" in out


def test_a_folder_that_cannot_be_written_costs_points_only(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file")
    trackers = open_trackers(CONFIG, tmp_path, 0)
    trackers.log(training(1, 2.0))
    trackers.close(0)
    assert (
        "no TensorBoard: " in capsys.readouterr().out
        and len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    )
