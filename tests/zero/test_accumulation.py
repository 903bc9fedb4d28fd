"""Every micro-batch's gradient counts, evaluations leave no trace, and the host waits for the right
events."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.layer import MicroBatch
from megatron_lite.zero.throttle import Throttle
from tests.support.engine_runs import Engine, Outcome, SimulatedRanks
from tests.support.harness import bytes_by_kind, parameters_of, run_distributed

Options = dict[str, Any]
LAYOUTS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"num_weight_buffers": 1, "num_grad_buffers": 1},
    {"num_weight_buffers": 2, "num_grad_buffers": 2},
    {"zero_stage": 3, "num_grad_buffers": 1},
    {"num_weight_buffers": 3, "num_grad_buffers": 3},
]
ORDERS = [(4, 1), (1, 4), (2, 2)]


def gradients(
    distributed: Distributed, layout: Options, order: tuple[int, int], dtype: str
) -> list[Tensor]:
    """Return the gradient shards of eight samples, stage by stage."""
    depth, breadth = order
    options = {
        "num_layers": 3,
        "batch_size": 8 * distributed.world_size,
        "depth_first_micro_batches": depth,
        "breadth_first_micro_batches": breadth,
        "tie_word_embeddings": False,
        "training_dtype": dtype,
        "max_position_embeddings": 16,
        **layout,
    }
    engine = Engine(distributed, options)
    generator = torch.Generator().manual_seed(distributed.rank)
    tokens = torch.randint(64, (8, 17), generator=generator).chunk(depth * breadth)
    scale = torch.tensor(1 / 128)
    batches = [MicroBatch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), scale) for t in tokens]
    for _ in range(2):  # the second time nothing of the first must be left
        engine.model.forward_backward(batches)
    shards = [part.grad_shard.double() for _, part in engine.model.parts()]
    engine.model.finish()
    return shards


def all_gradients(
    distributed: Distributed,
) -> list[tuple[Options, tuple[int, int], str, list[float]]]:
    """Return the relative errors of accumulated gradients, stage by stage. All layouts shard
    alike."""
    whole = {
        dtype: gradients(distributed, {"zero_stage": 1}, (1, 1), dtype)
        for dtype in ("fp32", "bf16")
    }
    return [
        (
            layout,
            order,
            dtype,
            [float((a - b).norm() / b.norm()) for a, b in zip(found, whole[dtype], strict=True)],
        )
        # alone, every stage has buffers
        for layout in (LAYOUTS if distributed.world_size > 1 else LAYOUTS[:3])
        for order in (ORDERS if "zero_stage" in layout else ORDERS[2:])
        for dtype in (
            ("fp32", "bf16") if order == (4, 1) and layout["zero_stage"] == 2 else ("fp32",)
        )
        for found in (gradients(distributed, layout, order, dtype),)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulated_gradients_are_those_of_the_whole_batch(ranks: int) -> None:
    """Four micro-batches, at every ZeRO stage in any order, on one rank too, where nothing is sent:
    none is lost.

    One lost micro-batch would be a relative error of about 0.5.
    """
    for results in run_distributed(ranks, all_gradients):
        for layout, order, dtype, errors in results:
            assert len(errors) == 5 and max(errors) < (1e-6 if dtype == "fp32" else 2e-2), (
                layout,
                order,
                dtype,
            )


def evaluated_runs(distributed: Distributed, options: Options) -> list[Outcome]:
    return [
        Engine(distributed, options | {"zero_stage": stage}).run(4, evaluate_every)
        for stage in (1, 2, 3)
        for evaluate_every in (2, 0)
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"tie_word_embeddings": False, "training_dtype": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param({"freeze": ("embedding",), "training_dtype": "bf16"}, marks=pytest.mark.slow),
        {"depth_first_micro_batches": 1, "breadth_first_micro_batches": 2},
    ],
    ids=str,
)
def test_evaluations_in_between_change_no_bit(options: Options) -> None:
    """ZeRO 1, 2 and 3, with an evaluation after every second step and without."""
    first, *others = run_distributed(2, evaluated_runs, {"num_layers": 3, **options})[0]
    assert len(first.evaluated) == 2 and len(set(first.evaluated)) == 2
    for other in others:
        assert (other.losses, other.grad_norms, other.weights) == (
            first.losses,
            first.grad_norms,
            first.weights,
        )
        assert other.evaluated in ([], first.evaluated)


def inference(distributed: Distributed) -> list[tuple[str, float, float, dict[str, int]]]:
    """Return for each dtype and layout the losses of a training and an inference model, and the
    latter's memory."""
    results = []
    for dtype, layout in itertools.product(("fp32", "bf16"), LAYOUTS):
        losses = []
        options = {"num_layers": 3, "training_dtype": dtype, "tie_word_embeddings": False}
        for training in (True, False):
            engine = Engine(distributed, options | layout, training=training)
            losses.append(float(engine.model.evaluate(engine.batches(1))))
        results.append((dtype, *losses, bytes_by_kind(engine.model)))
        assert not any(
            part.has_state or hasattr(part, "grad_shard") for _, part in engine.model.parts()
        )
        assert not any(parameter.requires_grad for _, parameter in parameters_of(engine.model))
        try:
            engine.model.forward_backward(engine.batches(1))
        except AssertionError as error:
            assert "inference mode" in str(error)
        else:
            raise AssertionError("trained without gradients")
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_without_gradient_buffers(ranks: int) -> None:
    """The same loss to the bit as a training model's, at every buffer count; no gradients, no
    moments."""
    for results in run_distributed(ranks, inference):
        expected = {dtype: loss for dtype, loss, *_ in results}
        for dtype, training, without, kinds in results:
            assert training == without == expected[dtype] > 0
            assert (
                kinds["gradient buffers"]
                == kinds["gradient shards"]
                == kinds["optimizer moments"]
                == 0
            )
            assert kinds["communication scratch"] == 0 and kinds["weight buffers"] > 0


class FakeEvent:
    """An event of a GPU that writes down what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._number = log, 1 + sum(line.startswith("record") for line in log)

    def record(self) -> None:
        self._log.append(f"record {self._number}")

    def wait(self) -> None:
        self._log.append(f"wait {self._number}")


def a_throttle(rate: int, delay: int) -> tuple[Any, list[str]]:
    """Return a throttle, and the log of its events."""
    log: list[str] = []
    new_event: Any = functools.partial(FakeEvent, log)
    wait_for: Any = FakeEvent.wait
    return Throttle(rate, delay, wait_for, new_event), log


@pytest.mark.parametrize(
    ("rate", "delay", "log"),
    [
        (
            1,
            0,
            "record 1, wait 1, record 2, wait 2, record 3, wait 3, record 4, wait 4, record 5, wait 5",
        ),
        (1, 1, "record 1, record 2, wait 1, record 3, wait 2, record 4, wait 3, record 5, wait 4"),
        (2, 1, "record 1, record 2, wait 1"),
        (1, 3, "record 1, record 2, record 3, record 4, wait 1, record 5, wait 2"),
        (5, 0, "record 1, wait 1"),
        (6, 1, ""),
    ],
)
def test_the_throttle_waits_for_earlier_events(rate: int, delay: int, log: str) -> None:
    """Five steps: every `rate`-th records an event, and waits for that of `delay` recordings
    before."""
    throttle, done = a_throttle(rate, delay)
    for _ in range(5):
        throttle.step()
    assert ", ".join(done) == log


def test_the_throttle_is_stepped_after_every_step_of_the_schedule() -> None:
    """Across iterations, too: the first step of one waits for the last of another."""
    engine = Engine(
        SimulatedRanks(), {"num_layers": 2, "depth_first_micro_batches": 2, "zero_stage": 3}
    )
    assert engine.model._throttle is None, "there is nothing to throttle on CPU"
    engine.model._throttle, log = a_throttle(3, 1)
    engine.run(2)
    recorded = [line for line in log if line.startswith("record")]
    assert len(recorded) == 2 * len(engine.model.training_schedule) // 3 == 2 * 2 * 2 * 4 // 3
    assert log[:5] == ["record 1", "record 2", "wait 1", "record 3", "wait 2"]
