"""Every two values that fit together meet, and what does not is told apart, against all rows of
small problems."""

import itertools
import random
from collections.abc import Callable

import pytest

from scripts.proof.cases import OPTIONS, Case, Layout, flags_of
from scripts.proof.pairs import LAYOUT, Pair, Pairs, Row

FACTORS = {
    "ranks": ("1", "2", "3", "4"),
    "pipeline_parallel": ("", "--pipeline_parallel=2", "--pipeline_parallel=3"),
    "tensor_parallel": ("", "--tensor_parallel=2", "--tensor_parallel=4"),
    "order": ("", "--pipeline_schedule=a", "--pipeline_schedule=b"),
    "dtype": ("--training_dtype=fp32", "--training_dtype=bf16"),
    "split": ("", "--split=1"),
    "average": ("", "--average=1"),
}


def refusal(row: Row) -> str:
    """Refuse as the program does: sizes that do not divide the ranks, options that need or exclude
    others."""
    number = {
        name: int(row.get(name, "").partition("=")[2] or 1)
        for name in ("pipeline_parallel", "tensor_parallel")
    }
    size = number["pipeline_parallel"] * number["tensor_parallel"]
    if int(row.get("ranks", "1")) % size:
        return "--pipeline_parallel, --tensor_parallel: the ranks must be a multiple"
    if row.get("order") and number["pipeline_parallel"] == 1:
        return "--pipeline_schedule: needs --pipeline_parallel"
    if row.get("split") and row.get("dtype", FACTORS["dtype"][0]) == FACTORS["dtype"][0]:
        return "--split: needs --training_dtype=bf16"
    if row.get("split") and row.get("average"):
        return "--split, --average: leave one out"
    return ""


def pairs_of(ranks: tuple[str, ...]) -> set[Pair]:
    """Return all pairs of values in rows that are not refused, on these numbers of ranks."""
    factors = {**FACTORS, "ranks": ranks}
    rows = (
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    )
    return {
        pair for row in rows if not refusal(row) for pair in itertools.combinations(row.items(), 2)
    }  # type: ignore[misc]


def drawn(seed: int, count: int, refuse: Callable[[Row], str] = refusal) -> tuple[Pairs, list[Row]]:
    """Return pairs of which `count` rows have met, and the rows."""
    pairs, rows = Pairs(FACTORS, refuse, random.Random(seed)), list[Row]()
    for _ in range(count):
        rows.append(pairs.row())
        pairs.meet(rows[-1])
    return pairs, rows


@pytest.mark.parametrize("model", OPTIONS["family"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_model_is_accepted_with_tensor_parallelism_and_long_sequences(
    model: str, ranks: int
) -> None:
    """Else its draws would be refused silently; longrope needs sequences on both sides of its
    original length."""
    fixed = {"device": "cpu", "deterministic": "0"}
    layout = Layout(ranks, {"tensor_parallel": "2"} if ranks > 1 else {})
    for sequence in OPTIONS["sequence"]:
        (part,) = Case(flags_of(f"{model} {sequence}"), layout).parts(fixed)
        if original := part.config.model.longrope_length:
            assert (part.config.batch.sequence_length > original) == bool(sequence)


@pytest.mark.parametrize("seed", range(4))
def test_all_pairs_that_fit_meet_in_few_rows(seed: int) -> None:
    """The largest two factors have 12 pairs. Others are refused on any ranks, or need more than
    there are."""
    pairs, rows = drawn(seed, 30)
    assert not any(map(refusal, rows))
    coverage, possible = pairs.coverage(), pairs_of(FACTORS["ranks"])
    whole = [{name: row.get(name, values[0]) for name, values in FACTORS.items()} for row in rows]
    assert {pair for row in whole for pair in itertools.combinations(row.items(), 2)} == possible
    assert coverage.met == len(possible) and not coverage.missed
    beyond = {pair for pair in pairs_of(("6", "8", "12")) - possible if "ranks" not in dict(pair)}
    assert {*coverage.needs_ranks} == beyond and beyond
    assert (
        all("--" in reason for reason in coverage.refused.values())
        and not {*coverage.refused} & possible
    )


def test_pairs_that_have_not_met_are_missed() -> None:
    """The counts of all kinds add up to all pairs."""
    pairs, rows = drawn(1, 2)
    coverage = pairs.coverage()
    total = sum(len(one) * len(other) for one, other in itertools.combinations(FACTORS.values(), 2))
    assert (
        coverage.met + len(coverage.refused) + len(coverage.needs_ranks) + len(coverage.missed)
        == total
    )
    assert {*coverage.missed} <= pairs_of(FACTORS["ranks"]) and len(rows) == 2
    assert f"{len(coverage.missed)} missed" in str(coverage) and f"{total:,} pairs" in str(coverage)


def test_a_row_after_the_last_pair_is_not_refused() -> None:
    """Rows go on without end, and differ."""
    _, rows = drawn(1, 60)
    assert (
        not any(map(refusal, rows)) and len({tuple(sorted(row.items())) for row in rows[30:]}) > 5
    )
    assert {"pipeline_parallel", "tensor_parallel"} <= LAYOUT.keys()
