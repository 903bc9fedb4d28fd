"""Errors that a user can cause or must act on, each with its exit code.

`exit.json` in the experiment directory repeats the code, because torchrun flattens every failure to
1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from errno import EACCES, EDQUOT, EFBIG, EIO, EISDIR, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import Any, NamedTuple

# Commands that are also scripts in a checkout.
SCRIPTS = (
    "prepare_data",
    "generate",
    "evaluate",
    "convert_checkpoint",
    "verify_checkpoint",
    "watch_run",
    "report_run",
    "plot_run",
    "compare_runs",
    "sweep",
)
LONGEST_WORD = 1000  # characters shown in a message
EXIT_DONE = 0
EXIT_PREEMPTED = 75

STORAGE_ERRORS = (EACCES, EDQUOT, EFBIG, EIO, EISDIR, ENOSPC, ENOTDIR, EPERM, EROFS)
# Phrases of CUDA, cuBLAS and NCCL, which allocate memory outside torch's allocator.
_CUDA_WITHOUT_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)
# The rest of a word after :// with user or password, or after a key's name in a query; bounds keep
# it fast.
_CREDENTIALS = re.compile(
    r"(?i)(:/+)[^/\s@:]{0,500}(?::\S{0,1000})?@\S*"
    r"|(:/\S{0,1500}?[?&#;][^=&/\s]{0,50}(?:sig|token|key|secret|pass|pw|cred|auth|jwt|bearer)[^=&\s]{0,50}=)\S+"
)
OUT_OF_MEMORY = "out of memory: "  # before the words of whatever could not allocate
LESS_MEMORY = "try a smaller --micro_batch_size, then --zero_stage=2 or 3, more ranks, or a larger --cross_entropy_splits"


def without_credentials(text: str) -> str:
    """Return a text with each address hidden by `...` from its user, password or key on."""
    return _CREDENTIALS.sub(lambda match: f"{match[1] or match[2]}...", text)


def check_addresses(words: Sequence[str]) -> None:
    """Check that no word of a command line contains a secret in an address, which would be logged
    and saved.

    Raises: UsageError for the first one; the message hides the secret.
    """
    for word in words:
        if (text := without_credentials(word)) != word:
            raise UsageError(
                f"{text}: write addresses without user, password or key, because they are logged and saved; libraries "
                "find credentials in the environment, in their own files or by the role of the machine"
            )


def as_installed(text: str) -> str:
    """Return a text in which installed commands replace script names, unless there is a
    checkout."""
    if (Path(__file__).resolve().parents[1] / "scripts" / "prepare_data.py").is_file():
        return text
    return re.sub(rf"(?:python )?scripts/({'|'.join(SCRIPTS)})\.py", r"megatron_lite \1", text)


def spelled(text: str, kept: str = "") -> str:
    """Return a text with control characters escaped, except `kept`: a document must not control a
    terminal."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


class RunError(ValueError):
    """An expected failure: printed as one clear message without a traceback."""

    exit_code = 1
    agreed = False  # whether every rank raises it together, so that only rank 0 prints it
    recorded = True  # whether it belongs in exit.json
    experiment_dir: str | None = None  # where a command-line error may write exit.json

    def __str__(self) -> str:
        """Return the message with control characters escaped: a downloaded file's name must not
        control a terminal.

        A word that would fill a screen is cut, and a secret in an address is hidden: a file may
        contain one.
        """
        said = without_credentials(as_installed(super().__str__()))
        return spelled(re.sub(rf"\S{{{LONGEST_WORD + 1},}}", _beginning, said), "\n")


def _beginning(word: re.Match[str]) -> str:
    return f"{word[0][:100]}... ({len(word[0])} characters)"


class UsageError(RunError):
    """A wrong flag or a contradiction between flags."""

    exit_code = 2
    agreed = True


class LauncherError(UsageError):
    """Contradictory launcher variables: the rank may be wrong too, so every process prints the
    error."""

    agreed = False


class DataError(RunError):
    """Input data that is missing, damaged or unfit for the model."""

    exit_code = 3


class CheckpointError(RunError):
    """No usable checkpoint, or one that does not fit the command line."""

    exit_code = 4
    agreed = True


class RotatedError(CheckpointError):
    """A checkpoint that its run deleted or replaced while it was read."""


class NumericsError(RunError):
    """Training has diverged: every recent update was dropped."""

    exit_code = 5
    agreed = True


class PeerError(RunError):
    """Another rank died or stopped answering."""

    exit_code = 6
    detail = ""  # the backend's message
    names_rank = False  # whether the message names the rank


class WorkerError(RunError):
    """A process that reads data for this one was killed or has failed; training itself has not."""

    exit_code = 6


class UnreachableError(PeerError):
    """A machine that is silent, so that a save on all ranks cannot finish."""

    names_rank = True


class StoppedError(PeerError):
    """A stop signal to this rank or another one, before there was anything to save."""

    exit_code = EXIT_PREEMPTED
    agreed = True


class LinkError(RunError):
    """A link between ranks that is too slow, or clocks that disagree."""

    exit_code = 6
    agreed = True


class Remedy(NamedTuple):
    """An option that saves memory, and how much it saves on its own."""

    flag: str  # name of the option; world_size means more ranks
    value: int | str
    saving_bytes: int  # per rank, by the plan
    append: str  # flags to append to the command; empty for more ranks


class OutOfMemoryError(RunError):
    """The device or the host ran out of memory."""

    exit_code = 7
    free_bytes = 0  # what a refused run could have had, per rank
    remedies: Sequence[Remedy] = ()  # in the order in which to try them
    snapshot = ""  # file with what was allocated on the GPU

    def lines(self) -> list[str]:
        """Return the log lines after the message: each remedy with its saving, and the snapshot."""
        lines = ["by the plan, each of these alone saves:"] if self.remedies else []
        for remedy in self.remedies:
            name = remedy.append or f"more ranks: {remedy.value}"
            lines.append(f"  {name:<48} {remedy.saving_bytes / 2**30:>9,.2f} GiB")
        if self.snapshot:
            lines.append(
                f"memory snapshot in {self.snapshot}; https://pytorch.org/memory_viz shows it"
            )
        return lines

    def details(self) -> dict[str, Any]:
        """Return exit.json's content in addition to the message."""
        found = {
            "advice": [remedy._asdict() for remedy in self.remedies],
            "memory_snapshot": self.snapshot,
        }
        return {name: value for name, value in found.items() if value}


class StorageError(RunError):
    """A directory that is not writable, or a full disk."""

    exit_code = 8
    agreed = True


class FolderLostError(StorageError):
    """An experiment directory that does not exist or is not this run's (any more): nothing may be
    written there."""

    recorded = False


def shorten(problems: Sequence[str], limit: int = 5) -> str:
    """Join the first `limit` problems and count the rest."""
    more = f" (and {len(problems) - limit} more)" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def lost_peer(
    error: BaseException,
    message: str = "another rank died or stopped answering; see its own message",
) -> PeerError:
    """Return the error to show for a backend's error about a peer."""
    lost = PeerError(message)
    lost.detail = " ".join(str(error).split())[:500]
    return lost


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a backend's error means that another rank is gone, not that this rank
    failed."""
    own_fault = ("ncclInvalidUsage", "ncclUnhandledCudaError", "ncclSystemError", "out of memory")
    if any(sign in str(error) for sign in own_fault):
        return False
    signs = (
        "gloo",
        "Connection closed by peer",
        "NCCL",
        "Timed out",
        "timed out",
        "Broken pipe",
        "Connection reset",
    )
    backend_error = type(error).__name__ in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    )
    return backend_error or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def as_run_error(error: BaseException, less_memory: str = LESS_MEMORY) -> RunError | None:
    """Return the expected failure behind an exception, or None if the exception is a defect of the
    program.

    `less_memory`: advice for an out-of-memory error.
    """
    if isinstance(error, RunError):
        return error
    kind = type(error).__name__
    signs = ("DefaultCPUAllocator", "Storage size calculation overflowed", *_CUDA_WITHOUT_MEMORY)
    if (
        isinstance(error, MemoryError)
        or kind == "OutOfMemoryError"
        or any(sign in str(error) for sign in signs)
    ):
        first_line = (str(error).splitlines() or ["out of memory"])[0]
        return OutOfMemoryError(f"{OUT_OF_MEMORY}{first_line}; {less_memory}")
    if isinstance(error, OSError) and error.errno == ENAMETOOLONG:
        return DataError(f"{error.filename}: the file name is too long; write a shorter path")
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        where = f": {error.filename}" if error.filename else ""
        storage_error = StorageError(
            f"{error.strerror}{where}; free some space, or choose another --experiment_dir"
        )
        storage_error.agreed = False  # only this rank knows of it so far
        return storage_error
    if is_lost_peer(error):
        return lost_peer(error)
    return None


class DamagedError(Exception):
    """An unusable checkpoint; the message names the file and the reason."""
