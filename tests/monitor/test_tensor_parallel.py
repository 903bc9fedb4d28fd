"""Tensor logs, copies, checks of replicas, --watch and traffic of tensor-parallel ranks, in the
program's own steps."""

import functools
import itertools
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError
from megatron_lite.monitor.tensor_debug import LEVELS
from megatron_lite.monitor.tensor_log import TensorEntry, read_tensor_log
from megatron_lite.outputs.run import Run
from megatron_lite.train import train
from tests.support.harness import parameters_of, run_distributed, start_run, tiny_config
from tests.support.metrics import read_metrics

Options = dict[str, Any]

LLAMA: Options = {
    "normalization_type": "rms_norm",
    "use_rotary_embeddings": True,
    "gated": True,
    "add_linear_biases": False,
    "head_groups": 2,
    "ffn_hidden_size": 96,
    "vocab_size": 61,
    "train_iters": 2,
    "lr": 1e-3,
}
LOGS: Options = {
    **dict.fromkeys(LEVELS, 30),
    "save_tensor_logs": True,
    "show_tensor_logs": False,
    "log_communication": True,
    "watch": ("grads", "params", "updates", "opt_state"),
    "watch_interval": 1,
    "watch_histograms": True,
    "trackers": ("jsonl",),
}
NORM, UP, HEADS = (
    f"blocks.0.{name}"
    for name in ("mlp_norm.weight", "mlp.up.weight", "attention.query_key_value.weight[32:40]")
)
# Ranks of a tensor-parallel group, of four; options. Batches are the same.
LAYOUTS: dict[str, tuple[int, Options]] = {
    "1": (1, {}),
    "2": (2, {"sequence_tensor_parallel": True, "zero_stage": 3, "check_replicas_interval": 1}),
    "4": (4, {"debug_tensor_parallel": True}),
    "local": (4, {"debug_global_tensors": False, "train_iters": 1}),
}


@contextmanager
def started(ranks: Distributed, options: Options) -> Iterator[tuple[Run, list[str]]]:
    """A run, and its messages on this rank."""
    size = ranks.tensor.world_size
    run = start_run(
        ranks, tiny_config(ranks.world_size, **LLAMA | {"tensor_parallel": size} | options)
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    run.logger.addHandler(handler)
    try:
        yield run, lines
    finally:
        run.model.finish()
        run.trackers.close(0)
        run.logger.removeHandler(handler)
        run.experiment.release()


def train_with_fault(run: Run, ranks: Distributed) -> str:
    """Train; in iteration 2, one bit of some weights in use or gradients becomes another on one
    rank. Return the error.

    The weights are those that --check_replicas_interval compares, the gradients those of
    --debug_tensor_parallel.
    """
    forward_backward, config = run.model.forward_backward, run.config

    def faulty(micro_batches: Any) -> torch.Tensor:
        loss = forward_backward(micro_batches)
        if run.iteration == 1 and ranks.rank == 1 and config.distributed.check_replicas_interval:
            for name in (NORM, UP):
                dict(parameters_of(run.model))[name].data.view(torch.int32).view(-1)[-1] ^= 1
        if run.iteration == 1 and ranks.rank == 0 and config.run.debug_tensor_parallel:
            for _, part in run.model.parts():
                for copies in part.replicas.copied:
                    if copies.name in (NORM, HEADS):
                        part.grad_shard.view(torch.int32)[copies.offset] ^= 1
        return loss

    run.model.forward_backward = faulty  # type: ignore[method-assign]
    try:
        train(run)
    except NumericsError as error:
        return str(error)
    return ""


def story(ranks: Distributed, root: str) -> dict[str, tuple[str, list[str]]]:
    """Error and messages of each layout with all logs, on this rank."""
    found = {}
    for place, (name, (size, options)) in enumerate(LAYOUTS.items()):
        divide(ranks, dist.new_group, DistributedConfig(tensor_parallel=size))
        with started(ranks, {**LOGS, **options, "experiment_dir": f"{root}/{place}"}) as (
            run,
            lines,
        ):
            found[name] = train_with_fault(run, ranks), lines
    return found


@functools.cache
def results() -> tuple[
    list[dict[str, tuple[str, list[str]]]], dict[str, dict[str, TensorEntry]], list[Any]
]:
    """What `story` returned on each rank; tensor logs by layout and, of local ones, rank; records
    of --watch."""
    with tempfile.TemporaryDirectory() as root:
        found = run_distributed(4, story, root)
        logs, watched = {}, []
        for place, name in enumerate(LAYOUTS):
            folder = Path(root) / str(place)
            artifacts = folder / "runs" / "0" / "artifacts"
            if name == "local":
                logs |= {f"local {rank}": all_logged(artifacts, rank) for rank in range(4)}
                continue
            logs[name] = all_logged(artifacts, 0)
            records = [
                line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "watch"
            ]
            watched.append([*zip(records, read_metrics(folder / "watch.jsonl"), strict=False)][:1])
            assert all(path.stem.endswith("_000") for path in artifacts.iterdir())
    return found, logs, watched


def all_logged(artifacts: Path, rank: int) -> dict[str, TensorEntry]:
    """Entries of the initial weights and the first iteration, by phase and name."""
    return {
        f"{phase} {entry.name}": entry
        for phase in ("init", "train_00001")
        for entry in read_tensor_log(artifacts / f"tensor_logs_{phase}_rank_{rank:03d}.safetensors")
    }


@pytest.mark.parametrize("layout", [pytest.param("2", marks=pytest.mark.slow), "4"])
def test_global_logs_are_those_of_data_parallel_ranks(layout: str) -> None:
    """Whole parameters, their gradients, hidden states of all tokens and theirs: initial weights to
    the bit."""
    (_, logs, _), kinds = results(), set()
    expected, found = logs["1"], logs[layout]
    for name, entry in found.items():
        other = expected[name]
        assert (
            entry.samples is not None and other.samples is not None and entry.shape == other.shape
        ), name
        kinds.add(name.removesuffix(", mb=1/1").split()[-1])
        if name.startswith("init"):
            assert torch.equal(entry.samples, other.samples), name
        scale = float(other.samples.abs().max())
        np.testing.assert_allclose(
            entry.samples, other.samples, rtol=0, atol=2e-5 * scale, err_msg=name
        )
    assert found.keys() == expected.keys() and kinds == {
        "init",
        "fw",
        "bw",
        "gradient",
        "shards",
        "update",
    }


def test_local_logs_are_the_parts_of_each_rank() -> None:
    """With the indices of a part in its name; together they are the whole parameter."""
    logs = results()[1]
    whole = logs["4"]["init blocks.1.mlp.down.weight init"]
    assert whole.samples is not None
    of_ranks = [
        logs[f"local {rank}"][
            f"init blocks.1.mlp.down.weight[:, {24 * rank}:{24 * rank + 24}] init"
        ]
        for rank in range(4)
    ]
    parts = [entry.samples.view(32, 24) for entry in of_ranks if entry.samples is not None]
    assert torch.equal(torch.cat(parts, dim=1).flatten(), whole.samples)
    heads = "init blocks.0.attention.query_key_value.weight[8:16 + 32:40 + 48:56] init"
    assert logs["local 1"][heads].shape == (24, 32)


def test_copies_that_differ_are_named() -> None:
    """By rank 0, with the number of elements; a phase without differences has a line that says
    so."""
    found = [
        [line for line in rank["4"][1] if "copies" in line or "MISMATCH" in line]
        for rank in results()[0]
    ]
    equal, *others = found[0]
    assert not any(found[1:])
    assert re.fullmatch(
        r"train_00001 \| the copies of \d+ tensors are equal in all tensor-parallel groups", equal
    )
    where = "train_00002 | MISMATCH {} gradient: 1 / {} elements, between rank 0 and its group"
    assert others[:2] == [where.format(NORM, 32), where.format(HEADS, 256)]
    assert all(line.split(":")[0].endswith(" update") for line in others[2:])


GPT2: Options = {
    "normalization_type": "layer_norm",
    "use_rotary_embeddings": False,
    "gated": False,
    "add_linear_biases": True,
    "head_groups": None,
    "random_bias_init": True,
}
EQUAL: list[Options] = [
    {**GPT2, "hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    {**GPT2, "parallel_embeddings": False, "training_dtype": "bf16", "ema_type": "ema"},
    {**GPT2, "input_embedding_norm": True, "optimizer": "lion", "mlp_recompute_level": "full"},
    {"head_groups": 1, "qk_layernorm": True, "recompute_layers": 2, "window_size": 5},
    {"hybrid_norm": True, "training_dtype": "fp16", "zero_stage": 3},
    {"optimizer": "muon", "training_dtype": "bf16", "split_master_weights": True},
    {"update_rms_clip": 0.5, "hidden_size": 64, "head_groups": 1, "freeze": ("*.mlp_norm.*",)},
]


def all_equal(ranks: Distributed) -> list[list[str]]:
    found = []
    for size, splits_tokens, options in itertools.product((2, 4), (False, True), EQUAL):
        divide(ranks, dist.new_group, DistributedConfig(tensor_parallel=size))
        checks: Options = {"debug_tensor_parallel": True, "check_replicas_interval": 1, "lr": 1e-2}
        with started(ranks, {**checks, **options, "sequence_tensor_parallel": splits_tokens}) as (
            run,
            lines,
        ):
            train(run)
            found.append([line for line in lines if "copies" in line or "MISMATCH" in line])
    return found


@pytest.mark.slow
def test_copies_stay_equal() -> None:
    """After dropout, recomputation, low precision, clipping, frozen parts, with every optimizer's
    kind of update."""
    for lines in run_distributed(4, all_equal)[0]:
        assert len(lines) == 2 and not any("MISMATCH" in line for line in lines), lines


def test_replicas_that_differ_end_the_run() -> None:
    """A part is compared over data-parallel ranks, a copy over all: the message is the same on all
    ranks."""
    found = [rank["2"] for rank in results()[0]]
    (message,) = {error for error, _ in found}
    assert f"{NORM} on rank 1" in message and "in iteration 2: " in message
    assert f"{UP}[144:192] on 2 of 2 ranks (1, 3), without a majority" in message
    assert "the last check without a difference was at iteration 1" in message
    assert "all ranks hold the same state" in "".join(found[0][1])


def test_watch_counts_every_element_once() -> None:
    """Statistics of all parameters together and of each are those of data-parallel ranks;
    histograms have all."""
    first, *others = results()[2]
    assert (
        len(first) == 1
        and {"grads/norm", "updates/zeros", "exp_avg_sq/largest"} <= first[0][0].keys()
    )
    shapes = {
        name.split()[1]: entry.shape
        for name, entry in results()[1]["1"].items()
        if name.startswith("init ")
    }
    for steps in others:
        for (record, line), (expected, other) in zip(steps, first, strict=True):
            assert (
                record.keys() == expected.keys()
                and line["parameters"].keys() == other["parameters"].keys()
            )
            for name in expected:
                if "/" in name:
                    assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-9), name
            for target, parameters in line["parameters"].items():
                assert parameters.keys() == shapes.keys()
                for name, statistics in parameters.items():
                    assert statistics == pytest.approx(
                        other["parameters"][target][name], rel=1e-3, abs=1e-6
                    ), name
                    counts = line["histograms"][target]["counts"][name]["counts"]
                    assert sum(counts) == np.prod(shapes[name]), (target, name)


def test_traffic_has_names() -> None:
    """Every kind of a step has a line."""
    for layout, kinds in (("4", "reductions sums"), ("2", "gathers reductions sums")):
        lines = "\n".join(results()[0][0][layout][1])
        for kind in kinds.split():
            assert f"communication | tensor {kind} per iteration: " in lines
