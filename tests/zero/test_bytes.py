"""Bytes: what the engine allocates with every option that changes it, counted over everything that
exists."""

import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.config.optimizer import OPTIMIZERS
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.weight_shard import WeightShard
from megatron_lite.optimizer.optimizer import rule_of
from megatron_lite.zero.layout import round_up
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import bytes_by_kind, layers_of, run_distributed, tiny_config

Options = dict[str, Any]


def allocated(ranks: Any, options: Options, training: bool = True) -> tuple[MultiStage, int]:
    """A model, and the bytes that exist because of it: of any tensor, wherever it is kept, each
    storage once."""
    config = tiny_config(ranks.world_size, **options)
    layers = layers_of(config)
    gc.freeze()  # what exists already is not looked at
    model = MultiStage(
        layers,
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        ranks,
        training,
        state=rule_of(config.optimizer).declared,
        averaged=config.averaging.enabled,
    )
    storages = [
        thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)
    ]
    gc.unfreeze()
    return model, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def sizes(model: MultiStage) -> tuple[list[int], list[int], list[int]]:
    """Return the elements of each stage, padding included: all, trainable, frozen."""
    trained = [
        sum(part.layout.numel for part in stage.parts if not part.frozen) for stage in model.stages
    ]
    frozen = [
        sum(part.layout.numel for part in stage.parts if part.frozen) for stage in model.stages
    ]
    return [a + b for a, b in zip(trained, frozen, strict=True)], trained, frozen


def in_turn(stages: list[int], buffers: int) -> int:
    """Elements of buffers that stages use in turn, those that need none left out."""
    needy = [size for size in stages if size]
    return sum(max(needy[start::buffers]) for start in range(min(buffers, len(needy))))


def padding(model: MultiStage, ranks: int) -> int:
    """Elements that belong to no parameter, by the rule: parameters at multiples of 64, a range
    divisible by 64 N."""
    total = 0
    for stage in model.stages:
        for frozen in (False, True):
            numels = [p.spec.numel for _, p in stage.parameters() if p.spec.trainable != frozen]
            total += round_up(sum(round_up(numel, 64) for numel in numels), 64 * ranks) - sum(
                numels
            )
    return total


FREEZE = ("embedding", "blocks.0", "blocks.1.mlp")
CASES: list[Options] = [
    {
        "training_dtype": dtype,
        "num_layers": 4,
        "batch_size": 6,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
        **buffers,
        **more,
    }
    for dtype in ("fp32", "bf16")
    for buffers in (
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"num_weight_buffers": 1, "num_grad_buffers": 1},
        {"num_weight_buffers": 3, "num_grad_buffers": 5},
        {"zero_stage": 1, "num_grad_buffers": 1},
    )
    for more in (
        {},
        {"full_precision_gradients": False},
        {"freeze": FREEZE},
        {"freeze": FREEZE, "store_frozen_weights_in_optimization_precision": False},
        {"split_master_weights": True},
        {"split_master_weights": True, "freeze": FREEZE},
        {"ema_type": "ema", "freeze": FREEZE},
        {"ema_type": "ema", "split_master_weights": True},
    )
    if not (
        dtype == "fp32" and ("full_precision_gradients" in more or "split_master_weights" in more)
    )
    and not ("split_master_weights" in more and buffers.get("zero_stage") not in (1, 2))
] + [
    {
        "training_dtype": "bf16",
        "num_layers": layers,
        "batch_size": 6,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
        "zero_stage": zero_stage,
        "optimizer": optimizer,
        **more,
    }
    for layers in (1, 4)
    for zero_stage in (1, 3)
    for optimizer in OPTIMIZERS
    if optimizer != "adamw"
    for more in ({}, {"freeze": ("*.mlp.*", "*.bias")}, {"layers_per_stage": 3.0})
]


def expected_bytes(model: MultiStage, options: Options, ranks: int, training: bool = True) -> int:
    """The sum of DESIGN's table, kind by kind."""
    every, trained, frozen = sizes(model)
    stages = len(every)
    weight = 2 if options["training_dtype"] == "bf16" else 4
    gradient = 4 if options.get("full_precision_gradients", True) else weight
    frozen_weight = (
        4 if options.get("store_frozen_weights_in_optimization_precision", True) else weight
    )
    zero_stage = options.get("zero_stage", 1)
    weight_buffers = options.get("num_weight_buffers", 2 if zero_stage == 3 else stages)
    grad_buffers = options.get("num_grad_buffers", 2 if zero_stage >= 2 else stages)
    if ranks == 1:  # the shard is the whole
        grad_buffers = stages
        weight_buffers = stages if weight == 4 else weight_buffers
    # A stage whose weight buffer is its own has no second copy of a shard with the dtype of the
    # buffer.
    own = [
        sum(other % weight_buffers == i % weight_buffers for other in range(stages)) == 1
        for i in range(stages)
    ]
    total = weight * in_turn(every, weight_buffers)
    for i in range(stages):
        master = 2 if options.get("split_master_weights") and training else 4
        total += 0 if own[i] and master == weight == 4 else master * trained[i] // ranks
        total += 0 if own[i] and frozen_weight == weight else frozen_weight * frozen[i] // ranks
    if options.get("ema_type"):
        total += 4 * sum(trained) // ranks + weight * in_turn(every, 1 if ranks == 1 else 2)
    if training:
        total += gradient * in_turn(trained, grad_buffers) + moment_bytes(model, options, ranks)
        needy = [size for size in trained if size]
        shared = [
            size
            for i, size in enumerate(needy)
            if sum(other % grad_buffers == i % grad_buffers for other in range(len(needy))) > 1
        ]
        total += gradient * sum(shared) // ranks
    return total


def moment_bytes(model: MultiStage, options: Options, ranks: int) -> int:
    """AdamW 8 bytes an element, Lion and SGD 4, Muon 4 but 8 of what lies before the blocks'
    matrices in a shard; and, with other ranks, 2 of a second stage's gathered updates beside those
    of one.
    """
    _, trained, _ = sizes(model)
    optimizer = options.get("optimizer", "adamw")
    if optimizer != "muon":
        return (8 if optimizer == "adamw" else 4) * sum(trained) // ranks
    total, with_matrices = 4 * sum(trained) // ranks, []
    for stage, size in zip(model.stages, trained, strict=True):
        own = [parameter.spec for _, parameter in stage.parameters() if parameter.spec.trainable]
        is_matrix = [len(spec.shape) == 2 and spec.name.startswith("blocks.") for spec in own]
        before = sum(
            round_up(spec.numel, 64)
            for spec, matrix in zip(own, is_matrix, strict=True)
            if not matrix
        )
        total += 4 * (min(before, size // ranks) if any(is_matrix) else size // ranks)
        with_matrices += [size] if any(is_matrix) else []
    return total + 2 * in_turn(with_matrices, 1 if ranks == 1 else 2)


def measure(
    ranks: Any, cases: list[Options], training: bool
) -> list[tuple[int, int, int, int, int]]:
    """Return for each case: bytes found, booked and expected, and padding found and expected."""
    results = []
    for options in cases:
        model, found = allocated(ranks, options, training)
        kinds = bytes_by_kind(model)
        largest = max(sizes(model)[1]) // ranks.world_size if training else 0
        gradient = (
            2
            if options["training_dtype"] == "bf16"
            and not options.get("full_precision_gradients", True)
            else 4
        )
        assert kinds["communication scratch"] == (ranks.world_size - 1) * largest * gradient, (
            "one chunk, one slot"
        )
        booked = sum(size for kind, size in kinds.items() if kind != "communication scratch")
        padded = sum(sizes(model)[0]) - model.num_parameters
        expected = expected_bytes(model, options, ranks.world_size, training)
        results.append((found, booked, expected, padded, padding(model, ranks.world_size)))
    return results


@pytest.mark.parametrize(
    ("ranks", "training"),
    [
        *((2, True), (1, False)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, True), (2, False), (3, True), (3, False))
        ),
    ],
)
def test_every_option_costs_what_the_formula_says(ranks: int, training: bool) -> None:
    """Found over all tensors that exist, booked for the log and computed by hand: the same to the
    byte."""
    results = run_distributed(ranks, measure, CASES, training)
    for options, *of_ranks in zip(CASES, *results, strict=True):
        for found, booked, expected, padded, expected_padding in of_ranks:
            assert found == expected, options
            assert booked == expected, options
            assert padded == expected_padding, options


def savings(ranks: Any, base: Options, option: Options) -> int:
    return allocated(ranks, base)[1] - allocated(ranks, base | option)[1]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bytes_that_averages_cost(zero_stage: int) -> None:
    """Two ranks: 4 bytes for each trainable element of a shard, and two buffers of the training
    dtype that the stages take in turn; one more for an embedding that is tied to the head."""
    ranks = SimulatedRanks()
    for tied in (False, True):
        base = {
            "training_dtype": "bf16",
            "num_layers": 4,
            "zero_stage": zero_stage,
            "tie_word_embeddings": tied,
        }
        every, trained, _ = sizes(allocated(ranks, base | {"freeze": ("head",)})[0])
        buffers = every[0] + in_turn(every[1:], 2) if tied else in_turn(every, 2)
        cost = -savings(ranks, base | {"freeze": ("head",)}, {"ema_type": "ema"})
        assert cost == 4 * sum(trained) // 2 + 2 * buffers


# -- split master weights
# --------------------------------------------------------------------------------------------


def bit_patterns() -> Tensor:
    """fp32 with every upper half, and lower halves around zero, ties and carries: (65,536 x 8,),
    int32."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFF], dtype=torch.int32)
    return (high[:, None] | low).flatten()


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values -> (bf16 weights, rebuilt fp32)."""
    weights = torch.zeros(values.shape, dtype=torch.bfloat16)
    shard = WeightShard.split_into(weights)
    shard.write(values)
    return weights, shard.read()


def test_a_split_master_is_rebuilt_bit_for_bit() -> None:
    """Every sign, exponent and bf16 mantissa: zeros, denormals, ties, the largest, infinities. NaN
    stays NaN."""
    values = bit_patterns().view(torch.float32)
    weights, rebuilt = split(values)
    nan = values.isnan()
    assert nan.sum() > 1000 and (~nan).sum() > 500_000
    assert torch.equal(rebuilt[~nan].view(torch.int32), values[~nan].view(torch.int32))
    assert weights[nan].isnan().all() and rebuilt[nan].isnan().all()


def test_a_split_weight_is_the_master_rounded_half_up_in_magnitude() -> None:
    """As torch rounds, but at exact ties, where torch takes the even neighbour."""
    bits = bit_patterns()
    values = bits.view(torch.float32)
    finite = values.isfinite()
    weights, _ = split(values)
    nearest = values.bfloat16()
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(
        weights[finite & ~tie].view(torch.int16), nearest[finite & ~tie].view(torch.int16)
    )
    truncated = (bits >> 16).short()
    away = (truncated + 1)[finite & tie]  # sign and magnitude: one more is further from zero
    assert torch.equal(weights.view(torch.int16)[finite & tie], away)
    assert (weights != nearest)[finite & tie].sum() > 30_000
    infinite = values.isinf()
    assert torch.equal(weights[infinite].float(), values[infinite])


def test_a_run_that_only_evaluates_rounds_as_the_split_shard_did() -> None:
    """Written while a checkpoint is loaded, or when the weights are gathered."""
    values = bit_patterns().view(torch.float32)
    weights, _ = split(values)
    loaded, gathered = torch.zeros(2, *values.shape, dtype=torch.bfloat16)
    WeightShard(values, loaded, rounds_half_up=True).write(values)
    WeightShard(values, rounds_half_up=True).round_into(gathered)
    for rounded in (loaded, gathered):
        assert torch.equal(rounded.view(torch.int16), weights.view(torch.int16))


def test_parts_of_a_split_shard_are_read_and_written() -> None:
    generator = torch.Generator().manual_seed(1)
    values, others = torch.randn(2, 1000, generator=generator)
    shard = WeightShard.split_into(torch.zeros(1000, dtype=torch.bfloat16))
    shard.write(values)
    before = others.clone()
    shard.write(others[100:300], slice(100, 300))
    assert torch.equal(others, before)
    assert torch.equal(shard.read(), torch.cat([values[:100], others[100:300], values[300:]]))
    assert torch.equal(shard.read(slice(250, 350)), torch.cat([others[250:300], values[300:350]]))
    assert shard.nbytes == 2000 and shard.read().dtype == torch.float32


def round_half_up(shard: WeightShard, weights: Tensor) -> None:
    bits = shard.read().view(torch.int32)
    weights.copy_(((bits + 0x8000) >> 16).short().view(torch.bfloat16))


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_split_run_is_the_unsplit_one_but_for_ties(zero_stage: int) -> None:
    """Where the unsplit run rounds ties away from zero, too, losses, weights, masters and moments
    are the same bits."""
    options = {
        "training_dtype": "bf16",
        "zero_stage": zero_stage,
        "num_layers": 3,
        "sequence_length": 8,
    }
    ours = Engine(SimulatedRanks(), options | {"split_master_weights": True}).run(
        8, evaluate_every=4
    )
    with mock.patch.object(WeightShard, "round_into", round_half_up):
        unsplit = Engine(SimulatedRanks(), options).run(8, evaluate_every=4)
    assert ours == unsplit
    plain = Engine(SimulatedRanks(), options).run(8, evaluate_every=4)
    assert (
        max(abs(a / b - 1) for a, b in itertools.chain(zip(ours.losses, plain.losses, strict=True)))
        < 1e-2
    )


def split_run(distributed: Distributed, options: Options) -> Any:
    return Engine(distributed, options).run(5)


def test_split_runs_agree_over_zero_stages_and_ranks() -> None:
    common = {
        "training_dtype": "bf16",
        "split_master_weights": True,
        "num_layers": 2,
        "sequence_length": 8,
    }
    one, two = (run_distributed(2, split_run, common | {"zero_stage": stage}) for stage in (1, 2))
    assert one == two and one[0].weights == one[1].weights
