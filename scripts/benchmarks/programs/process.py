"""A training program in processes of its own that can be stopped and continued, observed only from outside.

A step ends when the program prints the line of its log. Time, processor time and memory come from the clock and from
/proc, so nothing is added to the program. Linux only.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.processor import memory_bytes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProgramError(Exception):
    """A program that ended, or printed no step in time."""


@dataclass(frozen=True)
class Command:
    """A program as a user types it, and how its log shows a step."""

    words: Sequence[str]
    folder: Path
    step_line: str  # a regular expression; its group is the loss
    environment: Mapping[str, str] = field(default_factory=dict)


class Program:
    """A running program with all its processes."""

    def __init__(self, command: Command, errors: Path, timeout_s: float) -> None:
        self.losses: list[float] = []
        self._step_line, self._errors, self._timeout_s = re.compile(command.step_line), errors, timeout_s
        self._unread = b""
        self._peak_rss_bytes = 0
        self._members: list[int] = []  # processes, when the program was last continued
        self._tail: list[str] = []
        with errors.open("wb") as standard_error:
            self._process = subprocess.Popen(
                list(command.words),
                cwd=command.folder,
                env={**os.environ, **command.environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=standard_error,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)

    def steps(self, count: int) -> None:
        """Wait for the end of some more steps.

        Raises:
            ProgramError: if the program ends before, prints no step for too long, or prints a loss that is not finite.
        """
        wanted = len(self.losses) + count
        deadline = time.monotonic() + self._timeout_s
        while len(self.losses) < wanted:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ProgramError(f"no step within {self._timeout_s:g} s; {self._last_words()}")
            seen = len(self.losses)
            if not self._read():
                raise ProgramError(f"ended with exit code {self._process.wait()}; {self._last_words()}")
            if len(self.losses) > seen:
                deadline = time.monotonic() + self._timeout_s

    def _read(self) -> bool:
        """Take what the pipe holds; return whether the program still writes to it."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in (raw.decode("utf-8", "replace") for raw in lines):
            match = self._step_line.search(line)
            if match is not None:
                self.losses.append(float(match[1]))
                if not math.isfinite(self.losses[-1]):
                    raise ProgramError(f"loss {match[1]} at step {len(self.losses)}")
            elif line.strip():
                self._tail = [*self._tail[-2:], line.strip()]
        return bool(data)

    def _last_words(self) -> str:
        """Return the first error that the program printed, or else its last lines; without the folders of its files."""
        lines = [line.strip() for line in self._errors.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: ", line)]
        words = " / ".join(errors[:1] or [*self._tail, *lines[-3:]])
        return re.sub(r"(?<![\w.])/[\w.+/-]*/", "", words)[-400:] or "it said nothing"

    def stop(self) -> None:
        """Stop every process where it is, and take what it has printed until then."""
        self._signal(signal.SIGSTOP)
        while self._selector.select(0.0) and self._read() and self._process.poll() is None:
            pass

    def go_on(self) -> None:
        """Continue every process."""
        self._members = self._family()
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End every process, at once or again."""
        self.peak_rss_bytes()
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._family():
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # ended meanwhile
                continue

    def _family(self) -> list[int]:
        """Return the processes of the program, parents first; torchrun puts ranks into sessions of their own."""
        if self._process.poll() is not None:
            return []
        children: dict[int, list[int]] = {}
        for entry in os.scandir("/proc"):
            fields = _stat(int(entry.name)) if entry.name.isdigit() else []
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        family = [self._process.pid]
        for pid in family:  # grows while it is read
            family += children.get(pid, [])
        return family

    def cpu_seconds(self) -> float:
        """Return the processor time so far of the processes that were there when the program was continued."""
        fields = [_stat(pid) for pid in self._members]
        return sum((int(one[11]) + int(one[12])) / _TICKS_PER_S for one in fields if one)

    def peak_rss_bytes(self) -> int:
        """Return the peak resident memory of the largest process so far."""
        peaks = (memory_bytes("VmHWM", pid) for pid in self._family())
        self._peak_rss_bytes = max(self._peak_rss_bytes, *peaks, 0)
        return self._peak_rss_bytes


def _stat(pid: int) -> list[str]:
    """Return what /proc says of a process after its name (state, parent, ...); nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []
