"""Prompts and what a model makes of them, several side by side, each as if it were alone.

A prompt is one pass over all its tokens; from then on one pass gives one more token to every text under way. A text
that ends makes room for the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.generation.sampling import Chooser
from megatron_lite.model.kv_cache import Beginning, KeyValueCache, NextTokens
from megatron_lite.model.layer import MicroBatch


class LanguageModel(Protocol):
    """What runs a pass: `model.LocalModel`, or a partitioned model of which every rank runs every pass."""

    device: torch.device

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """(t, v) of the tokens that `micro_batch.cache` wants answered."""


@dataclass
class Text:
    """One prompt and its continuation, which grows until `finish` says why it ended."""

    prompt: list[int]
    choose: Chooser
    tokens: list[int] = field(default_factory=list)
    # end: the model ended it; stop: `stops` did; length: as many tokens as asked for; context: the model takes no more.
    finish: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class Limits:
    """When texts end."""

    max_new_tokens: int
    longest: int  # prompt and continuation together
    ends: Collection[int] = ()  # tokens that end a text, and are no part of it
    stops: Callable[[Text], bool] = lambda text: False

    def take(self, text: Text, token: int) -> None:
        """Take one more token in, or end the text because of it."""
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
        """Tokens of the longest text that can become of these, but for its last, which nobody reads."""
        return max(min(len(text.prompt) + self.max_new_tokens, self.longest) - 1 for text in texts)


def same(tokens: list[int]) -> list[int]:
    """For one process: what it chose is what counts."""
    return tokens


@torch.no_grad()
def continue_texts(
    model: LanguageModel,
    texts: Sequence[Text],
    limits: Limits,
    rows: int,
    agree: Callable[[list[int]], list[int]] = same,
    backend: str = "math",
) -> Iterator[Text]:
    """Continue every text to its end, `rows` of them at a time; each is given out, by itself, once it has ended.

    Args:
        texts: prompts of at least 1 and fewer than `limits.longest` tokens.
        agree: is given each pass's tokens, and returns those to take: the same on all ranks that run the same passes.
        backend: how attention over prompts is computed.
    """
    if not texts:
        return
    cache = KeyValueCache(rows, limits.capacity(texts))
    under_way: list[Text | None] = [None] * rows
    waiting = iter(texts)
    while True:
        for row in range(rows):
            while under_way[row] is None and (text := next(waiting, None)) is not None:
                (token,) = agree([text.choose(_begin(model, text, cache, row, backend))])
                limits.take(text, token)
                if text.finish is None:
                    under_way[row] = text
                else:
                    yield text
        active = [(row, text) for row, text in enumerate(under_way) if text is not None]
        if not active:
            return
        logits = _advance(model, under_way, cache)
        tokens = agree([text.choose(logits[row]) for row, text in active])
        for (row, text), token in zip(active, tokens, strict=True):
            limits.take(text, token)
            if text.finish is not None:
                under_way[row] = None
                yield text


def _begin(model: LanguageModel, text: Text, cache: KeyValueCache, row: int, backend: str) -> Tensor:
    """The logits (v,) after the prompt."""
    tokens = torch.tensor([text.prompt], device=model.device)
    return model.logits(MicroBatch(tokens, tokens, cache=Beginning(cache, row, backend)))[-1]


def _advance(model: LanguageModel, texts: Sequence[Text | None], cache: KeyValueCache) -> Tensor:
    """Let every text read its newest token; returns the logits (t, v) after it, meaningless in rows without one.

    Beside several texts there is a token of none: on a CPU the last elements of a tensor are computed by other
    instructions than the rest, and products of fewer than four rows treat them differently.
    """
    idle = 0 if len(texts) == 1 else max(1, 4 - len(texts))
    places = [-1 if text is None else text.length - 1 for text in (*texts, *[None] * idle)]
    newest = [0 if text is None else text.tokens[-1] for text in texts] + [0] * idle
    tokens = torch.tensor([newest], device=model.device)
    positions = torch.tensor([places], device=model.device).clamp_(min=0)
    return model.logits(MicroBatch(tokens, tokens, cache=NextTokens(cache, places), positions=positions))
