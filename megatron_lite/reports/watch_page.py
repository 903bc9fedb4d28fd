"""Write the page of text that follows a run."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_lite.reports.watched_run import SavedFolder, WatchedRun, sparkline
from megatron_lite.run.experiment import DEAD_AFTER_S
from megatron_lite.run.progress_line import format_duration, printable

NARROWEST = 40
RUNNING = "running"  # the state of a running run
SHOWN_CHECKPOINTS, SHOWN_WARNINGS = 4, 5
LARGEST, LONGEST_S = 1e18, 1e10  # numbers and times to show
LATE = 3.0  # times the usual time between two lines: a longer wait is reported


def short(value: float) -> str:
    """Return a number with few digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


# Rows of curves: (label, phase, number's name, how to show it).
CURVES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("training loss", "training", "loss", "{:.4f}".format),
    ("validation loss", "validation", "loss", "{:.4f}".format),
    ("averaged weights", "validation", "averaged_loss", "{:.4f}".format),
    ("gradient norm", "training", "grad_norm", short),
    ("learning rate", "training", "learning_rate", "{:.2e}".format),
    ("tokens/s", "training", "tokens_per_sec", short),
)
# Numbers of the newest record: (name, how to show it).
NUMBERS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("step_time_ms", lambda ms: f"{short(ms)} ms/step"),
    ("data_wait_ms", lambda ms: f"data wait {short(ms)} ms"),
    ("mfu", "mfu {:.1%}".format),
    ("tokens_per_sec_per_gpu", "{:,.0f} tokens/s per rank".format),
    ("model_tflops", lambda tflops: f"{short(tflops)} TFLOP/s per device"),
    ("max_reserved_mib", "memory {:,.0f} MiB".format),
    ("batch_size", "batch size {:,.0f}".format),
    ("consumed_tokens", "{:,.0f} tokens".format),
)


def page(run: WatchedRun, now_s: float, width: int, unicode: bool) -> list[str]:
    """Return the page's lines, none longer than `width`, at the time `now_s` (since 1970)."""
    width = max(width, NARROWEST)
    blocks = [
        [*_head(run, now_s), *_progress(run, now_s, width, unicode)],
        list(_curves(run, width, unicode)),
        [*_numbers(run, width), *_updates(run)],
        [
            *_folders("checkpoints", run.checkpoints, now_s),
            *_folders("exports", run.exports, now_s),
        ],
        list(_warnings(run, width)),
    ]
    lines = [line for block in blocks if block for line in ("", *block)][1:]
    return [_cut(line, width, unicode) for line in lines]


def _head(run: WatchedRun, now_s: float) -> Iterator[str]:
    start = "" if run.start is None else f" | start {run.start + 1}"
    yield f"{run.name}{start} | {_state(run, now_s)}"
    message = str(run.ending.get("message") or "")
    if run.ending.get("status") != "running" and message:
        yield message
    newest = max(
        run.metrics.last.values(), key=lambda record: _float(record.get("time")) or 0.0, default={}
    )
    time_s, usual_s = _float(newest.get("time")), _usual_interval_s(run)
    if time_s is not None:
        age_s = max(now_s - time_s, 0.0)
        line = f"last line {format_duration(age_s)} ago"
        if usual_s is not None and _state(run, now_s) == RUNNING and age_s > LATE * usual_s:
            line += f"; the lines before came every {format_duration(usual_s)}"
        yield line
    elif run.problem is not None and not run.metrics.phases():
        yield "no record yet"


def _state(run: WatchedRun, now_s: float) -> str:
    status, code = run.ending.get("status"), run.ending.get("exit_code")
    ended_s = _float(run.ending.get("time"))
    if status in ("done", "stopped", "failed") and ended_s is not None:
        return f"{status} {format_duration(max(now_s - ended_s, 0.0))} ago, exit code {code}"
    if run.heartbeat_s is not None:
        silent_s = now_s - run.heartbeat_s
        if silent_s > DEAD_AFTER_S:
            return (
                f"no heartbeat for {format_duration(silent_s)}: the process or its machine is gone"
            )
        return "starting" if status == "starting" else RUNNING
    return "not running" if status is None else "killed: it left no ending"


def _progress(run: WatchedRun, now_s: float, width: int, unicode: bool) -> Iterator[str]:
    last = run.metrics.last.get("training", {})
    done, total = last.get("iteration"), last.get("train_iters")
    if type(done) is not int or type(total) is not int or total <= 0:
        return
    words = f"iteration {done:,} of {total:,}  {done / total:.0%}"
    left_s, time_s = _float(last.get("remaining_seconds")), _float(last.get("time"))
    if left_s is not None and time_s is not None and done < total and _state(run, now_s) == RUNNING:
        left_s = min(max(left_s - (now_s - time_s), 0.0), LONGEST_S)
        until = time.strftime("%a %H:%M", time.localtime(now_s + left_s))
        words += f"  {format_duration(left_s)} left, until {until}"
    full, empty = ("█", "░") if unicode else ("#", ".")
    length = min(width - len(words) - 2, 40)
    filled = min(round(length * done / total), length)
    yield words if length < 10 else f"{full * filled}{empty * (length - filled)}  {words}"


def _curves(run: WatchedRun, width: int, unicode: bool) -> Iterator[str]:
    for label, phase, name, show in CURVES:
        curve = run.metrics.curve(phase, name)
        finite = curve.finite()
        if not len(finite):
            continue
        last = show(float(curve.values[-1]))
        bounds = f"{show(float(finite.values.min()))} to {show(float(finite.values.max()))}"
        drawn = sparkline(curve.values, max(width - 16 - 12 - 26, 8), unicode)
        yield f"{label:16} {last:>10}  {drawn}  {bounds}"


def _numbers(run: WatchedRun, width: int) -> Iterator[str]:
    last = run.metrics.last.get("training", {})
    shown = [show(value) for name, show in NUMBERS if (value := _float(last.get(name))) is not None]
    line = ""
    for text in shown:
        if line and len(line) + 3 + len(text) > width:
            yield line
            line = ""
        line += (" | " if line else "") + text
    if line:
        yield line


def _updates(run: WatchedRun) -> Iterator[str]:
    skipped = _float(run.metrics.last.get("training", {}).get("skipped_iters"))
    if skipped:
        reasons = list(run.metrics.dropped.values())
        yield f"{skipped:,.0f} updates dropped" + (f"; the last, {reasons[-1]}" if reasons else "")
    if len(run.metrics.starts) > 1:
        places = ", ".join(
            dict.fromkeys(f"{start.iteration:,}" for start in run.metrics.starts[-5:])
        )
        yield f"{len(run.metrics.starts)} starts; the newest log from iterations {places}"


def _folders(name: str, saved: Sequence[SavedFolder], now_s: float) -> Iterator[str]:
    newest = saved[:SHOWN_CHECKPOINTS]
    shown = [f"{one.name} ({format_duration(max(now_s - one.time_s, 0.0))} ago)" for one in newest]
    if len(saved) > SHOWN_CHECKPOINTS:
        shown.append(f"{len(saved) - SHOWN_CHECKPOINTS} more")
    if shown:
        yield f"{name}: {', '.join(shown)}"


def _warnings(run: WatchedRun, width: int) -> Iterator[str]:
    shown = list(run.warnings)[-SHOWN_WARNINGS:]
    if shown:
        yield f"the last {len(shown)} warnings:" if len(shown) > 1 else "one warning:"
        for text in shown:
            yield from textwrap.wrap(
                text, width, initial_indent="  ", subsequent_indent="    ", max_lines=3
            )


def _usual_interval_s(run: WatchedRun) -> float | None:
    """Return the longest recent time between two training lines of one start; None with fewer than
    three lines."""
    times, starts = (run.metrics.curve("training", name).values[-10:] for name in ("time", "run"))
    records = itertools.pairwise(zip(times.tolist(), starts.tolist(), strict=False))
    gaps = [later - earlier for (earlier, one), (later, other) in records if one == other]
    return max(gaps) if len(gaps) > 1 else None


def _float(value: Any) -> float | None:
    """Return a record's number if plausible, else None; files may contain anything."""
    return float(value) if type(value) in (int, float) and abs(value) < LARGEST else None


def _cut(line: str, width: int, unicode: bool) -> str:
    """Return the line cut to the width, without control characters, which a terminal would obey."""
    line = printable(line).rstrip()
    if not unicode:
        line = line.encode("ascii", "replace").decode()
    end = "…" if unicode else "..."
    return line if len(line) <= width else line[: width - len(end)] + end
