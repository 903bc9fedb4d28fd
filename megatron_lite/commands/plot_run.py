"""Plot the losses of one or several runs from their metrics.jsonl: a picture, and sparklines in the
terminal.

    megatron_lite plot_run EXPERIMENT_DIR... [--output=loss.png] [--baseline=NAME=VALUE ...]

The picture shows the learning rate and the losses of training, validation, test and averaged
weights; several runs are overlaid. The default file is loss.png in the experiment directory, or
losses.png here for several; the suffix of --output sets the format. Without matplotlib the picture
is an SVG.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.errors import RunError, StorageError, UsageError
from megatron_lite.reports.charts import LOSSES, draw_chart
from megatron_lite.reports.picture import Drawing, draw, read_losses, to_figure, to_svg
from megatron_lite.reports.watched_run import WatchedRun, shows_unicode, sparkline
from megatron_lite.run.exit_status import print_failure

SPARKLINE_WIDTH = 60
NO_MATPLOTLIB = "matplotlib is not installed, so the picture is an SVG; for a PNG: python -m pip install matplotlib"


def write_picture(picture: Drawing, output: Path) -> Path:
    """Write to `output`, or to an .svg of that name without matplotlib; return the file written.

    Raises:
        UsageError: if the suffix is not a known format.
        StorageError: if the file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("matplotlib") is None:
            if output.suffix != ".svg":
                print(NO_MATPLOTLIB)
            output = output.with_suffix(".svg")
            output.write_text(to_svg(picture), encoding="utf-8")
        else:
            to_figure(picture).savefig(output)
    except OSError as error:
        raise StorageError(
            f"cannot write {output}: {error.strerror}; choose another --output"
        ) from None
    except ValueError as error:  # from matplotlib; it names the known formats
        raise UsageError(f"--output={output}: {error}") from None
    return output


def sparklines(runs: Sequence[WatchedRun], unicode: bool) -> Iterator[str]:
    """Yield one sparkline per loss, with its first and last value."""
    width = max(len(drawn.metric.short) for drawn in draw_chart(LOSSES, runs))
    for run in runs:
        if len(runs) > 1:
            yield run.name
        for drawn in draw_chart(LOSSES, [run]):
            values = drawn.curve.values
            line = sparkline(values, SPARKLINE_WIDTH, unicode)
            yield f"{drawn.metric.short:{width}} loss {values[0]:.3f} {line} {values[-1]:.3f}"


def parse_baseline(text: str) -> tuple[str, float]:
    """Parse NAME=VALUE with a finite number."""
    name, _, value = text.rpartition("=")
    number = float(value)
    if not name or not math.isfinite(number):
        raise ValueError(text)
    return name, number


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Draw; return the exit code."""
    parser = ScriptParser(__doc__, prog=program)
    add = parser.add_argument
    add(
        "experiment_dirs",
        nargs="+",
        type=Path,
        metavar="EXPERIMENT_DIR",
        help="the --experiment_dir of a run",
    )
    add(
        "--output",
        type=Path,
        help="picture to write, or a folder for it (default: EXPERIMENT_DIR; here for several)",
    )
    add(
        "--baseline",
        type=parse_baseline,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="add a horizontal line, such as 'unigram entropy=5.1'; may be repeated",
    )
    options = parser.parse_args(arguments)
    folders: list[Path] = options.experiment_dirs
    home, name = (folders[0], "loss.png") if len(folders) == 1 else (Path(), "losses.png")
    output: Path = options.output or home
    if not output.suffix or output.is_dir():
        output /= name
    try:
        runs = read_losses(folders)
        output = write_picture(draw(runs, options.baseline), output)
    except RunError as error:
        return print_failure(error)
    for line in sparklines(runs, shows_unicode()):
        print(line)
    print(f"loss curve: {output}")
    return 0
