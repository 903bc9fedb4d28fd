"""The experiment directory: a run's paths, and the lock that lets one start at a time write there,
across machines.

Every start creates a folder `runs/<k>/`, and the newest one owns the directory. Its `lock.json`
names the owner: host, process, user, start time. The folder is renamed into place with the lock in
it, so that two starts cannot get the same number. The owner removes the lock when it ends. A start
that finds a lock never guesses whether the owner is alive:

- the file is locked (flock), or the owner is a live process on this machine: in use;
- the owner was a process on this machine and has ended: free;
- its heartbeat, the file's modification time, changes: in use;
- the heartbeat is older than a minute by the file system's clock: free. Until then, wait.

A stopped process that wakes up after another start has taken over the directory finds the newer
folder before it writes again. A process whose directory was moved or removed notices too, because
all ranks keep the lock file open.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import raise_first, together
from megatron_lite.distributed.processes import has_ended, machine_name, start_ticks
from megatron_lite.errors import FolderLostError, StorageError
from megatron_lite.run.durable_files import lock_file, replace_file

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed

LOCK_FILE = "lock.json"
BEAT_S = 1.0
DEAD_AFTER_S = 60.0  # an owner without a heartbeat for this long counts as dead
VISIBLE_WITHIN_S = 5.0  # time for other machines to see a new file
_POLL_S = 0.1
_LOCK_BYTES = 4096

OnLoss = Callable[[FolderLostError], None]


class Experiment:
    """The paths of one start. Without --experiment_dir every path is None and nothing is written.

    <root>/config.json, metrics.jsonl, checkpoints/<iteration>/, export/<iteration>/,
    runs/<run>/{logs,artifacts}/

    Rank 0 takes the directory before it meets the others; `share` then reports the result to them.
    """

    root: Path | None = None
    run = 0  # the start's number; negative before this rank knows it
    _lock: FolderLock | None = None  # None without a directory
    _refusal: StorageError | None = None

    def __init__(self, config: Config, rank: int, on_loss: OnLoss = lambda error: None) -> None:
        """Set the paths. on_loss: called once, from another thread, when rank 0 finds that the
        directory is lost."""
        if (directory := config.run.experiment_dir) is None:
            return
        self.run = -1
        try:
            self.root = absolute_path(directory)
            lock = FolderLock(self.root, on_loss)
            if rank == 0:
                _prepare(lock, directory)
                self.run = lock.run
            self._lock = lock
        except StorageError as refusal:
            self._refusal = refusal

    def share(self, distributed: Distributed) -> None:
        """Share the directory that rank 0 has taken with all ranks.

        Raises:
            StorageError: on every rank, if rank 0 cannot write there, another run is using the
                directory, or a rank does not see what rank 0 has written.
        """
        raise_first(distributed, self._refusal)
        if (lock := self._lock) is not None:
            run, nonce = distributed.broadcast_object((lock.run, lock.nonce))
            together(distributed, lambda: lock.see(run, nonce) if distributed.rank != 0 else None)
            self.run = run

    def check(self) -> None:
        """Check that the directory still belongs to this start; call this before writing there by
        path.

        Raises:
            FolderLostError: if the directory was moved or removed, or another start has taken it
            over.
        """
        if self._lock is not None and self.run >= 0:
            self._lock.check()

    def is_lost(self) -> bool:
        """Return whether the directory belongs to another start, or was moved or removed."""
        if self._refusal is not None:
            return isinstance(self._refusal, FolderLostError)
        try:
            self.check()
        except (FolderLostError, OSError) as error:  # OSError: the file system does not answer
            return isinstance(error, FolderLostError)
        return False

    def release(self) -> None:
        """Release the directory; call this after the last write. Never raises."""
        if self._lock is not None:
            self._lock.release()

    @property
    def checkpoints(self) -> Path | None:
        return self._path("checkpoints")

    @property
    def profiles(self) -> Path | None:
        """The folder for all starts' profiles."""
        return self._path("profiles")

    @property
    def artifacts(self) -> Path | None:
        """The folder for this start's tensor logs, stacks and bad steps."""
        return self._path("runs", str(self.run), "artifacts")

    def export(self, iteration: int | None) -> Path | None:
        """Return the folder for an iteration's export; None: the best one so far."""
        return self._path("export", "best" if iteration is None else str(iteration))

    def log_file(self, rank: int) -> Path | None:
        """Return one rank's log file in this start."""
        return self._path("runs", str(self.run), "logs", f"logs_rank_{rank:03d}.txt")

    def _path(self, *names: str) -> Path | None:
        return None if self.root is None else self.root.joinpath(*names)

    def record(self, config: Config) -> None:
        """Write config.json. Call this on rank 0, after checking the configuration against the
        checkpoints."""
        if self.root is None:
            return
        self.check()
        text = (json.dumps(flatten(config), indent=2) + "\n").encode()
        for folder in (self.root / "runs" / str(self.run), self.root):
            replace_file(folder / "config.json", text)


def _prepare(lock: FolderLock, directory: str) -> None:
    """Create and lock the folders of a new start. directory: as typed."""
    try:
        lock.root.mkdir(parents=True, exist_ok=True)
        # fail now rather than at the first save
        for path in (lock.root / "checkpoints", lock.root / "export"):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory")
        lock.take()
    except OSError as error:
        reason = "this is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise StorageError(
            f"--experiment_dir={directory}: {reason}; choose a writable directory"
        ) from error


def absolute_path(directory: str) -> Path:
    """Return the directory as an absolute path, with ~ expanded.

    Raises:
        FolderLostError: if the user after ~ does not exist, or the current directory is gone.
    """
    try:
        return Path(directory).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise FolderLostError(
            f"--experiment_dir={directory}: {error}; give an absolute path"
        ) from error


# -- the lock
# --------------------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """The process that owns a directory."""

    host: str = "an unknown host"
    machine: str = ""  # see `processes.machine_name`
    pid: int = 0
    start_ticks: str = ""  # distinguishes the process from a later one with the same PID
    user: str = "an unknown user"
    since: str = "an unknown time"
    nonce: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


class FolderLock:
    """One start's lock. Rank 0 calls `take`, the other ranks `see`."""

    def __init__(self, root: Path, on_loss: OnLoss = lambda error: None) -> None:
        self.root = root
        self.run = 0
        self.nonce = ""
        self.on_loss = on_loss
        self._descriptor = -1
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        """This start's folder."""
        return self.root / "runs" / str(self.run)

    def take(self) -> None:
        """Create a new start's folder and own the directory from then on.

        Raises:
            FolderLostError: if another process owns the directory.
            OSError: if the directory cannot be written to.
        """
        runs = self.root / "runs"
        runs.mkdir(exist_ok=True)
        _sweep(runs)
        self.nonce = os.urandom(8).hex()
        new = runs / f".new-{self.nonce}"
        (new / "logs").mkdir(parents=True)
        try:
            # The system releases the flock whenever and however this process ends.
            self._descriptor = os.open(
                new / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
            os.write(
                self._descriptor,
                (json.dumps(_this_process(self.nonce)._asdict(), indent=2) + "\n").encode(),
            )
            lock_file(self._descriptor)
            while True:
                newest = newest_run(self.root)
                if newest is not None:
                    self._wait_until_free(newest)
                self.run = 0 if newest is None else newest + 1
                try:
                    os.rename(new, self.folder)
                    break
                except OSError as error:  # another start was first
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        if newest is not None:  # from an owner that was killed
            (runs / str(newest) / LOCK_FILE).unlink(missing_ok=True)
        self._beats = threading.Thread(target=self._beat, daemon=True, name="folder-lock")
        self._beats.start()

    def see(self, run: int, nonce: str) -> None:
        """Find rank 0's lock from another rank.

        Raises:
            FolderLostError: if the lock does not appear, because the ranks do not share a file
            system.
        """
        self.run, self.nonce = run, nonce
        path, deadline_s = self.folder / LOCK_FILE, time.monotonic() + VISIBLE_WITHIN_S
        while True:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if read_holder(self._descriptor).nonce == nonce:
                    return
                os.close(self._descriptor)
            if time.monotonic() > deadline_s:
                raise FolderLostError(
                    f"--experiment_dir={self.root}: {socket.gethostname()} does not see {path}, which rank 0 wrote; "
                    "all ranks need the same file system"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Check that the directory still belongs to this start.

        Raises:
            FolderLostError: if the directory was moved or removed, or another start has taken it
            over. OSError: if the file system does not answer.
        """
        newer, path = self.run + 1, self.folder / LOCK_FILE
        if os.path.lexists(self.root / "runs" / str(newer)):
            look = None
            with contextlib.suppress(OSError):
                look = _look(self.root, newer)
            raise FolderLostError(
                f"--experiment_dir={self.root}: another run took it over{f' ({look.holder})' if look else ''}, because "
                "this one gave no sign of life; this one ends and saves nothing"
            )
        try:
            with open(
                path, "rb"
            ) as file:  # a network file system may answer a stat from its cache, but not an open
                if os.path.samestat(os.fstat(file.fileno()), os.fstat(self._descriptor)):
                    return
                where = f"another directory has its place, of {read_holder(file.fileno())}"
        except (FileNotFoundError, NotADirectoryError):
            where = f"{path} is gone"
        raise FolderLostError(
            f"--experiment_dir={self.root} was moved or removed while the run used it: {where}; nothing more is "
            "written there. Move it back and start the same command again"
        )

    def release(self) -> None:
        """Release the directory if it is still ours; never raises. Call this on rank 0, after its
        last write."""
        if self._beats is None or self._ended.is_set():
            return
        self._ended.set()
        self._beats.join(BEAT_S)
        with contextlib.suppress(OSError, FolderLostError):
            self.check()
            os.unlink(self.folder / LOCK_FILE)

    def _wait_until_free(self, run: int) -> None:
        """Return once the owner has released the directory, or is known to be dead.

        Raises:
            FolderLostError: once the owner is known to be alive.
        """
        first_beat_s = None
        waits = False
        begun_s = time.monotonic()
        while (look := _look(self.root, run)) is not None:
            beats = look.is_locked or first_beat_s not in (None, look.beat_s)
            # A dead process's child, or another start that inspects the lock, may have the flock
            # for a moment.
            if (look.lives or (look.lives is None and beats)) or (
                look.is_locked and time.monotonic() - begun_s > BEAT_S
            ):
                raise FolderLostError(
                    f"--experiment_dir={self.root}: another run is using it, {look.holder}; wait for that run or "
                    "choose another directory"
                )
            if not look.is_locked:
                # reads the file system's clock: another machine's may differ
                os.utime(self._descriptor)
                silent_s = os.fstat(self._descriptor).st_mtime - look.beat_s
                if look.lives is False or silent_s > DEAD_AFTER_S:
                    return
                if first_beat_s is None:
                    first_beat_s = look.beat_s
                elif silent_s > 3 * BEAT_S and not waits:
                    text = f"waiting up to {DEAD_AFTER_S - silent_s:.0f} s for a sign of life of {look.holder}"
                    print(f"--experiment_dir={self.root}: {text}", file=sys.stderr, flush=True)
                    waits = True
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a transient file system failure
                os.utime(self._descriptor)
                try:
                    self.check()
                except FolderLostError as error:
                    self._ended.set()
                    self.on_loss(error)


def newest_run(root: Path) -> int | None:
    """Return the number of a run's newest start; None without any."""
    runs = root / "runs"
    numbers = (
        [int(path.name) for path in runs.iterdir() if path.name.isdecimal()]
        if runs.is_dir()
        else []
    )
    return max(numbers, default=None)


def is_in_use(root: Path) -> bool:
    """Return whether another process seems to own a directory: enough to spare exit.json, not to
    refuse a start."""
    with contextlib.suppress(OSError):
        if (run := newest_run(root)) is not None and (look := _look(root, run)) is not None:
            lives = look.lives or (look.lives is None and time.time() - look.beat_s < DEAD_AFTER_S)
            is_own = (look.holder.machine, look.holder.pid) == (machine_name(), os.getpid())
            return not is_own and (look.is_locked or lives)
    return False


class _Look(NamedTuple):
    """A lock's state, as inspected by a start."""

    holder: Holder
    lives: bool | None  # whether the owner runs; None if it is on another machine
    beat_s: float  # time of the newest heartbeat, by the file system's clock
    is_locked: bool  # whether another process has a flock on the file


def _look(root: Path, run: int) -> _Look | None:
    """Return the state of a start's lock; None without one."""
    path = root / "runs" / str(run) / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:  # another user's file
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        holder, beat_s = read_holder(descriptor), os.fstat(descriptor).st_mtime
        lives = None
        if holder.machine == machine_name():
            lives = not has_ended(holder.pid) and start_ticks(holder.pid) == holder.start_ticks
        return _Look(holder, lives, beat_s, not lock_file(descriptor))
    finally:
        os.close(descriptor)  # unlocks it again


def _this_process(nonce: str) -> Holder:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # no user name, as in a container
        user = f"user {os.getuid()}"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Holder(
        socket.gethostname(),
        machine_name(),
        os.getpid(),
        start_ticks(os.getpid()),
        user,
        since,
        nonce,
    )


def read_holder(descriptor: int) -> Holder:
    """Return the owner named in an open lock file; an unknown one if the file is damaged."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        values = json.loads(os.pread(descriptor, _LOCK_BYTES, 0))
        return Holder(**{**values, "pid": int(values["pid"])})
    return Holder()


def _sweep(runs: Path) -> None:
    """Delete the folders of starts that were killed before they got a number."""
    for path in runs.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)
