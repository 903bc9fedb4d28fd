"""PyTorch's profiler around a few iterations: a Chrome trace and tables of operations."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_lite.config import ProfilingConfig
from megatron_lite.monitor.profiling.schedule_times import range_name

MOST_ROWS = 100  # of the table of averages


class OperationProfile:
    """One cycle of PyTorch's profiler: a warm-up, `start`, iterations from `begin` to `end`, `stop`, then the results."""

    def __init__(self, config: ProfilingConfig, device_type: str) -> None:
        self._config, self._on_gpu = config, config.profile_cuda and device_type == "cuda"
        activities = [ProfilerActivity.CPU] * config.profile_cpu + [ProfilerActivity.CUDA] * self._on_gpu
        # One object per cycle, driven by hand: a profiler that goes through several cycles warns at each.
        self._profile = profile(activities=activities)
        self._iteration = contextlib.ExitStack()  # holds the range of an iteration
        self._profile.prepare_trace()

    def start(self) -> None:
        """Record from here on."""
        self._profile.start_trace()

    def begin(self, iteration: int) -> None:
        """Begin the range of an iteration."""
        self.end()
        self._iteration.enter_context(record_function(f"iteration {iteration}"))

    def end(self) -> None:
        """End the range of an iteration, if one is open."""
        self._iteration.close()

    @contextlib.contextmanager
    def around(self, verb: str, stage: int, micro_batch: int | None) -> Iterator[None]:
        """Give a verb of a stage its name in the trace."""
        with record_function(range_name(verb, stage, micro_batch)):
            yield

    def stop(self) -> None:
        """End the recording."""
        self.end()
        self._profile.stop_trace()

    def write_trace(self, path: Path) -> None:
        """Write the Chrome trace, compressed; the file is complete or absent.

        Raises:
            OSError: if it cannot be written.
        """
        plain, packed = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("json", "gz"))
        try:
            self._profile.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, path)
        finally:
            for left in (plain, packed):
                left.unlink(missing_ok=True)

    def tables(self) -> dict[str, str]:
        """Return the tables that were asked for, by name."""
        result = {}
        if self._config.profile_averages:
            order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
            width = self._config.profile_column_width
            averages = self._profile.key_averages()
            result["averages"] = averages.table(sort_by=order, row_limit=MOST_ROWS, max_name_column_width=width)
        if self._config.profile_trace:
            result["operations"] = "\n".join(self._operations())
        return result

    def _operations(self) -> Iterator[str]:
        """Yield a line per operation in order of their starts, indented by the operations that they are part of."""
        yield f"{'start, ms':>12}  {'own CPU, us':>12}  {'own GPU, us':>12}  operation"
        events = sorted(self._profile.events() or (), key=lambda event: event.time_range.start)
        origin = events[0].time_range.start if events else 0.0
        for event in events:
            depth, parent = 0, event.cpu_parent
            while parent is not None:
                depth, parent = depth + 1, parent.cpu_parent
            name = ("  " * depth + event.name)[: self._config.profile_column_width]
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            own_us = (0.0, event.self_device_time_total) if on_gpu else (event.self_cpu_time_total, 0.0)
            start_ms = (event.time_range.start - origin) / 1e3
            yield f"{start_ms:12.3f}  {own_us[0]:12.1f}  {own_us[1]:12.1f}  {name}"
