"""Cases in which every two values meet: a covering array, made row by row.

A *factor* is something that cases differ in; a *row* has its value for each factor, or else its
first one. What fits together only the program's validation of the whole configuration knows, so
rows are grown by asking it. Each begins with two values that have not met, and then takes for each
factor the value that meets most others for the first time (Cohen et al. 1997, "The AETG System").
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_lite.config.dimensions import ranks_per_sample
from megatron_lite.config.system import PIPELINE_SCHEDULES
from megatron_lite.errors import UsageError
from scripts.proof.cases import (
    LAYOUT,
    OPTIONS,
    OTHERS,
    Case,
    Flags,
    Layout,
    flags_of,
    ranks_that_keep_bits,
    text_of,
)

Row = dict[str, str]  # factor -> value
Value = tuple[str, str]  # of a factor
Pair = tuple[Value, Value]
Refusal = Callable[[Row], str]  # why a row is refused; empty: it is not

RANKS = "ranks"
RESTART = "restart"
THAWED = "thawed"
REPLICAS = "replicas"
TWO = "of two ranks"
AGAIN = "of two ranks that reduce again"
# What three or four values make together, as a value that meets all others, and a row that has it.
MADE: Mapping[Value, Row] = {
    (REPLICAS, TWO): {RANKS: "4", "data_parallel_shard": "--data_parallel_shard=2"},
    (REPLICAS, AGAIN): {
        RANKS: "4",
        "data_parallel_shard": "--data_parallel_shard=2",
        "depth_first_micro_batches": "--depth_first_micro_batches=2",
        "zero_stage": "--zero_stage=2",
    },
}
# Values of one step of a row: rounding hides least in the first, and rows of one rank have no
# layout.
WEIGHTS: Mapping[str, Sequence[float]] = {
    RANKS: (1, 2, 2, 5),
    "dtype": (4, 2, 2),
    "eight bits": (6, 1, 1, 1, 1, 1, 1),
    "optimizer": (5, 1, 2, 2),
}
TRIES = 40  # to make two values fit together by other changes
FEW = 500  # pairs left, of which each is tried at the end
CANDIDATES = 100  # pairs, of which the one with the rarest value begins a row
MORE_TRIES = 8  # with more ranks
MORE_RANKS = (6, 8, 12, 16)  # on which layouts are tried that do not fit


def factors_of(most_ranks: int, choices: Sequence[Flags]) -> dict[str, tuple[str, ...]]:
    """Return the values of each factor, first those of one rank and no options. choices: options
    instead of OPTIONS."""
    dimensions = {name: dimension.values for name, dimension in LAYOUT.items()}
    del dimensions["pipeline_schedule"], dimensions["pipeline_placement"]
    orders = [f"--pipeline_schedule={name}" for name in PIPELINE_SCHEDULES]
    orders += [
        f"--pipeline_schedule=breadth_first --pipeline_placement={name}" for name in ("loop", "v")
    ]
    return {
        RANKS: tuple(map(str, range(1, most_ranks + 1))),
        **{
            name: ("", *(f"--{name}={value}" for value in values[1:]))
            for name, values in dimensions.items()
        },
        "order": ("", *orders),
        REPLICAS: ("", TWO, AGAIN),
        RESTART: ("", "same bits", "other layout", *([] if choices else [THAWED])),
        **({"options": tuple(map(text_of, choices))} if choices else OPTIONS),
    }


class Coverage(NamedTuple):
    """Pairs of values by what became of them; the reason why it was refused is with each that
    was."""

    met: int
    refused: Mapping[Pair, str]
    needs_ranks: Sequence[Pair]  # more than there are
    missed: Sequence[Pair]

    def __str__(self) -> str:
        total = self.met + len(self.refused) + len(self.needs_ranks) + len(self.missed)
        return (
            f"{total:,} pairs of values: {self.met:,} met, {len(self.refused):,} refused by validation, "
            f"{len(self.needs_ranks):,} impossible on so few --ranks, {len(self.missed):,} missed"
        )

    def record(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        refused = {_text(pair): reason for pair, reason in self.refused.items()}
        others = {
            "impossible": [*map(_text, self.needs_ranks)],
            "missed": [*map(_text, self.missed)],
        }
        return {"met": self.met, "refused": refused, **others}


def _text(pair: Pair) -> str:
    return " + ".join(
        value if value.startswith("--") else f"{name}={value or 'none'}" for name, value in pair
    )


class Pairs:
    """Rows of factors in which pairs meet. refusal: see `Refusal`."""

    def __init__(
        self, factors: Mapping[str, tuple[str, ...]], refusal: Refusal, dice: random.Random
    ) -> None:
        self._factors = factors
        self._refusal = refusal
        self._dice = dice
        self._flags = {
            name: {*re.findall(r"--\w+", " ".join(values))} for name, values in factors.items()
        }
        self._unmet: dict[Pair, None] = {
            ((one, value), (other, another)): None
            for one, other in itertools.combinations(factors, 2)
            for value in factors[one]
            for another in factors[other]
        }
        self._met = 0
        # The plainest row found with a value.
        self._fitting = {
            value: {**row, **dict([value])} for value, row in MADE.items() if value[0] in factors
        }
        self._rows = Counter[Value]()  # so far, with a value
        self._refused = dict[Pair, str]()
        self._needs_ranks = list[Pair]()

    def row(self) -> Row:
        """Return the next row."""
        given = self._seed()
        first = [name for name in WEIGHTS if name in self._factors]
        layout = [
            name for name in self._factors if name in LAYOUT or name in ("order", REPLICAS, RESTART)
        ]
        others = [name for name in self._factors if name not in (*first, *layout)]
        for some in (layout, others):
            self._dice.shuffle(some)
        row = dict(given)
        for name in (*first, *layout, *others):
            if name not in row:
                row[name] = next(
                    value
                    for value in self._by_gain(name, row)
                    if self._is_first(name, value) or not self._refusal({**row, name: value})
                )
        return self._shown(row, given)

    def meet(self, row: Row) -> None:
        """Count the pairs of a row as met."""
        values = [(name, row.get(name, self._first(name))) for name in self._factors]
        self._rows.update(values)
        for pair in itertools.combinations(values, 2):
            if pair in self._unmet:
                del self._unmet[pair]
                self._met += 1

    def coverage(self) -> Coverage:
        """Return what became of all pairs. Of few that are left it finds out which have no row;
        many are missed."""
        few = len(self._unmet) <= FEW
        missed = [pair for pair in [*self._unmet] if not few or self._joined(pair) is not None]
        return Coverage(self._met, self._refused, self._needs_ranks, missed)

    def _seed(self) -> Row:
        """Return the values of a row with a pair that has not met, if any is left."""
        while self._unmet:
            some = self._dice.sample([*self._unmet], min(len(self._unmet), CANDIDATES))
            pair = min(some, key=lambda pair: sorted(self._rows[value] for value in pair))
            if (row := self._joined(pair)) is not None:
                return row
        return {}

    def _by_gain(self, name: str, decided: Row) -> list[str]:
        """Return the values of a factor in the order to try; the first one is never refused."""
        values = [*self._factors[name]]
        if name in WEIGHTS and len(WEIGHTS[name]) == len(values):
            weights = WEIGHTS[name]
            return sorted(
                values,
                key=lambda value: -(self._dice.random() ** (1 / weights[values.index(value)])),
            )
        gains = {
            value: sum(self._pair((name, value), other) in self._unmet for other in decided.items())
            for value in values
        }
        if not any(gains.values()) and self._dice.random() < (0.5 if name in LAYOUT else 0.9):
            return values[:1]
        return sorted(values, key=lambda value: (-gains[value], self._dice.random()))

    def _joined(self, pair: Pair) -> Row | None:
        """Return a row with both values; None if there is none, and then note why."""
        fixed = dict(pair)
        starts = [fixed, {**self._with(pair[0]), **self._with(pair[1]), **fixed}]
        reason = ""
        for row in starts:
            row, reason = self._changed(row, fixed, self._factors[RANKS])
            if not reason:
                return self._shown(row, fixed)
        for row in starts if RANKS not in fixed else ():
            row, refused = self._changed(row, fixed, map(str, MORE_RANKS), MORE_TRIES)
            if not refused and (row := self._plainest(row, fixed))[RANKS] in self._factors[RANKS]:
                return self._shown(row, fixed)
            reason = reason if refused else ""
        del self._unmet[pair]
        if reason:
            self._refused[pair] = reason
        else:
            self._needs_ranks.append(pair)
        return None

    def _shown(self, row: Row, fixed: Row) -> Row:
        return {
            name: value
            for name, value in row.items()
            if name in fixed or not self._is_first(name, value)
        }

    def _with(self, value: Value) -> Row:
        """Return a row with a value; one without what it needs if none is found."""
        if value not in self._fitting:
            self._fitting[value] = {}
            for _ in range(5):
                row, reason = self._changed(dict([value]), dict([value]), self._factors[RANKS])
                if not reason:
                    self._fitting[value] = self._plainest(row, dict([value]))
                    break
        return self._fitting[value]

    def _plainest(self, row: Row, fixed: Row) -> Row:
        """Return the row with the first values that do, but the fixed ones: they leave most room
        for others."""
        numbers = [row[RANKS]] if RANKS in fixed else [*self._factors[RANKS], row.get(RANKS, "1")]
        for name in sorted(row.keys() - {*fixed, RANKS}):
            values = (*self._factors[name], row[name])
            plainer = (
                {**row, RANKS: number, name: value} for value in values for number in numbers
            )
            row = next(tried for tried in plainer if tried == row or not self._refusal(tried))
        fewer = ({**row, RANKS: number} for number in numbers)
        return next(tried for tried in fewer if tried == row or not self._refusal(tried))

    def _changed(
        self, row: Row, fixed: Row, ranks: Iterable[str], tries: int = TRIES
    ) -> tuple[Row, str]:
        """Change a row at random, but not the fixed values, until it is not refused; return it, and
        why it still is."""
        first = row
        numbers = [""] if RANKS in fixed else [*ranks]
        reason = ""
        others = [name for name in self._factors if name not in (*fixed, RANKS)]
        steps = list[
            Value
        ]()  # one change of what the first refusals name, each once before changes at random
        for attempt in itertools.count():
            found = ""
            for number in numbers:
                tried = {**row, RANKS: number} if number else row
                if not (refusal := self._refusal(tried)):
                    return tried, ""
                found += refusal
            reason = reason or refusal  # on the most ranks
            named = [name for name in others if any(flag in found for flag in self._flags[name])]
            if attempt == 0:
                steps = [(name, value) for name in named for value in self._factors[name]]
            if steps:
                row = {**first, **dict([steps.pop()])}
                continue
            tries -= 1
            if tries < 0:
                break
            layout = [name for name in others if name in LAYOUT]
            row = row if attempt % 4 else first
            name = self._dice.choice((named if self._dice.random() < 0.7 else layout) or others)
            row = {**row, name: self._dice.choice(self._factors[name])}
        return row, reason

    def _pair(self, one: Value, other: Value) -> Pair:
        order = [*self._factors]
        return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)

    def _first(self, name: str) -> str:
        return self._factors[name][0]

    def _is_first(self, name: str, value: str) -> bool:
        return value == self._first(name)


class Draws:
    """Cases that the program accepts, in which pairs meet.

    Args:
        choices: options to draw from; without any, they are drawn too.
        fixed: flags of all runs.
    """

    def __init__(
        self, seed: int | str, most_ranks: int, choices: Sequence[Flags], fixed: Flags
    ) -> None:
        self._dice = random.Random(seed)
        self._fixed = fixed
        self._most_ranks = most_ranks
        self._factors = factors_of(most_ranks, choices)
        self._pairs = Pairs(self._factors, self._refusal, self._dice)

    def __iter__(self) -> Iterator[Case]:
        while True:
            yield self.case()

    def case(self) -> Case:
        """Return the next case; raise UsageError if there is none."""
        for _ in range(1000):
            row = self._pairs.row()
            case = self._case(row)
            if self._accepts(case):
                self._pairs.meet(row)
                return self._restarted(case, row[RESTART]) if row.get(RESTART) else case
        raise UsageError(
            "no layout of these options was found; give more --ranks, or fewer options"
        )

    def coverage(self) -> Coverage:
        """Return what became of all pairs so far."""
        return self._pairs.coverage()

    def _refusal(self, row: Row) -> str:
        try:
            self._case(row).parts(self._fixed)
        except UsageError as error:
            return str(error)
        return ""

    def _accepts(self, case: Case) -> bool:
        try:
            case.parts(self._fixed), case.reference(self._fixed).parts(self._fixed)
        except UsageError:
            return False
        return True

    def _case(self, row: Row) -> Case:
        """Return the case of a row; one that restarts does so in the same layout."""
        options, flags = dict[str, str](), dict[str, str]()
        for name, values in self._factors.items():
            if name not in (RANKS, REPLICAS, RESTART):
                some = flags if name in LAYOUT or name == "order" else options
                some |= flags_of(row.get(name, values[0]))
        layout = Layout(int(row.get(RANKS, "1")), flags)
        _check_replicas(row.get(REPLICAS, ""), layout)
        if not (restart := row.get(RESTART)):
            return Case(options, layout)
        if restart == THAWED and "freeze" not in options:
            raise UsageError("--freeze: nothing is frozen")
        other = dict.fromkeys(OTHERS if restart == THAWED else (), "")
        return Case(options, layout, Layout(layout.ranks, {**flags, **other}))

    def _restarted(self, case: Case, restart: str) -> Case:
        """Return the case with another second layout, if one is found."""
        assert case.then is not None
        for _ in range(30):
            dimensions = (pair for pair in LAYOUT.items() if self._dice.random() < 0.4)
            drawn = {
                name: self._dice.choice(dimension.values[1:]) for name, dimension in dimensions
            }
            other = Layout(
                self._dice.randint(1, self._most_ranks), {**drawn, **case.then.kept(OTHERS)}
            )
            if restart == "same bits":
                exact = case.layout.exact()
                kept = {name: drawn[name] for name in drawn if LAYOUT[name].keeps_bits}
                other = Layout(exact.ranks * ranks_that_keep_bits(kept), {**exact.flags, **kept})
            changed = case._replace(then=other)
            if other.ranks <= self._most_ranks and self._accepts(changed):
                return changed
        return case


def _check_replicas(wanted: str, layout: Layout) -> None:
    """Raise UsageError unless the layout has several replicas of several ranks, and if wanted
    several reductions."""
    number = {
        name: int(layout.flags.get(name, "1"))
        for name in LAYOUT
        if layout.flags.get(name, "1").isdecimal()
    }
    replicas = layout.ranks // ranks_per_sample(SimpleNamespace(**number)) // 2
    if wanted and not (number["data_parallel_shard"] == 2 and replicas > 1):
        raise UsageError("--data_parallel_shard=2: there are no two replicas")
    if wanted == AGAIN and not (
        number["depth_first_micro_batches"] > 1 and number["zero_stage"] > 1
    ):
        raise UsageError("--depth_first_micro_batches, --zero_stage: each stage is reduced once")
