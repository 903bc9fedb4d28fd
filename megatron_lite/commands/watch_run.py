"""Follow a run on a page that updates itself, from any machine that sees the folder of the run.

    megatron_lite watch_run EXPERIMENT_DIR [--interval_s=2] [--once]

Ctrl-C ends it. The run is not affected.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.checkpoint.names import no_folder
from megatron_lite.cli.script_parser import ScriptParser, number
from megatron_lite.errors import UsageError
from megatron_lite.reports.watch_page import page
from megatron_lite.reports.watched_run import WatchedRun, shows_unicode
from megatron_lite.run.exit_status import print_failure, print_page

# Terminal sequences: alternate screen without cursor, and back; home; clear to the end of the line
# and of the screen.
ENTER, LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME = "\033[H"
CLEAR_LINE = "\033[K"
CLEAR_BELOW = "\033[J"
SHORTEST_S, LONGEST_S = 0.1, 3600.0
WIDEST = 160  # columns


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Show the page until Ctrl-C, or once; return the exit code."""
    parser = ScriptParser(__doc__, prog=program)
    parser.add_argument("experiment_dir", type=Path, help="the --experiment_dir of the run")
    seconds = number(float, SHORTEST_S, LONGEST_S)
    parser.add_argument(
        "--interval_s", type=seconds, default=2.0, help="seconds between updates (default: 2)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one page and exit, as when stdout is not a terminal",
    )
    options = parser.parse_args(arguments)
    root: Path = options.experiment_dir
    if problem := no_folder(root):
        return print_failure(UsageError(f"{problem}; give the --experiment_dir of a run"))
    run = WatchedRun(root)
    with contextlib.suppress(KeyboardInterrupt, OSError):  # OSError: the terminal is gone
        if options.once or not sys.stdout.isatty():
            print_page("\n".join(_page(run)))
        else:
            # a parent may have made its children ignore SIGINT
            for caught in (signal.SIGINT, signal.SIGTERM):
                signal.signal(caught, signal.default_int_handler)
            with _other_screen():
                while True:
                    _show(_page(run))
                    time.sleep(options.interval_s)
    return 0


def _page(run: WatchedRun) -> list[str]:
    now_s = time.time()
    run.update(now_s)
    return page(run, now_s, min(_size().columns, WIDEST), shows_unicode())


def _show(lines: Sequence[str]) -> None:
    """Overwrite the screen with as many lines as fit."""
    rows = lines[: max(_size().lines, 1)]
    sys.stdout.write(HOME + "\r\n".join(row + CLEAR_LINE for row in rows) + CLEAR_BELOW)
    sys.stdout.flush()


def _size() -> os.terminal_size:
    """Return the current size of the terminal, ignoring COLUMNS; without a terminal, the size from
    the environment."""
    if sys.stdout.isatty():
        return os.get_terminal_size(sys.stdout.fileno())
    return shutil.get_terminal_size()


@contextlib.contextmanager
def _other_screen() -> Iterator[None]:
    """Use the alternate screen inside the block, and restore the terminal afterwards."""
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
