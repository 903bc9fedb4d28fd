"""The end of a rank whose launcher is gone: torchrun killed alone would leave ranks that nobody sees, holding the GPUs.

Only ranks of torchrun are watched. One that was started by hand, by nohup or by srun may outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_lite.errors import PeerError

PROC = Path("/proc")
POLL_S = 1.0  # where the kernel does not report the end of a process that is not a child
GONE = 0  # in place of the launcher's process number
REAPER = "slurmstepd"  # adopts orphans besides process 1, and belongs to another user
MARKS = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")  # variables that torchrun sets for each rank
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # Linux: a process that gives back its memory


class LauncherWatch:
    """Ends this process within five seconds after torchrun has died; does nothing for a rank of another launcher.

    on_gone: called with the reason before the end, in a thread. Set by whoever can leave more than a line on stderr.
    """

    def __init__(self) -> None:
        self.on_gone: Callable[[str], None] = _print
        self._marks = {name: os.environ[name] for name in MARKS if name in os.environ}
        launcher = launcher_of(self._marks)
        if launcher is None:
            return
        if launcher != GONE:
            end_with_parent()
        threading.Thread(target=self._watch, args=(launcher,), daemon=True, name="launcher-watch").start()

    def _watch(self, launcher: int) -> None:
        try:
            _wait_for_end(launcher, lambda: launcher_of(self._marks) == launcher)
            number = f"process {launcher} " if launcher != GONE else ""
            rank = self._marks.get("RANK", "0")
            self.on_gone(
                f"torchrun ({number}on {socket.gethostname()}), which started rank {rank}, is gone: the rank ends and "
                "saves nothing. If torchrun did not start it, unset TORCHELASTIC_RUN_ID"
            )
        finally:
            os._exit(PeerError.exit_code)


def launcher_of(marks: Mapping[str, str]) -> int | None:
    """Return the number of the torchrun process that started this one, perhaps through a script; GONE if it has ended.

    Return None if torchrun did not start this process, as far as anyone can tell.
    """
    if MARKS[0] not in marks:
        return None
    while True:
        parent = os.getppid()
        launcher = _launcher_above(parent, marks)
        if not _is_ending(parent):
            return launcher
        time.sleep(0.001)


def _launcher_above(parent: int, marks: Mapping[str, str]) -> int | None:
    if not PROC.is_dir():
        return parent if parent > 1 else GONE
    while parent > 1 and _environment(parent).items() >= marks.items():  # a script between torchrun and this process
        parent = _parent_of(parent)
    if parent == 0 or _same_session(parent):  # torchrun gives each rank a session; a shell with old variables does not
        return None
    if _runs_torch(parent):
        return parent
    adopted = parent == 1 or _name(parent) == REAPER or bool(_environment(parent))
    return GONE if adopted else None


def end_with_parent() -> None:
    """Let the kernel end this process 5 s after its parent, even while a library holds Python's lock; Linux only.

    The kernel sends a signal when the parent dies. Its handler must not need Python: the C function `alarm` is called
    with the number of the signal, which is the number of seconds until the kernel ends the process by SIGALRM.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        libc = ctypes.CDLL(None)
        prctl, set_handler = libc.prctl, libc.signal
        set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        set_handler(signal.SIGTRAP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        prctl(_PR_SET_PDEATHSIG, signal.SIGTRAP)


def _wait_for_end(pid: int, is_there: Callable[[], bool]) -> None:
    """Return when a process has ended. is_there: whether its number still means that process."""
    if pid == GONE:
        return
    descriptor = None
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: before Linux 5.3, and elsewhere
        descriptor = os.pidfd_open(pid)
    if descriptor is not None and is_there():
        select.select([descriptor], [], [])
        return
    while is_there():
        time.sleep(POLL_S)


def _print(message: str) -> None:
    from megatron_lite.run.launch import is_first_on_machine  # later: the watch begins before slow imports

    if is_first_on_machine():
        print(f"ERROR: {message}", file=sys.stderr, flush=True)


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if this user may not read it."""
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return os.getppid()


def _is_ending(pid: int) -> bool:
    """Whether the parent of this process is about to end: it then shows nothing of itself, but is the parent still."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        flags = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[6]
        return bool(int(flags) & _PF_EXITING)
    return os.getppid() != pid


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text().strip()
    return ""


def _same_session(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == os.getsid(0)
    return False


def _runs_torch(pid: int) -> bool:
    """Whether a process is a torchrun, or any other program that starts ranks with torch's library."""
    with contextlib.suppress(OSError):
        if b"torch" in (PROC / str(pid) / "cmdline").read_bytes():
            return True
        return b"libtorch" in (PROC / str(pid) / "maps").read_bytes()
    return False
