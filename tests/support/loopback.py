"""Steps of tensor-parallel ranks in a network of their own, and the bytes that its loopback device counts, as JSON.

Needs `unshare -rn` around it, so that no other program sends anything, and `ip link set lo up`.
"""

import json
import sys
from typing import Any

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.plan import make_plan
from scripts.benchmarks.training.measure import loopback_bytes
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed, tiny_config

Options = dict[str, Any]
SIZES: Options = dict(num_layers=4, hidden_size=256, sequence_length=512, vocab_size=2048, micro_batch_size=2)
SPLIT: Options = dict(sequence_tensor_parallel=True)
CASES: list[Options] = [{}, SPLIT, dict(zero_stage=3, **SPLIT), dict(parallel_embeddings=False, **SPLIT)]


def counted(distributed: Distributed, cases: list[Options]) -> list[int]:
    """Bytes of the second step of every case, of all ranks."""
    found = []
    for options in cases:
        engine = Engine(distributed, options)
        for iteration in (1, 2):
            distributed.barrier()
            before = loopback_bytes()
            distributed.barrier()
            engine.step(iteration)
            engine.model.finish()
            distributed.barrier()
            after = loopback_bytes()
        assert before is not None and after is not None
        found.append(after - before)
    return found


def main(ranks: int, shared: int) -> None:
    """Print [bytes of the plan, bytes of the device] of every case."""
    more = dict(SIZES, tensor_parallel=shared, batch_size=4 * ranks // shared)
    cases = [{**more, **options} for options in CASES]
    found, *_ = run_distributed(ranks, counted, cases, tensor_parallel=shared)
    pairs = []
    for options, num_bytes in zip(cases, found, strict=True):
        config = tiny_config(ranks, **options)
        plans = [make_plan(config, ranks, "cpu", rank) for rank in range(ranks)]
        pairs.append((sum(total.wire_bytes for plan in plans for total in plan.traffic.values()), num_bytes))
    print(json.dumps(pairs))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
