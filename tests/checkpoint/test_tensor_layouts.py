"""A checkpoint of any number of tensor-parallel, expert-parallel and data-parallel ranks, and ZeRO
stage, serves any other.

The engine trains, saves, loads and exports on ranks that are threads; a batch holds the same tokens
for every layout. `test_engine.py` runs the program, on two processes.
"""

import contextlib
import functools
import hashlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint import files, reading, resume
from megatron_lite.checkpoint.inspection import inspect
from megatron_lite.checkpoint.manifest import MOMENTS, Manifest
from megatron_lite.checkpoint.writing import Save, files_bytes, write_now
from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import RankGrid
from megatron_lite.huggingface import export, load_pretrained
from megatron_lite.huggingface.load_pretrained import open_one
from megatron_lite.model.layer import MicroBatch, Routing
from tests.checkpoint.test_engine import Contents, assert_same, read_all
from tests.support.engine_runs import Engine, digest
from tests.support.harness import tiny_config
from tests.support.plans import one_plan
from tests.support.thread_ranks import on_threads

# tensor-parallel ranks, data-parallel ranks, ZeRO stage, and how many ranks share out the experts
Layout = tuple[int, int, int] | tuple[int, int, int, int]
FIRST: Layout = (2, 1, 3)
OTHERS: tuple[Layout, ...] = ((1, 1, 3), (4, 1, 2), (1, 2, 1), (2, 2, 2))
ONE = OTHERS.index((1, 1, 3)) + 1
OF_EXPERTS: tuple[Layout, ...] = ((1, 1, 3), (2, 2, 2, 2), (1, 4, 1, 2), (2, 2, 3))
LLAMA: dict[str, Any] = {
    "normalization_type": "rms_norm",
    "use_rotary_embeddings": True,
    "gated": True,
    "add_linear_biases": False,
    "tie_word_embeddings": False,
    "ffn_hidden_size": 96,
}
MIXTURE: dict[str, Any] = {
    **{**LLAMA, "num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 24},
    "num_shared_experts": 1,
    "moe_router_score": "sigmoid",
    "moe_router_bias_update_rate": 0.02,
    "random_bias_init": True,
}
FROZEN = {"freeze": ("blocks.0.mlp",), "ema_type": "ema"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 61},
    "gpt2, more layouts": {"vocab_size": 61},
    "multi-query": {**LLAMA, "head_groups": 1, "parallel_embeddings": False, **FROZEN},
    "muon": {**LLAMA, "head_groups": 2, "vocab_size": 61, "optimizer": "muon"},
    "experts": {
        **MIXTURE,
        **FROZEN,
        "freeze": ("blocks.0.mlp.experts",),
    },
    "experts by muon": {**MIXTURE, "optimizer": "muon"},
}
LAYOUTS = {name: OTHERS[:2] if name == "gpt2" else OTHERS for name in MODELS}
FIRSTS = dict.fromkeys(MODELS, FIRST)
for experts in ("experts", "experts by muon"):
    LAYOUTS[experts], FIRSTS[experts] = OF_EXPERTS, (1, 4, 3, 4)
LAYOUTS["experts"] = OF_EXPERTS[:2]
NAMES = [
    pytest.param(name, marks=() if name in ("multi-query", "experts") else pytest.mark.slow)
    for name in MODELS
]
STEPS = 2  # after the save


class Run(Engine):
    """The engine on the same tokens for every layout."""

    def batches(self, iteration: int, scale: torch.Tensor | None = None) -> list[MicroBatch]:
        generator, data = torch.Generator().manual_seed(iteration), self.ranks.data
        assert self.config.batch.batch_size is not None
        shape = (2, self.config.batch.batch_size, self.config.batch.sequence_length)
        tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator)
        inputs, labels = tokens.chunk(data.world_size, dim=1)[data.rank]
        routing = None if scale is None else Routing(len(inputs), scale)
        return [MicroBatch(inputs, labels, scale, routing=routing)]

    def losses(self, iterations: range) -> list[float]:
        self.model.gather_ahead()
        return [float(self.step(iteration)[0]) for iteration in iterations]

    def save(self, folder: Path) -> None:
        state = {"optimizer": self.optimizer.state(), "window": {"loss": (0.0).hex(), "tokens": 0}}
        write_now(Save(folder.parent, int(folder.name), self.model, state, self.config, self.ranks))

    def load(self, folder: Path) -> None:
        lines: list[str] = []
        places = [(int(folder.name), folder)], folder.parent
        found = reading.load_first_good(
            *places, self.model, self.ranks, lines.append, self.config.optimizer.optimizer
        )
        assert found is not None and not lines, lines
        self.model.invalidate()
        self.optimizer.load_state(found[1].state["optimizer"])

    def exports(self, folder: Path) -> dict[str, str]:
        """Export the weights and the averages; the digests of all files and, on rank 0, of the
        masters."""
        digests = {}
        for average in (False, True) if self.config.averaging.enabled else (False,):
            name = "averages" if average else "weights"
            with self.model.averaged() if average else contextlib.nullcontext():
                weights = self.model.full_weights()
                export.save_huggingface(folder / name, self.model, self.config, self.ranks, weights)
            for path in sorted((folder / name).iterdir()):
                digests[f"{name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
            masters = export.master_weights(self.model, self.ranks, average)
            digests[f"masters of {name}"] = sorted_digest(masters)
        return digests


def begin(ranks: Any, options: dict[str, Any], folder: Path) -> list[float]:
    """Train a step, save, and go on; the losses after the save."""
    run = Run(ranks, options)
    run.losses(range(1, 2))
    run.save(folder)
    return run.losses(range(2, 2 + STEPS))


def go_on(
    ranks: Any, options: dict[str, Any], source: Path, target: Path
) -> tuple[list[float], dict[str, str]]:
    """Load a checkpoint, save and export it as it is, and train on."""
    run = Run(ranks, options)
    run.load(source)
    run.save(target)
    exported = run.exports(target.parent / f"export of {target.name}")
    return run.losses(range(2, 2 + STEPS)), exported


def start_from(ranks: Any, options: dict[str, Any], folder: Path, kind: str) -> list[str]:
    """Start from pretrained weights; digests of the full weights, and of this rank's share of the
    moments."""
    run = Run(ranks, options)
    with open_one(folder, kind, run.config.model, state=kind == "distributed") as source:
        source.check(
            {
                slot.spec.name: slot.spec.shape
                for _, part in run.model.all_parts()
                for slot in part.layout.slots
            }
        )
        load_pretrained.load_weights(source, run.model, ranks)
        found = [sorted_digest(run.model.full_weights())]
        if kind == "distributed":
            load_pretrained.load_moments(source, run.model, ranks, run.config.optimizer.optimizer)
            resumed = Run(ranks, options)
            resumed.load(folder)
            for model in (run.model, resumed.model):
                shards = (
                    part.read(kind)
                    for _, part in model.parts()
                    for kind in part.kinds()
                    if kind in MOMENTS
                )
                found.append(digest(shards))
    return found


def sorted_digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of tensors, by name: experts come last if ranks share them out."""
    found = {name: digest(iter([tensor])) for name, tensor in tensors}
    return str(sorted(found.items()))


class Trained(NamedTuple):
    """The results of a model on all layouts, whose checkpoints are good and as large as planned."""

    # by number; 10 times it: what the first layout loads again; 0: never loaded
    losses: dict[int, list[float]]
    contents: dict[int, Contents]
    exports: dict[int, dict[str, str]]
    pretrained: dict[str, list[list[str]]]  # by layout and kind, of all ranks


def options_of(name: str, layout: Layout) -> dict[str, Any]:
    tensor, _, zero_stage, *experts = layout
    options = {"tensor_parallel": tensor, "zero_stage": zero_stage}
    return {**MODELS[name], **options, "expert_parallel": sum(experts) or 1}


def on(layout: Layout, function: Any, name: str, *args: Any) -> list[Any]:
    options = options_of(name, layout)
    expert = options["expert_parallel"]
    return on_threads(layout[1], layout[0], function, options, *args, expert=expert)


def planned_bytes(name: str, layout: Layout, iteration: int) -> int:
    """Return the bytes of the files of a checkpoint, as a dry run says."""
    ranks = layout[0] * layout[1]
    config = tiny_config(ranks, **options_of(name, layout))
    return files_bytes(one_plan(config, ranks, "cpu").model, ranks, iteration)


@functools.cache
def trained(name: str) -> Trained:
    result = Trained({}, {}, {}, {})
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        result.losses[0] = on(FIRSTS[name], begin, name, root / "0")[0]
        for number, layout in enumerate(LAYOUTS[name], start=1):
            for source, target, where in (
                (0, number, layout),
                (number, 10 * number, FIRSTS[name]),
            ):
                losses, exported = on(where, go_on, name, root / str(source), root / str(target))[0]
                result.losses[target], result.exports[target] = losses, exported
        for number in result.losses:
            folder = root / str(number)
            result.contents[number], seen = read_all(folder), inspect(folder, values=True)
            layout = LAYOUTS[name][number - 1] if 0 < number < 10 else FIRSTS[name]
            tensor, data, *_ = layout
            assert (
                seen.ranks == (str(data) if tensor == 1 else f"{data}x{tensor}")
                and not seen.problems
            )
            assert seen.num_bytes == planned_bytes(name, layout, number)
        huggingface = root / f"export of {ONE}" / "weights"
        with mock.patch.object(files, "CHUNK_BYTES", 3000):  # a few rows
            for layout in LAYOUTS[name][1:]:
                for kind, folder in (("distributed", root / "0"), ("huggingface", huggingface)):
                    result.pretrained[f"{layout} {kind}"] = on(
                        layout, start_from, name, folder, kind
                    )
    return result


@pytest.mark.parametrize("model", NAMES)
def test_any_layout_resumes_any_other(model: str) -> None:
    """Weights, moments and averages to the bit there and back; losses to 1e-6 there, and to the bit
    back.

    Muon rounds its matrices to bf16, and with them the last bits of the gradients.
    """
    losses, contents, *_ = trained(model)
    for number, layout in enumerate(LAYOUTS[model], start=1):
        for other in (contents[number], contents[10 * number]):
            assert_same(other, contents[0])
        rtol = 1e-4 if "muon" in model else 1e-6
        np.testing.assert_allclose(losses[number], losses[0], rtol=rtol, err_msg=str(layout))
        assert losses[10 * number] == losses[0], layout


@pytest.mark.parametrize("model", NAMES)
def test_exports_do_not_depend_on_the_layout(model: str) -> None:
    """The files, and the fp32 masters and averages, are those of one rank to the byte."""
    found = trained(model).exports
    assert len(found[ONE]) >= 4
    assert all(other == found[ONE] for other in found.values())


@pytest.mark.parametrize("model", NAMES)
def test_pretrained_weights_at_any_layout(model: str) -> None:
    """Weights of a checkpoint of other ranks and of a Hugging Face folder, moments as a resume has
    them."""
    found = trained(model).pretrained
    weights = {result[0] for ranks in found.values() for result in ranks}
    assert len(weights) == 1
    assert all(
        result[1] == result[2]
        for name, ranks in found.items()
        if "distributed" in name
        for result in ranks
    )


@pytest.mark.parametrize(
    ("saved", "current", "words"),
    [
        ((1, 2, 2), (1, 2, 2), ""),
        ((1, 4, 1), (1, 2, 1), ", saved by 4 ranks"),
        ((2, 2, 2), (2, 1, 2), ", saved by 8 ranks"),
        ((1, 2, 2), (1, 4, 1), ", saved by 4 ranks with --tensor_parallel=2"),
        ((1, 1, 1), (1, 1, 4), ", saved by 1 rank with --tensor_parallel=1"),
        ((2, 1, 1), (1, 2, 1), ", saved by 2 ranks with --pipeline_parallel=2"),
        ((2, 1, 2), (4, 1, 1), ", saved by 4 ranks with --pipeline_parallel=2 --tensor_parallel=2"),
    ],
)
def test_the_log_names_other_ranks(
    saved: tuple[int, int, int], current: tuple[int, int, int], words: str
) -> None:
    """Pipeline, data and tensor-parallel ranks."""
    config = {"pipeline_parallel": saved[0], "tensor_parallel": saved[2]}
    content = Manifest("id", 1, math.prod(saved), config, {}, {}, {})
    options = DistributedConfig(pipeline_parallel=current[0], tensor_parallel=current[2])
    world_size = math.prod(current)
    ranks: Any = SimpleNamespace(world_size=world_size, grid=RankGrid(world_size, options))
    assert resume._other_ranks(content, ranks) == words
