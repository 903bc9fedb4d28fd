"""Shared by all tests: helpers beside this file, and one thread per process (distributed cases start several)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # harness.py, launch.py
torch.set_num_threads(1)
