"""Measure loss, perplexity and bits per byte of one or several models on a data set.

This is the command `megatron_lite evaluate` without installation: python scripts/evaluate.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("evaluate", sys.argv[1:]))
