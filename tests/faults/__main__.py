"""SIGKILL at random moments, many times: `python -m tests.faults --kills=1000 --seed=1`; see
tests/faults/kills.py.

This process adopts the orphans of killed launchers, as process 1 would. It imports no torch, so
that no rank can take it for its launcher; the harness below it does the work.
"""

import ctypes
import os
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Start the harness, reap whatever comes back to this process meanwhile, and return the
    harness's exit code."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    harness = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.kills", *sys.argv[1:]], env={**os.environ, **quiet}
    )
    while True:
        pid, status = os.wait()
        if pid == harness.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
