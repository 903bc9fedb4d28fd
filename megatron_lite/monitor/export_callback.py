"""--export_callback_script: a program of the user's that is told of every export, beside the training.

It is started as `script <export folder>` by rank 0 once the folder is complete under its name, with the environment of
this program and the variables of --export_callback_env in it. One runs at a time, in the order of the exports; training
goes on meanwhile. What it prints goes to the log, line by line, without the values of those variables. When it fails,
a warning says so, and nothing else happens. A run that ends waits for it, up to a limit, and then ends it: nothing
outlives the run but what the script itself has detached.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import cast

from megatron_lite.errors import UsageError
from megatron_lite.monitor.logging import get_logger
from megatron_lite.run.secrets import masked

# A run that was stopped by a signal has little time left; one that has ended waits for half of --startup_timeout.
STOPPED_WAIT_S = 10.0
LONGEST_LINE = 4096  # characters of its output
MOST_LINES = 1000  # of one export
_KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
_DRAIN_S = 1.0  # for the last lines of a script that has ended


def open_callback(script: str, environment: Mapping[str, str], variables: Collection[str]) -> ExportCallback:
    """What runs a script, which is looked at now, before any training; "": no script.

    environment: the whole of the script's. variables: names of those in it that may be secrets.

    Raises:
        UsageError: if it is no file, or not executable.
    """
    if not script:
        return ExportCallback()
    typed = f"--export_callback_script={script}"
    if not os.path.exists(script):
        raise UsageError(f"{typed}: there is no such file; give the path of a program")
    if not os.path.isfile(script):
        raise UsageError(f"{typed}: it is no file; give the path of a program")
    if not os.access(script, os.X_OK):
        raise UsageError(f"{typed}: it is not executable; run: chmod +x {script}")
    return ExportCallback(script, environment, [environment[name] for name in variables])


class ExportCallback:
    """Runs the script for one folder after the other, in a thread of its own; without a script it does nothing."""

    def __init__(self, script: str = "", environment: Mapping[str, str] | None = None, secrets: Collection[str] = ()):
        """environment: the whole of the script's. secrets: what its output is not to show."""
        self._script, self._environment, self._secrets = os.path.abspath(script), environment, secrets
        self._folders: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: list[Path] = []  # in order; the first is under way
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        if script:
            self._thread = threading.Thread(target=self._work, daemon=True, name="export-callback")
            self._thread.start()

    def start(self, folder: Path) -> None:
        """Run the script for a folder, now or after those before it; returns at once."""
        if self._thread is not None:
            with self._lock:
                self._waiting.append(folder)
            self._folders.put(folder)

    def close(self, limit_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for what is under way, up to a limit or until somebody asks to stop; end it then. Never raises."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._folders.put(None)
        if self._left() and limit_s > 0:
            get_logger().info("waiting up to %.0f s for --export_callback_script: %s", limit_s, self._left()[0])
        deadline_s = time.monotonic() + limit_s
        while thread.is_alive() and time.monotonic() < deadline_s and not stopped():
            thread.join(0.05)
        if not thread.is_alive():
            return
        with self._lock:
            self._ended = True
            process, left = self._process, ", ".join(map(str, self._waiting))
        if left:
            get_logger().warning(
                "--export_callback_script has not ended, and the run does: it is ended, too. Run it again for %s", left
            )
        if process is not None:
            _end(process)
        thread.join(2 * _KILL_AFTER_S)

    def _left(self) -> list[Path]:
        with self._lock:
            return list(self._waiting)

    def _work(self) -> None:
        while (folder := self._folders.get()) is not None and not self._ended:
            try:
                self._run(folder)
            except Exception as error:  # a thread's exception would reach nobody
                get_logger().warning("--export_callback_script: %s", masked(str(error), self._secrets))
            with self._lock:
                self._waiting.remove(folder)
                self._process = None

    def _run(self, folder: Path) -> None:
        start_s = time.monotonic()
        try:
            with self._lock:
                if self._ended:
                    return
                process = self._process = subprocess.Popen(
                    [self._script, str(folder)],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            reason = error.strerror or error
            get_logger().warning("--export_callback_script=%s cannot be started: %s", self._script, reason)
            return
        # Apart from the wait: something that the script leaves behind may hold its output open.
        reader = threading.Thread(target=self._log, args=(process, folder.name), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(_DRAIN_S)
        if code and not self._ended:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            get_logger().warning(
                "--export_callback_script ended with %s for %s; the export is complete, and training goes on",
                how,
                folder,
            )
        elif not code:
            get_logger().info("--export_callback_script is done with %s (%.1f s)", folder, time.monotonic() - start_s)

    def _log(self, process: subprocess.Popen[bytes], name: str) -> None:
        """Its output, line by line; all of it is read, or it would wait for us."""
        stream = io.TextIOWrapper(cast(io.BufferedReader, process.stdout), "utf-8", "replace")
        longest, count = max((len(value) for value in self._secrets), default=0), 0
        with contextlib.suppress(OSError, ValueError), stream:
            while line := stream.readline(LONGEST_LINE):
                text = "".join(c for c in line if c.isprintable() or c == "\t").rstrip()
                shown = masked(text, self._secrets)
                if not line.endswith("\n") and len(line) == LONGEST_LINE:
                    while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith("\n"):
                        pass
                    shown = shown[: max(0, len(shown) - longest)] + " (cut)"  # where it was cut, a value may begin
                count += 1
                if count <= MOST_LINES:
                    get_logger().info("export %s: %s", name, shown)
                elif count == MOST_LINES + 1:
                    get_logger().info("export %s: (further lines are not logged)", name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and what it has started, in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER_S)
            return
