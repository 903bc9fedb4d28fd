"""One global stream of samples, whatever the ranks, micro-batches, batch sizes and restarts."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.validation import resolve
from tests.support.token_files import data_config, read_batches, write_documents

LENGTH, SAMPLES = 8, 60


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three data sets of 40 to 60 samples, smaller than the stream, so that it has several epochs
    of each."""
    folder = tmp_path_factory.mktemp("data")
    generators = [np.random.default_rng(seed) for seed in range(3)]
    return [
        write_documents(
            folder / name,
            [drawn.integers(0, 60_000, size) for size in drawn.integers(0, 30, 30).tolist()],
        )
        for name, drawn in zip("abc", generators, strict=True)
    ]


def drawn(generator: random.Random, prefixes: list[str]) -> dict[str, Any]:
    """Draw the options that decide about the samples."""
    count = generator.randint(1, 3)
    path = [word for prefix in prefixes[:count] for word in (str(generator.randint(1, 5)), prefix)]
    shuffle = generator.choice(["epoch", "full", "skip_first_epoch", "none"])
    return {
        "data_path": tuple(path),
        "shuffle": shuffle,
        "max_epochs": 20 if shuffle == "full" else None,
        "shuffle_era": generator.choice([None, 1, 7])
        if shuffle in ("epoch", "skip_first_epoch")
        else None,
        "shuffle_documents": shuffle != "none" and generator.random() < 0.5,
        "seed": generator.randint(0, 5),
        "cross_document_attention": generator.random() < 0.5,
    }


def layout(generator: random.Random, ranks: int) -> dict[str, Any]:
    """Draw the options that must not decide about them."""
    sizes = []
    start = 0
    text = []
    while sum(sizes) < SAMPLES:
        size, iterations = generator.randint(1, 13), generator.randint(1, 6)
        text.append(f"{start}:{size}")
        sizes += [size] * iterations
        start += iterations
    return {
        "batch_size": None,
        "batch_size_schedule": tuple(text),
        "allow_nondivisible_batch_size": True,
        "micro_batch_size": generator.randint(1, min(5, -(-max(sizes) // ranks))),
        "breadth_first_micro_batches": generator.choice([None, 2]),
        "train_iters": len(sizes),
    }


def config(options: dict[str, Any], ranks: int) -> Config:
    values = {"sequence_length": LENGTH, "vocab_size": 60_000, **options}
    return resolve(data_config(*values.pop("data_path"), **values), ranks)


def stream(options: dict[str, Any], ranks: int, first: int = 0) -> tuple[Tensor, int]:
    """Return the samples of the iterations after `first` in the order of their indices, and the
    first index."""
    values = config(options, ranks)
    before = batch_schedule(values.batch).consumed_samples(first)
    batches = [read_batches(values, rank, ranks, first) for rank in range(ranks)]
    found = [
        batch.tokens[: len(batch.tokens) - batch.padding]
        for steps in zip(*batches, strict=True)
        for step in zip(*steps, strict=True)
        for batch in step
    ]
    return torch.cat(found)[: SAMPLES - before], before


@pytest.mark.parametrize("cases", [range(8), pytest.param(range(8, 300), marks=pytest.mark.slow)])
def test_the_layout_does_not_matter(prefixes: list[str], cases: range) -> None:
    """Random data, order and weights, or random tokens; random ranks, micro-batches, batch sizes,
    numbers of iterations and restarts give the same samples."""
    for case in cases:
        generator = random.Random(case)
        data = drawn(generator, prefixes)
        if case % 8 == 7:
            data = {"data_path": (), "dataset_source": "random", "seed": case}
        single = {**data, "batch_size": 1, "micro_batch_size": 1, "train_iters": SAMPLES}
        expected, _ = stream(single, 1)
        assert len(expected) == SAMPLES
        for ranks in (1, generator.randint(2, 5)):
            options = {**data, **layout(generator, ranks)}
            whole, _ = stream(options, ranks)
            assert torch.equal(whole, expected), (case, ranks, options)
            rest, before = stream(options, ranks, generator.randint(1, options["train_iters"] - 1))
            assert torch.equal(rest[: max(0, SAMPLES - before)], expected[before:]), (
                case,
                ranks,
                options,
            )
