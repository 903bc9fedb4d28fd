"""Muon on sharded matrices against torch.optim.Muon and torch.optim.AdamW on whole parameters, in one process."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Engine
from harness import run_distributed, tiny_config
from whole_parameters import Weights, fill_gradients, gradient, masters, together

from megatron_lite.distributed import Distributed
from megatron_lite.optimizer.rules.muon import Matrix, assign, describe, matrices_of, shape_factor
from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.zero.layout import lay_out

Options = dict[str, Any]

STEPS, RATE = 4, 0.02
SMALL = {"sequence_length": 8, "optimizer": "muon", "clip_grad": 0.0, "batch_size": 6}
LLAMA = {
    "use_rotary_embeddings": True, "gated": True, "add_linear_biases": False, "normalization_type": "rms_norm",
    "head_groups": 2, "tie_word_embeddings": False, "ffn_hidden_size": 88,
}  # fmt: skip
CASES: list[Options] = [
    {},
    LLAMA | {"num_layers": 3, "layers_per_stage": 2.0, "weight_decay": 0.5},
    # Queries 4 x 36, keys and values 1 x 36, up 1 x 36, down 36 x 1.
    {"hidden_size": 36, "head_groups": 1, "kv_channels": 1, "ffn_hidden_size": 1, "vocab_size": 61},
    LLAMA | {"freeze": ("blocks.0", "*.mlp.down.*", "head"), "num_layers": 3},
    {"lr_scales": ("*.query_key_value.*:0.5", "embedding:0.1", "*.down.*:2", "*.bias:3"), "freeze": ("*.mlp.up.*",)},
    {"muon_adjust_lr": "original", "muon_nesterov": False, "muon_momentum": 0.8, "muon_ns_steps": 3},
    {"num_layers": 1, "muon_momentum": 0.0, "freeze": ("embedding",)},
    {"full_precision_gradients": False, "training_dtype": "bf16"},
]  # fmt: skip


def update(distributed: Distributed, cases: list[Options]) -> list[tuple[Weights, Weights, list[ParameterSpec]]]:
    """Of each case: this rank's masters before and after some steps, and what the parameters are."""
    results = []
    for options in cases:
        engine = Engine(distributed, SMALL | options)
        engine.model.gather_ahead()
        before = masters(engine)
        for step in range(1, STEPS + 1):
            fill_gradients(engine, step)
            rate = RATE / step
            engine.optimizer.step(step, rate, torch.tensor(1.0), engine.tokens, engine.model.updated)
            engine.model.gather_ahead()
        engine.model.finish()
        specs = [parameter.spec for _, parameter in engine.model.parameters()]
        results.append((before, masters(engine), specs))
    return results


def oracle(options: Options, before: Weights, specs: list[ParameterSpec]) -> Weights:
    """The same steps by torch's optimizers on plain parameters."""
    config = tiny_config(1, **SMALL, **options).optimizer
    weights = {spec.name: torch.from_numpy(before[spec.name].copy()).view(spec.shape) for spec in specs}
    matrices: list[tuple[torch.nn.Parameter, ParameterSpec, slice]] = []
    others: list[tuple[torch.nn.Parameter, ParameterSpec, slice]] = []
    for spec in specs:
        if not spec.trainable:
            continue
        rows = split_rows(spec, options)
        for end, count in zip(itertools.accumulate(rows), rows, strict=True):
            part = slice(end - count, end)  # views: what moves them moves the whole
            kind = matrices if spec.name.startswith("blocks.") and len(spec.shape) == 2 else others
            kind.append((torch.nn.Parameter(weights[spec.name][part]), spec, part))
    common = {"adjust_lr_fn": config.muon_adjust_lr, "ns_steps": config.muon_ns_steps}
    muon = torch.optim.Muon(
        groups(matrices, config.weight_decay), momentum=config.muon_momentum, nesterov=config.muon_nesterov, **common
    )
    adamw = torch.optim.AdamW(
        groups(others, config.weight_decay), betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
    )
    for step in range(1, STEPS + 1):
        for optimizer in (muon, adamw):
            for group, (parameter, spec, part) in zip(
                optimizer.param_groups, matrices if optimizer is muon else others, strict=True
            ):
                group["lr"] = RATE / step * spec.lr_scale
                whole = gradient(spec, step)
                if options.get("training_dtype") == "bf16":
                    whole = whole.bfloat16().float()
                parameter.grad = whole.view(spec.shape)[part]
            optimizer.step()
    return {name: weight.flatten().numpy() for name, weight in weights.items()}


def split_rows(spec: ParameterSpec, options: Options) -> list[int]:
    """How many rows each linear map has, from the model's options alone."""
    model = tiny_config(1, **SMALL, **options).model
    if spec.name.endswith("query_key_value.weight"):
        return [model.num_attention_heads * model.kv_channels, *[model.head_groups * model.kv_channels] * 2]
    if spec.name.endswith("mlp.up.weight") and model.gated:
        return [model.ffn_hidden_size] * 2
    return [spec.shape[0]]


def groups(parameters: list[tuple[torch.nn.Parameter, ParameterSpec, slice]], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [parameter], "weight_decay": decay if len(spec.shape) > 1 else 0.0}
        for parameter, spec, _ in parameters
    ]


@pytest.fixture(scope="module")
def updates() -> dict[tuple[int, int], list[tuple[Weights, Weights, list[ParameterSpec]]]]:
    """(ranks, ZeRO stage) -> of each case: whole masters before and after, specs."""
    results = {}
    for ranks, zero_stage in itertools.product((1, 2, 3), (1, 3)):
        of_ranks = run_distributed(ranks, update, [options | {"zero_stage": zero_stage} for options in CASES])
        results[ranks, zero_stage] = [
            (together([rank[0] for rank in case]), together([rank[1] for rank in case]), case[0][2])
            for case in zip(*of_ranks, strict=True)
        ]
    return results


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case])[:60])
def test_updates_are_torchs_on_any_number_of_ranks(updates: Any, case: int) -> None:
    """Fused, tall, wide, single-row, frozen weights, learning-rate scales, ties: to rounding; layouts: to the bit."""
    before, reference, specs = updates[1, 1][case]
    expected = oracle(CASES[case], before, specs)
    for name, weights in expected.items():
        moved = np.abs(weights - before[name]).max()
        assert (moved > 0) == next(spec.trainable for spec in specs if spec.name == name), name
        np.testing.assert_allclose(reference[name], weights, rtol=0, atol=1e-6 + 1e-5 * moved, err_msg=name)
    for layout, results in updates.items():
        for name, weights in results[case][1].items():
            np.testing.assert_array_equal(weights, reference[name], err_msg=f"{layout} {name}")


# -- who does what ----------------------------------------------------------------------------------------------------


def specs_of_a_block(hidden: int, width: int) -> list[ParameterSpec]:
    """Grouped queries, a gated MLP."""
    weights = Initializer("normal", 1.0)

    def weight(name: str, columns: int, *rows: int) -> ParameterSpec:
        return ParameterSpec(name, (sum(rows), columns), weights, matrix_rows=rows)

    return [
        ParameterSpec("norm", (hidden,), weights, weight_decay=False),
        weight("qkv", hidden, hidden, hidden // 4, hidden // 4), weight("out", hidden, hidden),
        weight("up", hidden, width, width), weight("down", width, hidden),
    ]  # fmt: skip


def test_the_matrices_of_a_layout_are_where_the_parameters_are() -> None:
    """Every element of every weight is in one matrix, in order; none of anything else."""
    layout = lay_out(specs_of_a_block(24, 40), 3)
    matrices = matrices_of(layout)
    assert [(m.rows, m.columns) for m in matrices] == [
        (24, 24), (6, 24), (6, 24), (24, 24), (40, 24), (40, 24), (24, 40),
    ]  # fmt: skip
    covered = [range(m.offset, m.end) for m in matrices]
    expected = [range(slot.offset, slot.end) for slot in layout.slots if slot.spec.name != "norm"]
    assert sorted(i for some in covered for i in some) == sorted(i for some in expected for i in some)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_work_is_shared_evenly(world_size: int) -> None:
    """Mistral's blocks: no rank has more than the average and one largest matrix in a stage, and over all stages the
    same holds; every rank comes to the same assignment."""
    stages = [matrices_of(lay_out(specs_of_a_block(4096, 14336), world_size)) for _ in range(32)]
    assigned = assign(stages, world_size)
    work = [[m.rows * m.columns * min(m.rows, m.columns) for m in stage] for stage in stages]
    totals = [0] * world_size
    for ranks, sizes in zip(assigned, work, strict=True):
        own = [sum(size for rank, size in zip(ranks, sizes, strict=True) if rank == r) for r in range(world_size)]
        assert max(own) <= sum(sizes) / world_size + max(sizes)
        totals = [a + b for a, b in zip(totals, own, strict=True)]
    assert max(totals) <= 1.35 * sum(totals) / world_size + max(max(sizes) for sizes in work)
    assert assign(stages, world_size) == assigned


def test_ties_go_to_who_had_least_to_do() -> None:
    """Two stages of one matrix: the second rank begins with the next stage while the first works on its own."""
    one = [Matrix(0, 8, 8, 1.0, True)]
    assert assign([one, one, one], 2) == [[0], [1], [0]]


def test_factors_are_those_of_torch() -> None:
    for rows, columns in ((8, 32), (32, 8), (5, 5)):
        for style in ("original", "match_rms_adamw"):
            shape = torch.Size((rows, columns))
            assert shape_factor(rows, columns, style) == torch.optim._muon._adjust_lr(1.0, style, shape)


def test_the_log_says_what_is_orthogonalized_and_by_how_many() -> None:
    text = "muon: 14 matrices (8,640 of 8,688 trained weights) are orthogonalized, AdamW updates everything else"
    for world_size, more in ((1, ""), (7, ""), (8, "; 7 of 8 ranks at a time: more --layers_per_stage give work ")):
        line = describe([lay_out(specs_of_a_block(24, 40), world_size)] * 2)
        assert line.startswith(text + more) and (line == text) == (more == "")
