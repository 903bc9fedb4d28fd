"""The layout changes memory, never numbers: ZeRO stages, buffers, accumulation, ranks, all against
each other."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import deterministic_ways
from tests.support.harness import (
    Trajectory,
    run_distributed,
    same_weights,
    train_several,
    train_tiny,
)
from tests.support.launch import run
from tests.support.metrics import read_metrics

BUFFERS = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    *(
        {"num_weight_buffers": w, "num_grad_buffers": g}
        for w, g in itertools.product((1, 2, 3), repeat=2)
    ),
]
SOME_BUFFERS = [*BUFFERS[:3], *BUFFERS[4:11:2]]  # by default: the stages, and unequal counts


def relative_difference(a: Trajectory, b: Trajectory) -> float:
    return float(np.max(np.abs(np.array(a.losses) / np.array(b.losses) - 1)))


@pytest.mark.parametrize(
    ("training_dtype", "tied", "breadth_first", "iterations"),
    [
        ("bf16", True, 2, 2),
        *(
            pytest.param(*case, 20, marks=pytest.mark.slow)
            for case in itertools.product(("fp32", "bf16"), (True, False), (1, 2))
        ),
    ],
)
def test_zero_stage_and_buffers_change_no_bit(
    training_dtype: str, tied: bool, breadth_first: int, iterations: int
) -> None:
    """Two ranks: every loss, gradient norm and weight is identical for every stage and buffer
    count."""
    common = {
        "training_dtype": training_dtype,
        "tie_word_embeddings": tied,
        "num_layers": 3,
        "breadth_first_micro_batches": breadth_first,
        "depth_first_micro_batches": 1,
    }
    layouts = SOME_BUFFERS if iterations == 2 else BUFFERS
    rank_0, rank_1 = run_distributed(
        2, train_several, [common | layout for layout in layouts], iterations
    )
    for a, b in zip(rank_0, rank_1, strict=True):
        assert a.losses == b.losses and same_weights(a.weights, b.weights)
    first, *others = rank_0
    assert len(set(first.losses)) == iterations, "the losses do not move: nothing is trained"
    for layout, other in zip(layouts[1:], others, strict=True):
        assert other.losses == first.losses, layout
        assert other.grad_norms == first.grad_norms, layout
        assert same_weights(other.weights, first.weights), layout


@pytest.mark.parametrize(
    ("tied", "ranks"),
    [
        (True, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, 1), (False, 1), (False, 2))
        ),
    ],
)
def test_depth_first_accumulation_agrees_to_rounding(tied: bool, ranks: int) -> None:
    """ZeRO 2 and 3 reduce every micro-batch, ZeRO 1 once; results agree to 1e-6 relative in
    fp32."""
    runs = [
        {
            "zero_stage": stage,
            "depth_first_micro_batches": 2,
            "batch_size": 8,
            "tie_word_embeddings": tied,
        }
        for stage in (1, 2, 3)
    ]
    runs += [{"depth_first_micro_batches": 1, "batch_size": 8, "tie_word_embeddings": tied}]
    *accumulated, reference = run_distributed(ranks, train_several, runs, 3)[0]
    for trajectory in accumulated:
        assert relative_difference(trajectory, reference) < 1e-6
    assert accumulated[1].losses == accumulated[2].losses
    assert same_weights(accumulated[1].weights, accumulated[2].weights)


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_and_micro_batches_do_not_matter(each: int) -> None:
    """A global batch of 12 on 1, 2 and 3 ranks, in every split, or in every third one: losses agree
    to 1e-6, initial weights bit for bit."""
    splits: dict[int, list[dict[str, Any]]] = {
        ranks: [
            {
                "batch_size": 12,
                "depth_first_micro_batches": depth,
                "breadth_first_micro_batches": breadth,
            }
            for depth, breadth in itertools.product((1, 2, 6), repeat=2)
            if (12 // ranks) % (depth * breadth) == 0
        ]
        for ranks in (1, 2, 3)
    }
    trajectories = [
        trajectory
        for ranks, runs in splits.items()
        for trajectory in run_distributed(ranks, train_several, runs[::each], 2)[0]
    ]
    assert len(trajectories) > 15 // each
    reference = trajectories[0]
    for trajectory in trajectories[1:]:
        assert relative_difference(trajectory, reference) < 1e-6
        assert same_weights(trajectory.initial, reference.initial)


def test_three_ranks_agree_across_zero_stages() -> None:
    """An odd number of ranks pads differently, but sums in rank order too."""
    runs = [{"batch_size": 6, "zero_stage": stage, "num_layers": 3} for stage in (1, 2, 3)]
    first, *others = run_distributed(3, train_several, runs, 4)[0]
    for other in others:
        assert other.losses == first.losses and same_weights(other.weights, first.weights)


def numbers_of_a_run(folder: Path, ranks: int, threads: int, *more: str) -> np.ndarray:
    """Train a model whose operations threads share; return (iterations, 2) losses and gradient
    norms."""
    flags = "--hidden_size=256 --num_layers=2 --vocab_size=64 --sequence_length=128 --batch_size=4 --train_iters=2 "
    flags += "--dataset_source=random --num_workers=0 --device=cpu --cpu_matmul=blas --log_interval=1 --lr=1e-3 "
    flags += (
        f"--hidden_dropout=0.1 --attention_dropout=0.1 --window_size=50 --experiment_dir={folder}"
    )
    outcome = run([*flags.split(), *more], ranks, variables={"OMP_NUM_THREADS": str(threads)})
    assert outcome.codes == [0] * ranks, outcome.output
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "training"]
    return np.array([[line["loss"], line["grad_norm"]] for line in lines])


def test_as_many_threads_give_the_same_bits_and_others_round_differently(tmp_path: Path) -> None:
    """With two threads, too, stages and recomputation change no bit. Other numbers of threads draw
    the same random numbers, dropout included, and differ by rounding only.
    """
    folders = (tmp_path / str(i) for i in itertools.count())
    first, one = (numbers_of_a_run(next(folders), 1, threads) for threads in (2, 1))
    assert len(first) == 2
    assert not np.array_equal(one, first), "no operation was shared by threads"
    np.testing.assert_allclose(one, first, rtol=1e-6)
    recomputed = ("--zero_stage=3", "--mlp_recompute_level=full", "--recompute_layers=1")
    stages = [
        numbers_of_a_run(next(folders), 2, 2, *more) for more in (("--zero_stage=1",), recomputed)
    ]
    assert np.array_equal(*stages)


@pytest.mark.slow
def test_recomputation_with_threads_and_four_threads(tmp_path: Path) -> None:
    """The same on one rank, and with more threads than a small machine has cores."""
    first = numbers_of_a_run(tmp_path / "first", 1, 2)
    again = numbers_of_a_run(
        tmp_path / "again", 1, 2, "--mlp_recompute_level=full", "--recompute_layers=1"
    )
    assert np.array_equal(again, first)
    four = numbers_of_a_run(tmp_path / "four", 1, 4)
    assert not np.array_equal(four, first), "no operation was shared by threads"
    np.testing.assert_allclose(four, first, rtol=1e-6)


def test_gradients_in_the_training_dtype_still_train() -> None:
    """full_precision_gradients=0: bf16 buffers and shards, half the gradient memory, close to the
    fp32 run."""
    common = {"training_dtype": "bf16", "zero_stage": 1}
    full, half = run_distributed(
        2, train_several, [common, {**common, "full_precision_gradients": False}], 8
    )[0]
    assert half.memory_bytes["gradient buffers"] * 2 == full.memory_bytes["gradient buffers"]
    assert half.losses != full.losses
    assert relative_difference(half, full) < 1e-2


def test_loss_scaling_of_fp16_tracks_fp32() -> None:
    """fp16 with its dynamic loss scale follows the fp32 run; the scale does not leak into loss or
    gradient norm."""
    half, full = run_distributed(2, train_several, [{"training_dtype": "fp16"}, {}], 8)[0]
    assert relative_difference(half, full) < 2e-2
    np.testing.assert_allclose(half.grad_norms, full.grad_norms, rtol=0.05)


def determinism(distributed: Distributed) -> tuple[bool, Trajectory]:
    trajectory = train_tiny(distributed, {"hidden_dropout": 0.1}, 3)
    return torch.are_deterministic_algorithms_enabled(), trajectory


def test_deterministic_runs_with_torchs_own_check_switched_on() -> None:
    """Every operation of a step has a deterministic form (torch raises otherwise); on CPU it
    changes no bit."""
    enabled, strict = run_distributed(2, determinism, deterministic=True)[0]
    plain = run_distributed(2, train_tiny, {"hidden_dropout": 0.1}, 3)[0]
    assert enabled and strict.losses == plain.losses and same_weights(strict.weights, plain.weights)


def test_the_cost_of_determinism_is_described() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert "sorted tokens" in deterministic_ways(cuda, triton=False)
    assert "sorted tokens" not in deterministic_ways(cuda, triton=True)
    assert deterministic_ways(cpu, triton=False).endswith("--deterministic=1 costs nothing")
