"""The best validation so far: which values count, when it ends a run, and what a checkpoint
restores."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.saved_state import RUN_STATE
from megatron_lite.config import unflatten
from megatron_lite.errors import UsageError
from megatron_lite.monitor.best_evaluation import BestEvaluation
from megatron_lite.validation import resolve

DATA = {"sets": [[60, 960, "uint16", "0123456789abcdef"]], "tokenizer": None}
BASE = {
    "data_path": ("a",),
    "train_iters": 100,
    "validation_iters": 4,
    "experiment_dir": "/run",
    "batch_size": 4,
}
BASE |= {"early_stopping_patience": 3, "keep_best": "validation_loss"}


def best_of(saved: Any = None, data: Any = DATA, **options: Any) -> BestEvaluation:
    return BestEvaluation(resolve(unflatten({**BASE, **options}), 1), data, saved)


def counted(best: BestEvaluation, *values: float | None, first: int = 1) -> list[tuple[bool, bool]]:
    """Count values of successive iterations; return whether each is the best, and whether it ends
    the run."""
    found = []
    for iteration, value in enumerate(values, first):
        best.add(iteration, {"loss": value, "iteration": iteration})
        found.append((best.is_best(iteration), best.ends))
    return found


def test_only_a_lower_finite_value_is_better() -> None:
    """An equal value, NaN, an infinity or no loss at all counts as one that is no better; the third
    in a row ends."""
    yes = (True, False)
    no = (False, False)
    end = (False, True)
    assert counted(best_of(), 3.0, 2.0, 2.0, math.nan, 1.0, None, 1.5, math.inf) == [
        yes,
        yes,
        no,
        no,
        yes,
        no,
        no,
        end,
    ]
    assert counted(best_of(), None, math.nan, -math.inf) == [no, no, end]
    assert counted(best_of(early_stopping_patience=1), 3.0, 2.0, 2.0) == [yes, yes, end]
    assert counted(best_of(early_stopping_patience=None), 3.0, *[4.0] * 9) == [yes, *[no] * 9]
    off = best_of(keep_best=None, early_stopping_patience=None)
    assert counted(off, 3.0, 2.0) == [no, no] and off.state() == {} and not off.is_best(0)


def test_a_restored_count_goes_on() -> None:
    """At every place; an evaluation that a start repeats counts once, whatever its value is then;
    more patience, or none, takes the end back.
    """
    values = [5.0, 4.0, 4.5, 3.0, 3.5, math.nan, 3.25]
    whole = best_of()
    decided = counted(whole, *values)
    for cut in range(len(values) + 1):
        begun = best_of()
        counted(begun, *values[:cut])
        (state,) = json.loads(json.dumps(begun.state())).values()
        decode(RUN_STATE["best?"], state, "state.best")
        repeated = best_of(state)
        assert (
            cut == 0
            or counted(repeated, values[cut - 1] + 1e-9, first=cut) == decided[cut - 1 : cut]
        )
        assert (
            counted(repeated, *values[cut:], first=cut + 1) == decided[cut:]
            and repeated.state() == whole.state()
        )
    (state,) = whole.state().values()
    assert best_of(state).ends and not best_of(state, early_stopping_patience=4).ends
    assert not best_of(state, early_stopping_patience=None).ends
    assert str(whole) == "best validation_loss: 3.00000 at iteration 4, 3 of 3 validations since"


@pytest.mark.parametrize(
    "change",
    [
        {"keep_best": "validation_averaged_loss", "ema_type": "ema"},
        {"validation_iters": "all"},
        {"batch_size": 8},
        {"sequence_length": 16},
        {"split": (8.0, 2.0)},
        {"data": {**DATA, "evaluated": {"validation": "0123456789abcdef"}}},
    ],
)
def test_values_that_do_not_compare_start_anew(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; other options change nothing, but a best checkpoint that is gone is named."""
    begun = best_of()
    counted(begun, 5.0)
    (state,) = begun.state().values()
    other = best_of(state, **change)
    same = best_of(state, lr=1.0, train_iters=50, micro_batch_size=2)
    assert not other.is_best(1) and same.is_best(1)
    with caplog.at_level(logging.WARNING):
        for best in (other, same):
            best.warn(tmp_path, logging.getLogger("megatron_lite"))
        (tmp_path / "1").mkdir()
        same.warn(tmp_path, logging.getLogger("megatron_lite"))
    anew, gone = caplog.messages
    assert (
        anew.endswith("the search for the best starts again")
        and f"its checkpoint is not in {tmp_path}" in gone
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"keep_best": "loss"}, "--keep_best=loss: "),
        (
            {"keep_best": "validation_averaged_loss/x"},
            "--keep_best=validation_averaged_loss/x: no average is kept;",
        ),
        (
            {"keep_best": None},
            "--early_stopping_patience=3: it says what to improve; write --keep_best=",
        ),
        (
            {"validation_iters": 0},
            "--keep_best=validation_loss: nothing is validated; set --validation_iters",
        ),
        (
            {"experiment_dir": None},
            "--keep_best=validation_loss: there is nowhere to save; set --experiment_dir",
        ),
    ],
)
def test_what_the_options_need(options: dict[str, Any], line: str) -> None:
    """Each in one line."""
    with pytest.raises(UsageError) as caught:
        best_of(**options)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
