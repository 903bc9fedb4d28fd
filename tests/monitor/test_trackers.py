"""metrics.jsonl: whole lines, repaired, read back exactly; never a reason to stop."""

import json
import os
from pathlib import Path

import pytest

from megatron_lite.config import Config, TrackingConfig
from megatron_lite.errors import StorageError
from megatron_lite.monitor import logging as our_logging
from megatron_lite.monitor.logging import start_logging, stop_logging
from megatron_lite.monitor.trackers.metrics_file import MetricsFile
from megatron_lite.monitor.trackers.opening import Trackers, open_trackers
from tests.support.metrics import read_metrics

LINES = Config(tracking=TrackingConfig(trackers=("jsonl",)))


@pytest.fixture(autouse=True)
def handlers_removed():
    yield
    stop_logging()


def log(directory, *records, run=0):
    trackers = open_trackers(LINES, directory, run)
    for record in records:
        trackers.log(record)
    trackers.close(0)
    return directory / "metrics.jsonl"


def training(iteration, loss, **more):
    return {"phase": "training", "iteration": iteration, "loss": loss, **more}


def test_records_come_back_exactly(tmp_path):
    """Shortest round-trip floats: values read equal values written, bit for bit."""
    losses = [0.1 + 0.2, 1 / 3, 1e-300, 5e-324, 123456789.123456789, -0.0]
    path = log(tmp_path, *(training(index + 1, loss) for index, loss in enumerate(losses)), run=7)
    records = read_metrics(path)
    assert [record["loss"].hex() for record in records] == [loss.hex() for loss in losses]
    assert all(record["run"] == 7 and record["time"] > 1.6e9 for record in records)
    assert '"loss": 0.30000000000000004' in path.read_text().splitlines()[0]


def test_values_that_json_lacks_are_null(tmp_path):
    path = log(tmp_path, training(1, float("nan"), grad_norm=float("inf"), skip_reason="overflow"))
    record = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}")
    )
    assert (record["loss"], record["grad_norm"], record["skip_reason"]) == (None, None, "overflow")


def test_each_record_is_one_write(tmp_path, monkeypatch):
    trackers = open_trackers(LINES, tmp_path, 0)
    writes = []
    write = os.write
    monkeypatch.setattr(
        our_logging.os, "write", lambda fd, data: writes.append(data) or write(fd, data)
    )
    trackers.log(training(1, 2.0))
    assert len(writes) == 1 and writes[0].endswith(b"}\n")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1  # on disk before close
    trackers.close(0)


def test_a_later_line_replaces_an_earlier_one(tmp_path):
    log(
        tmp_path,
        training(1, 5.0),
        training(2, 4.0),
        {"phase": "validation", "iteration": 2, "loss": 4.5},
    )
    path = log(tmp_path, training(2, 3.0), training(3, 2.0), run=1)
    records = [
        (record["phase"], record["iteration"], record["loss"]) for record in read_metrics(path)
    ]
    assert records == [
        ("training", 1, 5.0),
        ("training", 2, 3.0),
        ("validation", 2, 4.5),
        ("training", 3, 2.0),
    ]
    assert len(path.read_text().splitlines()) == 5  # nothing is taken out of the file


def test_a_line_torn_anywhere_is_repaired_on_the_next_start(tmp_path):
    path = log(tmp_path, training(1, 5.0), training(2, 4.0))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) + 1):
        path.write_bytes(whole[:cut])
        log(tmp_path, training(3, 3.0))
        iterations = [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
        # All but the newline is a whole record: it is kept.
        assert iterations == ([1, 2, 3] if cut >= len(whole) - 1 else [1, 3])


def test_damaged_content_is_left_out_not_fatal(tmp_path):
    for content in (b"", b"\n", b"\0" * 4096, b"torn", b"[1]\n", b"\xff\xfe\n"):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        records = read_metrics(log(tmp_path, training(1, 5.0)))
        assert [record["loss"] for record in records] == [5.0], content


def test_a_full_disk_is_reported_once_and_counted(tmp_path, capsys, monkeypatch):
    start_logging(None, to_console=True)
    trackers = open_trackers(LINES, tmp_path, 0)
    trackers.log(training(1, 5.0))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(our_logging.os, "write", lambda fd, data: write(fd, data[:10]))
        trackers.log(training(2, 4.0))
        trackers.log(training(3, 3.0))
    trackers.log(training(4, 2.0))
    trackers.close(0)
    assert [record["iteration"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    out = capsys.readouterr().out
    assert out.count("cannot write") == 1 and "2 lines of" in out


def test_real_enospc(capsys):
    """/dev/full refuses every write."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    start_logging(None, to_console=True)
    file = MetricsFile(Path("/dev/full"))
    file.log(training(1, 1.0))
    assert file.lost_lines == 1 and "No space left" in capsys.readouterr().out


def test_without_an_experiment_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trackers = open_trackers(LINES, None, 0)
    trackers.log(training(1, 5.0))
    trackers.close(0)
    Trackers().log(training(1, 5.0))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match="metrics.jsonl"):
        open_trackers(LINES, tmp_path, 0)


def test_close_twice_and_late_records_do_nothing(tmp_path):
    trackers = open_trackers(LINES, tmp_path, 0)
    trackers.close(0)
    trackers.close(0)
    trackers.log(training(1, 1.0))
    assert read_metrics(tmp_path / "metrics.jsonl") == []
