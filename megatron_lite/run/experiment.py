"""The experiment directory: the files of a run, and the lock that keeps other runs out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path

from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import StorageError
from megatron_lite.run.durable_files import replace_file


class Experiment:
    """Paths of one start of a run. Without --experiment_dir every path is None and nothing is written.

    <root>/config.json, metrics.jsonl, checkpoints/<iteration>/, export/<iteration>/, runs/<run>/{logs,artifacts}/

    Raises:
        StorageError: on every rank, if rank 0 cannot write there or another run is using it.
    """

    def __init__(self, config: Config, distributed: Distributed) -> None:
        directory = self._directory = config.run.experiment_dir
        self.root = root = None if directory is None else together(distributed, lambda: absolute_path(directory))
        self.run = 0
        self._lock: int | None = None
        if root is None:
            return
        prepared = together(distributed, lambda: self._prepare(root) if distributed.rank == 0 else 0)
        self.run = distributed.broadcast_object(prepared)

    @property
    def checkpoints(self) -> Path | None:
        return None if self.root is None else self.root / "checkpoints"

    def export(self, iteration: int) -> Path | None:
        """Return the folder for the export of an iteration."""
        return None if self.root is None else self.root / "export" / str(iteration)

    def log_file(self, rank: int) -> Path | None:
        """Return the log file of one rank of this start."""
        return None if self.root is None else self.root / "runs" / str(self.run) / "logs" / f"logs_rank_{rank:03d}.txt"

    @property
    def artifacts(self) -> Path | None:
        """The folder for tensor logs of this start."""
        return None if self.root is None else self.root / "runs" / str(self.run) / "artifacts"

    def record(self, config: Config) -> None:
        """Write config.json. Call on rank 0, after the configuration was checked against the checkpoints."""
        if self.root is None:
            return
        text = (json.dumps(flatten(config), indent=2) + "\n").encode()
        for folder in (self.root / "runs" / str(self.run), self.root):
            replace_file(folder / "config.json", text)

    def _prepare(self, root: Path) -> int:
        """Create the directories of a new start and return its number, counted from 0."""
        try:
            return self._make_directories(root)
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"--experiment_dir={self._directory}: {reason}; choose a writable directory") from error

    def _make_directories(self, root: Path) -> int:
        root.mkdir(parents=True, exist_ok=True)
        self._take_lock(root)
        for name in ("checkpoints", "export"):  # fail now rather than at the first save
            if (root / name).exists() and not (root / name).is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{root / name} is not a directory")
        runs = root / "runs"
        runs.mkdir(exist_ok=True)
        run = 1 + max((int(path.name) for path in runs.iterdir() if path.name.isdecimal()), default=-1)
        (runs / str(run) / "logs").mkdir(parents=True)
        return run

    def _take_lock(self, root: Path) -> None:
        """Lock the directory; the system releases the lock when this process ends, however it ends."""
        self._lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refusal = StorageError(
                f"--experiment_dir={root}: another run is using it; wait for that run or choose another directory"
            )
            refusal.recorded = False  # exit.json belongs to the other run
            raise refusal from None
        except OSError:
            # A file system without locks: the user must keep two runs out of one directory.
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


def absolute_path(directory: str) -> Path:
    """Return the directory as an absolute path, with ~ expanded.

    Raises:
        StorageError: if there is no such user, or the current directory is gone.
    """
    try:
        return Path(directory).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        refusal = StorageError(f"--experiment_dir={directory}: {error}; give an absolute path")
        refusal.recorded = False  # there is no directory to write to
        raise refusal from error
