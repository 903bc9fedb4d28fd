"""A CPU run that the free memory cannot hold is refused before it allocates anything; no other run
is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.cli.parse import parse
from megatron_lite.errors import OutOfMemoryError
from megatron_lite.kernels.choice import REFERENCES
from megatron_lite.model.gpt import model_layers
from megatron_lite.planner import auto
from megatron_lite.planner.plan import Planner, SimulatedGroup
from megatron_lite.validation import resolve
from tests.support.harness import tiny_config
from tests.support.launch import pretrain_after


def check(
    free: int, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, device: str = "cpu", **options: Any
) -> None:
    """Check a small run whose ranks share a machine with `free` bytes."""
    config = tiny_config(ranks, batch_size=2 * ranks, **options)
    layers = model_layers(config, REFERENCES, SimulatedGroup(0, ranks, "cpu"))
    group: Any = SimpleNamespace(
        rank=0, world_size=ranks, local_world_size=ranks, device=torch.device(device)
    )
    monkeypatch.setattr(auto, "available_bytes", lambda: free)
    auto.check_memory(config, layers, group)


def test_a_run_is_refused_exactly_where_its_tensors_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte decides. The ranks of a machine share its memory; a GPU, inference and the user's
    word are exempt."""
    peak = Planner(2, "cpu").plan(tiny_config(2, batch_size=4)).peak_bytes()
    check(2 * peak, monkeypatch)
    with pytest.raises(OutOfMemoryError, match="for each of the 2 ranks of this machine") as caught:
        check(2 * peak - 2, monkeypatch)
    assert caught.value.free_bytes == peak - 1
    for exempt in ({"ignore_memory_check": True}, {"device": "cuda"}, {"train_iters": 0}):
        check(0, monkeypatch, **exempt)


def test_small_runs_and_unknown_ones_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is small for its machine is not planned; one that cannot be planned is not
    refused."""

    def fail(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Planner, "plan", fail)
    check(0, monkeypatch)
    monkeypatch.setattr(auto, "Planner", None)
    check(2**30, monkeypatch)


@pytest.mark.parametrize(
    "shape", ["", "--gated=1 --vocab_size=32000", "--hidden_size=1024 --training_dtype=bf16"]
)
def test_the_bound_is_above_the_plan(shape: str) -> None:
    """What spares small runs a plan is more than any plan says, also for narrow models and many
    tokens."""
    for more in (
        "--sequence_length=1024",
        "--sequence_length=64 --micro_batch_size=1",
        "--breadth_first_micro_batches=4",
    ):
        sizes = "--num_layers=2 --hidden_size=64 --num_attention_heads=4 --micro_batch_size=2 --ema_type=ema"
        words = [*sizes.split(), *shape.split(), *more.split(), "--dataset_source=random"]
        config = resolve(parse(words).config, 1)
        layers = model_layers(config, REFERENCES, SimulatedGroup(0, 1, "cpu"))
        assert auto.most_bytes(config, layers) > Planner(1, "cpu").plan(config).peak_bytes()


def test_a_run_that_cannot_fit_gets_flags_instead_of_a_signal(tmp_path: Path) -> None:
    """It ends with code 7 and flags whose plan fits the free memory."""
    flags = "--num_layers=2 --hidden_size=256 --num_attention_heads=4 --vocab_size=256 --sequence_length=512"
    words = [
        *flags.split(),
        "--batch_size=64",
        "--dataset_source=random",
        "--device=cpu",
        "--train_iters=1",
    ]
    little = "from megatron_lite.planner import auto; auto.available_bytes = lambda: 2**30"
    result = pretrain_after(little, [*words, f"--experiment_dir={tmp_path / 'run'}"])
    assert result.returncode == 7, result.stderr
    said = r"out of memory: the tensors need [\d.]+ GiB by the plan, and 1.0 GiB are free \(--ignore_memory_check=1 .*"
    message = json.loads((tmp_path / "run" / "exit.json").read_text())["message"]
    assert re.fullmatch(said, message) and message in result.stderr
    _, _, append = message.partition("append ")
    config = resolve(parse([*words, *append.split()]).config, 1)
    assert Planner(1, "cpu").plan(config).needed_bytes() <= 2**30
