"""The experiment directory: paths of a run, and the lock against other runs."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import FolderLostError, StorageError
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.folder_lock import FolderLock


class Experiment:
    """Paths of one start of a run. Without --experiment_dir every path is None and nothing is written.

    <root>/config.json, metrics.jsonl, checkpoints/<iteration>/, export/<iteration>/, runs/<run>/{logs,artifacts}/

    Raises:
        StorageError: on every rank, if rank 0 cannot write there, another run is using the directory, or a rank does
            not see what rank 0 has written.
    """

    def __init__(self, config: Config, distributed: Distributed) -> None:
        directory = self._directory = config.run.experiment_dir
        self.root = root = None if directory is None else together(distributed, lambda: absolute_path(directory))
        self.run, self._lock = 0, None if root is None else FolderLock(root)
        if root is None or self._lock is None:
            return
        lock, rank = self._lock, distributed.rank
        together(distributed, lambda: self._prepare(root, lock) if rank == 0 else None)
        self.run, nonce = distributed.broadcast_object((lock.run, lock.nonce))
        together(distributed, lambda: lock.see(self.run, nonce) if rank != 0 else None)

    def check(self) -> None:
        """Check that the directory still belongs to this start; call this before writing there by path.

        Raises:
            FolderLostError: if the directory was moved or removed, or another start has taken it over.
        """
        if self._lock is not None:
            self._lock.check()

    def is_lost(self) -> bool:
        """Return whether the directory no longer belongs to this start."""
        try:
            self.check()
        except FolderLostError:
            return True
        except OSError:  # the file system does not answer
            pass
        return False

    def when_lost(self, tell: Callable[[FolderLostError], None]) -> None:
        """Call `tell`, from another thread, when the directory is lost."""
        if self._lock is not None:
            self._lock.on_loss = tell

    def release(self) -> None:
        """Release the directory; call this after the last write. Never fails."""
        if self._lock is not None:
            self._lock.release()

    @property
    def checkpoints(self) -> Path | None:
        return self._path("checkpoints")

    @property
    def profiles(self) -> Path | None:
        """The folder for the profiles of all starts."""
        return self._path("profiles")

    @property
    def artifacts(self) -> Path | None:
        """The folder for the tensor logs, stacks and bad steps of this start."""
        return self._path("runs", str(self.run), "artifacts")

    def export(self, iteration: int) -> Path | None:
        """Return the folder for the export of an iteration."""
        return self._path("export", str(iteration))

    def log_file(self, rank: int) -> Path | None:
        """Return the log file of one rank of this start."""
        return self._path("runs", str(self.run), "logs", f"logs_rank_{rank:03d}.txt")

    def _path(self, *names: str) -> Path | None:
        return None if self.root is None else self.root.joinpath(*names)

    def record(self, config: Config) -> None:
        """Write config.json. Call this on rank 0, after checking the configuration against the checkpoints."""
        if self.root is None:
            return
        self.check()
        text = (json.dumps(flatten(config), indent=2) + "\n").encode()
        for folder in (self.root / "runs" / str(self.run), self.root):
            replace_file(folder / "config.json", text)

    def _prepare(self, root: Path, lock: FolderLock) -> None:
        """Create and lock the directories of a new start."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoints", "export"):  # fail now rather than at the first save
                if (root / name).exists() and not (root / name).is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, f"{root / name} is not a directory")
            lock.take()
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"--experiment_dir={self._directory}: {reason}; choose a writable directory") from error


def absolute_path(directory: str) -> Path:
    """Return the directory as an absolute path, with ~ expanded.

    Raises:
        StorageError: if the user after ~ does not exist, or the current directory is gone.
    """
    try:
        return Path(directory).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        refusal = StorageError(f"--experiment_dir={directory}: {error}; give an absolute path")
        refusal.recorded = False  # there is no directory to write to
        raise refusal from error
