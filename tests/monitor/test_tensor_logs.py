"""The debug options in full runs: what each prints and saves, and tensor logs that compare two runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.block import Block
from megatron_lite.monitor.tensor_log import TensorEntry, read_tensor_log
from tests.support.harness import run_distributed, train_tiny
from tests.support.launch import TINY, Outcome
from tests.support.launch import run as launch
from tests.support.loading import loaded

EVERYTHING = {
    "debug_layer_outputs": 9,
    "debug_layer_gradients": 9,
    "debug_param_init": 9,
    "debug_param_gradients": 9,
    "debug_all_param_gradients": 9,
    "debug_param_update": 9,
    "save_tensor_logs": True,
    "show_tensor_logs": False,
}
ITERATIONS = 2
# Two micro-batches a step, so that they can be mixed up.
COMMON = {
    "num_layers": 3,
    "batch_size": 8,
    "depth_first_micro_batches": 1,
    "breadth_first_micro_batches": 2,
    "lr_warmup_iters": 1,
}


@pytest.fixture(scope="module")
def compare() -> Iterator[Callable[..., list[Any]]]:
    with loaded("compare_tensor_logs") as module:
        yield module.compare


def several(distributed: Distributed, runs: list[dict[str, Any]]) -> None:
    for options in runs:
        train_tiny(distributed, options, ITERATIONS)


def log_runs(folder: Path, ranks: int, runs: dict[str, dict[str, Any]]) -> list[Path]:
    """Train each and return their experiment directories."""
    places = [folder / f"{name}-{ranks}" for name in runs]
    options = [
        {**COMMON, **EVERYTHING, **more, "experiment_dir": str(place)}
        for place, more in zip(places, runs.values(), strict=True)
    ]
    run_distributed(ranks, several, options)
    return places


def entries(experiment: Path) -> list[TensorEntry]:
    files = sorted((experiment / "runs" / "0" / "artifacts").iterdir())
    return [entry for file in files for entry in read_tensor_log(file)]


# --- What a user sees

FLAGS = [f"--{name}={int(value)}" for name, value in EVERYTHING.items() if name != "show_tensor_logs"]
NUMBER = r"-?\d\.\d{4}e[+-]\d\d"
REST = rf"float32 cpu \| mean {NUMBER}, std {NUMBER} \| samples {NUMBER}( {NUMBER})+ \.\.\. \(64 in all\)"
EXPECTED_LINES = {
    "debug_layer_outputs": rf"train_00002 \| blocks\.1 fw, mb=2/2 \| \({{b}}, 16, 32\) {REST}",
    "debug_layer_gradients": rf"train_00002 \| blocks\.1 bw, mb=2/2 \| \({{b}}, 16, 32\) {REST}",
    "debug_param_init": rf"init \| blocks\.1\.mlp\.up\.weight init \| \(128, 32\) {REST}",
    "debug_param_gradients": rf"train_00001 \| stage 2 gradient shards \| \(12704,\) {REST}",
    "debug_all_param_gradients": rf"train_00001 \| blocks\.1\.mlp\.up\.weight gradient \| \(128, 32\) {REST}",
    "debug_param_update": rf"train_00001 \| blocks\.1\.mlp\.up\.weight update \| \(128, 32\) {REST}",
    "debug_activation_memory": r"train_00002 \| blocks\.1 (fw|bw), mb=2/2 \| memory: resident set .* MiB",
    "debug_tensor_parallel": r"WARNING: --debug_tensor_parallel has no effect with --tensor_parallel=1",
}


def start(experiment: Path, ranks: int, *flags: str) -> Outcome:
    outcome = launch(
        [*TINY, f"--experiment_dir={experiment}", "--train_iters=2", "--depth_first_micro_batches=2", *flags], ranks
    )
    assert set(outcome.codes) == {0} and not outcome.error_lines(), outcome.output
    return outcome


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_option_shows_itself(tmp_path: Path, ranks: int) -> None:
    """Each option's lines are printed once, by rank 0, and the files of all phases are there."""
    flags = [*FLAGS, "--debug_activation_memory=1", "--debug_tensor_parallel=1"]
    outcome = start(tmp_path, ranks, *flags)
    for name, pattern in EXPECTED_LINES.items():
        found = [line for line in outcome.output.splitlines() if re.fullmatch(pattern.replace("{b}", "2"), line)]
        assert len(found) == (2 if name == "debug_activation_memory" else 1), (name, found)
    files = sorted(path.name for path in (tmp_path / "runs" / "0" / "artifacts").iterdir())
    assert files == [f"tensor_logs_{phase}_rank_000.safetensors" for phase in ("init", "train_00001", "train_00002")]


def test_debugging_changes_no_number(tmp_path: Path) -> None:
    """With every option at once, losses, norms and weights of two ranks are the same bits as without."""
    plain, debugged = (
        [line for line in start(tmp_path / name, 2, *flags).output.splitlines() if line.startswith("iteration ")]
        for name, flags in (("plain", []), ("debugged", [*FLAGS, "--debug_activation_memory=1"]))
    )
    assert len(plain) == 2
    metrics = [
        re.findall(r'"(?:loss|grad_norm)": ?([^,}]+)', (tmp_path / name / "metrics.jsonl").read_text("utf-8"))
        for name in ("plain", "debugged")
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 4


# --- Tensor logs as the judge


@pytest.mark.parametrize("training_dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_zero_stages_have_the_same_tensors(tmp_path: Path, compare: Any, training_dtype: str) -> None:
    """Two ranks, ZeRO 1, 2, 3: every output, gradient and weight is bit-identical, whole or gathered."""
    runs = {f"zero {stage}": {"zero_stage": stage, "training_dtype": training_dtype} for stage in (1, 2, 3)}
    first, *others = log_runs(tmp_path, 2, runs)
    logged = entries(first)
    names = [entry.name for entry in logged]
    assert len(names) > 200 and sum("bw, mb=2/2" in name for name in names) == 4 * ITERATIONS
    assert all(entry.statistics is not None and not entry.statistics.not_finite for entry in logged)
    assert len({entry.statistics.checksum for entry in logged if entry.statistics}) > 100, "nothing moves"
    for other in others:
        assert compare(first, other) == []


def test_ranks_have_the_same_tensors_to_rounding(tmp_path: Path, compare: Any) -> None:
    """Global tensors of two ranks, each with half of the batch, are those of one rank: exact before any sum over
    samples, to rounding after it."""
    # A key's bias has no effect, so its gradient is all rounding, which Adam blows up to whole steps.
    options = {"run": {"add_linear_biases": False}}
    (alone,), (both,) = log_runs(tmp_path, 1, options), log_runs(tmp_path, 2, options)
    assert compare(alone, both, rtol=1e-4) == []
    first = compare(alone, both)[0]
    assert "init" not in first.file


def test_ranks_without_global_tensors_log_their_own(tmp_path: Path, compare: Any) -> None:
    """Every rank leaves files; two runs with the same layout compare."""
    a, b = log_runs(tmp_path, 2, {name: {"debug_global_tensors": False} for name in "ab"})
    names = sorted(path.name for path in (a / "runs" / "0" / "artifacts").iterdir())
    assert names == [
        f"tensor_logs_{phase}_rank_{rank:03d}.safetensors"
        for phase in ("init", "train_00001", "train_00002")
        for rank in (0, 1)
    ]
    assert compare(a, b) == []


def test_another_seed_differs_from_the_embedding_on(tmp_path: Path, compare: Any) -> None:
    """The first tensor that differs is the embedding's initial value."""
    a, b = log_runs(tmp_path, 1, {"a": {}, "b": {"seed": 4321}})
    differences = compare(a, b)
    assert differences[0].file == "tensor_logs_init_rank_000.safetensors"
    assert differences[0].name == "embedding.word.weight init"


def damaged(distributed: Distributed, runs: list[dict[str, Any]], where: str) -> None:
    """Train after breaking something in this process: the output of blocks.1, its gradient, or one reduction."""
    forward = Block.forward

    def broken(self: Block, hidden: Tensor, micro_batch: Any) -> Tensor:
        if self.name != "blocks.1":
            return forward(self, hidden, micro_batch)
        if where == "output":
            return forward(self, hidden, micro_batch) * 1.001
        return forward(self, Scaled.apply(hidden), micro_batch)

    Block.forward = broken  # type: ignore[assignment]
    several(distributed, runs)


class Scaled(torch.autograd.Function):
    """Identity with a wrong gradient."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.001


def damaged_reduction(distributed: Distributed, runs: list[dict[str, Any]]) -> None:
    """Rank 1 hands a wrong gradient to the second reduction of the run, that of the last block."""
    reduce_scatter, calls = Distributed.reduce_scatter, 0

    def broken(self: Distributed, buffer: Tensor, *more: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and self.rank == 1:
            buffer.mul_(1.001)
        return reduce_scatter(self, buffer, *more, **options)

    Distributed.reduce_scatter = broken  # type: ignore[method-assign]
    several(distributed, runs)


@pytest.mark.parametrize(
    ("ranks", "damage", "first"),
    [
        pytest.param(1, (damaged, "output"), "blocks.1 fw, mb=1/2", marks=pytest.mark.slow),
        pytest.param(1, (damaged, "gradient"), "blocks.1 bw, mb=1/2", marks=pytest.mark.slow),
        (2, (damaged, "output"), "blocks.1 fw, mb=1/2"),
        (2, (damaged, "gradient"), "blocks.1 bw, mb=1/2"),
        (2, (damaged_reduction,), "stage 3 gradient shards"),
    ],
)
def test_damage_is_located(tmp_path: Path, compare: Any, ranks: int, damage: tuple[Any, ...], first: str) -> None:
    """A block whose output or gradient is off by 0.1 %, and a reduction of a wrong gradient, are the first tensor that
    differs, with a tolerance too."""
    (good,) = log_runs(tmp_path, ranks, {"good": {}})
    options = {**COMMON, **EVERYTHING, "experiment_dir": str(tmp_path / "bad")}
    train, *where = damage
    run_distributed(ranks, train, [options], *where)
    for rtol in (0.0, 1e-5):
        difference = compare(good, tmp_path / "bad", rtol=rtol)[0]
        assert (difference.file, difference.name) == ("tensor_logs_train_00001_rank_000.safetensors", first)
    assert difference.max_abs is not None and 0 < difference.max_abs


def test_resumed_run_begins_with_the_weights_that_were_saved(tmp_path: Path) -> None:
    """--debug_param_init of a second start logs the loaded weights: the last update of the first start."""
    flags = ["--debug_param_init=9", "--debug_param_update=9", "--save_tensor_logs=1"]
    start(tmp_path, 2, *flags)
    start(tmp_path, 1, *flags, "--train_iters=3")
    first, second = (tmp_path / "runs" / run / "artifacts" for run in "01")
    updated = {entry.name: entry for entry in read_tensor_log(first / "tensor_logs_train_00002_rank_000.safetensors")}
    loaded = read_tensor_log(second / "tensor_logs_init_rank_000.safetensors")
    assert len(loaded) == len(updated) > 20
    for entry in loaded:
        assert entry.statistics == updated[entry.name.replace(" init", " update")].statistics, entry.name


def test_frozen_parameters_have_no_gradients(tmp_path: Path) -> None:
    """Behind frozen layers there is no gradient of an input; their parameters are logged all the same, unchanged."""
    options = {"freeze": ("embedding", "blocks.0"), "tie_word_embeddings": False, "zero_stage": 3}
    (place,) = log_runs(tmp_path, 2, {"run": options})
    logged = {entry.name: entry for entry in entries(place)}
    gradients = {name for name in logged if name.endswith(" gradient") or " bw," in name}
    assert {name.split(",")[0] for name in gradients if " bw," in name} == {"blocks.2 bw", "head bw"}
    assert not any(name.startswith(("embedding", "blocks.0")) for name in gradients)
    assert "blocks.1.mlp.up.weight gradient" in gradients
    for name, moves in (("blocks.0.mlp.up.weight", False), ("blocks.1.mlp.up.weight", True)):
        assert (logged[f"{name} init"].statistics != logged[f"{name} update"].statistics) == moves


def test_validation_is_not_logged(tmp_path: Path) -> None:
    """Layers are logged in training steps only."""
    counts = [
        start(
            tmp_path / str(iterations), 1, "--debug_layer_outputs=1", f"--validation_iters={iterations}"
        ).output.count(" fw, mb=")
        for iterations in (0, 2)
    ]
    assert counts[0] == counts[1] == 2 * 2 * 4
