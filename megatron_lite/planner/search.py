"""Layouts of a run that fit its devices, the fastest first: what a dry run recommends."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.errors import UsageError
from megatron_lite.planner.advice import level_choices
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.plan import Planner
from megatron_lite.planner.speeds import Speeds
from megatron_lite.planner.work_time import StepTime, predict_step
from megatron_lite.validation import resolve
from megatron_lite.validation.sizes import check_passes

LARGEST_MICRO_BATCH = 64  # samples; larger products are no faster
MOST_MICRO_BATCHES = 7  # sizes that are tried
MOST_BREADTH = 64  # breadth-first micro-batches, whose activations are all held
LEAST_GAIN = 0.02  # of the time, below which the asked layout, or the one with fewer changes, is preferred
# Options that the search sets. None leaves to the program what follows from the others.
SEARCHED = (
    "zero_stage",
    "micro_batch_size",
    "depth_first_micro_batches",
    "breadth_first_micro_batches",
    "split_master_weights",
    "mlp_recompute_level",
    "recompute_layers",
)
# Set only where nothing else fits.
SHARING = ("tensor_parallel", "sequence_tensor_parallel")
FOLLOWING = ("sequential_micro_batches", "num_weight_buffers", "num_grad_buffers")


@dataclass(frozen=True)
class Layout:
    """One layout that fits, with what it needs and how fast it is expected to be."""

    config: Config  # resolved, without `auto`
    changes: dict[str, Any]  # with which the options as asked resolve to it
    world_size: int
    needed_bytes: int
    state_bytes: int
    wire_bytes: int  # that a rank sends in a step
    time: StepTime

    def values(self) -> dict[str, Any]:
        """Return the options that the search sets."""
        options = flatten(self.config)
        return {name: options[name] for name in SEARCHED}


@dataclass
class Search:
    """A run, and the devices that it must fit."""

    asked: Config  # as typed, but for `sharing`
    batch_size: int  # samples per iteration, the same in every layout
    world_size: int
    device_type: str
    device_bytes: int
    speeds: Speeds
    sharing: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes of `SHARING`

    @property
    def data_ranks(self) -> int:
        """The ranks that share the batch."""
        return self.world_size // self.asked.distributed.tensor_parallel

    @functools.cached_property
    def planner(self) -> Planner:
        """The memory of every layout."""
        return Planner(self.world_size, self.device_type)

    def layouts(self) -> list[Layout]:
        """Return the layouts that fit, the fastest first."""
        found = [layout for changes in self._candidates() if (layout := self._fitting(*changes)) is not None]
        return sorted(found, key=lambda layout: (layout.time.seconds, layout.needed_bytes))

    def asked_layout(self, config: Config) -> Layout:
        """Return the layout as asked, `config` resolved, whether it fits or not."""
        return self._layout(config, {}, self.planner.needed_bytes(config))

    def _candidates(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """Yield changes that differ in what they split: master weights stay whole where that fits."""
        splits = (False, True) if self.asked.distributed.training_dtype == "bf16" else (False,)
        for zero_stage in (1, 2, 3) if self.data_ranks > 1 else (1, 3):
            for size in self._micro_batch_sizes():
                accumulated = -(-self.batch_size // (size * self.data_ranks))
                breadths = (1, accumulated) if 1 < accumulated <= MOST_BREADTH and zero_stage > 1 else (1,)
                for breadth in breadths:
                    chosen = splits if zero_stage < 3 else splits[:1]
                    yield tuple(self._changes(zero_stage, size, accumulated, breadth, split) for split in chosen)

    def _micro_batch_sizes(self) -> list[int]:
        """Return divisors of a rank's share of the batch, the largest first."""
        share = max(self.batch_size // self.data_ranks, 1)
        sizes = [size for size in range(min(share, LARGEST_MICRO_BATCH), 0, -1) if share % size == 0]
        return sizes[-MOST_MICRO_BATCHES:]

    def _changes(self, zero_stage: int, size: int, accumulated: int, breadth: int, split: bool) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "zero_stage": zero_stage,
            "micro_batch_size": size,
            "depth_first_micro_batches": accumulated // breadth,
            "breadth_first_micro_batches": breadth,
            "split_master_weights": split,
            "mlp_recompute_level": "none",
            "recompute_layers": 0,
            **dict.fromkeys(FOLLOWING),
            **self.sharing,
        }

    def _resolved(self, changes: dict[str, Any]) -> Config | None:
        try:
            config = resolve(unflatten({**flatten(self.asked), **changes}), self.world_size)
            check_passes(config)
        except UsageError:
            return None
        stages, _ = resolve_auto(config, self.world_size, self.device_type, self.device_bytes)
        return dataclasses.replace(config, multi_stage=stages)

    def _fitting(self, *candidates: dict[str, Any]) -> Layout | None:
        """Return the layout with the least recomputation that fits, or None; of candidates alike, the first."""
        best: tuple[int, Layout] | None = None
        for changes in candidates:
            config = self._resolved(changes)
            if config is None:
                continue
            steps = list(recomputations(config))
            last = len(steps) if best is None else best[0]

            def needed(step: dict[str, Any], config: Config = config) -> int:
                return self.planner.needed_bytes(_changed(config, step))

            first = bisect.bisect_left(steps, True, hi=last, key=lambda step: needed(step) <= self.device_bytes)
            if first < last:
                layout = self._layout(_changed(config, steps[first]), {**changes, **steps[first]}, needed(steps[first]))
                best = first, layout
            if best is not None and best[0] == 0:
                break
        return None if best is None else best[1]

    def _layout(self, config: Config, changes: dict[str, Any], needed: int) -> Layout:
        plan = self.planner.plan(config)
        return Layout(
            config=config,
            changes=changes,
            world_size=self.world_size,
            needed_bytes=needed,
            state_bytes=plan.state_bytes,
            wire_bytes=sum(total.wire_bytes for total in plan.traffic.values()),
            time=predict_step(config, plan.model, plan.traffic, self.speeds, self.device_type, plan.beside_products),
        )


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    return unflatten({**flatten(config), **changes})


def recomputations(config: Config) -> Iterator[dict[str, Any]]:
    """Yield what the backward pass recomputes, from nothing to all blocks."""
    yield {}
    levels = [choice.changes for choice in level_choices(config)]
    yield from levels
    for quarters in range(1, 5):
        yield {**levels[-1], "recompute_layers": -(-config.model.num_layers * quarters // 4)}


def fewest_changes(asked: Config, layout: Layout) -> dict[str, Any]:
    """Return the fewest of a layout's changes with which the options as asked resolve to it; None unsets an option."""
    typed, wanted = flatten(asked), layout.values()
    kept = {name: value for name, value in layout.changes.items() if typed[name] != value}
    for name in sorted(
        kept.keys() - {"batch_size", *SHARING}, key=lambda name: name in ("zero_stage", "micro_batch_size")
    ):  # these are kept if possible
        fewer = {other: value for other, value in kept.items() if other != name}
        try:
            resolved = flatten(resolve(unflatten({**typed, **fewer}), layout.world_size))
        except UsageError:
            continue
        if all(resolved[other] == value for other, value in wanted.items()):
            kept = fewer
    return kept


def recommended(layouts: Sequence[Layout], asked: Config) -> Layout:
    """Return the fastest layout or, among those nearly as fast, the one that differs least from `asked`, resolved."""
    values, limit_s = flatten(asked), layouts[0].time.seconds * (1 + LEAST_GAIN)
    near = [layout for layout in layouts if layout.time.seconds <= limit_s]

    def differences(layout: Layout) -> int:
        return sum(value != values[name] for name, value in layout.values().items())

    return min(
        near, key=lambda layout: (differences(layout), layout.config.multi_stage.zero_stage, layout.time.seconds)
    )
