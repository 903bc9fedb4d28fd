"""The loss of a model on given tokens, its perplexity, and bits per byte of the tokens' text.

    nats = sum of -ln p(token | earlier tokens of its sample)        loss = nats / tokens        perplexity = exp(loss)
    bits per byte = nats / ln 2 / bytes of UTF-8 of the tokens' text

Bits per byte compares models with different tokenizers. It counts the bytes of exactly the predicted tokens: the first
token of a text has nothing before it and is in neither sum. Special tokens, such as the end of a document, are
predicted like others, so they cost bits, but they spell no bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.data.tokenizing import Tokenizer
from megatron_lite.errors import DataError
from megatron_lite.generation.model import LocalModel
from megatron_lite.model.layer import MicroBatch


@dataclass
class Totals:
    """Sums over the tokens predicted so far."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0  # None: without a tokenizer

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    def record(self) -> dict[str, Any]:
        """Return `loss`, `perplexity` and `bits_per_byte` (None: infinite or unknown), `tokens` and `bytes`."""
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        perplexity = math.exp(self.loss) if self.loss < 700 else None
        found = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": bits}
        return {**found, "tokens": self.tokens, "bytes": self.bytes}


def evaluate(
    model: LocalModel,
    micro_batches: Iterable[MicroBatch],
    token_bytes: NDArray[np.int64] | None,
    progress: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """Predict every label that is not masked, one micro-batch at a time.

    token_bytes: of the tokenizer, or None; tokens beyond it spell nothing. progress: called after each micro-batch.

    Raises:
        DataError: if there is nothing to predict.
    """
    totals = Totals(bytes=None if token_bytes is None else 0)
    for batch in micro_batches:
        labels = batch.labels[batch.labels >= 0].cpu().numpy()
        totals.nats += float(model.run(batch))
        totals.tokens += labels.size
        if token_bytes is not None and totals.bytes is not None:
            totals.bytes += int(token_bytes[labels[labels < len(token_bytes)]].sum())
        progress(totals)
    if totals.tokens == 0:
        raise DataError("nothing to predict: a text needs two tokens")
    return totals


def text_batches(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    sequence_length: int,
    rows: int,
    device: torch.device,
    separate: bool = False,
) -> Iterator[MicroBatch]:
    """Cut texts, each followed by an end-of-document token, as one stream into samples of `sequence_length` tokens.

    The last label of a sample is the first input of the next, so each token but the first is predicted once.
    separate: attention does not cross documents.

    Raises:
        DataError: for a token beyond the vocabulary.
    """
    stream = _samples(texts, tokenizer, vocab_size, sequence_length)
    while samples := list(itertools.islice(stream, rows)):
        yield _micro_batch(samples, sequence_length, device, separate)


def _samples(
    texts: Iterable[str], tokenizer: Tokenizer, vocab_size: int, length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (up to length + 1 tokens, numbers of their documents); neighbours share a token."""
    tokens: list[int] = []
    documents: list[int] = []
    for number, text in enumerate(texts):
        new = [*tokenizer.encode(text), tokenizer.end_of_document]
        if max(new) >= vocab_size:
            raise DataError(
                f"token {max(new)} of a text is beyond the model's vocabulary of {vocab_size}: "
                "give the model's own tokenizer with --tokenizer_file"
            )
        tokens += new
        documents += [number] * len(new)
        start = 0
        while len(tokens) - start > length:
            yield tokens[start : start + length + 1], documents[start : start + length + 1]
            start += length
        del tokens[:start], documents[:start]
    if len(tokens) > 1:
        yield tokens, documents


def _micro_batch(
    samples: list[tuple[list[int], list[int]]], length: int, device: torch.device, separate: bool
) -> MicroBatch:
    """Pad short samples at their end, where padding affects no prediction that counts."""
    tokens = torch.zeros(len(samples), length + 1, dtype=torch.int64)
    masked = torch.ones(len(samples), length, dtype=torch.bool)
    owners = torch.full((len(samples), length), -1)
    for row, (ids, documents) in enumerate(samples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        masked[row, : len(ids) - 1] = False
        owners[row, : len(ids) - 1] = torch.tensor(documents[:-1])
    starts = _starts(owners) if separate else None
    return micro_batch(HostBatch(tokens, len(samples), starts, masked=masked), device, None, None)


def _starts(owners: Tensor) -> Tensor:
    """Return where runs of equal numbers in the rows of (b, s) begin, flattened, and at last b s."""
    begins = torch.ones_like(owners, dtype=torch.bool)
    begins[:, 1:] = owners[:, 1:] != owners[:, :-1]
    return torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([owners.numel()])]).to(torch.int32)
