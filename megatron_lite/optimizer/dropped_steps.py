"""The dropped steps of a run: how many, which was the last and why, and whether the run has to stop because of them.

All of it stays on the device until a log line or a save asks; what log lines say is part of a checkpoint, so that a
resumed log is the same log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig

# Dropped updates in a row after which a run is given up: fp16 needs at most 16 to find its first loss scale.
HOPELESS_STREAK = 50
COUNTS = ("skipped", "nan", "new", "streak")


@dataclass(frozen=True)
class BadStep:
    """A dropped step. Pairs are (loss, gradient norm)."""

    iteration: int
    numbers: tuple[float, float]
    limits: tuple[float, float]  # of --skip_bad_steps, infinite where it set none

    @property
    def overflows(self) -> bool:
        """Whether the square of the gradient norm is not finite in fp32."""
        return not math.isfinite(float(torch.tensor(self.numbers[1], dtype=torch.float32).square()))

    @property
    def is_finite(self) -> bool:
        """Whether nothing but --skip_bad_steps objected to it."""
        return math.isfinite(self.numbers[0]) and not self.overflows


@dataclass(frozen=True)
class Report:
    """What a log line says."""

    skipped: int  # since the start of training
    nan: int  # those of them with a loss or gradient norm that is NaN
    new: int  # dropped since the last line
    reason: str | None  # of the last of the new ones
    stop: str | None  # why the run cannot go on


class DroppedSteps:
    """See the module."""

    def __init__(self, config: OptimizerConfig, dynamic_loss_scale: bool, device: torch.device) -> None:
        self._config, self._dynamic = config, dynamic_loss_scale
        # skipped, nan: since the start of training; new: since the last line; streak: in a row
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._last = torch.zeros(5, dtype=torch.float64, device=device)  # numbers, limits, iteration
        self._fatal = torch.zeros((), dtype=torch.int64, device=device)  # steps of this start that have to stop it
        self._first_fatal = torch.zeros_like(self._last)

    def add(self, iteration: int, numbers: Tensor, limits: Tensor, skipped: Tensor, fatal: Tensor | None) -> None:
        """Count one step; no value is read on the host.

        Args:
            numbers, limits: (loss, gradient norm), (2,) fp64.
            skipped, fatal: () bool. None: nothing is fatal.
        """
        self._counts.add_(torch.stack([skipped, numbers.isnan().any(), skipped, skipped]))
        self._counts[3].mul_(skipped)
        step = torch.cat([numbers, limits, limits.new_full((1,), iteration)])
        self._last = torch.where(skipped, step, self._last)
        if fatal is not None:
            self._first_fatal = torch.where(fatal & (self._fatal == 0), step, self._first_fatal)
            self._fatal.add_(fatal)

    def close(self) -> Report:
        """The report since the last one (reads the device); starts the next one."""
        skipped, nan, new, streak = self._counts.tolist()
        self._counts[2].zero_()
        last, stop = _bad_step(self._last), self.stop_reason()
        if stop is None and streak >= self._hopeless_streak(last):
            stop = self._hopeless(streak, last)
        return Report(skipped, nan, new, self.describe(last) if new else None, stop)

    def stop_reason(self) -> str | None:
        """Why nothing may be published any more, if a step so far has to stop the run (reads the device)."""
        count = int(self._fatal)
        if not count:
            return None
        step, flag = _bad_step(self._first_fatal), "--on_bad_step=abort"
        if self._config.on_bad_step != "abort":
            flag = "--crash_on_nan=1" if any(map(math.isnan, step.numbers)) else "--crash_on_inf=1"
        more = f" (and {count - 1} more since)" if count > 1 else ""
        return (
            f"stopped as {flag} asks: {self.describe(step)}{more}. The update was dropped and nothing saved since. The "
            "same command would come to the same step again: resume with a lower --lr, or without that flag, so that "
            "such updates are dropped and training goes on"
        )

    def describe(self, step: BadStep) -> str:
        """`iteration 123: gradient norm 41.2 above 3.1 (mean + 6 sd)`."""
        problems = []
        for name, number, limit in zip(("loss", "gradient norm"), step.numbers, step.limits, strict=True):
            if not math.isfinite(number):
                problems.append(f"{name} {number}")
            elif number > limit:
                sigma = self._config.skip_bad_steps_sigma
                problems.append(f"{name} {number:.6g} above {limit:.6g} (mean + {sigma:g} sd)")
            elif name == "gradient norm" and step.overflows:
                problems.append(f"{name} {number:.6g}, too large to be squared")
        searching = self._dynamic and step.overflows and math.isfinite(step.numbers[0])
        return f"iteration {step.iteration}: {', '.join(problems)}{'; the loss scale follows' if searching else ''}"

    def _hopeless_streak(self, last: BadStep) -> int:
        """Spikes are remembered: when a whole window of them was dropped, nothing else is known, and only a loss or
        norm that keeps growing is still unusual."""
        return max(HOPELESS_STREAK, self._config.skip_bad_steps_window) if last.is_finite else HOPELESS_STREAK

    def _hopeless(self, streak: int, last: BadStep) -> str:
        if last.is_finite:
            cause, fix = "by --skip_bad_steps", "a larger --skip_bad_steps_sigma"
        else:
            cause, fix = "because they were not finite", "--training_dtype=bf16"
        return (
            f"the last {streak} updates were dropped {cause}; the last, {self.describe(last)}. "
            f"Resume from an older checkpoint with a lower --lr, or use {fix}"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device); there is none after a step that has to stop the run."""
        counts = dict(zip(COUNTS, self._counts.tolist(), strict=True))
        return {**counts, "last": [value.hex() for value in self._last.tolist()]}  # JSON has no word for NaN

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        counts = [state[name] for name in COUNTS]
        self._counts.copy_(torch.tensor(counts))
        self._last.copy_(torch.tensor([float.fromhex(value) for value in state["last"]], dtype=torch.float64))


def _bad_step(values: Tensor) -> BadStep:
    loss, norm, loss_limit, norm_limit, iteration = values.tolist()
    return BadStep(int(iteration), (loss, norm), (loss_limit, norm_limit))
