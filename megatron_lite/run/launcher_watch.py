"""End a rank whose launcher is gone: if only torchrun is killed, orphaned ranks would keep the
GPUs.

Only torchrun's ranks are watched. A rank started by hand, nohup or srun may outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from megatron_lite.distributed import processes
from megatron_lite.distributed.processes import proc_file, stat_fields
from megatron_lite.errors import PeerError

POLL_S = 0.25
GONE = 0  # instead of the launcher's PID
REAPER = b"slurmstepd"  # adopts orphans, like process 1, and belongs to another user
MARKS = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")  # variables that torchrun sets for each rank
# from the kernel when the parent dies; its number, 5, is the seconds that remain
DEATH_SIGNAL = signal.SIGTRAP
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # Linux: a process that is shutting down


class LauncherWatch:
    """Ends this process within five seconds after torchrun has died; does nothing under another
    launcher.

    on_gone: called in a thread with the reason before the process ends. The session replaces it to
    write exit.json too.
    """

    def __init__(self) -> None:
        self.on_gone: Callable[[str], None] = _print
        marks = {name: os.environ[name] for name in MARKS if name in os.environ}
        launcher = launcher_of(marks)
        if launcher is None:
            return
        if launcher != GONE:
            end_with_parent()
        arguments = (launcher, marks.get("RANK", "0"))
        threading.Thread(
            target=self._watch, args=arguments, daemon=True, name="launcher-watch"
        ).start()

    def _watch(self, launcher: int, rank: str) -> None:
        try:
            while launcher != GONE and not processes.has_ended(launcher):
                time.sleep(POLL_S)
            number = f"process {launcher} " if launcher != GONE else ""
            self.on_gone(
                f"torchrun ({number}on {socket.gethostname()}), which started rank {rank}, is gone: the rank ends and "
                "saves nothing. If torchrun did not start it, unset TORCHELASTIC_RUN_ID"
            )
        finally:
            os._exit(PeerError.exit_code)


def launcher_of(marks: Mapping[str, str]) -> int | None:
    """Return the PID of the torchrun that started this process, possibly through a script; GONE if
    it has ended.

    Return None if torchrun does not seem to have started this process.
    """
    if MARKS[0] not in marks:
        return None
    while True:
        parent = os.getppid()
        launcher = _launcher_above(parent, marks)
        fields = stat_fields(parent)
        # An exiting parent has no readable /proc entries, but is still the parent.
        if not (int(fields[6]) & _PF_EXITING if fields else os.getppid() != parent):
            return launcher
        time.sleep(0.001)


def _launcher_above(parent: int, marks: Mapping[str, str]) -> int | None:
    if not processes.PROC.is_dir():
        return parent if parent > 1 else GONE
    # a script between torchrun and this process
    while parent > 1 and _environment(parent).items() >= marks.items():
        fields = stat_fields(parent)
        parent = int(fields[1]) if fields else os.getppid()
    # torchrun gives each rank a session; a shell with old variables does not
    with contextlib.suppress(OSError):
        if parent == 0 or os.getsid(parent) == os.getsid(0):
            return None
    # A torchrun, or any other program that starts ranks with torch's library.
    if b"torch" in proc_file(parent, "cmdline") or b"libtorch" in proc_file(parent, "maps"):
        return parent
    adopted = (
        parent == 1 or proc_file(parent, "comm").strip() == REAPER or bool(_environment(parent))
    )
    return GONE if adopted else None


def _environment(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if unreadable."""
    lines = proc_file(pid, "environ").decode("utf-8", "replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def end_with_parent() -> None:
    """Make the kernel end this process 5 s after its parent, even while a library has the GIL;
    Linux only.

    The handler of DEATH_SIGNAL must not need Python: it is the C function `alarm`, whose argument,
    the signal number, is the number of seconds until SIGALRM ends the process.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        libc = ctypes.CDLL(None)
        prctl, set_handler = libc.prctl, libc.signal
        set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        set_handler(DEATH_SIGNAL, ctypes.cast(libc.alarm, ctypes.c_void_p))
        prctl(_PR_SET_PDEATHSIG, DEATH_SIGNAL)


def _print(message: str) -> None:
    # later: the watch begins before slow imports
    from megatron_lite.run.launch import is_first_on_machine

    if is_first_on_machine():
        print(f"ERROR: {message}", file=sys.stderr, flush=True)
