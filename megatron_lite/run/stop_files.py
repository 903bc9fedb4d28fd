"""Files that ask a run to stop or to save, for jobs that nobody can signal."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from megatron_lite.run.stop_signal import STOP_FILE, TimeLimit

LOOK_S = 1.0  # at least, between looks


class StopFiles:
    """The stop files of a run; only rank 0 looks for them.

    Attributes:
        stop: requests a save and the end of the run.
        save: requests a save.
        limit: has passed once `stop` exists; see `StopSignal.limits`.
    """

    def __init__(self, stop: Path, save: Path) -> None:
        self.stop, self.save = stop, save
        self._looked_s, self._found = -math.inf, set[Path]()
        self.limit = TimeLimit(STOP_FILE, lambda: -1.0 if self.found(stop) else math.inf)

    def found(self, path: Path) -> bool:
        """Return whether one of the files exists, or did a moment ago. A folder of that name, which
        stays, does not count."""
        if (now_s := time.monotonic()) - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._found = {one for one in (self.stop, self.save) if os.path.isfile(one)}
        return path in self._found

    def obeyed(self, path: Path) -> None:
        """Remove one of the files if it was found, so that the next start trains."""
        if path in self._found:
            self._found.remove(path)
            with contextlib.suppress(OSError):
                path.unlink()
