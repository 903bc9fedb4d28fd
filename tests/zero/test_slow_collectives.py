"""A shared buffer is never written, nor zeroed, nor computed with before the collective that uses
it has finished.

Collectives are made slow in two ways. Late: nothing is sent before somebody waits, and then the
input must still be what it was. Delayed: a thread sends and receives while the main thread
computes, chosen collectives 0.1 s after they were started. Whoever forgets to wait writes into a
buffer that is still to be read, which is caught at once, or computes with what was there before,
which changes numbers.
"""

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.traffic import Handle
from megatron_lite.zero.stage import Buffer
from tests.support.engine_runs import DelayedGroup, Engine, LateGroup, Outcome, SimulatedRanks
from tests.support.harness import run_distributed

Options = dict[str, Any]

BUFFERS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"num_weight_buffers": 1, "num_grad_buffers": 1},
    {"num_weight_buffers": 3, "num_grad_buffers": 3},
    {"num_weight_buffers": 1, "num_grad_buffers": 4},
    {"num_weight_buffers": 4, "num_grad_buffers": 1},
    {"num_weight_buffers": 2, "num_grad_buffers": 3},
]
ORDERS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]  # micro-batches: depth-first, breadth-first
KINDS: list[Options] = [
    {"freeze": ("embedding", "blocks.0")},
    {"freeze": ("blocks.1", "head.norm")},
    {
        "freeze": ("embedding",),
        "tie_word_embeddings": True,
        "store_frozen_weights_in_optimization_precision": False,
        "training_dtype": "bf16",
    },
    {"training_dtype": "bf16"},
    {"training_dtype": "bf16", "full_precision_gradients": False, "tie_word_embeddings": True},
    {"training_dtype": "bf16", "split_master_weights": True, "lr_scales": ("blocks:0.5",)},
]


def layout(buffers: Options, order: tuple[int, int], **more: Any) -> Options:
    return (
        {
            "num_layers": 3,
            "sequence_length": 8,
            "max_position_embeddings": 8,
            "depth_first_micro_batches": order[0],
            "breadth_first_micro_batches": order[1],
            "micro_batch_size": 1,
            "batch_size": None,
            "tie_word_embeddings": False,
        }
        | buffers
        | more
    )


def is_legal(options: Options) -> bool:
    """Split master weights need a weight buffer for each stage."""
    return not options.get("split_master_weights") or options.get("zero_stage") in (1, 2)


ALL = [
    layout(buffers, order, tie_word_embeddings=tied)
    for buffers, order, tied in itertools.product(BUFFERS, ORDERS, (False, True))
] + [
    layout(buffers, order, **kind)
    for buffers, order, kind in itertools.product(BUFFERS, ORDERS, KINDS)
    if is_legal(buffers | kind)
]
# Every buffer count, every order with each of the first three, tied and not in turn; every kind at
# ZeRO 1 or 2, and 3.
SOME = [
    layout(buffers, order, tie_word_embeddings=(i + j) % 2 == 0)
    for (i, buffers), (j, order) in itertools.product(enumerate(BUFFERS), enumerate(ORDERS))
    if i < 3 or j == (2 * i) % 5
] + [
    layout(BUFFERS[stage], ORDERS[(i + stage) % 5], **kind)
    for i, kind in enumerate(KINDS)
    for stage in (i % 2, 2)
    if is_legal(BUFFERS[stage] | kind)
]


def train_late(distributed: Any, layouts: list[Options]) -> list[Outcome]:
    return [
        Engine(distributed, options, LateGroup(distributed)).run(3, evaluate_every=2)
        for options in layouts
    ]


def train_normally_and_delayed(
    distributed: Distributed, layouts: list[Options]
) -> list[tuple[Outcome, Outcome]]:
    """Two collectives of each run are 0.1 s late, others in every layout."""
    delayed, outcomes = DelayedGroup(distributed), []
    for seed, options in enumerate(layouts):
        distributed.traffic.take()
        normal = Engine(distributed, options).run(3, evaluate_every=2)
        totals = distributed.traffic.take()
        count = totals["gather"].collectives + totals["reduce"].collectives
        delayed.choose(random.Random(seed).sample(range(count), 2))
        outcomes.append((normal, Engine(distributed, options, delayed).run(3, evaluate_every=2)))
    return outcomes


def train_in_all_ways(
    distributed: Distributed, layouts: list[Options]
) -> tuple[list[tuple[Outcome, Outcome]], list[Outcome]]:
    return train_normally_and_delayed(distributed, layouts), train_late(distributed, layouts)


def compare(ranks: int, layouts: list[Options]) -> None:
    """Every rank agrees with itself; losses, norms and full weights also agree over ranks."""
    normal_and_delayed, late = zip(*run_distributed(ranks, train_in_all_ways, layouts), strict=True)
    for options, *columns in zip(layouts, *normal_and_delayed, *late, strict=True):
        pairs, lates = columns[:ranks], columns[ranks:]
        for (normal, delayed), latest in zip(pairs, lates, strict=True):
            assert delayed == normal, f"delayed: {options}"
            assert latest == normal, f"late: {options}"
            assert normal.weights == pairs[0][0].weights and normal.losses == pairs[0][0].losses
            assert len(set(normal.losses)) == 3, "nothing is trained"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_slow_collectives_change_no_bit(ranks: int) -> None:
    """Some buffer counts, orders and kinds of parameters, with an evaluation in between: the same
    numbers.

    All of them are held against late collectives of simulated ranks below, half of them by default.
    """
    compare(ranks, SOME[::12] if ranks == 2 else SOME[1::14])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("ranks", [2, 3])
def test_slow_collectives_change_no_bit_in_any_combination(ranks: int, part: int) -> None:
    """The full table."""
    compare(ranks, ALL[part::6])


# -- what happens without the waits
# ----------------------------------------------------------------------------------

# The functions that wait for a buffer, and what may happen without.
WAITS = {
    "accumulate": "writing into a gradient buffer that a reduction still sends",
    "require_weights": "computing with weights that are still being gathered",
    "gather": "overwriting a weight buffer that a gather still fills or sends",
    "begin_update": "updating a slice that is being sent",
    "finish_reduction": "updating from gradients that are still being reduced",
}


@contextlib.contextmanager
def removed_wait(site: str | None, seen: set[str] | None = None) -> Iterator[None]:
    """One of the functions no longer waits; who waits later, waits for all that is still under
    way."""
    wait, seen = Buffer.wait, set() if seen is None else seen

    def wait_unless_removed(buffer: Buffer) -> None:
        caller = sys._getframe(1).f_code.co_name
        seen.add(caller)
        if caller != site:
            wait(buffer)

    def start(buffer: Buffer, collective: Handle) -> None:
        buffer._pending = (
            collective if buffer._pending is None else Works([buffer._pending, collective])
        )

    with (
        mock.patch.object(Buffer, "wait", wait_unless_removed),
        mock.patch.object(Buffer, "start", start),
    ):
        yield


def train(engine: Engine) -> Outcome:
    return engine.run(2)


def gather_twice(engine: Engine) -> list[float]:
    """Two stages of unequal size gathered into one buffer, one right after the other: the weights
    of the second.

    No schedule does that today, since nothing is gathered that is not needed; a validation between
    two steps might.
    """
    first, second = engine.model.stages[0], engine.model.stages[2]
    assert first.weights is second.weights and first.numel != second.numel
    first.gather()
    second.gather()
    second.require_weights()
    return [float(parameter.detach().double().sum()) for _, parameter in second.parameters()]


def update_twice(engine: Engine) -> Outcome:
    """A second update right after the first, while the new weights are being sent."""
    loss = engine.gradients(1)
    for _ in range(2):
        engine.optimizer.step(1, 1e-2, loss, engine.tokens, engine.model.updated)
    return engine.run(1)


# (removed wait, scenario, its options, what late collectives notice)
ZERO_1, ZERO_3 = layout({"zero_stage": 1}, (1, 1)), layout({"zero_stage": 3}, (1, 1))
READ = "written while a collective still reads it"
MUTATIONS: list[tuple[str, Callable[[Engine], Any], Options, str]] = [
    ("accumulate", train, ZERO_3, READ),
    ("require_weights", train, ZERO_3, "numbers"),
    ("require_weights", train, ZERO_1, "numbers"),
    ("gather", gather_twice, ZERO_3 | {"hidden_size": 64}, READ),
    ("begin_update", update_twice, ZERO_1, READ),
    ("finish_reduction", train, ZERO_1, "numbers"),
    ("finish_reduction", train, ZERO_3, "numbers"),
]


def outcome(ranks: Any, group: Any, case: int, mutated: bool) -> Any:
    site, scenario, options, _ = MUTATIONS[case]
    with removed_wait(site if mutated else None):
        try:
            return scenario(Engine(ranks, options, group))
        except AssertionError as error:
            return str(error)


class _Recorded:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("wait")


class Recorder(SimulatedRanks):
    """Writes down when gathers start and are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        super().all_gather(buffer, kind)
        self.log.append("gather")
        return _Recorded(self.log)


@pytest.mark.parametrize(("options", "prefetched"), [(ZERO_1, 5), (ZERO_3, 2)])
def test_gathers_of_the_next_step_overlap_the_rest_of_the_update(
    options: Options, prefetched: int
) -> None:
    """They start stage by stage within the update, and only the next step waits for them.

    In ZeRO 3 stages 2 and 4 are updated while their buffer is filled with stage 0: no reason to
    wait.
    """
    ranks = Recorder()
    engine = Engine(ranks, options)
    loss = engine.gradients(1)
    ranks.log.clear()
    engine.optimizer.step(1, 1e-2, loss, engine.tokens, engine.model.updated)
    assert ranks.log == ["gather"] * prefetched


# -- ranks that are simulated, as tests/test_gpu.py does on a CUDA stream
# ---------------------------------------------


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_simulated_ranks_can_be_late_too(half: int) -> None:
    """The same schedules without processes: late collectives change no bit.

    A step, an evaluation and an export wait for buffers in the functions of WAITS and nowhere else.
    """
    seen: set[str] = set()
    for options in SOME[half::2]:
        ranks = SimulatedRanks()
        with removed_wait(None, seen):
            normal = Engine(ranks, options).run(2, evaluate_every=1)
        assert Engine(ranks, options, LateGroup(ranks)).run(2, evaluate_every=1) == normal, options
    assert seen == WAITS.keys() == {site for site, *_ in MUTATIONS}


@pytest.mark.parametrize("case", range(len(MUTATIONS)))
def test_late_collectives_notice_a_missing_wait(case: int) -> None:
    """The tests above can fail: each removed wait is noticed where nothing is sent before a
    wait."""
    ranks = SimulatedRanks()
    right = outcome(ranks, ranks, case, mutated=False)
    assert outcome(ranks, LateGroup(ranks), case, mutated=False) == right
    wrong = outcome(ranks, LateGroup(ranks), case, mutated=True)
    assert wrong == READ if MUTATIONS[case][3] == READ else wrong != right
