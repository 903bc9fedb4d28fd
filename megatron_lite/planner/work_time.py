"""Predict a training step's time from a rank's work, its traffic, and a machine's speeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.devices import KINDS_IN_LAYERS
from megatron_lite.planner.durations import hidden_s, stage_durations
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.speeds import Attention, Item, Pass, Product, Speeds
from megatron_lite.zero.simulation import simulate

# Bytes that an update reads and writes per element of a shard: gradient, weight and moments,
# without rounded weights.
UPDATE_BYTES = {"adamw": 28, "muon": 20, "lion": 20, "sgd": 20}


PARTS = {Product: "products", Pass: "passes", Attention: "attention"}


class StepTime(NamedTuple):
    """Seconds of a step on one rank."""

    # "products", "attention", "passes", "host"; "bubble": waits for other pipeline ranks
    parts: Mapping[str, float]
    communication_s: float  # all collectives
    exposed_s: float  # communication not overlapped with computation
    tokens: int  # per global batch

    @property
    def seconds(self) -> float:
        """Step time."""
        return sum(self.parts.values()) + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.tokens / self.seconds


def micro_batch_work(plan: Plan) -> Counter[Item]:
    """Return a micro-batch's work, forward and backward, on the planned rank."""
    return Counter(itertools.chain.from_iterable(cost.work.elements() for cost in plan.costs))


def update_work(plan: Plan) -> Iterator[Item]:
    """Yield gradient norm, optimizer rule and weight averaging for the planned rank's shards."""
    config = plan.config
    numel = sum(part.layout.shard_numel for _, part in plan.model.parts() if not part.frozen)
    name, itemsize = config.optimizer.optimizer, DTYPES[config.distributed.training_dtype].itemsize
    yield Pass("gradient norm", 4 * numel)
    yield Pass(f"update {name}", numel * (UPDATE_BYTES[name] + (itemsize if itemsize < 4 else 0)))
    if config.averaging.enabled:
        yield Pass("averages", 12 * numel)
    # of one Newton-Schulz step, divided among the ranks
    for product, count in plan.partition.update_products.items():
        yield product._replace(times=count * config.optimizer.muon_ns_steps / plan.world_size)


def predict_step(plan: Plan, speeds: Speeds) -> StepTime:
    """Predict the time of a step with the largest batch."""
    config, dtype = plan.config, plan.config.distributed.training_dtype
    micro_batches = config.batch.sequential_micro_batches
    parts = dict.fromkeys((*PARTS.values(), "host"), 0.0)
    for times, items in ((micro_batches, micro_batch_work(plan)), (1, Counter(update_work(plan)))):
        for item, count in items.items():
            parts[PARTS[type(item)]] += times * count * speeds.item_s(item, dtype)
    # recomputing one costs a third more
    blocks = config.model.num_layers + config.performance.recompute_layers // 3
    host = micro_batches * blocks / plan.model.ranks.world_size * speeds.block_s + speeds.step_s
    busy = sum(parts.values())
    parts["host"] += max(0.0, host - busy) if speeds.waits_for_host else host
    inside = {kind: total for kind, total in plan.traffic.items() if kind in KINDS_IN_LAYERS}
    apart = (*KINDS_IN_LAYERS, "send", "receive")
    between = {kind: total for kind, total in plan.traffic.items() if kind not in apart}
    of_data, of_tensor = (speeds.traffic_s(part) for part in (between, inside))
    exposed = (
        _exposed(config, of_data, sum(parts.values()), len(plan.model.stages), speeds.overlap)
        + of_tensor
    )
    exposed -= micro_batches * sum(hidden_s(cost, speeds, dtype) for cost in plan.costs)
    if plan.model.ranks.world_size > 1:
        parts["bubble"] = _bubble_s(plan, speeds)
    return StepTime(
        parts, of_data + of_tensor, exposed, config.batch.batch_size * config.batch.sequence_length
    )


def _bubble_s(plan: Plan, speeds: Speeds) -> float:
    """Return the time that the planned rank waits for other pipeline ranks and messages."""
    config = plan.config
    partition = plan.partition
    model = plan.model
    level, (few, more, periods) = config.performance.mlp_recompute_level, partition.periods(config)
    message_s = speeds.collective_s("send", 1, partition.message_bytes(config))
    costs, dtype = partition.training(config, level), config.distributed.training_dtype
    durations = stage_durations(partition.whole.stages, costs, speeds, dtype)

    def waits(size: tuple[int, int]) -> float:
        passes = partition.order(config, level).training(math.prod(size), size[1])
        timeline = simulate(passes, model.pipeline, durations, model.order.first_trained, message_s)
        return timeline.duration - sum(
            end - start for start, end in timeline.spans[model.ranks.rank]
        )

    # A few micro-batches more may wait less, if a list of passes has no period.
    return max(0.0, waits(few) + (periods * (waits(more) - waits(few)) if periods else 0.0))


def _exposed(
    config: Config, communication: float, compute: float, stages: int, overlap: float
) -> float:
    """Return the exposed communication: everything with a single buffer, otherwise at least the
    first stage's."""
    options = config.multi_stage
    if 1 in (options.num_weight_buffers, options.num_grad_buffers):
        return communication
    hidden = min(communication * overlap * (1 - 1 / stages), compute)
    return communication - hidden
