"""Guards drop updates that are not finite or, with --skip_bad_steps, unusually large.

A dropped update changes neither weights, moments nor Adam's count. The guard decides on the device
from values summed over all ranks, so all ranks agree and the host reads nothing. The record of
dropped updates stays on the device until a log line or a save reads it; checkpoints include it, so
a resumed run logs the same as an uninterrupted one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import JsonObject, OptimizerConfig
from megatron_lite.optimizer.bad_steps import BadStep, Report, Words
from megatron_lite.optimizer.rolling import RollingStatistics

COUNTS = ("skipped", "nan", "new", "streak", "bad")


class DroppedSteps:
    """Counts of dropped steps on the device, with the last one and the first that must stop the
    run."""

    def __init__(self, words: Words, device: torch.device) -> None:
        self._words = words
        # skipped, nan: since the start of training; new: since the last log line; streak:
        # consecutive; bad: steps of the streak that did not lower a dynamic loss scale
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        # numbers, limits, iteration
        self._last = torch.zeros(5, dtype=torch.float64, device=device)
        # steps of this start that must stop the run
        self._fatal = torch.zeros((), dtype=torch.int64, device=device)
        self._first_fatal = torch.zeros_like(self._last)

    def add(
        self,
        iteration: int,
        numbers: Tensor,
        limits: Tensor,
        skipped: Tensor,
        bad: Tensor,
        fatal: Tensor | None,
    ) -> None:
        """Count a step without reading the device.

        Args:
            numbers, limits: (loss, gradient norm), (2,) fp64.
            skipped, bad, fatal: () bool. None: nothing is fatal.
        """
        self._counts.add_(torch.stack([skipped, numbers.isnan().any(), skipped, skipped, bad]))
        self._counts[3:].mul_(skipped)
        step = torch.cat([numbers, limits, limits.new_full((1,), iteration)])
        self._last = torch.where(skipped, step, self._last)
        if fatal is not None:
            self._first_fatal = torch.where(fatal & (self._fatal == 0), step, self._first_fatal)
            self._fatal.add_(fatal)

    def close(self) -> Report:
        """Return a report since the last call (reads the device)."""
        skipped, nan, new, *_ = self._counts.tolist()
        self._counts[2].zero_()
        reason = self._words.describe(BadStep.read(self._last)) if new else None
        return Report(skipped, nan, new, reason, self.stop_reason())

    def suspect(self) -> BadStep | None:
        """Return the first step that must stop the run, else the last one dropped since `close`
        (reads the device).

        None: no such step, or the loss scale is still being searched.
        """
        if int(self._fatal):
            return BadStep.read(self._first_fatal)
        step = BadStep.read(self._last) if int(self._counts[2]) else None
        return None if step is None or self._words.is_searching(step) else step

    def stop_reason(self) -> str | None:
        """Return why the run must stop without saving, or None (reads the device)."""
        if count := int(self._fatal):
            return self._words.stop(BadStep.read(self._first_fatal), count)
        *_, streak, bad = self._counts.tolist()
        return self._words.hopeless(bad, streak, BadStep.read(self._last)) if bad else None

    def streak(self) -> int:
        """Return the number of consecutive dropped updates up to now (reads the device)."""
        return int(self._counts[3])

    def ending(self) -> str:
        """Return what to append to a run's last line if its last update was dropped (reads the
        device)."""
        streak = self.streak()
        return self._words.ending(streak, BadStep.read(self._last)) if streak else ""

    def state(self) -> JsonObject:
        """Return the counts for a checkpoint (reads the device); no run saves after a step that
        must stop it."""
        counts = dict(zip(COUNTS, self._counts.tolist(), strict=True))
        return {**counts, "last": [value.hex() for value in self._last.tolist()]}  # JSON has no NaN

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`."""
        counts = [state[name] for name in COUNTS if name in state]
        counts += [state["streak"]] * (len(COUNTS) - len(counts))  # older checkpoints lack "bad"
        self._counts.copy_(torch.tensor(counts))
        self._last.copy_(
            torch.tensor([float.fromhex(value) for value in state["last"]], dtype=torch.float64)
        )


class Verdict(NamedTuple):
    """The decision on an update; tensors on the device, ()."""

    skipped: Tensor  # bool: drop the update
    overflow: Tensor  # bool: the gradient is not finite or too large to be squared; input of the loss scale


class Guard:
    """Judges each update by the history of recent losses and norms.

    --skip_bad_steps follows Levanter (skip_step.py): once half of the window is full, a step is bad
    if its loss or gradient norm exceeds mean + sigma * std over the preceding steps, including bad
    ones. Non-finite steps are also bad, but are not added to the window; in Levanter every step is
    bad while the window contains a NaN.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        dynamic_loss_scale: bool,
        device: torch.device,
        train_iters: int,
    ) -> None:
        self._config, self._dynamic = config, dynamic_loss_scale
        self._usual: RollingStatistics | None = None
        if config.skip_bad_steps:
            self._usual = RollingStatistics(
                config.skip_bad_steps_window, config.skip_bad_steps_sigma, device, width=2
            )
        self._no_limits = torch.full((2,), torch.inf, dtype=torch.float64, device=device)
        self.dropped = DroppedSteps(Words(config, dynamic_loss_scale, train_iters), device)

    def judge(
        self,
        iteration: int,
        loss: Tensor,
        grad_norm: Tensor,
        scale_can_shrink: Tensor | None = None,
    ) -> Verdict:
        """Judge a step and add it to the history.

        Args:
            iteration: counted from 1.
            loss: mean over the tokens of the global batch, () fp64.
            grad_norm: of the unscaled global gradient before clipping, () fp32.
            scale_can_shrink: whether an overflow can still lower a dynamic loss scale, () bool;
            None: it cannot.
        """
        numbers = torch.stack([loss, grad_norm.double()])
        # If the norm's square overflows in fp32, the second moment would overflow too, and stay
        # infinite.
        finite = torch.stack([loss, grad_norm.square().double()]).isfinite()
        limits, good = self._no_limits, finite
        if self._usual is not None:
            limits = self._usual.threshold()
            good = finite & (numbers <= limits)
            self._usual.add(numbers, finite.all())
        verdict = Verdict(~good.all(), ~finite[1])
        bad = verdict.skipped
        # searching for a loss scale is no sign of divergence, however long it takes
        if scale_can_shrink is not None:
            bad = bad & ~(scale_can_shrink & verdict.overflow & finite[0])
        self.dropped.add(
            iteration, numbers, limits, verdict.skipped, bad, self._fatal(numbers, finite, good)
        )
        return verdict

    def _fatal(self, numbers: Tensor, finite: Tensor, good: Tensor) -> Tensor | None:
        """Return whether the run must stop; None: never. A dynamic loss scale expects overflows."""
        config = self._config
        if config.on_bad_step == "abort":
            bad = ~good
        elif config.crash_on_nan and config.crash_on_inf:
            bad = ~finite
        elif config.crash_on_nan:
            bad = numbers.isnan()
        elif config.crash_on_inf:
            bad = ~finite & ~numbers.isnan()
        else:
            return None
        return bad[0] | (bad[1] & finite[1]) if self._dynamic else bad.any()

    def clipping_factor(self, grad_norm: Tensor) -> Tensor:
        """Return the factor, () and at most 1, that limits the gradient norm to --clip_grad.

        Follows torch.nn.utils.clip_grad_norm_, whose 1e-6 also shrinks a norm equal to the maximum,
        or Levanter (optax.clip_by_global_norm).
        """
        clip = self._config.clip_grad
        if clip == 0:
            return torch.ones_like(grad_norm)
        margin = {"torch": 1e-6, "levanter": 0.0}[self._config.clip_grad_style]
        return (clip / (grad_norm + margin)).clamp(max=1.0)

    def state(self) -> JsonObject:
        """Return the history for a checkpoint (reads the device)."""
        return {
            "usual": self._usual.state() if self._usual else [],
            "dropped": self.dropped.state(),
        }

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; an empty one restarts. A shorter window keeps the newest values."""
        if self._usual is not None:
            self._usual.load_state(state.get("usual", []))
        if state.get("dropped"):
            self.dropped.load_state(state["dropped"])
