"""The parts of one start of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lite.config import changed
from megatron_lite.config.training import PATH_FLAGS

if TYPE_CHECKING:
    import logging
    import threading
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from megatron_lite.checkpoint.history import History
    from megatron_lite.checkpoint.mirror import Mirror
    from megatron_lite.checkpoint.resume import Resumed
    from megatron_lite.checkpoint.retention import Known
    from megatron_lite.checkpoint.writing import HostCopy, Saving
    from megatron_lite.config import Config
    from megatron_lite.data.loader import DataSource
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.generation.samples import Samples
    from megatron_lite.monitor.best_evaluation import BestEvaluation
    from megatron_lite.monitor.export_callback import ExportCallback
    from megatron_lite.monitor.memory_history import MemoryHistory
    from megatron_lite.monitor.metric_lines import ConsoleLines
    from megatron_lite.monitor.metrics import LogWindow, StepTimer
    from megatron_lite.monitor.profiling.profiles import Profiles
    from megatron_lite.monitor.routing_replay import RoutingReplay
    from megatron_lite.monitor.tensor_debug import TensorDebugger
    from megatron_lite.monitor.trackers.opening import Trackers
    from megatron_lite.monitor.watch import Watch
    from megatron_lite.optimizer.optimizer import Optimizer
    from megatron_lite.run.ending import Ending
    from megatron_lite.run.experiment import Experiment
    from megatron_lite.run.stop_files import StopFiles
    from megatron_lite.run.stop_signal import StopSignal
    from megatron_lite.zero.multi_stage import MultiStage


class Run:
    """One start of a run. `build` sets the fields from top to bottom; then it is ready to train
    from `iteration`."""

    config: Config  # `auto` is resolved
    distributed: Distributed
    experiment: Experiment
    stop: StopSignal
    logger: logging.Logger
    data: DataSource
    callback: ExportCallback
    samples: Samples | None  # None without --sample_interval
    memory_history: MemoryHistory | None  # None without --memory_snapshot
    model: MultiStage
    # writes an export, see `huggingface_export.write_export`
    write_export: Callable[[Path, Config], None]
    # see `time_collectives`; empty without --log_communication
    collectives_alone_s: dict[str, float]
    profiles: Profiles | None  # None without --profile_cpu, --profile_cuda and --profile_schedule
    optimizer: Optimizer
    window: LogWindow
    pinned: Mapping[str, str]  # commits on the Hugging Face hub, see `remote_copy.pin_of`
    base: str = ""  # digest of the model whose adapters are trained; see `frozen_base`
    resumed: Resumed  # where this start began
    iteration: int  # completed iterations
    best: BestEvaluation  # so far, for --keep_best
    evaluation_due: (
        bool  # a stop request preempted the evaluations and exports due after `iteration`
    )
    debugger: TensorDebugger | None  # None without debug options
    host_copy: HostCopy | None  # None without --async_checkpoint
    saving: Saving | None = None  # the save under way
    trackers: Trackers
    timer: StepTimer
    console: ConsoleLines
    watch: Watch | None = None  # None without --watch
    replay: RoutingReplay | None = None  # None without --moe_replay_routing
    mirror: Mirror | None = None  # of rank 0; None without --mirror
    stop_files: StopFiles | None = None  # of rank 0; None without --experiment_dir
    history: History  # of the run
    saved_s: float  # time.monotonic() of the last save, or of the start
    logs_early: bool = False  # the first iterations, too, as --log_interval is not set
    saves_by_default: bool = (
        False  # every 15 minutes, as no flag sets it; a start's newest two are kept
    )
    save_requested: bool = False  # by rank 0's clock, after the next iteration
    ending: Ending | None = None  # None for a run set up without `opened`
    comparison: threading.Thread | None = None  # see `compare_exports`
    agreed_at: int | None = (
        None  # newest iteration at which --check_replicas_interval found no difference
    )

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        experiment: Experiment,
        stop: StopSignal,
        asked: Config,
    ) -> None:
        self.config = config
        self.distributed = distributed
        self.experiment = experiment
        self.stop = stop
        self.asked = asked  # the configuration as typed
        self.known_checkpoints: Known = {}  # what rank 0 has read about them
        self.bad_steps: list[int] = []  # iterations examined by `leave_bad_step`
        self.evaluated: dict[int, dict[str, float]] = {}  # newest losses, by name
        self.without_labels: dict[
            str, int
        ] = {}  # by phase: consecutive evaluations or updates in which no label counts

    @property
    def shown_config(self) -> Config:
        """The configuration for people: with data paths as typed, not as cached, and the
        --skip_samples of earlier starts, too."""
        names = ("dataset_source", *PATH_FLAGS, "loss_mask", "tokenizer_file")
        typed = {name: value for name in names if (value := getattr(self.asked.data, name))}
        skipped = tuple(str(self.data.counts.skipped).split())
        return changed(self.config, {**typed, "skip_samples": skipped})
