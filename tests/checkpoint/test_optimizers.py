"""Checkpoints of each --optimizer: their content, runs that resume bit for bit, and the state that a change resets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.config.optimizer import OPTIMIZERS
from tests.checkpoint.test_engine import (
    SPLIT,
    assert_same,
    copy_checkpoint,
    frozen_names,
    log_of,
    read_all,
    save_again,
    train_on,
)
from tests.support.harness import run_distributed

MIXED = {"freeze": ("embedding.position", "blocks.0.mlp.up"), "lr_scales": ("blocks.1.attention:0.5",)}
CASES: dict[str, dict[str, Any]] = {
    "muon, two stages of blocks, zero 3": {"optimizer": "muon", "zero_stage": 3, "num_layers": 3, **MIXED},
    "muon, split": {"optimizer": "muon", **SPLIT},
    "lion, split": {"optimizer": "lion", **SPLIT, **MIXED},
    "sgd, zero 3": {"optimizer": "sgd", "zero_stage": 3, "training_dtype": "bf16"},
}


def is_matrix(name: str) -> bool:
    """Return whether Muon orthogonalizes a parameter: a matrix between hidden layers."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if i in (0, 2) else [pytest.mark.slow]) for i, case in enumerate(CASES)]
)
def test_continued_training_is_bit_identical(case: str, tmp_path: Path) -> None:
    """Resuming at iteration 4 gives iteration 8 and the losses of an uninterrupted run, and any layout loads and saves
    the checkpoint of another."""
    whole, resumed, other = tmp_path / "whole", tmp_path / "resumed", tmp_path / "other"
    options = CASES[case]
    losses = run_distributed(2, train_on, {**options, "experiment_dir": str(whole)})[0]
    copy_checkpoint(whole, 4, resumed)
    again = run_distributed(2, train_on, {**options, "experiment_dir": str(resumed)})[0]
    assert "resumed from" in log_of(resumed) and "start at zero" not in log_of(resumed) and again == losses[4:]
    contents = read_all(whole / "checkpoints" / "8")
    assert_same(read_all(resumed / "checkpoints" / "8"), contents)
    layout = {"batch_size": 6, "zero_stage": 1, "layers_per_stage": 2.0, "experiment_dir": str(resumed)}
    run_distributed(3, save_again, {**options, **layout}, str(other))
    assert_same(read_all(other / "8"), contents)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experiments of every optimizer on one rank, with something frozen."""
    roots = {name: tmp_path_factory.mktemp(name) for name in OPTIMIZERS}
    for name, root in roots.items():
        run_distributed(1, train_on, {"optimizer": name, **MIXED, "experiment_dir": str(root)})
    return roots


def test_a_checkpoint_holds_the_moments_of_its_optimizer(trained: dict[str, Path]) -> None:
    for name, root in trained.items():
        contents = read_all(root / "checkpoints" / "8")
        frozen = frozen_names(contents)
        assert frozen and not any("attention" in parameter for parameter in frozen)
        for parameter, kind in itertools.product({parameter for parameter, _ in contents}, ("exp_avg", "exp_avg_sq")):
            second = name == "adamw" or (name == "muon" and not is_matrix(parameter))
            wanted = parameter not in frozen and (kind == "exp_avg" or second)
            assert ((parameter, kind) in contents) == wanted, (name, parameter, kind)


ALWAYS = {("adamw", "muon"), ("muon", "adamw"), ("adamw", "lion"), ("lion", "sgd")}
CHANGES = [
    pytest.param(*change, marks=[] if change in ALWAYS else [pytest.mark.slow])
    for change in itertools.permutations(OPTIMIZERS, 2)
]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_a_change_of_the_optimizer(trained: dict[str, Path], before: str, now: str, tmp_path: Path) -> None:
    """Weights are bit-identical; moments and Adam's count start at zero, except those that Muon's AdamW continues."""
    copy_checkpoint(trained[before], 8, tmp_path)
    run_distributed(1, save_again, {"optimizer": now, **MIXED, "experiment_dir": str(tmp_path)}, str(tmp_path / "new"))
    old, new = read_all(trained[before] / "checkpoints" / "8"), read_all(tmp_path / "new" / "8")
    some_go_on = (before, now) == ("adamw", "muon")
    for (name, kind), values in new.items():
        if kind == "weights" or (some_go_on and not is_matrix(name)):
            assert_same({(name, kind): values}, {(name, kind): old[name, kind]})
        else:
            assert not values.any(), (name, kind)
    assert any(values.any() for (_, kind), values in new.items() if kind != "weights") == some_go_on
    state = manifest.read(tmp_path / "new" / "8").state["optimizer"]
    assert state["updates"] == (8 if some_go_on else 0)
    assert f"trained with --optimizer={before}, whose moments --optimizer={now} cannot use" in log_of(tmp_path)
