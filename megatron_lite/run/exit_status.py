"""A program's final message and exit code; a run also writes them to `exit.json`. Imports no
torch."""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

from megatron_lite.errors import (
    OutOfMemoryError,
    PeerError,
    RunError,
    StoppedError,
    UsageError,
    as_run_error,
)
from megatron_lite.run.durable_files import overwrite_file, replace_file
from megatron_lite.run.experiment import is_in_use
from megatron_lite.run.launch import is_first_on_machine, launch_rank, tell_torchrun

# Files of an experiment directory that programs without torch read.
EXIT_FILE, METRICS_FILE = "exit.json", "metrics.jsonl"
# Space that a running start reserves in exit.json against a full disk, which limits the message.
RESERVED_BYTES = 8192
_LONGEST_MESSAGE, _LONGEST_DETAIL = 3000, 500  # bytes; advice on memory takes 2,500

CHECKOUT = Path(__file__).resolve().parents[2]
REPORTER_S = (
    10.0  # limit on waiting for the rank that prints an error, before the start has a number
)
OWN = ("megatron_lite", "scripts")  # if missing: a bug, or Python was started in another folder


def report(
    error: BaseException, directory: str | None, *, prints: bool, rank: int = 0, run: int = -1
) -> int:
    """Print an error once, write it to exit.json and return the exit code.

    A rank that fails by itself always prints its error. A rank that only lost a peer does not
    overwrite the peer's exit.json; nor does a start without a number, which does not own the
    directory, overwrite another run's.

    prints: whether this process prints an error that every rank raises. run: negative before the
    start has a number.
    """
    if directory is not None and run < 0 and is_in_use(Path(directory)):
        directory = None
    expected = as_run_error(error) or missing_package(error)
    if expected is None:
        expected = RunError(f"{type(error).__name__}: {error}")
        traceback.print_exception(error)
    lost_peer = isinstance(expected, PeerError)
    if not prints and (
        expected.agreed or (lost_peer and not _must_report_lost_peer(directory, rank, run))
    ):
        if not tell_torchrun(str(expected)) or lost_peer or run >= 0 or not expected.recorded:
            return expected.exit_code
        # Once a rank has ended, torchrun ends all others, and the one that prints may still be
        # importing. So wait for torchrun to end this rank; if it does not, nothing was printed, for
        # example because only this rank has failed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORTER_S + min(launch_rank(), 50))
        rank = launch_rank()
    message, peer_wrote = str(expected), failure_of_peer(directory, run) is not None
    tell_torchrun(message)
    if isinstance(expected, StoppedError):
        print_page(message)
    else:
        print_error(message, rank)
    if isinstance(expected, OutOfMemoryError) and (rank == 0 or not peer_wrote):
        _say(*expected.lines())
    if expected.recorded and not (lost_peer and peer_wrote):
        status = "stopped" if isinstance(expected, StoppedError) else "failed"
        write_exit(directory, expected.exit_code, status, message, run, _details(expected))
    return expected.exit_code


def print_error(message: str, rank: int) -> None:
    """Print why this rank ends."""
    _say(f"ERROR{'' if rank == 0 else f' on rank {rank}'}: {message}")


def _say(*lines: str) -> None:
    """Print lines on standard error; ignore a closed terminal."""
    with contextlib.suppress(OSError):
        print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def print_failure(error: Exception, less_memory: str = "") -> int:
    """Print why a script failed and return its exit code; re-raise `error` if it is a bug."""
    expected = as_run_error(error, less_memory) or missing_package(error)
    if expected is None:
        raise error
    print(f"ERROR: {expected}", file=sys.stderr)
    return expected.exit_code


def leave(code: int) -> NoReturn:
    """Flush the output and end the process immediately, without running any `finally` or `atexit`.

    Library threads that still run or wait for a peer then cannot delay the exit or change its code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_page(text: str, end: str = "\n") -> None:
    """Print `text` and `end` to stdout; a reader that closes the pipe early (`--help | head`) is
    not an error."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        # otherwise the interpreter complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _must_report_lost_peer(experiment_dir: str | None, rank: int, run: int) -> bool:
    """Return whether this rank must report a lost peer that died without reporting anything.

    Survivors wait for staggered times, so that the first can write exit.json. Without an experiment
    directory rank 1 reports.
    """
    if experiment_dir is None:
        return rank == 1
    if run < 0:
        return True
    time.sleep(1.0 + 0.1 * min(rank, 50))
    return failure_of_peer(experiment_dir, run) is None


def write_exit(
    experiment_dir: str | None,
    code: int | None,
    status: str,
    message: str,
    run: int,
    details: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Replace exit.json; never raises, because a second error would hide the one being reported.

    While a start continues (code None), exit.json is padded to the space that its final content may
    need.

    details: further entries, which must fit into the reserved space.
    """
    if experiment_dir is None:
        return
    path = Path(experiment_dir) / EXIT_FILE
    content: dict[str, Any] = {
        "exit_code": code,
        "status": status,
        "message": _cut(message, _LONGEST_MESSAGE),
        **details,
        "run": max(run, 0),
        "time": round(time.time(), 3),
    }
    data = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(path, data if code is not None else data.ljust(RESERVED_BYTES))
        except OSError:
            overwrite_file(path, data)
    except OSError as error:
        if os.path.lexists(path):
            _say(
                f"WARNING: cannot write {path}, which tells how an earlier start ended: {error.strerror}"
            )


def _details(error: RunError) -> dict[str, Any]:
    """Return an error's fields for exit.json in addition to its message."""
    if isinstance(error, PeerError) and error.detail:
        return {"detail": _cut(error.detail, _LONGEST_DETAIL)}  # the backend's message
    return error.details() if isinstance(error, OutOfMemoryError) else {}


def _cut(text: str, limit_bytes: int) -> str:
    """Shorten a text to `limit_bytes` as JSON, where quotes and control characters take several
    bytes."""

    def num_bytes(length: int) -> int:
        return len(
            json.dumps(text[:length], ensure_ascii=False).encode("utf-8", "backslashreplace")
        )

    if num_bytes(len(text)) <= limit_bytes:
        return text
    return text[: bisect.bisect_right(range(len(text)), limit_bytes, key=num_bytes) - 1] + " (cut)"


def failure_of_peer(experiment_dir: str | None, run: int) -> tuple[int, str] | None:
    """Return the exit code and message of a rank of this start that ended early, from exit.json;
    None if none did.

    run: number of the start; negative before the ranks know it.
    """
    if experiment_dir is None or run < 0:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((Path(experiment_dir) / EXIT_FILE).read_text(encoding="utf-8"))
        if content["run"] == run and content["status"] in ("failed", "stopped"):
            return int(content["exit_code"]), str(content["message"])
    return None


# -- a package that is not installed
# -------------------------------------------------------------------------------


def missing_package(error: BaseException | None) -> UsageError | None:
    """Return the error to report if `error` is the import of a missing package, else None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or "." in name or name in OWN or name in sys.stdlib_module_names:
        return None
    missing = UsageError(f"{sys.executable} lacks the package {name}; {_remedy(name)}")
    missing.agreed = False  # another machine of the run may have the package
    return missing


def _remedy(name: str) -> str:
    """Return the command to type: activate the checkout's .venv if it contains the package, else
    install."""
    environment = CHECKOUT / ".venv"
    activate = f"source {_typed(environment / 'bin' / 'activate')}"
    if (
        any(environment.glob(f"lib/python*/site-packages/{name}"))
        and Path(sys.prefix) != environment
    ):
        return f"activate the environment and repeat the command: {activate}"
    if importlib.util.find_spec("torch") is not None or not (CHECKOUT / "setup.py").is_file():
        return f"install the package and repeat the command: pip install {name}"
    install = f"pip install -e {_typed(CHECKOUT)}"
    if sys.prefix == sys.base_prefix:  # many systems forbid pip outside of environments
        install = f"python3 -m venv {_typed(environment)} && {activate} && {install}"
    return f"install the project and repeat the command: {install}"


def _typed(path: Path) -> str:
    """Return a path as a user would type it: relative in the checkout, absolute elsewhere."""
    return shlex.quote(os.path.relpath(path) if Path.cwd() == CHECKOUT else str(path))


def name_missing_package(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print one line about a missing package and exit with code 2; installed as `sys.excepthook`.

    Any other error is printed as usual.
    """
    missing = missing_package(error)
    if missing is None:
        sys.__excepthook__(kind, error, traceback)
        return
    missing.agreed = True  # on this machine
    sys.exit(report(missing, None, prints=is_first_on_machine()))
