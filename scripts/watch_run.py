"""Follow a run on a page that updates itself, from any machine that sees the folder of the run.

This is the command `megatron_lite watch_run` without installation: python scripts/watch_run.py
--help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("watch_run", sys.argv[1:]))
