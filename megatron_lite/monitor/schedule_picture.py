"""Draw a step's order as a line, as text and as a picture: pipeline ranks as rows, time to the
right, bubbles empty.

Times are the schedule's estimates (`planner/durations.py`); without a pipeline, all passes take
equally long. Upper and lower case distinguish a rank's chunks.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config import BatchConfig
from megatron_lite.zero.pipeline import Kind
from megatron_lite.zero.schedule import Order

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weights": "W"}
LEGEND = "F: forward pass of a micro-batch, B: backward, I: its gradients of inputs, W: its gradients of weights"
COLUMNS, UNIT = 108, 3  # of text: at most, and per forward pass if there is room
# per forward pass, in total, per row, and left of the rows
PIXELS = 24
MOST_PIXELS = 20_000
ROW = 28
LEFT = 60
STYLE = (
    "text{font:12px monospace}.F{fill:#93c5fd}.f{fill:#dbeafe}.B,.I{fill:#fdba74}.b,.i{fill:#ffedd5}.W{fill:#c4b5fd}"
    ".w{fill:#ede9fe}"
)


class Bar(NamedTuple):
    """Passes of a micro-batch through a chunk's stages, directly after one another."""

    label: str
    start: float
    end: float


def draw(order: Order, batch: BatchConfig, logger: logging.Logger, artifacts: Path | None) -> None:
    """Log the text; write the picture to schedule.svg in `artifacts`, if that folder exists."""
    step = DrawnStep(order, batch)
    for line in step.lines():
        logger.info(line)
    if artifacts is not None:
        (artifacts / "schedule.svg").write_text(step.svg(), "utf-8")


class DrawnStep:
    """The largest batch's step, simulated once. rows: each rank's bars. unit: duration of most
    forward passes."""

    def __init__(self, order: Order, batch: BatchConfig) -> None:
        depth, breadth = batch.depth_first_micro_batches, batch.breadth_first_micro_batches
        passes = order.training(depth * breadth, breadth)
        self.order = order
        self.timeline = order.timeline(passes)
        self.rows = list[list[Bar]]()
        starts = [stages.start for stages in order.pipeline.chunks]
        for rank, (own, spans) in enumerate(zip(passes, self.timeline.spans, strict=True)):
            chunks, row = order.pipeline.chunks_of(rank), list[Bar]()
            for (kind, stage, micro_batch), (start, end) in zip(own, spans, strict=True):
                chunk = chunks.index(bisect.bisect_right(starts, stage) - 1)
                label = f"{LETTERS[kind].lower() if chunk % 2 else LETTERS[kind]}{micro_batch}"
                if row and row[-1].label == label and row[-1].end == start:
                    start = row.pop().start
                row.append(Bar(label, start, end))
            self.rows.append(row)
        bars = itertools.chain(*self.rows)
        self.unit = statistics.median(end - start for label, start, end in bars if label[0] in "Ff")

    def describe(self) -> str:
        """Return a line about ranks, schedule and waits."""
        pipeline = self.order.pipeline
        return (
            f"{pipeline.ranks} pipeline ranks, --pipeline_schedule={self.order.schedule} --pipeline_placement="
            f"{pipeline.placement}: bubble {self.timeline.bubble:.1%} of the busiest rank's work"
        )

    def lines(self) -> Iterator[str]:
        """Yield the text, at most `COLUMNS` wide."""
        duration = self.timeline.duration
        columns = min(COLUMNS, math.ceil(UNIT * duration / self.unit - 1e-6))
        yield f"schedule of a step ({LEGEND}; dots: bubble)"
        for rank, bars in enumerate(self.rows):
            row = "." * columns
            for label, start, end in bars:
                first, last = (round(time / duration * columns) for time in (start, end))
                room = last - first
                text = label if len(label) <= room else label[:1]  # half a number is another number
                row = row[:first] + (text.ljust(room - 1, "-") + " ")[:room] + row[last:]
            yield f"  rank {rank:<4}{row.rstrip()}"

    def svg(self) -> str:
        """Return the picture."""
        duration = self.timeline.duration
        width = min(MOST_PIXELS, PIXELS * duration / self.unit)
        size = f"{LEFT + max(width, 900):.0f} {ROW * (len(self.rows) + 1)}"
        shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>{STYLE}</style>'
        ]
        shapes.append(f'<text x="4" y="18">{self.describe()}; {LEGEND}</text>')
        for rank, bars in enumerate(self.rows):
            top = ROW * (rank + 1)
            shapes.append(f'<text x="4" y="{top + 17}">rank {rank}</text>')
            for label, start, end in bars:
                x, long = LEFT + start / duration * width, (end - start) / duration * width
                shapes.append(
                    f'<rect class="{label[0]}" x="{x:.2f}" y="{top + 2}" width="{max(long - 1, 0.2):.2f}" '
                    f'height="{ROW - 4}"><title>{label}</title></rect>'
                )
                if long >= 9 * len(label):
                    shapes.append(f'<text x="{x + 2:.2f}" y="{top + 17}">{label}</text>')
        return "\n".join([*shapes, "</svg>\n"])
