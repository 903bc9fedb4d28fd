"""The runner of all benchmarks: contestants take turns, so that other load on the machine affects
all of them alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.results import Spread, reason_of, spread_of

Figures = dict[str, Any]


@dataclass
class Record:
    """The turns of one contestant."""

    # by round; None: failed in this round or earlier
    turns: list[Figures | None] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)  # by round
    failure: str | None = None

    def counted(self, figure: str) -> list[Any]:
        """Return a figure by round, None where the turn does not count."""
        pairs = zip(self.turns, self.counts, strict=True)
        return [turn[figure] if turn is not None and counts else None for turn, counts in pairs]

    def every(self, figure: str) -> list[Any]:
        """Return a figure of every turn, including those that do not count."""
        return [turn[figure] for turn in self.turns if turn is not None]

    def spread(self, figure: str) -> Spread | None:
        """Return the spread of a figure over the turns that count, or None if none does."""
        known = [value for value in self.counted(figure) if value is not None]
        return spread_of(known) if known else None


class Turns:
    """Rounds in which every contestant has one turn, in rotating order, until enough turns count.

    Args:
        names: the contestants, in table order.
        measure: measures one turn, given a name and the number of the round; returns figures.
        turns: number of counted turns wanted per contestant.
        main: the figure to print and to take ratios of.
        warm_up: number of first rounds that do not count.
        max_others: count only turns whose figure `others`, the share of the cores used by other
            programs, is at most this.
        repeats: with `max_others`, stop after this many times `turns` rounds.
        failures: errors that end one contestant; the others continue.
        prints: whether this process prints the progress.
    """

    def __init__(
        self,
        names: Sequence[str],
        measure: Callable[[str, int], Figures],
        turns: int,
        *,
        main: str = "seconds",
        warm_up: int = 0,
        max_others: float | None = None,
        repeats: int = 6,
        failures: tuple[type[Exception], ...] = (),
        prints: bool = True,
    ) -> None:
        self.records = {name: Record() for name in names}
        self._measure = measure
        self._turns = turns
        self._main = main
        self._warm_up = warm_up
        self._max_others = max_others
        self._failures = failures
        self._prints = prints
        self._rounds = warm_up + turns * (1 if max_others is None else repeats)

    def run(self) -> Iterator[None]:
        """Measure, yielding after every round; `records` holds the results."""
        yield from (None for complete in self.run_turns() if complete)

    def run_turns(self) -> Iterator[bool]:
        """Measure, yielding after every turn whether it completes a round."""
        names = list(self.records)
        for turn in range(self._rounds):
            first = turn % len(names)  # rotates, so that no contestant always follows the same one
            *others, last = names[first:] + names[:first]
            for name in others:
                self._turn(name, turn)
                yield False
            self._turn(last, turn)
            sound = self.sound().values()
            counted = min((sum(record.counts) for record in sound), default=0)
            self._say(turn, counted)
            yield True
            if not sound or counted >= self._turns:
                return

    def sound(self) -> dict[str, Record]:
        """Return the records of the contestants that have not failed."""
        return {name: record for name, record in self.records.items() if record.failure is None}

    def ratio(self, own: str, other: str, figure: str = "", of_other: str = "") -> Spread | None:
        """Return the spread of a figure's ratio to another row's, over the rounds in which both
        count."""
        figure = figure or self._main
        mine = self.records[own].counted(figure)
        theirs = self.records[other].counted(of_other or figure)
        # One of the two may have had one turn more.
        both = [
            a / b for a, b in zip(mine, theirs, strict=False) if a is not None and b is not None
        ]
        return spread_of(both) if both else None

    def measured(
        self, *figures: str, others: Callable[[str], Iterable[str]]
    ) -> dict[str, dict[str, Any]]:
        """Measure all rounds; return the rows."""
        for _ in self.run():
            pass
        return self.rows(*figures, others=others)

    def rows(
        self, *figures: str, others: Callable[[str], Iterable[str]]
    ) -> dict[str, dict[str, Any]]:
        """Return the spreads of figures by contestant, and the ratios to the rows that `others`
        names."""
        return {
            name: {figure: record.spread(figure) for figure in figures}
            | {"ratios": {other: self.ratio(name, other) for other in others(name)}}
            for name, record in self.records.items()
        }

    def fail(self, name: str, error: Exception) -> None:
        """Record a contestant's failure; it gets no more turns."""
        reason = self.records[name].failure = reason_of(error)
        print(f"benchmark: {name}: {reason}", file=sys.stderr, flush=True)

    def failed(self) -> dict[str, str]:
        """Return the errors of the contestants that failed."""
        return {
            name: record.failure
            for name, record in self.records.items()
            if record.failure is not None
        }

    def _turn(self, name: str, turn: int) -> None:
        record, figures = self.records[name], None
        if record.failure is None:
            try:
                figures = self._measure(name, turn)
            except self._failures as error:
                self.fail(name, error)
        quiet = self._max_others is None or (figures or {}).get("others", 0.0) <= self._max_others
        record.turns.append(figures)
        record.counts.append(figures is not None and turn >= self._warm_up and quiet)

    def _say(self, turn: int, counted: int) -> None:
        if self._prints:
            shown = [
                f"{name} {record.every(self._main)[-1]:.4g}"
                for name, record in self.sound().items()
            ]
            line = f"benchmark: turn {turn + 1}: {', '.join(shown)} ({self._main}); {counted} turns count"
            print(line, file=sys.stderr, flush=True)
