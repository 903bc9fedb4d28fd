"""Programs in turns: start each, then let one after the other run a few steps while the others stand still."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks.processor import load
from scripts.benchmarks.programs.process import Command, Program, ProgramError
from scripts.benchmarks.results import spread_of
from scripts.benchmarks.turns import Figures, Turns

LAST_STEPS = 10  # a loss is the mean of this many


class Race:
    """Some programs, side by side, of which one runs at a time."""

    def __init__(
        self,
        commands: Mapping[str, Command],
        folder: Path,
        timeout_s: float,
        turns: int,
        steps_per_turn: int,
        max_others: float | None = None,
    ) -> None:
        self._commands, self._folder, self._timeout_s, self._steps = commands, folder, timeout_s, steps_per_turn
        self._programs: dict[str, Program] = {}  # the newest start of each
        self._start_s: dict[str, list[float]] = {name: [] for name in commands}
        self.turns = Turns(
            list(commands), self._turn, turns, main="step_s", max_others=max_others, failures=(ProgramError,)
        )

    def run(self, starts: int = 1) -> Iterator[None]:
        """Measure, yielding after every round. Ends all programs."""
        try:
            for attempt in range(starts):
                for name in self.turns.sound():
                    self._start(name, keep=attempt == starts - 1)
            yield from self.turns.run()
        finally:
            for program in self._programs.values():
                program.kill()

    def _start(self, name: str, keep: bool) -> None:
        before = time.perf_counter()
        file = "".join(character if character.isalnum() else "_" for character in name)
        program = self._programs[name] = Program(self._commands[name], self._folder / f"{file}.err", self._timeout_s)
        try:
            program.steps(1)
            self._start_s[name].append(time.perf_counter() - before)
            if keep:
                program.steps(1)  # the second step allocates, too
                program.stop()
            else:
                program.kill()
        except ProgramError as error:
            self.turns.fail(name, error)
            program.kill()

    def _turn(self, name: str, turn: int) -> Figures:
        """Time some steps from the end of one to the end of another; the first after a pause does not count."""
        program = self._programs[name]
        try:
            program.go_on()
            program.steps(1)
            before, step_before = load(program.cpu_seconds()), len(program.losses)
            program.steps(self._steps)
            span = load(program.cpu_seconds()).since(before)
            done = len(program.losses) - step_before  # more than asked for if the log came in one piece
            program.stop()
        except ProgramError:
            program.kill()
            raise
        return {"step_s": span.elapsed_s / done, "cpu_s": span.own_s / done, "others": span.others}

    def rows(self, ours: str, twins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the figures of each program, and its loss after equally many steps.

        Args:
            ours: our program, whose time is divided by that of the others.
            twins: another of ours for the programs that are compared with that one.
        """
        losses = {name: program.losses for name, program in self._programs.items()}
        steps = min((len(losses[name]) for name in self.turns.sound()), default=0)
        rows: dict[str, dict[str, Any]] = {}
        for name, record in self.turns.records.items():
            last = losses[name][max(0, steps - LAST_STEPS) : steps]
            rows[name] = {
                "step_s": record.spread("step_s"),
                "cpu_s": record.spread("cpu_s"),
                "start_s": spread_of(self._start_s[name]) if self._start_s[name] else None,
                "others": spread_of(record.every("others")) if record.every("others") else None,
                "peak_rss_bytes": self._programs[name].peak_rss_bytes(),
                "loss": statistics.mean(last) if last else None,
                "steps": steps,
                "losses": losses[name],
                "ratios": {},
            }
        for name in rows:
            own = twins.get(name, ours)
            if own in rows and name != ours:
                rows[own]["ratios"][name] = self.turns.ratio(own, name)
        return rows
