"""Tokenize text into <output_prefix>.bin and .idx; the `prepare_data` command without installation.

python scripts/prepare_data.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.cli.prepare_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python scripts/prepare_data.py"))
