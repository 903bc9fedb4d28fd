"""Identify the run that a checkpoint belongs to, and the options of its iterations.

Every checkpoint stores both. Iterations of one run with the same options are interchangeable,
whoever computed them: a machine whose disk is older than the mirror continues from the mirror.
Where the options differ, the histories fork, and only the user can decide which one continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config import Config, JsonObject, flatten
from megatron_lite.config.values import digest

_AREAS = ("model", "batch", "learning_rate", "optimizer", "averaging")
_OTHER_OPTIONS = (
    "seed training_dtype fp8 int8 quantization_targets amax_history_length train_iters loss_reduction logit_z_loss"
).split()


class History(NamedTuple):
    """A run's history up to some iteration."""

    run: str  # 16 hexadecimal digits
    changes: Sequence[tuple[int, str]]  # iterations done, and a digest of the options from then on

    def continued(self, iteration: int, config: Config) -> History:
        """Return the history of a start that continues after `iteration` with these options."""
        options = [vars(getattr(config, area)) for area in _AREAS]
        others = flatten(config)
        found = digest([*options, [others[name] for name in _OTHER_OPTIONS]])
        if self.changes and self.changes[-1][1] == found:
            return self
        return History(self.run, (*self.changes, (iteration, found)))

    def state(self) -> JsonObject:
        """Return this part of a checkpoint's state; see `saved_state.RUN_STATE`."""
        return {"history": self._asdict()}

    def options_after(self, iteration: int) -> str | None:
        """Return the digest of the options after `iteration`; None if an older version saved no
        history."""
        return next((found for start, found in reversed(self.changes) if start <= iteration), None)


def history_of(content: Manifest) -> History:
    """Return a checkpoint's history. One from an older version gets its own run id."""
    saved = content.state.get("history")
    if saved is None:
        return History(digest(content.save_id), ())
    return History(**saved)


def shared_iterations(one: Manifest, other: Manifest) -> int:
    """Return the number of iterations, from the first one on, that two checkpoints of one run
    share."""
    left, right = history_of(one), history_of(other)
    starts = sorted({0, *(start for start, _ in (*left.changes, *right.changes))})
    end = min(one.iteration, other.iteration)
    return next(
        (at for at in starts if at < end and left.options_after(at) != right.options_after(at)), end
    )


def counts_of(content: Manifest) -> JsonObject:
    """Return the counts of the samples read by a checkpoint's iterations, see `data.counts`.

    An earlier version did not count. Its stage is known if the run always had the same options.
    """
    saved, stage = content.config, (0, 0, 0)
    if [start for start, _ in history_of(content).changes] == [0] and not saved.get(
        "batch_size_schedule"
    ):
        stage = (0, saved["batch_size"], saved["sequence_length"])
    counts: JsonObject = content.state.get("counts", {"stages": [stage], "sets": []})
    return counts
