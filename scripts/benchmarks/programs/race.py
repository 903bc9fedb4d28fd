"""Programs in turns: start each, then let one after the other run a few steps while the others stand still."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.common import busy_seconds, cores
from scripts.benchmarks.programs.process import Command, Program, ProgramError

# With a limit on other programs, rounds end after this many times the number wanted.
MAX_REPEATS = 4


@dataclass
class Record:
    """Measurements of one program: a value per turn (None if it does not count), and per start."""

    start_s: list[float] = field(default_factory=list)  # from the command to the end of the first step
    step_s: list[float | None] = field(default_factory=list)
    cpu_s: list[float | None] = field(default_factory=list)  # of all processes, a step
    others: list[float] = field(default_factory=list)  # share of the cores that other programs took meanwhile
    losses: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0  # of the largest process
    failure: str | None = None


class Race:
    """Some programs, side by side, of which one runs at a time."""

    def __init__(
        self, commands: Mapping[str, Command], folder: Path, timeout_s: float, max_others: float | None = None
    ) -> None:
        self.records = {name: Record() for name in commands}
        self._commands, self._folder, self._timeout_s = commands, folder, timeout_s
        self._max_others = max_others
        self._programs: dict[str, Program] = {}

    def run(self, turns: int, steps_per_turn: int, starts: int) -> Iterator[None]:
        """Measure, yielding after every round; `records` holds the results. Ends all programs."""
        try:
            for attempt in range(starts):
                for name in self._commands:
                    self._start(name, keep=attempt == starts - 1)
            names = list(self._commands)
            for turn in range(turns * (1 if self._max_others is None else MAX_REPEATS)):
                first = turn % len(names)  # rotates, so that no program always follows the same one
                for name in names[first:] + names[:first]:
                    self._turn(name, steps_per_turn)
                self._say(turn)
                yield
                if self._counted() >= turns:
                    break
        finally:
            for program in self._programs.values():
                program.kill()

    def _counted(self) -> int:
        """Return how many turns count of the program with the fewest."""
        sound = [record for record in self.records.values() if record.failure is None]
        return min((sum(value is not None for value in record.step_s) for record in sound), default=0)

    def _start(self, name: str, keep: bool) -> None:
        record = self.records[name]
        if record.failure is not None:
            return
        before = time.perf_counter()
        program = Program(self._commands[name], self._folder / f"{_file_name(name)}.err", self._timeout_s)
        self._programs[name] = program
        try:
            program.steps(1)
            record.start_s.append(time.perf_counter() - before)
            if keep:
                program.steps(1)  # the second step allocates, too
                program.stop()
                return
        except ProgramError as error:
            self._fail(name, error)
        self._programs.pop(name, program).kill()

    def _turn(self, name: str, steps: int) -> None:
        """Time some steps from the end of one to the end of another; the first after a pause does not count."""
        record, program = self.records[name], self._programs.get(name)
        if program is None:
            record.step_s.append(None)
            record.cpu_s.append(None)
            return
        try:
            program.go_on()
            program.steps(1)
            before, cpu_before, step_before = time.perf_counter(), program.cpu_seconds(), len(program.losses)
            busy_before = busy_seconds()
            program.steps(steps)
            elapsed, cpu = time.perf_counter() - before, program.cpu_seconds() - cpu_before
            others = (busy_seconds() - busy_before - cpu) / elapsed / len(cores())
            done = len(program.losses) - step_before  # more than asked for if the log came in one piece
            program.stop()
            quiet = self._max_others is None or others <= self._max_others
            record.others.append(max(0.0, others))
            record.step_s.append(elapsed / done if quiet else None)
            record.cpu_s.append(cpu / done if quiet else None)
        except ProgramError as error:
            self._fail(name, error)
            self._programs.pop(name).kill()
            record.step_s.append(None)
            record.cpu_s.append(None)
        record.losses = program.losses
        record.peak_rss_bytes = max(record.peak_rss_bytes, program.peak_rss_bytes())

    def _fail(self, name: str, error: ProgramError) -> None:
        self.records[name].failure = str(error)
        print(f"benchmark: {name}: {error}", file=sys.stderr, flush=True)

    def _say(self, turn: int) -> None:
        sound = {name: record for name, record in self.records.items() if record.failure is None}
        line = ", ".join(
            f"{name} {1000 * value:.0f} ms" if value is not None else f"{name} (others {record.others[-1]:.0%})"
            for name, record in sound.items()
            for value in record.step_s[-1:]
        )
        print(f"benchmark: turn {turn + 1}: {line}", file=sys.stderr, flush=True)


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Divide the step times of the rounds in which both programs ran."""
    pairs = zip(ours, theirs, strict=True)
    return [own / other for own, other in pairs if own is not None and other is not None]


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)
