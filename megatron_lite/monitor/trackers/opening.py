"""Open the destinations of metrics for --trackers, and check their packages."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_lite.config import Config, flatten
from megatron_lite.errors import UsageError
from megatron_lite.monitor.metric_lines import Record
from megatron_lite.monitor.trackers.metrics_file import WATCH_FILE, MetricsFile, WatchFile
from megatron_lite.monitor.trackers.queued_tracker import (
    OwnTracker,
    QueuedTracker,
    TensorBoardTracker,
)
from megatron_lite.monitor.trackers.small_trackers import PROMETHEUS_FILE, Prometheus, Webhook
from megatron_lite.monitor.trackers.wandb_tracker import (
    WandbTracker,
    read_key,
    send_no_error_reports,
)
from megatron_lite.monitor.watch import Watched
from megatron_lite.run.exit_status import METRICS_FILE
from megatron_lite.run.secrets import webhook_address

TENSORBOARD_FOLDER = "tensorboard"
_PACKAGES = ("wandb", "tensorboard")  # trackers that need a package of the same name
Destination = MetricsFile | QueuedTracker  # neither blocks for long or raises


class Trackers:
    """All destinations of metrics; none on ranks that do not report."""

    def __init__(self, destinations: Sequence[Destination] = (), run: int = 0) -> None:
        self._destinations, self._run = destinations, run

    def log(self, record: Record, watched: Watched | None = None) -> None:
        """Record metrics, at least `phase` and `iteration`; adds `run` and `time`, in seconds since
        1970.

        Values are plain numbers or text, never tensors. watched: the record's statistics for
        --watch.
        """
        record = {**record, "run": self._run, "time": round(time.time(), 3)}
        for destination in self._destinations:
            destination.log(record, watched)

    def close(self, exit_code: int) -> None:
        """Close the files, send queued records and finish the Weights & Biases run. A second call
        does nothing."""
        destinations, self._destinations = self._destinations, ()
        for destination in destinations:
            destination.close(exit_code)


def check_trackers(config: Config) -> None:
    """Check, before any work, that the trackers' packages are installed and that the key file is
    usable.

    Raises:
        UsageError: if not.
    """
    for name in _PACKAGES:
        if name in config.tracking.trackers and importlib.util.find_spec(name) is None:
            raise _missing(name, config, "it is not installed")
    if "wandb" in config.tracking.trackers:
        read_key()
    if "webhook" in config.tracking.trackers:
        webhook_address()
    for name in (name for name in config.tracking.trackers if ":" in name):
        own_class(name)


def open_trackers(
    config: Config, experiment_dir: Path | None, run: int, reports: bool = True, iteration: int = 0
) -> Trackers:
    """Open every destination of metrics; none unless this rank `reports`.

    Args:
        config: resolved.
        experiment_dir: None writes no file.
        run: number of this start, as in runs/<run>.
        iteration: iterations done; destinations that can drop later records do.

    Raises:
        UsageError: if a package cannot be imported, or the key file of Weights & Biases is
            unusable.
        StorageError: if metrics.jsonl cannot be opened.
    """
    options = config.tracking
    names = options.trackers if reports else ()
    destinations: list[Destination] = []
    if "jsonl" in names and experiment_dir is not None:
        destinations.append(MetricsFile(experiment_dir / METRICS_FILE))
        if options.watch:
            destinations.append(WatchFile(experiment_dir / WATCH_FILE))
    keeps_lines = bool(destinations)
    if "tensorboard" in names:
        writer = _import(
            "tensorboard.summary.writer.event_file_writer", "tensorboard", config
        ).EventFileWriter
        folder = options.tensorboard_dir or str((experiment_dir or Path()) / TENSORBOARD_FOLDER)
        destinations.append(TensorBoardTracker(writer, folder, iteration, keeps_lines))
    if "wandb" in names:
        send_no_error_reports()
        destinations.append(
            WandbTracker(
                _import("wandb", "wandb", config), config, experiment_dir, run, keeps_lines
            )
        )
    name = config.run.experiment_name or ""
    if "webhook" in names:
        destinations.append(Webhook(webhook_address(), name, iteration, keeps_lines))
    if "prometheus" in names and experiment_dir is not None:
        destinations.append(Prometheus(experiment_dir / PROMETHEUS_FILE, name, keeps_lines))
    own = (name for name in names if ":" in name)
    destinations += (
        OwnTracker(name, own_class(name), flatten(config), keeps_lines) for name in own
    )
    return Trackers(destinations, run)


def own_class(name: str) -> Any:
    """Return the class of --trackers=package.module:Class; UsageError if it cannot be imported or
    lacks a method."""
    try:
        found = pkgutil.resolve_name(name)
        attrgetter("log", "close")(found)
    except Exception as error:  # the module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(
            f"--trackers={name}: {reason}; docs/monitoring.md says what it needs"
        ) from None
    return found


def _import(module: str, tracker: str, config: Config) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(tracker, config, f"it cannot be imported ({error})") from None


def _missing(tracker: str, config: Config, reason: str) -> UsageError:
    entity = config.tracking.wandb_entity_name
    flag = (
        f"--wandb_entity_name={entity}"
        if tracker == "wandb" and entity
        else f"--trackers={tracker}"
    )
    return UsageError(
        f"{flag} needs the package {tracker}: {reason}; install it with: python -m pip install {tracker}"
    )
