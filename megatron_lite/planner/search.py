"""Search a run's layouts for those that fit the devices, fastest first.

A layout sets the ZeRO stage, the micro-batches, whether master weights are split, and what the
backward pass recomputes. If none fits, a wider search also sets tensor parallelism or the number of
GPUs. Plans give a layout's memory and `work_time.py` its time, so nothing runs.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config import (
    RECOMPUTE_LEVELS,
    Config,
    DistributedConfig,
    Options,
    changed,
    flatten,
)
from megatron_lite.config.dimensions import OF_A_SAMPLE, Dimension, RankGrid, ranks_per_sample
from megatron_lite.config.values import written
from megatron_lite.errors import Remedy, UsageError
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.devices import GIB, planned_nodes, planned_speeds
from megatron_lite.planner.plan import Plan, Planner
from megatron_lite.planner.speeds import Speeds
from megatron_lite.planner.work_time import StepTime, predict_step
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.validation import resolve
from megatron_lite.validation.sizes import check_passes

SEARCH_S = 8.0  # processor time
LARGEST_MICRO_BATCH = 64  # samples; larger products are no faster
MOST_MICRO_BATCHES = 7  # micro-batch sizes to try
MOST_BREADTH = 64  # breadth-first micro-batches, whose activations are all stored
MOST_RANKS = 2**24  # the limit of --world_size
LEAST_GAIN = 0.02  # share of the time; below it the layout that leaves the most memory is preferred
SPARE = 0.03  # share of the memory to keep free
SMALLEST_SAVING = 0.002  # share of the plan's memory; an option that saves less is not suggested
ADVISED_SHARE = 0.9  # share of the plan's memory for layouts suggested after an out-of-memory error
# Options that the search sets; None: derived from the others.
SEARCHED = (
    "batch_size",
    "zero_stage",
    "data_parallel_shard",
    "micro_batch_size",
    "depth_first_micro_batches",
    "breadth_first_micro_batches",
    "eval_micro_batch_size",
    "split_master_weights",
    "mlp_recompute_level",
    "recompute_layers",
)
FOLLOWING = ("sequential_micro_batches", "num_weight_buffers", "num_grad_buffers")
# A single group of hybrid shards with all ranks.
WHOLE = {"data_parallel_shard": 0, "replica_dcn_axis_size": 1, "replica_ici_axis_size": 1}
# Dimensions that only a wider search sets, in the order in which it widens them, and their options.
WIDENED = OF_A_SAMPLE[::-1]
WIDTHS = 2, 4, 8
WIDE = tuple(name for row in WIDENED for name in (row.option, row.saving) if name)

Changes = Options  # only those that change, with their new values


class SearchTooLongError(Exception):
    """Raised when the search has taken `SEARCH_S`."""


class Layout(NamedTuple):
    """A layout with its plan and predicted speed."""

    plan: Plan
    time: StepTime
    changes: Changes  # relative to the options as asked

    @property
    def config(self) -> Config:
        """The options, resolved and without `auto`."""
        return self.plan.config

    def values(self) -> Changes:
        """Return the options that the search sets."""
        options = flatten(self.config)
        return {name: options[name] for name in SEARCHED}


@dataclass(frozen=True)
class Search:
    """A run and the devices that it must fit, with `SPARE` of their memory free."""

    asked: Config  # as typed, or resolved
    batch_size: int  # samples per iteration, the same in every layout
    world_size: int
    device_type: str
    device_bytes: int
    # changes of `WIDE` in a wider search
    wide: Changes = dataclasses.field(default_factory=dict)
    # processor time
    until_s: float = dataclasses.field(default_factory=lambda: time.thread_time() + SEARCH_S)

    @property
    def usable_bytes(self) -> int:
        """The memory available to a layout."""
        return int(self.device_bytes * (1 - SPARE))

    @functools.cached_property
    def layouts(self) -> list[Layout]:
        """Layouts that fit, as far as found in time, fastest first."""
        found: list[Layout] = []
        if self.is_over or self.usable_bytes < self.least_bytes < math.inf:
            return found
        for variants in itertools.takewhile(lambda _: not self.is_over, self._candidates()):
            if (layout := self._least_recomputation(variants)) is not None:
                found.append(layout)
        return sorted(found, key=lambda layout: (layout.time.seconds, layout.plan.needed_bytes()))

    def layout(self, config: Config, changes: Changes) -> Layout:
        """Return the layout of `config`, resolved and without `auto`, even if it does not fit."""
        plan = self._planner.plan(config)
        return Layout(plan, predict_step(plan, self.speeds_of(config)), changes)

    def speeds_of(self, config: Config) -> Speeds:
        """Return the speeds of a layout's devices and links."""
        options = config.distributed
        return (
            self.speeds
            if self.speeds.path
            else planned_speeds(options, self.device_type, self.world_size)
        )

    def needed_bytes(self, changes: Changes) -> int | None:
        """Return a rank's memory with `changes`; None if they contradict other options."""
        config = self.resolved(changes)
        return None if config is None else self._planner.plan(config).needed_bytes()

    @functools.cached_property
    def least_bytes(self) -> float:
        """A rank's memory with every memory-saving option; infinity if these contradict others.

        Without split master weights if the run fits without them.

        Raises:
            SearchTooLongError: if the search runs out of time.
        """
        if self.is_over:
            raise SearchTooLongError
        least = math.inf
        # ZeRO-3 cannot split master weights
        for zero_stage, split in ((3, False), (2, self._can_split)):
            changes = {
                **self._changes(zero_stage, 1, 1, split),
                **WHOLE,
                "eval_micro_batch_size": None,
            }
            # recomputation may need more memory than it saves
            for recomputed in (0, self.asked.model.num_layers):
                step = {"mlp_recompute_level": "full", "recompute_layers": recomputed}
                least = min(least, self.needed_bytes({**changes, **step}) or math.inf)
            if least <= self.usable_bytes:
                break
        return least

    def wider(self) -> Iterator[Search]:
        """Yield this search, and those with more tensor parallelism on the same ranks.

        Raises:
            SearchTooLongError: if the search runs out of time.
        """
        yield self
        for search in itertools.islice(self._wider_groups(), 1, None):
            if self.world_size % search.together == 0 and search.least_bytes <= self.usable_bytes:
                yield search

    def on_fewest_ranks(self) -> Search | None:
        """Return the search on the next larger number of GPUs that fits, with the least tensor
        parallelism.

        Raises:
            SearchTooLongError: if the search runs out of time.
        """
        for search in self._wider_groups():
            sizes = [dataclasses.replace(search, world_size=size) for size in search.larger_sizes()]
            if sizes and sizes[-1].least_bytes <= self.usable_bytes:
                return sizes[
                    bisect.bisect_left(
                        sizes, True, key=lambda it: it.least_bytes <= self.usable_bytes
                    )
                ]
        return None

    def larger_sizes(self) -> list[int]:
        """Return the larger GPU counts that divide the batch, ascending. On a CPU, more ranks add
        no memory."""
        if self.device_type != "cuda":
            return []
        sizes = (size * self.together for size in divisors(self.divided))
        return [size for size in sizes if self.world_size < size <= MOST_RANKS]

    def resolved(self, changes: Changes) -> Config | None:
        """Return the options with `changes`, resolved and without `auto`; None if they conflict."""
        try:
            config = resolve(
                changed(self.asked, {**self.wide, **changes}), self.world_size, self.nodes
            )
            check_passes(config)
        except UsageError:
            return None
        return resolve_auto(config, self.world_size, self.device_type, self.device_bytes)[0]

    @functools.cached_property
    def speeds(self) -> Speeds:
        """Speeds of the devices and links."""
        return planned_speeds(self._grid, self.device_type, self.world_size)

    @functools.cached_property
    def _grid(self) -> DistributedConfig:
        return dataclasses.replace(self.asked.distributed, **self.wide)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return planned_nodes(self._grid, self.device_type, self.world_size)

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks along each dimension."""
        return RankGrid(self.world_size, self._grid).sizes

    @property
    def together(self) -> int:
        """Ranks that share the samples of a data-parallel rank."""
        return ranks_per_sample(self._grid)

    @property
    def divided(self) -> int:
        """The samples to divide: the batch, or a divisor of every batch in a schedule; with
        padding, the smallest batch."""
        batch = self.asked.batch
        if not batch.batch_size_schedule:
            return self.batch_size
        sizes = batch_schedule(batch).sizes
        return sizes[0] if batch.allow_nondivisible_batch_size else math.gcd(*sizes)

    @property
    def share(self) -> int:
        """Samples of `divided` per data-parallel rank and iteration."""
        return max(self.divided * self.together // self.world_size, 1)

    @property
    def _can_split(self) -> bool:
        return self.asked.distributed.training_dtype == "bf16"

    @property
    def is_over(self) -> bool:
        """Whether the time for the search is over."""
        return time.thread_time() > self.until_s

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(self.world_size, self.device_type)

    def _wider_groups(self) -> Iterator[Search]:
        """Yield this search, then those with more tensor parallelism, then those with pipelines of
        such groups."""
        yield self
        nearest = WIDENED[0]
        wide = {name: getattr(self._grid, name) for name in WIDE}
        for row in WIDENED:
            for size in WIDTHS:
                wide |= widened(row, size)
                search = dataclasses.replace(self, wide={**wide})
                if (
                    search.together > self.together
                    and search.sizes[nearest.name] >= self.sizes[nearest.name]
                    and (row.divides != "layers" or self.asked.model.num_layers % size == 0)
                ):
                    yield search

    def _candidates(self) -> Iterator[list[Changes]]:
        """Yield layouts without recomputation, each with variants to try if it needs recomputation
        to fit."""
        evaluates = self.asked.batch.eval_micro_batch_size is not None
        pipeline = self.sizes["pipeline"]
        sizes = [size for size in divisors(self.share) if size <= LARGEST_MICRO_BATCH][
            :MOST_MICRO_BATCHES
        ]
        for zero_stage in (1, 2, 3) if self.world_size > self.together else (1, 3):
            for size in reversed(sizes):
                accumulated = -(-self.divided * self.together // (size * self.world_size))
                breadths = (
                    {1, accumulated} if accumulated <= MOST_BREADTH and zero_stage > 1 else {1}
                )
                if pipeline > 1:  # groups of micro-batches fill the pipeline
                    breadths = {max(part for part in divisors(accumulated) if part <= 4 * pipeline)}
                    breadths |= {accumulated} if zero_stage > 1 else set()
                for breadth in sorted(breadths):
                    splits = (False, True) if self._can_split and zero_stage < 3 else (False,)
                    variants = [self._changes(zero_stage, size, breadth, split) for split in splits]
                    variants += [{**variants[0], **WHOLE}] * (zero_stage == 3 and self.nodes > 1)
                    yield [
                        {**changes, **evaluation}
                        for changes in variants
                        for evaluation in ({}, {"eval_micro_batch_size": None})[: 1 + evaluates]
                    ]

    def _changes(self, zero_stage: int, size: int, breadth: int, split: bool) -> Changes:
        return {
            "batch_size": self.batch_size,
            "zero_stage": zero_stage,
            "micro_batch_size": size,
            "depth_first_micro_batches": None,
            "breadth_first_micro_batches": breadth,
            "split_master_weights": split,
            **dict.fromkeys(FOLLOWING),
            **self.wide,
        }

    def _least_recomputation(self, variants: Sequence[Changes]) -> Layout | None:
        """Return the layout with the least recomputation that fits, or None; ties go to the first
        variant."""
        best: tuple[Config, Changes] | None = None
        steps = recomputations(self.asked.model.num_layers)
        for changes in variants:
            config = self.resolved({**changes, **steps[0]}) if steps else None
            if config is None:
                continue

            def fits(step: Changes, config: Config = config) -> bool:
                return self._planner.plan(changed(config, step)).needed_bytes() <= self.usable_bytes

            if (first := bisect.bisect_left(steps, True, key=fits)) < len(steps):
                best = changed(config, steps[first]), {**changes, **steps[first]}
                steps = steps[:first]  # a later variant must need less
        return None if best is None else self.layout(*best)


def widened(row: Dimension, size: int) -> Changes:
    """Return the changes that give a dimension so many ranks."""
    return {row.option: size, **({row.saving: True} if row.saving else {})}


def recomputations(blocks: int) -> list[Changes]:
    """Return the choices of recomputation, from nothing to all blocks."""
    quarters = sorted({-(-blocks * quarter // 4) for quarter in range(1, 5)})
    partly = [f"activation,full:{first}" for first in quarters if first < blocks]
    levels = [
        {"mlp_recompute_level": level, "recompute_layers": 0}
        for level in ("none", "activation", *partly)
    ]
    return [
        *levels,
        *({"mlp_recompute_level": "full", "recompute_layers": layers} for layers in (0, *quarters)),
    ]


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending; for numbers above 12 digits, only those up to 10**6."""
    root = math.isqrt(number)
    small = [size for size in range(1, min(root, 10**6) + 1) if number % size == 0]
    return small + (
        [number // size for size in reversed(small) if size * size != number]
        if root <= 10**6
        else []
    )


def fewest_changes(asked: Config, layout: Layout) -> Changes:
    """Return a minimal set of changes that turns the requested options into a layout; None unsets
    an option."""
    typed = flatten(asked)
    wanted = flatten(layout.config)
    plan = layout.plan
    nodes = planned_nodes(layout.config.distributed, plan.device_type, plan.world_size)
    needed = {name: value for name, value in layout.changes.items() if typed[name] != value}
    # The ZeRO stage and the micro-batch size come last, because other options follow from them.
    for name in sorted(
        needed.keys() - WIDE, key=lambda name: (name in ("zero_stage", "micro_batch_size"), name)
    ):
        fewer = {other: value for other, value in needed.items() if other != name}
        try:
            resolved = flatten(resolve(changed(asked, fewer), plan.world_size, nodes))
        except UsageError:
            continue
        if all(resolved[other] == wanted[other] for other in (*SEARCHED, *FOLLOWING)):
            needed = fewer
    return needed


def recommended(layouts: Sequence[Layout], asked: Config, usable_bytes: int) -> Layout:
    """Return the layout that needs the least memory among the fastest and nearly as fast that fit
    `usable_bytes`.

    Keeps `asked`, resolved, if it is one of them. layouts: fastest first; if none fits, all of them
    count.
    """
    fitting = [
        layout for layout in layouts if layout.plan.needed_bytes() <= usable_bytes
    ] or layouts
    near = [
        layout
        for layout in fitting
        if layout.time.seconds <= fitting[0].time.seconds * (1 + LEAST_GAIN)
    ]
    options = flatten(asked)
    same = [
        layout
        for layout in near
        if all(options[name] == value for name, value in layout.values().items())
    ]
    return min(same or near, key=lambda layout: layout.plan.needed_bytes())


# -- advice for a run that ran out of memory
# ---------------------------------------------------------------------------


def remedies(search: Search) -> list[Remedy]:
    """Return single options that save memory, as far as found in time, least slowdown first."""
    config, needed = search.resolved({}), search.needed_bytes({})
    if config is None or needed is None:
        return []
    found: list[Remedy] = []
    options = [
        (search, name, changes[name], changes) for name, changes in _single_options(search, config)
    ]
    for ranks in search.larger_sizes()[:1]:
        options.append((dataclasses.replace(search, world_size=ranks), "world_size", ranks, {}))
    for run, name, value, changes in options:
        if search.is_over:
            break
        saving = needed - (run.needed_bytes(changes) or needed)
        if saving >= SMALLEST_SAVING * needed:
            found.append(
                Remedy(
                    name, value if type(value) is int else written(value), saving, _flags(changes)
                )
            )
    return found


def less_memory(search: Search) -> str:
    """Return flags to append to a command that ran out of memory although its plan may fit; "" if
    unknown."""
    if (needed := search.needed_bytes({})) is None:
        return ""
    limit = min(search.device_bytes, int(needed * ADVISED_SHARE))
    smaller = dataclasses.replace(search, device_bytes=limit)
    if not smaller.layouts:
        return (
            ""
            if smaller.is_over
            else "no flags save enough: use a smaller model, shorter samples, or more memory"
        )
    config = search.resolved({})
    assert config is not None, "planned"
    best = recommended(smaller.layouts, config, smaller.usable_bytes)
    planned = f"{best.plan.needed_bytes() / GIB:,.1f} GiB instead of {needed / GIB:,.1f} GiB"
    return f"to plan {planned}, append {_flags(fewest_changes(search.asked, best))}"


def _flags(changes: Changes) -> str:
    """Return changes as flags."""
    return " ".join(f"--{name}={written(value)}" for name, value in changes.items())


def _single_options(search: Search, config: Config) -> Iterator[tuple[str, Changes]]:
    """Yield each memory-saving option with all changes that it requires. config: the run's,
    resolved."""
    asked = search.asked
    batch = config.batch
    stages = search.asked.multi_stage
    assert isinstance(config.multi_stage.zero_stage, int), "resolved"
    # Keep the batch size, even if derived from the micro-batches; derive their order again.
    given = asked.batch.batch_size or asked.batch.batch_size_schedule
    order = ("depth_first_micro_batches", "sequential_micro_batches")
    same_batch: Changes = {} if given else {"batch_size": search.batch_size}
    same_batch.update({name: None for name in order if getattr(asked.batch, name)})
    for size in [size for size in divisors(search.share) if size <= batch.micro_batch_size // 2][
        -1:
    ]:
        yield "micro_batch_size", {**same_batch, "micro_batch_size": size}
    if (asked.batch.breadth_first_micro_batches or 1) > 1:
        yield "breadth_first_micro_batches", {**same_batch, "breadth_first_micro_batches": None}
    if asked.batch.eval_micro_batch_size is not None:
        yield "eval_micro_batch_size", {"eval_micro_batch_size": None}
    blocks = config.model.num_layers
    present = {RECOMPUTE_LEVELS.index(level) for level in config.performance.mlp_levels(blocks)}
    for level in RECOMPUTE_LEVELS[max(min(present) + 1, max(present)) :]:
        yield "mlp_recompute_level", {"mlp_recompute_level": level}
    if config.performance.recompute_layers < blocks:
        yield "recompute_layers", {"recompute_layers": blocks}
    buffers = {
        name: None
        for name in ("num_weight_buffers", "num_grad_buffers")
        if (getattr(stages, name) or 0) > 2
    }
    for zero_stage in range(config.multi_stage.zero_stage + 1, 4):
        yield "zero_stage", {"zero_stage": zero_stage, **buffers}
    if config.distributed.data_parallel_shard:
        yield "data_parallel_shard", {"data_parallel_shard": 0}
    nearest = WIDENED[0]
    own = search.sizes[nearest.name]
    for size in WIDTHS:
        if size > own and search.world_size % (search.together // own * size) == 0:
            same_batch = {**same_batch, "micro_batch_size": batch.micro_batch_size}
            yield nearest.option, {**widened(nearest, size), **same_batch}
            break
    if config.distributed.training_dtype == "bf16" and not stages.split_master_weights:
        yield "split_master_weights", {"split_master_weights": True}
