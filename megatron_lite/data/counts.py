"""Count the samples and tokens that a run has trained on, over all its starts, whatever options
each had.

Every checkpoint stores the counts: the sizes of all batches so far, and per data set, by its
fingerprint, the samples read. A start adds what it reads itself, from its first iteration on.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_lite.config import Config, JsonObject
from megatron_lite.config.structured_values import sample_ranges
from megatron_lite.config.values import written
from megatron_lite.data.blending import Blend, Concatenation
from megatron_lite.data.skipped import Skipped
from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import BatchSchedule, Segment, batch_schedule, continued

# fingerprint, name, samples per epoch, tokens per sample, samples read
Read = tuple[str, str, int, int, int]


class Counts:
    """The samples read in training: by earlier starts, from a checkpoint, then by this one (see
    `begin`)."""

    order: Blend | Concatenation | None = None  # None: random tokens, or no training
    sets: Sequence[tuple[str, str, int]] = ()  # per data set: fingerprint, name, samples per epoch

    def __init__(self, config: Config, began: JsonObject | None = None) -> None:
        """Start from a checkpoint's counts. config: resolved. began: see `Choice.began`; None for a
        new run."""
        self._config, self._planned = config, batch_schedule(config.batch)
        self.schedule = self._planned  # earlier starts' schedule, until this one begins
        self._first, self._read = 0, list[Read]()
        # --skip_samples of this start and of earlier ones
        self.skipped = Skipped()
        done = 0
        if began and "counts" in began:
            done = began["iteration"]
            self.begin(began["counts"], done)
            self.skipped = self.skipped.joined(began["counts"].get("skipped", ()))
        for first, end in sample_ranges(config.data.skip_samples):
            self._skip(first, end, done)

    def _skip(self, first: int, end: int, done: int) -> None:
        """Also leave samples [first, end) out, unless the iterations that are done have read them.

        Raises: UsageError, which names the iteration to go back to.
        """
        skipped = self.skipped.joined([(first, end)])

        def next_sample(iterations: int) -> int:
            return self.skipped.position(self._planned.consumed_samples(iterations))

        now = next_sample(done)
        if skipped.kept(now) < self.skipped.kept(now):
            before = bisect.bisect_right(range(done), first, key=next_sample) - 1
            fix = f"go back to a checkpoint of iteration {before} or earlier (--resume_iteration)"
            if before == 0:
                fix = "start anew in another --experiment_dir"
            raise UsageError(
                f"--skip_samples={first}-{end - 1}: the run has already read samples up to {now - 1}, in {done} iterations; "
                f"to leave these out, {fix}"
            )
        self.skipped = skipped

    def iterations_of(self, tokens: int) -> int:
        """Return the fewest iterations that read this many tokens; uses the options where earlier
        starts kept no counts."""
        return (self._planned if self.schedule.since else self.schedule).iterations_of(tokens)

    def begin(self, saved: JsonObject, iteration: int) -> None:
        """Continue after a checkpoint's iterations. saved: `state()` then."""
        before = BatchSchedule(tuple(Segment(*row) for row in saved["stages"]))
        self.schedule = continued(before, self._planned, iteration)
        self._first, self._read = iteration, saved["sets"]

    def read(self, iterations: int) -> list[Read]:
        """Return what the first `iterations` read from each data set.

        An earlier version did not count data sets. Its iterations count as if the current options
        had applied.
        """
        found: Counter[tuple[Any, ...]] = Counter({tuple(row[:-1]): row[-1] for row in self._read})
        first = self._first if found or self.schedule != self._planned else 0
        if isinstance(self.order, Blend):
            ends = map(self._planned.consumed_samples, (first, max(first, iterations)))
            taken = (self._taken(self.order, end) for end in ends)
            for data_set, start, end in zip(self.sets, *taken, strict=True):
                key = (*data_set, self._config.batch.sequence_length)
                found[key] += end - start
        return [(*key, samples) for key, samples in found.items()]

    def _taken(self, order: Blend, read: int) -> list[int]:
        """Return how many samples each data set provides once training has read `read`."""
        counts = np.array(order.taken(end := self.skipped.position(read)))
        for first, stop in self.skipped.ranges:
            if stop <= end:
                counts -= np.subtract(order.taken(stop), order.taken(first))
        return [int(count) for count in counts]

    def epochs(self, iterations: int) -> list[float]:
        """Return how often the first `iterations` read each data set."""
        times = defaultdict[str, float](float)
        for name, _, epoch, _, samples in self.read(iterations):
            times[name] += samples / epoch
        return [times[name] for name, *_ in self.sets]

    def check_epochs(self, prefixes: Sequence[str]) -> None:
        """Check --max_epochs. prefixes: of the data sets.

        Raises: UsageError, which names the data set read most often, and how many iterations are
        allowed.
        """
        limit, training = self._config.data.max_epochs, self._config.training
        iterations = training.train_iters
        epochs = self.epochs(iterations)
        if limit is None or max(epochs) <= limit or (training.epochs or math.inf) <= limit:
            return
        refused = bisect.bisect_right(
            range(iterations), float(limit), key=lambda count: max(self.epochs(count))
        )
        typed, fewer = f"--train_iters={iterations}", f"--train_iters={refused - 1} or less"
        for name in ("epochs", "train_tokens"):
            if (length := getattr(training, name)) is not None:
                typed, fewer = f"--{name}={written(length)}", f"a smaller --{name}"
        raise UsageError(
            f"--max_epochs={limit}, {typed}: {prefixes[epochs.index(max(epochs))]} would be read "
            f"{max(epochs):.4g} times; write {fewer}, a larger --max_epochs, or add data"
        )

    def state(self, iterations: int) -> dict[str, Any]:
        """Return this part of a checkpoint's state; see `saved_state.RUN_STATE`."""
        stages = [
            (part.start, part.size, part.length)
            for part, count in self.schedule.parts(iterations)
            if count or not part.start
        ]
        return {
            "stages": stages,
            "sets": self.read(iterations),
            "skipped": self.skipped.ranges,
        }
