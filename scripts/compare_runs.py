"""Compare two runs: configuration, losses, speed, memory.

This is the command `megatron_lite compare_runs` without installation: python
scripts/compare_runs.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("compare_runs", sys.argv[1:]))
