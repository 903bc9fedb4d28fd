"""--loss_mask from the files to the weights: tokens that do not count change neither loss nor
gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.outputs.step_inputs import PATIENCE
from tests.support.harness import run_distributed, tiny_config, train_tiny, train_whole
from tests.support.metrics import read_metrics
from tests.support.plain_gpt import PlainGPT, plain_adamw
from tests.support.token_files import write_documents

TOKENS, ITERATIONS = 900, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the options of a data set of different tokens, most of which are masked, in runs
    longer than samples."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    counts = np.ones(TOKENS, dtype=np.uint8)
    for start, length in ((30, 60), (150, 5), (200, 90), (400, 1), (410, 100), (700, 90)):
        counts[start : start + length] = 0
    for name, array, dtype in (("tokens", np.arange(TOKENS), "<u2"), ("mask", counts, "|u1")):
        write_documents(folder / name, np.split(array, [100, 101, 450, 800]), dtype)
    return {
        "dataset_source": "list",
        "data_path": (str(folder / "tokens"),),
        "loss_mask": (str(folder / "mask"),),
        "split": (1.0,),
        "vocab_size": TOKENS,
        "lr_warmup": 2,
        "train_iters": ITERATIONS,
    }


def test_the_mean_is_over_the_tokens_that_count(corpus: dict[str, Any]) -> None:
    """Losses equal those of a plain loop over whole batches, whose masked labels torch ignores. The
    mean is that of the whole batch: ranks and micro-batches that count few tokens, or none, change
    it by rounding only."""
    one = run_distributed(1, train_tiny, corpus, ITERATIONS)[0]
    config = tiny_config(**corpus)
    counts = torch.from_numpy(np.fromfile(corpus["loss_mask"][0] + ".bin", np.uint8))
    model = PlainGPT(config.model)
    model.load(one.initial)
    update = plain_adamw(model, config.optimizer)
    losses = []
    counted = []
    for iteration, ((tokens, *_),) in enumerate(
        open_data(config, 0, 1).batches("training", 0, ITERATIONS), start=1
    ):
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


def test_where_no_label_counts_there_is_no_loss(tmp_path: Path) -> None:
    """null in metrics.jsonl, of the averaged weights and of each data set, too, and one warning a
    phase.

    Of each split, only the first token counts, which is never a label: the start of the run cannot
    see that.
    """
    for name, dtype, documents in (
        ("a", "<u2", np.arange(800)),
        ("mask", "|u1", np.arange(800) % 400 == 0),
    ):
        write_documents(tmp_path / name, np.split(documents, [400]), dtype)
    write_documents(tmp_path / "b", [np.arange(400)] * 2, "<u2")
    masked, both = str(tmp_path / "a"), ("0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b"))
    common = {
        "dataset_source": "list",
        "split": (0.5, 0.5),
        "vocab_size": 800,
        "log_interval": 1,
        "ema_type": "ema",
    }
    common |= {
        "train_iters": 5,
        "validation_iters": 1,
        "validation_interval": 2,
        "validation_by_dataset": True,
    }
    for name, sets, masks in (("one", (masked,), 1), ("blend", both, 2)):
        options = {
            **common,
            "data_path": sets,
            "loss_mask": (str(tmp_path / "mask"), "none")[:masks],
        }
        run_distributed(1, train_impatiently, {**options, "experiment_dir": str(tmp_path / name)})
    training, validation = (
        [line for line in read_metrics(tmp_path / "one/metrics.jsonl") if line["phase"] == phase]
        for phase in ("training", "validation")
    )
    assert [line["loss"] for line in training] == [None] * 5 and all(
        line["grad_norm"] == 0 for line in training
    )
    assert [(line["loss"], line["averaged_loss"]) for line in validation] == [(None, None)] * 3
    log = (tmp_path / "one/runs/0/logs/logs_rank_000.txt").read_text()
    assert (
        log.count("no label") == 2
        and log.count("no label of the validation, which has no loss, counts") == 1
    )
    assert log.index("no label of 3 updates in a row counts: look at") > log.index(
        "training @ iteration 2/5"
    )
    last = [
        line
        for line in read_metrics(tmp_path / "blend/metrics.jsonl")
        if line["phase"] == "validation"
    ][-1]
    assert (
        last["loss/a"] is None
        and last["averaged_loss/a"] is None
        and last["loss/b"] > 1
        and last["loss"] > 1
    )


def train_impatiently(distributed: Distributed, options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PATIENCE, "training", 3)
        train_whole(distributed, tiny_config(**options))
