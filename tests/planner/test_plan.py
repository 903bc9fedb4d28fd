"""The plan against real runs: state, traffic and what autograd keeps to the byte, peaks within half
a percent."""

import contextlib
import sys
import time
from typing import Any, cast

import pytest
import torch

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.block import Block
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import MicroBatch
from megatron_lite.monitor.watch import Watch
from megatron_lite.optimizer.rules.muon import orthogonalize
from megatron_lite.planner import plan
from megatron_lite.planner.plan import SimulatedGroup, make_plan, planned_model
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import bytes_by_kind, layers_of, run_distributed, start_run, tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import (
    AllocatorMeter,
    Alone,
    a_model,
    measure_kept,
    measured_peak,
    micro_batches,
    second_peak,
    some,
)
from tests.support.plans import one_plan, planned_memory, simulated_rank

Books = tuple[dict[str, int], dict[str, tuple[int, int, int, int]]]

FROZEN = dict(
    freeze=("embedding", "blocks.1", "*.norm.*", "blocks.0.mlp"), tie_word_embeddings=False
)
EVERY_NORM = dict(qk_layernorm=True, hybrid_norm=True, input_embedding_norm=True)
STATE_CASES: list[dict[str, Any]] = [
    *(
        dict(zero_stage=stage, training_dtype=dtype)
        for stage in (1, 2, 3)
        for dtype in ("fp32", "bf16")
    ),
    *(dict(zero_stage=stage, depth_first_micro_batches=2) for stage in (1, 2, 3)),
    *(dict(zero_stage=stage, breadth_first_micro_batches=2) for stage in (2, 3)),
    dict(zero_stage=3, depth_first_micro_batches=2, breadth_first_micro_batches=2),
    dict(zero_stage=3, batch_size_schedule=("0:12", "2:24")),
    dict(zero_stage=2, batch_size=13, micro_batch_size=2, allow_nondivisible_batch_size=True),
    dict(zero_stage=3, num_weight_buffers=1, num_grad_buffers=3, depth_first_micro_batches=4),
    dict(zero_stage=3, layers_per_stage=1.5, training_dtype="bf16", depth_first_micro_batches=2),
    dict(
        zero_stage=2,
        tie_word_embeddings=False,
        full_precision_gradients=False,
        training_dtype="bf16",
    ),
    dict(zero_stage=3, tie_word_embeddings=False, depth_first_micro_batches=2, num_layers=5),
    *(dict(zero_stage=stage, split_master_weights=True, training_dtype="bf16") for stage in (1, 2)),
    *(dict(zero_stage=stage, depth_first_micro_batches=2, **FROZEN) for stage in (1, 2, 3)),
    dict(
        store_frozen_weights_in_optimization_precision=False,
        training_dtype="bf16",
        zero_stage=3,
        **FROZEN,
    ),
    dict(freeze=("embedding",), zero_stage=3),
    *(dict(zero_stage=stage, use_layer_norm_weight=False, hybrid_norm=True) for stage in (1, 3)),
    dict(
        zero_stage=2,
        use_layer_norm_weight=False,
        ema_type="ema",
        validation_iters=1,
        freeze=("embedding",),
    ),
    dict(zero_stage=3, training_dtype="bf16", full_precision_residual=True, **EVERY_NORM),
    dict(ema_type="ema", zero_stage=1, validation_iters=1),
    dict(ema_type="ema_decay_sqrt", zero_stage=3, training_dtype="bf16", **FROZEN),
    dict(
        freeze=("blocks.0", "blocks.1", "blocks.2", "embedding"),
        tie_word_embeddings=False,
        zero_stage=2,
    ),
    *(dict(optimizer="muon", training_dtype="bf16", zero_stage=stage) for stage in (1, 3)),
    dict(optimizer="muon", layers_per_stage=3.0, depth_first_micro_batches=2, zero_stage=2),
    dict(optimizer="muon", full_precision_gradients=False, training_dtype="bf16", **FROZEN),
    dict(optimizer="muon", freeze=("blocks.*.weight",)),
    *(dict(optimizer=name, zero_stage=3) for name in ("lion", "sgd")),
    dict(
        weight_decay_modules=("blocks.1.mlp", "*norm.weight"),
        add_linear_biases=True,
        hidden_size=24,
        zero_stage=3,
    ),
    dict(weight_decay_default_mask="levanter", optimizer="muon", zero_stage=1),
    dict(
        make_vocab_size_divisible_by=100,
        tie_word_embeddings=False,
        add_linear_biases=False,
        add_qkv_biases=True,
    ),
    dict(
        make_vocab_size_divisible_by=48,
        ema_type="ema",
        training_dtype="bf16",
        add_mlp_biases=False,
        zero_stage=3,
    ),
]


def configured(ranks: int, options: dict[str, Any]) -> Config:
    """A model of three blocks, and a batch that divides for every case here."""
    return tiny_config(ranks, **{"num_layers": 3, "batch_size": 24, **options})


def run_steps(distributed: Distributed, cases: list[dict[str, Any]]) -> list[Books]:
    """Run two real training steps, or three where the batch grows with the third; return memory,
    and the last one's traffic."""
    from megatron_lite.train import train_step

    books = []
    for options in cases:
        run = start_run(distributed, configured(distributed.world_size, options))
        steps = 3 if "batch_size_schedule" in options else 2
        for iteration, batch in enumerate(run.data.batches("training", 0, steps), start=1):
            distributed.traffic.take()
            train_step(run, batch, iteration)
        totals = distributed.traffic.take()
        traffic = {
            kind: (total.collectives, total.elements, total.bytes, total.wire_bytes)
            for kind, total in totals.items()
            if kind != "sum"
        }
        books.append((bytes_by_kind(run.model), traffic))
        run.data.close()
    return books


def planned(ranks: int, options: dict[str, Any], rank: int = 0) -> Books:
    plan = one_plan(configured(ranks, options), ranks, "cpu", rank)
    traffic = {
        kind: (total.collectives, total.elements, total.bytes, total.wire_bytes)
        for kind, total in plan.traffic.items()
    }
    return bytes_by_kind(plan.model), traffic


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, STATE_CASES[::8]),
        (3, STATE_CASES[2::8]),
        *(pytest.param(ranks, STATE_CASES, marks=pytest.mark.slow) for ranks in (1, 2, 3)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} cases",
)
def test_state_and_traffic_are_those_of_real_runs(ranks: int, cases: list[dict[str, Any]]) -> None:
    """The plan equals every kind of memory to the byte, and collectives, elements and bytes of a
    step."""
    real = run_distributed(ranks, run_steps, cases)
    for options, *books_of_ranks in zip(cases, *real, strict=True):
        plan = planned(ranks, options)
        for rank, books in enumerate(books_of_ranks):
            assert plan == books, (rank, options)
    assert bool(real[0][0][1]) == (ranks > 1), "one rank sends nothing, more do"


def allocated_bytes(model: MultiStage) -> int:
    """Add up the storages of everything that the engine has allocated, each once."""
    storages = {}
    averaged = any(part.average is not None for _, part in model.parts())
    with model.averaged() if averaged else contextlib.nullcontext():
        beside = [stage.weights.data for stage in model.stages]
    for stage, average_buffer in zip(model.stages, beside, strict=True):
        tensors = [
            stage.weights.data,
            *([stage.gradients.data] if stage.gradients is not None else []),
            average_buffer,
        ]
        for part in stage.parts:
            tensors += (
                [part.read("weights")] if not model.precision.split_master or part.frozen else []
            )
            tensors += [part.grad_shard, *part.moments.values()] if part.has_state else []
            tensors += [part.average] if part.average is not None else []
        tensors += [] if stage.update_buffer is None else [stage.update_buffer.data]
        for tensor in tensors:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world_size", [4, 7, 64, 1000, 1024])
@pytest.mark.parametrize(
    ("zero_stage", "optimizer"), [(1, "adamw"), (2, "muon"), (3, "adamw"), (3, "lion")]
)
def test_state_of_many_ranks(world_size: int, zero_stage: int, optimizer: str) -> None:
    """The plan of a rank in a large group equals what that rank allocates, here without the other
    ranks."""
    options = dict(
        zero_stage=zero_stage,
        training_dtype="bf16",
        batch_size=world_size,
        tie_word_embeddings=False,
    )
    options |= dict(optimizer=optimizer, ema_type="ema" if zero_stage > 1 else "none")
    config = tiny_config(world_size, **options)
    plan = one_plan(config, world_size, "cuda")
    for rank in (0, world_size // 2, world_size - 1):
        model = simulated_rank(config, world_size, rank, "cuda")
        assert allocated_bytes(model) == plan.state_bytes, rank
        assert model.memory.table() == plan.model.memory.table(), rank


# Parts of the embedding and the first block; the second block is trained.
ALL_BUT_DOWN = ("embedding", "blocks.0.attention*", "blocks.0.mlp_norm", "blocks.0.mlp.up")
RMS: dict[str, Any] = dict(normalization_type="rms_norm", head_groups=2, use_rotary_embeddings=True)
POST: dict[str, Any] = dict(norm_placement="post", qk_layernorm=True, qk_norm_scope="all")
PATTERNS: dict[str, Any] = dict(
    attention_pattern=("window", "full"),
    rotary_pattern=("rotary", "rotary", "nope"),
    window_rotary_base=100.0,
    window_size=7,
    use_rotary_embeddings=True,
    reset_position_ids=True,
)
KEPT_NORMS: list[dict[str, Any]] = [
    *(
        dict(training_dtype=dtype, full_precision_residual=True, **EVERY_NORM)
        for dtype in ("fp32", "bf16")
    ),
    dict(qk_layernorm=True, **RMS),
    dict(**POST, **RMS),
    dict(**POST, **RMS, training_dtype="bf16", freeze=("embedding", "blocks.0.attention")),
    dict(**PATTERNS, training_dtype="bf16", num_layers=3),
    dict(
        hybrid_norm=True,
        hidden_dropout=0.1,
        training_dtype="fp16",
        use_layer_norm_weight=False,
        **RMS,
    ),
    dict(
        full_precision_residual=True,
        hidden_dropout=0.1,
        training_dtype="bf16",
        zero_centered_normalization=True,
    ),
    dict(
        freeze=("embedding.word", "blocks.0", "*.query_norm.*"),
        tie_word_embeddings=False,
        **EVERY_NORM,
    ),
    dict(freeze=("embedding.word", "blocks.0"), tie_word_embeddings=False, **EVERY_NORM, **RMS),
    dict(lr_scales=("*:0", "blocks.1.attention.key_norm:1"), **EVERY_NORM),
    dict(lr_scales=("*:0", "blocks.0.mlp_output_norm:1"), **EVERY_NORM),
    dict(
        freeze=(
            "embedding",
            "blocks.0.attention_norm",
            "blocks.0.attention.*_norm.*",
            "*.query_key_value.*",
        ),
        tie_word_embeddings=False,
        qk_layernorm=True,
    ),
    dict(recompute_layers=1, full_precision_residual=True, training_dtype="bf16", **EVERY_NORM),
]
KEPT_CASES: list[dict[str, Any]] = [
    *KEPT_NORMS,
    *(
        dict(training_dtype=dtype, gated=gated, normalization_type=norm, mlp_recompute_level=level)
        for dtype in ("fp32", "bf16")
        for gated, norm in ((False, "layer_norm"), (True, "rms_norm"))
        for level in ("none", "activation", "full")
    ),
    dict(training_dtype="fp16", use_rotary_embeddings=True, add_linear_biases=False),
    dict(
        use_rotary_embeddings=True,
        head_groups=2,
        kv_channels=12,
        ffn_hidden_size=40,
        tie_word_embeddings=False,
    ),
    dict(window_size=5, sequence_length=300),
    dict(
        window_size=140,
        sequence_length=450,
        head_groups=1,
        training_dtype="bf16",
        use_rotary_embeddings=True,
    ),
    dict(window_size=16),
    dict(hidden_dropout=0.1),
    dict(attention_dropout=0.1, head_groups=2),
    dict(attention_dropout=0.1, num_attention_heads=1),
    dict(
        attention_dropout=0.1,
        hidden_dropout=0.2,
        training_dtype="bf16",
        use_rotary_embeddings=True,
        window_size=4,
    ),
    dict(activation_type="squared_relu", num_layers=3, layers_per_stage=2.0),
    dict(freeze=("embedding",), tie_word_embeddings=False),
    dict(freeze=("embedding", "blocks.0"), tie_word_embeddings=False, num_layers=3),
    dict(
        freeze=("embedding", "blocks.0"),
        tie_word_embeddings=False,
        num_layers=4,
        layers_per_stage=2.0,
    ),
    dict(freeze=("*.mlp.*", "*.query_key_value.*")),
    dict(
        freeze=("*.mlp.up.*", "*.mlp_norm.*", "*.output.weight"),
        mlp_recompute_level="full",
        gated=True,
    ),
    dict(freeze=ALL_BUT_DOWN, tie_word_embeddings=False),
    dict(
        freeze=ALL_BUT_DOWN,
        tie_word_embeddings=False,
        mlp_recompute_level="activation",
        hidden_dropout=0.1,
    ),
    dict(recompute_layers=1, mlp_recompute_level="full"),
    dict(num_layers=3, mlp_recompute_level="activation,full:1", gated=True, training_dtype="bf16"),
    dict(
        num_layers=4,
        mlp_recompute_level="none,full:1,activation:2",
        recompute_layers=2,
        layers_per_stage=2.0,
    ),
    dict(
        num_layers=3,
        mlp_recompute_level="full,none:2",
        freeze=ALL_BUT_DOWN,
        tie_word_embeddings=False,
    ),
    dict(recompute_layers=2, hidden_dropout=0.1, attention_dropout=0.1, training_dtype="bf16"),
    dict(embedding_dropout=0.1),
    dict(embedding_dropout=0.0, hidden_dropout=0.1, use_rotary_embeddings=True, rotary_percent=0.5),
    dict(
        recompute_layers=3,
        num_layers=4,
        freeze=("embedding", "blocks.0"),
        tie_word_embeddings=False,
    ),
    dict(recompute_layers=2, freeze=("embedding", "*.weight", "head"), tie_word_embeddings=False),
    dict(
        add_linear_biases=False,
        add_qkv_biases=True,
        freeze=("*.weight",),
        tie_word_embeddings=False,
    ),
    dict(
        add_mlp_biases=False,
        freeze=("*.weight",),
        logit_soft_cap=5.0,
        make_vocab_size_divisible_by=100,
    ),
]


@pytest.mark.parametrize(("micro_batch_size", "options"), some(KEPT_CASES, (1, 2), each=4), ids=str)
def test_activations_are_what_autograd_keeps(
    options: dict[str, Any], micro_batch_size: int
) -> None:
    """The planned activations of each layer equal to the byte what autograd saves."""
    config = tiny_config(1, **{"batch_size": micro_batch_size, **options})
    saved = planned_memory(config).saved
    measured = measure_kept(a_model(config, layers_of(config)), micro_batches(config)[0])
    assert dict(zip(measured, (layer.total() for layer in saved), strict=True)) == measured


def mistral(ranks: int = 1, **options: Any) -> Config:
    """The README's model and batch, on GPUs."""
    typed = parse(["@scripts/examples/mistral_7b.flags", "--dataset_source=random"]).config
    return resolve(
        unflatten({**flatten(typed), "micro_batch_size": 1, "device": "cuda", **options}), ranks
    )


def test_recomputation_saves_what_theory_says() -> None:
    """Mistral-7B saves tokens x layers x width x 2 bytes at level activation, and three times that
    at level full."""
    plan = make_plan(mistral(), 1, "cuda")
    held = {level: memory.held for level, memory in plan.activations.items()}
    assert held["none"] - held["activation"] == 7168 * 2**20
    assert held["none"] - held["full"] == 21504 * 2**20


def test_norms_keep_what_the_guide_says() -> None:
    """Bytes per token in all 32 blocks, and in embedding and head, of a Mistral-7B are those in
    docs/models.md."""
    h = 4096
    n = 32
    g = 8
    d = 128
    plain = one_plan(mistral(), 1, "cuda").activations["none"].held
    options: list[tuple[dict[str, Any], int]] = [
        (dict(qk_layernorm=True), 32 * (2 * d + 4) * (n + g)),
        (dict(qk_layernorm=True, qk_norm_scope="all"), 32 * (2 * d * (n + g) + 8)),
        (dict(hybrid_norm=True), 32 * (4 * h + 8)),
        (dict(norm_placement="post"), 0),
        (dict(input_embedding_norm=True), 2 * h + 4),
        (dict(full_precision_residual=True), 32 * 4 * h + 2 * h),
    ]
    for changes, expected in options:
        held = one_plan(mistral(**changes), 1, "cuda").activations["none"].held
        assert held - plain == 8192 * expected, changes


# Like Gemma 2, with capped scores, and OLMo 3: families with patterns.
GEMMA_2: dict[str, Any] = dict(
    RMS,
    add_linear_biases=False,
    zero_centered_normalization=True,
    norm_placement="both",
    gated=True,
    activation_type="gelu",
    embedding_scale=128**0.5,
    attention_scale=0.07,
    attention_pattern=("window", "full"),
    window_size=100,
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
)
OLMO_3: dict[str, Any] = dict(
    RMS,
    **POST,
    add_linear_biases=False,
    tie_word_embeddings=False,
    gated=True,
    attention_pattern=("window", "window", "window", "full"),
    window_size=70,
    window_rotary_base=10000.0,
    rope_type="yarn",
    rope_factor=4.0,
    rope_original_max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("family", "training_dtype"),
    [
        (GEMMA_2, "bf16"),
        (OLMO_3, "fp32"),
        pytest.param(GEMMA_2, "fp32", marks=pytest.mark.slow),
        pytest.param(OLMO_3, "bf16", marks=pytest.mark.slow),
    ],
    ids=["gemma2", "olmo3", "gemma2", "olmo3"],
)
def test_peaks_of_families_with_patterns(family: dict[str, Any], training_dtype: str) -> None:
    """Where the MLPs need most and where attention does, whose scores may be capped."""
    heads = dict(num_attention_heads=16, kv_channels=32, ffn_hidden_size=64, vocab_size=100)
    for options in ({}, heads):
        config = tiny_config(1, **{**SIZES, "training_dtype": training_dtype, **family, **options})
        planned, measured = peaks(config)
        assert planned == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("family", [GEMMA_2, OLMO_3], ids=["gemma2", "olmo3"])
def test_state_of_families_with_patterns(family: dict[str, Any]) -> None:
    """To the byte what two ranks allocate and exchange with ZeRO 3 in bf16."""
    options = dict(family, zero_stage=3, training_dtype="bf16", num_layers=4)
    for rank, (books,) in enumerate(run_distributed(2, run_steps, [options])):
        assert planned(2, options) == books, rank


FACTORS = dict(embedding_scale=5.0, residual_scale=0.3, attention_soft_cap=0.5, logit_scale=1.7)
PEAK_CASES: list[dict[str, Any]] = [
    dict(**POST, **RMS, hidden_dropout=0.1, training_dtype="bf16", vocab_size=100),
    dict(**PATTERNS, num_layers=5, vocab_size=100),
    dict(**FACTORS, vocab_size=100, **RMS),
    dict(parallel_branches="one_norm", training_dtype="bf16", vocab_size=100, **RMS),
    dict(parallel_branches="two_norms", vocab_size=100),
    dict(**FACTORS, hybrid_norm=True, training_dtype="bf16", window_size=100),
    dict(hybrid_norm=True, input_embedding_norm=True, hidden_dropout=0.1),
    dict(hybrid_norm=True, input_embedding_norm=True, training_dtype="bf16", vocab_size=100, **RMS),
    dict(full_precision_residual=True, training_dtype="bf16", vocab_size=100),
    dict(
        full_precision_residual=True,
        training_dtype="bf16",
        gated=True,
        hidden_dropout=0.1,
        vocab_size=100,
        **RMS,
    ),
    dict(
        full_precision_residual=True,
        training_dtype="bf16",
        layers_per_stage=2.0,
        **EVERY_NORM,
        **RMS,
    ),
    dict(
        full_precision_residual=True,
        training_dtype="bf16",
        recompute_layers=2,
        breadth_first_micro_batches=3,
    )
    | dict(batch_size=6, vocab_size=100),
    dict(qk_layernorm=True, vocab_size=100, **RMS),
    dict(qk_layernorm=True, vocab_size=100, training_dtype="bf16"),
    dict(),
    dict(training_dtype="bf16"),
    dict(training_dtype="bf16", full_precision_gradients=False, vocab_size=100),
    dict(gated=True, normalization_type="rms_norm", head_groups=2, use_rotary_embeddings=True),
    dict(gated=True, normalization_type="rms_norm", training_dtype="bf16", vocab_size=100),
    dict(
        training_dtype="bf16",
        normalization_type="rms_norm",
        ffn_hidden_size=64,
        vocab_size=100,
        num_layers=1,
    ),
    dict(hidden_dropout=0.1),
    dict(embedding_dropout=0.1, training_dtype="bf16"),
    dict(attention_dropout=0.1),
    dict(use_rotary_embeddings=True, rotary_percent=0.25, training_dtype="bf16", head_groups=1),
    dict(window_size=100),
    dict(num_attention_heads=32, head_groups=1, kv_channels=32, vocab_size=100),
    dict(breadth_first_micro_batches=3, batch_size=6),
    dict(
        breadth_first_micro_batches=5,
        depth_first_micro_batches=2,
        batch_size=20,
        training_dtype="bf16",
    ),
    dict(
        breadth_first_micro_batches=2,
        depth_first_micro_batches=2,
        batch_size=8,
        layers_per_stage=2.0,
    ),
    dict(vocab_size=8192),
    dict(cross_entropy_splits=1, training_dtype="bf16"),
    dict(vocab_size=20_000, training_dtype="bf16", cross_entropy_splits=8),
    dict(
        cross_entropy_splits=2,
        cross_entropy_block_size=3000,
        vocab_size=8192,
        training_dtype="bf16",
    ),
    dict(recompute_layers=2),
    dict(logit_z_loss=1e-3, vocab_size=8192, training_dtype="bf16"),
    dict(
        logit_soft_cap=30.0,
        vocab_size=8192,
        training_dtype="bf16",
        make_vocab_size_divisible_by=5000,
    ),
    dict(
        vocab_size=8100,
        make_vocab_size_divisible_by=1000,
        cross_entropy_block_size=3000,
        training_dtype="bf16",
    ),
    dict(activation_type="quick_gelu", training_dtype="bf16", ffn_hidden_size=1024),
    dict(activation_type="tanh", training_dtype="bf16", ffn_hidden_size=1024, gated=True),
    dict(
        recompute_layers=4,
        gated=True,
        normalization_type="rms_norm",
        use_rotary_embeddings=True,
        hidden_dropout=0.1,
    ),
    dict(
        recompute_layers=3,
        breadth_first_micro_batches=3,
        batch_size=6,
        layers_per_stage=2.0,
        vocab_size=100,
    ),
    dict(
        reset_position_ids=True, breadth_first_micro_batches=2, batch_size=4, vocab_size=100, **RMS
    ),
    dict(reset_position_ids=True, training_dtype="bf16", vocab_size=100),
]


LEVELS = ("none", "activation", "full")
SIZES: dict[str, Any] = dict(
    num_layers=4, batch_size=2, hidden_size=128, sequence_length=256, vocab_size=512
)
SIZES |= dict(max_position_embeddings=256)


@pytest.mark.parametrize(("level", "options"), some(PEAK_CASES, LEVELS, each=19), ids=str)
def test_peaks_are_those_of_a_step(options: dict[str, Any], level: str) -> None:
    """The planned peak of forward and backward passes, beyond the state, is within half a percent
    of a real step."""
    planned, measured = peaks(tiny_config(1, **{**SIZES, "mlp_recompute_level": level, **options}))
    assert planned == pytest.approx(measured, rel=0.005)


def test_each_micro_batch_has_angles_of_its_own() -> None:
    """With positions that restart, the angle tables of all micro-batches of a step, 64 KiB each,
    are in its peak."""
    several = dict(
        batch_size=4,
        breadth_first_micro_batches=2,
        use_rotary_embeddings=True,
        reset_position_ids=True,
    )
    planned, measured = peaks(tiny_config(1, **{**SIZES, **several}))
    assert planned == pytest.approx(measured, abs=1024)


@pytest.mark.parametrize(
    ("level", "options"),
    some(
        [{}, dict(training_dtype="bf16", gated=True, recompute_layers=2)],
        ("activation,full:3", "full,none:1,activation:1", "none,full:4"),
        each=2,
    ),
    ids=str,
)
def test_peaks_with_a_level_for_each_block(options: dict[str, Any], level: str) -> None:
    """A step's peak is the plan's within half a percent, below that of a level that saves less in
    any block."""
    config = tiny_config(1, **{**SIZES, "num_layers": 6, "mlp_recompute_level": level, **options})
    planned, measured = peaks(config)
    assert planned == pytest.approx(measured, rel=0.005)
    plan = make_plan(config, 1, "cpu").activations
    assert plan["full"].peak <= plan[level].peak < plan["none"].peak


EVALUATION_CASES: list[dict[str, Any]] = [
    dict(**EVERY_NORM),
    dict(training_dtype="bf16", full_precision_residual=True, vocab_size=100, **EVERY_NORM, **RMS),
    dict(training_dtype="bf16", full_precision_residual=True, vocab_size=100, ffn_hidden_size=64),
    dict(
        qk_layernorm=True,
        ffn_hidden_size=64,
        num_attention_heads=16,
        kv_channels=32,
        vocab_size=100,
    ),
    dict(),
    dict(training_dtype="bf16", normalization_type="rms_norm", gated=True),
    dict(use_rotary_embeddings=True, head_groups=2, layers_per_stage=2.0),
    dict(vocab_size=8192),
    dict(
        vocab_size=20_000,
        training_dtype="bf16",
        cross_entropy_splits=2,
        cross_entropy_block_size=3000,
    ),
    dict(vocab_size=8192, make_vocab_size_divisible_by=3000, logit_soft_cap=30.0),
    dict(
        ffn_hidden_size=64,
        num_attention_heads=16,
        kv_channels=32,
        training_dtype="bf16",
        window_size=100,
    ),
]


@pytest.mark.parametrize("options", some(EVALUATION_CASES, each=3), ids=str)
def test_peaks_of_an_evaluation(options: dict[str, Any]) -> None:
    """With much larger micro-batches an evaluation sets the peak; the plan is within half a
    percent."""
    sizes = dict(
        num_layers=4,
        batch_size=16,
        hidden_size=128,
        sequence_length=128,
        vocab_size=512,
        micro_batch_size=1,
    )
    config = tiny_config(
        1, **{**sizes, "validation_iters": 1, "eval_micro_batch_size": 16, **options}
    )
    model, tokens = a_model(config), torch.zeros(16, 128, dtype=torch.int64)
    with products_in_fp32(False):
        planned = planned_memory(config)
        peak = second_peak(lambda: model.evaluate([MicroBatch(tokens, tokens)]))
    assert planned.peak_at.endswith("evaluation")
    assert planned.peak == pytest.approx(peak, rel=0.005)


ATTENTION_CASES: list[dict[str, Any]] = [
    {},
    dict(qk_layernorm=True, **RMS),
    dict(window_size=20, head_groups=2),
    dict(sequence_length=600, window_size=130),
    dict(attention_dropout=0.1),
    dict(attention_softmax_in_fp32=True),
    dict(attention_softmax_in_fp32=True, attention_dropout=0.1),
]


@pytest.mark.parametrize(
    ("training_dtype", "options"), some(ATTENTION_CASES, ("fp32", "bf16"), each=3), ids=str
)
def test_peaks_of_attention(options: dict[str, Any], training_dtype: str) -> None:
    """Where attention dominates, the plan is within 3 percent: windows and probabilities are freed
    bit by bit."""
    sizes = dict(
        num_layers=2,
        batch_size=2,
        hidden_size=128,
        sequence_length=256,
        vocab_size=100,
        ffn_hidden_size=64,
    )
    heads = dict(
        num_attention_heads=16,
        kv_channels=32,
        training_dtype=training_dtype,
        mlp_recompute_level="full",
    )
    config = tiny_config(1, **{**sizes, **heads, **options})
    planned, measured = peaks(config)
    assert planned == pytest.approx(measured, rel=0.03)


def peaks(config: Config) -> tuple[int, int]:
    """The planned and the measured peak, on any processor as on one with instructions for bf16.

    `test_random_configurations` has others.
    """
    with products_in_fp32(False):
        return planned_memory(config).peak, measured_peak(a_model(config), micro_batches(config))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options", [{}, {"window_size": 512}, {"mlp_recompute_level": "full"}], ids=str
)
def test_peak_on_a_gpu(options: dict[str, Any]) -> None:
    """Planned state and activations are within 3 percent of what the allocator reports."""
    sizes = dict(
        num_layers=12,
        hidden_size=1024,
        kv_channels=64,
        num_attention_heads=16,
        head_groups=4,
        batch_size=8,
    )
    config = mistral(
        **{
            **sizes,
            "ffn_hidden_size": 4096,
            "sequence_length": 2048,
            "window_size": None,
            **options,
        }
    )
    group = SimulatedGroup(0, 1, "cuda", device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers = model_layers(config, choose_kernels(config, torch.device("cuda", 0)))
    model = MultiStage(layers, config.multi_stage, config.batch, "bf16", group)
    model.initialize(1)
    batches = [
        MicroBatch(one.tokens.cuda(), one.labels.cuda(), torch.tensor(1.0, device="cuda"), 7)
        for one in micro_batches(config)
    ]
    for _ in range(2):
        model.forward_backward(batches)
    measured = torch.cuda.max_memory_allocated() - before
    assert make_plan(config, 1, "cuda").peak_bytes() == pytest.approx(measured, rel=0.03)


def test_a_planner_builds_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a step share the model of their partition, and every answer is that of a whole
    plan."""
    built: list[object] = []
    build = plan.planned_model
    monkeypatch.setattr(plan, "planned_model", lambda *args: built.append(args) or build(*args))
    planner = plan.Planner(8, "cuda")
    changes = ("micro_batch_size", "mlp_recompute_level", "recompute_layers")
    for zero_stage in (1, 3):
        for values in ((1, "none", 0), (2, "activation,full:3", 0), (4, "full", 2)):
            options = dict(
                zip(changes, values, strict=True), zero_stage=zero_stage, validation_iters=1
            )
            config = mistral(ranks=8, num_layers=4, breadth_first_micro_batches=4, **options)
            before = len(built)
            needed = planner.plan(config).needed_bytes()
            assert len(built) == before + (values == (1, "none", 0))
            assert needed == one_plan(config, 8, "cuda").needed_bytes(), options


def plan_alone(distributed: Distributed, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases whose plans, in a new process, import torch's compiler."""
    slow = []
    for options in cases:
        make_plan(tiny_config(1, **options), 1, "cpu")
        slow += [options] * ("torch._dynamo" in sys.modules)
    return slow


def test_a_plan_imports_no_compiler() -> None:
    """Which takes two seconds, of each dry run and of each rank of a pipeline."""
    dropout = dict(
        hidden_dropout=0.1, attention_dropout=0.1, mlp_recompute_level="full", window_size=5
    )
    cases = [
        {},
        KEPT_NORMS[1],
        {**dropout, "recompute_layers": 1},
        dict(optimizer="muon", validation_iters=1),
        RMS,
    ]
    assert run_distributed(1, plan_alone, cases) == [[]]


class _Doubled(torch.autograd.Function):
    """An operation that no plan knows: it saves its input in fp32, and needs three tensors for a
    moment."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.float())
        return x + torch.cat([x, x], dim=-1)[..., : x.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        assert grad.device.type == "cpu", "backward, too, code finds the planned device"
        wide = torch.empty(3, *x.shape, device=x.device)
        return grad + wide.sum(0).to(grad.dtype)


@pytest.mark.parametrize("training_dtype", ["fp32", "bf16"])
def test_a_new_operation_is_planned_exactly(
    training_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation inside of every block makes the peak, and the plan knows it to the byte of a
    step's loss."""
    forward = Block.forward

    def with_operation(
        block: Block, hidden: torch.Tensor | None, micro_batch: MicroBatch
    ) -> torch.Tensor:
        output: torch.Tensor = _Doubled.apply(forward(block, hidden, micro_batch))
        return output

    config = tiny_config(1, **SIZES, training_dtype=training_dtype)
    before, _ = peaks(config)
    monkeypatch.setattr(Block, "forward", with_operation)
    planned, measured = peaks(config)
    assert planned == pytest.approx(measured, rel=1e-6) and planned > before
    assert "with operation" in planned_memory(config).saved[1]


def test_an_update_can_need_more_than_the_passes() -> None:
    """Orthogonalizing the largest matrix, when few tokens need little: two of its size and two
    square ones.

    Processors without instructions for bf16 also take fp32 copies. Both are what torch allocates.
    """
    options = dict(
        optimizer="muon",
        hidden_size=256,
        sequence_length=8,
        batch_size=1,
        vocab_size=64,
        num_layers=1,
    )
    matrix, needed = torch.ones(256, 1024, dtype=torch.bfloat16), []
    for in_fp32 in (False, True):
        with products_in_fp32(in_fp32):
            memory = one_plan(tiny_config(1, **options), 1, "cpu").activations["none"]
            with AllocatorMeter() as meter:
                orthogonalize(matrix, steps=2)
        assert (memory.peak, memory.peak_at) == (meter.peak, "the update")
        needed.append(memory.peak)
    assert needed[0] == 4 * (256 * 1024 + 256 * 256) < needed[1]


def test_the_plan_counts_what_watching_updates_keeps() -> None:
    """--watch=updates holds the old weights of the largest shard; other targets hold nothing
    between steps."""
    for watch, zero_stage in (("updates", 1), ("updates", 3), ("grads", 1)):
        config = tiny_config(2, watch=(watch,), zero_stage=zero_stage, training_dtype="bf16")
        model = planned_model(config, SimulatedGroup(0, 2, "cpu", "cpu"), "cpu")
        scale = torch.ones(())
        watched = Watch(config, model, scale, {}, cast(Any, Alone()), cast(Any, None))
        assert (
            one_plan(config, 2, "cpu").runtime.get("old weights for watch", 0)
            == watched._old.nbytes
        )


def test_a_plan_of_long_samples_takes_seconds() -> None:
    """It took minutes, because all blocks of queries were listed for each layer; it takes a
    hundredth of a second."""
    config = tiny_config(1, sequence_length=10**8)
    start_s = time.process_time()
    make_plan(config, 1, "cuda")
    assert time.process_time() - start_s < 20
