"""The profiles of one start on one rank: when they begin and end, and where their results go.

PyTorch's profiler writes a Chrome trace and tables of operations; `schedule_times` records the
steps of the schedule.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile, record_function

from megatron_lite.config import Config, ProfilingConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.communication import time_collectives
from megatron_lite.monitor.profiling import schedule_report
from megatron_lite.monitor.profiling.schedule_times import (
    COMPUTING,
    DeviceClock,
    HostClock,
    ScheduleRecorder,
    iterations_in_words,
    range_name,
)
from megatron_lite.run.durable_files import replace_file
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.stage import Stage

# (verb, stage, micro-batch or None) -> the context in which the verb runs
Around = Callable[[str, int, int | None], contextlib.AbstractContextManager[Any]]
MOST_ROWS, NAME_WIDTH = 100, 80  # table of operations: rows, and columns of a name


class OperationProfile:
    """A PyTorch profile, which warms up until the first `begin`."""

    def __init__(self, config: ProfilingConfig, device_type: str) -> None:
        self._on_gpu = config.profile_cuda and device_type == "cuda"
        activities = [ProfilerActivity.CPU] * config.profile_cpu + [
            ProfilerActivity.CUDA
        ] * self._on_gpu
        self._profile = profile(activities=activities)
        self._iteration = contextlib.ExitStack()  # the range of an iteration
        self._is_warm = False
        self._profile.prepare_trace()

    def _record(self) -> None:
        if not self._is_warm:
            self._profile.start_trace()
        self._is_warm = True

    def begin(self, iteration: int) -> None:
        """Record an iteration, as a range of its own."""
        self._record()
        self._iteration.enter_context(record_function(f"iteration {iteration}"))

    def end(self) -> None:
        """End the range of an iteration, if one is open."""
        self._iteration.close()

    def stop(self) -> None:
        """End the recording; a warm-up without iterations has an empty one."""
        self.end()
        self._record()
        self._profile.stop_trace()

    def write_trace(self, path: Path) -> None:
        """Write the Chrome trace, compressed; the file is complete or absent.

        Raises:
            OSError: if it cannot be written.
        """
        plain, packed = (
            path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("json", "gz")
        )
        try:
            self._profile.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, path)
        finally:
            for left in (plain, packed):
                left.unlink(missing_ok=True)

    def table(self) -> str:
        """Return the table of operations, sorted by self time."""
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        averages = self._profile.key_averages()
        return averages.table(sort_by=order, row_limit=MOST_ROWS, max_name_column_width=NAME_WIDTH)


class WatchedStage:
    """A stage whose verbs run inside contexts: named ranges, or stop watches."""

    def __init__(self, stage: Stage, arounds: Sequence[Around]) -> None:
        self._stage, self._arounds = stage, arounds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # "require" of `require_weights`, "finish" of `finish_reduction`
        verb = name.partition("_")[0]

        def watched_verb(*arguments: Any) -> Any:
            micro_batch = arguments[-1] if verb in COMPUTING else None
            with contextlib.ExitStack() as blocks:
                for around in self._arounds:
                    blocks.enter_context(around(verb, self._stage.index, micro_batch))
                return getattr(self._stage, name)(*arguments)

        return watched_verb


def open_profiles(
    config: Config,
    logger: logging.Logger,
    distributed: Distributed,
    folder: Path | None,
    model: MultiStage,
) -> Profiles | None:
    """Return the profiles that the options request on this rank, or None. Collective.

    Call before the weights are loaded: timing a collective alone overwrites the gradient buffers.

    folder: for the results; None writes nothing.
    """
    options = config.profiling
    if options.profile_cuda and distributed.device.type != "cuda":
        logger.warning("--profile_cuda=1 has no effect on a CPU; write --profile_cpu=1")
    operations = options.profile_cpu or (options.profile_cuda and distributed.device.type == "cuda")
    if not operations and not options.profile_schedule:
        return None
    alone_s: dict[tuple[str, int | None], float] = {}
    if options.profile_schedule and distributed.device.type == "cpu" and distributed.world_size > 1:
        with distributed.traffic.paused():
            # the ranks time the same number, so that they meet at the barriers
            for stage in model.all_stages:
                own = [stage] if stage in model.stages else []
                for kind, seconds in time_collectives(
                    own, model.group, distributed.barrier
                ).items():
                    alone_s[kind, stage.index] = seconds
    if options.profile_ranks and distributed.rank not in options.profile_ranks:
        return None
    return Profiles(options, logger, distributed, folder, model, operations, alone_s)


@dataclass(eq=False)
class Profiles:
    """Profiles a run: `begin` precedes a start's first iteration, `iteration_done` follows each,
    `close` the last.

    A warm-up iteration follows those to skip. Before and after it the model runs as without a
    profile. with_operations: run PyTorch's profiler. alone_s: seconds of a collective with nothing
    else running, by (kind, stage).
    """

    config: ProfilingConfig
    logger: logging.Logger
    distributed: Distributed
    folder: Path | None
    model: MultiStage
    with_operations: bool
    alone_s: Mapping[tuple[str, int | None], float]
    _done: int = 0  # iterations of this start
    _operations: OperationProfile | None = None
    _schedule: ScheduleRecorder | None = None
    _first: int = 0  # iteration of the current profile; 0: none so far
    _last: int = 0  # last iteration done

    def _place(self) -> int:
        """Return the next iteration's position in the profile: 0 is the warm-up, 1 to
        profile_active are recorded."""
        return self._done - self.config.profile_skip

    def iteration_done(self, iteration: int) -> None:
        """End an iteration, and the profile if this was its last; prepare the next iteration.
        Collective."""
        place = self._place()
        self._done, self._last = self._done + 1, iteration
        if self._schedule is not None:
            self._schedule.lap(iteration, keep=place > 0)
        if self._operations is not None:
            self._operations.end()
        if place == self.config.profile_active:
            self._finish()
        self.begin(iteration + 1)

    def close(self) -> None:
        """Write the current profile's iterations so far. Call at the end, unless the run failed:
        other ranks and the device may never answer then."""
        if 0 < self._first <= self._last:
            self._finish()
        self._leave()
        if self._place() < 2:
            self.logger.warning(
                "no iteration was profiled: the first would have been iteration %d of this start, which ends after %d; "
                "lower --profile_skip",
                self.config.profile_skip + 2,
                self._done,
            )

    # -- one profile
    # -------------------------------------------------------------------------------------------------

    def begin(self, iteration: int) -> None:
        """Prepare an iteration: start or continue the profile, if it includes the iteration."""
        if self._place() == 0:
            self._watch()
        elif 0 < self._place() <= self.config.profile_active:
            self._first = self._first or iteration
            if self._operations is not None:
                self._operations.begin(iteration)

    def _watch(self) -> None:
        """Wrap the stages, and record collectives."""
        distributed, arounds = self.distributed, list[Around]()
        on_gpu = distributed.device.type == "cuda"
        if self.config.profile_schedule:
            clock = DeviceClock(distributed.device) if on_gpu else HostClock()
            self._schedule = ScheduleRecorder(clock, self.alone_s)
            distributed.traffic.recorder = self._schedule.started
            arounds.append(self._schedule.around)
        if self.with_operations:
            self._operations = OperationProfile(self.config, distributed.device.type)
            arounds.append(lambda *place: record_function(range_name(*place)))
        self.model.wrap(lambda stage: cast(Stage, WatchedStage(stage, arounds)))

    def _leave(self) -> None:
        """Unwrap the stages and stop recording."""
        self.model.wrap(None)
        self.distributed.traffic.recorder = None
        if self._operations is not None:
            # A gloo transfer in flight refers to the trace, whose memory is freed below.
            self.model.finish()
            self._operations.stop()
        self._operations = None
        self._schedule = None
        self._first = 0

    def _finish(self) -> None:
        """End the current profile and write its results; a full disk costs the results, not the
        run."""
        operations = self._operations
        schedule = self._schedule
        words = iterations_in_words(self._first, self._last)
        self._leave()
        rank, world_size = self.distributed.rank, self.distributed.world_size
        name = f"{words.replace(' ', '_')}_rank_{rank:03d}"
        written: list[Path] = []
        if operations is not None:
            written += self._write(f"{name}.trace.json.gz", operations.write_trace)
            written += self._text(f"{name}.averages.txt", operations.table())
        self.distributed.wait_for_device()
        if schedule is not None and (times := schedule.take()):
            self.logger.info(schedule_report.summary(times))
            written += self._text(
                f"{name}.schedule.txt", schedule_report.tables(times, rank, world_size)
            )
            trace = gzip.compress(json.dumps(schedule_report.trace_events(times, rank)).encode(), 6)
            written += self._write_bytes(f"{name}.schedule.json.gz", trace)
            page = schedule_report.page(times, rank, world_size)
            written += self._write_bytes(f"{name}.schedule.html", page.encode())
        if written:
            files = ", ".join(path.name for path in written)
            self.logger.info("profile of %s: %s in %s", words, files, self.folder)

    def _text(self, name: str, text: str) -> list[Path]:
        return self._write_bytes(name, f"{text}\n".encode())

    def _write_bytes(self, name: str, data: bytes) -> list[Path]:
        return self._write(name, lambda path: replace_file(path, data))

    def _write(self, name: str, write: Callable[[Path], None]) -> list[Path]:
        """Write one file into the folder; return its path, or nothing without a folder or after a
        failure."""
        if self.folder is None:
            return []
        path = self.folder / name
        try:
            self.folder.mkdir(exist_ok=True)
            write(path)
        except OSError as error:
            self.logger.warning(
                "cannot write %s: %s; the run continues without it", path, error.strerror or error
            )
            return []
        return [path]
