"""Validation losses, masks and samples of tensor-parallel ranks are those of data-parallel ones."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.metrics import read_metrics
from tests.support.token_files import save_byte_tokenizer, write_documents

Options = dict[str, Any]
LAYOUTS: dict[str, tuple[int, Options]] = {
    "1": (1, {}),
    "2, whole embeddings": (2, {"zero_stage": 3, "parallel_embeddings": False}),
    "2, tokens split": (2, {"sequence_tensor_parallel": True}),
}


def options(folder: Path) -> Options:
    """Two data sets with masks, prompts of different lengths, and weights that soon make different
    texts."""
    draw = np.random.default_rng(1)
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    (folder / "prompts.txt").write_text("the\na longer one\n")
    for name in ("first", "second"):
        for kind, top, dtype in (("tokens", 257, "<u2"), ("mask", 2, "|u1")):
            write_documents(
                folder / f"{name}.{kind}",
                np.split(draw.integers(0, top, 240).astype(dtype), 8),
                dtype,
            )
    return (
        dict(
            vocab_size=257,
            sequence_length=24,
            train_iters=2,
            lr=1e-2,
            lr_warmup=2,
            init_method_std=0.5,
        )
        | dict(head_groups=2, dataset_source="list")
        | dict(data_path=tuple(str(folder / f"{name}.tokens") for name in ("first", "second")))
        | dict(
            loss_mask=tuple(str(folder / f"{name}.mask") for name in ("first", "second")),
            split=(2.0, 1.0, 1.0),
        )
        | dict(
            validation_iters="all", validation_interval=2, validation_by_dataset=True, test_iters=1
        )
        | dict(
            ema_type="ema",
            ema_beta=0.5,
            tokenizer_file=str(folder / "tokenizer.json"),
            sample_interval=2,
        )
        | dict(sample_tokens=6, sample_temperature=1.0, sample_prompts=str(folder / "prompts.txt"))
    )


def train_all(ranks: Distributed, root: str, common: Options) -> None:
    for place, (size, layout) in enumerate(LAYOUTS.values()):
        divide(ranks, dist.new_group, DistributedConfig(tensor_parallel=size))
        directory = {"experiment_dir": f"{root}/{place}", "tensor_parallel": size}
        train_whole(ranks, tiny_config(ranks.world_size, **common | layout | directory))


@functools.cache
def outputs() -> dict[str, tuple[list[Any], list[Any]]]:
    """Records of metrics.jsonl and samples.jsonl, by layout."""
    with tempfile.TemporaryDirectory() as root:
        run_distributed(2, train_all, root, options(Path(root)))
        return {
            name: (
                read_metrics(Path(root) / str(place) / "metrics.jsonl"),
                [
                    json.loads(line)
                    for line in (Path(root) / str(place) / "samples.jsonl").read_text().splitlines()
                ],
            )
            for place, name in enumerate(LAYOUTS)
        }


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_losses_are_those_of_data_parallel_ranks(layout: str) -> None:
    """Training, validation, each data set, test; weights and averages; masked labels count once."""
    expected, found = outputs()["1"][0], outputs()[layout][0]
    assert [record["phase"] for record in found] == [record["phase"] for record in expected]
    kinds = set()
    for record, other in zip(found, expected, strict=True):
        losses = {name for name in other if "loss" in name and isinstance(other[name], float)}
        kinds |= losses
        for name in losses:
            assert record[name] == pytest.approx(other[name], rel=2e-6), (record["phase"], name)
    assert {"loss", "averaged_loss", "loss/first.tokens", "averaged_loss/second.tokens"} <= kinds


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_sampled_tokens_are_those_of_data_parallel_ranks(layout: str) -> None:
    expected, found = (
        [
            (line["iteration"], [sample["tokens"] for sample in line["samples"]])
            for line in outputs()[name][1]
        ]
        for name in ("1", layout)
    )
    assert found == expected and [iteration for iteration, _ in found] == [2]
    assert len({token for _, texts in found for text in texts for token in text}) > 4, (
        "texts of few tokens prove little"
    )
