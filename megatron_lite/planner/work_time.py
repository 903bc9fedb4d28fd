"""The time of a training step, predicted from the work of a rank, its traffic, and the speeds of a machine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lite.config import Config
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.devices import TENSOR_KINDS
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.speeds import Attention, Item, Pass, Product, Speeds
from megatron_lite.planner.stage_costs import Overlap

# Bytes that an update reads and writes per element of a shard: gradient, weight and moments, without rounded weights.
UPDATE_BYTES = {"adamw": 28, "muon": 20, "lion": 20, "sgd": 20}


PARTS = {Product: "products", Pass: "passes", Attention: "attention"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one rank."""

    parts: Mapping[str, float]  # "products", "attention", "passes", "host"
    communication_s: float  # all collectives
    exposed_s: float  # communication not overlapped with computation
    tokens: int  # per global batch

    @property
    def compute_s(self) -> float:
        """Time without communication."""
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.tokens / self.seconds


def micro_batch_work(plan: Plan) -> Counter[Item]:
    """Return the work of a micro-batch, forward and backward, on the planned rank."""
    return Counter(itertools.chain.from_iterable(cost.work.elements() for cost in plan.costs))


def update_work(plan: Plan) -> Iterator[Item]:
    """Yield gradient norm, optimizer rule and weight averaging for the planned rank's shards."""
    config, numel = plan.config, sum(part.layout.shard_numel for _, part in plan.model.parts() if not part.frozen)
    name, itemsize = config.optimizer.optimizer, DTYPES[config.distributed.training_dtype].itemsize
    yield Pass("gradient norm", 4 * numel)
    yield Pass(f"update {name}", numel * (UPDATE_BYTES[name] + (itemsize if itemsize < 4 else 0)))
    if config.averaging.enabled:
        yield Pass("averages", 12 * numel)
    for product, count in plan.partition.update_products.items():  # of one Newton-Schulz step, divided among the ranks
        yield product._replace(times=count * config.optimizer.muon_ns_steps / plan.world_size)


def predict_step(plan: Plan, speeds: Speeds) -> StepTime:
    """Predict the time of a step with the largest batch."""
    config, dtype = plan.config, plan.config.distributed.training_dtype
    micro_batches = config.batch.sequential_micro_batches
    assert micro_batches and config.batch.batch_size, "resolved"
    parts = dict.fromkeys((*PARTS.values(), "host"), 0.0)
    for times, items in ((micro_batches, micro_batch_work(plan)), (1, Counter(update_work(plan)))):
        for item, count in items.items():
            parts[PARTS[type(item)]] += times * count * speeds.item_s(item, dtype)
    blocks = config.model.num_layers + config.performance.recompute_layers // 3  # one recomputed is a third more
    host = micro_batches * blocks * speeds.block_s + speeds.step_s
    busy = sum(parts.values())
    parts["host"] += max(0.0, host - busy) if speeds.waits_for_host else host
    inside = {kind: total for kind, total in plan.traffic.items() if kind in TENSOR_KINDS}
    between = {kind: total for kind, total in plan.traffic.items() if kind not in TENSOR_KINDS}
    of_data, of_tensor = (speeds.traffic_s(part) for part in (between, inside))
    exposed = _exposed(config, of_data, sum(parts.values()), len(plan.model.stages), speeds.overlap) + of_tensor
    for overlap, count in sum((cost.overlaps for cost in plan.costs), Counter[Overlap]()).items():
        computing = sum(speeds.item_s(item, dtype) for item in overlap.items)
        sending = speeds.collective_s(overlap.kind, 1, overlap.wire_bytes)
        exposed -= micro_batches * count * min(sending * speeds.overlap, computing)
    return StepTime(parts, of_data + of_tensor, exposed, config.batch.batch_size * config.batch.sequence_length)


def _exposed(config: Config, communication: float, compute: float, stages: int, overlap: float) -> float:
    """Return the exposed communication: everything with a single buffer, otherwise at least the first stage's."""
    options = config.multi_stage
    if 1 in (options.num_weight_buffers, options.num_grad_buffers):
        return communication
    hidden = min(communication * overlap * (1 - 1 / stages), compute)
    return communication - hidden
