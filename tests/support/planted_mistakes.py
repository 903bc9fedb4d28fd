"""Mistakes in 8 bits, pipelines, hybrid shards and frozen parts, planted to see whether
`prove_layouts.py` finds them.

    python -m tests.support.planted_mistakes [NAME...]    plants each of them, or these, and says what finds it

The command must find one within 40 of the layouts that it draws with its default seed.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_lite.kernels.eight_bit import EightBit, Rounded
from megatron_lite.optimizer.delayed_scaling import DelayedScales
from megatron_lite.run.host import prepare_libraries
from scripts.proof.cases import Case
from scripts.proof.comparison import Judge
from scripts.proof.pairs import Draws
from scripts.proof.ranks import Ranks
from tests.support.planted_bugs import Bug

FIXED = {"device": "cpu", "deterministic": "0"}
# as the command draws by default
MOST_LAYOUTS = 40
RANKS = 4
SEED = 1


def keep_frozen_weights_with_moving_scales() -> None:
    """Keep the rounded form of a frozen weight with the scale of its layer, which each iteration
    changes."""
    weight_of, end_step = EightBit._weight, DelayedScales.end_step
    moving = dict[str, Any]()

    def with_moving_scale(self: EightBit, weight: Any) -> tuple[Rounded, Rounded]:
        rows, columns = weight_of(self, weight)
        if self.delayed is None or weight.spec.trainable:
            return rows, columns
        scale = moving.setdefault(self.name, rows.scale.clone())
        return rows._replace(scale=scale), columns._replace(scale=scale)

    def end_and_move(self: DelayedScales, skipped: Any) -> None:
        end_step(self, skipped)
        for scale in moving.values():
            scale.mul_(0.5)

    # type: ignore[method-assign]
    EightBit._weight = with_moving_scale
    DelayedScales.end_step = end_and_move


class Mistake(NamedTuple):
    """A mistake, and how to plant it into a process.

    needs: options of which a run has one if it runs the changed code; none: every run may.
    test: the default test that finds it if the command does not.
    """

    name: str
    what: str
    plant: Callable[[], None]
    needs: tuple[str, ...] = ()
    test: str = ""

    def is_in(self, case: Case) -> bool:
        """Return whether a run of the case may run the changed code."""
        names = {*case.options, *case.layout.flags, *(case.then.flags if case.then else ())}
        return not self.needs or bool(names & {*self.needs})


EIGHT_BITS = ("fp8", "int8")
PIPELINE = ("pipeline_parallel",)
HYBRID = ("data_parallel_shard",)
NEEDS = {
    "kernels.eight_bit": EIGHT_BITS,
    "optimizer.delayed_scaling": EIGHT_BITS,
    "zero.loans": PIPELINE,
    "zero.messages": PIPELINE,
    "zero.replica_shards": HYBRID,
}


def _changed(name: str, what: str, place: str, before: str, after: str, test: str = "") -> Mistake:
    """Return the mistake of a function with a piece of its source replaced; see `Bug`."""
    needs = NEEDS.get(place.partition(":")[0], ())
    return Mistake(name, what, Bug(name, what, "", place, before, after).plant, needs, test)


MISTAKES = (
    # -- 8 bits --
    _changed(
        "scale of a part",
        "a scale is that of a rank's own part of a factor",
        "kernels.eight_bit:EightBit._scale",
        "self._group.largest(largest, SCALE)",
        "largest",
    ),
    _changed(
        "own magnitudes",
        "delayed scales follow each rank's own magnitudes",
        "optimizer.delayed_scaling:DelayedScales.end_step",
        'self._world.largest(self._seen, "scale")',
        "self._seen",
    ),
    _changed(
        "one iteration",
        "a history has the newest iteration only",
        "optimizer.delayed_scaling:DelayedScales.end_step",
        "self._history[self._iterations % len(self._history)]",
        "self._history[0]",
    ),
    _changed(
        "history never forgets",
        "magnitudes count longer than --amax_history_length",
        "optimizer.delayed_scaling:DelayedScales.end_step",
        "largest = self._history.amax(dim=0)",
        "largest = self._history.amax(dim=0).maximum(self._scales * self._numbers * (self._iterations > 1))",
    ),
    _changed(
        "formats swapped",
        "a delayed scale divides by the largest number of another format",
        "optimizer.delayed_scaling:DelayedScales.end_step",
        "self._numbers / largest",
        "self._numbers.flip(0) / largest",
    ),
    _changed(
        "scales start over",
        "a resumed run has delayed scales of 1",
        "optimizer.delayed_scaling:DelayedScales.load_state",
        "scales[place][kind] = scale",
        "scales[place][kind] = 1.0",
    ),
    _changed(
        "ages lost",
        "a resumed run takes all magnitudes for those of the last iteration",
        "optimizer.delayed_scaling:DelayedScales.load_state",
        "history[-1 - age, place, kind] = magnitude",
        "history[-1, place, kind] = magnitude",
    ),
    _changed(
        "history lost",
        "a resumed run forgets the magnitudes before it",
        "optimizer.delayed_scaling:DelayedScales.load_state",
        "if age < len(history):",
        "if False:",
    ),
    _changed(
        "one format",
        "gradients are rounded to the numbers of inputs",
        "kernels.eight_bit:EightBit._round",
        "self.recipe.gradients if kind == GRADIENT else self.recipe.values",
        "self.recipe.values",
    ),
    _changed(
        "columns agree as rows",
        "ranks agree on the magnitudes of a transposed weight along the wrong dimension",
        "kernels.eight_bit:EightBit._weight",
        'self._round(values.t(), WEIGHT, "o")',
        'self._round(values.t(), WEIGHT, "i")',
    ),
    _changed(
        "gradients agree as outputs",
        "ranks agree on the magnitudes of a gradient along the wrong dimension",
        "kernels.eight_bit:EightBit._add_weight_gradient",
        'self._round(dy.t(), GRADIENT, "t")',
        'self._round(dy.t(), GRADIENT, "o")',
        test="tests/kernels/test_eight_bit.py::test_tensor_parallel_ranks_have_the_scales_of_one_rank",
    ),
    _changed(
        "agreement by the sum",
        "a scale of a whole factor is agreed on only if its product sums over ranks",
        "kernels.eight_bit:EightBit._scale",
        "over if by_row else DIMENSIONS[kind]",
        "over",
    ),
    _changed(
        "first micro-batch",
        "all micro-batches have the scales of the first",
        "kernels.eight_bit:EightBit.at",
        "derive_seed(seed, self.name), {}",
        "derive_seed(seed, self.name), self._scales",
    ),
    _changed(
        "accumulation",
        "a gradient of rounded factors overwrites those of earlier micro-batches",
        "parameter:Parameter.accumulate",
        "grad.copy_(value) if first else grad.add_(value)",
        "grad.copy_(value)",
    ),
    _changed(
        "stale rounded weights",
        "rounded weights are kept over an update",
        "zero.stage:Stage.gather",
        "self.weights.casts.clear()",
        "pass",
    ),
    _changed(
        "rounded averages",
        "averages are evaluated with the rounded weights",
        "zero.stage:Stage.compute_with",
        "parameter.casts = buffer.casts",
        "pass",
    ),
    _changed(
        "towards zero",
        "integers are rounded towards zero",
        "kernels.eight_bit:round_values",
        "numbers.round_().clamp_(-127, 127)",
        "numbers.trunc_().clamp_(-127, 127)",
    ),
    _changed(
        "scale of one factor",
        "a product lacks the scale of its second factor",
        "kernels.eight_bit:multiply",
        "total.mul_(a.scale).mul_(b.scale.t())",
        "total.mul_(a.scale)",
    ),
    # -- frozen parts --
    Mistake(
        "moving scale",
        "a frozen weight's 8-bit form is kept with a view of a scale that moves on",
        keep_frozen_weights_with_moving_scales,
        EIGHT_BITS,
    ),
    _changed(
        "updated stage taken for frozen",
        "a stage computes with its weights before the update",
        "zero.multi_stage:MultiStage.updated",
        "stage.weights.holder = None",
        "pass",
    ),
    _changed(
        "one rate a stage",
        "all parameters of a stage have the learning-rate scale of the first",
        "zero.layout:FlatLayout.update_ranges",
        "or _update_kind(self.slots[firsts[-1]].spec) != _update_kind(slot.spec)",
        "",
    ),
    _changed(
        "frozen stage gathered once",
        "a frozen stage is not gathered again after another one has used its buffer",
        "zero.stage:Stage.gather",
        "if self.weights.holder == self.index:",
        "if self.weights.holder == self.index or (not self.trainable and self.weights.holder is not None):",
    ),
    _changed(
        "garbage in gaps",
        "padding between gradients keeps what another stage has left there",
        "zero.stage:Stage.accumulate",
        "if self._gradient_gaps:",
        "if False:",
    ),
    # -- pipelines --
    _changed(
        "order of tied passes",
        "the backward passes of a tied embedding do not follow those of the head",
        "zero.pipeline:_at_last",
        "lenders = {lender for lender, _ in ties}",
        "lenders = set()",
    ),
    _changed(
        "order of passes tied apart",
        "the embedding's backward passes begin before the head's part of its gradient has come",
        "zero.pipeline:training_passes",
        "_at_last(own, apart)",
        "_at_last(own, near)",
    ),
    _changed(
        "descending micro-batches",
        "gradients add up from the last micro-batch to the first",
        "zero.pipeline:breadth_first",
        'Pass("backward", chunk, micro) for chunk in reversed(own) for micro in batches',
        'Pass("backward", chunk, micro) for chunk in reversed(own) for micro in reversed(batches)',
    ),
    _changed(
        "turns reversed",
        "1F1B's backward passes run in the reverse order",
        "zero.pipeline:one_f_one_b",
        'Pass("backward", own[-1 - loop], micro) for loop, micro in turns',
        'Pass("backward", own[loop], micro) for loop, micro in reversed(turns)',
    ),
    _changed(
        "no loan",
        "the head of another rank never gets the embedding's weights",
        "zero.simulation:transfers",
        "if rank in (owner, other):",
        "if False:",
    ),
    _changed(
        "lost return",
        "the head's part of a tied gradient is lost on its way",
        "zero.loans:Loans._move",
        "transfer(gradient, message.peer)",
        "transfer(gradient.clone(), message.peer)",
    ),
    _changed(
        "no wait for a message",
        "a stage computes before its input has come",
        "zero.messages:Messages.take",
        "arriving.wait()",
        "tensor.zero_()",
    ),
    _changed(
        "a product left out",
        "the second part of a backward pass leaves out its last product",
        "zero.stage:Stage.backward_weights",
        "self._later.pop(slot)",
        "self._later.pop(slot)[:-1]",
    ),
    _changed(
        "evaluation of stages",
        "an evaluation's loss is that of a rank's own stages",
        "outputs.evaluation:_losses",
        "run.distributed.pipeline.sum_in_rank_order(losses)",
        "losses",
    ),
    # -- hybrid shards --
    _changed(
        "every reduction across",
        "each micro-batch's gradients are summed over replicas",
        "zero.replica_shards:HybridStage.reduce",
        "self.reductions -= 1",
        "self.reductions = 0",
    ),
    _changed(
        "first reduction across",
        "only the first micro-batch's gradients are summed over replicas",
        "zero.replica_shards:begin_reductions",
        "counts[stage.index], reduced",
        "1, reduced",
    ),
    _changed(
        "no gather across",
        "replicas keep each other's first weights",
        "zero.replica_shards:HybridStage.updated",
        "part.start_gather()",
        "pass",
    ),
    _changed(
        "averages of a replica",
        "averages of other replicas' shards are evaluated as they were",
        "zero.replica_shards:HybridShard.place_weights",
        'self.replicate.all_gather(placed, "replica gather").wait()',
        "pass",
    ),
    _changed(
        "order of shards",
        "replicas and places are swapped in the order of shards",
        "zero.layout:FlatLayout.start",
        "(place * self.replicas + replica)",
        "(replica * (self.world_size // self.replicas) + place)",
    ),
    _changed(
        "no wait across",
        "an update begins before the sums over replicas are there",
        "zero.replica_shards:HybridStage.finish_reduction",
        "self._reduction.wait()",
        "pass",
    ),
    _changed(
        "sums across too early",
        "sums over replicas begin before those in the group are there",
        "zero.replica_shards:HybridStage._reduce_across",
        "self.gradients.wait()",
        "self.gradients._pending = None",
    ),
    _changed(
        "held weights not placed",
        "a shared buffer does not get the weights that the rank holds",
        "zero.replica_shards:HybridShard.place_weights",
        "placed.copy_(self.held)",
        "pass",
    ),
)


def drawn() -> list[Case]:
    """Return the layouts in which a mistake must be found."""
    draws = Draws(SEED, RANKS, [], FIXED)
    return [draws.case() for _ in range(MOST_LAYOUTS)]


def found_in(mistake: Mistake, cases: Sequence[Case]) -> tuple[int, str]:
    """Plant a mistake; return the number of the first case that is different, from 1, and how; 0:
    none is.

    Cases that do not run the changed code are left out: they are as without the mistake.
    """
    with Ranks(prepare=mistake.plant) as ranks:
        judge = Judge(ranks, FIXED)
        for number, case in enumerate(cases, 1):
            if mistake.is_in(case) and (verdict := judge(case)).problem:
                return number, verdict.problem.splitlines()[0]
    return 0, ""


def main(names: Sequence[str]) -> None:
    """Plant the mistakes with these names, or all, one after the other."""
    prepare_libraries()
    cases = drawn()
    for mistake in MISTAKES:
        if not names or mistake.name in names:
            start_s = time.monotonic()
            number, how = found_in(mistake, cases)
            took = f"{time.monotonic() - start_s:.0f} s"
            print(f"{mistake.name}: {number or 'NOT FOUND'}, {took}, {how}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
