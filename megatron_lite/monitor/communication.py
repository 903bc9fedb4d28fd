"""Write the lines of --log_communication: traffic and waits per kind of collective, and its time
when run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import KINDS, Total
from megatron_lite.monitor.logging import MIB
from megatron_lite.zero.stage import Stage


def time_collectives(
    stages: Sequence[Stage], group: Group, barrier: Callable[[], None]
) -> dict[str, float]:
    """Return the seconds to gather and to reduce the stages once, with nothing else running, by
    kind.

    The fastest of three repetitions counts. Call before training: this overwrites the gradient
    buffers.
    """
    best = {}
    for kind in ("gather", "reduce"):
        runs = []
        for _ in range(3):
            barrier()
            start_s = time.perf_counter()
            for stage in stages:
                if kind == "gather":
                    stage.weights.holder = None
                    stage.gather()
                    stage.weights.wait()
                for part in stage.trainable if kind == "reduce" else ():
                    part.group.reduce_scatter(part.full_gradients).wait()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
            runs.append(time.perf_counter() - start_s)
        best[kind] = min(runs)
    return best


def communication_lines(
    totals: Mapping[str, Total], iterations: int, alone_s: Mapping[str, float]
) -> list[str]:
    """Return the lines of --log_communication=1: one per kind of collective, as means over the
    iterations.

    totals: this rank's traffic. alone_s: seconds to gather, or reduce, all stages once with nothing
    else running.
    """
    lines = []
    for kind, name in KINDS.items():
        if (total := totals.get(kind)) is None:
            continue
        line = (
            f"communication | {name} per iteration: {total.collectives / iterations:g} | "
            f"{total.elements / iterations:,.0f} elements, {total.bytes / iterations / MIB:,.2f} MiB | "
            f"on the wire from each rank: {total.wire_bytes / iterations / MIB:,.2f} MiB | "
            f"waited for: {total.waited_s / iterations * 1e3:.2f} ms"
        )
        if kind in alone_s:
            line += (
                f" ({alone_s[kind] * 1e3:.2f} ms for all stages once, with nothing else running)"
            )
        lines.append(line)
    return lines
