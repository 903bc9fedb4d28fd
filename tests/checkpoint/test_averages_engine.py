"""Averages through the program's own loop: what a checkpoint stores, and how runs resume from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from tests.checkpoint.test_engine import (
    BF16,
    MIXED,
    OTHERS,
    SPLIT,
    assert_same,
    copy_checkpoint,
    open_run,
    read_all,
    save_again,
    train_on,
)
from tests.support.harness import run_distributed

EMA: dict[str, Any] = {"ema_type": "ema", "ema_beta": 0.8}
SQRT: dict[str, Any] = {"ema_type": "ema_decay_sqrt", "ema_beta": 0.9, "ema_switch_iter": 3, "ema_decay_iters": 4}
VALIDATED: dict[str, Any] = {"validation_iters": 1, "validation_interval": 2}

CASES: dict[str, dict[str, Any]] = {
    "fp32, zero 1": {**EMA, "zero_stage": 1},
    "mixed, bf16, zero 3": {**SQRT, **MIXED, **BF16, "zero_stage": 3, "layers_per_stage": 2.0},
    "split, zero 2": {**SQRT, **SPLIT, "zero_stage": 2},
}


def records(experiment: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]


def losses(experiment: Path) -> dict[tuple[str, int], tuple[float, float | None]]:
    """Return the losses of weights and of averages by phase and iteration."""
    return {(r["phase"], r["iteration"]): (r["loss"], r.get("averaged_loss")) for r in records(experiment)}


def log_of(experiment: Path, start: int) -> str:
    return (experiment / "runs" / str(start) / "logs" / "logs_rank_000.txt").read_text("utf-8")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "mixed" in case else pytest.mark.slow) for case in CASES]
)
def test_continued_training_is_bit_identical(case: str, tmp_path: Path) -> None:
    """Resuming at iteration 4 gives the weights, moments, averages and both validation losses of an uninterrupted
    run; loading and saving with other world sizes and ZeRO stages changes no bit."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = {**CASES[case], **VALIDATED, "batch_size": 6}
    run_distributed(2, train_on, {**options, "experiment_dir": str(whole)})
    copy_checkpoint(whole, 4, resumed)
    run_distributed(2, train_on, {**options, "experiment_dir": str(resumed)})
    before, after = losses(whole), losses(resumed)
    assert "resumed from" in log_of(resumed, 0) and "begins now" not in log_of(resumed, 0)
    assert after and all(before[key] == pair for key, pair in after.items())
    validated = {key: pair for key, pair in before.items() if key[0] == "validation"}
    assert len(validated) == 4 and all(raw != averaged is not None for raw, averaged in validated.values())
    assert all(averaged is None for (phase, _), (_, averaged) in before.items() if phase == "training")
    contents = read_all(whole / "checkpoints" / "8")
    assert_same(read_all(resumed / "checkpoints" / "8"), contents)
    averaged = {name for name, kind in contents if kind == "average"}
    assert averaged == {name for name, kind in contents if kind == "exp_avg"}
    assert not any(torch.equal(contents[name, "average"], contents[name, "weights"]) for name in averaged)
    for number, (world_size, layout) in enumerate(OTHERS):
        if layout["zero_stage"] == 3 and "split" in case:
            continue
        changed = {**options, "experiment_dir": str(whole), **layout}
        run_distributed(world_size, save_again, changed, str(tmp_path / str(number)))
        assert_same(read_all(tmp_path / str(number) / "8"), contents)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_validation_never_changes_the_weights(ranks: int, tmp_path: Path) -> None:
    """In fp32, evaluating and exporting averages after every iteration or never gives the same weights, moments and
    averages. Before the first update, averages equal the weights."""
    options = {**EMA, "batch_size": 4, "lr": 1e-2}
    busy = {"validation_iters": 1, "validation_interval": 1, "validation_at_start": True}
    busy |= {"export_interval": 1, "export_weights": "average"}
    for name, more in (("never", {}), ("always", busy)):
        run_distributed(ranks, train_on, {**options, **more, "experiment_dir": str(tmp_path / name)})
    assert_same(read_all(tmp_path / "never" / "checkpoints" / "8"), read_all(tmp_path / "always" / "checkpoints" / "8"))
    never, always = losses(tmp_path / "never"), losses(tmp_path / "always")
    assert len(never) == 8 and len(always) == 17 and all(always[key] == pair for key, pair in never.items())
    assert len(set(always["validation", 0])) == 1


def test_averaging_switched_on_off_and_over(tmp_path: Path) -> None:
    """Averaging that starts later begins with the loaded weights; another type starts over; without it averages are
    dropped. Each is reported once."""
    run, experiment = tmp_path / "run", {"experiment_dir": str(tmp_path / "run")}
    run_distributed(1, train_on, {**MIXED, **experiment})
    plain = read_all(run / "checkpoints" / "8")
    begins = "averaging (--ema_type={}) begins now, from these weights"

    def begins_with_the_weights(kind: dict[str, Any], iteration: int, number: int) -> None:
        run_distributed(1, save_again, {**MIXED, **experiment, **kind}, str(tmp_path / str(number)))
        loaded = read_all(tmp_path / str(number) / str(iteration))
        averaged = {name for name, kind in loaded if kind == "average"}
        assert averaged and all(torch.equal(loaded[name, "average"], loaded[name, "weights"]) for name in averaged)
        assert log_of(run, number).count(begins.format(kind["ema_type"])) == 1
        assert {key: value for key, value in loaded.items() if key[1] != "average"}.keys() == plain.keys()

    begins_with_the_weights(EMA, 8, 1)
    run_distributed(1, train_on, {**MIXED, **experiment, **EMA, "train_iters": 12})
    trained = read_all(run / "checkpoints" / "12")
    averages = {name: values for (name, kind), values in trained.items() if kind == "average"}
    assert averages and not any(torch.equal(trained[name, "weights"], values) for name, values in averages.items())
    begins_with_the_weights(SQRT, 12, 3)
    run_distributed(1, save_again, {**MIXED, **experiment}, str(tmp_path / "4"))
    assert log_of(run, 4).count("it holds averaged weights, which a run without --ema_type neither uses nor") == 1
    assert read_all(tmp_path / "4" / "12").keys() == plain.keys()


def test_frozen_parameters_have_no_averages_until_they_are_trained(tmp_path: Path) -> None:
    """Thawed parameters start from their weights, the others keep their averages; freezing drops averages."""
    options = {**EMA, **BF16, "experiment_dir": str(tmp_path / "run"), "zero_stage": 3}
    run_distributed(2, train_on, {**options, **MIXED})
    before = read_all(tmp_path / "run" / "checkpoints" / "8")
    run_distributed(3, save_again, {**options, "zero_stage": 1, "batch_size": 6}, str(tmp_path / "thawed"))
    after = read_all(tmp_path / "thawed" / "8")
    names = {name for name, _ in after}
    frozen = {name for name in names if (name, "average") not in before}
    assert 0 < len(frozen) < len(names)
    for name in names:
        assert torch.equal(after[name, "average"], before.get((name, "average"), before[name, "weights"]))
    line = f"{len(frozen)} of {len(names)} parameter tensors have no average there (they were frozen)"
    assert line in log_of(tmp_path / "run", 1) and "begins now" not in log_of(tmp_path / "run", 1)
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    (tmp_path / "thawed" / "8").rename(tmp_path / "again" / "checkpoints" / "8")
    again = {**options, **MIXED, "experiment_dir": str(tmp_path / "again")}
    run_distributed(2, save_again, again, str(tmp_path / "frozen"))
    assert_same(read_all(tmp_path / "frozen" / "8"), before)


def evaluated_alone(distributed: Distributed, options: dict[str, Any]) -> int:
    """Validate and export without training; return the bytes of the averages."""
    from megatron_lite.train import train

    run = open_run(distributed, {**options, "train_iters": 0})
    train(run)
    run.trackers.close(0)
    assert not run.model.training
    return run.model.memory.bytes_by_kind()["averages"]


@pytest.mark.parametrize(
    "more", [pytest.param({}, marks=pytest.mark.slow), {**SPLIT, "zero_stage": 2}], ids=["fp32", "split"]
)
def test_a_run_that_trains_nothing_evaluates_and_exports_the_averages(more: dict[str, Any], tmp_path: Path) -> None:
    """--train_iters=0 with a checkpoint gives both losses of the run that wrote it, and exports its averages."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    options = {**SQRT, **VALIDATED, **more, "export_interval": 8, "export_weights": "average"}
    options |= {"experiment_dir": str(tmp_path / "run"), "freeze": ("blocks.0",)}
    run_distributed(2, train_on, options)
    first = tmp_path / "run" / "export" / "8"
    first.rename(tmp_path / "first")
    assert min(run_distributed(2, evaluated_alone, options)) > 0
    validations = [record for record in records(tmp_path / "run") if record["phase"] == "validation"]
    trained, alone = ((record["loss"], record["averaged_loss"]) for record in validations if record["iteration"] == 8)
    assert trained == alone
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "first", first))
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    saved = read_all(tmp_path / "run" / "checkpoints" / "8")
    dtype = torch.bfloat16 if more else torch.float32
    averaged, frozen = "blocks.1.mlp.down.bias", "blocks.0.mlp.down.bias"
    assert torch.equal(one["transformer.h.1.mlp.c_proj.bias"], saved[averaged, "average"].to(dtype))
    assert torch.equal(one["transformer.h.0.mlp.c_proj.bias"], saved[frozen, "weights"].to(dtype))
    assert not torch.equal(saved[averaged, "average"], saved[averaged, "weights"])
