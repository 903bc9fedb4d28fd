"""Settings of the C and OpenMP libraries, to be made before torch is imported: threads, their waiting, freed memory.

None changes a number. The figures are for a step of a GPT-2 of 10.7M parameters with two threads on two cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from megatron_lite.run.threads import available_cores

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
    """Count cores, let OpenMP give all threads and not spin long, keep freed memory. Call before importing torch."""
    available_cores()
    give_all_threads()
    limit_spinning()
    keep_freed_memory()
    quiet_lost_connections()


def give_all_threads() -> None:
    """Drop variables with which OpenMP gives fewer threads than asked, under load or always.

    oneDNN would leave a part of each product uncomputed, and a resumed run would add in another order.
    """
    for name in ("OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS"):
        os.environ.pop(name, None)


def limit_spinning() -> None:
    """Let OpenMP's threads sleep soon, unless the user says otherwise."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
        if "KMP_BLOCKTIME" not in os.environ:  # libraries that do not know GOMP_SPINCOUNT know one of these
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, unless the user sets its variables."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size_bytes in MALLOPT.items():
            mallopt(parameter, size_bytes)


def quiet_lost_connections() -> None:
    """Let torch's C++ log errors only, unless the user says otherwise.

    As a warning it prints a C++ stack of forty lines for every connection that a lost rank closes, before our message.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def limit_tokenizer_threads(threads: int) -> None:
    """Give the tokenizers package so many threads in this process; call before the first text is encoded."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}
