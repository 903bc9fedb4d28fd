"""The communication of real runs, counted collective by collective, against the formulas.

S stages share B weight buffers in turn; a step has D passes (depth-first micro-batches;
breadth-first ones go through a stage together and count once). Every gather of a step, stage by
stage:

- all weights are new after an update, so the first forward pass gathers each stage once (those of
  the B first stages are started at the end of the step before);
- a backward pass begins with the last B stages in the buffers: it gathers the S - B others;
- each forward pass but the first begins with the first B stages in the buffers: it gathers the S -
  B others.

Hence S + (2 D - 1)(S - B) gathers a step. An untied embedding's gradient is made of tokens alone,
so where S > B a backward pass does not gather stage 0, and its buffer keeps stage B. The next
forward pass, which would have found stage 0 in its buffer, has to gather it: D gathers less and D -
1 more, exactly one less a step. Stage 0 then is gathered D times, once in each forward pass. A tied
embedding has a buffer of its own and is gathered once; S counts the others.

The first step after an evaluation gathers again what the evaluation has taken from the buffers: the
first stage of every buffer that several stages share.
"""

import itertools
import math
from typing import Any

import pytest

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.traffic import Total
from tests.support.engine_runs import Engine
from tests.support.harness import run_distributed

Options = dict[str, Any]
Books = dict[str, Total]

BUFFERS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    *(
        {"num_weight_buffers": w, "num_grad_buffers": g}
        for w, g in ((1, 1), (3, 3), (4, 1), (1, 4), (2, 5), (5, 2))
    ),
]
ORDERS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
SMALL = {
    "sequence_length": 4,
    "max_position_embeddings": 4,
    "micro_batch_size": 1,
    "batch_size": None,
}
CASES = [
    {
        "num_layers": 3,
        **SMALL,
        "tie_word_embeddings": tied,
        "depth_first_micro_batches": order[0],
        "breadth_first_micro_batches": order[1],
        **buffers,
    }
    for (i, buffers), (j, order), tied in itertools.product(
        enumerate(BUFFERS), enumerate(ORDERS), (False, True)
    )
    if i < 3 or j in (i % 5, 2)
] + [
    {
        "num_layers": layers,
        **SMALL,
        "layers_per_stage": per_stage,
        "depth_first_micro_batches": 2,
        "zero_stage": zero_stage,
        "training_dtype": "bf16",
        "full_precision_gradients": full_precision,
        "tie_word_embeddings": False,
    }
    for layers, per_stage in ((1, 1.0), (5, 1.5), (6, 2.0))
    for zero_stage in (1, 2, 3)
    for full_precision in (True, False)
]


def books(distributed: Distributed, cases: list[Options]) -> list[tuple[list[Books], list[int]]]:
    """Return for each case the bytes moved by steps 1, 2, an evaluation, steps 3 and 4; the stages'
    padded sizes."""
    results = []
    for options in cases:
        engine, steps = Engine(distributed, options), []
        engine.model.gather_ahead()
        distributed.traffic.take()
        for iteration in range(1, 5):
            engine.step(iteration)
            steps.append(distributed.traffic.take())
            if iteration == 2:
                engine.model.evaluate(engine.batches(0))
                steps.append(distributed.traffic.take())
        engine.model.finish()
        results.append((steps, [stage.numel for stage in engine.model.stages]))
    return results


def counts(options: Options, stages: int, kind: str) -> int:
    """Buffers that the stages share, a tied embedding's aside."""
    shared = stages - bool(options["tie_word_embeddings"])
    default = {1: stages, 2: 2 if kind == "grad" else stages, 3: 2}[options.get("zero_stage", 1)]
    return min(options.get(f"num_{kind}_buffers", default), shared)


def expected_gathers(options: Options, stages: int) -> list[int]:
    """Gathers of each stage in a step, by the reasoning of the module's docstring."""
    tied, depth = options["tie_word_embeddings"], options["depth_first_micro_batches"]
    shared, buffers = stages - tied, counts(options, stages, "weight")
    per_stage = [
        1 + depth * (i < shared - buffers) + (depth - 1) * (i >= buffers) for i in range(shared)
    ]
    if tied:
        return [1, *per_stage]
    if shared > buffers:
        per_stage[0] = depth
    return per_stage


def expected_reduces(options: Options, stages: int) -> list[int]:
    """A stage that shares its gradient buffer reduces once a pass, another once a step."""
    tied = bool(options["tie_word_embeddings"])
    shared, buffers = stages - tied, counts(options, stages, "grad")
    alone = [shared - buffers <= i < buffers for i in range(shared)]
    depth = options["depth_first_micro_batches"]
    return [1] * tied + [1 if is_alone else depth for is_alone in alone]


def lost(options: Options, stages: int) -> list[bool]:
    """The stages whose prefetched weights an evaluation drives out of their buffer."""
    tied = bool(options["tie_word_embeddings"])
    shared, buffers = stages - tied, counts(options, stages, "weight")
    return [False] * tied + [i < buffers and i + buffers < shared for i in range(shared)]


def padded_sizes(ranks: int, layers_per_stage: list[int], tied: bool) -> list[int]:
    """Elements of each stage of the tiny model, written out by hand: h = 32, v = 64, f = 128, 4
    positions."""
    h = 32
    v = 64
    f = 128
    s = 4
    block = [h] * 6 + [3 * h, f] + [3 * h * h, h * h, h * f, h * f]  # norms and biases, weights
    sizes = [
        [v * h, s * h],
        *([block * count for count in layers_per_stage]),
        [h, h] + [v * h] * (not tied),
    ]
    return [round_up(sum(round_up(size, 64) for size in stage), 64 * ranks) for stage in sizes]


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def len_of(value: int | list[Options]) -> str:
    return f"{value} ranks" if isinstance(value, int) else f"{len(value)} cases"


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (3, CASES[1::17]),
        *(pytest.param(ranks, CASES, marks=pytest.mark.slow) for ranks in (2, 3)),
    ],
    ids=len_of,
)
def test_every_step_moves_what_theory_says(ranks: int, cases: list[Options]) -> None:
    """Collectives, elements, bytes and wire bytes of gathers and reductions, exactly, on every
    rank."""
    results = run_distributed(ranks, books, cases)
    for options, *of_ranks in zip(cases, *results, strict=True):
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
        (first, second, evaluation, after, last), sizes = of_ranks[0]
        blocks = {(5, 1.5): [1, 2, 1, 1], (6, 2.0): [2, 2, 2]}
        layers = options["num_layers"]
        split = blocks.get((layers, options.get("layers_per_stage")), [1] * layers)
        assert sizes == padded_sizes(ranks, split, options["tie_word_embeddings"])
        stages, passes = len(sizes), options["depth_first_micro_batches"]
        gathers, reduces = expected_gathers(options, stages), expected_reduces(options, stages)
        shared = stages - options["tie_word_embeddings"]
        buffers = counts(options, stages, "weight")
        formula = stages + (2 * passes - 1) * (shared - buffers)
        assert sum(gathers) == formula - (shared > buffers and not options["tie_word_embeddings"])
        for step in (first, second, last):
            check(step["gather"], gathers, sizes, ranks, weight_bytes(options))
        for step in (first, second, after, last):
            check(step["reduce"], reduces, sizes, ranks, gradient_bytes(options))
        again = [count + gone for count, gone in zip(gathers, lost(options, stages), strict=True)]
        check(after["gather"], again, sizes, ranks, weight_bytes(options))
        assert "reduce" not in evaluation


def test_the_table_covers_the_issues_cases() -> None:
    """With S = 5 and 3 micro-batches: ZeRO 1 and 2 gather 5, ZeRO 3 5 + 5 x 3 - 1 = 19,
    breadth-first 5 + 3 - 1 = 7."""

    def case(**options: Any) -> Options:
        return {"tie_word_embeddings": False, "depth_first_micro_batches": 1, **options}

    for zero_stage in (1, 2):
        assert (
            sum(expected_gathers(case(zero_stage=zero_stage, depth_first_micro_batches=3), 5)) == 5
        )
    assert sum(expected_gathers(case(zero_stage=3, depth_first_micro_batches=3), 5)) == 19
    assert sum(expected_gathers(case(zero_stage=3), 5)) == 7
    assert expected_reduces(case(zero_stage=1, depth_first_micro_batches=3), 5) == [1] * 5
    for zero_stage in (2, 3):
        assert (
            expected_reduces(case(zero_stage=zero_stage, depth_first_micro_batches=3), 5) == [3] * 5
        )
        assert expected_reduces(case(zero_stage=zero_stage), 5) == [1] * 5


def weight_bytes(options: Options) -> int:
    return 2 if options.get("training_dtype") == "bf16" else 4


def gradient_bytes(options: Options) -> int:
    return 4 if options.get("full_precision_gradients", True) else weight_bytes(options)


def check(total: Total, per_stage: list[int], sizes: list[int], ranks: int, itemsize: int) -> None:
    elements = sum(count * size for count, size in zip(per_stage, sizes, strict=True))
    assert (total.collectives, total.elements) == (sum(per_stage), elements)
    assert total.bytes == elements * itemsize
    assert total.wire_bytes * ranks == total.bytes * (ranks - 1)


def books_of_a_step(
    distributed: Distributed, cases: list[Options]
) -> list[tuple[Books, list[int], list[int]]]:
    """Return for each case the bytes moved by the second step, and the stages' elements, all and
    trained."""
    results = []
    for options in cases:
        engine = Engine(distributed, SMALL | options)
        engine.model.gather_ahead()
        for iteration in (1, 2):
            distributed.traffic.take()
            engine.step(iteration)
        engine.model.finish()
        sizes = (
            [stage.numel for stage in engine.model.stages],
            [stage.grad_numel for stage in engine.model.stages],
        )
        results.append((distributed.traffic.take(), *sizes))
    return results


def test_frozen_stages_are_gathered_once_and_never_reduced() -> None:
    """Stages 0 and 1 are frozen, stage 2 in part. ZeRO 1 sends frozen weights of whole stages in
    the first step only.

    ZeRO 3: forward gathers all five; backward, which stops at stage 2, finds 3 and 4 and gathers 2
    alone. The next forward pass gathers 0 again, which 2 has driven out, and 1, which 3 has.
    """
    freeze = {
        "num_layers": 3,
        "tie_word_embeddings": False,
        "freeze": ("embedding", "blocks.0", "blocks.1.mlp"),
    }
    cases = [{**freeze, "zero_stage": zero_stage} for zero_stage in (1, 3)]
    (whole, numels, trained), (shared, *_) = run_distributed(2, books_of_a_step, cases)[0]
    assert trained[:2] == [0, 0] and 0 < trained[2] < numels[2] and trained[3:] == numels[3:]
    assert whole["gather"].elements == sum(numels[2:])
    assert shared["gather"].elements == sum(numels) + numels[2]
    assert whole["reduce"].elements == shared["reduce"].elements == sum(trained)
    assert whole["reduce"].collectives == shared["reduce"].collectives == 3


MUON = {"optimizer": "muon"}
MUON_CASES = [
    {**MUON, "num_layers": 3, "zero_stage": 1},
    {
        **MUON,
        "num_layers": 3,
        "zero_stage": 3,
        "depth_first_micro_batches": 2,
        "training_dtype": "bf16",
    },
    {
        "optimizer": "muon",
        "num_layers": 4,
        "layers_per_stage": 3.0,
        "full_precision_gradients": False,
        "training_dtype": "bf16",
    },
    {**MUON, "num_layers": 3, "freeze": ("blocks.0", "blocks.1.mlp")},
]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_muon_gathers_and_reduces_each_stage_of_blocks_once_in_bf16(ranks: int) -> None:
    """Momentum there, updates back: 2 bytes an element each way, whatever ZeRO stage, micro-batches
    or dtypes; of nothing but stages with trained matrices; and nothing alone."""
    found = run_distributed(ranks, books_of_a_step, MUON_CASES)[0]
    for options, (books, _, sizes) in zip(MUON_CASES, found, strict=True):
        of_blocks = [size for size in sizes[1:-1] if size]
        assert len(of_blocks) == (2 if "freeze" in options or options["num_layers"] == 4 else 3)
        for kind in ("muon gather", "muon reduce"):
            if ranks == 1:
                assert kind not in books
            else:
                check(books[kind], [1] * len(of_blocks), of_blocks, ranks, 2)
