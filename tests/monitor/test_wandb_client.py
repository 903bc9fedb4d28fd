"""Weights & Biases with its real client: offline, against a server on loopback that dies, and
killed."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_lite.config import Config, RunConfig, TrackingConfig
from megatron_lite.monitor.logging import start_logging, stop_logging
from megatron_lite.monitor.trackers import wandb_tracker
from megatron_lite.monitor.trackers.opening import open_trackers
from megatron_lite.monitor.watch import Histogram, Summary, Watched
from tests.support import launch
from tests.support.metrics import read_metrics
from tests.support.wandb_server import WandbServer

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
CANARY = "c0ffee00" * 5
OPTIONS = TrackingConfig(
    trackers=("jsonl", "wandb"),
    wandb_entity_name="me",
    wandb_project_name="project",
    wandb_group_name="v1",
    wandb_tags=("a", "b"),
    wandb_status_interval=2,
    wandb_post_alerts=True,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """A key, a home of our own, no proxy, and a log."""
    for name in (
        "WANDB_MODE",
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "WANDB_API_KEY_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    start_logging(tmp_path / "log.txt", to_console=False)
    yield
    stop_logging()


def opened(folder, **options):
    tracking = dataclasses.replace(OPTIONS, **options)
    return open_trackers(
        Config(run=RunConfig(experiment_name="mine"), tracking=tracking), folder, 0
    )


def log(trackers, *iterations):
    """Log records, and return the milliseconds of the slowest call."""
    slowest_s = 0.0
    for iteration in iterations:
        start_s = time.perf_counter()
        trackers.log(
            {
                "phase": "training",
                "iteration": iteration,
                "train_iters": 100,
                "loss": 1.0 / iteration,
            }
        )
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
    return 1e3 * slowest_s


def wait_until(condition, limit_s=30.0):
    """Return the seconds until a condition held."""
    start_s = time.perf_counter()
    while not condition():
        assert time.perf_counter() - start_s < limit_s
        time.sleep(0.02)
    return time.perf_counter() - start_s


def keeps_every_point(tmp_path):
    """Whether the file that `wandb sync` would send holds iterations 1 to 99."""
    (kept,) = tmp_path.glob("exp/runs/0/wandb/run-*/*.wandb")
    # before each value, its key and length
    points = set(re.findall(rb"iteration\x82\x01.(\d+)", kept.read_bytes()))
    return {str(iteration).encode() for iteration in range(1, 100)} <= points


def services():
    """The client's processes that this process has started and that still run."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a child that has just ended
            for child in (thread / "children").read_text().split():
                # empty if it has ended
                if b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def holds_the_key(folder):
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


def test_offline(tmp_path):
    """Files that can be sent later, under the chosen id."""
    trackers = opened(tmp_path / "exp", wandb_mode="offline", wandb_id="my-id_1")
    log(trackers, 1, 2)
    trackers.close(0)
    assert len(list((tmp_path / "exp/runs/0/wandb").glob("offline-run-*-my-id_1/*.wandb"))) == 1
    text = (tmp_path / "log.txt").read_text()
    assert text.count("offline (--wandb_mode=offline); to send the run later: wandb sync") == 1
    assert "Error" not in text and not holds_the_key(tmp_path)


def test_a_run_that_fails(tmp_path, monkeypatch):
    """Its history with statistics and histograms, its alerts and its exit code arrive; the next
    start continues it."""
    histogram = Histogram([0, 2, 1], [-2.0, -1.0, 1.0, 2.0], 3.0)
    watched = Watched(
        {"grads": {"head": Summary(1.5, 0.5, 1.0, 0.25)}}, counts={"grads": {"head": histogram}}
    )
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        trackers = opened(tmp_path / "exp")
        log(trackers, 1, 2)
        trackers.log({"phase": "watch", "iteration": 2, "grads/norm": 1.5}, watched)
        trackers.close(5)
        opened(tmp_path / "exp").close(0)
    assert server.alerts[:3] == [
        "mine started",
        "mine at iteration 2",
        "mine failed with exit code 5",
    ]
    assert server.exit_codes == [5, 0]
    first, second, third = server.history
    assert (first["iteration"], first["training/loss"], first["training/language_model_loss"]) == (
        1,
        1.0,
        1.0,
    )
    assert (
        second["training/loss"] == 0.5
        and third["watch/grads/norm"] == third["watch/grads/norm/head"] == 1.5
    )
    found = third["watch/grads/histogram/head"]
    assert (found["values"], found["bins"]) == ([0, 2, 1], [-2.0, -1.0, 1.0, 2.0])
    assert len({run["name"] for run in server.runs}) == 1 and not holds_the_key(tmp_path)


def test_a_server_that_dies(tmp_path, monkeypatch):
    """The run arrives with its fields and alerts; then the server dies, and only the end waits,
    briefly."""
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT_S", 2)
    monkeypatch.setattr(wandb_tracker, "FINISH_TIMEOUT_S", 1)
    monkeypatch.setattr(wandb_tracker, "FLUSH_S", 0.3)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        trackers = opened(tmp_path / "exp")
        log(trackers, 1, 2)
        wait_until(lambda: len(server.alerts) == 2)
        trackers._destinations[-1]._limit_s = 1.0  # for the end
        server.die()
        slowest_ms = log(trackers, *range(3, 100))
        wait_until(lambda: keeps_every_point(tmp_path))
        start_s = time.perf_counter()
        trackers.close(0)
        closing_s = time.perf_counter() - start_s
    run = server.runs[0]
    assert (run["entity"], run["project"], run["groupName"], run["displayName"]) == (
        "me",
        "project",
        "v1",
        "mine",
    )
    assert run["name"] in (tmp_path / "exp/wandb.json").read_text() and run["tags"] == ["a", "b"]
    assert server.alerts == ["mine started", "mine at iteration 2"]
    assert slowest_ms < 1000 and closing_s < 6 and not services()
    assert len(read_metrics(tmp_path / "exp/metrics.jsonl")) == 99
    assert "to send what is missing: wandb sync" in (
        tmp_path / "log.txt"
    ).read_text() and not holds_the_key(tmp_path)
    assert keeps_every_point(tmp_path)


def test_a_client_that_dies(tmp_path, monkeypatch):
    """Its process is killed: later points are lost there and counted, the log says so once, and the
    run closes."""
    trackers = opened(tmp_path / "exp", wandb_mode="offline")
    wait_until(lambda: list(tmp_path.glob("exp/runs/0/wandb/*/*.wandb")))
    log(trackers, 1)
    (service,) = services()
    os.kill(service, signal.SIGKILL)
    time.sleep(0.2)
    slowest_ms = log(trackers, *range(2, 21))
    trackers.close(0)
    text = (tmp_path / "log.txt").read_text()
    assert (
        slowest_ms < 1000
        and "points did not reach Weights & Biases; metrics.jsonl has them all" in text
    )
    assert len(read_metrics(tmp_path / "exp/metrics.jsonl")) == 20


@contextlib.contextmanager
def silent_server():
    """The address of a server that never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_a_server_that_never_answers(tmp_path, monkeypatch):
    """The run is offline within 10 s, with everything logged meanwhile."""
    with silent_server() as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        start_s = time.perf_counter()
        trackers = opened(tmp_path / "exp")
        assert log(trackers, *range(1, 100)) < 1000
        wait_until(lambda: list(tmp_path.glob("exp/runs/0/wandb/offline-run-*/*.wandb")))
        assert time.perf_counter() - start_s < 10
        trackers.close(0)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("Weights & Biases is offline (") == 1 and "did not reach" not in text


@pytest.mark.slow
@pytest.mark.parametrize("server", ["never answers", "dies"])
def test_a_whole_run_ends_well_without_the_server(tmp_path, server):
    """Exit code 0, all records in metrics.jsonl, the checkpoint saved, in time, and no process is
    left."""
    with silent_server() as silent, WandbServer() as dying:
        variables = {"WANDB_BASE_URL": dying.url if server == "dies" else silent}
        variables |= {
            "WANDB_API_KEY": CANARY,
            "HOME": str(tmp_path / "home"),
            "WANDB_ERROR_REPORTING": "false",
        }
        flags = [*launch.TINY, f"--experiment_dir={tmp_path / 'exp'}", "--wandb_entity_name=me"]
        if server == "dies":
            threading.Timer(0.0, lambda: (wait_until(lambda: dying.runs), dying.die())).start()
        outcome = launch.run(flags, variables=variables)
    assert outcome.codes == [0] and outcome.seconds < 60, outcome.output
    assert len(read_metrics(tmp_path / "exp/metrics.jsonl")) == 6 and CANARY not in outcome.output
    assert "Weights & Biases" in outcome.output and (tmp_path / "exp/checkpoints/6").is_dir()
