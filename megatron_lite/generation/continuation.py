"""Continue prompts in batches; texts do not affect each other.

One pass reads a whole prompt; after that, each pass adds one token to every active text. When a
text ends, the next prompt takes its row.

The next token is the most probable one, or a draw from softmax(logits / temperature), cut by top-k
and top-p. In this order, as in transformers: temperature; then the `top_k` largest; then the most
probable of these until they reach at least `top_p` of their probability (nucleus sampling, Holtzman
et al. 2020, https://arxiv.org/abs/1904.09751).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.errors import NumericsError
from megatron_lite.model.kv_cache import Beginning, KeyValueCache, NextTokens
from megatron_lite.model.layer import MicroBatch


class SamplingOptions(NamedTuple):
    """Temperature and cuts; by default the most probable token."""

    temperature: float = 0.0  # 0: the most probable token
    top_k: int | None = None  # None: all
    top_p: float = 1.0  # 1: all

    def probabilities(self, logits: Tensor) -> Tensor:
        """Map logits (v,) to probabilities (v,), in fp64 on the CPU; the temperature must not be
        0."""
        scaled = logits.detach().cpu().double()
        scaled = (
            scaled - scaled.max()
        ) / self.temperature  # the largest remains 0 at any temperature
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < scaled.topk(self.top_k).values[-1]] = -math.inf
        probabilities = scaled.softmax(0)
        if self.top_p < 1.0:
            ordered, order = probabilities.sort(descending=True, stable=True)
            probabilities[order[ordered.cumsum(0) - ordered >= self.top_p]] = (
                0.0  # the tokens before it suffice
            )
            probabilities /= probabilities.sum()
        return probabilities


NOT_FINITE = -1  # no token: the logits are not finite


class TokenSampler:
    """Samples one text with its own stream of random numbers."""

    def __init__(self, options: SamplingOptions, seed: int) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Sample a token from logits (v,) of any dtype on any device; NOT_FINITE if a logit is
        infinite or NaN."""
        if not math.isfinite(float(logits.abs().max())):
            return NOT_FINITE
        if self._options.temperature == 0.0:
            return int(logits.argmax())
        return int(
            torch.multinomial(self._options.probabilities(logits), 1, generator=self._generator)
        )


# Runs a model pass and returns the logits (t, v) requested by `micro_batch.cache`.
RunPass = Callable[[MicroBatch], Tensor]


@dataclass
class Text:
    """A prompt and its continuation, which grows until `finish` is set."""

    prompt: list[int]
    sampler: TokenSampler
    tokens: list[int] = field(default_factory=list)
    # end: the model ended it; stop: `stops` did; length: max_new_tokens reached; context: the model
    # takes no more.
    finish: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class Limits(NamedTuple):
    """Conditions that end a text."""

    max_new_tokens: int
    longest: int  # tokens of prompt and continuation together
    ends: Collection[int] = ()  # tokens that end a text without being part of it
    stops: Callable[[Text], bool] = lambda text: False
    # A text that grows beyond this length is read anew: its keys would be rotated otherwise.
    read_anew: int | None = None

    def add(self, text: Text, token: int) -> None:
        """Add a token to a text, and end the text if a condition holds."""
        if token in self.ends:
            text.finish = "end"
            return
        text.tokens.append(token)
        if self.stops(text):
            text.finish = "stop"
        elif len(text.tokens) >= self.max_new_tokens:
            text.finish = "length"
        elif text.length >= self.longest:
            text.finish = "context"

    def capacity(self, texts: Sequence[Text]) -> int:
        """Return the tokens that a cache needs for the longest continuation; the last token is
        never read."""
        return max(min(len(text.prompt) + self.max_new_tokens, self.longest) - 1 for text in texts)


@torch.no_grad()
def continue_texts(
    run_pass: RunPass,
    device: torch.device,
    texts: Sequence[Text],
    limits: Limits,
    rows: int,
    agree: Callable[[list[int]], list[int]] = list,
    backend: str = "math",
) -> Iterator[Text]:
    """Continue every text to its end, `rows` at a time; yield each text when it ends.

    Args:
        run_pass: runs the model, on all of its ranks.
        texts: prompts of at least 1 and fewer than `limits.longest` tokens.
        agree: maps the tokens that this rank sampled in a pass to those that all ranks use.
        backend: attention backend for prompts.

    Raises:
        NumericsError: on every rank, if logits are not finite.
    """
    if not texts:
        return
    cache = KeyValueCache(rows, limits.capacity(texts))
    text_of_row: list[Text | None] = [None] * rows
    waiting = iter(texts)
    while True:
        for row in range(rows):
            while (text := text_of_row[row]) is None or text.length - 1 == limits.read_anew:
                if text is None and (text := next(waiting, None)) is None:
                    break
                tokens = torch.tensor([text.prompt + text.tokens], device=device)
                logits = run_pass(MicroBatch(tokens, tokens, cache=Beginning(cache, row, backend)))
                (token,) = _checked(agree([text.sampler(logits[-1])]))
                limits.add(text, token)
                text_of_row[row] = text if text.finish is None else None
                if text.finish is not None:
                    yield text
        active = [(row, text) for row, text in enumerate(text_of_row) if text is not None]
        if not active:
            return
        logits = run_pass(_next_tokens(text_of_row, cache, device))
        sampled = _checked(agree([text.sampler(logits[row]) for row, text in active]))
        for (row, text), token in zip(active, sampled, strict=True):
            limits.add(text, token)
            if text.finish is not None:
                text_of_row[row] = None
                yield text


def _checked(tokens: list[int]) -> list[int]:
    if NOT_FINITE in tokens:
        raise NumericsError(
            "the model's logits are not finite: its weights are broken, or too large for the dtype"
        )
    return tokens


def _next_tokens(
    texts: Sequence[Text | None], cache: KeyValueCache, device: torch.device
) -> MicroBatch:
    """Return a micro-batch with every text's newest token; the logits of rows without a text are
    meaningless.

    With several rows, idle rows are added: a CPU computes a tensor's last elements with other
    instructions than the rest, and products of fewer than four rows treat them differently.
    """
    idle = 0 if len(texts) == 1 else max(1, 4 - len(texts))
    places = [-1 if text is None else text.length - 1 for text in (*texts, *[None] * idle)]
    newest = [0 if text is None else text.tokens[-1] for text in texts] + [0] * idle
    tokens = torch.tensor([newest], device=device)
    positions = torch.tensor([places], device=device).clamp_(min=0)
    return MicroBatch(tokens, tokens, cache=NextTokens(cache, places), positions=positions)
