"""Bad updates are dropped without a trace, and the loss scale reacts to overflows as documented."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_distributed, tiny_config

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed import Distributed
from megatron_lite.gpt import build_gpt
from megatron_lite.optimizer.adamw import AdamW
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.zero.multi_stage import MultiStage


def poisoned_update(distributed: Distributed, poison: float, options: dict[str, Any]) -> dict[str, Any]:
    """Two good updates, one with a single bad gradient element on the last rank, one good again."""
    config = tiny_config(distributed.world_size, **options)
    layers = build_gpt(config.model, config.batch.sequence_length)
    model = MultiStage(layers, config.multi_stage, config.batch, config.distributed.training_dtype, distributed)
    model.initialize(1)
    optimizer = AdamW(config.optimizer, model.stages, config.distributed.training_dtype, distributed)

    def update(bad: bool) -> tuple[bool, float]:
        for stage in model.stages:
            stage.trainable.grad_shard.fill_(0.01)
        if bad and distributed.rank == distributed.world_size - 1:
            model.stages[1].trainable.grad_shard[5] = poison
        result = optimizer.step(1e-3, torch.tensor(2.0), model.updated)
        assert float(result.loss) == 2.0 * distributed.world_size
        return bool(result.skipped), float(result.grad_norm)

    def state() -> list[bytes]:
        return [part.read(kind).numpy().tobytes() for _, part in model.parts() for kind in part.kinds()]

    good = [update(False), update(False)]
    before, counters = state(), optimizer.state()
    bad = update(True)
    unchanged = before == state()
    after_bad = optimizer.state()
    again = update(False)
    return {"good": good, "bad": bad, "unchanged": unchanged, "again": again, "moved": before != state(),
            "before": counters, "after": after_bad, "end": optimizer.state()}  # fmt: skip


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"zero_stage": 3, "training_dtype": "bf16"}, {"clip_grad": 0.0}], ids=str)
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(poison: float, options: dict[str, Any]) -> None:
    """NaN and infinities never reach weights or moments, on no rank; the next update goes on as if nothing was."""
    for result in run_distributed(2, poisoned_update, poison, options):
        assert [skipped for skipped, _ in result["good"]] == [False, False]
        assert result["bad"][0] and result["unchanged"]
        assert not result["again"][0] and result["moved"] and result["again"][1] == result["good"][0][1]
        assert result["after"]["updates"] == 2 and result["end"]["updates"] == 3


def test_an_overflow_in_fp16_counts_against_the_hysteresis() -> None:
    for result in run_distributed(2, poisoned_update, float("inf"), {"training_dtype": "fp16"}):
        assert result["before"]["loss_scale"] == {"dynamic": True, "scale": 65536.0, "good": 2, "patience": 2}
        assert result["after"]["loss_scale"] == {"dynamic": True, "scale": 65536.0, "good": 0, "patience": 1}


def scales(config: OptimizerConfig, overflows: list[bool]) -> list[float]:
    scaler = LossScale(config, "fp16", torch.device("cpu"))
    trace = []
    for overflow in overflows:
        scaler.update(torch.tensor(overflow))
        trace.append(float(scaler.scale))
    return trace


def test_the_dynamic_scale_halves_after_hysteresis_and_doubles_after_the_window() -> None:
    config = OptimizerConfig(initial_loss_scale=8.0, loss_scale_window=3, hysteresis=2, min_loss_scale=1.0)
    assert scales(config, [True, True, True, False, False, False]) == [8, 4, 2, 2, 2, 4]
    assert scales(config, [False, False, True, False, False, False]) == [8, 8, 8, 8, 8, 16]
    assert scales(config, [True] * 6) == [8, 4, 2, 1, 1, 1], "never below the minimum"
    assert scales(config, [False] * 3 + [True, True]) == [8, 8, 16, 16, 8], "a doubling restores the hysteresis"


def test_the_scale_survives_a_checkpoint_and_a_constant_one_is_the_command_lines() -> None:
    scaler = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    for overflow in (True, True, False):
        scaler.update(torch.tensor(overflow))
    copy = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    copy.load_state(scaler.state())
    assert copy.state() == scaler.state() == {"dynamic": True, "scale": 32768.0, "good": 1, "patience": 0}
    constant = LossScale(OptimizerConfig(loss_scale=128.0), "fp16", torch.device("cpu"))
    constant.load_state(scaler.state())
    constant.update(torch.tensor(True))
    assert float(constant.scale) == 128.0
    fresh = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    fresh.load_state(constant.state())
    assert float(fresh.scale) == 65536.0, "a run that turns to fp16 begins with the initial scale"
