"""A checkpoint of any number of tensor-parallel ranks, data-parallel ranks and ZeRO stage resumes at any other.

The engine trains, saves and loads on subsets of four ranks; a batch holds the same tokens for every layout.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.checkpoint import sharded
from megatron_lite.checkpoint.writing import Save, write_now
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.layer import MicroBatch
from tests.checkpoint.test_engine import Contents, read_all
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed

Layout = tuple[int, int, int]  # tensor-parallel ranks, data-parallel ranks, ZeRO stage
FIRST: Layout = (2, 1, 3)
OTHERS: tuple[Layout, ...] = ((1, 2, 1), (4, 1, 2), (1, 1, 3), (2, 2, 2))
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 61},
    "multi-query": {
        "normalization_type": "rms_norm",
        "use_rotary_embeddings": True,
        "gated": True,
        "tie_word_embeddings": False,
        "head_groups": 1,
        "ffn_hidden_size": 96,
        "qk_layernorm": True,
        "ema_type": "ema",
    },
}
STEPS = 3  # before a save, and after it


class Run(Engine):
    """The engine on the same tokens for every layout."""

    def batches(self, iteration: int, scale: torch.Tensor | None = None) -> list[MicroBatch]:
        generator, data = torch.Generator().manual_seed(iteration), self.ranks.data
        assert self.config.batch.batch_size is not None
        shape = (2, self.config.batch.batch_size, self.config.batch.sequence_length)
        tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator)
        inputs, labels = tokens.chunk(data.world_size, dim=1)[data.rank]
        return [MicroBatch(inputs, labels, scale)]

    def steps(self, first: int) -> list[float]:
        """Train STEPS steps and return their losses."""
        return [float(self.step(iteration)[0]) for iteration in range(first, first + STEPS)]

    def save(self, root: Path, iteration: int) -> None:
        scale = self.optimizer.state()
        state = {"optimizer": scale, "window": {"loss": (0.0).hex(), "tokens": 0}}
        write_now(Save(root, iteration, self.model, state, self.config, self.ranks))

    def load(self, folder: Path) -> None:
        lines: list[str] = []
        found = sharded.load_first_good(
            [(int(folder.name), folder)], folder.parent, self.model, self.ranks, lines.append
        )
        assert found is not None and not lines, lines
        self.model.invalidate()
        self.optimizer.load_state(found[1].state["optimizer"])


def subset(layout: Layout) -> Distributed | None:
    """The first ranks of the run with groups of their own; None on the others. All ranks call this together."""
    tensor, data, _ = layout
    ranks = list(range(tensor * data))

    def new_group(members: Any) -> Any:
        return dist.new_group(list(members), backend="gloo")

    cpu_group, group = new_group(ranks), new_group(ranks)
    rank, device = dist.get_rank(), torch.device("cpu")
    inside = rank in ranks
    made = Distributed(rank if inside else 0, len(ranks), len(ranks), device, cpu_group, group)
    made.divide(tensor, new_group)
    return made if inside else None


def train_everywhere(distributed: Distributed, root: str) -> dict[str, dict[Layout, list[float]]]:
    """Train and save on the first layout, go on there and on the others; the losses by model and layout.

    Folders below root/model: `begun` of the first layout; `again` of what each layout loaded from it; `back` of what
    the first layout loaded from that.
    """
    losses: dict[str, dict[Layout, list[float]]] = {}
    ranks = {layout: subset(layout) for layout in (FIRST, *OTHERS)}
    for name, options in MODELS.items():
        losses[name] = {}
        folder = Path(root) / name
        for number, layout in enumerate((FIRST, *OTHERS)):
            own, (tensor, _, zero_stage) = ranks[layout], layout
            first = ranks[FIRST]
            where = {"tensor_parallel": tensor, "zero_stage": zero_stage}
            if own is not None:
                run = Run(own, {**options, **where})
                if layout == FIRST:
                    folder.mkdir(exist_ok=True)
                    run.model.gather_ahead()
                    run.steps(1)
                    run.save(folder, 0)
                else:
                    run.load(folder / "0")
                    run.save(folder, number)
                    run.model.gather_ahead()
                losses[name][layout] = run.steps(1 + STEPS)
                run.model.finish()
            distributed.barrier()
            if first is not None and layout != FIRST:
                back = Run(first, {**options, "tensor_parallel": FIRST[0], "zero_stage": FIRST[2]})
                back.load(folder / str(number))
                back.save(folder, 10 * number)
    return losses


@functools.cache
def trained() -> tuple[dict[str, dict[Layout, list[float]]], dict[str, dict[int, Contents]]]:
    """The losses by model and layout, and the contents of all checkpoints by model and number."""
    with tempfile.TemporaryDirectory() as root:
        ranks = run_distributed(4, train_everywhere, root)
        folders = {name: sorted(Path(root, name).iterdir()) for name in MODELS}
        contents = {name: {int(path.name): read_all(path) for path in paths} for name, paths in folders.items()}
    return ranks[0], contents


@pytest.mark.parametrize("number", range(1, 1 + len(OTHERS)))
@pytest.mark.parametrize("model", MODELS)
def test_any_layout_resumes_any_other(model: str, number: int) -> None:
    """Weights, moments and averages to the bit, there and back; the losses that follow to 1e-6."""
    losses, contents = trained()[0][model], trained()[1][model]
    layout = OTHERS[number - 1]
    for other in (contents[number], contents[10 * number]):
        assert other.keys() == contents[0].keys()
        for key, values in contents[0].items():
            assert torch.equal(values.view(torch.uint8), other[key].view(torch.uint8)), key
    np.testing.assert_allclose(losses[layout], losses[FIRST], rtol=1e-6)
