"""Report a schedule's times as a log line, as tables, as a trace for a browser, and as an HTML
page.

The page is one file that needs no network: a zoomable timeline, and the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from megatron_lite.config import JsonObject
from megatron_lite.monitor.logging import MIB
from megatron_lite.monitor.profiling.schedule_times import (
    COMPUTING,
    IterationTimes,
    TimedVerb,
    Transfer,
    hid_behind,
    iterations_in_words,
    parts,
    range_name,
)
from megatron_lite.run.progress_line import aligned

Profile = Sequence[IterationTimes]  # its iterations, in order
SHOWN_BEHIND = 2  # computations that overlap with a collective, in its row
MOST_BARS = 20_000  # further iterations are skipped
ROW, BAR = 24, 20  # heights, in pixels
# Classes of bars, by an event's first word; the others are steps that start collectives.
KINDS = ("iteration", "forward", "backward", "gather", "reduce", "wait")
STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1e293b, #e2e8f0); --paper: light-dark(#fff, #0f172a) }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem }
h1 { font-size: 1.2rem } pre { overflow-x: auto } p { min-height: 1.5em; margin: .5rem 0 }
svg { width: 100%; display: block; cursor: grab; touch-action: none; border: 1px solid #94a3b8 }
rect { fill: #94a3b8 } .iteration { fill: none; stroke: #94a3b8; vector-effect: non-scaling-stroke }
.forward, i.forward { fill: #2563eb; color: #2563eb } .backward, i.backward { fill: #ea580c; color: #ea580c }
.gather, i.gather { fill: #0d9488; color: #0d9488 } .reduce, i.reduce { fill: #7c3aed; color: #7c3aed }
.wait, i.wait { fill: #dc2626; color: #dc2626 } rect:hover { filter: brightness(1.3) } i { font-style: normal }
"""
# Wheel: zoom around the pointer. Drag: move. Double click: everything again. Touch: drag.
SCRIPT = """
const svg = document.querySelector("svg"), words = document.getElementById("words"), box = svg.viewBox.baseVal;
const whole = box.width; let from = null;
const at = event => (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth;
const show = (x, width) => {
  box.width = Math.min(Math.max(width, whole / 1e4), whole);
  box.x = Math.min(Math.max(x, 0), whole - box.width);
};
svg.addEventListener("wheel", event => {
  event.preventDefault();
  const factor = Math.exp(event.deltaY / 500), place = box.x + at(event) * box.width;
  const width = Math.min(Math.max(box.width * factor, whole / 1e4), whole);
  show(place - at(event) * width, width);
}, { passive: false });
svg.addEventListener("pointerdown", event => { from = [at(event), box.x]; svg.setPointerCapture(event.pointerId); });
svg.addEventListener("pointerup", () => { from = null; });
svg.addEventListener("dblclick", () => show(0, whole));
svg.addEventListener("pointermove", event => {
  if (from) show(from[1] - (at(event) - from[0]) * box.width, box.width);
  const bars = document.elementsFromPoint(event.clientX, event.clientY).filter(one => one.dataset.name);
  words.textContent = bars.length ? bars[0].dataset.name : "";
});
words.dataset.ready = "1";
"""


def mean_parts(profile: Profile) -> dict[str, float]:
    """Return the seconds of each part of an iteration, as means over the iterations."""
    total = defaultdict[str, float](float)
    for times in profile:
        for name, seconds in parts(times).items():
            total[name] += seconds / len(profile)
    return total


def summary(profile: Profile) -> str:
    """Return the log line: `schedule of iterations 3-4: 812.4 ms each: backward 55 %, forward 30 %,
    ...`."""
    shares = mean_parts(profile)
    wall_s = sum(shares.values())
    shown = sorted(shares.items(), key=lambda item: -item[1])
    listed = ", ".join(
        f"{name} {seconds / wall_s:.0%}" for name, seconds in shown if seconds >= 0.005 * wall_s
    )
    return f"schedule of {iterations_of(profile)}: {wall_s * 1e3:.2f} ms each: {listed}"


def iterations_of(profile: Profile) -> str:
    """Return a profile's iterations in words."""
    return iterations_in_words(profile[0].iteration, profile[-1].iteration)


def tables(profile: Profile, rank: int, world_size: int) -> str:
    """Return three tables of means over the iterations: parts of an iteration, steps by stage,
    collectives by stage."""
    shares = mean_parts(profile)
    shares["total"] = sum(shares.values())
    title = f"schedule of {iterations_of(profile)}, rank {rank} of {world_size}; numbers and times of one iteration"
    rows = [
        [name, _ms(seconds), f"{seconds / shares['total']:.1%}"] for name, seconds in shares.items()
    ]
    collectives = [
        "collective",
        "number",
        "MiB",
        "takes ms",
        "exposed ms",
        "hidden ms",
        "while computing",
    ]
    found = (
        [["part", "ms", "share"], *rows],
        [["step", "number", "ms", "ms each"], *_step_rows(profile)],
        [collectives, *_transfer_rows(profile)],
    )
    words = (0, collectives.index("while computing"))
    return "\n\n".join([title, *("\n".join(aligned(table, words)) for table in found)])


def _step_rows(profile: Profile) -> Iterator[list[str]]:
    steps = [step for times in profile for step in times.steps if step.verb in COMPUTING]
    groups: dict[tuple[str, int], list[TimedVerb]] = {}
    for step in sorted(steps, key=lambda step: COMPUTING.index(step.verb)):
        groups.setdefault((step.verb, step.stage), []).append(step)
    for key, group in groups.items():
        seconds, number = sum(step.own_s for step in group), len(profile)
        yield [
            range_name(*key),
            f"{len(group) / number:g}",
            _ms(seconds, number),
            _ms(seconds, len(group)),
        ]


def _transfer_rows(profile: Profile) -> Iterator[list[str]]:
    groups: dict[tuple[str, int], list[tuple[Transfer, IterationTimes]]] = {}
    for times in profile:
        for transfer in times.transfers:
            stage = -1 if transfer.stage is None else transfer.stage
            groups.setdefault((transfer.kind, stage), []).append((transfer, times))
    for (kind, stage), group in sorted(groups.items()):
        transfers, number = [transfer for transfer, _ in group], len(profile)
        yield [
            range_name(kind, None if stage < 0 else stage),
            f"{len(group) / number:g}",
            f"{sum(transfer.bytes for transfer in transfers) / number / MIB:,.2f}",
            _ms(_total(transfer.takes_s for transfer in transfers), number),
            _ms(sum(transfer.exposed_s for transfer in transfers), number),
            _ms(_total(transfer.hidden_s for transfer in transfers), number),
            _behind(group),
        ]


def _behind(group: Sequence[tuple[Transfer, IterationTimes]]) -> str:
    """Return the names of the computations that overlap longest with the collectives, each with its
    share of the time."""
    window_s = sum(transfer.window_s for transfer, _ in group)
    behind = defaultdict[tuple[str, int], float](float)
    for transfer, times in group:
        for name, seconds in hid_behind(transfer, times.steps).items():
            behind[name] += seconds
    longest = sorted(behind.items(), key=lambda item: -item[1])[:SHOWN_BEHIND]
    return ", ".join(
        f"{range_name(*key)} {seconds / window_s:.0%}"
        for key, seconds in longest
        if seconds >= 0.01 * window_s
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ms(seconds: float | None, number: int = 1) -> str:
    return "-" if seconds is None else f"{seconds / number * 1e3:.3f}"


def trace_events(profile: Profile, rank: int) -> JsonObject:
    """Return a trace in the Trace Event Format, in microseconds from its first event.

    One process per rank; thread 0 shows the steps, with waits inside them, the others the
    collectives in flight, as many at a time as there are threads. To join several ranks' files,
    append their `traceEvents`.
    """
    begun_s = [transfer.under_way_s[0] for times in profile for transfer in times.transfers]
    origin_s = min([times.start_s for times in profile] + begun_s)

    def event(name: str, thread: int, start_s: float, end_s: float, **values: Any) -> JsonObject:
        start, end = round((start_s - origin_s) * 1e6, 3), round((end_s - origin_s) * 1e6, 3)
        return {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "ts": start,
            "dur": end - start,
            "args": values,
        }

    events, lanes_s = [], list[float]()  # when each thread for collectives becomes free
    for times in profile:
        events.append(event(f"iteration {times.iteration}", 0, times.start_s, times.end_s))
        for step in times.steps:
            name = range_name(step.verb, step.stage, step.micro_batch)
            events.append(event(name, 0, step.start_s, step.end_s, waited_ms=step.waited_s * 1e3))
        for transfer in sorted(times.transfers, key=lambda transfer: transfer.under_way_s):
            start_s, end_s = transfer.under_way_s
            name = range_name(transfer.kind, transfer.stage)
            events.append(event(f"wait for {name}", 0, transfer.waits_s, transfer.done_s))
            free = [lane for lane, until_s in enumerate(lanes_s) if until_s <= start_s]
            lane = free[0] if free else len(lanes_s)
            lanes_s[lane : lane + 1] = [end_s]
            values: JsonObject = {"bytes": transfer.bytes, "exposed_ms": transfer.exposed_s * 1e3}
            if transfer.takes_s is not None and transfer.hidden_s is not None:
                values |= {"takes_ms": transfer.takes_s * 1e3, "hidden_ms": transfer.hidden_s * 1e3}
            events.append(event(name, lane + 1, start_s, end_s, **values))
    threads = ["steps", *(f"collectives {lane + 1}" for lane in range(len(lanes_s)))]
    labels = [
        ("process_name", 0, f"rank {rank}"),
        *(("thread_name", *thread) for thread in enumerate(threads)),
    ]
    names = [
        {"name": kind, "ph": "M", "pid": rank, "tid": at, "args": {"name": name}}
        for kind, at, name in labels
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def page(profile: Profile, rank: int, world_size: int) -> str:
    """Return the HTML page."""
    title = f"Schedule of {iterations_of(profile)}, rank {rank} of {world_size}"
    shown = list(_shown(profile))
    legend = " | ".join(f'<i class="{kind}">■</i> {kind}' for kind in KINDS[1:])
    note = "" if len(shown) == len(profile) else f" Shown: {iterations_of(shown)}."
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1>
<p>{escape(summary(profile))}</p>
<p>First row: steps, and in red the waits for collectives. Rows below: collectives under way.{note} Wheel: zoom; drag:
move; double click: everything.<br>{legend}</p>
{_timeline(shown, rank)}
<p id="words"></p>
<pre>{escape(tables(profile, rank, world_size))}</pre>
<script>{SCRIPT}</script>
</html>
"""


def _shown(profile: Profile) -> Iterator[IterationTimes]:
    """Yield the first iterations: at least one, and as many as the page allows."""
    bars = 0
    for times in profile:
        bars += len(times.steps) + 2 * len(times.transfers) + 1
        if times is not profile[0] and bars > MOST_BARS:
            return
        yield times


def _timeline(profile: Profile, rank: int) -> str:
    """Return the picture; its horizontal unit is a microsecond."""
    events = [event for event in trace_events(profile, rank)["traceEvents"] if event["ph"] == "X"]
    width = max(event["ts"] + event["dur"] for event in events)
    height = ROW * (1 + max(event["tid"] for event in events))
    bars = []
    for event in events:
        name, ms = event["name"], event["dur"] / 1e3
        kind = name.split()[0]
        if kind in ("gather", "reduce") and event["tid"] == 0:
            kind = "start"
        elif kind not in KINDS:
            kind = "other"
        words = [f"{name}: {ms:.3f} ms"]
        words += [
            f"{key.removesuffix('_ms')} {event['args'][key]:.3f} ms"
            for key in event["args"]
            if "_ms" in key
        ]
        # Waits and steps are nested: the inner ones come later, in front.
        bars.append(
            f'<rect class="{kind}" x="{event["ts"]:.1f}" y="{ROW * event["tid"] + (ROW - BAR) // 2}" '
            f'width="{max(event["dur"], 0.1):.1f}" height="{BAR}" data-name="{escape(", ".join(words))}"/>'
        )
    return (
        f'<svg viewBox="0 0 {width:.1f} {height}" height="{height}" preserveAspectRatio="none" '
        f'role="img" aria-label="timeline">\n' + "\n".join(bars) + "\n</svg>"
    )
