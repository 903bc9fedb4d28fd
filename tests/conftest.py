"""Shared by all tests: helpers beside this file, and one thread per process (distributed cases start several).

Where there is no GPU, Triton kernels run under Triton's interpreter, which has to be on before they are imported.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # harness.py, launch.py
torch.set_num_threads(1)
