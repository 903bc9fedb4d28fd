"""Memory of this machine that a process can still get. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, or of the whole machine


def available_bytes() -> int:
    """Return the bytes that the kernel could give, within the limit of a container; all there is without /proc."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        if (line := re.search(r"^MemAvailable: +([0-9]+) kB$", MEMINFO.read_text(), re.M)) is not None:
            found = int(line[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        limit, used = (int((CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = (CONTROL_GROUP / "memory.stat").read_text()
        cache = re.search(r"^inactive_file ([0-9]+)$", statistics, re.M)
        found = min(found, max(0, limit - used + (int(cache[1]) if cache else 0)))
    return found
