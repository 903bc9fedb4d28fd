"""The real engine with frozen and split weights saves, loads and resumes bit for bit.

Checkpoints are compared by what their manifests say of each parameter, whatever layout wrote them; the bytes are read
here without the code that loads checkpoints.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.writing import Save, write_now
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import run_distributed, start_run, tiny_config
from tests.support.results import saved_values

Contents = dict[tuple[str, str], Tensor]  # (parameter, kind) -> values

EMBEDDING = {"freeze": ("embedding",)}
BLOCKS = {"freeze": ("blocks",)}
# Trainable and frozen parameters in each of the block's stages, several learning rates among the former.
MIXED = {"freeze": ("embedding.position", "*.bias", "blocks.0.mlp"), "lr_scales": ("blocks.1.attention:0.5",)}
MATRIX = {"freeze": ("embedding.position", "blocks.0.mlp.up"), "lr_scales": ("blocks.1.attention:0.5",)}
BF16 = {"training_dtype": "bf16"}
LOW = {**BF16, "store_frozen_weights_in_optimization_precision": False}
SPLIT = {**BF16, "split_master_weights": True}


def open_run(distributed: Distributed, options: dict[str, Any]) -> Any:
    """Build as the program does, from the newest checkpoint of --experiment_dir, if any."""

    schedule = {"train_iters": 8, "lr_warmup_iters": 2, "lr": 1e-2, "checkpoint_interval": 4}
    if options.get("train_iters") == 0:
        schedule = {"lr_warmup_iters": 0}
    run = start_run(distributed, tiny_config(distributed.world_size, **{**schedule, **options}))
    return run


def train_on(distributed: Distributed, options: dict[str, Any]) -> list[float]:
    """Train to the end through the program's own loop; metrics.jsonl has the losses."""
    from megatron_lite.monitor.trackers import read_metrics
    from megatron_lite.train import train

    run = open_run(distributed, options)
    train(run)
    run.trackers.close(0)
    distributed.barrier()
    return [record["loss"] for record in read_metrics(Path(options["experiment_dir"]) / "metrics.jsonl")]


def save_again(distributed: Distributed, options: dict[str, Any], target: str) -> dict[str, list[str]]:
    """Load and save into another directory; return the dtypes of the live weights by kind of part."""
    run = open_run(distributed, options)
    state = {"optimizer": run.optimizer.state(), "window": run.window.state()}
    write_now(Save(Path(target), run.iteration, run.model, state, run.config, distributed))
    dtypes: dict[str, list[str]] = {"trained": [], "frozen": []}
    for _, part in run.model.parts():
        known, dtype = dtypes["frozen" if part.frozen else "trained"], str(part.kinds()["weights"])
        if dtype not in known:
            known.append(dtype)
    return dtypes


def read_all(folder: Path) -> Contents:
    """Return every parameter and moment of a checkpoint."""
    content = manifest.read(folder)
    contents: Contents = {}
    for name, kind, values in saved_values(folder):
        parameter = content.parameters[name]
        flat = torch.frombuffer(bytearray(values), dtype=parameter.dtype_of(kind))
        contents[name, kind] = flat.view(parameter.shape)
    return contents


def assert_same(left: Contents, right: Contents) -> None:
    """Return whether parameters, moments and dtypes are bit-identical."""
    assert left.keys() == right.keys()
    different = [
        key
        for key, values in left.items()
        if values.dtype != right[key].dtype or not torch.equal(values.view(torch.uint8), right[key].view(torch.uint8))
    ]
    assert not different


def frozen_names(contents: Contents) -> set[str]:
    return {name for name, _ in contents if (name, "exp_avg") not in contents}


def copy_checkpoint(source: Path, iteration: int, experiment: Path) -> None:
    shutil.copytree(source / "checkpoints" / str(iteration), experiment / "checkpoints" / str(iteration))


def log_of(experiment: Path) -> str:
    return (experiment / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")


CASES: dict[str, dict[str, Any]] = {
    "frozen embedding, fp32, zero 1": {**EMBEDDING, "zero_stage": 1},
    "frozen embedding, low precision, zero 2": {**EMBEDDING, **LOW, "zero_stage": 2},
    "frozen blocks, bf16, zero 3": {**BLOCKS, **BF16, "zero_stage": 3},
    "mixed, low precision, zero 3": {**MIXED, **LOW, "zero_stage": 3, "layers_per_stage": 2.0},
    "split, zero 1": {**SPLIT, "zero_stage": 1},
    "split, mixed, low precision, zero 2": {**MIXED, **SPLIT, **LOW, "zero_stage": 2},
    "muon, two stages of blocks, zero 3": {"optimizer": "muon", "zero_stage": 3, "num_layers": 3, **MATRIX},
    "muon, split": {"optimizer": "muon", **SPLIT},
    "lion, split": {"optimizer": "lion", **SPLIT, **MATRIX},
    "sgd, zero 3": {"optimizer": "sgd", "zero_stage": 3, "training_dtype": "bf16"},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if i in (3, 5, 6, 8) else [pytest.mark.slow]) for i, case in enumerate(CASES)]
)
def test_continued_training_is_bit_identical(case: str, tmp_path: Path) -> None:
    """Resuming at iteration 4 gives iteration 8 and the losses of an uninterrupted run; frozen weights never change and
    are stored in the requested dtype, without moments. Another layout loads and saves the same."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    losses = run_distributed(2, train_on, {**CASES[case], "experiment_dir": str(whole)})[0]
    copy_checkpoint(whole, 4, resumed)
    again = run_distributed(2, train_on, {**CASES[case], "experiment_dir": str(resumed)})[0]
    assert "resumed from" in log_of(resumed) and "start at zero" not in log_of(resumed) and again == losses[4:]
    contents = [read_all(whole / "checkpoints" / iteration) for iteration in ("4", "8")]
    assert_same(read_all(resumed / "checkpoints" / "8"), contents[1])
    frozen = frozen_names(contents[1])
    assert bool(frozen) == ("freeze" in CASES[case]) and len(frozen) < len(manifest_names(whole))
    low = "low precision" in case
    for name in manifest_names(whole):
        before, after = (content[name, "weights"] for content in contents)
        assert torch.equal(before, after) == (name in frozen), name
        assert after.dtype == (torch.bfloat16 if low and name in frozen else torch.float32)
    layout = {"batch_size": 6, "zero_stage": 1, "layers_per_stage": 2.0, "experiment_dir": str(resumed)}
    run_distributed(3, save_again, {**CASES[case], **layout}, str(tmp_path / "other"))
    assert_same(read_all(tmp_path / "other" / "8"), contents[1])


def manifest_names(experiment: Path) -> list[str]:
    return list(manifest.read(experiment / "checkpoints" / "8").parameters)


OTHERS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"zero_stage": 1}),
    (2, {"zero_stage": 3, "layers_per_stage": 2.0}),
    (3, {"zero_stage": 2, "make_vocab_size_divisible_by": 100}),
)


@pytest.mark.parametrize(
    "case", ["mixed, low precision, zero 3", pytest.param("frozen embedding, fp32, zero 1", marks=pytest.mark.slow)]
)
def test_any_layout_reads_the_engines_checkpoints(case: str, tmp_path: Path) -> None:
    """Loading and saving with other world sizes, ZeRO stages, layers per stage and padding changes no bit."""
    options = {**CASES[case], "experiment_dir": str(tmp_path / "run"), "batch_size": 6}
    run_distributed(2, train_on, options)
    expected = read_all(tmp_path / "run" / "checkpoints" / "8")
    for number, (world_size, layout) in enumerate(OTHERS):
        run_distributed(world_size, save_again, {**options, **layout}, str(tmp_path / str(number)))
        assert_same(read_all(tmp_path / str(number) / "8"), expected)


def test_padding_of_the_vocabulary_may_change(tmp_path: Path) -> None:
    """A checkpoint saved with padding resumes without it like a run that keeps it, and one line reports the change."""
    padded = {"make_vocab_size_divisible_by": 100, "tie_word_embeddings": False, "zero_stage": 3}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    losses = run_distributed(2, train_on, {**padded, "experiment_dir": str(whole)})[0]
    copy_checkpoint(whole, 4, resumed)
    plain = {**padded, "make_vocab_size_divisible_by": 1, "experiment_dir": str(resumed)}
    np.testing.assert_allclose(run_distributed(2, train_on, plain)[0], losses[4:], rtol=1e-6)
    assert "make_vocab_size_divisible_by: 100 in the checkpoint, 1 now" in log_of(resumed)
    saved = manifest.read(whole / "checkpoints" / "8").parameters
    assert saved["embedding.word.weight"].shape == saved["head.output.weight"].shape == (64, 32)


@pytest.mark.parametrize(
    "split_first",
    [pytest.param(True, id="joined later", marks=pytest.mark.slow), pytest.param(False, id="split later")],
)
def test_masters_are_the_same_bits_split_or_not(split_first: bool, tmp_path: Path) -> None:
    """--split_master_weights changes the storage of fp32 masters, not their values: either run loads the other's."""
    options = {**EMBEDDING, **BF16, "experiment_dir": str(tmp_path / "run"), "zero_stage": 2}
    run_distributed(2, train_on, {**options, "split_master_weights": split_first})
    expected = read_all(tmp_path / "run" / "checkpoints" / "8")
    for number, (world_size, split) in enumerate([(2, not split_first), (3, not split_first), (2, split_first)]):
        changed = {**options, "split_master_weights": split, "batch_size": 12}
        run_distributed(world_size, save_again, changed, str(tmp_path / str(number)))
        assert_same(read_all(tmp_path / str(number) / "8"), expected)
    trained = [name for name, kind in expected if kind == "exp_avg"]
    low_halves = [expected[name, "weights"].view(torch.int32) & 0xFFFF for name in trained]
    assert sum(int(half.count_nonzero()) for half in low_halves) > 1000, "masters that are bf16 prove nothing"


def test_frozen_then_trained(tmp_path: Path) -> None:
    """Moments of thawed parameters start at zero and one line counts them; the others keep theirs."""
    options = {**MIXED, **LOW, "experiment_dir": str(tmp_path / "run"), "zero_stage": 3}
    run_distributed(2, train_on, options)
    before = read_all(tmp_path / "run" / "checkpoints" / "8")
    frozen = frozen_names(before)
    thawed = {**options, "freeze": (), "zero_stage": 1}
    dtypes = run_distributed(2, save_again, thawed, str(tmp_path / "again"))
    assert dtypes[0] == {"trained": ["torch.float32"], "frozen": []}
    after = read_all(tmp_path / "again" / "8")
    assert frozen and frozen_names(after) == set()
    for (name, kind), values in after.items():
        if (name, kind) in before:
            assert torch.equal(values, before[name, kind].float())
        else:
            assert kind != "weights" and name in frozen and not values.any()
    line = f"{len(frozen)} of {len({name for name, _ in after})} parameter tensors have no exp_avg and exp_avg_sq"
    log = next((tmp_path / "run" / "runs" / "1" / "logs").iterdir()).read_text("utf-8")
    changed = f"freeze: {' '.join(MIXED['freeze'])} in the checkpoint, none now"
    assert len(re.findall(line, log)) == 1 and changed in log, log
    copy_checkpoint(tmp_path / "run", 8, tmp_path / "on")
    losses = run_distributed(2, train_on, {**thawed, "experiment_dir": str(tmp_path / "on"), "train_iters": 12})[0]
    assert len(losses) == 4 and np.isfinite(losses).all()
    trained = read_all(tmp_path / "on" / "checkpoints" / "12")
    assert all(trained[name, "exp_avg_sq"].any() for name in frozen)
    assert not any(torch.equal(trained[name, "weights"], after[name, "weights"]) for name in frozen)


def test_trained_then_frozen(tmp_path: Path) -> None:
    """Weights come from the fp32 master, rounded only if low precision was requested; their moments are gone."""
    options = {**BF16, "experiment_dir": str(tmp_path / "run"), "zero_stage": 1}
    run_distributed(2, train_on, options)
    before = read_all(tmp_path / "run" / "checkpoints" / "8")
    for number, (low, more) in enumerate(((False, {}), (True, {}), (True, {"split_master_weights": True}))):
        changed = {**options, **MIXED, **(LOW if low else {}), **more}
        dtypes = run_distributed(3, save_again, {**changed, "batch_size": 6}, str(tmp_path / str(number)))
        assert dtypes[0] == {"trained": ["torch.float32"], "frozen": ["torch.bfloat16" if low else "torch.float32"]}
        after = read_all(tmp_path / str(number) / "8")
        frozen = frozen_names(after)
        expected = {
            (name, kind): values.bfloat16() if low and name in frozen else values
            for (name, kind), values in before.items()
            if kind == "weights" or name not in frozen
        }
        assert frozen
        assert_same(after, expected)
        log = (tmp_path / "run" / "runs" / str(number + 1) / "logs" / "logs_rank_000.txt").read_text("utf-8")
        assert log.count("parameter tensors are frozen and were rounded: float32 to bfloat16") == low


def weights_for_inference(distributed: Distributed, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return full weights and memory of a model that only evaluates."""
    from tests.support.harness import full_weights

    run = open_run(distributed, {**options, "train_iters": 0})
    assert not run.model.training
    return full_weights(run.model), run.model.memory.bytes_by_kind()


@pytest.mark.parametrize("case", ["split, mixed, low precision, zero 2", "frozen blocks, bf16, zero 3"])
def test_inference_reads_the_weights_alone(case: str, tmp_path: Path) -> None:
    """A model without moments computes with the weights of the checkpoint, in the training dtype."""
    options = {**CASES[case], "experiment_dir": str(tmp_path / "run")}
    run_distributed(2, train_on, options)
    saved = read_all(tmp_path / "run" / "checkpoints" / "8")
    for weights, memory in run_distributed(3, weights_for_inference, {**options, "batch_size": 6}):
        assert memory["optimizer moments"] == memory["gradient shards"] == 0
        for name, values in weights.items():
            assert np.array_equal(values, saved[name, "weights"].bfloat16().float().numpy()), name
