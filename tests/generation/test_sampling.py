"""Sampling: the probabilities are those of transformers' own warpers, and draws follow them."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.errors import NumericsError
from megatron_lite.generation.continuation import (
    NOT_FINITE,
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)

LOGITS = 3 * torch.randn(200, generator=torch.Generator().manual_seed(0))
OPTIONS = (
    SamplingOptions(1.0),
    SamplingOptions(0.3),
    SamplingOptions(2.5, top_k=7),
    SamplingOptions(1.0, top_p=0.6),
    SamplingOptions(0.7, top_k=50, top_p=0.9),
    SamplingOptions(1.0, top_k=1),
    SamplingOptions(1.0, top_p=1e-9),
    SamplingOptions(1.0, top_k=10_000, top_p=1.0),
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_probabilities_are_those_of_transformers(options: SamplingOptions) -> None:
    """Temperature, top-k and top-p in transformers' order, including that something is always left."""
    warpers = pytest.importorskip("transformers", reason="transformers is not installed").generation.logits_process
    scores = LOGITS.double()[None]
    scores = warpers.TemperatureLogitsWarper(options.temperature)(None, scores)
    if options.top_k is not None:
        scores = warpers.TopKLogitsWarper(options.top_k)(None, scores)
    if options.top_p < 1.0:
        scores = warpers.TopPLogitsWarper(options.top_p)(None, scores)
    torch.testing.assert_close(options.probabilities(LOGITS), scores.softmax(-1)[0], rtol=1e-12, atol=1e-15)


def test_draws_follow_the_probabilities_and_repeat_with_the_seed() -> None:
    """4,000 draws stay within 4 standard deviations of every token's share; one seed gives one stream."""
    options, count = SamplingOptions(1.5, top_k=12), 4_000
    sampler = TokenSampler(options, 1)
    drawn = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(count)]), minlength=len(LOGITS))
    expected = options.probabilities(LOGITS)
    error = (drawn / count - expected).abs()
    assert (error <= 4 * (expected * (1 - expected) / count).sqrt()).all()
    samplers = [TokenSampler(options, seed) for seed in (3, 3, 4)]
    first, again, other = ([sampler(LOGITS) for _ in range(30)] for sampler in samplers)
    assert first == again != other


def test_without_temperature_the_most_probable_token_is_taken() -> None:
    greedy, cold = TokenSampler(SamplingOptions(), 1), TokenSampler(SamplingOptions(1e-8), 1)
    assert greedy(LOGITS) == int(LOGITS.argmax()) == cold(LOGITS)
    assert greedy(LOGITS.bfloat16()) == int(LOGITS.bfloat16().argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(1.0)], ids=str)
def test_broken_logits_are_an_error(value: float, options: SamplingOptions) -> None:
    """No token is drawn, and the text ends in an error."""
    logits = LOGITS.clone()
    logits[3] = value
    text = Text([1], TokenSampler(options, 1))
    assert text.sampler(logits) == NOT_FINITE
    with pytest.raises(NumericsError, match="not finite"):
        next(continue_texts(lambda _: logits[None], torch.device("cpu"), [text], Limits(3, 9), 1))
