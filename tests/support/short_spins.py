"""Imports torch so that its threads sleep after a short wait, as in the program, and leaves the
environment as it was.

OpenMP reads its variables once, when torch is imported. With its own defaults, tests with several
threads would spin on the cores that other tests need.
"""

import os
from unittest import mock

from megatron_lite.run.host import limit_spinning

with mock.patch.dict(os.environ):
    limit_spinning()
    import torch

__all__ = ["torch"]
