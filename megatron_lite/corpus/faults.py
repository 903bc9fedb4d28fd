"""Documents that cannot be used: counted by kind, the first ones named with their file and line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from megatron_lite.errors import DataError

SHOWN_FAULTS = 10


@dataclass(frozen=True)
class Fault:
    """A document that was skipped. `number`: of its line or row in its span, from 1; 0 for a whole file."""

    span: int  # of the piece
    number: int
    kind: str
    detail: str = ""

    def message(self, place: str) -> str:
        """Describe the fault at a place."""
        return f"{place}: {self.kind}" + (f": {self.detail}" if self.detail else "")


@dataclass
class PieceFaults:
    """The faults of one piece: all are counted, the first ones kept."""

    strict: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        """Count a fault.

        Raises:
            BadDocument: with --strict.
        """
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        if len(self.first) < SHOWN_FAULTS:
            self.first.append(fault)
        if self.strict:
            raise BadDocument


class BadDocument(Exception):  # noqa: N818 - the end of a piece with --strict
    """A document that --strict refuses; the last one of `PieceFaults.first`."""


@dataclass
class Faults:
    """The faults of all pieces in the order of the documents; the first few are named on standard error."""

    strict: bool
    quiet: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def add(self, counts: dict[str, int], named: list[tuple[str, Fault]]) -> None:
        """Add the faults of a piece; `named`: the first ones, each with its place.

        Raises:
            DataError: with --strict, which names the first.
        """
        for place, fault in named:
            message = fault.message(place)
            if self.strict:
                raise DataError(message)
            if len(self.first) < SHOWN_FAULTS:
                self.first.append(message)
                if not self.quiet:
                    print(f"skipped {message}", file=sys.stderr)
        before = self.total
        for kind, count in counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        if before <= SHOWN_FAULTS < self.total and not self.quiet:
            print("skipped more: from here on they are only counted", file=sys.stderr)

    @property
    def total(self) -> int:
        return sum(self.counts.values())
