"""Describe dropped updates, as read from the device; `guards.py` drops them there."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig


class BadStep(NamedTuple):
    """A dropped step. Pairs are (loss, gradient norm)."""

    iteration: int
    numbers: tuple[float, float]
    limits: tuple[float, float]  # of --skip_bad_steps; infinite: none

    @classmethod
    def read(cls, values: Tensor) -> BadStep:
        """Read a step from (loss, gradient norm, their limits, iteration), (5,), on the device."""
        loss, norm, loss_limit, norm_limit, iteration = values.tolist()
        return cls(int(iteration), (loss, norm), (loss_limit, norm_limit))

    @property
    def overflows(self) -> bool:
        """Whether the square of the gradient norm is not finite in fp32."""
        return not math.isfinite(float(torch.tensor(self.numbers[1], dtype=torch.float32).square()))

    @property
    def is_finite(self) -> bool:
        """Whether only --skip_bad_steps dropped the step."""
        return math.isfinite(self.numbers[0]) and not self.overflows


class Report(NamedTuple):
    """Dropped steps as reported in a log line."""

    skipped: int  # since the start of training
    nan: int  # of these, with a NaN loss or gradient norm
    new: int  # dropped since the last log line
    reason: str | None  # for the newest one
    stop: str | None  # why the run cannot continue


class Words(NamedTuple):
    """Texts about dropped steps, for the log and a run's end."""

    config: OptimizerConfig
    dynamic_loss_scale: bool
    train_iters: int

    def describe(self, step: BadStep) -> str:
        """Return text such as `iteration 123: gradient norm 41.2 above 3.1 (mean + 6 sd)`."""
        problems = []
        for name, number, limit in zip(
            ("loss", "gradient norm"), step.numbers, step.limits, strict=True
        ):
            if not math.isfinite(number):
                problems.append(f"{name} {number}")
            elif number > limit:
                sigma = self.config.skip_bad_steps_sigma
                problems.append(f"{name} {number:.6g} above {limit:.6g} (mean + {sigma:g} sd)")
            elif name == "gradient norm" and step.overflows:
                problems.append(f"{name} {number:.6g}, too large to be squared")
        follows = "; the loss scale follows" if self.is_searching(step) else ""
        return f"iteration {step.iteration}: {', '.join(problems)}{follows}"

    def is_searching(self, step: BadStep) -> bool:
        """Return whether an overflow dropped the step only to lower a dynamic loss scale."""
        return self.dynamic_loss_scale and step.overflows and math.isfinite(step.numbers[0])

    def stop(self, step: BadStep, count: int) -> str:
        """Return why the run stops. step: the first of `count` steps that must stop it."""
        flag = "--on_bad_step=abort"
        if self.config.on_bad_step != "abort":
            flag = "--crash_on_nan=1" if any(map(math.isnan, step.numbers)) else "--crash_on_inf=1"
        more = f" (and {count - 1} more since)" if count > 1 else ""
        return (
            f"stopped by {flag}: {self.describe(step)}{more}. The update was dropped, and nothing was saved since. "
            "The same command would reach the same step again: resume with a lower --lr, or leave the flag out to drop "
            "such updates and continue"
        )

    def hopeless(self, bad: int, streak: int, last: BadStep) -> str | None:
        """Return why a run cannot continue after `bad` bad updates among the last `streak`, or
        None.

        A run shorter than --max_consecutive_bad_steps has also failed if it dropped more than half
        of its updates in a row.
        """
        most, half = self.config.max_consecutive_bad_steps, self.train_iters // 2
        if bad < min(most, half + 1):
            return None
        limit = f"--max_consecutive_bad_steps={most}"
        if half < most:
            limit = f"more than half of --train_iters={self.train_iters}"
        cause, fix = "because they were not finite", ""
        if last.is_finite:
            cause, fix = "by --skip_bad_steps", " or a larger --skip_bad_steps_sigma"
        elif self.dynamic_loss_scale:
            fix = " or --training_dtype=bf16"
        made, again = last.iteration - streak, "start again"
        if made > 0:
            again = f"nothing was learned after iteration {made}: go back to an older checkpoint, or start again"
        return (
            f"the last {streak} updates were dropped {cause} ({limit}); the last, {self.describe(last)}; {again}, "
            f"with a lower --lr{fix}"
        )

    def ending(self, streak: int, last: BadStep) -> str:
        """Return the end of a run's last line if its last updates were dropped."""
        updates = f"{streak} updates were" if streak > 1 else "update was"
        weights = (
            f"of iteration {last.iteration - streak}"
            if last.iteration > streak
            else "that it started with"
        )
        return f", but the last {updates} dropped ({self.describe(last)}): the weights are those {weights}"
