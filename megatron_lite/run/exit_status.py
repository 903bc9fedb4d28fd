"""How a start of the program ends: one message, one exit code, and both in `exit.json`. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from megatron_lite.errors import PeerError, as_run_error
from megatron_lite.run.durable_files import replace_file

EXIT_FILE = "exit.json"


def report(error: BaseException, experiment_dir: str | None, rank: int, run: int = 0) -> int:
    """Print an error once and leave it in exit.json; returns the exit code.

    Of an error that every rank raises, rank 0 speaks. Otherwise the failing rank speaks itself, and a rank that only
    lost its peer keeps what the peer wrote.
    """
    expected = as_run_error(error)
    code = expected.exit_code if expected is not None else 1
    message = str(expected) if expected is not None else f"{type(error).__name__}: {error}"
    agreed = expected is not None and expected.agreed
    if rank > 0 and (agreed or (isinstance(expected, PeerError) and not _must_speak(experiment_dir, rank, run))):
        return code
    if expected is None:
        traceback.print_exception(error)
    print(f"ERROR{'' if rank == 0 else f' on rank {rank}'}: {message}", file=sys.stderr, flush=True)
    heard = isinstance(expected, PeerError) and _written_by(experiment_dir, run)
    if not heard and (expected is None or expected.recorded):
        write_exit(experiment_dir, code, "failed", message, run)
    return code


def print_failure(error: Exception, less_memory: str) -> int:
    """Print why a script fails; returns its exit code. What nobody expected is raised again."""
    expected = as_run_error(error, less_memory)
    if expected is None:
        raise error
    print(f"ERROR: {expected}", file=sys.stderr)
    return expected.exit_code


def leave(code: int) -> NoReturn:
    """End the process here and now, with nothing unsaid: nothing that is left, not a thread of a library that still
    works or waits for a peer, can keep it or change its exit code. No `finally` or `atexit` of anyone is run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_page(text: str) -> None:
    """Print to stdout, to the end or until it takes no more (`--help | head`)."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its exit


def _must_speak(experiment_dir: str | None, rank: int, run: int) -> bool:
    """Whether this rank, which only lost a peer, has to say so because the peer died without a word, as may rank 0.

    One after the other the survivors give the others time to write exit.json. Without one, rank 1 speaks.
    """
    if experiment_dir is None:
        return rank == 1
    time.sleep(1.0 + 0.1 * min(rank, 50))
    return not _written_by(experiment_dir, run)


def write_exit(experiment_dir: str | None, code: int | None, status: str, message: str, run: int = 0) -> None:
    """Replace exit.json. A directory that cannot be written is no reason to hide the error being reported."""
    if experiment_dir is None:
        return
    path = Path(experiment_dir) / EXIT_FILE
    content = {"exit_code": code, "status": status, "message": message, "run": run, "time": round(time.time(), 3)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError:
        pass


def _written_by(experiment_dir: str | None, run: int) -> bool:
    """Whether a peer of this start has already said how it failed."""
    if experiment_dir is None:
        return False
    try:
        content = json.loads((Path(experiment_dir) / EXIT_FILE).read_text(encoding="utf-8"))
        return bool(content["run"] == run and content["status"] == "failed")
    except (OSError, ValueError, KeyError, TypeError):
        return False
