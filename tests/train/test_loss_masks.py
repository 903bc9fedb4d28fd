"""--loss_mask from the files to the weights: tokens that do not count change neither loss nor gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.open_data import open_data
from tests.support.datasets import write_dataset
from tests.support.harness import run_distributed, tiny_config, train_tiny
from tests.support.plain_gpt import PlainGPT, plain_adamw

TOKENS, ITERATIONS = 900, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the options of a data set of different tokens, most of which are masked, in runs longer than samples."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    counts = np.ones(TOKENS, dtype=np.uint8)
    for start, length in ((30, 60), (150, 5), (200, 90), (400, 1), (410, 100), (700, 90)):
        counts[start : start + length] = 0
    for name, array, dtype in (("tokens", np.arange(TOKENS), "<u2"), ("mask", counts, "|u1")):
        write_dataset(folder / name, np.split(array, [100, 101, 450, 800]), dtype)
    return {
        "dataset_source": "list",
        "data_path": (str(folder / "tokens"),),
        "loss_mask": (str(folder / "mask"),),
        "split": (1.0,),
        "vocab_size": TOKENS,
        "lr_warmup_iters": 2,
        "train_iters": ITERATIONS,
    }


def test_the_mean_is_over_the_tokens_that_count(corpus: dict[str, Any]) -> None:
    """Losses equal those of a plain loop over whole batches, whose masked labels torch ignores. The mean is that of the
    whole batch: ranks and micro-batches that count few tokens, or none, change it by rounding only."""
    one = run_distributed(1, train_tiny, corpus, ITERATIONS)[0]
    config = tiny_config(**corpus)
    counts = torch.from_numpy(np.fromfile(corpus["loss_mask"][0] + ".bin", np.uint8))
    model = PlainGPT(config.model)
    model.load(one.initial)
    update, losses, counted = plain_adamw(model, config.optimizer), [], []
    for iteration, ((tokens, *_),) in enumerate(open_data(config, 0, 1).batches("training", 0, ITERATIONS), start=1):
        masked = counts[tokens[:, 1:]] == 0
        counted.append((~masked).sum(dim=1).tolist())
        loss = model.loss(tokens, masked)
        update(loss, config.learning_rate.lr * min(iteration / 2, 1))
        losses.append(loss.item())
    assert min(map(min, counted)) == 0, "some samples count no token"
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(one.losses, losses, rtol=2e-6)
    layout = {"micro_batch_size": 1, "zero_stage": 2, "num_workers": 1}
    two = run_distributed(2, train_tiny, {**corpus, **layout}, ITERATIONS)[0]
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(two.grad_norms, one.grad_norms, rtol=1e-5)
    unmasked = run_distributed(1, train_tiny, {**corpus, "loss_mask": ()}, ITERATIONS)[0]
    assert np.abs(np.array(unmasked.losses) / np.array(one.losses) - 1).max() > 1e-3
