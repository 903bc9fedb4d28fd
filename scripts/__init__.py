"""User commands, generators of documents, and benchmarks.

Commands import this package first, so that a missing package is reported in one line.
"""

import sys

from megatron_lite.run.exit_status import name_missing_package

sys.excepthook = name_missing_package
