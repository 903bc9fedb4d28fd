"""Predicted times: the work of a step has the FLOPs that the log counts, and hostile files of
speeds are one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.errors import UsageError
from megatron_lite.kernels import tensor_collectives
from megatron_lite.kernels.tensor_collectives import GATHER, REDUCE, SUM
from megatron_lite.monitor.metrics import hardware_flops
from megatron_lite.planner.devices import KINDS_IN_LAYERS, LINK_SHARE, data_sheet
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.speeds import (
    ATTENTION_KINDS,
    PRODUCT_KINDS,
    Attention,
    CollectiveSpeed,
    Pass,
    Product,
    read_speeds,
)
from megatron_lite.planner.work_time import micro_batch_work, predict_step
from pretrain_gpt import main
from scripts.docs.dry_runs import PUBLISHED_SPEEDS, planned_step
from tests.support.harness import tiny_config
from tests.support.launch import TINY
from tests.support.plans import one_plan

LLAMA: dict[str, Any] = dict(
    use_rotary_embeddings=True,
    gated=True,
    normalization_type="rms_norm",
    add_linear_biases=False,
    head_groups=2,
)


def flops_of(plan: Plan) -> float:
    """Return the FLOPs of products and attention in all micro-batches."""
    work = micro_batch_work(plan)
    micro_batches = plan.config.batch.sequential_micro_batches or 0
    return micro_batches * sum(
        count * item.flops for item, count in work.items() if not isinstance(item, Pass)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        LLAMA,
        dict(
            mlp_recompute_level="full",
            depth_first_micro_batches=2,
            breadth_first_micro_batches=2,
            num_layers=3,
        ),
        dict(recompute_layers=1, tie_word_embeddings=False, window_size=5, **LLAMA),
        dict(window_size=5, attention_pattern=("window", "full"), num_layers=3, **LLAMA),
        dict(cross_entropy_block_size=16, mlp_recompute_level="none,full:1"),
        dict(training_dtype="bf16", qk_layernorm=True, kv_channels=12, cross_entropy_splits=4),
    ],
    ids=str,
)
def test_work_has_the_flops_that_the_log_counts(options: dict[str, Any]) -> None:
    """Products and attention of all micro-batches add up to `hardware_tflops` times the step's
    time, for one rank."""
    config = tiny_config(1, **options)
    flops = flops_of(one_plan(config, 1, "cpu"))
    assert config.batch.batch_size
    tokens = config.batch.batch_size * config.batch.sequence_length
    expected = hardware_flops(
        config.model, config.performance, config.batch.sequence_length, tokens
    )
    assert flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**LLAMA, "parallel_embeddings": False},
        dict(LLAMA, head_groups=4, overlap_tensor_reduce=True),
    ],
    ids=str,
)
def test_ranks_that_share_layers_share_the_flops(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 and 4 ranks add up to one, but for copied key/value heads, and a whole head of whole
    tokens."""
    monkeypatch.setattr(tensor_collectives, "FEWEST_TOKENS", 2)
    for splits in (False, True):
        flops = []
        for ranks in (1, 2, 4):
            config = tiny_config(
                ranks, tensor_parallel=ranks, sequence_tensor_parallel=splits, **options
            )
            tokens, h = 16 * 4, config.model.hidden_size
            has_copies = options.get("head_groups") == 2 and ranks == 4
            # of keys and values, in two blocks
            copies = 2 * 6 * tokens * h * 2 * (2 * 8) if has_copies else 0
            if not config.distributed.parallel_embeddings and not splits:
                copies += (ranks - 1) * 6 * tokens * h * config.model.vocab_size
            flops.append(ranks * flops_of(one_plan(config, ranks, "cpu")) - copies)
        assert flops == pytest.approx([flops[0]] * 3, rel=1e-9), splits


def test_exchanges_inside_of_passes_take_time() -> None:
    """Eight of a block's ten sequence-parallel collectives overlap with products, two of its four
    all-reduces; in two halves, half of each of the others does.

    What a slower link adds is added to the step, but for what hides.
    """
    for splits, halves, share in (
        (True, 0, 8 / 10),
        (True, 1, 9 / 10),
        (False, 0, 2 / 4),
        (False, 1, 3 / 4),
    ):
        options = dict(
            tensor_parallel=2, sequence_tensor_parallel=splits, num_layers=30, training_dtype="bf16"
        )
        options |= dict(overlap_tensor_reduce=halves, sequence_length=256, micro_batch_size=1)
        config = tiny_config(4, **options)
        plan = one_plan(config, 4, "cuda")
        overlaps = [
            (overlap, count) for cost in plan.costs for overlap, count in cost.overlaps.items()
        ]
        overlapped = sum(overlap.wire_bytes * count for overlap, count in overlaps)
        micro_batches = config.batch.sequential_micro_batches or 0
        inside = sum(
            plan.traffic[kind].wire_bytes for kind in (GATHER, REDUCE) if kind in plan.traffic
        )
        assert micro_batches * overlapped / inside == pytest.approx(share, rel=0.02)
        sheet = data_sheet(config.distributed, "cuda", 4)
        far = dict.fromkeys(KINDS_IN_LAYERS, CollectiveSpeed(20e-6, 1e9 * LINK_SHARE))
        slow = dataclasses.replace(sheet, collectives=sheet.collectives | far)
        fast, slower = (predict_step(plan, speeds) for speeds in (sheet, slow))
        inside += plan.traffic[SUM].wire_bytes
        near = sheet.collectives[SUM].bytes_per_s
        added = inside / 1e9 / LINK_SHARE - inside / near
        assert slower.communication_s - fast.communication_s == pytest.approx(added)
        assert slower.exposed_s > fast.exposed_s > (1 - share) * inside * LINK_SHARE / near


def test_neighbours_share_the_links_of_a_node() -> None:
    """On 32 H100 a ring of two GPUs a node has 2 of 8 adapters; the four that share layers have
    NVLink, 16 all 8."""
    options: dict[str, Any] = dict(num_attention_heads=16, batch_size=32, device="cuda")
    configs = [
        tiny_config(32, tensor_parallel=ranks, **options).distributed for ranks in (1, 4, 16)
    ]
    sheets = [data_sheet(config, "cuda", 32) for config in configs]
    for kind, expected in (("gather", [400, 100, 50]), (SUM, [400, 450, 400])):
        assert [sheet.collective_s(kind, 0, 1e9) for sheet in sheets] == pytest.approx(
            [1 / gb_s / LINK_SHARE for gb_s in expected]
        )
    assert "neighbours with 450 GB/s" in sheets[1].assumptions[-1]
    assert sheets[1].collective_s("tensor reduce", 0, 1e9) < sheets[1].collective_s(
        "reduce", 0, 1e9
    )


def test_hybrid_shards_have_the_links_of_a_node() -> None:
    """On 4 nodes of 8 H100 a group inside a node has NVLink, and each of the S rings between nodes
    its part of 8 adapters; larger groups have the whole ring, as all other traffic."""
    for shard, tensor, near, far in (
        (8, 1, 450, 50),
        (4, 1, 450, 100),
        (4, 2, 450, 50),
        (16, 1, 400, 50),
    ):
        options = dict(
            data_parallel_shard=shard,
            tensor_parallel=tensor,
            zero_stage=3,
            batch_size=32,
            device="cuda",
        )
        config = tiny_config(32, **options)
        sheet, ring = data_sheet(config.distributed, "cuda", 32), 400 / tensor
        kinds = {
            "gather": near,
            "reduce": near,
            "replica gather": far,
            "replica reduce": far,
            "muon gather": ring,
        }
        for kind, gb_s in kinds.items():
            assert sheet.collective_s(kind, 0, 1e9) == pytest.approx(1 / gb_s / LINK_SHARE), (
                shard,
                tensor,
                kind,
            )
        times = [predict_step(one_plan(config, 32, "cuda"), sheet).communication_s]
        plan = one_plan(tiny_config(32, **{**options, "data_parallel_shard": 0}), 32, "cuda")
        times.append(
            predict_step(plan, data_sheet(plan.config.distributed, "cuda", 32)).communication_s
        )
        assert times[0] != times[1]


def test_frozen_parameters_make_no_weight_gradients() -> None:
    """A frozen embedding and first block leave their three products a layer to the forward pass
    alone."""
    whole = tiny_config(1, num_layers=2, tie_word_embeddings=False)
    part = tiny_config(1, num_layers=2, tie_word_embeddings=False, freeze=("embedding", "blocks.0"))
    flops = [flops_of(one_plan(config, 1, "cpu")) for config in (whole, part)]
    block = hardware_flops(whole.model, whole.performance, 16, 64) - hardware_flops(
        tiny_config(1, num_layers=1, tie_word_embeddings=False).model, whole.performance, 16, 64
    )
    forward = 1 / 3.5  # of its attention; of its products a third
    assert flops[0] - block < flops[1] < flops[0] - (1 - forward) * block * 0.9


def test_more_ranks_expose_more_of_the_link() -> None:
    """One rank waits for no link; a slower link never shortens a step; one buffer hides nothing."""
    seconds = []
    for ranks, link, options in (
        (1, 450, {}),
        (2, 450, {}),
        (2, 1, {}),
        (2, 1, dict(num_weight_buffers=1)),
    ):
        links = dict(device="cuda", interconnect=f"nvlink:{link}")
        config = tiny_config(
            ranks, zero_stage=3, training_dtype="bf16", batch_size=4 * ranks, **links, **options
        )
        time = predict_step(
            one_plan(config, ranks, "cuda"), data_sheet(config.distributed, "cuda", ranks)
        )
        assert time.tokens == 4 * ranks * 16 and (time.communication_s > 0) == (ranks > 1)
        seconds.append(time.exposed_s)
    assert seconds[0] == 0 < seconds[1] < seconds[2] < seconds[3]


def test_passes_count_every_tensor_once() -> None:
    """On a CPU silu reads the gate and writes as much; on a GPU SwiGLU's kernel also reads the
    other half."""
    config = tiny_config(1, **LLAMA, ffn_hidden_size=96, num_layers=1)
    for device, kind, tensors in (("cpu", "silu", 2), ("cuda", "_activate_kernel", 3)):
        assert Pass(kind, tensors * 64 * 96 * 4) in micro_batch_work(one_plan(config, 1, device)), (
            device
        )


@pytest.mark.parametrize(("gpu", "ranks", "flags", "published"), PUBLISHED_SPEEDS)
def test_published_speeds_of_a_mistral_7b(
    gpu: str, ranks: int, flags: str, published: float
) -> None:
    """Tokens per second and GPU in Fast-LLM's tutorial, whose engine this one follows: within 3
    %."""
    _, time = planned_step(gpu, ranks, flags)
    assert time.tokens_per_s / ranks == pytest.approx(published, rel=0.03)


# -- measured speeds
# -------------------------------------------------------------------------------------------------


def measured(tmp_path: Path, **changes: Any) -> Path:
    """Return a file as `scripts.benchmarks.machine` writes it: every product 1 GFLOP/s, copies 1
    GB/s."""
    table = [[[1e9, 1e9]]]
    entry = {
        "products": {
            "tokens": [64],
            "inputs": [64],
            "outputs": [64, 1024],
            "flops_per_s": dict.fromkeys(PRODUCT_KINDS, table),
        },
        "attention_flops_per_s": dict.fromkeys(ATTENTION_KINDS, [[64, 1e9], [256, 4e9]]),
        "seconds_per_byte": {"copy_": 1e-9, "sum": 2e-9},
    }
    values = {
        "format": "megatron_lite_machine_speeds",
        "version": 2,
        "device": "a processor",
        "device_type": "cpu",
        "world_size": 2,
        "threads": 1,
        "dtypes": {"fp32": entry},
        "collectives": {"gather": {"latency_s": 1e-3, "bytes_per_s": 1e6}},
        "overlap": 0.5,
        "block_s": 1e-3,
        "step_s": 0.5,
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**values, **changes}))
    return path


def test_measured_speeds_add_up(tmp_path: Path) -> None:
    """Products at 1 GFLOP/s take a second per GFLOP; lengths between two measured ones have a rate
    between theirs; the host's time of blocks and step comes on top, and half of the collectives
    hides."""
    speeds = read_speeds(measured(tmp_path))
    assert speeds.item_s(Product("forward", 100, 200, 300, 2), "fp32") == pytest.approx(
        2 * 2 * 100 * 200 * 300 / 1e9
    )
    work = Attention("fused forward", 8, 128, 64, 128)
    assert speeds.item_s(work, "fp32") == pytest.approx(work.flops / 2e9)
    for kind, seconds in (("sum", 2e-6), ("unknown", 1e-6)):  # the latter as a copy
        assert speeds.item_s(Pass(kind, 1000), "fp32") == pytest.approx(seconds)
    config = tiny_config(2, num_layers=3, batch_size=8, micro_batch_size=2)
    plan = one_plan(config, 2, "cpu")
    time = predict_step(plan, speeds)
    assert time.parts["host"] == pytest.approx(0.5 + 2 * 3 * 1e-3)
    wire_bytes, count = (
        sum(getattr(total, name) for total in plan.traffic.values())
        for name in ("wire_bytes", "collectives")
    )
    assert time.communication_s == pytest.approx(count * 1e-3 + wire_bytes / 1e6)
    assert time.communication_s / 2 < time.exposed_s < time.communication_s


def test_a_dry_run_reads_measured_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table names their source; the recommended command does not take the flag over."""
    flags = [*TINY, "--dry_run=1", "--world_size=2", f"--machine_speeds={measured(tmp_path)}"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "measured on a processor" in text and "50% of a collective overlaps" in text
    assert "machine_speeds" not in text.rpartition("run this")[2] and "measure again" not in text
    measured(tmp_path, threads=3)
    assert main(flags) == 0
    assert "here the run has 1 thread a rank" in capsys.readouterr().out


def test_speeds_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan refuses the speeds of another device or dtype, and files of an older version, in one
    line."""
    for flag, said, changes in (
        (
            "--training_dtype=bf16",
            "measured in fp32, not in bf16; measure again with --dtypes=bf16",
            {},
        ),
        ("--device=cuda", "measured on cpu, and the plan is for cuda", {}),
        (
            "--device=cpu",
            "its format is not megatron_lite_machine_speeds of version 2",
            {"version": 1},
        ),
    ):
        assert (
            main([*TINY, "--dry_run=1", f"--machine_speeds={measured(tmp_path, **changes)}", flag])
            == 2
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


HOSTILE: list[Any] = [
    "",
    "[]",
    "nonsense",
    "[" * 100_000,
    '{"format": "megatron_lite_machine_speeds", "version": 1}',
    '{"format": "megatron_lite_machine_speeds", "version": 2}',
    *(
        {key: value}
        for key in (
            "device",
            "device_type",
            "world_size",
            "threads",
            "dtypes",
            "collectives",
            "overlap",
            "block_s",
        )
        for value in (None, [], {"a": 1}, "", -1, 1e400, "line\nbreak", True)
    ),
    {"dtypes": {"fp32": {"products": {}}}},
    {"collectives": {"gather": {"latency_s": 1e-3, "bytes_per_s": 0}}},
    {"collectives": {"gather": [1, 2]}},
]


def test_hostile_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No content of the file, no folder and no missing file gives a traceback: one line that names
    the flag."""
    path = tmp_path / "machine.json"
    for content in [*HOSTILE, b"\xff\xfe", "0" * 2_000_000]:
        if isinstance(content, dict):
            measured(tmp_path, **content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError) as caught:
            read_speeds(path)
            pytest.fail(f"accepted {content!r:.200}")
        message = str(caught.value)
        assert "\n" not in message and message.startswith("--machine_speeds="), (content, message)
        assert len(message) < 400 + len(str(path)) and "scripts.benchmarks.machine" in message
    for place in (tmp_path, tmp_path / "missing", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="--machine_speeds="):
            read_speeds(place)
    assert main([*TINY, "--dry_run=1", f"--machine_speeds={tmp_path}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
