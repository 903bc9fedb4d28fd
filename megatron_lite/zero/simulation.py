"""Simulate a pipeline's step: when each pass of each rank runs, and which results travel between
ranks."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from megatron_lite.zero.pipeline import Durations, Kind, Pass, Pipeline, Ties, needed_by

LOANS = ("lend", "return")


class Message(NamedTuple):
    """A pass's result for another rank: one micro-batch's hidden states or their gradient, (b, s,
    h).

    kind, stage: of the pass that needs it. peer: the pipeline rank at the other end. Or a loan
    between ranks: "lend" a stage's weights (on both ranks), and "return" what the borrower adds to
    its gradients (see `loans.py`).
    """

    kind: Kind | Literal["lend", "return"]
    stage: int
    micro_batch: int
    peer: int


class Timeline(NamedTuple):
    """A simulated step. bubble: its duration divided by the busiest rank's compute time, minus 1.

    spans: (start, end) of each pass of each rank.
    """

    duration: float
    bubble: float
    spans: list[list[tuple[float, float]]]


def simulate(
    ranks: Sequence[Sequence[Pass]],
    pipeline: Pipeline,
    durations: Sequence[Durations],
    first_trained: int = 0,
    message: float = 0.0,
    ties: Ties = (),
) -> Timeline:
    """Simulate the passes of all ranks.

    durations: by stage. message: the duration of a transfer. ties: those between ranks delay
    backward passes.

    Raises:
        AssertionError: if a rank waits forever, or computes a pass twice, not at all, on the wrong
            rank, or a stage's micro-batches out of order.
    """
    count, rank_of = len(pipeline.rank_of), pipeline.rank_of
    ends: dict[Pass, float] = {}
    last: dict[tuple[Kind, int], int] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in ranks]
    final = max((each.micro_batch for own in ranks for each in own), default=0)
    late = {lender: [Pass("input", borrower, final)] for lender, borrower in pipeline.apart(ties)}
    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(ranks):
            while len(spans[rank]) < len(passes):
                each = passes[len(spans[rank])]
                start = spans[rank][-1][1] if spans[rank] else 0.0
                for needed in (
                    *needed_by(each, count),
                    *(late.get(each.stage, ()) if each.kind != "forward" else ()),
                ):
                    away = message if rank_of[needed.stage] != rank else 0.0
                    start = max(start, ends.get(needed, math.inf) + away)
                if start == math.inf:
                    break
                for kind in _parts(each.kind):
                    if (
                        each.micro_batch != last.get((kind, each.stage), -1) + 1
                        or rank_of[each.stage] != rank
                    ):
                        raise AssertionError(f"pipeline rank {rank}: {each} is not its next pass")
                    last[kind, each.stage] = each.micro_batch
                    ends[each._replace(kind=kind)] = start + durations[each.stage].of(each.kind)
                spans[rank].append((start, start + durations[each.stage].of(each.kind)))
                moved = True
    _check_complete(ranks, spans, last, count, first_trained)
    duration = max(own[-1][1] for own in spans if own)
    busiest = max(sum(end - start for start, end in own) for own in spans)
    return Timeline(duration, duration / busiest - 1 if busiest else 0.0, spans)


def _parts(kind: Kind) -> tuple[Kind, ...]:
    return ("input", "weights") if kind == "backward" else (kind,)


def _check_complete(
    ranks: Sequence[Sequence[Pass]],
    spans: Sequence[Sequence[tuple[float, float]]],
    last: Mapping[tuple[Kind, int], int],
    count: int,
    first_trained: int,
) -> None:
    for rank, (passes, own) in enumerate(zip(ranks, spans, strict=True)):
        if len(own) < len(passes):
            raise AssertionError(f"pipeline rank {rank} waits for ever before {passes[len(own)]}")
    trains = any(each.kind != "forward" for passes in ranks for each in passes)
    expected = {("forward", stage) for stage in range(count)}
    if trains:
        expected |= {
            (kind, stage) for kind in ("input", "weights") for stage in range(first_trained, count)
        }
    if set(last) != expected or len(set(last.values())) > 1:
        raise AssertionError("a pass of a micro-batch is missing")


class Transfers(NamedTuple):
    """The messages of one rank's passes, by the pass's index in the list.

    receive: transfers to start before a pass, in the order in which their senders send. take: the
    message that the pass waits for. send: results to send after it.
    """

    receive: list[tuple[Message, ...]]
    take: list[Message | None]
    send: list[Message | None]


def transfers(
    ranks: Sequence[Sequence[Pass]], pipeline: Pipeline, timeline: Timeline, rank: int, ties: Ties
) -> Transfers:
    """Return a rank's messages. A receive starts before the pass during which its result is sent.

    By then its rank has needed nothing that is sent later, so no send waits for a receive that
    waits for the send: the simulated order is safe for any real durations.
    """
    chains = itertools.chain.from_iterable
    ends = {each: end for each, (_, end) in zip(chains(ranks), chains(timeline.spans), strict=True)}
    passes, own_ends = ranks[rank], [end for _, end in timeline.spans[rank]]
    receive: list[list[tuple[float, Message]]] = [[] for _ in passes]
    for lender, borrower in pipeline.apart(ties):
        owner, other = pipeline.rank_of[lender], pipeline.rank_of[borrower]
        if rank in (owner, other):
            receive[0].append((-1.0, Message("lend", lender, 0, owner + other - rank)))
        if rank == owner and any(
            each.stage == lender and each.kind != "forward" for each in passes
        ):
            sent = max(ends[each] for each in ranks[other] if each.stage == borrower)
            receive[bisect.bisect_right(own_ends, sent)].append(
                (sent, Message("return", lender, 0, other))
            )
    take: list[Message | None] = []
    send: list[Message | None] = []
    for each in passes:
        forward = each.kind == "forward"
        before, after = each.stage + (-1 if forward else 1), each.stage + (1 if forward else -1)
        own = each._replace(kind="backward") if each.kind == "input" else each
        found = None
        if _is_away(pipeline, before, rank) and each.kind != "weights":
            found = Message(own.kind, each.stage, each.micro_batch, pipeline.rank_of[before])
            sent = next(ends[it] for it in _senders(each, before) if it in ends)
            receive[bisect.bisect_right(own_ends, sent)].append((sent, found))
        take.append(found)
        wanted = forward or any(it in ends for it in _senders(each, after))
        leaves = _is_away(pipeline, after, rank) and each.kind != "weights" and wanted
        send.append(
            Message(own.kind, after, each.micro_batch, pipeline.rank_of[after]) if leaves else None
        )
    return Transfers([tuple(found for _, found in sorted(each)) for each in receive], take, send)


def _is_away(pipeline: Pipeline, stage: int, rank: int) -> bool:
    return 0 <= stage < len(pipeline.rank_of) and pipeline.rank_of[stage] != rank


def _senders(each: Pass, stage: int) -> tuple[Pass, ...]:
    """Return the passes of a neighbouring stage that may produce the input of `each` (or use its
    output)."""
    moved = each._replace(stage=stage)
    return (
        (moved,)
        if each.kind == "forward"
        else (moved._replace(kind="backward"), moved._replace(kind="input"))
    )
