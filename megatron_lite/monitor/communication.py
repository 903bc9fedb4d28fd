"""What `--log_communication=1` prints: the books of the collectives beside the time that they cost."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.distributed.traffic import Total

KINDS = {
    "gather": "gathers",
    "reduce": "reductions",
    "muon gather": "Muon's gathers",
    "muon reduce": "Muon's reductions",
    "sum": "sums",
    "debug": "gathers for debugging",
}
MIB = 2**20


def communication_lines(totals: Mapping[str, Total], iterations: int, alone_s: Mapping[str, float]) -> list[str]:
    """One line for each kind of collective, as means over the iterations.

    totals: of one rank. alone_s: seconds that one gather, or reduction, of every stage takes with nothing beside it.
    """
    return [_line(KINDS[kind], totals[kind], iterations, alone_s.get(kind)) for kind in KINDS if kind in totals]


def _line(kind: str, total: Total, iterations: int, alone_s: float | None) -> str:
    alone = "" if alone_s is None else f" (once through all stages takes {alone_s * 1e3:.2f} ms with nothing beside it)"
    return (
        f"communication | {kind} per iteration: {total.collectives / iterations:g} | "
        f"{total.elements / iterations:,.0f} elements, {total.bytes / iterations / MIB:,.2f} MiB | "
        f"on the wire from each rank: {total.wire_bytes / iterations / MIB:,.2f} MiB | "
        f"waited for: {total.waited_s / iterations * 1e3:.2f} ms{alone}"
    )
