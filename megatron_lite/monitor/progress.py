"""A progress bar on a terminal, and nothing in a log file."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class ProgressBar:
    """Iterations done, rate and loss; silent where stderr is no terminal, or with `shown` off."""

    def __init__(self, total: int, done: int, shown: bool = True) -> None:
        self._bar: Any = None
        if shown and sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="it", dynamic_ncols=True, mininterval=0.5, miniters=1)

    def update(self, iteration: int, loss: float | None) -> None:
        """Show that `iteration` iterations are done; a loss of None keeps the last one."""
        if self._bar is None:
            return
        try:
            if loss is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update(iteration - self._bar.n)
        except OSError:  # the terminal is gone
            self._bar = None

    def close(self) -> None:
        """Leave the bar as it stands and move on to the next line."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
