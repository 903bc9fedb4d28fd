"""Two small trackers: messages to a chat by webhook, and a text file for Prometheus."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

from megatron_lite.errors import EXIT_DONE, EXIT_PREEMPTED
from megatron_lite.monitor.metric_lines import Record
from megatron_lite.monitor.trackers.queued_tracker import (
    CLOSE_TIMEOUT_S,
    QueuedTracker,
    numbers_of,
)
from megatron_lite.monitor.watch import Watched
from megatron_lite.run.durable_files import replace_file

PROMETHEUS_FILE = "metrics.prom"
ANSWER_LIMIT_S = 10.0
LEAST_MINUTES = 1.0  # between the messages of two validations
_ENDS = {EXIT_DONE: "is done", EXIT_PREEMPTED: "was stopped; the same command resumes"}


class Webhook(QueuedTracker):
    """Posts a line when a run begins, after validations, and at the end, as Slack, Mattermost and
    Discord read it: {"text": line, "content": line}.

    Args:
        name: of the run, in each line.
        iteration: iterations done.
    """

    title = "webhook"

    def __init__(self, address: str, name: str, iteration: int, keeps_lines: bool) -> None:
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        self._key = address
        self._name = name
        self._iteration = iteration
        self._told_s = 0.0
        self._put(self._post, f"starts after iteration {iteration:,}")
        self._thread.start()

    # -- in the thread
    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        pass

    def _send(self, record: Record, watched: Watched | None) -> None:
        self._iteration = record["iteration"]
        now_s = time.monotonic()
        if record["phase"] == "training" or now_s - self._told_s < 60 * LEAST_MINUTES:
            return
        loss = record["loss"]
        text = "not finite" if loss is None else f"{loss:.4f}"
        self._post(f"iteration {self._iteration:,}: {record['phase']} loss {text}")
        self._told_s = now_s

    def _end(self, exit_code: int) -> None:
        how = _ENDS.get(exit_code, f"failed with exit code {exit_code}")
        self._post(f"{how}, after iteration {self._iteration:,}")

    def _post(self, text: str) -> None:
        line = f"{self._name} {text}"
        assert self._key is not None
        request = urllib.request.Request(
            self._key,
            json.dumps({"text": line, "content": line}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S):
            pass


class Prometheus(QueuedTracker):
    """Keeps the newest number of each kind in a text file, for the textfile collector of
    node_exporter.

    Source: Prometheus' text-based exposition format, version 0.0.4.
    """

    title = PROMETHEUS_FILE

    def __init__(self, path: Path, name: str, keeps_lines: bool) -> None:
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        self._path, self._values = path, dict[str, float]()
        escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._label = f'{{run="{escaped}"}}'
        self._thread.start()

    # -- in the thread
    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        pass

    def _send(self, record: Record, watched: Watched | None) -> None:
        numbers = {f"{record['phase']}/iteration": record["iteration"], **numbers_of(record)}
        for name, value in numbers.items():
            self._values["megatron_lite_" + re.sub(r"\W", "_", name, flags=re.ASCII)] = value
        self._write()

    def _end(self, exit_code: int) -> None:
        self._values["megatron_lite_exit_code"] = exit_code
        self._write()

    def _write(self) -> None:
        lines = (
            f"# TYPE {name} gauge\n{name}{self._label} {float(value)!r}\n"
            for name, value in self._values.items()
        )
        replace_file(self._path, "".join(lines).encode())
