"""Commands that users type, writers of generated documents, and benchmarks.

Each command imports this package before others: a missing package is then named in one line.
"""

import sys

from megatron_lite.run.missing_package import name_missing_package

sys.excepthook = name_missing_package
