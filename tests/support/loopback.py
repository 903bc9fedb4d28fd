"""Steps of ranks in a network of their own, and the bytes that its loopback device counts, as JSON.

Needs `unshare -rn` around it, so that no other program sends anything, and `ip link set lo up`.
"""

import json
from typing import Any

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.plan import make_plan
from scripts.benchmarks.training.measure import loopback_bytes
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed, tiny_config

Options = dict[str, Any]
# Messages of 1/2 MiB and more: headers of TCP and the barriers around a step are a few KiB of
# several MiB.
SIZES: Options = dict(
    num_layers=4, hidden_size=256, sequence_length=512, vocab_size=2048, micro_batch_size=2
)
SPLIT: Options = dict(sequence_tensor_parallel=True)
TENSOR: list[Options] = [
    {},
    SPLIT,
    dict(zero_stage=3, **SPLIT),
    dict(parallel_embeddings=False, **SPLIT),
]
PIPELINES: list[Options] = [
    dict(pipeline_schedule="one_f_one_b", zero_stage=1, tie_word_embeddings=False),
    dict(
        pipeline_schedule="breadth_first",
        zero_stage=3,
        tie_word_embeddings=False,
        training_dtype="bf16",
    ),
    dict(pipeline_schedule="zero_bubble_v", zero_stage=1),
]
SHORT: Options = dict(sequence_length=32)  # hybrid shards send no hidden states
SHARDS: list[Options] = [
    dict(zero_stage=1, training_dtype="bf16", **SHORT),
    dict(zero_stage=2, **SHORT),
    dict(zero_stage=3, training_dtype="bf16", full_precision_gradients=False, **SHORT),
]
# ranks, data-parallel ranks, layout, cases
LAYOUTS: list[tuple[int, int, Options, list[Options]]] = [
    (2, 1, dict(pipeline_parallel=2), PIPELINES),
    (4, 4, dict(data_parallel_shard=2), SHARDS),
    (4, 2, dict(pipeline_parallel=2, data_parallel_shard=1), PIPELINES),
    *(
        (ranks, ranks // shared, dict(tensor_parallel=shared), TENSOR)
        for ranks, shared in ((2, 2), (4, 2), (4, 4))
    ),
]


def sent(distributed: Distributed, options: Options) -> tuple[int, int]:
    """Bytes that this rank counts, and bytes of the device, of the second step."""
    engine = Engine(distributed, options)
    for iteration in (1, 2):
        distributed.barrier()
        distributed.traffic.take()
        before = loopback_bytes()
        distributed.barrier()
        engine.step(iteration)
        engine.model.finish()
        distributed.barrier()
        after = loopback_bytes()
    assert before is not None and after is not None
    return sum(total.wire_bytes for total in distributed.traffic.take().values()), after - before


def main() -> None:
    """Print [ranks, options, bytes of the plans, bytes that the ranks count, bytes of the device]
    of every case."""
    for ranks, data_ranks, layout, options in LAYOUTS:
        for more in options:
            case = {**SIZES, "batch_size": 4 * data_ranks, **layout, **more}
            counted, carried = zip(*run_distributed(ranks, sent, case, **layout), strict=True)
            plans = [
                make_plan(tiny_config(ranks, **case), ranks, "cpu", rank) for rank in range(ranks)
            ]
            planned = sum(total.wire_bytes for plan in plans for total in plan.traffic.values())
            print(json.dumps([ranks, case, planned, sum(counted), carried[0]]), flush=True)


if __name__ == "__main__":
    main()
