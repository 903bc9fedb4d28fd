"""Continue texts with a model: an export, any Hugging Face folder, a checkpoint, or the folder of a
run.

This is the command `megatron_lite generate` without installation: python scripts/generate.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("generate", sys.argv[1:]))
