"""Hybrid shards on four thread ranks: the bits, sizes and collectives of ZeRO inside groups, with
replicas of them."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.config import DistributedConfig, flatten, unflatten
from megatron_lite.config.system import shard_of_node
from megatron_lite.distributed import startup
from megatron_lite.distributed.traffic import Handle
from megatron_lite.errors import UsageError
from megatron_lite.model.layer import MicroBatch
from megatron_lite.validation import resolve
from tests.checkpoint.test_engine import assert_same, read_all
from tests.checkpoint.test_tensor_layouts import begin, go_on
from tests.support.engine_runs import Engine, LateGroup, Outcome, Wrapped
from tests.support.harness import LLAMA, bytes_by_kind, tiny_config
from tests.support.launch import TINY, succeed
from tests.support.metrics import read_metrics
from tests.support.plans import one_plan
from tests.support.thread_ranks import ThreadRank, on_threads, rank_grid

Options = Mapping[str, Any]
RANKS = 4
OPTIONS: Options = {
    "num_layers": 3,
    "batch_size": 8,
    "micro_batch_size": 1,
    "breadth_first_micro_batches": 2,
}
FLAVOURS: dict[str, Options] = {
    "plain": {},
    "bf16": {"training_dtype": "bf16", "ema_type": "ema", "ema_beta": 0.5},
    "fp16": {"training_dtype": "fp16", "full_precision_gradients": False, **LLAMA},
    "frozen": {
        "freeze": ("embedding", "blocks.0.mlp"),
        "training_dtype": "bf16",
        "tie_word_embeddings": False,
    },
    "muon": {"optimizer": "muon", "training_dtype": "bf16"},
    "bare head": {"use_layer_norm_weight": False},  # a stage without parameters
}


class OneRank(Engine):
    """Trains alone on the batches of all ranks."""

    def batches(self, iteration: int, scale: Tensor | None = None) -> list[MicroBatch]:
        count, batch = OPTIONS["batch_size"] // RANKS, self.config.batch
        found = []
        for rank in range(RANKS):
            generator = torch.Generator().manual_seed(1000 * iteration + rank)
            shape = (count, 2, 1, batch.sequence_length)
            tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator)
            found += [MicroBatch(inputs, labels, scale) for inputs, labels in tokens]
        return found


def run(rank: ThreadRank, options: dict[str, Any], late: bool = False) -> Outcome:
    if late:
        rank.shard, rank.replicate = LateGroup(rank.shard), LateGroup(rank.replicate)  # type: ignore[assignment]
    of_type = OneRank if rank.world_size == 1 else Engine
    return of_type(rank, options).run(3, evaluate_every=2)


def outcome(shard: int, options: Options, *args: Any, data: int = RANKS, **ranks: int) -> Outcome:
    """What all ranks agree on; evaluations are summed over them."""
    options = {**OPTIONS, "breadth_first_micro_batches": 8 // data, **options}
    results = on_threads(
        data,
        ranks.get("tensor", 1),
        run,
        options,
        *args,
        pipeline=ranks.get("pipeline", 1),
        shard=shard,
    )
    assert len({(*result.losses, *result.grad_norms, result.weights) for result in results}) == 1
    first = results[0]
    evaluated, averaged = (
        [*map(sum, zip(*(getattr(r, name) for r in results), strict=True))]
        for name in ("evaluated", "averaged")
    )
    return Outcome(first.losses, first.grad_norms, evaluated, averaged, first.weights, "")


@pytest.mark.parametrize(
    ("flavour", "shard"),
    [
        *(("bf16", 1), ("muon", 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("plain", 1), ("plain", 2), ("bf16", 2)),
                *(("fp16", 2), ("frozen", 2), ("bare head", 2)),
            )
        ),
    ],
)
def test_zero_stages_have_the_same_bits(flavour: str, shard: int) -> None:
    """And nearly the losses and norms of a single group."""
    options = FLAVOURS[flavour]
    found = [outcome(shard, {"zero_stage": stage, **options}) for stage in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    whole = outcome(0, options)
    rounding = 1e-6 if flavour == "plain" else 2e-2
    for name in ("losses", "grad_norms", "evaluated", "averaged"):
        assert getattr(found[0], name) == pytest.approx(getattr(whole, name), rel=rounding)
    if flavour == "plain":
        assert found[0].losses == pytest.approx(outcome(0, options, data=1).losses, rel=1e-6)


def test_one_group_has_the_bits_of_plain_zero() -> None:
    for stage in (1, 3):
        assert outcome(RANKS, {"zero_stage": stage}) == outcome(0, {"zero_stage": stage})


@pytest.mark.parametrize(
    ("flavour", "shard", "stage"), [("plain", 2, 1), ("bf16", 1, 3), ("frozen", 2, 2)]
)
def test_late_collectives_change_no_bit(flavour: str, shard: int, stage: int) -> None:
    options = {"zero_stage": stage, **FLAVOURS[flavour]}
    assert outcome(shard, options, True) == outcome(shard, options)


def test_with_tensor_and_pipeline_ranks() -> None:
    """Two replicas of one data rank, each of two tensor-parallel or pipeline ranks."""
    options = {"num_layers": 4, "zero_stage": 2, "tie_word_embeddings": False}
    plain = outcome(0, options, data=2)
    for more in ({"tensor": 2}, {"pipeline": 2}):
        ((name, size),) = more.items()
        found = outcome(1, {**options, f"{name}_parallel": size}, data=2, **more)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
        muon = {**options, f"{name}_parallel": size, "optimizer": "muon"}
        assert outcome(1, muon, data=2, **more) == outcome(0, muon, data=2, **more)


class Counting(Wrapped):
    """Keeps the kind and the elements of every collective."""

    def __init__(self, inner: Any, found: list[tuple[str, int]]) -> None:
        super().__init__(inner)
        self.found = found

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        self.found.append((kind, buffer.numel()))
        return self.inner.all_gather(buffer, kind)  # type: ignore[no-any-return]

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        self.found.append((kind, buffer.numel()))
        return self.inner.reduce_scatter(buffer, kind)  # type: ignore[no-any-return]


def counted(
    rank: ThreadRank, options: dict[str, Any]
) -> tuple[list[tuple[str, int]], list[int], dict[str, int]]:
    found: list[tuple[str, int]] = []
    rank.shard, rank.replicate = Counting(rank.shard, found), Counting(rank.replicate, found)  # type: ignore[assignment]
    engine = Engine(rank, options)
    engine.model.gather_ahead()
    engine.step(1)
    found.clear()
    engine.step(2)
    return found, [stage.numel for stage in engine.model.stages], bytes_by_kind(engine.model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_communicates_once_across_replicas(stage: int) -> None:
    """Inside the group as ZeRO of S ranks; a reduction across replicas begins before the next
    stage's is over."""
    shard = 2
    options = {
        **OPTIONS,
        "zero_stage": stage,
        "training_dtype": "bf16",
        "tie_word_embeddings": False,
    }
    found, sizes, memory = on_threads(RANKS, 1, counted, options, shard=shard)[0]
    of_kind = {kind: [size for name, size in found if name == kind] for kind, _ in found}
    assert (
        sorted(of_kind["replica gather"])
        == sorted(of_kind["replica reduce"])
        == sorted(n // shard for n in sizes)
    )
    # Two buffers: forward gathers all, backward all but the last two and the embedding.
    again = sizes[1:-2] if stage == 3 else []
    assert sorted(of_kind["gather"]) == sorted([*sizes, *again])
    assert of_kind["reduce"] == sizes[::-1]
    kinds = [kind for kind, _ in found if kind.endswith("reduce")]
    assert (
        kinds
        == ["reduce", *["replica reduce", "reduce"] * (len(sizes) - 1), "replica reduce"][
            : len(kinds)
        ]
    )
    total = sum(sizes)
    assert memory["optimizer moments"] == 2 * 4 * total // RANKS
    held = 2 * total // shard if stage == 3 else 0
    assert memory["weight shards"] == 4 * total // RANKS + held
    assert memory["gradient shards"] == (4 * total // shard if stage == 3 else 0)


def test_the_memory_of_a_single_group_is_that_of_plain_zero() -> None:
    options = {**OPTIONS, "zero_stage": 3, "training_dtype": "bf16"}
    assert (
        on_threads(RANKS, 1, counted, options, shard=RANKS)[0][2]
        == on_threads(RANKS, 1, counted, options)[0][2]
    )


def test_a_checkpoint_of_any_groups_serves_any_others(tmp_path: Path) -> None:
    """Weights, moments and averages to the bit there and back, and the files of an export."""
    options = {
        "zero_stage": 3,
        "ema_type": "ema",
        "freeze": ("blocks.0.mlp",),
        "training_dtype": "bf16",
    }

    def on(shard: int, function: Any, *args: Any) -> Any:
        return on_threads(RANKS, 1, function, options, *args, shard=shard)[0]

    losses = on(2, begin, tmp_path / "0")
    first, exports = read_all(tmp_path / "0"), []
    for number, shard in enumerate((0, 1, 2), start=1):
        again, exported = on(shard, go_on, tmp_path / "0", tmp_path / str(number))
        assert_same(read_all(tmp_path / str(number)), first)
        exports.append(exported)
        assert again == pytest.approx(losses, rel=1e-3) and (shard != 2 or again == losses)
    assert exports[0] == exports[1] == exports[2]


def test_the_program_trains_in_replicas_and_resumes_without(tmp_path: Path) -> None:
    """On four processes of two nodes by default, as on one rank; with everything that looks into
    shards."""
    flags = [
        *TINY,
        "--batch_size=8",
        "--checkpoint_interval=3",
        "--log_interval=1",
        "--validation_iters=1",
    ]
    flags += ["--validation_interval=3", "--log_communication=1", "--check_replicas_interval=2"]
    flags += ["--watch_targets=grads,params,updates", "--watch_interval=2"]
    curves = []
    for name, ranks, starts in (("alone", 1, ["none"]), ("replicas", RANKS, ["none", "4"])):
        experiment = tmp_path / name
        for iterations, shard in zip((6,) if ranks == 1 else (3, 6), starts, strict=True):
            more = [
                f"--experiment_dir={experiment}",
                f"--train_iters={iterations}",
                f"--data_parallel_shard={shard}",
            ]
            more += ["--lr_decay_iters=6", "--zero_stage=3"]
            nodes = {"per_node": 2, "variables": {"GLOO_SOCKET_IFNAME": "lo"}} if ranks > 1 else {}
            output = succeed([*flags, *more], ranks, **nodes).output
            by_node = ranks > 1 and shard == "none"
            assert ("reductions across replicas per iteration" in output) == by_node
            assert (
                "--data_parallel_shard is 2: the data-parallel ranks of each of 2 nodes" in output
            ) == by_node
            saved = json.loads((experiment / "config.json").read_text("utf-8"))
            assert saved["data_parallel_shard"] == (
                2 if by_node else int(shard) if shard != "none" else 0
            )
        curves.append(
            [
                record["loss"]
                for record in read_metrics(experiment / "metrics.jsonl")
                if "loss" in record
            ]
        )
    np.testing.assert_allclose(curves[1][: len(curves[0])], curves[0], rtol=1e-6)


def test_a_plan_counts_a_real_step() -> None:
    """Memory and the collectives of weights and gradients, of the engine on simulated groups."""
    options = {**OPTIONS, "zero_stage": 3, "training_dtype": "bf16", "tie_word_embeddings": False}
    found, _, memory = on_threads(RANKS, 1, counted, options, shard=2)[0]
    plan = one_plan(tiny_config(RANKS, **options, data_parallel_shard=2), RANKS, "cpu")
    planned = bytes_by_kind(plan.model)
    # threads need none
    assert planned.pop("communication scratch") > memory.pop("communication scratch") == 0
    assert planned == memory
    for kind in {kind for kind, _ in found}:
        sizes = [size for name, size in found if name == kind]
        assert (plan.traffic[kind].collectives, plan.traffic[kind].elements) == (
            len(sizes),
            sum(sizes),
        )


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("pipeline", "first"), [(1, False), (2, False), (2, True)])
def test_the_default_is_the_ranks_of_a_node(tensor: int, pipeline: int, first: bool) -> None:
    """Compared with the grid: all data-parallel ranks of a node that it has besides those of other
    stages, or none."""
    options = DistributedConfig(
        tensor_parallel=tensor, pipeline_parallel=pipeline, pipeline_first=first
    )
    found = set()
    for nodes, of_node in itertools.product((1, 2, 3, 4), (1, 2, 4, 6, 8, 16)):
        world_size = nodes * of_node
        if world_size % (tensor * pipeline):
            continue
        grid = rank_grid(world_size, options)
        # data-parallel ranks
        groups = [row for plane in grid.transpose(1, 2) for row in plane.tolist()]
        places = [[rank // of_node for rank in group] for group in groups]
        sizes = {
            places_of_group.count(node) for places_of_group in places for node in places_of_group
        }
        # one node is no reason to divide
        sizes |= {0} if any({*place} == {place[0]} for place in places) else set()
        size = sizes.pop() if len(sizes) == 1 else 0
        chosen = shard_of_node(options, world_size, nodes)
        assert chosen == (size if size > 1 else 0), (nodes, of_node, places)
        found.add(chosen)
        if chosen:
            starts = range(0, len(places[0]), chosen)
            assert all(
                len({*place[start : start + chosen]}) == 1 for place in places for start in starts
            )
    assert len(found) > 1


def test_only_equal_nodes_are_a_default() -> None:
    """Machines of other sizes, and ranks that are numbered across machines, leave one group on
    every rank alike."""

    def nodes(places: Sequence[tuple[int, int]]) -> list[int]:
        """Return what each rank concludes. places: its place on its machine, and how many ranks
        that has."""
        said: list[int] = []
        ranks = [SimpleNamespace(rank=rank, world_size=len(places)) for rank in range(len(places))]
        for answer in (lambda value: [said.append(value)], lambda _: said):
            found = []
            for rank, (local, rank.local_world_size) in zip(ranks, places, strict=True):
                rank.gather_objects = answer
                found.append(startup._equal_nodes(cast(Any, rank), local))
        return found

    by_node = [(place, 2) for place in (0, 1)]
    assert nodes(by_node * 3) == [3] * 6
    assert nodes([(0, 2), (0, 2), (1, 2), (1, 2)]) == [1] * 4
    assert (
        nodes([*by_node, *((place, 4) for place in range(4)), *((place, 6) for place in range(6))])
        == [1] * 12
    )


def test_only_zero_3_divides_by_default() -> None:
    cases = ((1, None, 0), (2, None, 0), ("auto", None, 0), (3, None, 4), (3, 0, 0), (3, 8, 8))
    for zero_stage, typed, expected in cases:
        options = {
            **flatten(tiny_config(16, batch_size=16)),
            "zero_stage": zero_stage,
            "data_parallel_shard": typed,
        }
        assert resolve(unflatten(options), 16, nodes=4).distributed.data_parallel_shard == expected
    unknown = resolve(unflatten({**options, "data_parallel_shard": None}), 16, nodes=0)
    assert unknown.distributed.data_parallel_shard is None
    assert resolve(unknown, 16, nodes=4).distributed.data_parallel_shard == 4


def test_replicas_may_be_counted_as_in_levanter() -> None:
    """The data axis is what both replica axes and tensor parallelism leave of the ranks."""
    for ici, dcn, tensor, expected in (
        (1, 2, 1, 8),
        (2, 2, 1, 4),
        (2, 1, 2, 4),
        (4, 4, 1, 1),
        (1, 1, 2, 0),
    ):
        replicas = {
            "replica_ici_axis_size": ici,
            "replica_dcn_axis_size": dcn,
            "tensor_parallel": tensor,
        }
        config = tiny_config(
            16, **replicas, batch_size=16, num_attention_heads=2, ffn_hidden_size=64
        )
        assert config.distributed.data_parallel_shard == expected and resolve(config, 16) == config
    with pytest.raises(
        UsageError, match="replica_dcn_axis_size=3: 4 data-parallel ranks are not 3 replicas of equ"
    ):
        tiny_config(RANKS, replica_dcn_axis_size=3)
    with pytest.raises(
        UsageError,
        match="=4, --data_parallel_shard=2: 4 data-parallel ranks are not 4 replicas of 2",
    ):
        tiny_config(RANKS, replica_dcn_axis_size=4, data_parallel_shard=2)


def test_ranks_must_divide_into_groups() -> None:
    with pytest.raises(
        UsageError,
        match="--data_parallel_shard=3: the 4 data-parallel ranks.*--data_parallel_shard=1",
    ):
        tiny_config(RANKS, data_parallel_shard=3)
