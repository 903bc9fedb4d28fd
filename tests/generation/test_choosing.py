"""How a token is chosen: the distribution of transformers' own warpers, and draws that follow it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.errors import NumericsError
from megatron_lite.generation.sampling import Choice, Chooser

LOGITS = 3 * torch.randn(200, generator=torch.Generator().manual_seed(0))
CHOICES = (
    Choice(1.0),
    Choice(0.3),
    Choice(2.5, top_k=7),
    Choice(1.0, top_p=0.6),
    Choice(0.7, top_k=50, top_p=0.9),
    Choice(1.0, top_k=1),
    Choice(1.0, top_p=1e-9),
    Choice(1.0, top_k=10_000, top_p=1.0),
)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_probabilities_are_those_of_transformers(choice: Choice) -> None:
    """Temperature, top-k and top-p in transformers' order, including that something is always left."""
    warpers = pytest.importorskip("transformers", reason="transformers is not installed").generation.logits_process
    scores = LOGITS.double()[None]
    scores = warpers.TemperatureLogitsWarper(choice.temperature)(None, scores)
    if choice.top_k is not None:
        scores = warpers.TopKLogitsWarper(choice.top_k)(None, scores)
    if choice.top_p < 1.0:
        scores = warpers.TopPLogitsWarper(choice.top_p)(None, scores)
    torch.testing.assert_close(choice.probabilities(LOGITS), scores.softmax(-1)[0], rtol=1e-12, atol=1e-15)


def test_draws_follow_the_probabilities_and_repeat_with_the_seed() -> None:
    """4,000 draws stay within 4 standard deviations of every token's share; one seed gives one stream."""
    choice, count = Choice(1.5, top_k=12), 4_000
    choose = Chooser(choice, 1)
    drawn = torch.bincount(torch.tensor([choose(LOGITS) for _ in range(count)]), minlength=len(LOGITS))
    expected = choice.probabilities(LOGITS)
    error = (drawn / count - expected).abs()
    assert (error <= 4 * (expected * (1 - expected) / count).sqrt()).all()
    first, again, other = ([choose(LOGITS) for _ in range(30)] for choose in (Chooser(choice, s) for s in (3, 3, 4)))
    assert first == again != other


def test_without_temperature_the_most_probable_token_is_taken() -> None:
    assert Chooser(Choice(), 1)(LOGITS) == int(LOGITS.argmax()) == Chooser(Choice(1e-8), 1)(LOGITS)
    assert Chooser(Choice(), 1)(LOGITS.bfloat16()) == int(LOGITS.bfloat16().argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("choice", [Choice(), Choice(1.0)], ids=str)
def test_broken_logits_are_an_error(value: float, choice: Choice) -> None:
    logits = LOGITS.clone()
    logits[3] = value
    with pytest.raises(NumericsError):
        Chooser(choice, 1)(logits)
