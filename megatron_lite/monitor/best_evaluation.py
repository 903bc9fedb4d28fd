"""Track the best validation for --keep_best, and decide whether --early_stopping_patience ends the
training.

Ranks agree on each loss, and every checkpoint includes this state, so that a resumed run decides
like an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

from megatron_lite.config import Config, JsonObject
from megatron_lite.config.values import digest


class BestEvaluation:
    """The best value of --keep_best so far; without that option no evaluation counts.

    config: resolved. data: see `data.fingerprint.identity`. saved: `state()` from the checkpoint
    that a start resumes.
    """

    def __init__(self, config: Config, data: JsonObject, saved: JsonObject | None) -> None:
        self.metric = config.checkpoint.keep_best
        self.patience = config.training.early_stopping_patience
        samples = (
            config.training.validation_iters,
            config.batch.batch_size,
            config.batch.sequence_length,
        )
        own = data.get("evaluated", {}).get("validation")
        measured = digest([self.metric, *samples, own or [data["sets"], config.data.split]])
        self.is_anew = (
            self.metric is not None and saved is not None and saved["measured"] != measured
        )
        # seen: the newest iteration counted. bad: evaluations since the best one.
        self._state: JsonObject = {
            "measured": measured,
            "value": math.inf.hex(),
            "iteration": 0,
            "seen": 0,
            "bad": 0,
        }
        self._state |= saved if saved is not None and saved["measured"] == measured else {}

    def add(self, iteration: int, record: JsonObject) -> None:
        """Count an evaluation, unless a start repeats one. record: as logged."""
        if self.metric is None or iteration <= self._state["seen"]:
            return
        value = record[self.metric.removeprefix("validation_")]
        is_better = (
            value is not None
            and math.isfinite(value)
            and value < float.fromhex(self._state["value"])
        )
        self._state |= {"seen": iteration, "bad": 0 if is_better else self._state["bad"] + 1}
        self._state |= {"iteration": iteration, "value": value.hex()} if is_better else {}

    def is_best(self, iteration: int) -> bool:
        """Return whether the weights of an iteration are the best so far."""
        return 0 < iteration == self._state["iteration"]

    @property
    def ends(self) -> bool:
        """Whether too many consecutive evaluations brought no improvement, so the run ends."""
        return (
            self.metric is not None
            and self.patience is not None
            and self._state["bad"] >= self.patience
        )

    def state(self) -> JsonObject:
        """Return this part of a checkpoint's state; see `saved_state.RUN_STATE`."""
        return {} if self.metric is None else {"best": self._state.copy()}

    def __str__(self) -> str:
        value = float.fromhex(self._state["value"])
        iteration = self._state["iteration"]
        bad = self._state["bad"]
        best = f"{value:.5f} at iteration {iteration}" if iteration else "none"
        of_patience = f" of {self.patience}" if self.patience is not None else ""
        return f"best {self.metric}: {best}, {bad}{of_patience} validations since"

    def warn(self, root: Path | None, logger: logging.Logger) -> None:
        """Warn at a start that the count restarts, or that the best checkpoint is outside `root`,
        the run's own."""
        if self.is_anew:
            logger.warning(
                "--keep_best=%s: the checkpoint's best value is of another metric; the search for the best starts again",
                self.metric,
            )
        elif (
            self._state["iteration"]
            and root is not None
            and not (root / str(self._state["iteration"])).exists()
        ):
            logger.warning("%s: its checkpoint is not in %s; only a better one is kept", self, root)
