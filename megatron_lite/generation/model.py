"""A model in one process: load it, and measure its loss on given tokens.

    nats = sum of -ln p(token | earlier tokens of its sample)        loss = nats / tokens        perplexity = exp(loss)
    bits per byte = nats / ln 2 / bytes of UTF-8 of the tokens' text

Bits per byte compares models with different tokenizers. It counts the bytes of exactly the
predicted tokens: the first token of a text has no context and is in neither sum. Special tokens,
such as the end of a document, are predicted like others, so they cost bits, but have no bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.data.tokenizing import Tokenizer
from megatron_lite.errors import DataError, UsageError
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.weight_source import WeightSource, fill
from megatron_lite.kernels.attention.choice import Work, choose_attention
from megatron_lite.kernels.choice import REFERENCES, failure
from megatron_lite.model.embedding_and_head import Head
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.model.layer import MASKED, Layer, MicroBatch
from megatron_lite.parameter import DTYPES
from megatron_lite.run.host import useful_threads
from megatron_lite.run.launch import requested_threads, thread_limit

# Reading a weight from memory takes a CPU as long as ten multiplications with it: a product of one
# row took 0.30 ns per weight, one of 32 rows 0.03 ns per weight and row.
READING = 10
UNKNOWN_LENGTH = 2048  # of samples of a model that does not say how it was trained


class LocalModel:
    """All layers of a model with their weights, in one process."""

    def __init__(
        self, source: WeightSource, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load a model for texts of up to `length` tokens.

        Raises:
            CheckpointError: if the source is incomplete, damaged or not supported.
        """
        # Without training-only options.
        self.config = dataclasses.replace(
            source.model,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            embedding_dropout=0.0,
            make_vocab_size_divisible_by=1,
        )
        self.device = device
        self.dtype = dtype
        self.longest = length
        self.training = source.training
        self.folder = source.facts.folder
        self._most_threads = torch.get_num_threads()
        self.layers = build_gpt(self.config, length, REFERENCES)
        source.check(shapes_of(self.layers))
        source.verify()
        for layer in self.layers:
            fill(layer, source, lambda numel: torch.empty(numel, dtype=dtype, device=device))

    def prompt_attention(self) -> str:
        """Return the fastest attention backend on this device for one text without dropout."""
        config, device = self.config, self.device
        if config.attention_softmax_in_fp32:
            return "math"
        work = Work(
            self.dtype,
            config.kv_channels,
            windowed=any(config.windows),
            heads_per_group=config.num_attention_heads // config.head_groups,
            soft_cap=config.attention_soft_cap,
            sinks=config.attention_sinks,
        )
        return choose_attention(
            "auto", device, work, works=lambda backend: failure(backend, device, work) is None
        )

    @torch.no_grad()
    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Return the summed loss of the labels, (), or, with a cache, the logits (t, v) that it
        asks for."""
        return self._through(self.layers, micro_batch)

    @torch.no_grad()
    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits after each token, (b, s, v)."""
        *layers, head = self.layers
        assert isinstance(head, Head)
        return head.logits(self._through(layers, micro_batch))

    def token_losses(self, micro_batch: MicroBatch) -> Tensor:
        """Return -ln p of each label, (b, s), in fp32; 0 where it is masked. All logits are held at
        a time."""
        logits, labels = self.logits(micro_batch).float(), micro_batch.labels
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="none"
        )
        return losses.view_as(labels)

    def _through(self, layers: Sequence[Layer], micro_batch: MicroBatch) -> Tensor:
        if self.device.type == "cpu" and requested_threads() is None:
            work = (micro_batch.tokens.numel() + READING) * self.config.hidden_size**2
            torch.set_num_threads(min(self._most_threads, useful_threads(work)))
        hidden: Tensor | None = None
        for layer in layers:
            hidden = layer(hidden, micro_batch)
        assert hidden is not None
        return hidden


def choose_device(name: str) -> torch.device:
    """Return the device to run on; on a CPU, respect the user's thread limit.

    Raises:
        UsageError: if `name` is cuda and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device=cuda: no CUDA device is available; use --device=cpu or leave it out"
        )
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, thread_limit() or threads))
    return torch.device("cpu")


def load_model(
    folder: Path, length: int | None, dtype: str | None, device: torch.device, weights: str = "raw"
) -> LocalModel:
    """Load a folder's model for texts of up to `length` tokens; warn if it was trained with shorter
    ones.

    Args:
        length: None: the training's length, or if unknown the number of positions.
        dtype: fp32, bf16 or fp16; None: fp32 on a CPU, bf16 on a GPU.
        weights: raw, or average: the running averages in one of our checkpoints.

    Raises:
        CheckpointError: if the folder contains no complete, supported model.
        UsageError: if there are fewer learned positions.
        RotatedError: if a live run deletes what is read; see `rotation.again`.
    """
    with open_source(folder, weights=weights, whole=True) as source:
        if source.folder != folder or source.facts is not source:  # a model that adapters name
            print(f"model: {source.folder}, {source.description}", file=sys.stderr)
        positions = source.model.max_position_embeddings
        trained = source.training.get("sequence_length", positions)
        if length is not None and length > trained:
            if source.model.use_position_embeddings and length > positions:
                raise UsageError(
                    f"--sequence_length={length}: the model has {positions:,} learned positions"
                )
            files.logger.warning(
                "--sequence_length=%d: the model was trained with at most %d tokens",
                length,
                trained,
            )
        chosen = DTYPES[dtype or ("fp32" if device.type == "cpu" else "bf16")]
        return LocalModel(source, length or trained, chosen, device)


def common_length(folders: Sequence[Path], weights: str) -> int:
    """Return the models' shortest training length, or UNKNOWN_LENGTH; models without one limit it
    by their positions."""
    found = []
    for folder in folders:
        with open_source(folder, weights=weights) as source:
            found.append(
                (source.training.get("sequence_length"), source.model.max_position_embeddings)
            )
    most = [] if any(length for length, _ in found) else [UNKNOWN_LENGTH]
    return min(most + [length or positions for length, positions in found])


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
        """Return `loss`, `perplexity` and `bits_per_byte` (None: infinite or unknown), `tokens` and
        `bytes`."""
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        perplexity = math.exp(self.loss) if self.loss < 700 else None
        found = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": bits}
        return {**found, "tokens": self.tokens, "bytes": self.bytes}


def evaluate(
    model: LocalModel,
    micro_batches: Iterable[MicroBatch],
    token_bytes: NDArray[np.int64] | None,
    progress: Callable[[Totals], None] = lambda totals: None,
    each: Callable[[int, int, float], None] | None = None,
) -> Totals:
    """Predict every label that is not masked, one micro-batch at a time.

    token_bytes: the tokenizer's, or None; tokens beyond it have no bytes. progress: called after
    each micro-batch. each: called with the token before each label, the label and its loss.

    Raises:
        DataError: if there is nothing to predict.
    """
    totals = Totals(bytes=None if token_bytes is None else 0)
    for batch in micro_batches:
        counts = batch.labels >= 0
        labels = batch.labels[counts].cpu().numpy()
        if each is None:
            totals.nats += float(model.run(batch))
        else:
            losses = model.token_losses(batch)[counts].tolist()
            totals.nats += math.fsum(losses)
            for row in zip(batch.tokens[counts].tolist(), labels.tolist(), losses, strict=True):
                each(*row)
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
    """Cut texts, each followed by an end-of-document token, as one stream into samples of
    `sequence_length` tokens.

    The last label of a sample is the first input of the next, so each token but the first is
    predicted once. separate: attention does not cross documents.

    Raises:
        DataError: for a token beyond the vocabulary.
    """
    stream = _samples(texts, tokenizer, vocab_size, sequence_length)
    while samples := list(itertools.islice(stream, rows)):
        yield _micro_batch(samples, sequence_length, device, separate)


def _samples(
    texts: Iterable[str], tokenizer: Tokenizer, vocab_size: int, length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (up to length + 1 tokens, their documents' numbers); neighbours share a token."""
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
    owners = torch.full((len(samples), length), -1)
    for row, (ids, documents) in enumerate(samples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        owners[row, : len(ids) - 1] = torch.tensor(documents[:-1])
    starts = _starts(owners) if separate else None
    return micro_batch(
        HostBatch(tokens, len(samples), starts, masked=owners < 0), device, None, None
    )


def _starts(owners: Tensor) -> Tensor:
    """Return where runs of equal numbers in the rows of (b, s) begin, flattened, followed by b
    s."""
    begins = torch.ones_like(owners, dtype=torch.bool)
    begins[:, 1:] = owners[:, 1:] != owners[:, :-1]
    return torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([owners.numel()])]).to(
        torch.int32
    )
