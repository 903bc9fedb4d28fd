"""Pipeline schedules as data: which stages each rank runs, and every rank's passes in order.

Consecutive stages that a micro-batch passes on one rank are a *chunk*; the embedding is in the
first, the head in the last. Chunk c of C is on pipeline rank c % P ("loop"), or ranks count up and
back down ("v": 0, 1, ..., P - 1, P - 1, ..., 0), which puts embedding and head on the first rank.
Each schedule computes a stage's micro-batches in ascending order, so that P changes no sum.

    breadth_first  every micro-batch through a chunk before the next chunk: one gather and one reduction a stage and
                   step in ZeRO-3, activations of all micro-batches (Lamy-Poirier 2022, arXiv:2211.05953)
    one_f_one_b    forward and backward passes in turn after a warm-up (Narayanan et al. 2021, arXiv:2104.04473)
    interleaved    the same with several chunks a rank, and groups of P micro-batches through each (section 2.2)
    zero_bubble_v  two chunks a rank, and backward passes in two parts: gradients of inputs as early as possible, those
                   of weights where a rank would wait; at most the activations of 2 P chunks a rank (Qi et al. 2024,
                   arXiv:2405.15362)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_lite.config.system import ONE_LOOP, number_of_chunks

# a backward pass is either whole or split in two parts
Kind = Literal["forward", "backward", "input", "weights"]
Ties = Sequence[tuple[int, int]]  # (stage, another one that uses its parameters)


class Pass(NamedTuple):
    """One micro-batch's pass through a stage or chunk."""

    kind: Kind
    stage: int
    micro_batch: int


Passes = list[list[Pass]]  # of every rank, in order


class Durations(NamedTuple):
    """Time of a micro-batch's passes through a stage, in any unit."""

    forward: float = 1.0
    input: float = 1.0
    weights: float = 1.0

    def of(self, kind: Kind) -> float:
        """Return the duration of a pass."""
        return self.input + self.weights if kind == "backward" else float(getattr(self, kind))


@dataclass(frozen=True)
class Pipeline:
    """The ranks of a pipeline and their stages. chunks: ranges of stage numbers."""

    ranks: int
    chunks: tuple[range, ...]
    placement: str = "loop"

    def rank_of_chunk(self, chunk: int) -> int:
        """Return the pipeline rank of a chunk."""
        turn, place = divmod(chunk, self.ranks)
        return self.ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def chunks_of(self, rank: int) -> list[int]:
        """Return the chunks of a pipeline rank, ascending."""
        return [chunk for chunk in range(len(self.chunks)) if self.rank_of_chunk(chunk) == rank]

    @functools.cached_property
    def rank_of(self) -> list[int]:
        """The pipeline rank of each stage."""
        return [
            self.rank_of_chunk(chunk) for chunk, stages in enumerate(self.chunks) for _ in stages
        ]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def apart(self, ties: Ties) -> Ties:
        """Return the ties between stages on different ranks."""
        return [tie for tie in ties if self.rank_of[tie[0]] != self.rank_of[tie[1]]]


def place(
    ranks: int, num_stages: int, schedule: str, placement: str, head: float = 0.0
) -> Pipeline:
    """Divide the stages, embedding first and head last, into chunks of a pipeline.

    head: its work relative to a stage of blocks. With one loop, the head's rank gets fewer blocks;
    loops need equal chunks.
    """
    blocks = num_stages - 2
    count = number_of_chunks(ranks, blocks, schedule, placement)
    assert count, "checked with the options"
    owners = [Pipeline(ranks, (), placement).rank_of_chunk(chunk) for chunk in range(count)]
    sizes, work = [1] * count, [float(owners.count(rank)) for rank in range(ranks)]
    work[owners[-1]] += head if schedule in ONE_LOOP else 0.0
    # to the least work; on a tie to the last rank, which stores fewer activations
    for _ in range(blocks - count):
        rank = min(range(ranks), key=lambda rank: (work[rank], -rank))
        chunk = min(
            (chunk for chunk in range(count) if owners[chunk] == rank), key=lambda c: (sizes[c], -c)
        )
        work[rank], sizes[chunk] = work[rank] + 1, sizes[chunk] + 1
    borders = [0, *(1 + end for end in itertools.accumulate(sizes[:-1])), num_stages]
    return Pipeline(ranks, tuple(range(*pair) for pair in itertools.pairwise(borders)), placement)


# -- the schedules: every rank's passes through chunks
# ----------------------------------------------------------------


def breadth_first(pipeline: Pipeline, micro_batches: int, durations: Sequence[Durations]) -> Passes:
    """Return the passes of every rank. durations: of a micro-batch through each chunk."""
    batches = range(micro_batches)
    return [
        [Pass("forward", chunk, micro) for chunk in own for micro in batches]
        + [Pass("backward", chunk, micro) for chunk in reversed(own) for micro in batches]
        for own in map(pipeline.chunks_of, range(pipeline.ranks))
    ]


def one_f_one_b(pipeline: Pipeline, micro_batches: int, durations: Sequence[Durations]) -> Passes:
    """Return the passes of every rank, interleaved with several chunks per rank; see
    `breadth_first`."""
    ranks, loops = pipeline.ranks, len(pipeline.chunks) // pipeline.ranks
    groups = max(1, micro_batches // ranks)
    borders = [micro_batches * group // groups for group in range(groups + 1)]
    pairs = [*itertools.pairwise(borders)]
    turns = [
        (loop, micro)
        for first, end in pairs
        for loop in range(loops)
        for micro in range(first, end)
    ]
    largest = max(end - first for first, end in pairs)
    found = []
    for rank in range(ranks):
        own, after = pipeline.chunks_of(rank), ranks - rank - 1
        forward = [Pass("forward", own[loop], micro) for loop, micro in turns]
        backward = [Pass("backward", own[-1 - loop], micro) for loop, micro in turns]
        warm_up = min(after if loops == 1 else 2 * after + (loops - 1) * largest, len(forward))
        in_turn = [each for pair in zip(forward[warm_up:], backward, strict=False) for each in pair]
        found.append(forward[:warm_up] + in_turn + backward[len(forward) - warm_up :])
    return found


def zero_bubble_v(pipeline: Pipeline, micro_batches: int, durations: Sequence[Durations]) -> Passes:
    """Return the passes of every rank; see `breadth_first`.

    Repeatedly takes the pass that can start first. Among passes that can start at nearly the same
    time: input gradients before forward passes before weight gradients, the oldest micro-batch's
    gradient, and the forward pass nearest to the loss.
    """
    most, count = 2 * pipeline.ranks, len(pipeline.chunks)
    own = [pipeline.chunks_of(rank) for rank in range(pipeline.ranks)]
    rank_of = [pipeline.rank_of_chunk(chunk) for chunk in range(count)]
    found: Passes = [[] for _ in own]
    end, free = dict[Pass, float](), [0.0] * pipeline.ranks
    # activations of a rank, and of its last chunk
    held, back = ([0] * pipeline.ranks for _ in range(2))
    # by priority
    coming: dict[Kind, list[int]] = {kind: [0] * count for kind in ("input", "forward", "weights")}

    nearly = 0.05 * sum(map(sum, durations)) / count / 3

    def choices() -> Iterator[tuple[float, tuple[int, ...], int, Pass]]:
        for priority, kind in enumerate(coming):
            for chunk, micro in enumerate(coming[kind]):
                each, rank = Pass(kind, chunk, micro), rank_of[chunk]
                # The last place is reserved for a micro-batch on its way back, unless another such
                # one frees a place.
                room = most - (chunk != own[rank][-1] and back[rank] == 0)
                if micro == micro_batches or (kind == "forward" and held[rank] >= room):
                    continue
                start = max(
                    [free[rank], *(end.get(needed, math.inf) for needed in needed_by(each, count))]
                )
                if start < math.inf:
                    yield (
                        start,
                        (priority, *((micro, -chunk) if kind == "input" else (-chunk, micro))),
                        rank,
                        each,
                    )

    while True:
        possible = [*choices()]
        if not possible:
            assert all(of == [micro_batches] * count for of in coming.values()), (pipeline, coming)
            return found
        latest = min(possible)[0] + nearly
        start, _, rank, each = min(
            (it for it in possible if it[0] <= latest), key=lambda it: (it[1], it[0])
        )
        end[each] = free[rank] = start + durations[each.stage].of(each.kind)
        more = (each.kind == "forward") - (each.kind == "weights")
        held[rank] += more
        back[rank] += more * (each.stage == own[rank][-1])
        coming[each.kind][each.stage] += 1
        found[rank].append(each)


def needed_by(each: Pass, count: int) -> Iterator[Pass]:
    """Yield the passes whose results a pass needs, among `count` stages or chunks; "input" includes
    "backward"."""
    if each.kind == "weights":
        yield each._replace(kind="input")
    elif each.kind != "forward":
        yield each._replace(kind="forward")
        if each.stage + 1 < count:
            yield each._replace(kind="input", stage=each.stage + 1)
    elif each.stage > 0:
        yield each._replace(stage=each.stage - 1)


Schedule = Callable[[Pipeline, int, Sequence[Durations]], Passes]
SCHEDULES: Mapping[str, Schedule] = {
    "breadth_first": breadth_first,
    "one_f_one_b": one_f_one_b,
    "interleaved": one_f_one_b,
    "zero_bubble_v": zero_bubble_v,
}


# -- from chunks to stages
# ---------------------------------------------------------------------------------------------


def training_passes(
    pipeline: Pipeline,
    schedule: str,
    groups: Sequence[range],
    durations: Sequence[Durations],
    first_trained: int = 0,
    ties: Ties = (),
) -> Passes:
    """Return every rank's passes through stages.

    Args:
        groups: micro-batches that are computed together.
        durations: of each stage.
        first_trained: the first stage with a backward pass.
        ties: both stages write one gradient: the backward passes of the first follow all passes of
            the second, of the group or, if they are on different ranks, of the step.
    """
    chunks = [
        Durations(*map(sum, zip(*durations[some.start : some.stop], strict=True)))
        for some in pipeline.chunks
    ]
    found: Passes = [[] for _ in range(pipeline.ranks)]
    apart = pipeline.apart(ties)
    near = [tie for tie in ties if tie not in apart]
    for group in groups:
        for own, passes in zip(
            found, SCHEDULES[schedule](pipeline, len(group), chunks), strict=True
        ):
            shifted = [each._replace(micro_batch=group.start + each.micro_batch) for each in passes]
            through = _through_stages(pipeline, shifted, schedule == "breadth_first")
            trained = (
                each for each in through if each.kind == "forward" or each.stage >= first_trained
            )
            own += _at_last([*trained], near)
    return [[*_at_last(own, apart)] for own in found]


def _through_stages(pipeline: Pipeline, passes: Sequence[Pass], by_stage: bool) -> Iterator[Pass]:
    """Yield the passes through each chunk's stages. by_stage: all micro-batches of a row before the
    next stage."""
    for (kind, chunk), run in itertools.groupby(passes, key=lambda each: each[:2]):
        batches = [each.micro_batch for each in run]
        for some in [batches] if by_stage else [[micro] for micro in batches]:
            stages = pipeline.chunks[chunk]
            for stage in stages if kind == "forward" else reversed(stages):
                yield from (Pass(kind, stage, micro) for micro in some)


def _at_last(passes: Sequence[Pass], ties: Ties) -> Iterator[Pass]:
    """Delay the first stage's backward passes of each tie until the borrower's last one."""
    lenders = {lender for lender, _ in ties}
    late = [each for each in passes if each.kind != "forward" and each.stage in lenders]
    for each in passes:
        if each.kind == "forward" or each.stage not in lenders:
            yield each
        elif each == late[-1]:
            yield from late


def evaluation_passes(pipeline: Pipeline, micro_batches: int) -> Passes:
    """Return the forward passes of every rank; stages compute all micro-batches in a row, without
    gaps."""
    ranks = [pipeline.stages_of(rank) for rank in range(pipeline.ranks)]
    batches = range(micro_batches)
    if pipeline.ranks == 1:
        return [[Pass("forward", stage, micro) for micro in batches for stage in ranks[0]]]
    return [[Pass("forward", stage, micro) for stage in own for micro in batches] for own in ranks]
