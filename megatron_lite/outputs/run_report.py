"""The HTML report written at the end of a run, without failing or delaying the run."""

from __future__ import annotations

from megatron_lite.errors import DataError
from megatron_lite.reports.report import REPORT_FILE, write_report
from megatron_lite.run.exit_status import METRICS_FILE
from megatron_lite.setup_run import Run

# Size limits of metrics.jsonl, which is read at 20 MB/s on a busy core: a stopped or failed run has seconds left.
LARGEST_BYTES, LARGEST_IN_A_HURRY_BYTES = 2**27, 2**25


def leave_report(run: Run, in_a_hurry: bool, failed: bool = False) -> None:
    """Write report.html on rank 0, or log in one line why not; skip a lost directory or a run without records.

    failed: the run ends with an error, which must stay the last line, so log nothing.
    """
    root = run.experiment.root
    if root is None or not run.config.run.report or run.distributed.rank != 0:
        return
    limit, later = LARGEST_IN_A_HURRY_BYTES if in_a_hurry else LARGEST_BYTES, f"python scripts/report_run.py {root}"
    try:
        if run.experiment.is_lost() or not (root / METRICS_FILE).exists():
            return
        if (root / METRICS_FILE).stat().st_size > limit:
            if not failed:
                run.logger.info("no %s now: %s is large; write it with: %s", REPORT_FILE, METRICS_FILE, later)
            return
        write_report([root], root / REPORT_FILE)
    except Exception as error:  # the report must not fail the run
        if not failed and not isinstance(error, DataError):
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            run.logger.warning("no %s: %s; write it with: %s", REPORT_FILE, reason, later)
