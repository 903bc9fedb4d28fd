"""Train each combination of some options' values, and rank the runs by their validation loss.

This is the command `megatron_lite sweep` without installation: python scripts/sweep.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("sweep", sys.argv[1:]))
