"""The times of a schedule as one file of HTML that needs no network: a timeline to zoom, and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megatron_lite.monitor.profiling.schedule_report import iterations_of, summary, tables, trace_events
from megatron_lite.monitor.profiling.schedule_times import IterationTimes

MOST_BARS = 20_000  # further iterations are left out
ROW, BAR = 24, 20  # heights, in pixels
# Classes of bars, by the first word of an event; the others are steps that start collectives.
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


def page(profile: Sequence[IterationTimes], rank: int, world_size: int) -> str:
    """Return the page."""
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


def _shown(profile: Sequence[IterationTimes]) -> Iterator[IterationTimes]:
    """Yield the first iterations: at least one, and as many as the page can hold."""
    bars = 0
    for times in profile:
        bars += len(times.steps) + 2 * len(times.transfers) + 1
        if times is not profile[0] and bars > MOST_BARS:
            return
        yield times


def _timeline(profile: Sequence[IterationTimes], rank: int) -> str:
    """Return the picture; its unit across is a microsecond."""
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
        words += [f"{key.removesuffix('_ms')} {event['args'][key]:.3f} ms" for key in event["args"] if "_ms" in key]
        # Waits and steps lie inside of each other: the inner ones come later, in front.
        bars.append(
            f'<rect class="{kind}" x="{event["ts"]:.1f}" y="{ROW * event["tid"] + (ROW - BAR) // 2}" '
            f'width="{max(event["dur"], 0.1):.1f}" height="{BAR}" data-name="{escape(", ".join(words))}"/>'
        )
    return (
        f'<svg viewBox="0 0 {width:.1f} {height}" height="{height}" preserveAspectRatio="none" '
        f'role="img" aria-label="timeline">\n' + "\n".join(bars) + "\n</svg>"
    )
