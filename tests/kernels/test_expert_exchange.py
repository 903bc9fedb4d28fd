"""Experts shared out among ranks compute what one rank computes with all tokens, bit for bit: rows
of an expert have the same order."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.traffic import FirstWait
from megatron_lite.kernels import experts as module
from megatron_lite.kernels.experts import ExpertMap, dispatched, experts
from megatron_lite.parameter import Parameter
from tests.kernels import test_experts as whole
from tests.support.kernel_checks import empty_gradient
from tests.support.thread_ranks import on_threads

COUNT = 4  # experts
OF_TOKENS, OF_EXPERTS = ("x", "scores"), ("up", "up_bias", "down", "down_bias")
Values = dict[str, Tensor]


def run(rank: Any, values: Values, chosen: Tensor, level: str, parts: list[list[int]]) -> Values:
    """Return output and gradients of one of the ranks, which has some of the tokens."""
    tokens, group = parts[rank.rank], rank.expert
    own = {name: values[name][tokens].clone().requires_grad_() for name in OF_TOKENS}
    own |= {
        name: empty_gradient(values[name].chunk(group.world_size)[group.rank].clone())
        for name in OF_EXPERTS
    }
    x, scores, *weights = own.values()
    dispatch = dispatched(x, chosen[tokens], COUNT, group)
    maps = (ExpertMap(*weights[:2]), ExpertMap(*weights[2:]))  # type: ignore[arg-type]
    output = experts(x, scores, dispatch, *maps, "silu", True, level)
    assert dispatch.work.num_experts == COUNT // group.world_size
    gradient = torch.linspace(-1, 1, values["x"].numel()).view_as(values["x"])[tokens]
    output.backward(gradient)
    found = {"output": output.detach()}
    for name, value in own.items():
        grad = value.main_grad if isinstance(value, Parameter) else value.grad
        assert grad is not None
        found[name] = grad
    return found


def aligned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of matrices that begin where new ones do: libraries may round by the address."""

    def product(a: Tensor, b: Tensor, *more: Any, **named: bool) -> Tensor:
        *others, out = more
        others = [None if each is None else each.clone() for each in others]
        return cast(Tensor, out.copy_(function(a.clone(), b.clone(), *others, **named)))

    return product


def joined(of_ranks: list[Values], shared: int) -> Values:
    """Return the tensors of all ranks; weights' gradients are those of the `shared` ranks."""
    return {
        name: torch.cat(
            [found[name] for found in of_ranks[: shared if name in OF_EXPERTS else None]]
        )
        for name in of_ranks[0]
    }


@pytest.mark.parametrize("level", whole.LEVELS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["even", "two idle", "one pair", "one hot"])
def test_ranks_compute_what_one_does(
    kind: str, ranks: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with experts and ranks without rows, and a rank without tokens."""
    monkeypatch.setattr(whole, "E", COUNT)
    for name in ("affine", "product"):
        monkeypatch.setattr(module, name, aligned(getattr(module, name)))
    values = whole.make(True, True, torch.float32)
    chosen = whole.choices(kind)
    ends = {2: [0, 11, whole.T], 4: [0, 11, 11, 30, whole.T]}[ranks]
    parts = [[*range(start, end)] for start, end in zip(ends, ends[1:], strict=False)]
    found = on_threads(ranks, 1, run, values, chosen, level, parts, expert=ranks)
    expected = whole.run(values, chosen, True, level)
    for name, value in joined(found, ranks).items():
        assert torch.equal(value, expected[name]), name


EVENTS = threading.local()


class Traced(module.Products):
    """Products that are noted with the exchanges of their rank, which is a thread."""

    def affine(self, *arguments: Any) -> Tensor:
        EVENTS.all.append("affine")
        return super().affine(*arguments)

    def times(self, *arguments: Any) -> Tensor:
        EVENTS.all.append("times")
        return super().times(*arguments)

    def add_gradients(self, *arguments: Any) -> None:
        EVENTS.all.append("gradients")
        super().add_gradients(*arguments)


def traced(rank: Any, values: Values, chosen: Tensor, level: str) -> list[str]:
    """Return the exchanges and products of a rank's backward pass, in order."""
    exchange, events = rank.expert.all_to_all, list[str]()

    def all_to_all(*arguments: Any) -> Any:
        events.append("start")
        return exchange(*arguments)[0], FirstWait(Works(), lambda: events.append("wait"))

    rank.expert.all_to_all, EVENTS.all = all_to_all, events
    x, scores = (values[name].clone().requires_grad_() for name in OF_TOKENS)
    weights = [empty_gradient(values[name].chunk(2)[rank.rank].clone()) for name in OF_EXPERTS]
    dispatch = dispatched(x, chosen, COUNT, rank.expert)
    maps = ExpertMap(*weights[:2]), ExpertMap(*weights[2:])
    output = experts(x, scores, dispatch, *maps, "silu", True, level)
    events.clear()
    output.sum().backward()
    return events


@pytest.mark.parametrize("level", ["none", "full"])
def test_products_hide_the_exchanges_of_a_backward_pass(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of `up` are added while those of tokens and scores travel, and products are
    computed again while gradients of outputs do."""
    monkeypatch.setattr(whole, "E", COUNT)
    monkeypatch.setattr(module, "Products", Traced)
    values, chosen = whole.make(True, True, torch.float32), whole.choices("even")
    again = ["start", "wait", "start", "start", "affine"] if level == "full" else ["start"] * 2
    expected = [*again, "wait", "wait", "times", "gradients", "times"]
    expected += ["start", "start", "gradients", "wait", "wait"]
    assert on_threads(2, 1, traced, values, chosen, level, expert=2) == [expected] * 2


def test_grouped_products_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU multiplies, with a rank that gets no rows."""
    monkeypatch.setattr(whole, "E", COUNT)
    values, chosen = whole.make(True, True, torch.float32, 16), whole.choices("one pair")
    parts = [[*range(20)], [*range(20, whole.T)]]
    wanted = joined(on_threads(2, 1, run, values, chosen, "full", parts, expert=2), 2)
    monkeypatch.setattr(module, "_can_group", lambda *_: True)
    found = joined(on_threads(2, 1, run, values, chosen, "full", parts, expert=2), 2)
    whole.check(found, {name: value.double() for name, value in wanted.items()}, 1e-6)
