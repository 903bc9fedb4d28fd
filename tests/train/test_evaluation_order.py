"""Losses of evaluations compare between runs and with evaluate.py; a run of an earlier version
keeps its own order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.commands import evaluate as script
from megatron_lite.distributed.process_group import Distributed
from tests.checkpoint.test_damage import seal
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.metrics import read_metrics
from tests.support.token_files import write_documents

RUN: dict[str, Any] = dict(
    train_iters=2, validation_interval=1, checkpoint_interval=1, lr=1e-2, lr_warmup=0
)
RUN |= dict(
    dataset_source="list",
    vocab_size=64,
    test_iters=2,
    keep_best="validation_loss",
    init_method_std=0.3,
)


def train_run(distributed: Distributed, options: dict[str, Any]) -> None:
    train_whole(distributed, tiny_config(distributed.world_size, **RUN | options))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random tokens, whose loss depends on which are read; lengths that no sample fits."""
    folder, generator = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    sizes = {"train": 400, "one": 230, "two": 347}
    return {
        name: write_documents(folder / name, [generator.integers(0, 64, size)])
        for name, size in sizes.items()
    }


def options_of(
    sets: dict[str, str], count: Any, places: str = "one two", **more: Any
) -> dict[str, Any]:
    blend = tuple(word for name in places.split() for word in ("1", sets[name]))
    given = {
        "data_path": (sets["train"],),
        "valid_data_path": blend,
        "test_data_path": (sets["two"],),
    }
    return {**given, "validation_iters": count, **more}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., float]:
    """The loss that evaluate.py prints."""

    def start(model: Path, *arguments: str) -> float:
        given = [f"--model={model}", "--split=0,1,0", "--json", *arguments]
        assert script.main(given) == 0
        loss: float = json.loads(capsys.readouterr().out)["loss"]
        return loss

    return start


def losses_of(folder: Path, phase: str = "validation", iteration: int = 2) -> dict[str, Any]:
    (record,) = (
        one
        for one in read_metrics(folder / "metrics.jsonl")
        if one["phase"] == phase and one["iteration"] == iteration
    )
    return record


@pytest.mark.parametrize(
    ("count", "seed", "places"),
    [
        ("all", 99, "one two"),
        (3, 1, "two one"),
        pytest.param("all", 7, "two one", marks=pytest.mark.slow),
    ],
)
def test_evaluate_gives_the_numbers_of_the_run(
    count: Any,
    seed: int,
    places: str,
    sets: dict[str, str],
    tmp_path: Path,
    call: Callable[..., float],
) -> None:
    """Of the blend, of each set at any place in it, and of the test, whatever the seed; metrics
    name the order."""
    run_distributed(
        2, train_run, options_of(sets, count, places, seed=seed, experiment_dir=str(tmp_path))
    )
    found = losses_of(tmp_path)
    samples = [] if count == "all" else ["--samples=12"]
    for name in ("one", "two"):
        loss = call(tmp_path / "checkpoints", "--data_path", sets[name], *samples)
        assert found[f"loss/{name}"] == pytest.approx(loss, rel=1e-6)
    blend = [word for name in places.split() for word in ("1", sets[name])]
    whole = call(tmp_path / "checkpoints", "--data_path", *blend, *samples)
    assert found["loss"] == pytest.approx(whole, rel=1e-6)
    test = losses_of(tmp_path, "test")
    assert test["loss"] == pytest.approx(
        call(tmp_path / "checkpoints", "--data_path", sets["two"], "--samples=8"), rel=1e-6
    )
    assert found["evaluation_order"] == test["evaluation_order"] == "data"


def without_order(folder: Path) -> dict[str, Any]:
    """Make a checkpoint one of an earlier version; return its manifest."""
    path = folder / "manifest.json"
    values: dict[str, Any] = json.loads(path.read_bytes())
    assert values["state"]["data"].pop("evaluation_order") == "data"
    path.write_bytes(seal(values))
    return values


def test_a_run_of_an_earlier_version_keeps_its_order(
    sets: dict[str, str], tmp_path: Path, call: Callable[..., float]
) -> None:
    """Until it ends, over several starts; its best value stands, and evaluate.py measures its
    losses with --seed."""
    options = options_of(sets, "all", seed=99, experiment_dir=str(tmp_path))
    run_distributed(1, train_run, options | {"train_iters": 1})
    values = without_order(tmp_path / "checkpoints" / "1")
    for iterations, ranks in ((2, 2), (3, 1)):
        run_distributed(ranks, train_run, options | {"train_iters": iterations})
        found = losses_of(tmp_path, iteration=iterations)
        model = tmp_path / "checkpoints" / str(iterations)
        old, new = (call(model, "--data_path", sets["one"], *seed) for seed in (["--seed=99"], []))
        assert (
            found["evaluation_order"]
            == "seed"
            == losses_of(tmp_path, "test", iterations)["evaluation_order"]
        )
        assert found["loss/one"] == pytest.approx(old, rel=1e-6) != pytest.approx(new, rel=1e-4)
        state = manifest.read(model).state
        assert state["data"]["evaluation_order"] == "seed"
        assert state["best"]["measured"] == values["state"]["best"]["measured"]
    logs = "".join(log.read_text() for log in tmp_path.glob("runs/*/logs/*"))
    assert "starts again" not in logs and "not comparable" not in logs


def test_a_start_from_the_weights_of_another_run_is_a_new_run(
    sets: dict[str, str], tmp_path: Path
) -> None:
    """Whatever the order of that run."""
    made = options_of(sets, 2, seed=99, experiment_dir=str(tmp_path / "made"))
    run_distributed(1, train_run, made)
    without_order(tmp_path / "made" / "checkpoints" / "2")
    own = options_of(sets, 2, seed=99, experiment_dir=str(tmp_path / "own"))
    run_distributed(1, train_run, own | {"pretrained_checkpoint_path": str(tmp_path / "made")})
    assert losses_of(tmp_path / "own")["evaluation_order"] == "data"
