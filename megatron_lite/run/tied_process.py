"""Become another program that is asked to stop when the process which started it ends, however that
ends: python tied_process.py PARENT PROGRAM WORDS...

The kernel sends SIGTERM, after which a run saves and ends; Linux only. A process that also runs
threads cannot safely ask for this between `fork` and `exec`, so this program does and is replaced.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program, *words = sys.argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has ended before the call
            os._exit(1)
    os.execv(program, [program, *words])
