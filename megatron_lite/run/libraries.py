"""Settings of the C and OpenMP libraries, to be made before torch is imported: waiting threads and freed memory.

Neither changes a number. The figures are for a step of a GPT-2 of 10.7M parameters with two threads on two cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

# Turns of a waiting loop before a thread of GNU OpenMP sleeps: 0.2 to 0.6 ms, depending on the processor. Alone and
# with another program on one of the two cores, a step took 216 and 438 ms with 3,000 turns, 205 and 540 with 10,000,
# 202 and 675 with 20,000, and 200 and over 1,600 with the library's default, 300,000.
SPINS = 10_000

MIB = 2**20
# Parameters of glibc's mallopt. By default glibc returns freed memory to the kernel and takes it again, up to 5,000
# pages a step. With these values a step needs one new page, takes 0.98 of the time, and no more memory.
MALLOPT = {
    -3: 32 * MIB,  # M_MMAP_THRESHOLD: smaller blocks come from the heap; the largest value that glibc accepts
    -1: 1024 * MIB,  # M_TRIM_THRESHOLD: free memory at the end of the heap that the process keeps
    -2: 64 * MIB,  # M_TOP_PAD: memory that the heap takes from the kernel at a time; untouched pages cost nothing
}


def prepare_libraries() -> None:
    """Limit how long OpenMP's threads spin, and keep freed memory. Call this before importing torch."""
    limit_spinning()
    keep_freed_memory()


def limit_spinning() -> None:
    """Let OpenMP's threads sleep soon, unless the user says otherwise."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for libraries that do not know the next variable
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, unless the user sets its variables."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size_bytes in MALLOPT.items():
            mallopt(parameter, size_bytes)
