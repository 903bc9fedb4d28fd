"""Differences of runs, whether rounding explains them, and the smallest case with one that it does
not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_lite.errors import UsageError
from scripts.proof.cases import EIGHT_BIT_OPTIONS, Case, Flags, Layout
from scripts.proof.ranks import COUNTED, BrokenRunError, Ranks, Routing, Step

Unit = TypeVar("Unit")
MOST_KEPT = 8  # runs to compare with


class Limits(NamedTuple):
    """Largest relative differences that rounding explains."""

    loss: float
    norm: float
    gradient: float
    update: float
    certain: (
        float  # updates count only where the gradient is above this part of its largest element
    )


EXACT = Limits(0.0, 0.0, 0.0, 0.0, 0.0)
# losses as docs/parallelism.md promises, and what follows
FP32 = Limits(1e-6, 1e-5, 1e-4, 5e-4, 1e-3)
# one rank sums before it rounds, several round before they sum
FP16 = Limits(1e-3, 5e-3, 0.1, 0.1, 0.1)
BF16 = Limits(5e-3, 3e-2, 0.3, 0.4, 0.3)
# Muon rounds to bf16, and a larger rate makes more of it; Lion makes a whole step of the sign of a
# sum near zero.
MUON_OR_LION = Limits(5e-5, 1e-3, 5e-2, 0.2, 0.0)
# With 8 bits, a sum in another order moves a few factors to the next number, and what follows moves
# others. How far is measured: more runs on one rank have factors disturbed by this part of the
# largest, more than such a sum does. With experts in 16 bits, whose gradients sum few tokens, initial
# weights are disturbed by this part of themselves.
DISTURBANCES = {"fp32": 2.0**-16, "fp16": 2.0**-11, "bf16": 2.0**-8}
OF_DISTURBED = 6.0  # times what the disturbance changes: limits of measured numbers
DISTURBED_RUNS = 2  # with other noise each; what one run moves little, the other may
SMALL = 1e-3  # of the largest gradient of all: a whole parameter with less has rounding alone


def limits_of(options: Flags) -> tuple[str, Limits]:
    """Return the limits of runs with these options, and what they depend on; with 8 bits, those
    that always hold."""
    dtype, rule = options.get("training_dtype", "fp32"), options.get("optimizer", "adamw")
    limits, kind = {"fp32": FP32, "fp16": FP16, "bf16": BF16}[dtype], f"{dtype}, {rule}"
    if rule in ("muon", "lion"):
        limits = Limits(*map(max, limits, MUON_OR_LION))
    if rule == "lion":
        limits = limits._replace(update=0.5 if limits.certain <= SMALL else math.inf)
    if EIGHT_BIT_OPTIONS & {*options}:
        kind += ", 8 bits"
    elif "num_experts" in options and dtype != "fp32":
        kind += ", experts"
    return kind, limits


def first_limits(case: Case) -> Limits | None:
    """Return the limits of the first iteration with 8 bits and without tensor parallelism; None of
    another case.

    Until then both runs have the same weights and micro-batches, so every factor has the same bits,
    and only sums over micro-batches and ranks may differ.
    """
    options = case.options
    if not case.in_8_bits or "tensor_parallel" in case.layout.flags:
        return None
    in_fp32 = options.get("full_precision_gradients", "1") == "1"
    return limits_of({**options, "training_dtype": "fp32"} if in_fp32 else options)[1]


class Difference(NamedTuple):
    """A relative difference of a number or parameter at a step."""

    step: int
    what: str  # loss, norm, gradient, update, or their kind
    name: str  # of the parameter
    error: float
    limit: float

    @property
    def is_beyond(self) -> bool:
        return not self.error <= self.limit  # NaN is

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        return f"{self.what}{of} at step {self.step} differs by {self.error:.1e}, more than {self.limit:.0e}"


def differences(
    steps: Sequence[Step], others: Sequence[Step], limits: Limits, first: Limits | None = None
) -> Iterator[Difference]:
    """Yield every difference of a run to another one, in order. first: limits of the first
    iteration."""
    before: tuple[Step, Step] | None = None
    later, first = limits, first or limits
    for step, other in zip(steps, others, strict=True):
        limits = first if step.iteration == 1 else later
        for what in step.numbers.keys() & other.numbers.keys():
            limit = (
                0.0 if what.startswith(COUNTED) else limits.norm if what == "norm" else limits.loss
            )
            yield Difference(
                step.iteration, what, "", _relative(step.numbers[what], other.numbers[what]), limit
            )
        largest = max(
            (_size(value) for (kind, _), value in other.tensors.items() if kind == "gradients"),
            default=0.0,
        )
        assert step.tensors.keys() == other.tensors.keys(), "the same parameters"
        for (kind, name), value in other.tensors.items():
            found, gradient = step.tensors[kind, name], other.tensors.get(("gradients", name))
            if limits == EXACT or before is None:
                same = torch.equal(found.nan_to_num(7e9), value.nan_to_num(7e9))
                yield Difference(
                    step.iteration, kind, name, 0.0 if same else _error(found, value, 0.0), 0.0
                )
            elif not math.isfinite(other.numbers["norm"]):
                continue  # the update was dropped, as all ranks agree
            elif gradient is None:
                # a router's balance follows counts, which every layout has alike
                follows = name.endswith(".balance")
                wanted = value if follows else before[0].before(kind, name)
                error = _error(found, wanted, 0.0)
                yield Difference(step.iteration, f"frozen {kind}", name, error, 0.0)
            elif kind == "gradients":
                error = _error(found, value, SMALL * largest)
                yield Difference(step.iteration, "gradient", name, error, limits.gradient)
            elif _size(gradient) > SMALL * largest:
                certain = gradient.abs() > limits.certain * _size(gradient)
                moved, wanted = (
                    (after - run.before(kind, name))[certain]
                    for after, run in zip((found, value), before, strict=True)
                )
                error = float((moved - wanted).abs().sum() / wanted.abs().sum().clamp(min=1e-30))
                yield Difference(
                    step.iteration, f"update of the {kind}", name, error, limits.update
                )
        before = (step, other)


def flips(chosen: Routing, others: Routing) -> int:
    """Return how many choices of a run another one does not make, for any of K places: a token whose
    scores are equal but for rounding may go elsewhere, and those after it follow."""
    assert chosen.keys() == others.keys(), "the same routers"
    return sum(int((chosen[name] != other).sum()) for name, other in others.items())


def moved_by(
    disturbed: Sequence[Step], others: Sequence[Step], limits: Limits
) -> Callable[[Difference], float]:
    """Return how far a disturbance has moved the number of a difference; 0 where nothing is known.

    A single number may come back by chance: of losses the one that moved most counts, of all
    iterations, and a norm may move as far as the gradients, taken as one vector.
    """
    every = [
        found for found in differences(disturbed, others, limits) if math.isfinite(found.error)
    ]
    parameters = {
        (found.step, found.what, found.name): found.error for found in every if found.name
    }
    of_losses = max(
        (found.error for found in every if not found.name and found.what != "norm"), default=0.0
    )
    vectors = {
        step.iteration: _apart(step, other) for step, other in zip(disturbed, others, strict=True)
    }

    def measured(found: Difference) -> float:
        if found.name:
            return parameters.get((found.step, found.what, found.name), 0.0)
        return vectors[found.step] if found.what == "norm" else of_losses

    return measured


def _apart(step: Step, other: Step) -> float:
    """Return the distance of all gradients to those of another run, relative to these; 0 if it is
    not finite."""
    gradients = {key: value for key, value in other.tensors.items() if key[0] == "gradients"}
    apart = math.sqrt(
        sum(float((step.tensors[key] - value).square().sum()) for key, value in gradients.items())
    )
    whole = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
    return apart / whole if 0 < whole < math.inf and apart < math.inf else 0.0


def _size(value: Tensor) -> float:
    return float(value.abs().max())


def _error(found: Tensor, value: Tensor, small: float) -> float:
    """Return the largest difference, relative to the largest element or `small`."""
    return _size(found - value) / max(_size(value), small, 1e-30)


def _relative(found: float, value: float) -> float:
    same = found == value or not (math.isfinite(found) or math.isfinite(value))
    return 0.0 if same else abs(found - value) / max(abs(value), 1e-30)


@dataclass
class Verdict:
    """The result of a case. worst: the largest difference to one rank, of each kind of number."""

    case: Case
    problem: str = ""
    worst: dict[str, Difference] = field(default_factory=dict)
    twin: Case | None = None  # whose bits it has
    flips: int = 0  # choices of an expert that one rank makes otherwise


class Judge:
    """Runs cases beside those that they must agree with, and keeps the newest of these.

    fixed: flags of all runs; one rank runs on the CPU whatever their device, so that a GPU is
    proved, too.
    """

    def __init__(self, ranks: Ranks, fixed: Flags) -> None:
        self._ranks, self._fixed = ranks, fixed
        self._kept: dict[str, list[Step]] = {}

    def __call__(self, case: Case) -> Verdict:
        """Raises UsageError if the program refuses a run."""
        verdict = Verdict(case)
        try:
            parts = case.parts(self._fixed)
            steps = routed = self._ranks.train(parts)
            others = self._steps(case.reference(self._fixed), device="cpu")[0].chosen
            verdict.flips = flips(steps[0].chosen, others)
            if verdict.flips:
                routed = self._ranks.train(parts, others)
            for found in self._from_one_rank(case, routed):
                verdict.worst[found.what] = max(
                    verdict.worst.get(found.what, found), found, key=lambda one: one.error
                )
                if found.is_beyond and not verdict.problem:
                    verdict.problem = f"not the numbers of one rank: {found}"
            if not verdict.problem and (twin := case.twin(self._fixed)) is not None:
                beyond = (
                    found
                    for found in differences(steps, self._steps(twin), EXACT)
                    if found.is_beyond
                )
                if (first := next(beyond, None)) is not None:
                    verdict.problem = f"not the bits of {twin.layout}: {first}"
                verdict.twin = None if first else twin
        except BrokenRunError as error:
            verdict.problem = str(error)
        return verdict

    def _from_one_rank(self, case: Case, steps: Sequence[Step]) -> Iterator[Difference]:
        reference, limits = case.reference(self._fixed), limits_of(case.options)[1]
        others = self._steps(reference, device="cpu")
        if not case.is_measured:
            yield from differences(steps, others, limits)
            return
        disturbance, chosen = DISTURBANCES[case.dtype], others[0].chosen
        first = first_limits(case)
        moved = [
            moved_by(self._steps(reference, disturbance, run, chosen, device="cpu"), others, limits)
            for run in range(DISTURBED_RUNS)
        ]
        for found in differences(steps, others, limits, first):
            if (first is None or found.step > 1) and found.limit:
                limit = OF_DISTURBED * max(measured(found) for measured in moved)
                found = found._replace(limit=max(found.limit, limit))
            yield found

    def _steps(
        self,
        case: Case,
        disturbance: float = 0.0,
        run: int = 0,
        chosen: Routing | None = None,
        **more: str,
    ) -> list[Step]:
        key = repr((case, disturbance, run, more))
        if key not in self._kept:
            parts = case.parts({**self._fixed, **more})
            self._kept[key] = self._ranks.train(
                [part._replace(disturbance=disturbance) for part in parts], chosen
            )
            if len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]


def reduced(verdict: Verdict, judge: Callable[[Case], Verdict]) -> Verdict:
    """Return the verdict on a case that still fails, but without any rank, flag or restart
    fewer."""
    case, last = verdict.case, verdict
    flags = [("layout", *pair) for pair in case.layout.flags.items()]
    flags += [("options", *pair) for pair in case.options.items()]
    then = [("then", "", "")] if case.then is not None else []

    def fails(units: Sequence[tuple[str, str, str]]) -> bool:
        nonlocal last
        options, layout = (
            {name: value for kind, name, value in units if kind == own}
            for own in ("options", "layout")
        )
        ranks = 1 + sum(kind == "rank" for kind, _, _ in units)
        try:
            found = judge(
                Case(options, Layout(ranks, layout), case.then if {*then} & {*units} else None)
            )
        except UsageError:
            return False
        last = found if found.problem else last
        return bool(found.problem)

    smallest([*[("rank", "", "")] * (case.layout.ranks - 1), *then, *flags], fails)
    return last


def smallest(units: Sequence[Unit], fails: Callable[[Sequence[Unit]], bool]) -> list[Unit]:
    """Return units none of which can be left out, or `fails` is no longer true (Zeller 1999,
    without complements)."""
    kept, size = [*units], math.ceil(len(units) / 2)
    while size and kept:
        start, left_out = 0, False
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fails(fewer):
                kept, left_out = fewer, True
            else:
                start += size
        size = size // 2 if size > 1 else int(left_out)
    return kept
