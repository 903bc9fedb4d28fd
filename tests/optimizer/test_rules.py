"""Runs with Lion and SGD against plain torch; with Muon too over layouts, late collectives and
dropped bad steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from tests.support.engine_runs import DelayedGroup, Engine, LateGroup, Outcome
from tests.support.harness import LLAMA, run_distributed, tiny_config, train_tiny
from tests.support.launch import TINY, run
from tests.support.metrics import read_metrics
from tests.support.plain_gpt import PlainGPT
from tests.support.token_files import write_documents

Options = dict[str, Any]
ITERATIONS = 10


# -- against plain torch
# ----------------------------------------------------------------------------------------------


def sgd(config: Config, parameters: list[torch.nn.Parameter]) -> Callable[[float], None]:
    optimizer = torch.optim.SGD(parameters, momentum=config.optimizer.sgd_momentum)

    def step(rate: float) -> None:
        for parameter in parameters:
            parameter.data.mul_(1 - rate * decay_of(config, parameter))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    return step


def lion(config: Config, parameters: list[torch.nn.Parameter]) -> Callable[[float], None]:
    """Algorithm 2 of the paper."""
    moments = [(parameter, torch.zeros_like(parameter)) for parameter in parameters]
    beta1, beta2 = config.optimizer.adam_beta1, config.optimizer.adam_beta2

    def step(rate: float) -> None:
        for parameter, moment in moments:
            update = (beta1 * moment + (1 - beta1) * parameter.grad).sign()
            parameter.data -= rate * (update + decay_of(config, parameter) * parameter.data)
            moment.copy_(beta2 * moment + (1 - beta2) * parameter.grad)

    return step


def decay_of(config: Config, parameter: torch.nn.Parameter) -> float:
    return config.optimizer.weight_decay if parameter.dim() > 1 else 0.0


def plain_loop(
    options: Options, initial: dict[str, np.ndarray]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights."""
    config = tiny_config(**options)
    model = PlainGPT(config.model)
    model.load(initial)
    step = {"lion": lion, "sgd": sgd}[config.optimizer.optimizer](config, list(model.parameters()))
    losses = []
    batches = open_data(config, 0, 1).batches("training", 0, ITERATIONS)
    for iteration, ((tokens, *_),) in enumerate(batches, start=1):
        model.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        step(config.learning_rate.lr * min(1.0, iteration / 4))
        losses.append(loss.item())
    return losses, {name: weight.numpy() for name, weight in model.state_dict().items()}


# Options, and tolerances of losses, relative, and of weights, of their largest movement. Lion looks
# at signs alone: where gradients differ in their last bits, some elements go the other way.
TRAINED: dict[str, tuple[Options, float, float]] = {
    "lion": ({"clip_grad": 0.3, "lr": 3e-4, "adam_beta2": 0.99}, 1e-5, 2e-3),
    "sgd": (LLAMA | {"lr": 0.5, "sgd_momentum": 0.8}, 1e-6, 2e-5),
}
LAYOUT_NAMES = {(1, 1): "alone", (2, 3): "two ranks, ZeRO 3", (3, 1): "three ranks, ZeRO 1"}
SHORT = {("lion", (2, 3)), ("sgd", (1, 1))}
RUNS = [
    pytest.param(
        case,
        layout,
        id=f"{case}, {name}",
        marks=[] if (case, layout) in SHORT else [pytest.mark.slow],
    )
    for case in TRAINED
    for layout, name in LAYOUT_NAMES.items()
]


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_training_equals_plain_torch(case: str, layout: tuple[int, int]) -> None:
    """Several clipped steps on the same data: the same losses, which fall, and the same weights."""
    (ranks, zero_stage), (given, loss_tolerance, weight_tolerance) = layout, TRAINED[case]
    options = {
        "batch_size": 6,
        "lr_warmup": 4,
        "optimizer": case,
        **given,
        "zero_stage": zero_stage,
    }
    ours = run_distributed(ranks, train_tiny, options, ITERATIONS)[0]
    losses, weights = plain_loop(options, ours.initial)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(ours.losses, losses, rtol=loss_tolerance)
    for name, weight in weights.items():
        # of keys: their exact gradient is zero, but not its sign
        if name.endswith("query_key_value.bias"):
            continue
        moved = weight - ours.initial[name]
        assert np.linalg.norm(ours.weights[name] - weight) <= weight_tolerance * np.linalg.norm(
            moved
        ), name


# -- layouts
# ----------------------------------------------------------------------------------------------------------

SMALL: Options = {"sequence_length": 8, "num_layers": 3, "batch_size": 6}
LAYOUTS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"num_weight_buffers": 1, "num_grad_buffers": 1},
    {"num_weight_buffers": 3, "num_grad_buffers": 1},
]
OPTIMIZERS: list[Options] = [
    {"optimizer": "muon", "layers_per_stage": 2.0, "training_dtype": "bf16"},
    {"optimizer": "lion", "training_dtype": "bf16"},
    {"optimizer": "muon"},
    {"optimizer": "sgd"},
]


def outcomes(distributed: Distributed, options: Options) -> list[Outcome]:
    """Train in all layouts, and in two of them again with collectives that are late or slow beside
    the computation."""
    found = [Engine(distributed, SMALL | options | layout).run(3, 2) for layout in LAYOUTS]
    for layout in (LAYOUTS[0], LAYOUTS[2]):
        found.append(
            Engine(distributed, SMALL | options | layout, LateGroup(distributed)).run(3, 2)
        )
    if options["optimizer"] == "muon":
        group = DelayedGroup(distributed)
        found.append(Engine(distributed, SMALL | options | LAYOUTS[2], group).run(3, 2))
        group.drain()
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(case, marks=[pytest.mark.slow] if i else [])
        for i, case in enumerate(OPTIMIZERS)
    ],
    ids=str,
)
def test_layouts_and_late_collectives_change_no_bit(options: Options) -> None:
    """Two ranks: losses, norms, weights and moments."""
    for of_rank in run_distributed(2, outcomes, options):
        assert all(other == of_rank[0] for other in of_rank[1:])


# -- bad steps
# --------------------------------------------------------------------------------------------------------


def poisoned(distributed: Distributed, cases: list[Options]) -> list[tuple[bool, bool, bool]]:
    """(dropped, unchanged, moved by the step after it), where one rank has one bad gradient among
    its matrices."""
    results = []
    for options in cases:
        engine = Engine(distributed, SMALL | options)

        def state(engine: Engine = engine) -> list[bytes]:
            parts = [part for _, part in engine.model.parts()]
            tensors = [part.read(kind) for part in parts for kind in part.kinds()]
            tensors += [part.weights.rounded for part in parts if part.weights.rounded is not None]
            return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]

        engine.step(1)
        engine.step(2)
        before, loss = state(), engine.gradients(3)
        if distributed.rank == distributed.world_size - 1:
            engine.model.stages[2].trainable[0].grad_shard[-7] = options.get("poison", torch.nan)
        update = engine.optimizer.step(3, 1e-2, loss, engine.tokens, engine.model.updated)
        unchanged = state() == before
        engine.step(4)
        results.append((bool(update.verdict.skipped), unchanged, state() != before))
        engine.model.finish()
    return results


FORMS: list[Options] = [
    {},
    {"training_dtype": "bf16"},
    {"training_dtype": "bf16", "split_master_weights": True},
    {"training_dtype": "fp16", "zero_stage": 3},
]


@pytest.mark.parametrize(
    ("optimizer", "forms"),
    [
        *(("lion", FORMS), ("sgd", FORMS[2:])),
        *(
            pytest.param(name, forms, marks=pytest.mark.slow)
            for name, forms in (("muon", FORMS), ("sgd", FORMS[:2]))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} forms",
)
def test_a_bad_step_leaves_every_bit_as_it_was(optimizer: str, forms: list[Options]) -> None:
    """Weights in all their forms, and moments, on both ranks; the next step goes on."""
    cases = [{"optimizer": optimizer, **form} for form in forms]
    for results in run_distributed(2, poisoned, cases):
        for options, result in zip(cases, results, strict=True):
            assert result == (True, True, True), options


# -- from the command line
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lion", "sgd"))]
)
def test_a_run_from_the_command_line_learns(optimizer: str, tmp_path: Path) -> None:
    """A corpus of counting numbers: the loss falls below half of it; memory and Muon's traffic are
    in the log."""
    rate = {"muon": 0.01, "lion": 0.002, "sgd": 0.5}[optimizer]
    write_documents(tmp_path / "corpus", (np.arange(first, first + 64) % 64 for first in range(64)))
    flags = [
        f"--optimizer={optimizer}",
        f"--lr={rate}",
        "--dataset_source=list",
        f"--data_path={tmp_path / 'corpus'}",
        "--split=1",
        "--train_iters=60",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    ranks = 2 if optimizer == "muon" else 1
    outcome = run([*TINY, *flags, "--log_communication=1"], ranks)
    assert outcome.codes == [0] * ranks, outcome.output
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] > 4.0 and losses[-1] < 0.5 * losses[0], losses
    log = (tmp_path / "run" / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")
    assert ("update buffers" in log) == (optimizer == "muon") and "optimizer moments" in log
    described = "muon: 12 matrices (24,576 of 28,032 trained weights) are orthogonalized, AdamW updates everything else"
    assert (described in log) == (optimizer == "muon")
    for kind in ("gathers", "reductions"):
        assert (f"muon {kind} per iteration: 2 | 25,856 elements" in log) == (optimizer == "muon")
