"""Flags with which a run fits its devices: a search over a few options, the cheapest first. Arithmetic only."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.by_block import by_block
from megatron_lite.config.values import written
from megatron_lite.errors import UsageError
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.plan import Planner
from megatron_lite.planner.runtime import GIB
from megatron_lite.validation import resolve

# Costs are rough percents of a step: they order candidates and serve nothing else. A higher ZeRO stage sends more;
# smaller micro-batches make smaller products. Fast-LLM's guide measured 0.4 % and 10 % for recomputation in the MLPs. A
# recomputed block costs one more forward pass, a third of its step. Split master weights round differently: last.
STAGE_COST = {1: 0.0, 2: 1.0, 3: 3.0}
HALVING_COST = 1.0
DEPTH_FIRST_COST = 1.0
EVALUATION_COST = 0.5
LEVEL_COST = {"none": 0.0, "activation": 1.0, "full": 10.0}
ALL_BLOCKS_COST = 33.0
SPLIT_COST = 50.0
MOST_RANKS = 2**24  # as --world_size takes
SHARING_RANKS = (2, 4, 8)  # of a node, that may share each layer
SEARCH_S = 5.0  # of the processor's time; a plan of 100 blocks takes 0.2 s

Changes = dict[str, Any]  # options and their new values


class Choice(NamedTuple):
    """New values of a few options, and what they cost."""

    cost: float
    changes: Changes


UNCHANGED = Choice(0.0, {})


class SearchTooLongError(Exception):
    """The search has taken `SEARCH_S`."""


@dataclass(frozen=True)
class Fit:
    """Options with which a run fits, and the memory that a rank needs then."""

    changes: Changes
    needed_bytes: int
    world_size: int

    @property
    def flags(self) -> str:
        """The changed options, as a user types them."""
        return " ".join(f"--{name}={written(value)}" for name, value in self.changes.items())


@dataclass(frozen=True)
class Question:
    """A run that must fit the devices of its ranks."""

    asked: Config  # as typed, or resolved
    batch_size: int  # samples per iteration, the same in every answer
    world_size: int
    device_type: str
    device_bytes: int
    until_s: float = math.inf  # of this thread's processor time
    planners: dict[int, Planner] = dataclasses.field(default_factory=dict, compare=False)  # by world size

    def resolved(self, changes: Changes) -> Config | None:
        """Return the options with `changes`, resolved and without `auto`; None if they contradict each other.

        Raises:
            SearchTooLongError: if the time for the search is over.
        """
        if self.is_over:
            raise SearchTooLongError
        try:
            config = resolve(_changed(self.asked, changes), self.world_size)
        except UsageError:
            return None
        stages, _ = resolve_auto(config, self.world_size, self.device_type, self.device_bytes)
        return dataclasses.replace(config, multi_stage=stages)

    def needs(self, config: Config) -> Callable[[Choice], int]:
        """Return a function from a choice of recomputation to the memory that a rank needs with it."""
        planner = self.planners.setdefault(self.world_size, Planner(self.world_size, self.device_type))
        return lambda choice: planner.needed_bytes(_changed(config, choice.changes))

    @property
    def is_over(self) -> bool:
        """Whether the time for the search is over."""
        return time.thread_time() > self.until_s

    def limited(self) -> Question:
        """Return the same question with `SEARCH_S` for the answer."""
        return dataclasses.replace(self, until_s=time.thread_time() + SEARCH_S)

    def on(self, world_size: int) -> Question:
        """Return the same question for another number of ranks."""
        return dataclasses.replace(self, world_size=world_size)


def advice(question: Question, needed: int) -> list[str]:
    """Return lines that end with the flags that fit a run that needs `needed` bytes, or say that none do."""
    said = f"does not fit: {needed / GIB:,.1f} GiB of {question.device_bytes / GIB:,.1f} GiB"
    try:
        return _answer(question.limited(), said)
    except SearchTooLongError:
        less = "use a smaller model, smaller micro-batches, a higher --zero_stage, or more ranks"
        return [f"{said}; the search for flags that fit was given up after {SEARCH_S:g} s; {less}"]


def _answer(question: Question, said: str) -> list[str]:
    if fit := cheapest_fit(question):
        return [f"{said}; append these flags to need {fit.needed_bytes / GIB:,.1f} GiB:", f"  {fit.flags}"]
    if (least := least_bytes(question)) < math.inf:
        said += f", {least / GIB:,.1f} GiB with the highest ZeRO stage, micro-batches of 1 and recomputation"
    if fit := fewest_sharing_ranks(question):
        said += f"; {fit.world_size:,} GPUs are the fewest that fit, with {fit.needed_bytes / GIB:,.1f} GiB; append:"
        return [said, f"  --world_size={fit.world_size} {fit.flags}".rstrip()]
    if (sizes := larger_sizes(question)) and (least := least_bytes(question.on(sizes[-1]))) < math.inf:
        said += f", {least / GIB:,.1f} GiB on {sizes[-1]:,} GPUs, the most that share its batch"
    return [f"{said}; no flags fit: use a smaller model, shorter samples, or devices with more memory"]


def cheapest_fit(question: Question) -> Fit | None:
    """Return the cheapest changes with which the run fits on as many ranks, or None."""
    best, best_cost = None, math.inf
    if question.device_bytes < least_bytes(question) < math.inf:
        return best
    for cost, changes in _combinations(question):
        if best is not None and question.is_over:
            break
        config = question.resolved(changes) if cost < best_cost else None
        if config is None:
            continue
        needs, choices = question.needs(config), _recomputation(config)
        if min(map(needs, _most_frugal(choices))) > question.device_bytes:
            continue
        for choice in choices:
            if cost + choice.cost < best_cost and (needed := needs(choice)) <= question.device_bytes:
                best, best_cost = Fit({**changes, **choice.changes}, needed, question.world_size), cost + choice.cost
    return best


def fewest_ranks(question: Question) -> Fit | None:
    """Return the cheapest changes for the smallest number of GPUs that fits and shares the batch, or None."""
    sizes = larger_sizes(question)
    first = bisect.bisect_left(sizes, True, key=lambda size: least_bytes(question.on(size)) <= question.device_bytes)
    return cheapest_fit(question.on(sizes[first])) if first < len(sizes) else None


def larger_sizes(question: Question) -> list[int]:
    """Return the larger numbers of GPUs that share the batch equally, rising. More ranks on one CPU add no memory."""
    if question.device_type != "cuda":
        return []
    sizes = (size * question.asked.distributed.tensor_parallel for size in _divisors(question.batch_size))
    return [size for size in sizes if question.world_size < size <= MOST_RANKS]


def with_more_sharing(question: Question, same_ranks: bool) -> Iterator[tuple[Changes, Question]]:
    """Yield changes with which more ranks of a node share each layer, and the question with these options.

    same_ranks: only sizes that divide the ranks of the question.
    """
    present = question.asked.distributed.tensor_parallel
    for ranks in SHARING_RANKS:
        if ranks > present and not (same_ranks and question.world_size % ranks):
            changes = {"tensor_parallel": ranks, "sequence_tensor_parallel": True}
            yield changes, dataclasses.replace(question, asked=_changed(question.asked, changes))


def fewest_sharing_ranks(question: Question) -> Fit | None:
    """Return the cheapest changes for the smallest number of GPUs that fits, with the fewest that share layers."""
    if fit := fewest_ranks(question):
        return fit
    for changes, shared in with_more_sharing(question, same_ranks=False):
        if fit := fewest_ranks(shared):
            return dataclasses.replace(fit, changes={**changes, **fit.changes})
    return None


def _divisors(number: int) -> list[int]:
    """Return the divisors in rising order; of a number with more than 12 digits, only those up to 10**6."""
    root = math.isqrt(number)
    small = [size for size in range(1, min(root, 10**6) + 1) if number % size == 0]
    return small + ([number // size for size in reversed(small) if size * size != number] if root <= 10**6 else [])


def least_bytes(question: Question) -> float:
    """Return the memory that a rank needs with every option that saves memory; infinity if these contradict others."""
    *others, stages, splits = dimensions(question)
    least = math.inf
    for ends in ((stages[-1], splits[0]), (stages[-2:][0], splits[-1])):  # ZeRO-3 cannot split master weights
        config = question.resolved(_merged([*(choices[-1] for choices in others), *ends]).changes)
        if config is not None:
            least = min(least, *map(question.needs(config), _most_frugal(_recomputation(config))))
        if len(splits) == 1 and least < math.inf:  # ZeRO-3 needs the least
            break
    return least


def _combinations(question: Question) -> list[Choice]:
    """Return every combination of choices but recomputation, the cheapest first."""
    combined = [_merged(choices) for choices in itertools.product(*dimensions(question))]
    return sorted(combined, key=lambda choice: (choice.cost, len(choice.changes)))


def _merged(choices: Sequence[Choice]) -> Choice:
    changes = {name: value for choice in choices for name, value in choice.changes.items()}
    return Choice(sum(choice.cost for choice in choices), changes)


def dimensions(question: Question) -> list[list[Choice]]:
    """Return the choices for each option, with more memory saved from left to right.

    The options: micro-batches, breadth-first accumulation, evaluation, ZeRO stage, split master weights.
    """
    batch, stages = question.asked.batch, question.asked.multi_stage
    scheduled = batch.batch_size is not None or batch.batch_size_schedule
    keeps = {} if scheduled else {"batch_size": question.batch_size}
    # `none` leaves to the program what follows from the other options.
    order = {name: None for name in ("depth_first_micro_batches", "sequential_micro_batches") if getattr(batch, name)}
    buffers = {name: None for name in ("num_weight_buffers", "num_grad_buffers") if (getattr(stages, name) or 0) > 2}
    share = question.batch_size * question.asked.distributed.tensor_parallel // question.world_size
    largest = min(batch.micro_batch_size or share, share)
    micro = [Choice(0.0, keeps)]
    divisors = _divisors(share)
    for halvings in range(largest.bit_length()):
        size = divisors[bisect.bisect_right(divisors, largest >> halvings) - 1]
        if size != (batch.micro_batch_size or share):
            micro.append(Choice(halvings * HALVING_COST, {**keeps, "micro_batch_size": size, **order}))
    breadth = [UNCHANGED]
    if (batch.breadth_first_micro_batches or 1) > 1:
        breadth.append(Choice(DEPTH_FIRST_COST, {"breadth_first_micro_batches": None, **order}))
    evaluation = [UNCHANGED]
    if batch.eval_micro_batch_size is not None:
        evaluation.append(Choice(EVALUATION_COST, {"eval_micro_batch_size": None}))
    automatic, asked = stages.zero_stage == "auto", stages.zero_stage if isinstance(stages.zero_stage, int) else 1
    first = asked if automatic or buffers else asked + 1
    zero = [Choice(STAGE_COST[stage], {"zero_stage": stage, **buffers}) for stage in range(first, 4)]
    split = [UNCHANGED]
    if question.asked.distributed.training_dtype == "bf16" and not stages.split_master_weights:
        split.append(Choice(SPLIT_COST, {"split_master_weights": True}))
    return [micro, breadth, evaluation, [*([] if automatic else [UNCHANGED]), *zero], split]


def _recomputation(config: Config) -> list[Choice]:
    """Return choices of what the backward pass recomputes: the present one, then ones that save more."""
    present, blocks = config.performance.recompute_layers, config.model.num_layers
    choices = [UNCHANGED, *level_choices(config)]
    cost, changes = choices[-1]
    for quarters in range(1, 5):
        layers = -(-blocks * quarters // 4)
        if layers > present:
            more_forward = ALL_BLOCKS_COST * (layers - present) / blocks
            choices.append(Choice(cost + more_forward, {**changes, "recompute_layers": layers}))
    return choices


def level_choices(config: Config) -> list[Choice]:
    """Return the levels of recomputation in the MLPs that save more than the present ones, the cheapest first."""
    blocks, choices = config.model.num_layers, []
    present, quarter = config.performance.mlp_levels(blocks), [-(-blocks * quarters // 4) for quarters in range(1, 4)]
    for levels in ("activation", *(f"activation,full:{first}" for first in quarter if first < blocks), "full"):
        pairs = [*zip(present, by_block(levels, blocks), strict=True)]
        more = [LEVEL_COST[new] - LEVEL_COST[old] for old, new in pairs]
        if any(more) and min(more) >= 0:
            choices.append(Choice(sum(more) / blocks, {"mlp_recompute_level": levels}))
    return choices


def _most_frugal(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices of `_recomputation` that can need the least: no blocks recomputed, and all."""
    return [choice for choice in choices if "recompute_layers" not in choice.changes][-1:] + [*choices[-1:]]


def _changed(config: Config, changes: Changes) -> Config:
    return unflatten({**flatten(config), **changes})
