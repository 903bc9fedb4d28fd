"""Tensor logs, copies, checks of replicas, --watch and traffic of tensor-parallel ranks, in the program's own steps."""

from __future__ import annotations

import functools
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError
from megatron_lite.monitor.tensor_debug import LEVELS
from megatron_lite.monitor.tensor_log import TensorEntry, read_tensor_log
from megatron_lite.monitor.trackers import read_metrics
from megatron_lite.parameter import Block, Initializer, ParameterSpec, Split, part_name
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.setup_run import Run, build
from megatron_lite.train import train
from tests.support.harness import run_distributed, tiny_config

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
}
WATCH: Options = {"watch": ("grads", "params", "updates", "opt_state"), "watch_interval": 1, "trackers": ("jsonl",)}
SPLIT: Options = {"sequence_tensor_parallel": True}
# Ranks of a tensor-parallel group, of four; options. Batches are the same.
LAYOUTS: dict[str, tuple[int, Options]] = {
    "1": (1, {}),
    "2": (2, {"zero_stage": 3}),
    "2, tokens split": (2, SPLIT),
    "4": (4, {**SPLIT, "zero_stage": 2}),
}


@contextmanager
def started(ranks: Distributed, options: Options) -> Iterator[tuple[Run, list[str]]]:
    """A run, and its messages on this rank."""
    size = ranks.tensor.world_size
    config, stop = tiny_config(ranks.world_size, **LLAMA | {"tensor_parallel": size} | options), StopSignal()
    run = build(config, ranks, Experiment(config, ranks), stop, ())
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
        stop.restore()
        run.experiment.release()


def after_gradients(run: Run, fault: Callable[[], None]) -> None:
    """Call a function between the gradients and the update of iteration 2."""
    forward_backward = run.model.forward_backward

    def faulty(micro_batches: Any) -> torch.Tensor:
        loss = forward_backward(micro_batches)
        if run.iteration == 1:
            fault()
        return loss

    run.model.forward_backward = faulty  # type: ignore[method-assign]


def copies(ranks: Distributed, options: Options, faulty_rank: int) -> list[str]:
    """Lines of --debug_tensor_parallel if one bit of a gradient is another on one rank."""
    with started(ranks, {"debug_tensor_parallel": True, **options}) as (run, lines):

        def fault() -> None:
            for _, part in run.model.parts():
                copied = {copy.name: copy for copy in part.replicas.copied}
                for name in ("blocks.0.mlp_norm.weight", "blocks.1.attention.query_key_value.weight[32:40]"):
                    if name in copied and ranks.rank == faulty_rank:
                        part.grad_shard.view(torch.int32)[copied[name].start] ^= 1

        after_gradients(run, fault)
        train(run)
    return [line for line in lines if "MISMATCH" in line or "copies" in line]


def replicas(ranks: Distributed, options: Options, name: str, faulty_rank: int) -> str:
    """The error of --check_replicas_interval if one bit of a weight in use is another on one rank."""
    with started(ranks, {"check_replicas_interval": 1, "train_iters": 3, **options}) as (run, lines):

        def fault() -> None:
            if ranks.rank == faulty_rank:
                dict(run.model.parameters())[name].data.view(torch.int32)[(-1,) * len(name.split()) or -1] ^= 1

        after_gradients(run, fault)
        try:
            train(run)
        except NumericsError as error:
            assert ranks.rank or "all ranks hold the same state" in "".join(lines)
            return str(error)
    return ""


def story(ranks: Distributed, root: str) -> dict[str, Any]:
    """Every layout with all logs, then faults."""
    found: dict[str, Any] = {}
    for place, (name, (size, options)) in enumerate(LAYOUTS.items()):
        ranks.divide(size, dist.new_group)
        with started(ranks, {**LOGS, **WATCH, **options, "experiment_dir": f"{root}/{place}"}) as (run, lines):
            train(run)
            found[f"traffic, {name}"] = [line for line in lines if line.startswith("communication")]
        if name == "2":
            found["copies"] = copies(ranks, options, faulty_rank=1)
            up, norm = "blocks.0.mlp.up.weight", "blocks.0.mlp_norm.weight"
            found["replicas, split"] = replicas(ranks, options, up, faulty_rank=1)
            found["replicas, copied"] = replicas(ranks, options, norm, faulty_rank=1)
    found["copies, heads"] = copies(ranks, SPLIT, faulty_rank=0)
    with started(ranks, {**LOGS, "debug_global_tensors": False, "experiment_dir": f"{root}/local"}) as (run, _):
        train(run)
    return found


@functools.cache
def results() -> tuple[list[dict[str, Any]], dict[str, dict[str, TensorEntry]], list[list[dict[str, Any]]]]:
    """What `story` returned on each rank; tensor logs by layout; records of --watch by layout."""
    with tempfile.TemporaryDirectory() as root:
        found = run_distributed(4, story, root)
        logs, watched = {}, []
        for place, name in enumerate(LAYOUTS):
            folder = Path(root) / str(place)
            logs[name] = all_logged(folder, 0)
            watched.append([line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "watch"])
            (run,) = (folder / "runs").iterdir()
            assert {path.name[-15:-12] for path in (run / "artifacts").iterdir()} == {"000"}
        logs |= {f"local {rank}": all_logged(Path(root) / "local", rank) for rank in range(4)}
    return found, logs, watched


def all_logged(folder: Path, rank: int) -> dict[str, TensorEntry]:
    """Entries of all phases, by phase and name."""
    phases = ("init", "train_00001", "train_00002")
    artifacts = folder / "runs" / "0" / "artifacts"
    return {
        f"{phase} {entry.name}": entry
        for phase in phases
        for entry in read_tensor_log(artifacts / f"tensor_logs_{phase}_rank_{rank:03d}.safetensors")
    }


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_global_logs_are_those_of_data_parallel_ranks(layout: str) -> None:
    """Whole parameters, their gradients, hidden states of all tokens and theirs: initial weights to the bit."""
    (_, logs, _), kinds = results(), set()
    expected, found = logs["1"], logs[layout]
    for name, entry in found.items():
        if "gradient shards" in name:  # in the order of memory
            continue
        other = expected[name]
        assert entry.samples is not None and other.samples is not None and entry.shape == other.shape, name
        kinds.add(name.removesuffix(", mb=1/1").split()[-1])
        if name.startswith("init"):
            assert torch.equal(entry.samples, other.samples), name
        scale = float(other.samples.abs().max())
        np.testing.assert_allclose(entry.samples, other.samples, rtol=0, atol=2e-5 * scale, err_msg=name)
    assert found.keys() == expected.keys() and kinds == {"init", "fw", "bw", "gradient", "update"}


def test_local_logs_are_the_parts_of_each_rank() -> None:
    """With the indices of a part in its name; together they are the whole parameter."""
    logs = results()[1]
    whole = logs["4"]["init blocks.1.mlp.down.weight init"]
    assert whole.samples is not None
    of_ranks = [
        logs[f"local {rank}"][f"init blocks.1.mlp.down.weight[:, {24 * rank}:{24 * rank + 24}] init"]
        for rank in range(4)
    ]
    parts = [entry.samples.view(32, 24) for entry in of_ranks if entry.samples is not None]
    assert torch.equal(torch.cat(parts, dim=1).flatten(), whole.samples)
    heads = "init blocks.0.attention.query_key_value.weight[8:16 + 32:40 + 48:56] init"
    assert logs["local 1"][heads].shape == (24, 32)


def test_names_of_parts() -> None:
    block = Block.of(8, 2)
    spec = ParameterSpec("w", (8, 3), Initializer("constant", 0.0), split=Split(2, 1, 0, (block,)))
    assert part_name(spec, spec.pieces) == "w[4:8]"
    whole = ParameterSpec("w", (8, 3), Initializer("constant", 0.0), split=Split(2, 1))
    assert part_name(whole, whole.pieces) == "w"


def test_copies_that_differ_are_named() -> None:
    """By rank 0, with the number of elements; a phase without differences has a line that says so."""
    found = results()[0]
    equal, *others = found[0]["copies"]
    assert not any(rank["copies"] for rank in found[1:])
    assert re.fullmatch(r"train_00001 \| the copies of \d+ tensors are equal in all tensor-parallel groups", equal)
    where = "train_00002 | MISMATCH blocks.0.mlp_norm.weight {}: 1 / 32 elements, between rank 0 and its group"
    assert others in ([where.format("gradient")], [where.format("gradient"), where.format("update")])
    heads = [line for line in found[0]["copies, heads"] if "MISMATCH" in line and "gradient" in line]
    name = "blocks.1.attention.query_key_value.weight[32:40]"
    assert len(heads) == 2 and heads[1].startswith(f"train_00002 | MISMATCH {name} gradient: 1 / 256 elements")


def test_replicas_that_differ_end_the_run() -> None:
    """A part is compared over data-parallel ranks, a copy over all: the message is the same on all ranks."""
    found = results()[0]
    for kind in ("split", "copied"):
        assert len({rank[f"replicas, {kind}"] for rank in found}) == 1
    split, copied = (found[0][f"replicas, {kind}"] for kind in ("split", "copied"))
    name = r"blocks\.0\.mlp\.up\.weight\[144:192\]"
    assert re.search(rf"in iteration 2: {name} on 2 of 2 ranks \(1, 3\), without a majority\. ", split), split
    assert "in iteration 2: blocks.0.mlp_norm.weight on rank 1. " in copied, copied


def test_watch_counts_every_element_once() -> None:
    """All statistics of all parameters together are those of data-parallel ranks."""
    first, *others = results()[2]
    assert len(first) == 2 and {"grads/norm", "updates/zeros", "exp_avg_sq/largest"} <= first[0].keys()
    for records in others:
        for record, expected in zip(records, first, strict=True):
            assert record.keys() == expected.keys()
            for name in expected:
                if "/" in name:
                    assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-9), name


def test_traffic_has_names() -> None:
    """Every kind of a step has a line."""
    found = results()[0][0]
    for layout, kinds in (("2", "reductions sums"), ("2, tokens split", "gathers reductions sums")):
        lines = "\n".join(found[f"traffic, {layout}"])
        for kind in kinds.split():
            assert f"communication | tensor {kind} per iteration: " in lines
