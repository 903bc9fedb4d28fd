"""Muon on sharded matrices against torch.optim.Muon and torch.optim.AdamW on whole parameters, in
one process."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import _muon

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.optimizer.rules.muon import (
    COEFFICIENTS,
    SMALLEST_NORM,
    Matrix,
    assign,
    describe,
    matrices_of,
    orthogonalize,
    orthogonalize_flops,
    rounds_of,
    shape_factor,
)
from megatron_lite.parameter import ParameterSpec
from megatron_lite.zero.stage import Stage
from tests.support.engine_runs import Engine
from tests.support.harness import LLAMA, parameters_of, run_distributed, tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import PeakMeter
from tests.support.plans import one_plan
from tests.support.whole_parameters import Weights, fill_gradients, gradient, masters, together

Options = dict[str, Any]

STEPS, RATE = 4, 0.02
SMALL = {"sequence_length": 8, "optimizer": "muon", "clip_grad": 0.0, "batch_size": 6}
ADAMC: Options = {"adamc_weight_decay": True, "lr": RATE, "weight_decay": 1.0}
CASES: list[Options] = [
    {},
    LLAMA | {"num_layers": 3, "layers_per_stage": 2.0, "weight_decay": 0.5},
    # Queries 4 x 36, keys and values 1 x 36, up 1 x 36, down 36 x 1.
    {"hidden_size": 36, "head_groups": 1, "kv_channels": 1, "ffn_hidden_size": 1, "vocab_size": 61},
    LLAMA | {"freeze": ("blocks.0", "*.mlp.down.*", "head"), "num_layers": 3},
    {
        "lr_scales": ("*.query_key_value.*:0.5", "embedding:0.1", "*.down.*:2", "*.bias:3"),
        "freeze": ("*.mlp.up.*",),
    },
    {"muon_adjust_lr": "original", "muon_nesterov": False, "muon_momentum": 0.8, "muon_ns_steps": 3}
    | ADAMC,
    {
        "num_layers": 1,
        "muon_momentum": 0.0,
        "add_linear_biases": False,
        "freeze": ("embedding", "*norm*"),
    },
    {"full_precision_gradients": False, "training_dtype": "bf16"},
    LLAMA | {"lora_rank": 3},  # A and B of each map
]


def update(
    distributed: Distributed, cases: list[Options]
) -> list[tuple[Weights, Weights, list[ParameterSpec]]]:
    """For each case: this rank's masters before and after some steps, and what the parameters
    are."""
    results = []
    for options in cases:
        engine = Engine(distributed, SMALL | options)
        engine.model.gather_ahead()
        before = masters(engine)
        for step in range(1, STEPS + 1):
            fill_gradients(engine, step)
            rate = RATE / step
            with products_in_fp32(False):  # as torch's Muon computes them
                engine.optimizer.step(
                    step, rate, torch.tensor(1.0), engine.tokens, engine.model.updated
                )
            engine.model.gather_ahead()
        engine.model.finish()
        specs = [parameter.spec for _, parameter in parameters_of(engine.model)]
        results.append((before, masters(engine), specs))
    return results


def oracle(options: Options, before: Weights, specs: list[ParameterSpec]) -> Weights:
    """The same steps by torch's optimizers on plain parameters."""
    config = tiny_config(1, **SMALL, **options).optimizer
    weights = {
        spec.name: torch.from_numpy(before[spec.name].copy()).view(spec.shape) for spec in specs
    }
    pieces: list[tuple[bool, torch.nn.Parameter, ParameterSpec, slice]] = []
    for spec in (spec for spec in specs if spec.trainable):
        is_matrix = spec.name.startswith("blocks.") and len(spec.shape) == 2
        rows = split_rows(spec, options)
        for end, count in zip(itertools.accumulate(rows), rows, strict=True):
            part = slice(end - count, end)  # views: what moves them moves the whole
            pieces.append((is_matrix, torch.nn.Parameter(weights[spec.name][part]), spec, part))
    optimizers: list[torch.optim.Optimizer] = []
    for is_matrix, piece, spec, _ in pieces:
        decay = config.weight_decay if len(spec.shape) > 1 else 0.0
        if is_matrix:
            optimizers.append(
                torch.optim.Muon(
                    [piece],
                    weight_decay=decay,
                    momentum=config.muon_momentum,
                    nesterov=config.muon_nesterov,
                    adjust_lr_fn=config.muon_adjust_lr,
                    ns_steps=config.muon_ns_steps,
                )
            )
        else:
            betas = (config.adam_beta1, config.adam_beta2)
            optimizers.append(
                torch.optim.AdamW([piece], weight_decay=decay, betas=betas, eps=config.adam_eps)
            )
    for step in range(1, STEPS + 1):
        for optimizer, (_, piece, spec, part) in zip(optimizers, pieces, strict=True):
            whole = gradient(spec, step)
            if options.get("training_dtype") == "bf16":
                whole = whole.bfloat16().float()
            piece.grad = whole.view(spec.shape)[part]
            (group,) = optimizer.param_groups
            group["lr"] = RATE / step * spec.lr_scale
            if config.adamc_weight_decay:  # in proportion to the rate
                group["weight_decay"] = (config.weight_decay if len(spec.shape) > 1 else 0.0) / step
            optimizer.step()
    return {name: weight.flatten().numpy() for name, weight in weights.items()}


def split_rows(spec: ParameterSpec, options: Options) -> list[int]:
    """How many rows each linear map has, from the model's options alone."""
    model = tiny_config(1, **SMALL, **options).model
    weight = spec.name.partition(".lora_")[0]
    if spec.name != weight:
        base = ParameterSpec(f"{weight}.weight", spec.shape, spec.initializer)
        rows = split_rows(base, options)
        return [options["lora_rank"]] * len(rows) if spec.name.endswith("lora_a") else rows
    if spec.name.endswith("query_key_value.weight"):
        return [
            model.num_attention_heads * model.kv_channels,
            *[model.head_groups * model.kv_channels] * 2,
        ]
    if spec.name.endswith("mlp.up.weight") and model.gated:
        return [model.ffn_hidden_size] * 2
    return [spec.shape[0]]


LAYOUTS = {
    "some layouts": ((1, 1), (3, 3)),
    "all layouts": tuple(itertools.product((1, 2, 3), (1, 3))),
}


@pytest.fixture(
    scope="module",
    params=[
        name if "some" in name else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS
    ],
)
def updates(
    request: pytest.FixtureRequest,
) -> dict[tuple[int, int], list[tuple[Weights, Weights, list[ParameterSpec]]]]:
    """(ranks, ZeRO stage) -> of each case: whole masters before and after, specs."""
    results = {}
    for ranks, zero_stage in LAYOUTS[request.param]:
        of_ranks = run_distributed(
            ranks, update, [options | {"zero_stage": zero_stage} for options in CASES]
        )
        results[ranks, zero_stage] = [
            (together([rank[0] for rank in case]), together([rank[1] for rank in case]), case[0][2])
            for case in zip(*of_ranks, strict=True)
        ]
    return results


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case])[:60])
def test_updates_are_torchs_on_any_number_of_ranks(updates: Any, case: int) -> None:
    """Fused, tall, wide, single-row, frozen weights, learning-rate scales, ties: to rounding;
    layouts: to the bit."""
    before, reference, specs = updates[1, 1][case]
    expected = oracle(CASES[case], before, specs)
    for name, weights in expected.items():
        moved = np.abs(weights - before[name]).max()
        assert (moved > 0) == next(spec.trainable for spec in specs if spec.name == name), name
        np.testing.assert_allclose(
            reference[name], weights, rtol=0, atol=1e-6 + 1e-5 * moved, err_msg=name
        )
    for layout, results in updates.items():
        for name, weights in results[case][1].items():
            np.testing.assert_array_equal(weights, reference[name], err_msg=f"{layout} {name}")


# -- who does what
# ----------------------------------------------------------------------------------------------------


def planned_stages(world_size: int, options: Options) -> list[Stage]:
    """Without memory."""
    config = tiny_config(world_size, **SMALL | {"batch_size": None} | options)
    return one_plan(config, world_size, "cuda").model.stages


def test_the_matrices_of_a_stage_are_where_the_parameters_are() -> None:
    """Every element of every weight is in one matrix, in order; none of anything else."""
    stage = planned_stages(3, LLAMA)[1]
    matrices = matrices_of(stage.trainable[0])
    assert [(m.rows, m.columns) for m in matrices] == [
        (32, 32),
        (16, 32),
        (16, 32),
        (32, 32),
        (88, 32),
        (88, 32),
        (32, 88),
    ]
    covered = [range(tile.offset, tile.end) for matrix in matrices for _, tile in matrix.tiles]
    assert stage.trainable
    slots = [slot for slot in stage.trainable[0].layout.slots if "norm" not in slot.spec.name]
    assert [i for some in covered for i in some] == [
        i for slot in slots for i in range(slot.offset, slot.end)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_work_is_shared_evenly(world_size: int) -> None:
    """Two blocks of Mistral's: the busiest rank is within a third of the best possible (Graham
    1969)."""
    shapes = 2 * [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        *[(14336, 4096)] * 2,
        (4096, 14336),
    ]
    matrices = [Matrix(rows, columns, 1.0, True) for rows, columns in shapes]
    work = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    ranks = assign(matrices, world_size)
    load = [
        sum(size for rank, size in zip(ranks, work, strict=True) if rank == r)
        for r in range(world_size)
    ]
    assert max(load) <= 4 / 3 * max(sum(work) / world_size, max(work))
    assert sum(load) == sum(work) and assign(matrices, world_size) == ranks, "all ranks agree"


def test_rounds_have_a_stage_for_each_buffer() -> None:
    options = {"num_layers": 5, "freeze": ("blocks.1",)}
    for world_size, rounds in ((1, [[1], [3], [4], [5]]), (2, [[1, 3], [4, 5]])):
        found = rounds_of(planned_stages(world_size, options))
        assert [[stage.index for stage in stages] for stages in found] == rounds
        assert all(
            len({id(stage.update_buffer) for stage in stages}) == len(stages) for stages in found
        )
    assert rounds_of(planned_stages(2, {"freeze": ("blocks",)})) == []


def test_factors_are_those_of_torch() -> None:
    for rows, columns in ((8, 32), (32, 8), (5, 5)):
        for style in ("original", "match_rms_adamw"):
            shape = torch.Size((rows, columns))
            assert shape_factor(rows, columns, style) == torch.optim._muon._adjust_lr(
                1.0, style, shape
            )


def test_the_log_says_what_is_orthogonalized_and_by_how_many() -> None:
    text = "muon: 21 matrices (34,560 of 38,880 trained weights) are orthogonalized, AdamW updates everything else"
    idle = "; 14 of 15 ranks at a time: more --layers_per_stage give work to more of them"
    for world_size, more in ((1, ""), (14, ""), (15, idle)):
        assert describe(planned_stages(world_size, LLAMA | {"num_layers": 3})) == text + more
    nothing = describe(planned_stages(2, {"freeze": ("blocks",)}))
    assert nothing.startswith("muon: 0 matrices (0 of ")


# -- orthogonalization
# ----------------------------------------------------------------------------------------------

SHAPES = [(48, 48), (32, 128), (128, 32), (96, 36), (1, 7), (7, 1), (1, 1), (5, 3)]


def draw(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_torch(shape: tuple[int, int], steps: int) -> None:
    for scale in (1e-6, 1.0, 1e6):
        matrix = draw(shape) * scale
        before = matrix.bfloat16()
        with products_in_fp32(False):
            ours = orthogonalize(before, steps)
        theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, steps, SMALLEST_NORM)
        assert torch.equal(ours, theirs) and ours.shape == shape
        assert torch.equal(before, matrix.bfloat16()), "the input changed"


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_end_near_one_and_directions_stay(
    shape: tuple[int, int], in_fp32: bool
) -> None:
    """Start from singular values between 0.1 and 1 of the largest; rounding to bf16 costs a few
    percent."""
    u, _, v = torch.linalg.svd(draw(shape).double(), full_matrices=False)
    values = torch.linspace(1.0, 0.1, min(shape), dtype=torch.float64)
    with products_in_fp32(in_fp32):
        result = orthogonalize((100 * u @ torch.diag(values) @ v).bfloat16(), 5).double()
    coordinates = u.t() @ result @ v.t()
    found = coordinates.diagonal()
    assert ((found > 0.6) & (found < 1.3)).all(), found
    assert (coordinates - torch.diag(found)).abs().max() < 0.05


def test_zeros_stay_zeros_and_nothing_finite_overflows() -> None:
    assert not orthogonalize(torch.zeros(8, 12, dtype=torch.bfloat16), 5).any()
    assert orthogonalize(torch.full((8, 12), 1e30, dtype=torch.bfloat16), 5).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_temporaries_are_as_large_as_documented(shape: tuple[int, int]) -> None:
    """At most 4 (m n + m^2) bytes with m <= n, as docs/multi_stage.md says."""
    small, large = sorted(shape)
    matrix = draw(shape).bfloat16()
    with products_in_fp32(False), PeakMeter() as meter:
        orthogonalize(matrix, 5)
    assert meter.peak == 4 * (small * large + small * small)


def test_the_work_counts_every_product() -> None:
    """X X^T, A A and (b A + c A^2) X of 3 x 7 matrices: 2 * (3*7*3 + 3*3*3 + 3*3*7) a step, the
    same for 7 x 3."""
    assert orthogonalize_flops(3, 7, 4) == orthogonalize_flops(7, 3, 4) == 4 * 2 * (63 + 27 + 63)
