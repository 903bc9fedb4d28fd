"""Options of profiles: where the time of a few iterations goes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, NonNegativeInt, PositiveInt, idle_unless

# Options that have no effect unless one of these is on.
profile_option = idle_unless("profile_cpu or profile_cuda or profile_schedule")


@dataclass
class ProfilingConfig(Area):
    """Profiles"""

    profile_cpu: bool = idle_unless("profile_export or profile_averages or profile_trace")(
        False, "profile operations on the CPU with PyTorch's profiler, into profiles/ of experiment_dir"
    )
    profile_cuda: bool = idle_unless("profile_export or profile_averages or profile_trace and device!=cpu")(
        False, "also profile kernels on the GPU"
    )
    profile_schedule: bool = idle_unless("experiment_dir or profile_log")(
        False,
        "time each step of the schedule, its gathers and reductions, and how much of them computation overlaps: a "
        "table and a trace",
    )
    profile_skip: NonNegativeInt = profile_option(1, "iterations before the first profile, counted from each start")
    profile_wait: NonNegativeInt = profile_option(0, "iterations to skip before each profile")
    profile_warmup: NonNegativeInt = profile_option(
        1, "iterations to profile and discard before each profile, as the first ones are slower"
    )
    profile_active: PositiveInt = profile_option(1, "iterations in each profile")
    profile_cycles: PositiveInt = profile_option(1, "number of profiles")
    profile_ranks: tuple[NonNegativeInt, ...] = idle_unless(
        "profile_cpu or profile_cuda or profile_schedule or memory_snapshot"
    )((), "ranks to profile; none: all")
    profile_export: bool = idle_unless("profile_cpu or profile_cuda or profile_schedule and experiment_dir")(
        True, "write traces that ui.perfetto.dev shows (.json.gz), and the schedule as a page (.html)"
    )
    profile_averages: bool = idle_unless("profile_cpu or profile_cuda and experiment_dir or profile_log")(
        False, "write a table of the operations, sorted by self time"
    )
    profile_trace: bool = idle_unless("profile_cpu or profile_cuda and experiment_dir or profile_log")(
        False, "write a table of every operation in order"
    )
    profile_log: bool = profile_option(False, "also log the tables")
    profile_column_width: int = idle_unless("profile_averages or profile_trace")(
        80, "longest name of an operation in the tables", minimum=10, maximum=1000
    )
    memory_snapshot: NonNegativeInt = idle_unless("experiment_dir and device!=cpu")(
        0,
        "CUDA: record every allocation from the start through the first N iterations, and write it to "
        "experiment_dir/profiles/memory_<rank>.pickle, which https://pytorch.org/memory_viz shows (0: record nothing)",
    )

    @property
    def operations(self) -> bool:
        """Whether PyTorch's profiler runs."""
        return (self.profile_cpu or self.profile_cuda) and (
            self.profile_export or self.profile_averages or self.profile_trace
        )
