"""Averages and single moments in checkpoints: any set loads any other, in any layout, and every loss is reported.

These are the stand-ins of `fakes.py`; `test_averages_engine.py` trains.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest
from tests.checkpoint.test_frozen import MIXED, expected
from tests.checkpoint.test_writing import load, save
from tests.support.fakes import Layout, same

BOTH, ONE, NONE = manifest.MOMENTS, manifest.MOMENTS[:1], ()
LAYOUTS: list[dict[str, Any]] = [
    dict(moments=moments, averaged=averaged) for moments in (BOTH, ONE, NONE) for averaged in (False, True)
]


def number(kinds: dict[str, Any]) -> str:
    return f"{len(kinds['moments'])}{'+average' * kinds['averaged']}"


@pytest.mark.parametrize("loading", LAYOUTS, ids=number)
@pytest.mark.parametrize("saving", LAYOUTS, ids=number)
def test_any_set_reads_any_other(saving: dict[str, Any], loading: dict[str, Any], tmp_path: Path) -> None:
    """(moments, averaged) of a parameter: across ranks and stages, with masters that are copies on either side."""
    for count, (copies, frozen) in enumerate(itertools.product([False, True], [(), MIXED])):
        saved = save(tmp_path / str(count), 10, 1, 3, 3, **saving, copies=copies, frozen=frozen)
        loaded, values, lines = load(tmp_path / str(count), 2, 8, **loading, copies=not copies)
        assert loaded is not None and same(values, expected(saved, Layout(**loading)))
        said = "\n".join(lines)
        missing = [kind for kind in loading["moments"] if kind not in saving["moments"]]
        if missing:
            assert f" of 8 parameter tensors have no {' and '.join(missing)} there (they were frozen, or tra" in said
        resumes = loading["averaged"] and saving["averaged"]
        assert ("4 of 8 parameter tensors have no average there" in said) == (resumes and bool(frozen))
        assert ("it holds averaged weights" in said) == (saving["averaged"] and not loading["averaged"])
        if saving == loading and not frozen:
            assert lines == []


def test_numbers_of_parameters_are_counted_apart(tmp_path: Path) -> None:
    """With half the parameters frozen in a run of one moment, the report counts frozen and trained ones separately."""
    save(tmp_path, 10, 1, moments=ONE, averaged=True, frozen=MIXED)
    lines = load(tmp_path, averaged=True)[2]
    assert [line.partition("/10: ")[2].partition(" (")[0] for line in lines] == [
        "4 of 8 parameter tensors have no exp_avg_sq there",
        "4 of 8 parameter tensors have no exp_avg and exp_avg_sq there",
        "4 of 8 parameter tensors have no average there",
    ]


@pytest.mark.parametrize("averaged", [False, True])
def test_inference_takes_weights_and_averages(averaged: bool, tmp_path: Path) -> None:
    """A model for inference loads no moments and reports none missing."""
    saved = save(tmp_path, 10, 1, 3, averaged=True)
    _, values, lines = load(tmp_path, 2, 2, training=False, averaged=averaged)
    wanted = {kind: saved[kind] for kind in ("weights", *["average"] * averaged)}
    assert same(values, wanted) and len(lines) == (not averaged)


def test_only_what_there_is_is_named(tmp_path: Path) -> None:
    """The manifest has no empty lists; averages come after the moments."""
    save(tmp_path, 10, 1, 2, moments=ONE, averaged=True, frozen=MIXED)
    for name, entry in json.loads((tmp_path / "10" / "manifest.json").read_bytes())["parameters"].items():
        assert list(entry) == ["dtype", "shape", "weights", *(() if name in MIXED else ("exp_avg", "average"))]
        assert all(entry.values())
