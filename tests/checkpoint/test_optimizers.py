"""Checkpoints of each --optimizer: their content, and the state that a change of the optimizer
resets."""

import itertools
from pathlib import Path

import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.config.optimizer import OPTIMIZERS
from megatron_lite.distributed.process_group import Distributed
from tests.checkpoint.test_engine import (
    LAST,
    MATRIX,
    assert_same,
    frozen_names,
    last,
    saved_again,
    train_on,
)
from tests.support.harness import run_distributed


def is_matrix(name: str) -> bool:
    """Return whether Muon orthogonalizes a parameter: a matrix between hidden layers."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def train_all(distributed: Distributed, roots: dict[str, Path]) -> None:
    for name, root in roots.items():
        train_on(distributed, {"optimizer": name, **MATRIX, "experiment_dir": str(root)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experiments of every optimizer on one rank, with something frozen."""
    roots = {name: tmp_path_factory.mktemp(name) for name in OPTIMIZERS}
    run_distributed(1, train_all, roots)
    return roots


def test_a_checkpoint_holds_the_moments_of_its_optimizer(trained: dict[str, Path]) -> None:
    for name, root in trained.items():
        contents = last(root)
        frozen = frozen_names(contents)
        assert frozen and not any("attention" in parameter for parameter in frozen)
        for parameter, kind in itertools.product(
            {parameter for parameter, _ in contents}, ("exp_avg", "exp_avg_sq")
        ):
            second = name == "adamw" or (name == "muon" and not is_matrix(parameter))
            wanted = parameter not in frozen and (kind == "exp_avg" or second)
            assert ((parameter, kind) in contents) == wanted, (name, parameter, kind)


ALWAYS = {("adamw", "muon"), ("muon", "adamw"), ("adamw", "lion"), ("lion", "sgd")}
CHANGES = [
    pytest.param(*change, marks=[] if change in ALWAYS else [pytest.mark.slow])
    for change in itertools.permutations(OPTIMIZERS, 2)
]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_a_change_of_the_optimizer(
    trained: dict[str, Path], before: str, now: str, tmp_path: Path
) -> None:
    """Weights are bit-identical; moments and Adam's count start at zero, except those that Muon's
    AdamW continues."""
    new, log, _ = saved_again(trained[before], 1, {"optimizer": now, **MATRIX}, tmp_path)
    old = last(trained[before])
    some_go_on = (before, now) == ("adamw", "muon")
    for (name, kind), values in new.items():
        if kind == "weights" or (some_go_on and not is_matrix(name)):
            assert_same({(name, kind): values}, {(name, kind): old[name, kind]})
        else:
            assert not values.any(), (name, kind)
    assert any(values.any() for (_, kind), values in new.items() if kind != "weights") == some_go_on
    state = manifest.read(tmp_path / "again" / str(LAST)).state["optimizer"]
    assert state["updates"] == (LAST if some_go_on else 0)
    assert f"trained with --optimizer={before}, whose moments --optimizer={now} cannot use" in log
