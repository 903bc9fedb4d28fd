"""Show the learning rate and the batch size of every iteration before training.

    python scripts/plot_schedule.py <training flags> [--csv=schedule.csv] [--png=schedule.png]

The flags are those of pretrain_gpt.py. As in a dry run, data and directories may be left out, and
--world_size sets the number of ranks. The default output is schedule.png, in the --experiment_dir
if given. Pictures need matplotlib (`pip install matplotlib`); without matplotlib the default is
schedule.csv.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package
from megatron_lite.cli.parse import HelpRequested, parse
from megatron_lite.config import Config
from megatron_lite.errors import EXIT_DONE, RunError, StorageError, UsageError, check_addresses
from megatron_lite.run.exit_status import print_page
from megatron_lite.run.launch import launch_world_size
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import planned_world_size, resolve, warnings

RATE_COLOR = "#0d9488"
BATCH_COLOR = "#2563eb"
MUTED_COLOR = "#64748b"
GRID_COLOR = "#e2e8f0"


class Row(NamedTuple):
    """One iteration, counted from 1; the field names are the column names."""

    iteration: int
    learning_rate: float
    batch_size: int


def schedule(config: Config) -> list[Row]:
    """Return one row per iteration of a run."""
    sizes = batch_schedule(config.batch)
    return [
        Row(iteration, learning_rate(config, iteration), sizes.batch_size(iteration))
        for iteration in range(1, config.training.train_iters + 1)
    ]


def take_files(argv: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Separate the files of --csv and --png from the training flags.

    Raises:
        UsageError: if a flag has no file, or matplotlib is missing.
    """
    files: dict[str, Path] = {}
    left: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, file = word.partition("=")
        if flag not in ("--csv", "--png"):
            left.append(word)
            continue
        file = file if equals else next(words, "")
        if not file or file.startswith("--"):
            raise UsageError(f"{flag}: needs a file; write {flag}=schedule.{flag[2:]}")
        check_addresses([word, file])
        files[flag] = Path(file).expanduser()
    if "--png" in files and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--png: matplotlib is not installed (pip install matplotlib); --csv works without it"
        )
    return files, left


def default_file(config: Config) -> dict[str, Path]:
    """Return the default output: a picture, or a table without matplotlib."""
    folder = Path(config.run.experiment_dir or "")
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed (pip install matplotlib); writing a table instead")
        return {"--csv": folder / "schedule.csv"}
    return {"--png": folder / "schedule.png"}


def read_config(argv: Sequence[str]) -> Config:
    """Resolve the training flags and print their warnings.

    Raises:
        UsageError: as in pretrain_gpt.py, or if there is no iteration to show.
    """
    arguments = parse(argv)
    config = arguments.config
    config = dataclasses.replace(
        config, distributed=dataclasses.replace(config.distributed, dry_run=True)
    )
    config = resolve(config, planned_world_size(config, launch_world_size()))
    if config.training.train_iters == 0:
        raise UsageError("--train_iters=0: no iterations to show; write --train_iters=<iterations>")
    for line in (*arguments.warnings, *warnings(config)):
        print(f"WARNING: {line}", file=sys.stderr)
    return config


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write one line per iteration below the column names; rates read back exactly."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


def in_words(rows: Sequence[Row]) -> str:
    """Describe the learning rate in one line."""
    peak = max(rows, key=lambda row: row.learning_rate)
    first, last = rows[0].learning_rate, rows[-1].learning_rate
    highest = f"highest {peak.learning_rate:.4g} (iteration {peak.iteration})"
    return f"{len(rows)} iterations; learning rate: first {first:.4g}, {highest}, last {last:.4g}"


def draw(rows: Sequence[Row]) -> Any:
    """Plot the learning rate and, if it changes, the batch size below; return the figure."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    iterations, rates, sizes = zip(*rows, strict=True)
    around = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.2)  # inches between the words and the edge
    figure = Figure(figsize=(9, 4.6), dpi=150, layout=around, facecolor="white")
    panels = 2 if len(set(sizes)) > 1 else 1
    grid = {"height_ratios": [3, 1][:panels]}
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    axes[0].plot(
        iterations, rates, color=RATE_COLOR, linewidth=1.8, marker="o" if len(rows) < 4 else None
    )
    axes[0].set_ylabel("learning rate", color=MUTED_COLOR)
    axes[0].yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.4g}".replace("e-0", "e-"))
    )
    if panels == 2:
        axes[1].step(iterations, sizes, where="mid", color=BATCH_COLOR, linewidth=1.8)
        axes[1].set_ylabel("batch size", color=MUTED_COLOR)
        axes[1].yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes[-1].set_xlabel("iteration", color=MUTED_COLOR)
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes[0].set_title(in_words(rows), loc="left", fontsize=10, color=MUTED_COLOR)
    figure.align_ylabels()
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.grid(color=GRID_COLOR, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(colors=MUTED_COLOR, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(GRID_COLOR)
    return figure


def write(files: dict[str, Path], rows: Sequence[Row]) -> None:
    """Write the table and the picture.

    Raises:
        StorageError: if a file cannot be written.
    """
    for flag, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if flag == "--csv":
                write_table(rows, path)
            else:
                draw(rows).savefig(path, format="png")
        except OSError as error:
            raise StorageError(
                f"{flag}={path}: cannot be written: {error.strerror}; choose another file"
            ) from None


def main(argv: Sequence[str]) -> int:
    """Write the files; return the exit code."""
    try:
        files, left = take_files(argv)
        config = read_config(left)
        rows = schedule(config)
        files = files or default_file(config)
        write(files, rows)
    except HelpRequested as request:
        print_page(f"{__doc__}\n{request}")
        return EXIT_DONE
    except RunError as error:
        print("\n".join(f"ERROR: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    print(in_words(rows))
    for path in files.values():
        print(f"written: {path}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
