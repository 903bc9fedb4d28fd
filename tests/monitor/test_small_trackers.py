"""Messages by webhook and metrics.prom, as their readers see them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config import Config, RunConfig, TrackingConfig
from megatron_lite.errors import EXIT_PREEMPTED, UsageError
from megatron_lite.monitor.logging import start_logging, stop_logging
from megatron_lite.monitor.trackers import small_trackers
from megatron_lite.monitor.trackers.opening import check_trackers, open_trackers
from megatron_lite.run.secrets import WEBHOOK_VARIABLE

NAME = 'a "run"\\1'


def config(*trackers: str) -> Config:
    return Config(
        run=RunConfig(experiment_name=NAME), tracking=TrackingConfig(trackers=("jsonl", *trackers))
    )


def record(phase: str, iteration: int, **values: Any) -> dict[str, Any]:
    return {"phase": phase, "iteration": iteration, "train_iters": 9, **values}


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch):
    """A server that keeps what it is sent, and answers with the code in `answers`, or 200."""
    received: list[Any] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 (the library's name)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(answers.pop() if answers else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/secret-path")
    start_logging(None, to_console=True)
    yield received, answers
    stop_logging()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (0, "is done, after iteration 7"),
        (EXIT_PREEMPTED, "was stopped; the same command resumes, after iteration 7"),
        (5, "failed with exit code 5, after iteration 7"),
    ],
)
def test_a_run_in_a_chat(
    code: int, end: str, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line at the start, after a validation and at the end; other validations within a minute say
    nothing."""
    monkeypatch.setattr(small_trackers, "LEAST_MINUTES", 60.0)
    monkeypatch.setattr(small_trackers.time, "monotonic", lambda: 4000.0)
    trackers = open_trackers(config("webhook"), tmp_path, 0, iteration=4)
    trackers.log(record("training", 5, loss=2.0))
    trackers.log(record("validation", 5, loss=1.23456))
    trackers.log(record("validation", 6, loss=None))
    trackers.log(record("training", 7, loss=2.0))
    trackers.close(code)
    lines = ["starts after iteration 4", "iteration 5: validation loss 1.2346", end]
    texts = [f"{NAME} {line}" for line in lines]
    assert [body for *_, body in chat[0]] == [{"text": text, "content": text} for text in texts]
    assert {message[:2] for message in chat[0]} == {("/secret-path", "application/json")}


def test_a_message_that_fails_stops_nothing_and_stays_secret(
    chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat[1].append(404)
    trackers = open_trackers(config("webhook"), tmp_path, 0)
    trackers.log(record("validation", 5, loss=2.0))
    trackers.close(0)
    said = capsys.readouterr()
    assert "webhook: HTTPError: HTTP Error 404" in said.out + said.err
    assert "secret-path" not in said.out + said.err and len(chat[0]) == 3


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hooks.example",
        "file:///etc/passwd",
        "https:///x",
        # urllib quotes a part of these in its errors
        "https://hooks.example/a secret",
        "https://hooks.example:secret/x",
        "https://me:secret@hooks.example/x",
        "https://[secret]/x",
        "https://hooks.example/\u00e9",
    ],
)
def test_a_webhook_needs_an_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, address)
    with pytest.raises(UsageError, match=f"{WEBHOOK_VARIABLE} is not an https address") as caught:
        check_trackers(config("webhook"))
    assert not address or address not in str(caught.value)


def test_a_file_for_prometheus(tmp_path: Path) -> None:
    """Its own parser reads the newest numbers, and the name of the run, exactly."""
    parser = pytest.importorskip("prometheus_client.parser")
    trackers = open_trackers(config("prometheus"), tmp_path, 0)
    trackers.log(record("training", 1, loss=3.0, skip_reason="none"))
    trackers.log(record("training", 2, loss=0.1 + 0.2, **{"loss/data-set é": float("nan")}))
    trackers.log(record("validation", 2, loss=1e-300))
    trackers.close(0)
    families = parser.text_string_to_metric_families((tmp_path / "metrics.prom").read_text())
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": NAME} for sample in samples)
    found = {sample.name.removeprefix("megatron_lite_"): sample.value for sample in samples}
    assert (found["training_loss"], found["validation_loss"]) == (0.1 + 0.2, 1e-300)
    assert (found["training_iteration"], found["exit_code"]) == (2, 0)
    assert found["training_loss_data_set__"] != found["training_loss_data_set__"]
    assert found["training_time"] > 1.6e9 and "training_skip_reason" not in found
