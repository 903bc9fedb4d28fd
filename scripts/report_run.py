"""Write one HTML page about one or several runs: curves, samples, times, checkpoints,
configuration.

This is the command `megatron_lite report_run` without installation: python scripts/report_run.py
--help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("report_run", sys.argv[1:]))
