"""A checkpoint of any number of pipeline ranks serves any other, and P changes no bit of what a run
writes.

The engine trains, saves, loads and exports on ranks that are threads, as in
`test_tensor_layouts.py`.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.inspection import inspect
from megatron_lite.checkpoint.writing import files_bytes, shards_bytes
from megatron_lite.huggingface.load_pretrained import open_one
from megatron_lite.model.layer import MicroBatch
from tests.checkpoint.test_engine import assert_same, read_all
from tests.checkpoint.test_tensor_layouts import FROZEN, LLAMA, Run, start_from
from tests.support.thread_ranks import on_threads

Layout = tuple[int, int, int, int]  # pipeline, data and tensor-parallel ranks, ZeRO stage
# Each loads the checkpoint of the one before it.
LAYOUTS: tuple[Layout, ...] = ((1, 2, 1, 2), (2, 2, 1, 3), (1, 2, 1, 3), (4, 2, 1, 1))
OTHERS: tuple[Layout, ...] = ((2, 1, 1, 3), (1, 1, 2, 1), (2, 1, 2, 2))  # load that of the first
SIZES = {"num_layers": 4, "vocab_size": 61, "batch_size": 8}
TIED = {
    "tie_word_embeddings": True,
    "num_layers": 8,
    "hidden_size": 16,
    "update_rms_clip": 0.5,
    "ema_type": "ema",
}
MODELS: dict[str, dict[str, Any]] = {
    "tied, averaged, clipped by RMS": {**TIED, "pipeline_placement": "loop"},
    "frozen, clipped by the norm": {
        **LLAMA,
        **FROZEN,
        "clip_update_norm_sigma": 0.1,
        "clip_update_norm_window": 2,
    },
    "muon": {**LLAMA, "optimizer": "muon"},
    "8 bits": {**LLAMA, "fp8": "delayed", "training_dtype": "bf16", "num_attention_heads": 2},
    "tied on one rank": {**TIED, "pipeline_placement": "v"},
    "frozen whole pipeline rank": {
        **LLAMA,
        "freeze": ("blocks.0", "blocks.1", "embedding"),
        "update_rms_clip": 0.5,
    },
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if place else ()) for place, name in enumerate(MODELS)
]
STEPS = 1  # of each layout


class Result(NamedTuple):
    losses: list[float]
    exported: dict[str, str]  # digests
    state: str  # of the optimizer, after the steps


class PipelineRun(Run):
    def batches(self, iteration: int, scale: torch.Tensor | None = None) -> list[MicroBatch]:
        """Two micro-batches."""
        (batch,) = super().batches(iteration, scale)
        pairs = zip(batch.tokens.chunk(2), batch.labels.chunk(2), strict=True)
        return [MicroBatch(inputs, labels, scale) for inputs, labels in pairs]


def train(
    ranks: Any, options: dict[str, Any], first: int, source: Path | None, target: Path
) -> Result:
    """Load, train some steps, save and export."""
    run = PipelineRun(ranks, options)
    if source is not None:
        run.load(source)
    losses = run.losses(range(first, first + STEPS))
    run.save(target)
    written = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    if target.name.isdecimal():
        assert written == files_bytes(run.model, ranks.world_size, int(target.name))
    assert (
        0 < written - shards_bytes(run.model, ranks.layers.world_size) < 10_000 * ranks.world_size
    )
    return Result(
        losses,
        run.exports(target.parent / f"export of {target.name}"),
        json.dumps(run.optimizer.state()),
    )


def on(layout: Layout, function: Any, name: str, *args: Any) -> list[Any]:
    pipeline, data, tensor, zero_stage = layout
    options = {**SIZES, **MODELS[name], "pipeline_parallel": pipeline, "tensor_parallel": tensor}
    options |= {
        "zero_stage": zero_stage,
        "micro_batch_size": 8 // 2 // data,
        "breadth_first_micro_batches": 2,
    }
    return on_threads(data, tensor, function, options, *args, pipeline=pipeline)


class Trained(NamedTuple):
    results: list[Result]  # of LAYOUTS
    whole: list[Result]  # of the first layout alone, without a stop: each of its saves
    others: list[Result]
    pretrained: list[list[str]]  # of all ranks


@functools.cache
def trained(name: str) -> Trained:
    with tempfile.TemporaryDirectory() as directory:
        root, found = Path(directory), Trained([], [], [], [])
        (root / "alone").mkdir()
        for number, layout in enumerate(LAYOUTS):
            source = root / str(number - 1) if number else None
            results = on(layout, train, name, 1 + number * STEPS, source, root / str(number))
            assert len({(tuple(each.losses), each.state) for each in results}) == 1, "ranks differ"
            found.results.append(results[0])
            source = root / "alone" / str(number - 1) if number else None
            found.whole.append(
                on(
                    LAYOUTS[0],
                    train,
                    name,
                    1 + number * STEPS,
                    source,
                    root / "alone" / str(number),
                )[0]
            )
            assert_same(read_all(root / str(number)), read_all(root / "alone" / str(number)))
            contents = [manifest.read(folder / str(number)) for folder in (root, root / "alone")]
            assert [*contents[0].parameters] == [*contents[1].parameters], "another order"
            assert contents[0].state == contents[1].state
            pipeline, data, tensor, _ = layout
            seen = inspect(root / str(number), values=True)
            assert not seen.problems and seen.ranks == (
                f"{pipeline}x{data}x{tensor}" if pipeline > 1 else "2"
            )
        for number, layout in enumerate(OTHERS, start=10):
            found.others.append(
                on(layout, train, name, 1 + STEPS, root / "0", root / str(number))[0]
            )
        for layout in (LAYOUTS[1], OTHERS[1]):
            found.pretrained.extend(on(layout, start_from, name, root / "3", "distributed"))
    return found


@pytest.mark.parametrize("model", NAMES)
def test_any_number_of_pipeline_ranks_resumes_any_other(model: str) -> None:
    """P = 1 -> 2 -> 1 -> 4: losses, weights, moments, averages and the optimizer's state are those
    of P = 1."""
    found = trained(model)
    assert [each.losses for each in found.results] == [each.losses for each in found.whole]
    assert [each.state for each in found.results] == [each.state for each in found.whole]


@pytest.mark.parametrize("model", NAMES)
def test_other_data_and_tensor_parallel_ranks_go_on_nearby(model: str) -> None:
    found = trained(model)
    rtol = 1e-6 if model not in ("muon", "8 bits") else 1e-2
    for other, layout in zip(found.others, OTHERS, strict=True):
        np.testing.assert_allclose(
            other.losses, found.whole[1].losses, rtol=rtol, err_msg=str(layout)
        )


@pytest.mark.parametrize("model", NAMES)
def test_exports_have_the_bytes_of_one_pipeline_rank(model: str) -> None:
    """Folders of weights and averages, and the fp32 masters on rank 0."""
    found = trained(model)
    assert len(found.whole[0].exported) >= 4
    assert [each.exported for each in found.results] == [each.exported for each in found.whole]


@pytest.mark.parametrize("model", NAMES)
def test_pretrained_weights_and_moments_for_a_pipeline(model: str) -> None:
    found = trained(model).pretrained
    assert len({weights for weights, *_ in found}) == 1 and all(one[1] == one[2] for one in found)


def test_parts_of_a_checkpoint_are_named_for_the_whole_model() -> None:
    """What a checkpoint lacks is the same on every pipeline rank, whatever its stages."""
    name = "frozen, clipped by the norm"

    def lacking(
        ranks: Any, options: dict[str, Any], folder: Path
    ) -> tuple[frozenset[str], str | None]:
        from megatron_lite.huggingface.load_pretrained import partly

        run = PipelineRun(ranks, {**options, "num_layers": 6})
        with open_one(folder, "distributed", run.config.model) as source:
            return partly(source, run.model)

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "0"
        on(OTHERS[1], train, name, 1, None, folder)
        found = on(OTHERS[0], lacking, name, folder)
    assert found[0] == found[1] and {each.split(".")[1] for each in found[0][0]} == {"4", "5"}
