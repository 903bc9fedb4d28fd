"""A product of gathered tokens begins with those that the rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels import tensor_collectives as module
from megatron_lite.kernels.products import affine, product
from megatron_lite.kernels.tensor_collectives import ONE_RANK, collectives_over

TOKENS, RANKS = 3, 4  # tokens of each rank


class SlowGroup:
    """A rank whose gathers bring the others' tokens when it waits; until then their places hold NaN."""

    world_size = RANKS

    def __init__(self, rank: int, everything: Tensor, events: list[str]) -> None:
        self.rank, self._everything, self._events = rank, everything, events

    def all_gather(self, buffer: Tensor, kind: str) -> SlowGroup:
        self._buffer, slices = buffer, buffer.view(RANKS, -1)
        for other in range(RANKS):
            if other != self.rank:
                slices[other] = float("nan")
        return self

    def wait(self) -> None:
        self._events.append("wait")
        self._buffer.view(RANKS, -1).copy_(self._everything.view(RANKS, -1))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("biased", [False, True])
def test_own_tokens_come_first(rank: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product before the only wait, and all rows are those of the whole product."""
    generator = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(rows, 8, generator=generator) for rows in (RANKS * TOKENS, 5))
    bias = torch.randn(5, generator=generator) if biased else None
    events: list[str] = []
    for name in ("affine", "product"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, run=original: (events.append("multiply"), run(*given))[1])
    collectives = collectives_over(SlowGroup(rank, x, events), splits_tokens=True)  # type: ignore[arg-type]
    own = x[rank * TOKENS : (rank + 1) * TOKENS]

    found = collectives.start_gather(own.unsqueeze(0)).affine(weight, bias)
    assert found.shape == (1, RANKS * TOKENS, 5)
    torch.testing.assert_close(found[0], affine(x, weight, bias), rtol=1e-5, atol=1e-6)
    assert events[:2] == ["multiply", "wait"] and events.count("wait") == 1
    assert events.count("multiply") == (2 if rank in (0, RANKS - 1) else 3)

    events.clear()
    gathering = collectives.start_gather(own)
    torch.testing.assert_close(gathering.product(weight), product(x, weight), rtol=1e-5, atol=1e-6)
    assert torch.equal(gathering.wait(), x) and events[:2] == ["multiply", "wait"] and events.count("wait") == 1


def test_one_rank_multiplies_everything_at_once() -> None:
    """A group of one does not communicate: the same product, to the bit."""
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    alone = SlowGroup(0, x, [])
    alone.world_size = 1
    assert collectives_over(alone, splits_tokens=True) is ONE_RANK  # type: ignore[arg-type]
    assert torch.equal(ONE_RANK.start_gather(x).affine(weight, None), affine(x, weight))
    assert ONE_RANK.start_gather(x).wait() is x and ONE_RANK.reduce(x) is x
