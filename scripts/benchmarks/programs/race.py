"""Interleave whole programs: start each, then let one at a time run a few steps while the others
are stopped.

Programs are only observed from outside. A step ends when the program prints its log line. Time, CPU
time and memory come from the clock and /proc, so that nothing is added to the program. Linux only.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.benchmarks.pipeline import Figures, Turns
from scripts.benchmarks.processor import load, memory_bytes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProgramError(Exception):
    """A program ended, or printed no step in time."""


@dataclass(frozen=True)
class Command:
    """A program's command line, and the pattern of a step in its log."""

    words: Sequence[str]
    folder: Path
    step_line: str  # a regular expression; its group is the loss
    environment: Mapping[str, str] = field(default_factory=dict)


class Program:
    """A running program and all its processes."""

    def __init__(self, command: Command, errors: Path, timeout_s: float) -> None:
        self.losses: list[float] = []
        self._step_line = re.compile(command.step_line)
        self._errors = errors
        self._timeout_s = timeout_s
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
        """Wait for `count` more steps to end.

        Raises:
            ProgramError: if the program ends early, prints no step for too long, or prints a
                non-finite loss. All its processes are killed.
        """
        wanted = len(self.losses) + count
        deadline = time.monotonic() + self._timeout_s
        while len(self.losses) < wanted:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise self._failed(f"no step within {self._timeout_s:g} s; {self._last_words()}")
            seen = len(self.losses)
            if not self._read():
                raise self._failed(
                    f"ended with exit code {self._process.wait()}; {self._last_words()}"
                )
            if len(self.losses) > seen:
                deadline = time.monotonic() + self._timeout_s

    def _read(self) -> bool:
        """Read the pipe; return whether it is still open."""
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
                    raise self._failed(f"loss {match[1]} at step {len(self.losses)}")
            elif line.strip():
                self._tail = [*self._tail[-2:], line.strip()]
        return bool(data)

    def _failed(self, reason: str) -> ProgramError:
        self.kill()
        return ProgramError(reason)

    def _last_words(self) -> str:
        """Return the first error that the program printed, or else its last lines, without folder
        names."""
        lines = [
            line.strip()
            for line in self._errors.read_text("utf-8", "replace").splitlines()
            if line.strip()
        ]
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: ", line)]
        words = " / ".join(errors[:1] or [*self._tail, *lines[-3:]])
        return re.sub(r"(?<![\w.])/[\w.+/-]*/", "", words)[-400:] or "it said nothing"

    def stop(self) -> None:
        """Stop every process, and read what the program has printed."""
        self._signal(signal.SIGSTOP)
        while self._selector.select(0.0) and self._read() and self._process.poll() is None:
            pass

    def go_on(self) -> None:
        """Resume every process."""
        self._members = self._family()
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process; may be called again."""
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
        """Return the program's processes, parents first; torchrun starts each rank in its own
        session."""
        if self._process.poll() is not None:
            return []
        children: dict[int, list[int]] = {}
        for entry in os.scandir("/proc"):
            fields = _stat(int(entry.name)) if entry.name.isdigit() else []
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        family = [self._process.pid]
        for pid in family:  # grows during the loop
            family += children.get(pid, [])
        return family

    def cpu_seconds(self) -> float:
        """Return the CPU time so far of the processes that existed when the program was last
        resumed."""
        fields = [_stat(pid) for pid in self._members]
        return sum((int(one[11]) + int(one[12])) / _TICKS_PER_S for one in fields if one)

    def peak_rss_bytes(self) -> int:
        """Return the peak resident memory of the largest process so far."""
        peaks = (memory_bytes("VmHWM", pid) for pid in self._family())
        self._peak_rss_bytes = max(self._peak_rss_bytes, *peaks, 0)
        return self._peak_rss_bytes


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name (state, parent, ...); empty if the
    process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


LAST_STEPS = 10  # a loss is the mean of this many


class Race:
    """Several started programs, of which one runs at a time."""

    def __init__(
        self,
        commands: Mapping[str, Command],
        folder: Path,
        timeout_s: float,
        turns: int,
        steps_per_turn: int,
        max_others: float | None = None,
    ) -> None:
        self._commands = commands
        self._folder = folder
        self._timeout_s = timeout_s
        self._steps = steps_per_turn
        self._programs: dict[str, Program] = {}
        self._start_s: dict[str, float] = {}
        self.turns = Turns(
            commands,
            self._turn,
            turns,
            main="step_s",
            max_others=max_others,
            expected=(ProgramError,),
        )

    def run(self) -> Iterator[None]:
        """Measure, yielding after every round; kill all programs at the end."""
        try:
            for name in self._commands:
                self._start(name)
            yield from self.turns.run()
        finally:
            for program in self._programs.values():
                program.kill()

    def _start(self, name: str) -> None:
        before = time.perf_counter()
        file = "".join(character if character.isalnum() else "_" for character in name)
        program = self._programs[name] = Program(
            self._commands[name], self._folder / f"{file}.err", self._timeout_s
        )
        try:
            program.steps(1)
            self._start_s[name] = time.perf_counter() - before
            program.steps(1)  # the second step also allocates
            program.stop()
        except ProgramError as error:
            self.turns.fail(name, error)

    def _turn(self, name: str, turn: int) -> Figures:
        """Time some steps, from log line to log line, excluding the first after a pause."""
        program = self._programs[name]
        program.go_on()
        program.steps(1)
        before, step_before = load(program.cpu_seconds()), len(program.losses)
        program.steps(self._steps)
        span = load(program.cpu_seconds()).since(before)
        # More than requested if several log lines arrived together.
        done = len(program.losses) - step_before
        program.stop()
        return {"step_s": span.elapsed_s / done, "others": span.others}

    def rows(self, ours: str, twins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the figures of each program, with its loss after the same number of steps.

        Args:
            ours: our program, whose time is divided by each peer's.
            twins: peer -> the variant of our program to compare it with instead.
        """
        losses = {name: program.losses for name, program in self._programs.items()}
        steps = min((len(losses[name]) for name in self.turns.sound()), default=0)
        against = {name: twins.get(name, ours) for name in losses if name != ours}
        rows = self.turns.rows(
            "step_s", others=lambda own: [name for name in against if against[name] == own]
        )
        for name, row in rows.items():
            last = losses[name][max(0, steps - LAST_STEPS) : steps]
            row["start_s"] = self._start_s.get(name)
            row["peak_rss_bytes"] = self._programs[name].peak_rss_bytes()
            row["loss"] = statistics.mean(last) if last else None
            row["steps"] = steps
        return rows
