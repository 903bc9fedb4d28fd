"""Write one HTML page about one or several runs: curves, samples, times, checkpoints,
configuration.

    megatron_lite report_run EXPERIMENT_DIR... [--output=report.html]

The page stands in the folder of the run, that of several runs where the command is given. It needs
no network. A run with an experiment directory writes its own page when it ends, unless --report=0.

Exit codes: 0 done, 2 usage, 3 a run has no numbers, 8 the page cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.errors import RunError
from megatron_lite.reports.report import REPORT_FILE, write_report
from megatron_lite.run.exit_status import print_failure

SEVERAL = "reports.html"  # of several runs: a run's own page has another name


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Write the page; return the exit code."""
    parser = ScriptParser(__doc__, prog=program)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="EXPERIMENT_DIR", help="the --experiment_dir of a run"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write (default: {REPORT_FILE} of the run, or {SEVERAL} here)",
    )
    options = parser.parse_args(arguments)
    output = options.output or (
        options.runs[0] / REPORT_FILE if len(options.runs) == 1 else Path(SEVERAL)
    )
    try:
        write_report(options.runs, output)
    except RunError as error:
        return print_failure(error)
    print(f"report: {output}")
    return 0
