"""The debug options in full runs: what each prints and saves, and tensor logs that compare two
runs."""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.block import Block
from megatron_lite.monitor.tensor_log import TensorEntry, read_tensor_log
from scripts.compare_tensor_logs import compare
from tests.support.harness import run_distributed, train_tiny
from tests.support.launch import TINY, Outcome
from tests.support.launch import run as launch

Options = dict[str, Any]
Damage = Callable[[Distributed], contextlib.AbstractContextManager[Any]]

EVERYTHING: Options = {
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
COMMON: Options = {
    "num_layers": 3,
    "batch_size": 8,
    "depth_first_micro_batches": 1,
    "breadth_first_micro_batches": 2,
    "lr_warmup": 1,
    # A key's bias has no effect, so its gradient is all rounding, which Adam blows up to whole
    # steps.
    "add_linear_biases": False,
}


# --- Damage


@contextlib.contextmanager
def damaged_block(where: str, distributed: Distributed) -> Iterator[None]:
    """The output of blocks.1, or the gradient of its input, is off by 0.1 %."""
    forward = Block.forward

    def broken(self: Block, hidden: Tensor, micro_batch: Any) -> Tensor:
        if self.name != "blocks.1":
            return forward(self, hidden, micro_batch)
        if where == "output":
            return forward(self, hidden, micro_batch) * 1.001
        return forward(self, Scaled.apply(hidden), micro_batch)

    with patch.object(Block, "forward", broken):
        yield


class Scaled(torch.autograd.Function):
    """Identity with a wrong gradient."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.001


@contextlib.contextmanager
def damaged_reduction(distributed: Distributed) -> Iterator[None]:
    """Rank 1 hands a wrong gradient to the second reduction of the run, that of the last block."""
    reduce_scatter, calls = Distributed.reduce_scatter, 0

    def broken(self: Distributed, buffer: Tensor, *more: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and self.rank == 1:
            buffer.mul_(1.001)
        return reduce_scatter(self, buffer, *more, **options)

    with patch.object(Distributed, "reduce_scatter", broken):
        yield


DAMAGES: dict[str, Damage] = {
    "output": partial(damaged_block, "output"),
    "gradient": partial(damaged_block, "gradient"),
    "reduction": damaged_reduction,
}
NARROW: Options = {"training_dtype": "bf16", "add_linear_biases": True}
# The runs by number of ranks and name, each with all logs.
RUNS: dict[int, dict[str, Options]] = {
    1: {"plain": {}, "another seed": {"seed": 4321}},
    2: {
        **{f"zero {stage}": {"zero_stage": stage, **NARROW} for stage in (1, 2, 3)},
        **dict.fromkeys(["local a", "local b"], {"debug_global_tensors": False}),
        "frozen": {
            "freeze": ("embedding", "blocks.0"),
            "tie_word_embeddings": False,
            "zero_stage": 3,
        },
        **dict.fromkeys(["plain", *DAMAGES], {}),
    },
}


def train_all(distributed: Distributed, folder: Path, runs: dict[str, Options]) -> None:
    for name, options in runs.items():
        with DAMAGES[name](distributed) if name in DAMAGES else contextlib.nullcontext():
            place = {"experiment_dir": str(folder / name)}
            train_tiny(distributed, {**COMMON, **EVERYTHING, **options, **place}, ITERATIONS)


def log_runs(folder: Path, ranks: int, runs: dict[str, Options]) -> Path:
    run_distributed(ranks, train_all, folder, runs)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs on one rank."""
    return log_runs(tmp_path_factory.mktemp("one"), 1, RUNS[1])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs on two ranks."""
    return log_runs(tmp_path_factory.mktemp("two"), 2, RUNS[2])


def entries(experiment: Path) -> list[TensorEntry]:
    files = sorted((experiment / "runs" / "0" / "artifacts").iterdir())
    return [entry for file in files for entry in read_tensor_log(file)]


# --- What a user sees

FLAGS = [
    f"--{name}={int(value)}" for name, value in EVERYTHING.items() if name != "show_tensor_logs"
]
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
        [
            *TINY,
            f"--experiment_dir={experiment}",
            "--train_iters=2",
            "--depth_first_micro_batches=2",
            *flags,
        ],
        ranks,
    )
    assert set(outcome.codes) == {0} and not outcome.error_lines(), outcome.output
    return outcome


def start_with_everything(experiment: Path, ranks: int) -> None:
    """Each option's lines are printed once, by rank 0, and the files of all phases are there."""
    outcome = start(
        experiment, ranks, *FLAGS, "--debug_activation_memory=1", "--debug_tensor_parallel=1"
    )
    for name, pattern in EXPECTED_LINES.items():
        found = [
            line
            for line in outcome.output.splitlines()
            if re.fullmatch(pattern.replace("{b}", "2"), line)
        ]
        assert len(found) == (2 if name == "debug_activation_memory" else 1), (name, found)
    files = sorted(path.name for path in (experiment / "runs" / "0" / "artifacts").iterdir())
    assert files == [
        f"tensor_logs_{phase}_rank_000.safetensors"
        for phase in ("init", "train_00001", "train_00002")
    ]


@pytest.mark.slow  # by default on two ranks: the next test looks
def test_every_option_shows_itself(tmp_path: Path) -> None:
    """On one rank."""
    start_with_everything(tmp_path, 1)


def test_debugging_changes_no_number(tmp_path: Path) -> None:
    """With every option at once, losses and norms of two ranks are the same bits as without."""
    start(tmp_path / "plain", 2)
    start_with_everything(tmp_path / "debugged", 2)
    metrics = [
        re.findall(
            r'"(?:loss|grad_norm)": ?([^,}]+)',
            (tmp_path / name / "metrics.jsonl").read_text("utf-8"),
        )
        for name in ("plain", "debugged")
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 4


# --- Tensor logs as the judge


def check_zero_stages(folder: Path) -> None:
    first, *others = (folder / f"zero {stage}" for stage in (1, 2, 3))
    logged = entries(first)
    names = [entry.name for entry in logged]
    assert len(names) > 200 and sum("bw, mb=2/2" in name for name in names) == 4 * ITERATIONS
    assert all(entry.statistics is not None and not entry.statistics.not_finite for entry in logged)
    assert len({entry.statistics.checksum for entry in logged if entry.statistics}) > 100, (
        "nothing moves"
    )
    for other in others:
        assert compare(first, other) == []


def test_zero_stages_have_the_same_tensors(two: Path) -> None:
    """Two ranks, ZeRO 1, 2, 3: every output, gradient and weight is bit-identical, whole or
    gathered."""
    check_zero_stages(two)


@pytest.mark.slow
def test_zero_stages_have_the_same_tensors_in_fp32(tmp_path: Path) -> None:
    wide = {**NARROW, "training_dtype": "fp32"}
    check_zero_stages(
        log_runs(
            tmp_path, 2, {f"zero {stage}": {"zero_stage": stage, **wide} for stage in (1, 2, 3)}
        )
    )


def test_ranks_have_the_same_tensors_to_rounding(one: Path, two: Path) -> None:
    """Global tensors of two ranks, each with half of the batch, are those of one rank: exact before
    any sum over samples, to rounding after it."""
    assert compare(one / "plain", two / "plain", rtol=1e-4) == []
    assert "init" not in compare(one / "plain", two / "plain")[0].file


def test_ranks_without_global_tensors_log_their_own(two: Path) -> None:
    """Every rank leaves files; two runs with the same layout compare."""
    names = sorted(path.name for path in (two / "local a" / "runs" / "0" / "artifacts").iterdir())
    assert names == [
        f"tensor_logs_{phase}_rank_{rank:03d}.safetensors"
        for phase in ("init", "train_00001", "train_00002")
        for rank in (0, 1)
    ]
    assert compare(two / "local a", two / "local b") == []


def test_another_seed_differs_from_the_embedding_on(one: Path) -> None:
    """The first tensor that differs is the embedding's initial value."""
    differences = compare(one / "plain", one / "another seed")
    assert differences[0].file == "tensor_logs_init_rank_000.safetensors"
    assert differences[0].name == "embedding.word.weight init"


LOCATED = {
    "output": "blocks.1 fw, mb=1/2",
    "gradient": "blocks.1 bw, mb=1/2",
    "reduction": "stage 3 gradient shards",
}


def check_located(good: Path, bad: Path) -> None:
    for rtol in (0.0, 1e-5):
        difference = compare(good, bad, rtol=rtol)[0]
        assert (difference.file, difference.name) == (
            "tensor_logs_train_00001_rank_000.safetensors",
            LOCATED[bad.name],
        )
    assert difference.max_abs is not None and 0 < difference.max_abs


@pytest.mark.parametrize("damage", LOCATED)
def test_damage_is_located(two: Path, damage: str) -> None:
    """A block whose output or gradient is off by 0.1 %, and a reduction of a wrong gradient, are
    the first tensor that differs, with a tolerance too."""
    check_located(two / "plain", two / damage)


@pytest.mark.slow
def test_damage_is_located_on_one_rank(one: Path, tmp_path: Path) -> None:
    folder = log_runs(tmp_path, 1, {"output": {}, "gradient": {}})
    for damage in ("output", "gradient"):
        check_located(one / "plain", folder / damage)


def test_frozen_parameters_have_no_gradients(two: Path) -> None:
    """Behind frozen layers there is no gradient of an input; their parameters are logged all the
    same, unchanged."""
    logged = {entry.name: entry for entry in entries(two / "frozen")}
    gradients = {name for name in logged if name.endswith(" gradient") or " bw," in name}
    assert {name.split(",")[0] for name in gradients if " bw," in name} == {
        "blocks.2 bw",
        "head bw",
    }
    assert not any(name.startswith(("embedding", "blocks.0")) for name in gradients)
    assert "blocks.1.mlp.up.weight gradient" in gradients
    for name, moves in (("blocks.0.mlp.up.weight", False), ("blocks.1.mlp.up.weight", True)):
        assert (logged[f"{name} init"].statistics != logged[f"{name} update"].statistics) == moves


def test_resumed_run_begins_with_the_weights_that_were_saved(tmp_path: Path) -> None:
    """--debug_param_init of a second start logs the loaded weights: the last update of the first
    start."""
    flags = ["--debug_param_init=9", "--debug_param_update=9", "--save_tensor_logs=1"]
    start(tmp_path, 2, *flags)
    start(tmp_path, 1, *flags, "--train_iters=3")
    first, second = (tmp_path / "runs" / run / "artifacts" for run in "01")
    updated = {
        entry.name: entry
        for entry in read_tensor_log(first / "tensor_logs_train_00002_rank_000.safetensors")
    }
    loaded = read_tensor_log(second / "tensor_logs_init_rank_000.safetensors")
    assert len(loaded) == len(updated) > 20
    for entry in loaded:
        assert entry.statistics == updated[entry.name.replace(" init", " update")].statistics, (
            entry.name
        )


def test_validation_is_not_logged(tmp_path: Path) -> None:
    """Layers are logged in training steps only: outputs of two iterations, two micro-batches, four
    layers."""
    outcome = start(tmp_path, 1, "--debug_layer_outputs=1", "--validation_iters=2")
    assert outcome.output.count(" fw, mb=") == 2 * 2 * 4
