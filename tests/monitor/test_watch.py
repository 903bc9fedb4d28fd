"""--watch: statistics of shards against plain sums over the gathered tensors, with every ZeRO stage
and optimizer."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config import Config, TrackingConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.trackers.opening import open_trackers
from megatron_lite.monitor.watch import (
    BINS,
    EDGES,
    Histogram,
    Summary,
    Watch,
    Watched,
    bin_places,
    summarize,
)
from tests.support import launch
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed, tiny_config
from tests.support.metrics import read_metrics
from tests.support.whole_parameters import fill_gradients

EVERYTHING = TrackingConfig(
    watch=("grads", "params", "updates", "opt_state"),
    watch_interval=2,
    watch_per_layer=True,
    watch_histograms=True,
)
Values = dict[str, dict[str, Summary]]


class Recorder:
    """Trackers that keep what they get."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], Watched]] = []

    def log(self, record: dict[str, Any], watched: Watched) -> None:
        self.got.append((record, watched))


def watch(engine: Engine, options: TrackingConfig = EVERYTHING) -> tuple[Watch, Recorder]:
    recorder = Recorder()
    scale = engine.optimizer.loss_scale.scale
    config = replace(tiny_config(train_iters=20), tracking=options)
    return Watch(config, engine.model, scale, {}, engine.ranks, recorder.log), recorder  # type: ignore[arg-type]


def full(engine: Engine, kind: str) -> dict[str, Tensor]:
    """The whole trainable parameters, or their gradients or optimizer state, from the shards of all
    ranks, in fp64."""
    found = {}
    for _, part in engine.model.parts():
        if part.has_state and (kind in ("weights", "gradients") or kind in part.moments):
            shard = part.grad_shard if kind == "gradients" else part.read(kind)
            flat = engine.ranks.gathered(shard.clone(), "debug").flatten()
            for slot in part.layout.slots:
                if part.has(kind, slot.spec):
                    found[slot.spec.name] = flat[slot.offset : slot.end].double()
    return found


def plain(tensor: Tensor) -> Summary:
    """The statistics by their definition."""
    norm, largest = float(tensor.square().sum().sqrt()), float(tensor.abs().max())
    return Summary(
        norm, norm / math.sqrt(tensor.numel()), largest, float((tensor == 0).double().mean())
    )


def step(
    engine: Engine, watcher: Watch, iteration: int, whole_gradients: bool
) -> dict[str, dict[str, Tensor]]:
    """One training step; returns the gathered tensors that belong to it."""
    engine.model.gather_ahead()
    if whole_gradients:
        # squares of their squares are below what fp32 holds
        fill_gradients(engine, iteration, 1e-11)
        loss = torch.zeros(())
    else:
        loss = engine.gradients(iteration)
    scale = float(engine.optimizer.loss_scale.scale)
    gradients = {name: gradient / scale for name, gradient in full(engine, "gradients").items()}
    old = full(engine, "weights")
    updated = watcher.follow(iteration, engine.model.updated)
    assert iteration % 2 == 0 or updated == engine.model.updated, "other steps do nothing"
    engine.optimizer.step(iteration, 1e-2, loss, engine.tokens, updated)
    new = full(engine, "weights")
    tensors = {
        "grads": gradients,
        "params": new,
        "updates": {name: new[name] - old[name] for name in new},
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors |= {kind: state} if (state := full(engine, kind)) else {}
    return tensors


CASES: list[dict[str, Any]] = [
    {},
    dict(
        layers_per_stage=2.0, tie_word_embeddings=False, depth_first_micro_batches=2, batch_size=8
    ),
    dict(freeze=("blocks.0",), optimizer="lion", breadth_first_micro_batches=2, batch_size=8),
    dict(optimizer="muon", gated=True, clip_grad=1e-3),
    dict(optimizer="sgd", training_dtype="bf16", full_precision_gradients=False),
    dict(training_dtype="fp16", update_rms_clip=0.1),
    dict(training_dtype="bf16", split_master_weights=True),
]


def compare(ranks: Distributed, cases: list[tuple[dict[str, Any], bool]]) -> list[Values]:
    """Watch two steps of each case; every statistic is the plain one. Returns those of rank 0."""
    found = []
    for options, whole_gradients in cases:
        engine = Engine(ranks, options)
        watcher, recorder = watch(engine)
        step(engine, watcher, 1, whole_gradients)
        assert not recorder.got
        tensors = step(engine, watcher, 2, whole_gradients)
        engine.model.finish()
        if ranks.rank != 0:
            assert not recorder.got
            continue
        ((record, watched),) = recorder.got
        assert watched.parameters.keys() == tensors.keys(), options
        assert (record["phase"], record["iteration"], record["train_iters"]) == ("watch", 2, 20)
        for target, by_name in tensors.items():
            assert watched.parameters[target].keys() == by_name.keys(), (options, target)
            for name, tensor in by_name.items():
                close(watched.parameters[target][name], plain(tensor), (options, target, name))
                check_histogram(watched.counts[target][name], tensor, (options, target, name))
            close(
                [record[f"{target}/{key}"] for key in Summary._fields],
                plain(torch.cat([*by_name.values()])),
                target,
            )
            for layer, summary in watched.layers[target].items():
                of_layer = [
                    tensor for name, tensor in by_name.items() if name.startswith(f"{layer}.")
                ]
                close(summary, plain(torch.cat(of_layer)), layer)
        found.append(dict(watched.parameters))
    return found


def close(got: Any, wanted: Any, where: Any, rel: float = 2e-6) -> None:
    assert list(got) == pytest.approx(list(wanted), rel=rel, abs=1e-30), where


def check_histogram(histogram: Histogram, tensor: Tensor, where: Any) -> None:
    """Counts between edges, by comparing each element."""
    assert (
        len(histogram.counts) + 1 == len(histogram.edges)
        and sum(histogram.counts) == tensor.numel()
    ), where
    middle = len(histogram.counts) // 2
    assert histogram.counts[middle] == int((tensor.abs() < histogram.edges[middle + 1]).sum()), (
        where
    )
    for place in range(middle + 1, len(histogram.counts) - 1, 9):
        low, high = histogram.edges[place], histogram.edges[place + 1]
        assert histogram.counts[place] == int(((tensor >= low) & (tensor < high)).sum()), where
        assert histogram.counts[-1 - place] == int(((tensor <= -low) & (tensor > -high)).sum()), (
            where
        )


STAGES = [(dict(zero_stage=stage, batch_size=6), True) for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def two_ranks() -> list[Values]:
    """The statistics of all cases, then of the ZeRO stages, on two ranks."""
    cases = [
        ({**options, "zero_stage": 1 + place % 3}, False) for place, options in enumerate(CASES)
    ]
    found: list[Values] = run_distributed(2, compare, [*cases, *STAGES])[0]
    return found


def test_statistics_are_those_of_the_whole_tensors(two_ranks: list[Values]) -> None:
    """On two ranks: accumulation, tied, frozen, clipped, loss-scaled, bf16 gradients; AdamW, Muon,
    Lion, SGD."""
    found = two_ranks[: -len(STAGES)]
    assert len(found) == len(CASES)
    assert (
        not any(name.startswith("blocks.0") for name in found[2]["grads"])
        and "exp_avg_sq" not in found[2]
    )
    assert "blocks.0.mlp.layer_1.weight" not in found[3]["exp_avg_sq"]  # a matrix of Muon


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_neither_zero_stage_nor_world_size_matters(
    world_size: int, two_ranks: list[Values]
) -> None:
    """The same gradients give the same statistics at ZeRO 1, 2, 3 on several ranks, and on one."""
    first, second, third = (
        two_ranks[-3:] if world_size == 2 else run_distributed(world_size, compare, STAGES)[0]
    )
    ((alone,),) = run_distributed(1, compare, [(dict(batch_size=6), True)])
    assert first == second == third
    for target, by_name in alone.items():
        for name, summary in by_name.items():
            close(first[target][name], summary, (target, name))


def test_a_dropped_update() -> None:
    """One NaN in the gradients shows in their norm; weights have not moved, and other parameters
    are what they were."""
    ((record, watched),) = run_distributed(1, dropped_update)
    assert (
        math.isnan(record["grads/norm"])
        and record["updates/zeros"] == 1.0
        and record["updates/largest"] == 0.0
    )
    bad = [
        name
        for name, summary in watched.parameters["grads"].items()
        if not math.isfinite(summary.norm)
    ]
    assert len(bad) == 1


def dropped_update(ranks: Distributed) -> tuple[dict[str, Any], Watched]:
    engine = Engine(ranks, {})
    watcher, recorder = watch(engine, TrackingConfig(watch=("grads", "updates"), watch_interval=1))
    loss = engine.gradients(1)
    _, part = next(engine.model.parts())
    part.grad_shard[5] = math.nan
    engine.optimizer.step(1, 1e-2, loss, engine.tokens, watcher.follow(1, engine.model.updated))
    return recorder.got[0]


def test_numbers_without_a_name_in_json() -> None:
    """NaN and infinities are found, counted in the outermost bins, and null in the file; the
    shortest text is kept."""
    values = torch.tensor([0.0, -0.0, math.nan, -math.inf, 1.5, -(2.0**-70)])
    squares, largest, zeros, *counts = summarize(
        [values], False, bin_places(values.device)
    ).tolist()
    assert math.isnan(squares) and math.isnan(largest) and zeros == 2 and len(counts) == BINS
    assert (counts[BINS // 2], counts[-1], counts[0]) == (3, 1, 1) and sum(counts) == 6
    assert counts[EDGES.index(1.0) - 0] == 1
    line = Watched({"grads": {"x": Summary(math.nan, math.inf, 1 / 3, 0.5)}}).as_json()
    assert (
        json.dumps(line["parameters"], allow_nan=False)
        == '{"grads": {"x": [null, null, 0.333333, 0.5]}}'
    )


def test_squares_that_fp32_would_lose() -> None:
    """The norm of Adam's second moments, elements of 1e-25, is right."""
    values = torch.full((5000,), 1e-25)
    squares, *_ = summarize([values], True, None).tolist()
    assert math.sqrt(squares) == pytest.approx(1e-25 * math.sqrt(5000), rel=1e-6)


def test_files(tmp_path) -> None:
    """metrics.jsonl gets the short record, watch.jsonl the rest; without --watch there is no such
    file."""
    watched = Watched(
        {"grads": {"head": Summary(1.0, 0.5, 1.0, 0.0)}},
        {"grads": {"head": Summary(1.0, 0.5, 1.0, 0.0)}},
        {"grads": {"head": Histogram([0, 1, 2, 0], [-2, -1, 0, 1, 2], 1.0)}},
    )
    config = Config(tracking=TrackingConfig(trackers=("jsonl",), watch=("grads",)))
    trackers = open_trackers(config, tmp_path / "a", 0)
    trackers.log({"phase": "training", "iteration": 20, "loss": 1.0})
    trackers.log({"phase": "watch", "iteration": 20, "grads/norm": 1.0}, watched)
    trackers.close(0)
    (line,) = read_metrics(tmp_path / "a" / "watch.jsonl")
    assert line["statistics"] == ["norm", "rms", "largest", "zeros"]
    assert line["parameters"] == line["layers"] == {"grads": {"head": [1.0, 0.5, 1.0, 0.0]}}
    counts = {"head": {"first": 1, "counts": [1, 2]}}
    assert line["histograms"] == {"grads": {"edges": [-2, -1, 0, 1, 2], "counts": counts}}
    assert [record["phase"] for record in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [
        "training",
        "watch",
    ]
    open_trackers(Config(tracking=TrackingConfig(trackers=("jsonl",))), tmp_path / "b", 0).close(0)
    assert not (tmp_path / "b" / "watch.jsonl").exists()


def test_a_run_is_watched_and_not_changed(tmp_path) -> None:
    """A run has a record at each interval, with the gradient norm of the log; its numbers are those
    without."""
    found = []
    for name, flags in (
        ("plain", []),
        ("watched", ["--watch=grads,updates", "--watch_interval=2", "--zero_stage=3"]),
    ):
        folder = tmp_path / name
        assert launch.run([*launch.TINY, f"--experiment_dir={folder}", *flags]).codes == [0]
        records = read_metrics(folder / "metrics.jsonl")
        found.append([record for record in records if record["phase"] == "training"])
    watched = {record["iteration"]: record for record in records if record["phase"] == "watch"}
    assert [*watched] == [2, 4, 6]
    for plain_record, record in zip(*found, strict=True):
        assert (record["loss"], record["grad_norm"]) == (
            plain_record["loss"],
            plain_record["grad_norm"],
        )
        if record["iteration"] in watched:
            assert watched[record["iteration"]]["grads/norm"] == pytest.approx(
                record["grad_norm"], rel=1e-6
            )


def test_a_histogram_reads_no_device() -> None:
    """A meta tensor has no values, so whatever reads one fails; bincount does, to find its largest
    number."""
    chunks = [torch.ones(1000, device="meta"), torch.ones(24, device="meta")]
    found = summarize(iter(chunks), False, bin_places(torch.device("meta")))
    assert found.shape == (3 + BINS,) and found.dtype == torch.float64
