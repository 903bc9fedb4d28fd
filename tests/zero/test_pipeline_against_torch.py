"""Gradients of our pipelines beside those of torch.distributed.pipelining, on two gloo ranks and
the plain model."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.layer import MicroBatch
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed
from tests.support.plain_gpt import PlainGPT
from tests.support.thread_ranks import on_threads

SCHEDULES = ("one_f_one_b", "interleaved", "zero_bubble_v")
OPTIONS = {
    "num_layers": 4,
    "batch_size": 4,
    "micro_batch_size": 1,
    "tie_word_embeddings": False,
    "zero_stage": 1,
}
Gradients = dict[str, Tensor]


class Chunk(nn.Module):
    """Blocks of the plain model, after its embedding or before its head."""

    def __init__(self, model: PlainGPT, blocks: range) -> None:
        super().__init__()
        self.blocks, self.model = blocks, [model]  # a list hides the rest of the model from torch
        self.own = nn.ModuleList(model.blocks[block] for block in blocks)
        if blocks.start == 0:
            self.embedding = model.embedding
        if blocks.stop == len(model.blocks):
            self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.blocks.start == 0:
            x = self.embedding["word"](x) + self.embedding["position"](torch.arange(x.shape[1]))
        for block in self.own:
            x = block(x)
        return self.head["output"](self.head["norm"](x)) if hasattr(self, "head") else x


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def plain_model(engine: Engine) -> PlainGPT:
    model = PlainGPT(engine.config.model)
    model.load(
        {name: weight.float().numpy().copy() for name, weight in engine.model.full_weights()}
    )
    return model


def of_torch(model: PlainGPT, name: str, rank: int, batches: list[MicroBatch]) -> Gradients:
    """Gradients of this rank's stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
        ScheduleZBVZeroBubble,
    )

    made: dict[str, Any] = {
        "one_f_one_b": (Schedule1F1B, [rank]),
        "interleaved": (ScheduleInterleaved1F1B, [rank, rank + 2]),
        "zero_bubble_v": (ScheduleZBVZeroBubble, [rank, 3 - rank]),
    }
    schedule, places = made[name]
    count = 2 * len(places)
    size = len(model.blocks) // count
    chunks = {place: Chunk(model, range(place * size, (place + 1) * size)) for place in places}
    stages = [PipelineStage(chunks[place], place, count, torch.device("cpu")) for place in places]
    run = schedule(
        stages if len(places) > 1 else stages[0],
        len(batches),
        loss_fn=summed_loss,
        scale_grads=False,
    )
    tokens, labels = (
        torch.cat([getattr(each, kind) for each in batches]) for kind in ("tokens", "labels")
    )
    run.step(
        *((tokens,) if 0 in places else ()),
        **({"target": labels, "losses": []} if count - 1 in places else {}),
    )
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def ours(engine: Engine, batches: list[MicroBatch]) -> Gradients:
    engine.model.forward_backward(batches)
    return {
        slot.spec.name: part.grad_shard[slot.offset : slot.end].view(slot.spec.shape).clone()
        for _, part in engine.model.parts()
        for slot in part.layout.slots
    }


def both(ranks: Distributed) -> list[Any]:
    warnings.simplefilter("ignore")  # of torch's own calls to functions that it deprecates
    divide(ranks, dist.new_group, DistributedConfig(pipeline_parallel=2))
    found = []
    for name in SCHEDULES:
        engine = Engine(ranks, {**OPTIONS, "pipeline_parallel": 2, "pipeline_schedule": name})
        batches = engine.batches(1, torch.ones(()))
        pair = (
            ours(engine, batches),
            of_torch(plain_model(engine), name, ranks.pipeline.rank, batches),
        )
        found.append(tuple({name: value.numpy() for name, value in some.items()} for some in pair))
    return found


def one_rank(ranks: Any) -> tuple[Gradients, Gradients]:
    engine = Engine(ranks, {**OPTIONS, "breadth_first_micro_batches": 4})
    batches, model = engine.batches(1, torch.ones(())), plain_model(engine)
    for batch in batches:
        summed_loss(model(batch.tokens), batch.labels).backward()
    plain = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return ours(engine, batches), plain


def test_gradients_are_those_of_torchs_schedules() -> None:
    """To the last bit, but for what our kernels round otherwise than the plain model, on one rank
    as well."""
    (own, plain), ranks = on_threads(1, 1, one_rank)[0], run_distributed(2, both)
    assert own.keys() == plain.keys()
    for place, name in enumerate(SCHEDULES):
        gradients: Gradients = {}
        torchs: Gradients = {}
        for rank in ranks:
            assert not gradients.keys() & rank[place][0].keys()
            for some, values in zip((gradients, torchs), rank[place], strict=True):
                some.update({name: torch.from_numpy(value) for name, value in values.items()})
        for parameter, value in own.items():
            assert torch.equal(gradients[parameter], value), (name, parameter)
            assert torch.equal(torchs[parameter], plain[parameter]), (name, parameter)
            assert torch.allclose(
                value, plain[parameter], rtol=0, atol=3e-6 * float(plain[parameter].abs().max())
            )
