"""Derived values, the batch arithmetic compared with a brute-force search, and every
contradiction."""

import dataclasses
import itertools
import random
import re
import string
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import AREAS, Config, flatten, unflatten
from megatron_lite.config.structured_values import weighted_paths
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import UsageError
from megatron_lite.validation import BATCH, defaults, resolve, warnings
from tests.support.tables import rows


def resolved(world_size: int = 1, **options: Any) -> Config:
    return resolve(unflatten({"dataset_source": "random", **options}), world_size)


def problems(world_size: int = 1, **options: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        resolved(world_size, **options)
    return str(caught.value).splitlines()


def only_problem(world_size: int = 1, **options: Any) -> str:
    (problem,) = problems(world_size, **options)
    return problem


def cautions(**options: Any) -> list[str]:
    """Return all warnings except the one about a run that is not saved."""
    found = warnings(resolved(**{"train_iters": 10, "experiment_dir": "/run", **options}))
    return [caution for caution in found if "nothing is saved" not in caution]


# --- Derived values


def test_model_defaults() -> None:
    """Missing options of the model follow from the others."""
    model = resolved(
        hidden_size=96, num_attention_heads=6, num_layers=8, sequence_length=4096
    ).model
    assert (model.head_groups, model.kv_channels, model.ffn_hidden_size) == (6, 16, 384)
    assert (
        model.activation_type,
        model.use_position_embeddings,
        model.max_position_embeddings,
    ) == ("gelu", True, 4096)
    assert (
        model.init_method_std
        == model.init_method_std_embed
        == model.init_method_std_qkv
        == 96**-0.5
    )
    assert model.init_method_std_mlp_1 == 96**-0.5
    assert model.init_method_std_mlp_2 == model.init_method_std_attn_proj == 96**-0.5 / 4.0
    gated = resolved(
        gated=True, use_rotary_embeddings=True, sequence_length=16, init_method_std=0.5
    ).model
    assert (gated.activation_type, gated.use_position_embeddings) == ("silu", False)
    assert gated.max_position_embeddings == 16
    scaled = dict(
        use_rotary_embeddings=True, rope_type="llama3", rope_factor=8.0, sequence_length=16
    )
    assert resolved(**scaled).model.rope_original_max_position_embeddings == 2048
    assert (gated.init_method_std_embed, gated.init_method_std_mlp_2) == (0.5, 0.5 / 24**0.5)


def test_other_defaults() -> None:
    """Schedule, loss scale, workers, split and names are derived."""
    config = resolved(
        train_iters=50, experiment_dir="/runs/mistral/", split=(9.0, 1.0), wandb_status_interval=5
    )
    assert (config.learning_rate.lr_decay_iters, config.learning_rate.min_lr) == (50, 0.0)
    assert (config.optimizer.loss_scale, config.multi_stage.zero_stage) == (1.0, 1)
    assert (config.data.prefetch_factor, config.data.split) == (2, (9.0, 1.0, 0.0))
    assert (config.run.experiment_name, config.tracking.wandb_post_alerts) == ("mistral", True)
    config = resolved(training_dtype="fp16", num_workers=0)
    assert (config.optimizer.loss_scale, config.data.prefetch_factor) == (None, None)
    assert (config.run.experiment_name, config.tracking.wandb_post_alerts) == (None, False)


# --- Batch arithmetic


def solutions(options: dict[str, int], world_size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield all ways to complete `options` to batch = micro * depth * breadth * world_size, by the
    design's rule.

    If batch or micro is missing, missing micro-batch counts are 1 (and sequential, if given, is all
    depth-first); if both are given, the counts follow from them, all depth-first by default.
    """
    both = "batch_size" in options and "micro_batch_size" in options
    for depth, breadth in itertools.product(range(1, 13), repeat=2):
        if "sequential_micro_batches" not in options and not both:
            free = {"depth_first_micro_batches": depth, "breadth_first_micro_batches": breadth}
            if any(count != 1 for name, count in free.items() if name not in options):
                continue
        elif (
            not {"depth_first_micro_batches", "breadth_first_micro_batches"} & set(options)
            and breadth != 1
        ):
            continue
        sizes = [options["micro_batch_size"]] if "micro_batch_size" in options else range(1, 13)
        if "batch_size" not in options and "micro_batch_size" not in options:
            sizes = [1]
        for micro in sizes:
            full = (micro * depth * breadth * world_size, micro, depth, breadth, depth * breadth)
            if all(
                options.get(name, number) == number
                for name, number in zip(BATCH, full, strict=True)
            ):
                yield full


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_batch_arithmetic_against_search(world_size: int) -> None:
    """All small combinations give the one solution if there is one, else an error with the
    flags."""
    choices = ((None, 1, 4, 6, 12), (None, 1, 2, 3), (None, 1, 2, 3), (None, 1, 2), (None, 1, 2, 4))
    good = 0
    for numbers in itertools.product(*choices):
        options = {
            name: number for name, number in zip(BATCH, numbers, strict=True) if number is not None
        }
        expected = list(solutions(options, world_size))
        assert len(expected) <= 1, (options, expected)
        if expected:
            values = flatten(resolved(world_size, **options))
            assert tuple(values[name] for name in BATCH) == expected[0], options
            good += 1
        else:
            assert only_problem(world_size, **options).startswith("--")
    assert good > 100


def test_impossible_batches_name_possible_ones() -> None:
    """The message has the numbers and the nearest batch sizes that work, and these do work."""
    message = only_problem(3, batch_size=128, micro_batch_size=1)
    assert message == (
        "--batch_size=128, --micro_batch_size=1 on 3 ranks: batch_size must be a multiple of 1 * 3 = 3 "
        "(or write --allow_nondivisible_batch_size=1); nearest: 126 or 129"
    )
    assert only_problem(4, batch_size=2).endswith("must be a multiple of 4; nearest: 4")
    assert only_problem(2, batch_size=12, depth_first_micro_batches=5).endswith("nearest: 10 or 20")
    counts = dict(depth_first_micro_batches=2, breadth_first_micro_batches=1)
    message = only_problem(2, batch_size=16, micro_batch_size=2, **counts)
    assert message.endswith("are 2, not 4; leave one of them out, or set --batch_size to 8")
    message = only_problem(1, batch_size=7, micro_batch_size=1, breadth_first_micro_batches=3)
    assert message.endswith("set --batch_size to 6 or 9")
    message = only_problem(1, batch_size=8, micro_batch_size=2, sequential_micro_batches=3)
    assert message.endswith(
        "is 4, not 3; leave sequential_micro_batches out or write --batch_size=6"
    )
    message = only_problem(1, sequential_micro_batches=5, depth_first_micro_batches=2)
    assert "multiple of 2, and 5 is not" in message
    for batch in (4, 6, 8, 9, 10, 20):
        resolved(2 if batch in (10, 20) else 1, batch_size=batch)


def test_huge_batches() -> None:
    """Numbers near 2**63 neither overflow nor take time."""
    small = dict(hidden_size=8, vocab_size=8, sequence_length=1)
    assert resolved(7, batch_size=7 * 10**14, **small).batch.micro_batch_size == 10**14
    assert "1.0e+25 elements" in only_problem(7, batch_size=7 * 10**17)
    assert "nearest" in only_problem(7, batch_size=2**63 - 1, micro_batch_size=2**62)


def test_cross_entropy_splits() -> None:
    """The loss of a micro-batch cannot have more chunks than tokens."""
    resolved(micro_batch_size=2, sequence_length=8, cross_entropy_splits=16)
    assert "only 16 tokens" in only_problem(
        micro_batch_size=2, sequence_length=8, cross_entropy_splits=17
    )


# --- Contradictions


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            dict(hidden_size=100),
            "--hidden_size=100, --num_attention_heads=8: hidden_size must be a multiple of num_attention_heads; "
            "nearest: 96 or 104; or set --kv_channels",
        ),
        (dict(head_groups=3), "--num_attention_heads=8, --head_groups=3: "),
        (dict(head_groups=16), "--num_attention_heads=8, --head_groups=16: "),
        (dict(kv_channels=7, use_rotary_embeddings=True), "write an even --kv_channels"),
        (dict(hidden_size=8, use_rotary_embeddings=True), "write an even --kv_channels"),
        (
            dict(max_position_embeddings=100),
            "write --sequence_length=100, or --max_position_embeddings=2048",
        ),
        (
            dict(hybrid_norm=False, norm_placement="both"),
            "--hybrid_norm=0, --norm_placement=both: hybrid_norm means both; leave one of the two out",
        ),
        (dict(hybrid_norm=True, norm_placement="post"), "leave one of the two out"),
        (
            dict(parallel_branches="two_norms", hidden_dropout=0.1),
            "--parallel_branches=two_norms, --hidden_dropout=0.1: the outputs of both branches are one sum",
        ),
        (dict(min_lr=1.0), "--min_lr=1, --lr=0.0001: the learning rate would rise"),
        (
            dict(training_dtype="fp16", initial_loss_scale=1.0, min_loss_scale=2.0),
            "first loss scale is below",
        ),
        (dict(split=()), "--split=: takes up to three proportions"),
        (dict(split=(0.0, 0.0)), "with a positive sum"),
        (dict(split=(1.0, 1.0, 1.0, 1.0)), "takes up to three"),
        (dict(split=(1e308, 1e308)), "with a positive sum"),
        (dict(dataset_source="list"), "--data_path is missing"),
        (
            dict(dataset_source="list", data_path=("a",), train_iters=1, split=(0.0, 1.0)),
            "left for training",
        ),
        (
            dict(dataset_source="list", data_path=("a",), validation_iters=1, split=(1.0,)),
            "left for validation",
        ),
        (
            dict(dataset_source="list", data_path=("a",), test_iters=1, split=(9998.0, 2.0, 0.0)),
            "left for test",
        ),
        (
            dict(dataset_source="list", data_path=("0.5", "a", "b")),
            "write a weight before every prefix",
        ),
        (dict(checkpoint_interval=5), "--checkpoint_interval=5: there is nowhere to save"),
        (
            dict(trackers=("tensorboard",)),
            "tensorboard has nowhere to write; set --tensorboard_dir or --experiment_dir",
        ),
        (dict(trackers=("wandb", "wandb")), "--trackers=wandb wandb: one is given twice"),
        (dict(watch=("grads", "grads")), "--watch=grads grads: one is given twice"),
        (dict(watch=("experts",)), "--num_experts=1: the model has no experts; leave experts out"),
        (dict(watch=("weights",)), "--watch=weights: takes grads, params, updates, opt_state"),
        (dict(trackers=("comet",)), "--trackers=comet: takes jsonl, wandb, tensorboard"),
        (dict(wandb_id="../x"), "--wandb_id=../x: takes up to 128 letters, digits, - and _"),
        (dict(zero_stage=0), "--zero_stage=0: every rank would hold and update"),
        (dict(num_layers=0), "--num_layers=0: must be >= 1 and <= 10000"),
        (dict(split=(-1.0, 2.0)), "--split=-1,2: must be >= 0"),
        (dict(lr=float("nan")), "--lr=nan: must be >= 0"),
        (dict(device="quantum"), "--device=quantum: takes auto, cuda, cpu"),
        (dict(device="tpu"), "--device=tpu: TPUs are not supported; write --device=cuda"),
    ],
)
def test_contradictions(options: dict[str, Any], text: str) -> None:
    """Every error is one line with the flags, their values, the rule and the fix."""
    assert text in only_problem(**options)


@pytest.mark.parametrize(
    "options",
    [
        dict(hidden_size=100, kv_channels=16),
        dict(hidden_size=8, kv_channels=3),
        dict(use_rotary_embeddings=True, use_position_embeddings=True),
        dict(use_rotary_embeddings=True, max_position_embeddings=10),
        dict(use_position_embeddings=False),
        dict(lr=0.0),
        dict(train_iters=0, lr_warmup=1000, lr_decay_style="cosine"),
        dict(train_iters=10, lr_warmup=10),
        dict(train_iters=10, lr_warmup=11),
        dict(train_iters=10, lr_warmup=10, lr_decay_style="cosine"),
        dict(train_iters=100, lr_warmup=10, lr_decay_iters=10, lr_decay_style="linear"),
        dict(train_iters=10, lr_warmup=2, lr_decay_iters=5, lr_decay_style="power"),
        dict(train_iters=10, lr_decay_iters=100, lr_decay_style="cosine"),
        dict(training_dtype="fp16", initial_loss_scale=1.0, min_loss_scale=2.0, loss_scale=1.0),
        dict(num_weight_buffers=1000, num_grad_buffers=1),
        dict(split=(5.0,)),
        dict(checkpoint_interval=5, stop_interval=7, export_interval=3, experiment_dir="/x"),
        dict(max_checkpoints=1),
        dict(window_size=10**9),
        dict(dataset_source="list", data_path=("0.5", "a", "1", "b")),
        dict(num_workers=0),
    ],
)
def test_legal_combinations(options: dict[str, Any]) -> None:
    """Unusual but meaningful combinations are accepted, and resolving twice changes nothing."""
    config = resolved(2, **options)
    assert resolve(config, 2) == config


def test_all_problems_together() -> None:
    """One error lists every problem, one per line."""
    lines = problems(
        2, hidden_size=100, min_lr=1.0, batch_size=3, checkpoint_interval=1, head_groups=3
    )
    assert len(lines) == 5


def value_of(name: str, text: str) -> Any:
    """The value of an option as typed; nothing is the empty list."""
    return parse([f"--{name}={text}"]).given[name] if text else ()


# Options with their values as typed.
TYPED = """
num_attention_heads=1|6|8 head_groups=none|1|4 kv_channels=none|5|8 hidden_size=8|48|100 use_rotary_embeddings=0|1
use_position_embeddings=none|0|1 sequence_length=1|128|4096 max_position_embeddings=none|64|4096 gated=0|1
window_size=none|1|1000000 batch_size=none|1|12 micro_batch_size=none|1|3 depth_first_micro_batches=none|1|2
breadth_first_micro_batches=none|1|2 sequential_micro_batches=none|1|4 lr=0|0.001 min_lr=0|0.0001
train_iters=0|5|1000 lr_warmup=0|5|100 lr_decay_iters=none|5|2000 lr_decay_style=constant|cosine
training_dtype=fp32|bf16|fp16 loss_scale=none|2 initial_loss_scale=0.5|65536 full_precision_gradients=1|0
zero_stage=none|1|2|3|auto layers_per_stage=1.5|auto num_weight_buffers=none|1|20 split_master_weights=0|1
freeze=|head lr_scales=|a:0 dry_run=0|1 save_tensor_logs=0|1 dataset_source=list|random
data_path=|a|0.5,a,0.5,b|0.5,a,b num_workers=0|2 prefetch_factor=none|3 split=1|1,1|0,0,1 validation_iters=0|3
test_iters=0|3 checkpoint_interval=none|2 export_interval=none|2 experiment_dir=none|/x
cross_entropy_splits=none|1|500 cross_entropy_block_size=none|7|1000000 recompute_layers=0|2|100
enable_triton_kernels=none|0|1 rotary_base=none|100 rotary_percent=1|0.5|0.3 rope_type=default|linear|llama3|yarn
rope_factor=none|4 rope_original_max_position_embeddings=none|64 attention_softmax_in_fp32=0|1
attention_backend=auto|flash|math wandb_entity_name=none|me wandb_status_interval=none|2
trackers=none|jsonl|tensorboard,wandb tensorboard_dir=none|/tb watch=|grads,updates watch_histograms=0|1
"""
OPTIONS: dict[str, tuple[Any, ...]] = {
    name: tuple(value_of(name, text) for text in texts.split("|"))
    for name, _, texts in (word.partition("=") for word in TYPED.split())
}


def covering_array(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield combinations that cover every pair of values of any two options: greedily the best of a
    few random rows."""
    names = list(OPTIONS)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(OPTIONS[a]))
        for j in range(len(OPTIONS[b]))
    }
    while left:
        (first, second) = min(left)
        rows = [
            {name: generator.randrange(len(OPTIONS[name])) for name in names}
            | dict((first, second))
            for _ in range(8)
        ]
        covered = [left & set(itertools.combinations(row.items(), 2)) for row in rows]
        best = max(range(len(rows)), key=lambda place: len(covered[place]))
        left -= covered[best]
        yield {name: OPTIONS[name][place] for name, place in rows[best].items()}


def test_pairs_of_options() -> None:
    """About a hundred combinations with every pair of values, and as many random ones near the
    defaults, give either a UsageError or a complete configuration that keeps given values, resolves
    to itself and has printable warnings."""
    generator = random.Random(0)
    rows = list(covering_array(generator))
    for _ in range(400):
        names = generator.sample(list(OPTIONS), 4)
        rows.append({name: generator.choice(OPTIONS[name]) for name in names})
    # Never None once resolved: options whose type says so, and those that follow from other
    # options.
    known = {
        field.name
        for area in AREAS.values()
        for field in dataclasses.fields(area)
        if "None" not in str(field.type)
    }
    known |= {*BATCH, "export_dtype", "lr_decay_iters", "min_lr", "wandb_post_alerts", "zero_stage"}
    good = 0
    for row in rows:
        options = {"dataset_source": "random", **row}
        for world_size in (1, 2):
            try:
                config = resolve(unflatten(options), world_size)
            except UsageError as error:
                assert all(line.startswith("--") for line in str(error).splitlines()), error
                continue
            good += 1
            values = flatten(config)
            assert not {name for name, value in values.items() if value is None} & known
            changed = {
                name for name, value in row.items() if value is not None and values[name] != value
            }
            assert changed <= {"split"}
            batch = config.batch
            assert batch.micro_batch_size is not None and batch.sequential_micro_batches is not None
            assert (
                batch.batch_size
                == batch.micro_batch_size * batch.sequential_micro_batches * world_size
            )
            assert resolve(config, world_size) == config
            assert all(isinstance(line, str) for line in warnings(config))
    assert good > 200


# --- Weighted paths


def test_weighted_paths() -> None:
    """Weights sum to 1; without weights all prefixes have the same."""
    assert weighted_paths(("a",)) == [(1.0, "a")]
    assert weighted_paths(("a", "b")) == [(0.5, "a"), (0.5, "b")]
    assert weighted_paths(("3", "a", "1.", "./7")) == [(0.75, "a"), (0.25, "./7")]
    assert weighted_paths(()) == []


BAD_WEIGHTS = (
    "0.3|0.3 a b|a 0.3|a 0.3 b 0.7|0.3 0.7|0 a 1 b|-1 a 2 b|nan a 1 b|inf a|1e999 a|"
    "1 a nan b|1_0 a 1 b|1e308 a 1e308 b|1 a 2|1 2 3 4"
)


@pytest.mark.parametrize("words", BAD_WEIGHTS.split("|"))
def test_bad_weighted_paths(words: str) -> None:
    """Weights that are not positive and finite, or do not alternate with prefixes, are refused."""
    with pytest.raises(UsageError, match="^--data_path="):
        weighted_paths(words.split())


# --- Warnings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(lr=0.0), "learning rate is 0"),
        (dict(training_dtype="fp16", loss_scale=8.0), "constant loss scale"),
        (dict(use_position_embeddings=False), "neither rotary nor learned"),
        (
            dict(use_rotary_embeddings=True, max_position_embeddings=16),
            "exports state the longer one",
        ),
        (dict(window_size=2048), "--window_size has no effect"),
        (dict(min_lr=1e-5), "--min_lr has no effect with --lr_decay_style=constant"),
        (dict(lr_decay_iters=5), "--lr_decay_iters has no effect"),
        (dict(hysteresis=3), "--hysteresis has no effect with --training_dtype=fp32"),
        (
            dict(
                use_rotary_embeddings=True,
                rope_type="yarn",
                rope_factor=2.0,
                rope_original_max_position_embeddings=9,
            ),
            "--rope_factor=2: max_position_embeddings 2048 is neither rope_original",
        ),
        (dict(rotary_embedding_scale=-1.0), "--rotary_base has no effect"),
        (
            dict(wandb_tags=("x",), trackers=()),
            "--wandb_tags has no effect without --wandb_entity_name or --trackers=wandb",
        ),
    ],
)
def test_warnings(options: dict[str, Any], text: str) -> None:
    """Each surprise is one warning."""
    assert len([line for line in cautions(**options) if text in line]) == 1, cautions(**options)


def test_no_warnings_without_reason() -> None:
    """Defaults and the tutorial's settings cause no warning; a run without a directory causes
    one."""
    assert cautions() == cautions(experiment_name="run", num_workers=2, prefetch_factor=2) == []
    typed = (
        "--training_dtype=bf16 --lr_decay_style=cosine --min_lr=1e-05 --lr_decay_iters=5 --wandb_entity_name=me "
        "--wandb_project_name=x --validation_iters=2 --validation_interval=5 --checkpoint_interval=2 "
        "--max_checkpoints=5 --use_rotary_embeddings=1 --rotary_embedding_scale=-9 --window_size=64 "
        "--num_workers=8 --zero_stage=2 --dataset_source=list --data_path=a"
    )
    assert cautions(**parse(typed.split()).given) == []
    assert warnings(resolved(train_iters=1)) == ["--experiment_dir is not set: nothing is saved"]


def test_flags_cover_the_configuration() -> None:
    """Every option has a flag with its type."""
    assert list(FLAGS) == list(flatten(Config()))
    for name, value in flatten(Config()).items():
        kinds = {"int": int, "float": float, "bool": bool, "str": str}
        expected = tuple if FLAGS[name].is_list else kinds[FLAGS[name].kind]
        assert FLAGS[name].optional if value is None else type(value) is expected


SCHEDULES: list[tuple[int, dict[str, Any], str]] = [
    # (ranks, options, the resolved batch arithmetic: batch, micro, depth, breadth, sequential)
    (1, dict(batch_size_schedule=("0:32", "10:64")), "64 32 2 1 2"),
    (2, dict(batch_size_schedule=("0:32", "10:64")), "64 16 2 1 2"),
    (2, dict(batch_size_schedule=("0:48", "10:32")), "48 8 3 1 3"),
    (2, dict(batch_size_schedule=("0:32", "10:64"), breadth_first_micro_batches=2), "64 8 2 2 4"),
    (2, dict(batch_size_schedule=("0:32", "10:64"), micro_batch_size=4), "64 4 8 1 8"),
    (2, dict(batch_size_schedule=("0:32", "10:64"), sequential_micro_batches=8), "64 4 8 1 8"),
    (1, dict(batch_size_schedule=("0:32", "10:64"), batch_size=64), "64 32 2 1 2"),  # as resolved
    (
        2,
        dict(batch_size_schedule=("0:5", "10:13"), allow_nondivisible_batch_size=True),
        "13 3 3 1 3",
    ),
    # a group of a pipeline divides every size; with padding, it adds none
    (2, dict(batch_size_schedule=("0:4", "6:8"), pipeline_parallel=2), "8 4 2 1 2"),
    (
        2,
        dict(batch_size_schedule=("0:4", "6:8"), pipeline_parallel=2, micro_batch_size=1),
        "8 1 2 4 8",
    ),
    (
        4,
        dict(batch_size_schedule=("0:24", "6:36"), pipeline_parallel=2, micro_batch_size=2),
        "36 2 3 3 9",
    ),
    (
        2,
        dict(batch_size_schedule=("0:4", "6:8"), pipeline_parallel=2, sequential_micro_batches=4),
        "8 2 2 2 4",
    ),
    (
        2,
        dict(batch_size_schedule=("0:5", "6:9"), pipeline_parallel=2, micro_batch_size=2)
        | dict(allow_nondivisible_batch_size=True),
        "9 2 5 1 5",
    ),
    (2, dict(batch_size=13, allow_nondivisible_batch_size=True), "13 7 1 1 1"),
    (2, dict(batch_size=13, micro_batch_size=2, allow_nondivisible_batch_size=True), "13 2 4 1 4"),
    (
        2,
        dict(
            batch_size=13,
            micro_batch_size=2,
            breadth_first_micro_batches=3,
            allow_nondivisible_batch_size=True,
        ),
        "13 2 2 3 6",
    ),
    (
        2,
        dict(batch_size=13, sequential_micro_batches=4, allow_nondivisible_batch_size=True),
        "13 2 4 1 4",
    ),
    (1, dict(batch_size=12, micro_batch_size=3, allow_nondivisible_batch_size=True), "12 3 4 1 4"),
]


@pytest.mark.parametrize(("ranks", "options", "expected"), SCHEDULES, ids=str)
def test_batches_of_a_schedule_and_with_padding(
    ranks: int, options: dict[str, Any], expected: str
) -> None:
    """batch_size is the largest; resolving again changes nothing."""
    config = resolve(unflatten({"dataset_source": "random", "batch_size": None, **options}), ranks)
    assert " ".join(str(getattr(config.batch, name)) for name in BATCH) == expected
    assert resolve(config, ranks) == config


IMPOSSIBLE = """
1 --batch_size=32 --batch_size_schedule=0:32,9:64
    leave batch_size out (it becomes the
1 --batch_size_schedule=5:32
    write 0:<size> first
2 --batch_size_schedule=0:32,9:40 --micro_batch_size=16
    its largest size, 40, must be a
2 --batch_size_schedule=0:24,9:64 --micro_batch_size=16
    every size must be a multiple of 16 * 2 = 32, and 24 is not; write --micro_batch_size=4, or
    --allow_nondivisible_batch_size=1; nearest: 32
2 --batch_size_schedule=0:32,9:64 --micro_batch_size=8 --breadth_first_micro_batches=4
    multiple of 8 * 2 * 4 breadth-first = 64, and 32 is not
2 --batch_size_schedule=0:3,9:6
    must be a multiple of 1 * 2 = 2, and 3 is not; write --allow_
1 --batch_size=5 --sequential_micro_batches=4 --allow_nondivisible_batch_size=1
    3 micro-batches of 2 hold the whole batch, and 1 more would be padding only; write --micro_batch_size=2
2 --batch_size=13 --micro_batch_size=2 --sequential_micro_batches=3 --allow_nondivisible_batch_size=1
    is 4, not 3
2 --batch_size=12 --eval_micro_batch_size=7
    a validation batch has batch_size samples, 6 per rank
1 --validation_iters=all
    random samples never end; write a number of batches
"""


def remedies(message: str) -> Iterator[dict[str, Any]]:
    """Yield what the message says to write or leave out, one alternative after the other."""
    for part in re.split(", or (?=write|--)|; nearest", message.split(": ", 1)[1]):
        left_out = re.findall(r"leave ([\w ]+) out", part)
        changes: dict[str, Any] = {
            name: None for names in left_out for name in names.split(" and ")
        }
        if changes := changes | {
            name: int(value) for name, value in re.findall(r"--(\w+)=(\d+)", part)
        }:
            yield changes


def test_remedies_for_batches_of_a_schedule_lead_out() -> None:
    """Whoever follows each message gets batches in a few steps, or one that says how large a size
    must be."""

    def lead_out(options: dict[str, Any], ranks: int, steps: int) -> None:
        try:
            resolve(unflatten({"dataset_source": "random", "batch_size": None, **options}), ranks)
        except UsageError as error:
            found = list(remedies(str(error)))
            if "leave one of them out" in str(error):
                found = [{name: None} for name in BATCH if "first" in name and name in options]
            assert steps and found or re.search("nearest: |write at most", str(error)), (
                options,
                ranks,
                str(error),
            )
            for changes in found:
                later = {
                    name: value
                    for name, value in {**options, **changes}.items()
                    if value is not None
                }
                lead_out(later, ranks, steps - 1)

    order = dict(
        micro_batch_size=(2, 4), depth_first_micro_batches=(2,), breadth_first_micro_batches=(2, 4)
    )
    choices = [(None, *numbers) for numbers in (*order.values(), (2, 3))]
    for sizes, (ranks, pipeline) in itertools.product(
        ((4, 8), (4, 6), (24, 6, 12)), ((1, 1), (2, 1), (4, 2))
    ):
        schedule = tuple(f"{start}:{size}" for start, size in enumerate(sizes))
        for numbers in itertools.product(*choices):
            typed = dict(zip((*order, "sequential_micro_batches"), numbers, strict=True))
            options = {name: value for name, value in typed.items() if value is not None}
            lead_out(
                dict(batch_size_schedule=schedule, pipeline_parallel=pipeline, **options), ranks, 4
            )


def test_names_that_the_tracker_refuses() -> None:
    """Those that the library itself refuses, and no others."""
    wandb = pytest.importorskip("wandb")
    names = ["team/small", "a:b", "x" * 128, "x" * 129, " a ", "", *string.printable]
    tags: list[tuple[str, ...]] = [
        ("",),
        ("x" * 64,),
        ("x" * 65,),
        ("a", "x" * 65),
        ("a/b", "a/b"),
        (),
    ]
    cases: list[tuple[str, str, Any]] = [("wandb_project_name", "project", name) for name in names]
    for option, theirs, value in [*cases, *(("wandb_tags", "run_tags", value) for value in tags)]:
        try:
            wandb.Settings(**{theirs: value})
        except Exception:
            assert only_problem(**{option: value}).startswith(f"--{option}="), (option, value)
        else:
            resolved(**{option: value})


@pytest.mark.parametrize(("case", "message"), rows(IMPOSSIBLE))
def test_batches_that_cannot_be(case: str, message: str) -> None:
    """Every message has the rule and the fix."""
    ranks, *flags = case.split()
    with pytest.raises(UsageError) as caught:
        resolve(parse([*flags, "--dataset_source=random"]).config, int(ranks))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (dict(hybrid_norm=True), "norm_placement"),
        (dict(num_experts=4), "num_experts"),
        (
            dict(num_experts=4, moe_router_bias_update_rate=0.0),
            "num_experts moe_router_bias_update_rate",
        ),
    ],
)
def test_defaults_that_depend_on_each_other(options: dict[str, Any], names: str) -> None:
    """What was set differs from its default, and what was not set does not."""
    config = resolve(unflatten({"dataset_source": "random"} | options), 1)
    usual = defaults(config)
    found = {name for name, value in flatten(config).items() if value != usual[name]}
    assert found == {"dataset_source", *names.split()}
