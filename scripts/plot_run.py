"""Plot the losses of one or several runs from their metrics.jsonl: a picture, and sparklines in the
terminal.

This is the command `megatron_lite plot_run` without installation: python scripts/plot_run.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("plot_run", sys.argv[1:]))
