"""`load`: a model in this process, to look at its losses, logits, next tokens and texts."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.rotation import again
from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.data.tokenizing import Tokenizer
from megatron_lite.errors import DataError, UsageError
from megatron_lite.generation.model import LocalModel, choose_device, load_model
from megatron_lite.generation.prompts import encode_prompt, open_tokenizer, token_text
from megatron_lite.generation.writer import Writer
from megatron_lite.model.layer import MicroBatch
from megatron_lite.parameter import DTYPES


class TokenLoss(NamedTuple):
    """A token of a text with -ln p(token | the tokens before it), in nats."""

    token: str
    id: int
    loss: float


class NextToken(NamedTuple):
    """A token that may come next, with its probability."""

    token: str
    id: int
    probability: float


@contextlib.contextmanager
def _own_threads() -> Iterator[None]:
    """Give torch its number of threads back: small models run with fewer."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load(
    folder: str | Path,
    *,
    tokenizer_file: str | None = None,
    weights: Literal["raw", "average"] = "raw",
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    sequence_length: int | None = None,
) -> Model:
    """Load the model of a run, a checkpoint, an export or a Hugging Face folder; options as those
    of `megatron_lite generate`.

    Raises: RunError with the words of the command's error.
    """
    path, devices = Path(folder).expanduser(), ("auto", "cpu", "cuda")
    choices = (weights, ("raw", "average")), (dtype, (None, *DTYPES)), (device, devices)
    for value, legal in choices:
        if value not in legal:
            raise UsageError(f"{value!r}: choose from {legal}")
    if sequence_length is not None and sequence_length < 1:
        raise UsageError(f"sequence_length={sequence_length}: write a number of at least 1")

    def opened() -> Model:
        tokenizer = open_tokenizer(path, tokenizer_file, special_tokens=True)
        found = load_model(path, sequence_length, dtype, choose_device(device), weights)
        return Model(found, tokenizer)

    with _own_threads():
        return again(opened)


@dataclass(frozen=True, repr=False)
class Model:
    """A model in this process, as `load` returns it.

    Attributes:
        tokenizer: has `encode(text)` and `decode(ids)`; special tokens spelled out in a text count
            as such.
    """

    _model: LocalModel
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        return f"Model({str(self._model.folder)!r})"

    def loss(self, text: str | Sequence[int]) -> float:
        """Return the mean of `token_losses` in nats."""
        losses = self.token_losses(text)
        return sum(token.loss for token in losses) / len(losses)

    @_own_threads()
    def token_losses(self, text: str | Sequence[int]) -> list[TokenLoss]:
        """Return the loss of every token but the first, as `evaluate --per_token` prints it.

        text: or its ids. A text longer than the samples of the training is cut into such samples.

        Raises: DataError for fewer than two tokens, or one that the model does not know.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if len(ids) < 2:
            raise DataError("nothing to predict: a text needs two tokens")
        length = self._model.longest
        losses = list[float]()
        for start in range(0, len(ids) - 1, length):
            batch = self._micro_batch(ids[start : start + length + 1])
            losses += self._model.token_losses(batch)[0].tolist()
        return [
            TokenLoss(token_text(self.tokenizer, before, token), token, loss)
            for before, token, loss in zip(ids[:-1], ids[1:], losses, strict=True)
        ]

    @_own_threads()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits (s, v) after each of (s,) ids, in fp32 on the CPU.

        Raises: DataError for no ids, more than a sample of the training has, or an unknown one.
        """
        if not 1 <= len(ids) <= self._model.longest:
            raise DataError(f"{len(ids):,} ids; give 1 to {self._model.longest:,}")
        return self._model.logits(self._micro_batch([*ids, 0]))[0].float().cpu()

    def next_tokens(self, text: str | Sequence[int], k: int = 10) -> list[NextToken]:
        """Return the `k` most probable tokens after a text, or its ids, the most probable first."""
        if k < 1:
            raise UsageError(f"k={k}: write a number of at least 1")
        ids = self._prompt(text) if isinstance(text, str) else text
        found = self.logits(ids)[-1].softmax(0).topk(min(k, self._model.config.vocab_size))
        return [
            NextToken(token_text(self.tokenizer, ids[-1], token), token, probability)
            for probability, token in zip(*map(Tensor.tolist, found), strict=True)
        ]

    @_own_threads()
    def generate(
        self,
        text: str,
        max_new_tokens: int = 64,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 1234,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the continuation that `megatron_lite generate` writes with these options.

        Raises: RunError with the words of the command's error.
        """
        legal = max_new_tokens >= 1 and temperature >= 0 and 0 < top_p <= 1 and seed >= 0
        if not legal or (top_k is not None and top_k < 1) or isinstance(stop, str) or "" in stop:
            rule = "max_new_tokens, top_k >= 1; temperature, seed >= 0; 0 < top_p <= 1; stop: a list, no empty text"
            raise UsageError(f"generate() needs {rule}")
        options = Namespace(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            chat=False,
            add_special_tokens=True,
        )
        writer = Writer(options, self._model, self.tokenizer)
        ((_, _, continuation),) = writer.continued([text], lambda *_: None)
        return continuation

    def _prompt(self, text: str) -> list[int]:
        vocabulary, longest = self._model.config.vocab_size, self._model.longest
        return encode_prompt(self.tokenizer, text, True, vocabulary, longest)

    def _micro_batch(self, ids: Sequence[int]) -> MicroBatch:
        """Return a micro-batch of one sample: all ids but the last, and as labels all but the
        first."""
        vocabulary = self._model.config.vocab_size
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            rule = f"the model's vocabulary has {vocabulary:,} tokens"
            raise DataError(f"token {wrong[0]}: {rule}; give the model's own tokenizer")
        return micro_batch(HostBatch(torch.tensor([ids]), 1), self._model.device, None, None)
