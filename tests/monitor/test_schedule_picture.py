"""The drawing of a step shows each pass of each rank at its time, and nothing else."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_lite.config import BatchConfig
from megatron_lite.monitor.schedule_picture import PIXELS, DrawnStep
from megatron_lite.zero.pipeline import Durations, place
from megatron_lite.zero.schedule import Order
from tests.support.launch import succeed

SVG = "{http://www.w3.org/2000/svg}"


def order(ranks: int, chunks: int, name: str, blocks: int | None = None) -> Order:
    """Return the order of a model whose embedding and head take no time."""
    durations = [Durations(0, 0, 0), *[Durations()] * (blocks or chunks), Durations(0, 0, 0)]
    pipeline = place(ranks, len(durations), name, "v" if name == "zero_bubble_v" else "loop")
    return Order(pipeline, name, 0, (), durations)


def batch(micro_batches: int) -> BatchConfig:
    return BatchConfig(depth_first_micro_batches=1, breadth_first_micro_batches=micro_batches)


def test_rows_are_those_of_the_paper() -> None:
    """1F1B as in figure 4 of Narayanan et al. 2021, with a backward pass of twice the forward
    pass's time."""
    _, *rows = DrawnStep(order(4, 4, "one_f_one_b"), batch(4)).lines()
    assert rows == [
        "  rank 0   F0 F1 F2 F3 ..................B0--- ...B1--- ...B2--- ...B3---",
        "  rank 1   ...F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3--- ......",
        "  rank 2   ......F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- ............",
        "  rank 3   .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- ..................",
    ]


@pytest.mark.parametrize(
    ("ranks", "chunks", "name"),
    [(2, 4, "breadth_first"), (4, 8, "interleaved"), (4, 8, "zero_bubble_v")],
)
def test_the_picture_has_every_pass_and_the_bubble_between_them(
    ranks: int, chunks: int, name: str
) -> None:
    """Each pass has a bar with its name; the widths of a row's bars add up to the step without the
    bubble."""
    made, micro_batches = order(ranks, chunks, name), 2 * ranks
    root = ElementTree.fromstring(DrawnStep(made, batch(micro_batches)).svg())
    timeline = made.timeline(made.training(micro_batches, micro_batches))
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for bar in root.iter(f"{SVG}rect"):
        start, width = float(bar.attrib["x"]), float(bar.attrib["width"]) + 1
        rows.setdefault(bar.attrib["y"], []).append((bar[0].text or "", start, start + width))
    assert len(rows) == ranks
    for row in rows.values():
        bars = [bar for bar in row if bar[2] - bar[1] > 2]
        names = [name for name, _, _ in bars]
        kinds = "FIW" if name == "zero_bubble_v" else "FB"
        letters = [letter for kind in kinds for letter in (kind, kind.lower())[: chunks // ranks]]
        assert sorted(names) == sorted(
            f"{letter}{micro}" for letter in letters for micro in range(micro_batches)
        )
        assert all(
            end <= start + 0.1 for (_, _, end), (_, start, _) in zip(bars, bars[1:], strict=False)
        )
        drawn = sum(end - start for _, start, end in bars) / PIXELS
        assert drawn == pytest.approx(timeline.duration / (1 + timeline.bubble), rel=1e-2)


def test_long_steps_show_no_part_of_a_number() -> None:
    """Where a number does not fit, its letter stands alone; every line has the width of a terminal
    at most."""
    _, *rows = DrawnStep(order(4, 8, "interleaved"), batch(96)).lines()
    assert all(len(row) <= 120 for row in rows)
    assert not {word for row in rows for word in re.findall(r"\d+", row.partition("   ")[2])} - set(
        map(str, range(96))
    )
    assert all("F9 " not in row and "B9" not in row for row in rows)


def test_stages_of_a_chunk_make_one_bar() -> None:
    """A micro-batch through eight stages of a rank is one bar, eight times as long."""
    small, large = (
        DrawnStep(order(2, 2, "one_f_one_b", blocks), batch(4)).svg() for blocks in (2, 16)
    )
    assert small == large


def test_a_plan_and_a_run_draw_it(tmp_path: Path) -> None:
    """Of one pipeline rank, too; with a folder, a run also leaves the picture."""
    words = [
        "--num_layers=4",
        "--hidden_size=16",
        "--num_attention_heads=2",
        "--vocab_size=32",
        "--sequence_length=8",
    ]
    words += [
        "--dataset_source=random",
        "--batch_size=2",
        "--micro_batch_size=1",
        "--train_iters=1",
        "--device=cpu",
    ]
    words += ["--debug_schedule=1", f"--experiment_dir={tmp_path / 'run'}"]
    row = r"rank 0 .*F.*[BI]"
    planned = succeed([*words, "--pipeline_parallel=2", "--world_size=2", "--dry_run=1"]).output
    assert re.search(row, planned) and re.search(row.replace("0", "1"), planned)
    assert re.search(row, succeed(words).output)
    assert "<svg" in (tmp_path / "run" / "runs" / "0" / "artifacts" / "schedule.svg").read_text()
