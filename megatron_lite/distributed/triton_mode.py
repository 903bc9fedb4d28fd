"""Whether kernels run; asked before Triton is imported."""

import os

import torch


def kernels_can_run() -> bool:
    """Return whether this process can run Triton kernels: on a GPU, or interpreted on a CPU."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
