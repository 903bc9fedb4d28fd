"""Convert checkpoints to Hugging Face folders and back, one tensor in memory at a time.

This is the command `megatron_lite convert_checkpoint` without installation: python
scripts/convert_checkpoint.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.commands import start

if __name__ == "__main__":
    sys.exit(start("convert_checkpoint", sys.argv[1:]))
