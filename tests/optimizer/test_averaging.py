"""Averages of the weights: Levanter's numbers, a float64 oracle over ranks, ZeRO stages and dtypes,
and what they must never do to the weights."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_lite.config import AveragingConfig
from megatron_lite.errors import UsageError
from megatron_lite.kernels import weight_shard
from megatron_lite.kernels.weight_shard import WeightShard
from megatron_lite.optimizer import averaging
from megatron_lite.optimizer.averaging import Averaging, weight_in_sum
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.report import describe
from megatron_lite.validation.warnings import warnings
from megatron_lite.zero.stage import Buffer, Stage
from tests.support.engine_runs import Engine, LateGroup, Outcome, SimulatedRanks
from tests.support.harness import parameters_of, run_distributed, tiny_config

Options = dict[str, Any]

EMA: Options = {"ema_type": "ema", "ema_beta": 0.8}
SQRT: Options = {
    "ema_type": "ema_decay_sqrt",
    "ema_beta": 0.9,
    "ema_switch_iter": 3,
    "ema_decay_iters": 4,
}
SPLIT: Options = {"training_dtype": "bf16", "split_master_weights": True}


def a_part(weights: Tensor, split: bool = False) -> Any:
    """Make a stand-in part with the attributes that `Averaging` uses."""
    if not split:
        shard = WeightShard(weights)
    else:
        shard = WeightShard.split_into(torch.zeros(weights.shape, dtype=torch.bfloat16))
        shard.write(weights)
    return SimpleNamespace(weights=shard, average=torch.zeros(weights.shape))


def averages(options: Options, iterates: list[float], start: float = 0.0) -> list[float]:
    """The averages after each update of a weight that goes through `iterates`."""
    part = a_part(torch.full((5,), start))
    engine = Averaging(AveragingConfig(**options), [part])
    engine.start()
    found = []
    for value in iterates:
        part.weights.master.fill_(value)
        engine.begin()
        engine.follow(part)
        assert len(set(part.average.tolist())) == 1
        found.append(part.average[0].item())
    return found


# -- formulas
# --------------------------------------------------------------------------------------------------------


def test_ema_has_levanters_values() -> None:
    """beta 0.9, from 0, weights 1, 2, 3, 4."""
    found = averages({"ema_type": "ema", "ema_beta": 0.9}, [1.0, 2.0, 3.0, 4.0])
    assert found == pytest.approx([0.1, 0.29, 0.561, 0.9049], rel=1e-6)


def test_ema_decay_sqrt_has_levanters_values() -> None:
    """beta 0.9, switch 3, decay 4, weights 1 to 9; what it starts from does not count."""
    expected = [1.0, 1.5, 2.0, 3.538462, 3.944445, 4.232112, 4.398636, 4.398636, 4.398636]
    assert averages(SQRT, [float(value) for value in range(1, 10)], start=77.0) == pytest.approx(
        expected, rel=2e-7
    )


def test_without_mass_the_average_stays_where_it_began() -> None:
    """A uniform phase of weight 0 has no mean to begin with."""
    options = {"ema_type": "ema_decay_sqrt", "ema_switch_iter": 0, "ema_decay_iters": 1}
    assert averages(options, [1.0, 2.0, 3.0], start=5.0) == [1.0, 1.0, 1.0]
    with mock.patch.object(averaging, "weight_in_sum", lambda *_: 0.0):
        assert averages(options, [1.0, 2.0], start=5.0) == [5.0, 5.0]


def exact_average(options: AveragingConfig, start: Any, iterates: Sequence[Any]) -> Any:
    """The average of numbers or tensors over the whole history, as Levanter writes it, in
    float64."""
    average, total = start, 0.0
    for t, value in enumerate(iterates):
        if options.ema_type == "ema":
            average = options.ema_beta * average + (1 - options.ema_beta) * value
            continue
        progress = min(max((t - options.ema_switch_iter) / options.ema_decay_iters, 0.0), 1.0)
        mass = 1.0 - options.ema_beta if t < options.ema_switch_iter else 1.0 - math.sqrt(progress)
        total += mass
        average = average + (mass / total * (value - average) if total > 0 else 0.0)
    return average


@settings(max_examples=60)
@given(
    st.floats(0.0, 0.9999),
    st.integers(0, 12),
    st.integers(1, 12),
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30),
)
def test_any_numbers_give_levanters_average(
    beta: float, switch: int, decay: int, iterates: list[float]
) -> None:
    """And the average never leaves the range of the weights, and stands still after the decay."""
    options = {
        "ema_type": "ema_decay_sqrt",
        "ema_beta": beta,
        "ema_switch_iter": switch,
        "ema_decay_iters": decay,
    }
    found = averages(options, iterates)
    assert found[-1] == pytest.approx(
        exact_average(AveragingConfig(**options), 0.0, iterates), abs=1e-5
    )
    assert all(min(iterates) - 1e-5 <= value <= max(iterates) + 1e-5 for value in found)
    assert len(set(found[switch + decay :])) <= 1
    assert weight_in_sum(AveragingConfig(**options), switch + decay) == 0.0


@pytest.mark.parametrize("options", [EMA, SQRT], ids=["ema", "sqrt"])
def test_state_goes_through_json_at_any_time(options: Options) -> None:
    """A continued run takes the shares of the one that went on, to the last bit."""
    config = AveragingConfig(**options)
    whole = Averaging(config, [])
    for count in range(12):
        again = Averaging(config, [])
        again.load_state(json.loads(json.dumps(whole.state())))
        assert again.updates == count
        rest = [one_share(again) for _ in range(8)]
        copy = Averaging(config, [])
        copy.load_state(whole.state())
        assert [one_share(copy) for _ in range(8)] == rest
        one_share(whole)


def one_share(engine: Averaging) -> float:
    engine.begin()
    return engine._share


@pytest.mark.parametrize(
    "state", [{}, {"type": "ema", "updates": 5, "total": 0.0}], ids=["none", "other type"]
)
def test_without_a_state_of_its_type_it_begins_anew(state: dict[str, Any]) -> None:
    part = a_part(torch.arange(5.0))
    engine = Averaging(AveragingConfig(**SQRT), [part])
    engine.load_state(state)
    assert engine.updates == 0 and torch.equal(part.average, torch.arange(5.0))


def test_a_split_master_is_followed_in_pieces_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fp32 weights that it stands for, whatever the size of the pieces."""
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(weight_shard, "CPU_CHUNK_NUMEL", 64)
    results = []
    for split in (False, True):
        part = a_part(weights.clone(), split)
        engine = Averaging(AveragingConfig(**EMA), [part])
        engine.start()
        assert torch.equal(part.average, weights)
        part.weights.write(2 * weights) if split else part.weights.master.mul_(2)
        engine.begin()
        engine.follow(part)
        results.append(part.average)
    assert torch.equal(*results)


# -- in training
# -----------------------------------------------------------------------------------------------------

TINY: Options = {"sequence_length": 8, "hidden_size": 16, "vocab_size": 32, "batch_size": 6}
BF16: Options = {"training_dtype": "bf16"}


def over(function: Callable[[Any, Options], Any]) -> Callable[[Any, list[Options]], list[Any]]:
    """To go through several cases with the same processes."""
    return functools.partial(_each, function)


def _each(function: Callable[[Any, Options], Any], ranks: Any, cases: list[Options]) -> list[Any]:
    return [function(ranks, {**TINY, **options}) for options in cases]


def followed(ranks: Any, options: Options) -> tuple[float, float]:
    """The largest difference of this rank's averages to those of its fp32 weights, computed in
    float64; and how far these lie from the last weights."""
    engine = Engine(ranks, options)
    config = engine.config.averaging
    parts = [part for _, part in engine.model.parts() if part.average is not None]
    assert 0 < len(parts) < len(list(engine.model.parts())), "something is frozen"
    history = [[part.read("weights").double().clone() for part in parts]]
    for iteration in range(1, 7):
        engine.step(iteration)
        history.append([part.read("weights").double().clone() for part in parts])
    worst = moved = 0.0
    for index, part in enumerate(parts):
        start, *iterates = (weights[index] for weights in history)
        average = exact_average(config, start, iterates)
        assert part.average is not None
        worst = max(worst, float((part.average - average).abs().max()))
        moved = max(moved, float((part.average - iterates[-1]).abs().max()))
    engine.model.finish()
    return worst, moved


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 3]
)
def test_averages_follow_the_weights(ranks: int) -> None:
    """Both types, ZeRO 1 to 3, fp32, bf16, split masters, with frozen parameters in between: to
    rounding."""
    ways: list[Options] = [{"zero_stage": 1}, {"zero_stage": 3, **BF16}, {"zero_stage": 2, **SPLIT}]
    cases = [{"freeze": ("blocks.0",), **kind, **way} for kind in (EMA, SQRT) for way in ways]
    for results in zip(*run_distributed(ranks, over(followed), cases), strict=True):
        assert max(worst for worst, _ in results) < 1e-6
        assert max(moved for _, moved in results) > 1e-3, (
            "averages that are the weights prove nothing"
        )


def dropped(ranks: Any, options: Options) -> int:
    """Three updates, of which the second is dropped everywhere because of one rank's gradient; the
    updates counted."""
    engine = Engine(ranks, options)
    engine.step(1)
    parts = [part for _, part in engine.model.parts() if part.average is not None]
    weights = [part.read("weights").clone() for part in parts]
    expected = [torch.lerp(part.read("average"), part.read("weights"), 1 - 0.8) for part in parts]
    loss = engine.gradients(2)
    if ranks.rank == 0:
        parts[0].grad_shard[0] = math.nan
    update = engine.optimizer.step(2, 1e-2, loss, engine.tokens, engine.model.updated)
    assert update.verdict.skipped
    for part, before, average in zip(parts, weights, expected, strict=True):
        assert torch.equal(part.read("weights"), before) and torch.equal(
            part.read("average"), average
        )
    engine.model.gather_ahead()
    engine.step(3)
    engine.model.finish()
    return engine.optimizer.averaging.updates


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_dropped_update_counts(ranks: int) -> None:
    """The average moves on towards the weights, which stay as they are; NaN enters neither."""
    cases: list[Options] = [EMA, {**EMA, "zero_stage": 2, **SPLIT}]
    assert all(found == [3, 3] for found in run_distributed(ranks, over(dropped), [*cases]))


def never_and_always(ranks: Any, options: Options) -> tuple[Outcome, Outcome]:
    """Evaluations of weights and averages after no iteration, and after every one."""
    return Engine(ranks, options).run(3), Engine(ranks, options, LateGroup(ranks)).run(
        3, evaluate_every=1
    )


def apart(outcome: Outcome) -> tuple[Any, ...]:
    """Return everything that an evaluation must not change."""
    return outcome.losses, outcome.grad_norms, outcome.weights, outcome.state


CASES: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 1, **BF16},
    {"zero_stage": 2, **SPLIT},
    {
        "zero_stage": 3,
        "num_weight_buffers": 1,
        "depth_first_micro_batches": 2,
        "batch_size": 12,
        **BF16,
    },
    {
        "zero_stage": 1,
        "tie_word_embeddings": False,
        "recompute_layers": 1,
        "freeze": ("blocks.0", "*.norm.*"),
    },
    {"zero_stage": 2, "optimizer": "muon"},
]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluating_averages_changes_nothing(ranks: int) -> None:
    """After every iteration or never: losses, norms, weights, moments and averages are the same
    bits. Collectives send nothing before a rank waits for them, so that gathers of weights are
    under way all the time."""
    for results in run_distributed(
        ranks, over(never_and_always), [{**EMA, **case} for case in CASES]
    ):
        for options, (never, always) in zip(CASES, results, strict=True):
            assert apart(never) == apart(always), options
            assert len(always.evaluated) == len(always.averaged) == 3
            assert not set(always.evaluated) & set(always.averaged), options


def gather_into_the_weights(stage: Stage, buffer: Buffer, averages: bool) -> None:
    """A mutation of `Stage.compute_with`: averages are gathered into the weight buffer."""
    for part in stage.parts:
        part.shows_average = averages
    stage.weights.holder = None


def never_and_always_mutated(ranks: Any, options: Options) -> tuple[Outcome, Outcome]:
    with mock.patch.object(Stage, "compute_with", gather_into_the_weights):
        return never_and_always(ranks, options)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_test_above_sees_a_gather_into_the_masters(ranks: int) -> None:
    """fp32, a buffer for each stage: the weight buffers are the masters' memory."""
    ((never, always),) = run_distributed(ranks, over(never_and_always_mutated), [EMA])[0]
    assert apart(never) != apart(always)


def trained(ranks: Any, options: Options) -> Outcome:
    return Engine(ranks, options).run(4, evaluate_every=2)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_zero_stages_agree_to_the_last_bit(ranks: int) -> None:
    """Averages, their loss, and everything else, in fp32 and bf16."""
    cases: list[Options] = [
        {**SQRT, **more, "zero_stage": stage} for more in ({}, BF16) for stage in (1, 2, 3)
    ]
    for one, two, three, *low in run_distributed(ranks, over(trained), cases):
        assert one == two == three and low[0] == low[1] == low[2]


def evaluated_twice(ranks: Any, options: Options) -> tuple[float, float]:
    """The loss of the averages, and of another model that has them as its weights."""
    engine, other = Engine(ranks, options), Engine(ranks, {**options, "ema_type": "none"})
    for iteration in range(1, 4):
        engine.step(iteration)
    with engine.model.averaged():
        loss = engine.model.evaluate(engine.batches(0))
    for (_, part), (_, target) in zip(engine.model.parts(), other.model.parts(), strict=True):
        values = part.read("weights") if part.average is None else part.average
        target.write("weights", target.read("weights").copy_(values))
    other.model.invalidate()
    engine.model.finish()
    return float(loss), float(other.model.evaluate(other.batches(0)))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_loss_is_that_of_a_model_with_these_weights(ranks: int) -> None:
    """Bit for bit, frozen parameters at their own values."""
    cases: list[Options] = [
        {"zero_stage": 1},
        {"zero_stage": 3, **BF16},
        {"freeze": ("blocks.0", "*.bias")},
    ]
    for results in run_distributed(
        ranks, over(evaluated_twice), [{**EMA, **case} for case in cases]
    ):
        assert all(loss == expected for loss, expected in results)


# -- guards
# ----------------------------------------------------------------------------------------------------------


def test_before_the_first_update_the_average_is_the_weights() -> None:
    engine = Engine(SimulatedRanks(), EMA)
    raw = engine.model.evaluate(engine.batches(0))
    with engine.model.averaged():
        assert torch.equal(engine.model.evaluate(engine.batches(0)), raw)


def test_guards_hold_inside() -> None:
    """A stage that was not gathered is not used, and nothing is trained."""
    engine = Engine(SimulatedRanks(), EMA)
    engine.model.gather_ahead()
    engine.model.evaluate(engine.batches(0))
    with engine.model.averaged():
        with pytest.raises(
            AssertionError, match="stage 1 would compute with the weights of stage None"
        ):
            engine.model.stages[1].require_weights()
        engine.model.stages[1].gather()
        engine.model.stages[1].require_weights()
        with pytest.raises(AssertionError, match="stage 2 would compute"):
            engine.model.stages[2].require_weights()
        with pytest.raises(AssertionError, match="averages are not trained"):
            engine.gradients(1)
    engine.model.stages[1].require_weights()


def test_the_weight_buffers_still_hold_their_stages_afterwards() -> None:
    """Parameters are views of the same memory as before, with the same values, and nothing has to
    be gathered again."""
    engine = Engine(SimulatedRanks(), {**EMA, "zero_stage": 1})
    engine.step(1)
    engine.model.evaluate(engine.batches(0))
    before = {
        name: (parameter.data_ptr(), parameter.clone())
        for name, parameter in parameters_of(engine.model)
    }
    with pytest.raises(KeyError), engine.model.averaged():
        engine.model.evaluate(engine.batches(0))
        inside = {parameter.data_ptr() for _, parameter in parameters_of(engine.model)}
        raise KeyError  # also where an evaluation fails
    for name, parameter in parameters_of(engine.model):
        address, values = before[name]
        assert parameter.data_ptr() == address not in inside and torch.equal(parameter, values)
    for stage in engine.model.stages:
        stage.require_weights()


def test_without_averages_there_is_nothing_to_show() -> None:
    engine = Engine(SimulatedRanks(), {})
    with pytest.raises(AssertionError, match="keeps no averages"), engine.model.averaged():
        pass
    assert all(part.average is None for _, part in engine.model.parts())


def test_nothing_is_read_from_the_device() -> None:
    """An update on the meta device, which has no values to read."""
    part = a_part(torch.empty(64, device="meta"))
    part.average = torch.empty(64, device="meta")
    engine = Averaging(AveragingConfig(**SQRT), [part])
    for _ in range(8):
        engine.begin()
        engine.follow(part)


# -- options
# --------------------------------------------------------------------------------------------------------

EXPORT: Options = {"export_interval": 10, "experiment_dir": "/run", "export_weights": "average"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            EXPORT,
            "--export_weights=average, --ema_type=none: no average is kept; write --ema_type=ema",
        ),
        ({"export_weights": "average"}, "no average is kept"),
        (
            {**EXPORT, **EMA, "export_format": "distributed"},
            "--export_weights=average, --export_format=distributed: a resumable checkpoint always holds weights and "
            "averages; leave one of the two out",
        ),
    ],
    ids=str,
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny_config(**options)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EMA, "--ema_type=ema: the averages are only saved; evaluate them with --validation_iters"),
        (
            {"ema_type": "ema_decay_sqrt"},
            "--ema_switch_iter=100000 is not reached in 20 iterations: the average",
        ),
    ],
    ids=str,
)
def test_surprises(options: dict[str, Any], message: str) -> None:
    assert sum(message in line for line in warnings(tiny_config(**options))) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**EMA, "validation_iters": 1},
        {**EMA, "test_iters": 1},
        {**EMA, **EXPORT},
        {
            "ema_type": "ema_decay_sqrt",
            "ema_switch_iter": 19,
            "ema_decay_iters": 1,
            "validation_iters": 1,
        },
    ],
    ids=str,
)
def test_no_surprise(options: dict[str, Any]) -> None:
    assert warnings(tiny_config(**{"experiment_dir": "/run", **options})) == []


def test_a_dry_run_counts_averages_and_their_buffers() -> None:
    """One rank of two, tied head: 4 bytes per element of a shard; two shared buffers and the
    embedding's own."""
    plan = make_plan(tiny_config(2, **EMA, zero_stage=3, training_dtype="bf16"), 2, "cuda")
    rows = {line[:28].strip(): line.split()[-3:] for line in describe(plan, 2**40, ())}
    sizes = [stage.numel for stage in plan.model.stages]
    assert rows["averages"][:2] == [str(len(sizes)), f"{4 * sum(sizes) // 2:,}"]
    buffers = sizes[0] + max(sizes[1], sizes[3]) + sizes[2]
    assert rows["average buffers"][:2] == ["3", f"{2 * buffers:,}"]
