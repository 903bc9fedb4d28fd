"""The pipeline of all benchmarks: rounds, warm-up, quiet turns, failures, ratios and tables."""

from typing import Any

import pytest

from scripts.benchmarks.pipeline import (
    REPEATS,
    Turns,
    number,
    over,
    ratio,
    spread,
    spread_of,
    table,
)
from scripts.benchmarks.processor import Load

pytestmark = pytest.mark.benchmarks


def test_contestants_take_turns_in_another_order_each_round() -> None:
    """The first round warms up; spreads and ratios are of the others."""
    order: list[str] = []

    def measure(name: str, turn: int) -> dict[str, float]:
        order.append(f"{name}{turn}")
        return {"seconds": (1.0 if name == "a" else 2.0) * (100 if turn == 0 else turn)}

    turns = Turns(["a", "b"], measure, 2, warm_up=1)
    assert len(list(turns.run())) == 3
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert turns.spread("a", "seconds") == {
        "median": 1.5,
        "quartiles": [1.25, 1.75],
        "values": [1.0, 2.0],
    }
    assert turns.ratio("a", "b") == {"median": 0.5, "quartiles": [0.5, 0.5], "values": [0.5, 0.5]}


def test_turns_beside_other_programs_do_not_count() -> None:
    """Rounds are repeated until enough are quiet, a few times at most; a ratio is of rounds in
    which both count."""
    others = iter([0.0, 0.3, 0.0, 0.0, 0.3, 0.0])
    turns = Turns(
        ["a", "b"],
        lambda name, turn: {"seconds": 1.0 + turn, "others": next(others)},
        2,
        max_others=0.1,
    )
    assert len(list(turns.run())) == 3
    assert turns.values("a", "seconds") == [1.0, 2.0, None]
    assert turns.values("b", "seconds") == [None, 2.0, 3.0]
    ratios = turns.ratio("a", "b")
    assert ratios is not None and ratios["values"] == [1.0]
    never = Turns(["a"], lambda name, turn: {"seconds": 1.0, "others": 0.5}, 2, max_others=0.1)
    assert len(list(never.run())) == 2 * REPEATS and never.spread("a", "seconds") is None
    # The kernel counts in ticks of 10 ms: in a short turn a program may seem to have taken more
    # than there was.
    assert Load(0.001, 0.01, 0.0).others == 0.0


def test_a_failure_ends_one_contestant() -> None:
    def measure(name: str, turn: int) -> dict[str, float]:
        if name == "b" and turn == 1:
            raise ValueError("it is over\nand out")
        return {"seconds": 1.0}

    turns = Turns(["a", "b"], measure, 3, expected=(ValueError,))
    assert len(list(turns.run())) == 3 and turns.failures == {"b": "ValueError: it is over"}
    assert turns.values("b", "seconds") == [1.0, None, None] and turns.sound() == ["a"]
    with pytest.raises(ValueError, match="it is over"):
        list(Turns(["b"], measure, 3).run())


def test_tables_of_rows() -> None:
    """A ratio is found in either direction; a column without a number is left out."""
    rows: dict[str, dict[str, Any]] = {
        "a": {"s": spread_of([1.0, 3.0]), "n": 5, "ratios": {"b": spread_of([0.5])}},
        "b": {"s": None, "n": 7},
    }
    columns = (
        spread("ms", "s", 0, 1e3),
        number("n", "n", ".1f"),
        over("/ b", "b"),
        over("/ a", "a"),
        over("/ c", "c"),
    )
    assert table(rows, columns) == [
        "|  | ms | n | / b | / a |",
        "| --- | --- | --- | --- | --- |",
        "| a | 2000 (1500-2500) | 5.0 | 0.50 |  |",
        "| b |  | 7.0 |  | 2.00 |",
    ]
    assert ratio({"a": {"ratios": {"b": spread_of([2.0, 4.0])}}, "b": {}}, "b", "a") == {
        "median": 1 / 3,
        "quartiles": [1 / 3.5, 1 / 2.5],
    }
