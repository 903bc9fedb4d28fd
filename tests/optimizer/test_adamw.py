"""Bad updates are dropped without a trace, the loss scale reacts to overflows as documented, and
updated weights need not be copied into their buffer; with the torch references and with the Triton
kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import Kernels, choose_kernels
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import layers_of, run_distributed, tiny_config


def poisoned_update(
    distributed: Distributed, poison: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Two good updates, one with a single bad gradient element on the last rank, one good again."""
    config = tiny_config(distributed.world_size, **options)
    layers = layers_of(config)
    model = MultiStage(
        layers, config.multi_stage, config.batch, config.distributed.training_dtype, distributed
    )
    model.initialize(1)
    kernels = choose_kernels(config, distributed.device)
    optimizer = Optimizer(config, model.all_stages, distributed, kernels)

    def update(bad: bool) -> tuple[bool, float]:
        for stage in model.stages:
            stage.trainable[0].grad_shard.fill_(0.01)
        if bad and distributed.rank == distributed.world_size - 1:
            model.stages[1].trainable[0].grad_shard[5] = poison
        result = optimizer.step(1, 1e-3, torch.tensor(2.0), 1, model.updated)
        assert float(result.loss) == 2.0 * distributed.world_size
        return bool(result.verdict.skipped), float(result.grad_norm)

    def state() -> list[bytes]:
        return [
            part.read(kind).numpy().tobytes() for _, part in model.parts() for kind in part.kinds()
        ]

    good = [update(False), update(False)]
    before, counters = state(), optimizer.state()
    bad = update(True)
    unchanged = before == state()
    after_bad = optimizer.state()
    again = update(False)
    return {
        "good": good,
        "bad": bad,
        "unchanged": unchanged,
        "again": again,
        "moved": before != state(),
        "before": counters,
        "after": after_bad,
        "end": optimizer.state(),
    }


# With the kernels one of each: they run under Triton's interpreter here, slowly.
POISONS: list[tuple[float, dict[str, Any]]] = [
    (torch.nan, {}),
    (torch.inf, {"zero_stage": 3, "training_dtype": "bf16"}),
    (-torch.inf, {"clip_grad": 0.0}),
    (torch.nan, {"clip_grad": 0.0}),
    (
        torch.inf,
        {"enable_triton_kernels": True, "training_dtype": "bf16", "split_master_weights": True},
    ),
]


@pytest.mark.parametrize(
    ("poison", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if "enable_triton_kernels" in case[1] else [])
        for case in POISONS
    ],
    ids=str,
)
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(
    poison: float, options: dict[str, Any]
) -> None:
    """NaN and infinities never reach weights or moments, on no rank; the next update goes on as if
    nothing was."""
    for result in run_distributed(2, poisoned_update, poison, options):
        assert [skipped for skipped, _ in result["good"]] == [False, False]
        assert result["bad"][0] and result["unchanged"]
        assert (
            not result["again"][0]
            and result["moved"]
            and result["again"][1] == result["good"][0][1]
        )
        assert result["after"]["updates"] == 2 and result["end"]["updates"] == 3


def test_an_overflow_in_fp16_counts_against_the_hysteresis() -> None:
    for result in run_distributed(2, poisoned_update, float("inf"), {"training_dtype": "fp16"}):
        assert result["before"]["loss_scale"] == {
            "dynamic": True,
            "scale": 65536.0,
            "good": 2,
            "patience": 2,
        }
        assert result["after"]["loss_scale"] == {
            "dynamic": True,
            "scale": 65536.0,
            "good": 0,
            "patience": 1,
        }


# -- where the weights go
# --------------------------------------------------------------------------------------------

FORMS: list[dict[str, Any]] = [
    {},
    {"training_dtype": "bf16"},
    {"training_dtype": "bf16", "zero_stage": 3},
    {"training_dtype": "fp16"},
    {"training_dtype": "bf16", "full_precision_gradients": False},
    {"training_dtype": "bf16", "split_master_weights": True},
    {"lr_scales": ("embedding:0.1", "*.bias:2")},
    {
        "training_dtype": "bf16",
        "full_precision_gradients": False,
        "update_rms_clip": 0.5,
        "adam_nesterov": True,
    },
    {
        "training_dtype": "bf16",
        "split_master_weights": True,
        "clip_update_norm_sigma": 1e-3,
        "clip_update_norm_window": 2,
    },
]
triton_too = pytest.mark.parametrize("triton", [False, True])


def engine_with(options: dict[str, Any], triton: bool) -> Engine:
    """An engine whose optimizer, but nothing else, has Triton kernels or not."""
    engine = Engine(SimulatedRanks(), {"sequence_length": 8, **options})
    config, stages = engine.config, engine.model.stages
    engine.optimizer = Optimizer(config, stages, engine.ranks, Kernels(triton=triton))
    return engine


def train(engine: Engine) -> tuple[list[float], Tensor]:
    """Losses and norms of two steps, or three where a window of two has to fill, and all the
    masters of this rank."""
    steps = 3 if engine.config.optimizer.clip_update_norm_sigma else 2
    numbers = [
        float(number) for iteration in range(1, steps + 1) for number in engine.step(iteration)
    ]
    engine.model.finish()
    return numbers, torch.cat([part.read("weights") for _, part in engine.model.parts()])


def compare(reference: Engine, with_triton: Engine) -> None:
    """To rounding in fp32 or, in bf16, of an interpreter that cuts off instead of rounding."""
    (numbers, weights), (others, other_weights) = train(reference), train(with_triton)
    narrow = reference.model.precision.training != torch.float32
    assert others == pytest.approx(numbers, rel=3e-2 if narrow else 1e-4)
    # Where a gradient is all rounding, Adam makes a whole step of it in any direction: compared all
    # together.
    assert float((other_weights - weights).norm() / weights.norm()) < (1e-2 if narrow else 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(form, marks=[] if i in (2, 6) else [pytest.mark.slow])
        for i, form in enumerate(FORMS)
    ],
    ids=str,
)
def test_runs_with_triton_kernels_are_those_with_references(options: dict[str, Any]) -> None:
    """The optimizer's, in every form of weights and gradients, over one rank of two."""
    compare(engine_with(options, False), engine_with(options, True))


def compare_all_kernels(distributed: Distributed, options: dict[str, Any]) -> None:
    small = {"sequence_length": 4, "num_layers": 1, **options}
    compare(
        *(
            Engine(distributed, small | {"enable_triton_kernels": triton})
            for triton in (False, True)
        )
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), pytest.param(2, {"training_dtype": "bf16"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_whole_steps_with_triton_kernels_are_those_with_references(
    ranks: int, options: dict[str, Any]
) -> None:
    """Layers and optimizer, a tiny model."""
    run_distributed(ranks, compare_all_kernels, options)


@triton_too
@pytest.mark.parametrize("options", FORMS[1:6], ids=str)
def test_updated_weights_are_in_their_buffer_already(options: dict[str, Any], triton: bool) -> None:
    """The update writes what a gather would copy: the rounded master. ZeRO 3 has no buffer per
    stage."""
    engine = engine_with(options, triton)
    loss = engine.gradients(1)
    stage = engine.model.stages[1]
    part = stage.trainable[0]
    own_slice = part.full_weights[: part.layout.shard_numel]
    before = own_slice.clone()
    engine.optimizer.step(1, 1e-2, loss, engine.tokens, lambda stage: None)
    in_place = own_slice.clone()
    if options.get("zero_stage") == 3:
        assert part.weights.rounded is None
        return
    assert not torch.equal(in_place, before)
    own_slice[3] = 99.0  # shows whether it is copied again
    engine.model.updated(stage)
    stage.gather()
    assert own_slice[3] == 99.0
    if not options.get("split_master_weights"):
        assert torch.equal(in_place, part.read("weights").to(in_place.dtype))


@triton_too
# the interpreter divides by zero in what it does not write
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_from_elsewhere_are_copied_into_their_buffer(triton: bool) -> None:
    """After a checkpoint was loaded, after a dropped update of weights that nobody has gathered
    yet, and in between."""
    engine = engine_with({"training_dtype": "bf16", "zero_stage": 1}, triton)
    stage = engine.model.stages[1]
    part = stage.trainable[0]
    own_slice = part.full_weights[: part.layout.shard_numel]

    def drop_an_update() -> None:
        for other in engine.model.stages:
            other.trainable[0].grad_shard.fill_(torch.nan)
        assert engine.optimizer.step(
            1, 1e-2, torch.tensor(1.0), 1, lambda stage: None
        ).verdict.skipped

    drop_an_update()
    for _ in range(2):
        stage.gather()
        assert torch.equal(own_slice, part.read("weights").bfloat16())
        engine.step(1)
        drop_an_update()
        part.write("weights", part.read("weights").mul_(1.5))
        engine.model.invalidate()


@triton_too
def test_a_norm_whose_square_overflows_drops_the_update(triton: bool) -> None:
    """Without clipping it would make the second moment infinite, for good."""
    engine = engine_with({"clip_grad": 0.0}, triton)
    for value, skipped in ((1e15, False), (1e20, True)):
        for stage in engine.model.stages:
            stage.trainable[0].grad_shard.fill_(value)
        update = engine.optimizer.step(1, 1e-2, torch.tensor(1.0), 1, engine.model.updated)
        assert bool(update.verdict.skipped) == skipped
        assert all(
            torch.isfinite(part.moments["exp_avg_sq"]).all() for _, part in engine.model.parts()
        )


# -- the loss scale
# --------------------------------------------------------------------------------------------------


def scales(config: OptimizerConfig, overflows: list[bool]) -> list[float]:
    scaler = LossScale(config, "fp16", torch.device("cpu"))
    trace = []
    for overflow in overflows:
        scaler.update(torch.tensor(overflow))
        trace.append(float(scaler.scale))
    return trace


def test_the_dynamic_scale_halves_after_hysteresis_and_doubles_after_the_window() -> None:
    config = OptimizerConfig(
        initial_loss_scale=8.0, loss_scale_window=3, hysteresis=2, min_loss_scale=1.0
    )
    assert scales(config, [True, True, True, False, False, False]) == [8, 4, 2, 2, 2, 4]
    assert scales(config, [False, False, True, False, False, False]) == [8, 8, 8, 8, 8, 16]
    assert scales(config, [True] * 6) == [8, 4, 2, 1, 1, 1], "never below the minimum"
    assert scales(config, [False] * 3 + [True, True]) == [8, 8, 16, 16, 8], (
        "a doubling restores the hysteresis"
    )


def test_the_scale_survives_a_checkpoint_and_a_constant_one_is_the_command_lines() -> None:
    scaler = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    for overflow in (True, True, False):
        scaler.update(torch.tensor(overflow))
    copy = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    copy.load_state(scaler.state())
    assert (
        copy.state()
        == scaler.state()
        == {"dynamic": True, "scale": 32768.0, "good": 1, "patience": 0}
    )
    constant = LossScale(OptimizerConfig(loss_scale=128.0), "fp16", torch.device("cpu"))
    constant.load_state(scaler.state())
    constant.update(torch.tensor(True))
    assert float(constant.scale) == 128.0
    fresh = LossScale(OptimizerConfig(), "fp16", torch.device("cpu"))
    fresh.load_state(constant.state())
    assert float(fresh.scale) == 65536.0, "a run that turns to fp16 begins with the initial scale"
