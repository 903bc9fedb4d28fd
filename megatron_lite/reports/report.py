"""Write report.html: a page about one or several runs, in one file that needs no network and no
library."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.config import JsonObject, Options, unflatten
from megatron_lite.config.values import FLAGS, abridged
from megatron_lite.errors import DataError, StorageError
from megatron_lite.reports.charts import COLORS, SPEED, SPEEDS, page_data
from megatron_lite.reports.watched_run import (
    Curve,
    GrowingFile,
    Metrics,
    WatchedRun,
    read_runs,
    title_of,
)
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.progress_line import format_count, format_duration
from megatron_lite.validation import defaults

REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"
MOST_RUNS = 16
MOST_SAMPLES, LONGEST_SAMPLE = 8, 2000  # texts, and characters per text
LONGEST_SAMPLES_LINE_BYTES = 2**22
MOST_FOLDERS = 30  # newest checkpoints and exports in the table
# Kinds of `<kind>_s` in metrics.jsonl.
NAMES_OF_PAUSES = {
    "validation": "validations",
    "save": "checkpoints",
    "export": "exports",
    "samples": "samples",
}


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the page about some runs.

    Raises:
        DataError: if a folder is no run, has no numbers yet, or there are too many.
        StorageError: if the file cannot be written.
    """
    if not output.name:
        raise StorageError(f"cannot write {output}: it is a folder; choose another --output")
    if len(folders) > MOST_RUNS:
        raise DataError(f"{len(folders)} runs; a report shows up to {MOST_RUNS}")
    text = page(read_runs(folders))
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {output}: {error.strerror}; choose another --output"
        ) from None


def page(runs: Sequence[WatchedRun]) -> str:
    """Return the whole page."""
    title = title_of(runs)
    data = page_data(runs)
    # "<" would end the script element early, wherever the text came from.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    body = "\n".join([_head(runs, title), *_figures(data), *_sections(runs)])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_file("report.css")}</style></head>
<body><main>
{body}
</main>
<script type="application/json" id="data">{embedded}</script>
<script>
{_file("report.js")}</script>
</body></html>
"""


def _file(name: str) -> str:
    return (resources.files("megatron_lite.reports") / "page" / name).read_text("utf-8")


# -- head
# ----------------------------------------------------------------------------------------------------------


def _head(runs: Sequence[WatchedRun], title: str) -> str:
    parts = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        parts.append(f'<p class="subtitle">{escape(", ".join(run.name for run in runs))}</p>')
        return "".join([*parts, _comparison(runs)])
    run = runs[0]
    parts.append(f'<p class="subtitle">{_ending(run)}</p>')
    tiles = "".join(
        f'<div class="tile"><b>{escape(tile.value)}</b><span>{escape(", ".join(filter(None, tile[::2])))}</span></div>'
        for tile in _tiles(run)
    )
    return "".join([*parts, f'<div class="tiles">{tiles}</div>'])


def _ending(run: WatchedRun) -> str:
    """Describe in one line how the run ended and when it wrote its last record."""
    kind = "badge" if run.ending.get("exit_code") in (0, 75, None) else "badge bad"
    status = str(run.ending.get("status", "no ending yet"))[:40]
    facts = [str(run.ending.get("message", ""))[:300]]
    times = run.metrics.curve("training", "time").values[-1:]
    if len(times) and 0 <= times[0] < 2**40:
        facts.append(datetime.datetime.fromtimestamp(times[0]).strftime("%Y-%m-%d %H:%M"))
    return f'<span class="{kind}">{escape(status)}</span> {escape(" · ".join(filter(None, facts)))}'


class _Tile(NamedTuple):
    name: str
    value: str
    remark: str = ""


def _tiles(run: WatchedRun) -> Iterator[_Tile]:
    """Yield the headline numbers."""
    metrics, last = run.metrics, run.metrics.last.get("training", {})
    yield _Tile("iterations", f"{last.get('iteration', 0):,} of {_number(last.get('train_iters'))}")
    if isinstance(last.get("consumed_tokens"), int):
        yield _Tile("tokens", format_count(last["consumed_tokens"]))
    for phase in ("training", "validation", "test"):
        curve = metrics.curve(phase, "loss").finite()
        if len(curve):
            yield _Tile(f"{phase} loss", f"{curve.values[-1]:.4f}")
            if phase != "training" and len(curve) > 1:
                best = int(curve.values.argmin())
                yield _Tile(
                    f"best {phase} loss",
                    f"{curve.values[best]:.4f}",
                    f"at {curve.iterations[best]:,}",
                )
    for name in ("tokens_per_sec", SPEED, "mfu"):
        curve = metrics.curve("training", name).finite()
        if len(curve):
            middle = sorted(curve.values.tolist())[len(curve) // 2]
            yield _Tile(
                f"{SPEEDS[name]}, median", f"{middle:.1%}" if name == "mfu" else f"{middle:,.0f}"
            )
    yield _Tile("starts", f"{len(metrics.starts):,}")
    if metrics.dropped:
        yield _Tile("lines with dropped updates", f"{len(metrics.dropped):,}")


def _comparison(runs: Sequence[WatchedRun]) -> str:
    tiles = [{tile.name: " ".join(tile[1:]).strip() for tile in _tiles(run)} for run in runs]
    head = [
        f'<span style="color:var(--s{number % COLORS})">{escape(run.name)}</span>'
        for number, run in enumerate(runs)
    ]
    names = dict.fromkeys(name for found in tiles for name in found)
    rows = [[name, *(found.get(name, "") for found in tiles)] for name in names]
    return _table(["", *head], rows)


# -- charts
# --------------------------------------------------------------------------------------------------------


def _figures(data: JsonObject) -> Iterator[str]:
    yield '<div class="charts">'
    for chart in data["charts"]:
        unit = f" <small>{escape(chart['unit'])}</small>" if chart["unit"] else ""
        legend = "".join(
            f'<li><button type="button" aria-pressed="true"><i style="border-color:var(--s{entry["color"]});'
            f'border-top-style:{"dashed" if entry["dash"] else "solid"}"></i>{escape(entry["name"])}</button></li>'
            for entry in chart["legend"]
        )
        yield (
            f'<figure class="card chart{" wide" if chart["wide"] else ""}" style="margin:0"><header>'
            f'<h3>{escape(chart["title"])}{unit}</h3><span class="tools">'
            '<button type="button" class="reset" hidden>show all</button>'
            '<button type="button" class="log" aria-pressed="false">log scale</button></span></header>'
            f'<ul class="legend">{legend}</ul><svg role="img" aria-label="{escape(chart["title"])}"></svg>'
            '<div class="readout" aria-live="off"></div></figure>'
        )
    yield "</div>"
    yield (
        '<p class="hint">Move over a chart or tap it to read it, drag to zoom into all, double-click to show all. '
        "Dashed lines are starts of the run, triangles dropped updates.</p>"
        "<noscript><p>The charts need JavaScript, which is in this file; nothing is loaded.</p></noscript>"
    )


# -- sections
# ------------------------------------------------------------------------------------------------------


def _sections(runs: Sequence[WatchedRun]) -> Iterator[str]:
    several = len(runs) > 1
    for run in runs:
        parts = [
            ("Samples", _samples(run.root)),
            ("Tasks", _tasks(run.metrics)),
            ("Time", _timing(run)),
            ("Checkpoints and exports", _folders(run)),
            ("Warnings of the last start", _warnings(run)),
            ("Configuration", _configuration(run.config)),
        ]
        if several:
            yield f"<h2>{escape(run.name)}</h2>"
        for title, content in parts:
            if content:
                tag = "h3" if several else "h2"
                yield f"<{tag}>{title}</{tag}>{content}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or "" without rows. head: HTML."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="card scroll"><table><tr>{titles}</tr>{lines}</table></div>' if rows else ""


def _samples(root: Path) -> str:
    """Return the newest samples."""
    file = GrowingFile(root / SAMPLES_FILE, LONGEST_SAMPLES_LINE_BYTES)
    try:
        record = json.loads([line for line in (*file.new_lines(), file.rest) if line.strip()][-1])
        samples = [sample for sample in record["samples"] if isinstance(sample, dict)][
            :MOST_SAMPLES
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    parts = []
    for sample in samples:
        prompt, text = (str(sample.get(key, ""))[:LONGEST_SAMPLE] for key in ("prompt", "text"))
        note = f"<small>iteration {escape(_number(record.get('iteration')))}</small>"
        parts.append(f'<div class="card sample">{note}<b>{escape(prompt)}</b>{escape(text)}</div>')
    return "".join(parts)


def _tasks(metrics: Metrics) -> str:
    """Return the last results of `evaluate --tasks`."""
    rows = [
        [name, f"{curve.iterations[-1]:,}", f"{curve.values[-1]:.4f}"]
        for name in metrics.task_results()
        if len(curve := metrics.curve("tasks", name))
    ]
    return _table(["", "iteration", "result"], rows)


def _timing(run: WatchedRun) -> str:
    """Return the times of steps, waits and pauses in metrics.jsonl."""
    step, wait = (
        run.metrics.curve("training", name).finite() for name in ("step_time_ms", "data_wait_ms")
    )
    if not len(step):
        return ""

    def total_s(curve: Curve) -> float:
        """Return the total of a time logged as a mean over iterations."""
        return float(np.diff(curve.iterations, prepend=0) @ curve.values) / 1e3

    rows: list[tuple[str, float]] = [
        ("training", total_s(step)),
        ("  of which waiting for data", total_s(wait)),
    ]
    for kind, name in NAMES_OF_PAUSES.items():
        curve = run.metrics.curve("training", f"{kind}_s").finite()
        if len(curve):
            rows.append((name, float(curve.values.sum())))
    return _table(["", "h:mm:ss"], [[name, format_duration(seconds)] for name, seconds in rows])


def _folders(run: WatchedRun) -> str:
    """Return checkpoints and exports with their sizes."""
    rows = [
        [kind, one.name, _size(one.path), str(one.path.relative_to(run.root))]
        for kind, saved in (("checkpoint", run.checkpoints), ("export", run.exports))
        for one in saved[:MOST_FOLDERS]
    ]
    return _table(["", "iteration", "size", "folder"], rows)


def _size(folder: Path) -> str:
    try:
        size = sum(
            entry.stat().st_size
            for entry in os.scandir(folder)
            if entry.is_file(follow_symlinks=False)
        )
    except OSError:
        return "?"
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _warnings(run: WatchedRun) -> str:
    lines = "\n".join(run.warnings)
    return f'<div class="card"><pre>{escape(lines)}</pre></div>' if lines else ""


def _configuration(config: Options) -> str:
    """Return the options that differ from their defaults, then all."""
    if not config:
        return ""
    usual = usual_values(config)
    rows = [[f"--{name}", option_text(config, usual, name)] for name in config]
    differing = [
        [*row, option_text(usual, {}, name)]
        for name, row in zip(config, rows, strict=True)
        if name in usual and config[name] not in (None, usual[name])
    ]
    shown = _table(["differs from the default", "value", "default"], differing)
    return f"{shown}<details><summary>all {len(rows)} options</summary>{_table(['option', 'value'], rows)}</details>"


def usual_values(config: Options) -> Options:
    """Return a config.json's options as if none had been given, as in JSON; empty if damaged."""
    read = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name in FLAGS
    }
    try:
        usual = defaults(unflatten(read)).items()
    except Exception:  # the file may contain anything
        return {}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in usual}


def option_text(config: Options, usual: Options, name: str) -> str:
    """Return an option's value as text, with "(derived)" if other options imply it."""
    if name not in config:
        return "(absent)"
    value = config[name]
    if value is None or value == []:
        return "(none)"
    derived = name in FLAGS and FLAGS[name].default is None and value == usual.get(name)
    return (
        abridged(tuple(map(str, value)) if isinstance(value, list) else value)
        + " (derived)" * derived
    )


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"
