"""Run a user's program after every export while training continues (--export_callback_script).

Rank 0 starts `script <export folder>` once the folder is complete under its final name, with this
program's environment and the variables of --export_callback_env. Scripts run one at a time, in the
order of the exports. Their output goes to the log line by line, with the values of those variables
masked. A failure is only a warning. At its end the run waits for the script up to a limit, then
kills it: only processes that the script has detached outlive the run.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

from megatron_lite.errors import UsageError
from megatron_lite.monitor.logging import get_logger
from megatron_lite.run.secrets import masked

# A run stopped by a signal has little time; a completed run waits for half of --startup_timeout.
STOPPED_WAIT_S = 10.0
MAX_LINE_CHARACTERS = 4096
MAX_LINES = 1000  # per export
_KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
_DRAIN_S = 1.0  # for the last lines of a script that has ended


def open_callback(
    script: str, environment: Mapping[str, str], variables: Collection[str]
) -> ExportCallback:
    """Check the script before any training and return its runner; "" means no script.

    environment: the script's whole environment. variables: names in it whose values may be secrets.

    Raises:
        UsageError: if the script is not a file, or not executable.
    """
    if not script:
        return ExportCallback()
    typed = f"--export_callback_script={script}"
    if not os.path.isfile(script):
        fact = "it is not a file" if os.path.exists(script) else "there is no such file"
        raise UsageError(f"{typed}: {fact}; give the path of a program")
    if not os.access(script, os.X_OK):
        raise UsageError(f"{typed}: it is not executable; run: chmod +x {script}")
    return ExportCallback(script, environment, [environment[name] for name in variables])


class ExportCallback:
    """Runs the script for one folder at a time, in a separate thread; does nothing without a
    script."""

    def __init__(
        self,
        script: str = "",
        environment: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
    ):
        """Prepare the runner. environment: the script's whole environment. secrets: values to hide
        from its output."""
        self._script = os.path.abspath(script) if script else ""
        self._environment, self._secrets = environment, secrets
        self._pool = ThreadPoolExecutor(1, "export-callback")
        self._exports: list[tuple[Path, Future[None]]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def start(self, folder: Path) -> None:
        """Queue the script for a folder; return immediately."""
        if self._script:
            self._exports.append((folder, self._pool.submit(self._run, folder)))

    def close(self, limit_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for the scripts, up to a limit or until `stopped`, then kill them. Never raises."""
        left, deadline_s = self._left(), time.monotonic() + limit_s
        if left and limit_s > 0:
            get_logger().info(
                "waiting up to %.0f s for --export_callback_script: %s", limit_s, left[0]
            )
        while (left := self._left()) and time.monotonic() < deadline_s and not stopped():
            time.sleep(0.05)
        self._ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if left:
            folders = ", ".join(map(str, left))
            get_logger().warning(
                "--export_callback_script is still running; the run ends it. Run it again for %s",
                folders,
            )
            if self._process is not None:
                _end(self._process)
        self._exports = []

    def kill(self) -> None:
        """Kill the running script and everything in its session now; this process is about to
        end."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _left(self) -> list[Path]:
        return [folder for folder, export in self._exports if not export.done()]

    def _run(self, folder: Path) -> None:
        """Run the script for one folder, in the thread; an exception would be lost there."""
        try:
            code, seconds = self._call(folder)
        except Exception as error:
            reason = masked(str(getattr(error, "strerror", None) or error), self._secrets)
            get_logger().warning(
                "--export_callback_script=%s cannot be started: %s", self._script, reason
            )
            return
        if code == 0:
            get_logger().info("--export_callback_script is done with %s (%.1f s)", folder, seconds)
        elif not self._ended:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            text = "--export_callback_script ended with %s for %s; the export is complete, and training continues"
            get_logger().warning(text, how, folder)

    def _call(self, folder: Path) -> tuple[int, float]:
        """Run the script, log its output, and return its exit code and the seconds it took."""
        start_s = time.monotonic()
        process = self._process = subprocess.Popen(
            [self._script, str(folder)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self._ended:  # `close` came while the script was starting
            _end(process)
        # Read in another thread: something that the script leaves running may keep its output open.
        reader = threading.Thread(target=self._log, args=(process, folder.name), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(_DRAIN_S)
        return code, time.monotonic() - start_s

    def _log(self, process: subprocess.Popen[bytes], name: str) -> None:
        """Log the script's output line by line, and read all of it: a full pipe would block the
        script."""
        stream = io.TextIOWrapper(cast(io.BufferedReader, process.stdout), "utf-8", "replace")
        longest, count = max((len(value) for value in self._secrets), default=0), 0
        with contextlib.suppress(OSError, ValueError), stream:
            while line := stream.readline(MAX_LINE_CHARACTERS):
                text = "".join(c for c in line if c.isprintable() or c == "\t").rstrip()
                shown = masked(text, self._secrets)
                if not line.endswith("\n") and len(line) == MAX_LINE_CHARACTERS:
                    while (rest := stream.readline(MAX_LINE_CHARACTERS)) and not rest.endswith(
                        "\n"
                    ):
                        pass
                    # the cut may fall inside a value
                    shown = shown[: max(0, len(shown) - longest)] + " (cut)"
                count += 1
                if count <= MAX_LINES:
                    get_logger().info("export %s: %s", name, shown)
                elif count == MAX_LINES + 1:
                    get_logger().info("export %s: (further lines are not logged)", name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a script and everything that it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER_S)
            return
