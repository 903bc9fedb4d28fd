"""The time of a training step, predicted from the work of a rank, its traffic, and the speeds of a machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config import Config
from megatron_lite.distributed.traffic import Total
from megatron_lite.planner.plan import Plan
from megatron_lite.planner.speeds import TENSOR_KINDS, Speeds
from megatron_lite.planner.stage_costs import Overlap
from megatron_lite.planner.work import Attention, Item, MicroBatchWork, Product, update_work


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


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    micro_batch: tuple[Item, ...]
    update: tuple[Item, ...]  # once a step
    micro_batches: int
    blocks: int  # passes through blocks in a micro-batch; a recomputed block counts a third more


def step_work(plan: Plan) -> StepWork:
    """Return the work of a step with the largest batch on the planned rank."""
    config, micro_batches = plan.config, plan.config.batch.sequential_micro_batches
    assert micro_batches, "resolved"
    trained = {name for name, parameter in plan.model.parameters() if parameter.requires_grad}
    numel = sum(part.layout.shard_numel for _, part in plan.model.parts() if not part.frozen)
    products = (product for cost in plan.costs for product in cost.products.elements())
    return StepWork(
        (*products, *MicroBatchWork(config, trained, plan.device_type).items()),
        tuple(update_work(config, numel, plan.world_size)),
        micro_batches,
        config.model.num_layers + config.performance.recompute_layers // 3,
    )


def predict_step(plan: Plan, speeds: Speeds) -> StepTime:
    """Predict the time of a step with the largest batch."""
    config, model, work = plan.config, plan.model, step_work(plan)
    dtype = config.distributed.training_dtype
    parts: dict[str, float] = defaultdict(float)
    for times, items in ((work.micro_batches, work.micro_batch), (1, work.update)):
        for item, count in Counter(items).items():
            parts[_part(item)] += times * count * speeds.item_s(item, dtype)
    host = work.micro_batches * work.blocks * speeds.block_s + speeds.step_s
    busy = sum(parts.values())
    parts["host"] += max(0.0, host - busy) if speeds.waits_for_host else host
    inside = {kind: total for kind, total in plan.traffic.items() if kind in TENSOR_KINDS}
    between = {kind: total for kind, total in plan.traffic.items() if kind not in TENSOR_KINDS}
    of_data, of_tensor = (_seconds(part, speeds) for part in (between, inside))
    exposed = _exposed(config, of_data, sum(parts.values()), len(model.stages), speeds.overlap) + of_tensor
    for overlap, count in sum((cost.overlaps for cost in plan.costs), Counter[Overlap]()).items():
        computing = sum(speeds.item_s(product, dtype) for product in overlap.products)
        sending = speeds.collective_s(overlap.kind, 1, overlap.wire_bytes)
        exposed -= work.micro_batches * count * min(sending * speeds.overlap, computing)
    assert config.batch.batch_size, "resolved"
    return StepTime(parts, of_data + of_tensor, exposed, config.batch.batch_size * config.batch.sequence_length)


def _seconds(traffic: Mapping[str, Total], speeds: Speeds) -> float:
    return sum(speeds.collective_s(kind, total.collectives, total.wire_bytes) for kind, total in traffic.items())


def _exposed(config: Config, communication: float, compute: float, stages: int, overlap: float) -> float:
    """Return the exposed communication: everything with a single buffer, otherwise at least the first stage's."""
    options = config.multi_stage
    if 1 in (options.num_weight_buffers, options.num_grad_buffers):
        return communication
    hidden = min(communication * overlap * (1 - 1 / stages), compute)
    return communication - hidden


def _part(item: Item) -> str:
    if isinstance(item, Product):
        return "products"
    return "attention" if isinstance(item, Attention) else "passes"
