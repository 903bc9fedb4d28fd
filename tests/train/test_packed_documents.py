"""--cross_document_attention=0 from the files to the weights: packed documents do not see each
other."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.model.gpt import build_gpt
from megatron_lite.model.layer import MASKED, Layer, MicroBatch
from tests.support.harness import (
    ROTARY_GATED,
    full_weights,
    run_distributed,
    start_run,
    tiny_config,
    train_several,
    train_tiny,
)
from tests.support.plain_gpt import PlainGPT, plain_adamw
from tests.support.token_files import write_documents

SIZES = [7, 0, 30, 1, 1, 16, 5, 17, 0, 0, 40, 2, 3, 64, 11, 16, 9, 50]
ITERATIONS = 6
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "mistral": {**ROTARY_GATED, "head_groups": 2, "window_size": 5},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensor]:
    """Return the prefix of a data set without repeated tokens, and the document of each token."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    tokens = np.random.default_rng(0).permutation(sum(SIZES))
    write_documents(prefix, np.split(tokens, np.cumsum(SIZES)[:-1]))
    documents = torch.empty(len(tokens), dtype=torch.int64)
    documents[torch.from_numpy(tokens)] = torch.from_numpy(np.repeat(np.arange(len(SIZES)), SIZES))
    return prefix, documents


def options(prefix: str, **more: Any) -> dict[str, Any]:
    return {
        "dataset_source": "list",
        "data_path": (prefix,),
        "split": (1.0,),
        "vocab_size": sum(SIZES),
        "cross_document_attention": False,
        "lr_warmup": 2,
        "train_iters": ITERATIONS,
        **more,
    }


def positions_within(numbers: Tensor) -> Tensor:
    """Return each token's position in its piece of a document, counted one by one; numbers:
    documents (b, s)."""
    positions = torch.zeros_like(numbers)
    for column in range(1, numbers.shape[1]):
        same = numbers[:, column] == numbers[:, column - 1]
        positions[:, column] = torch.where(same, positions[:, column - 1] + 1, 0)
    return positions


def plain_losses(
    values: dict[str, Any], initial: dict[str, np.ndarray], documents: Tensor
) -> list[float]:
    """Return the losses of a plain torch loop with attention masked by document."""
    config = tiny_config(**values)
    model = PlainGPT(config.model)
    model.load(initial)
    update, losses = plain_adamw(model, config.optimizer), []
    for iteration, ((tokens, *_),) in enumerate(
        open_data(config, 0, 1).batches("training", 0, ITERATIONS), start=1
    ):
        numbers = documents[tokens]
        for block in model.blocks:
            block.documents = None if config.data.cross_document_attention else numbers[:, :-1]
            block.positions = (
                positions_within(numbers[:, :-1]) if config.data.reset_position_ids else None
            )
        loss = model.loss(
            tokens, numbers[:, 1:] != numbers[:, :-1] if config.data.mask_document_starts else None
        )
        update(loss, 1e-3 * min(1.0, iteration / 2))
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", MODELS)
def test_training_equals_plain_torch(corpus: tuple[str, Tensor], model: str) -> None:
    """One rank, two ranks with ZeRO 3, and a masked loop agree; attention across documents
    differs."""
    prefix, documents = corpus
    values = options(prefix, **MODELS[model])
    runs = [values, {**values, "cross_document_attention": True}]
    one, crossing = run_distributed(1, train_several, runs, ITERATIONS)[0]
    np.testing.assert_allclose(one.losses, plain_losses(values, one.initial, documents), rtol=1e-6)
    layout = {"zero_stage": 3, "num_workers": 1, "micro_batch_size": 1}
    two = run_distributed(2, train_tiny, {**values, **layout}, ITERATIONS)[0]
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)
    assert np.abs(np.array(crossing.losses) / np.array(one.losses) - 1).min() > 1e-5


@pytest.mark.parametrize(
    ("crossing", "model"),
    [
        *((True, "gpt2"), (False, "mistral")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, "mistral"), (False, "gpt2"))
        ),
    ],
)
def test_positions_and_labels_by_document_equal_plain_torch(
    corpus: tuple[str, Tensor], model: str, crossing: bool
) -> None:
    """One rank and a plain loop agree; so do two ranks with a worker each and smaller
    micro-batches, whose counts of labels differ: the mean is over the labels of the whole batch."""
    prefix, documents = corpus
    more = {
        "reset_position_ids": True,
        "mask_document_starts": True,
        "cross_document_attention": crossing,
    }
    values = {**options(prefix, **MODELS[model]), **more}
    # Rotary positions are relative: within a document it makes no difference where they begin.
    matters = crossing or not values.get("use_rotary_embeddings")
    switched_off = ["reset_position_ids"] * matters + ["mask_document_starts"]
    runs = [values, *({**values, option: False} for option in switched_off)]
    one, *others = run_distributed(1, train_several, runs, ITERATIONS)[0]
    np.testing.assert_allclose(one.losses, plain_losses(values, one.initial, documents), rtol=1e-6)
    layout = {"zero_stage": 2, "num_workers": 1, "micro_batch_size": 1}
    two = run_distributed(2, train_tiny, {**values, **layout}, ITERATIONS)[0]
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)
    for option, other in zip(switched_off, others, strict=True):
        assert np.abs(np.array(other.losses) / np.array(one.losses) - 1).max() > 1e-5, option


def random_layers(config: ModelConfig, length: int, std: float) -> list[Layer]:
    torch.manual_seed(0)
    layers = build_gpt(config, length)
    for layer in layers:
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape) * std
    return layers


PATHS: dict[str, dict[str, Any]] = {
    "long": {},
    "equal": {"lengths": (16, 16, 16, 16)},
    "windows": {"window_size": 5},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reset", [True, False])
def test_each_document_has_the_loss_that_it_has_alone(model: str, path: str, reset: bool) -> None:
    """The loss of every label of a packed batch is that of its document alone, in fp32, whichever
    way attention takes; learned positions that are not reset must be given to it, rotary ones are
    relative."""
    more = dict(PATHS[path])
    lengths: tuple[int, ...] = more.pop("lengths", (1, 9, 22, 3, 29))  # of two samples
    config = tiny_config(**{**MODELS[model], **more, "sequence_length": 32}).model
    layers = random_layers(config, 32, 0.1)
    tokens = torch.randint(config.vocab_size, (64,))
    labels = torch.randint(config.vocab_size, (64,))
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    within = torch.cat([torch.arange(length) for length in lengths])
    positions = within if reset else torch.arange(64) % 32
    packed = Documents(starts, lengths)
    whole = losses(layers, tokens, labels, positions if reset else None, packed, rows=2)
    for first, length in zip(starts.tolist(), lengths, strict=False):
        piece = slice(first, first + length)
        given = None if reset else positions[piece]
        alone = losses(layers, tokens[piece], labels[piece], given, None, rows=1)
        torch.testing.assert_close(whole[piece], alone, rtol=1e-6, atol=1e-6)


def losses(
    layers: list[Layer],
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    documents: Documents | None,
    rows: int,
) -> Tensor:
    """Return the loss of each label, (rows s,): that of the head if no other label counts."""
    found, hidden = [], None
    with torch.no_grad():
        for number in range(len(tokens)):
            only = torch.full_like(labels, MASKED)
            only[number] = labels[number]
            shaped = [None if x is None else x.view(rows, -1) for x in (tokens, only, positions)]
            batch = MicroBatch(shaped[0], shaped[1], documents=documents, positions=shaped[2])  # type: ignore[arg-type]
            for layer in layers[:-1] if hidden is None else ():
                hidden = layer(hidden, batch)
            found.append(layers[-1](hidden, batch))
    return torch.stack(found)


def evaluated(
    distributed: Distributed, values: dict[str, Any]
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the logged validation loss and the weights."""
    from megatron_lite.outputs.evaluation import evaluate

    run = start_run(distributed, tiny_config(distributed.world_size, **values))
    records: list[dict[str, Any]] = []
    run.trackers = SimpleNamespace(log=records.append)  # type: ignore[assignment]
    evaluate(run, "training")  # all of the corpus is training data
    return records[0]["loss"], full_weights(run.model)


def test_evaluation_keeps_documents_apart_too(corpus: tuple[str, Tensor]) -> None:
    """The logged loss equals that of masked attention, on one rank and on two."""
    prefix, documents = corpus
    values = options(prefix, layer_norm_init_range=0.2)
    (one, weights), (two, _) = (run_distributed(ranks, evaluated, values)[0] for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-6)
    model = PlainGPT(tiny_config(**values).model)
    model.load(weights)
    losses = []
    for ((tokens, *_),) in open_data(tiny_config(**values), 0, 1).batches(
        "training", 0, ITERATIONS
    ):
        for block in model.blocks:
            block.documents = documents[tokens[:, :-1]]
        losses.append(model.loss(tokens).item())
    assert one == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("apart", [True, False])
def test_a_changed_document_changes_no_other(model: str, apart: bool) -> None:
    """Two samples of three documents each: other tokens in the second document of the first sample
    change every position after them if attention crosses borders, and nothing but that document if
    it does not, to the last bit."""
    config = tiny_config(**MODELS[model]).model
    layers = random_layers(config, 16, 0.3)
    tokens = torch.randint(config.vocab_size, (2, 17))
    changed = tokens.clone()
    changed[0, 5:9] = (tokens[0, 5:9] + 1) % config.vocab_size
    starts = torch.tensor([0, 5, 9, 16, 20, 31, 32], dtype=torch.int32) if apart else None
    outputs = []
    for sample in (tokens, changed):
        batch = micro_batch(HostBatch(sample, len(sample), starts), torch.device("cpu"), None, None)
        hidden = None
        with torch.no_grad():
            for layer in layers[:-1]:
                hidden = layer(hidden, batch)
        outputs.append(hidden)
    differs = (outputs[0] != outputs[1]).any(dim=-1)  # (2, 16)
    # two layers of windows of five positions carry it that far
    reached = range(5, 9) if apart else range(5, 16)
    assert differs[0].nonzero().flatten().tolist() == list(reached)
    assert not differs[1].any()
