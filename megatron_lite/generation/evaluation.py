"""The loss of given tokens: their mean, perplexity, and bits per byte of the text that they spell.

    loss = sum of -ln p(token | those before it in its sample) / tokens        perplexity = exp(loss)
    bits per byte = that sum / ln 2 / bytes of UTF-8 of the tokens' text

Bits per byte compares models with different tokenizers. Its bytes are those of exactly the tokens that were predicted:
the first token of a text, before which there is nothing, is in neither sum. Special tokens, such as the end of a
document, are predicted like others, so they cost bits, but spell no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.data.tokenizing import Tokenizer
from megatron_lite.errors import DataError
from megatron_lite.generation.model import LocalModel
from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.model.layer import MASKED, MicroBatch


@dataclass
class Totals:
    """Sums over the tokens that were predicted so far."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0  # None: nobody knows how tokens are spelled

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    def record(self) -> dict[str, Any]:
        """`loss`, `perplexity`, `bits_per_byte` (None: infinite, or unknown), and the counts that they come from."""
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        perplexity = math.exp(self.loss) if self.loss < 700 else None
        return {
            "loss": self.loss,
            "perplexity": perplexity,
            "bits_per_byte": bits,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def evaluate(
    model: LocalModel,
    micro_batches: Iterable[MicroBatch],
    token_bytes: NDArray[np.int64] | None,
    progress: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """Predict every label that is not masked, one micro-batch at a time. `token_bytes`: a tokenizer's, or None; tokens
    that it does not have spell nothing.

    Raises:
        DataError: if there is nothing to predict.
    """
    totals = Totals(bytes=None if token_bytes is None else 0)
    table = None
    if token_bytes is not None:
        table = torch.zeros(max(model.config.vocab_size, len(token_bytes)), dtype=torch.int64)
        table[: len(token_bytes)] = torch.from_numpy(token_bytes)
    for micro_batch in micro_batches:
        labels = micro_batch.labels[micro_batch.labels >= 0].cpu()
        totals.nats += float(model.run(micro_batch))
        totals.tokens += labels.numel()
        if table is not None and totals.bytes is not None:
            totals.bytes += int(table[labels].sum())
        progress(totals)
    if totals.tokens == 0:
        raise DataError("there is nothing to predict: a text needs two tokens")
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
    """Texts as documents, each with an end-of-document token behind it, as one stream in samples of sequence_length.

    The last label of a sample is the first input of the next, so each token but the first is predicted once.
    `separate`: documents do not look at each other.

    Raises:
        DataError: for a token that the model does not have.
    """
    samples: list[tuple[list[int], list[int]]] = []
    for sample in _samples(texts, tokenizer, vocab_size, sequence_length):
        samples.append(sample)
        if len(samples) == rows:
            yield _micro_batch(samples, sequence_length, device, separate)
            samples = []
    if samples:
        yield _micro_batch(samples, sequence_length, device, separate)


def _samples(
    texts: Iterable[str], tokenizer: Tokenizer, vocab_size: int, length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """(up to length + 1 tokens, numbers of their documents); neighbours share a token."""
    tokens: list[int] = []
    documents: list[int] = []
    for number, text in enumerate(texts):
        new = [*tokenizer.encode(text), tokenizer.end_of_document]
        if max(new) >= vocab_size:
            raise DataError(
                f"token {max(new)} of a text is beyond the model's vocabulary of {vocab_size}: another tokenizer "
                "belongs to this model (--tokenizer_file)"
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
    """Samples that are too short are filled up at their end, where nothing that counts looks."""
    inputs = torch.zeros(len(samples), length, dtype=torch.int64)
    labels = torch.full_like(inputs, MASKED)
    owners = torch.full_like(inputs, -1)
    for row, (tokens, documents) in enumerate(samples):
        count = len(tokens) - 1
        inputs[row, :count] = torch.tensor(tokens[:-1])
        labels[row, :count] = torch.tensor(tokens[1:])
        owners[row, :count] = torch.tensor(documents[:-1])
    documents_of_all = _documents(owners, device) if separate else None
    return MicroBatch(inputs.to(device), labels.to(device), documents=documents_of_all)


def _documents(owners: Tensor, device: torch.device) -> Documents:
    """Runs of equal numbers in the rows of (b, s), none across a border of rows."""
    begins = torch.ones_like(owners, dtype=torch.bool)
    begins[:, 1:] = owners[:, 1:] != owners[:, :-1]
    starts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([owners.numel()])]).to(torch.int32)
    return Documents(starts.to(device), tuple(starts.diff().tolist()))
