"""A progress bar on a terminal, and nothing at all in a log file."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBar:
    """Iterations done, rate and loss; silent where stderr is no terminal."""

    def __init__(self, bar: Any | None) -> None:
        self._bar = bar

    def update(self, iteration: int, loss: float | None = None) -> None:
        """Show that `iteration` iterations are done; a loss that is None leaves the last one standing."""
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
        bar, self._bar = self._bar, None
        if bar is not None:
            try:
                bar.close()
            except OSError:
                pass


def progress_bar(total: int, initial: int) -> ProgressBar:
    """A bar over `total` iterations of which `initial` are done, on a terminal; elsewhere one that does nothing."""
    if sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
        return ProgressBar(None)
    from tqdm import tqdm

    return ProgressBar(tqdm(total=total, initial=initial, unit="it", dynamic_ncols=True, mininterval=0.5, miniters=1))
