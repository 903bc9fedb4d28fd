"""Batches that change size, do not divide evenly, or are averaged differently, against plain torch
and bit for bit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.config.values import SPELLINGS
from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.data.open_data import open_data
from megatron_lite.model.layer import MASKED
from megatron_lite.monitor.metrics import LogWindow
from tests.support import documents
from tests.support.harness import (
    Trajectory,
    full_weights,
    layers_of,
    run_distributed,
    same_weights,
    tiny_config,
    train_several,
    train_tiny,
)
from tests.support.launch import TINY, run, succeed
from tests.support.memory_meters import a_model
from tests.support.metrics import read_metrics
from tests.support.plain_gpt import PlainGPT, plain_adamw
from tests.support.results import weights
from tests.support.token_files import write_documents

SIZES = [3, 3, 8, 8, 8, 5, 5]  # of the iterations of "0:3 2:8 5:5"
UNEVEN: dict[str, Any] = dict(
    batch_size=None, batch_size_schedule=("0:3", "2:8", "5:5"), micro_batch_size=2
) | dict(allow_nondivisible_batch_size=True, lr_warmup=2)


def one_by_one(count: int, phase: str = "training", **options: Any) -> Tensor:
    """Return the first samples of a phase, (count, s + 1)."""
    options = dict(batch_size=1, train_iters=count, validation_iters=count) | options
    batches = open_data(tiny_config(**options), 0, 1).batches(phase, 0, count)
    return torch.cat([batch.tokens for (batch,) in batches])


def token_losses(model: PlainGPT, samples: Tensor, z_loss: float) -> Tensor:
    """Return cross-entropy and z-loss per token, (tokens,)."""
    logits, labels = model(samples[:, :-1]).flatten(0, 1).float(), samples[:, 1:].flatten()
    return (
        functional.cross_entropy(logits, labels, reduction="none")
        + z_loss * logits.logsumexp(-1).square()
    )


def plain_loop(
    options: dict[str, Any], initial: dict[str, np.ndarray], together: int
) -> Trajectory:
    """Train plain torch on exactly the samples of each batch; `together` samples form a micro-step
    and share a mean."""
    config = tiny_config(
        **{**options, "micro_batch_size": 1, "allow_nondivisible_batch_size": False}
    )
    model = PlainGPT(config.model)
    model.load(initial)
    update = plain_adamw(model, config.optimizer)
    samples = one_by_one(sum(SIZES))
    losses = []
    norms = []
    for iteration, batch in enumerate(samples.split(SIZES), start=1):
        means = [
            token_losses(model, part, config.training.logit_z_loss).mean()
            for part in batch.split(together)
        ]
        loss = torch.stack(means).mean()
        norms.append(update(loss, 1e-3 * min(iteration, 2) / 2))
        losses.append(loss.item())
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    return Trajectory(losses, norms, initial, weights, {})


@pytest.mark.parametrize("loss_reduction", ["token", "micro_mean"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_uneven_batches_train_as_in_plain_torch(ranks: int, loss_reduction: str) -> None:
    """Losses to 1e-6 and weights to 1e-5 of a loop on the real samples alone, with a z-loss; the
    two ways of averaging are told apart.
    """
    options = {**UNEVEN, "zero_stage": 3, "loss_reduction": loss_reduction, "logit_z_loss": 0.02}
    ours = run_distributed(ranks, train_tiny, options, len(SIZES))[0]
    together = 2 * ranks if loss_reduction == "micro_mean" else max(SIZES)
    plain = plain_loop(options, ours.initial, together)
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-6)
    np.testing.assert_allclose(ours.grad_norms, plain.grad_norms, rtol=1e-5)
    for name, weight in plain.weights.items():
        if not name.endswith("query_key_value.bias"):  # key biases: their exact gradient is zero
            np.testing.assert_allclose(ours.weights[name], weight, rtol=0, atol=1e-5, err_msg=name)
    other = plain_loop(
        options, ours.initial, max(SIZES) if loss_reduction == "micro_mean" else 2 * ranks
    )
    assert np.abs(np.subtract(other.losses, plain.losses)).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "same"),
    [
        # One round of micro-batches in every iteration, more or less full: no bit differs.
        pytest.param(
            dict(batch_size_schedule=("0:3", "1:4", "3:1"), micro_batch_size=2),
            (1, 2, 3),
            marks=pytest.mark.slow,
        ),
        (
            dict(
                batch_size_schedule=("0:6", "2:8"),
                micro_batch_size=2,
                breadth_first_micro_batches=2,
            ),
            (1, 2, 3),
        ),
        # Several: their gradients are added up in buffers (ZeRO 1) or in shards (ZeRO 2 and 3).
        pytest.param(
            dict(batch_size_schedule=("0:4", "2:12", "3:7"), micro_batch_size=2),
            (2, 3),
            marks=pytest.mark.slow,
        ),
        (
            dict(
                batch_size_schedule=("0:4", "2:11"),
                micro_batch_size=1,
                breadth_first_micro_batches=2,
            ),
            (2, 3),
        ),
    ],
    ids=str,
)
def test_zero_stages_agree_on_a_schedule(options: dict[str, Any], same: tuple[int, ...]) -> None:
    """On 2 ranks in bf16, losses, norms and weights are bit-identical where gradients sum alike,
    else close."""
    stages = [{**UNEVEN, "num_layers": 3, **options, "zero_stage": stage} for stage in (1, 2, 3)]
    runs = run_distributed(2, train_several, stages, 5)[0]
    first = runs[same[0] - 1]
    for stage, other in enumerate(runs, start=1):
        if stage in same:
            assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms), stage
            assert same_weights(other.weights, first.weights), stage
        np.testing.assert_allclose(other.losses, first.losses, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_masks_labels_and_leaves_tokens_alone(rows: int) -> None:
    """A single row too, whose labels could share the tokens' memory: an embedding has no entry
    -1."""
    tokens = torch.arange(rows * 5).view(rows, 5)
    found = micro_batch(
        HostBatch(tokens.clone(), rows - 1, padding=1), torch.device("cpu"), None, None
    )
    assert torch.equal(found.tokens, tokens[:, :-1])
    assert torch.equal(found.labels[:-1], tokens[:-1, 1:]) and set(found.labels[-1].tolist()) == {
        MASKED
    }


def training_lines(experiment: Path) -> list[dict[str, Any]]:
    keys = ("iteration", "loss", "grad_norm", "batch_size", "consumed_samples", "consumed_tokens")
    lines = {
        line["iteration"]: line
        for line in read_metrics(experiment / "metrics.jsonl")
        if line["phase"] == "training"
    }
    return [{key: line[key] for key in keys} for line in lines.values()]


def test_a_run_with_a_schedule_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Stopping before, at and after a change of the batch size, inside log windows, changes neither
    log nor bits.

    A log line has the mean over all tokens of its steps, and the counts of the schedule.
    """
    flags = [
        *TINY,
        "--batch_size=none",
        "--batch_size_schedule=0:4 2:10 5:6",
        *"--micro_batch_size=2 --log_interval=3 --allow_nondivisible_batch_size=1".split(),
        *"--loss_reduction=micro_mean --train_iters=8".split(),
    ]
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    every = tmp_path / "every"
    succeed([*flags, f"--experiment_dir={whole}"])
    for stop in (1, 3, 5, 7, 8):
        succeed([*flags, f"--experiment_dir={stopped}", f"--stop_interval={stop}"])
    assert len(list((stopped / "runs").iterdir())) == 5
    lines = training_lines(whole)
    assert training_lines(stopped) == lines and weights(stopped) == weights(whole)
    assert [line["iteration"] for line in lines] == [1, 4, 7, 8]
    assert [line["batch_size"] for line in lines] == [4, 10, 6, 6]
    assert [line["consumed_samples"] for line in lines] == [4, 28, 50, 56]
    assert all(line["consumed_tokens"] == 16 * line["consumed_samples"] for line in lines)
    succeed([*flags, f"--experiment_dir={every}", "--log_interval=1"])
    single = {line["iteration"]: line for line in training_lines(every)}
    for line, steps in zip(lines[1:3], ((2, 3, 4), (5, 6, 7)), strict=True):
        tokens = [single[step]["batch_size"] for step in steps]
        mean = np.average([single[step]["loss"] for step in steps], weights=tokens)
        assert line["loss"] == pytest.approx(mean, rel=1e-12)


def test_another_schedule_on_resume_is_said(tmp_path: Path) -> None:
    """The schedule that is given decides about the data; what that repeats or leaves out is said,
    with the fix, and the fix works."""
    flags = [*TINY, f"--experiment_dir={tmp_path}"]
    succeed([*flags, "--batch_size=4", "--train_iters=3"], 1)
    outcome = run([*flags, "--batch_size=8", "--train_iters=4"], 1)
    fix = "--batch_size_schedule=0:4 3:8"
    assert "batch_size: 4 in the checkpoint, 8 now" in outcome.output
    advice = 'to continue after the last sample read, write --batch_size_schedule="0:4 3:8" instead of --batch_size'
    assert (
        "the first 3 iterations ended at sample 12, but end at 24 with the current batch size: 12 samples are left "
        f"out; {advice}" in outcome.output
    )
    assert training_lines(tmp_path)[-1]["consumed_samples"] == 20  # as many as were read
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "checkpoints" / "04")
    assert (
        "samples are"
        not in succeed(
            [*flags, "--batch_size=none", fix, "--micro_batch_size=4", "--train_iters=4"], 1
        ).output
    )
    assert training_lines(tmp_path)[-1]["consumed_samples"] == 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of a data set with 23 samples in the validation documents."""
    prefix, generator = str(tmp_path_factory.mktemp("corpus") / "corpus"), np.random.default_rng(0)
    write_documents(prefix, (generator.integers(0, 64, size=size) for size in (400, 7, 150, 213)))
    return prefix


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_whole_validation_split_counts_once(ranks: int, corpus: str, tmp_path: Path) -> None:
    """The loss at iteration 0 is plain torch's over every sample of an epoch, without z-loss,
    whatever the batches; it comes before the first iteration, and not again on resume.
    """
    files = dict(dataset_source="list", data_path=(corpus,), split=(1.0, 3.0), seed=1)
    samples = one_by_one(23, "validation", **files)
    assert len({tuple(row) for row in samples.tolist()}) == 23
    config = tiny_config(max_position_embeddings=16)
    model = PlainGPT(config.model)
    model.load(full_weights(a_model(config, layers_of(config))))
    expected = token_losses(model, samples, 0.0).mean().item()
    flags = [
        *TINY,
        "--dataset_source=list",
        f"--data_path={corpus}",
        "--split=1,3",
        f"--experiment_dir={tmp_path}",
        *"--validation_iters=all --validation_at_start=1 --validation_interval=2 --eval_micro_batch_size=3".split(),
        "--batch_size=none",
        "--batch_size_schedule=0:4 1:8",
        "--logit_z_loss=0.1",
        "--seed=1",
    ]
    for iterations in (2, 3):
        outcome = succeed([*flags, f"--train_iters={iterations}"], ranks)
    assert re.search(
        r"validation data \.+ 23 samples out of 370 tokens: each sample once\n", outcome.output
    )
    lines = [
        line for line in read_metrics(tmp_path / "metrics.jsonl") if line["phase"] == "validation"
    ]
    assert [line["iteration"] for line in lines] == [0, 2, 3]
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_each_data_set_is_validated_by_itself(corpus: str, tmp_path: Path) -> None:
    """Over the whole validation data, the losses of the data sets add up to the loss of the blend,
    in every output."""
    other = tmp_path / "other"
    write_documents(other, (np.arange(100) % 64 for _ in range(4)))
    flags = [
        *TINY,
        "--dataset_source=list",
        "--data_path",
        corpus,
        str(other),
        "--split=1,3",
        "--train_iters=1",
    ]
    flags += [
        "--validation_iters=all",
        "--validation_by_dataset=1",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    outcome = succeed(flags)
    (line,) = [
        line
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["phase"] == "validation"
    ]
    samples = {"corpus": 23, "other": 18}
    total = sum(line[f"loss/{name}"] * count for name, count in samples.items())
    assert line["loss"] == pytest.approx(total / 41, rel=1e-6)
    assert line["loss/corpus"] != pytest.approx(line["loss/other"], rel=1e-4)
    assert (
        f" | corpus: {line['loss/corpus']:.5f} | other: {line['loss/other']:.5f}" in outcome.output
    )


def test_a_restored_log_window_continues() -> None:
    """The mean loss covers the tokens before and after a restart; a dropped update counts in
    neither."""
    window = LogWindow(torch.device("cpu"))
    window.load_state({"loss": (300.0).hex(), "tokens": 3 * 64})
    window.add(torch.tensor(50.0, dtype=torch.float64), 128, torch.tensor(False), 0.0)
    window.add(torch.tensor(torch.nan, dtype=torch.float64), 32, torch.tensor(True), 0.0)  # dropped
    assert window.close()["loss"] == 350 / (3 * 64 + 128)


def test_the_guide_is_true(tmp_path: Path) -> None:
    """The command in the guide prints the text below it, and its flags exist."""
    guide = documents.read("batches")
    ((command, shown),) = documents.shown(guide)
    assert documents.run(command, documents.make_checkout(tmp_path)).strip() == shown
    named = set(re.findall(r"--([a-z_]+)", guide)) - {"csv"}
    assert len(named) > 8 and named <= SPELLINGS.keys()
