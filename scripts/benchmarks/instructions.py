"""The instruction sets that torch, oneDNN and MKL use in an environment, asked of them in a process of its own.

ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS limit them, each its own library only. Imports no
torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

# What imitates a CPU with AVX2 only. MKL obeys its variable on CPUs from Intel; on others it chooses by itself.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
ISAS: dict[str, dict[str, str]] = {"all": {}, "avx2": AVX2}
# A product by MKL and one by oneDNN, so that both print the line that names their instruction set.
_PROBE = """
import torch
print("torch", torch.backends.cpu.get_cpu_capability(), flush=True)
a = torch.ones(64, 64)
a @ a
torch._C._nn.mkldnn_linear(a.to_mkldnn(), a.to_mkldnn())
"""
_FOUND = {
    "torch": re.compile(r"^torch (\S+)", re.M),
    "oneDNN": re.compile(r"^(?:onednn|dnnl)_verbose.*,isa:(?:Intel )?([^\n,]+)", re.M),
    "MKL": re.compile(r"^MKL_VERBOSE .*?architecture (.+?)(?: enabled)?(?: processors)?, ", re.M),
}
UNKNOWN = "unknown"


def instruction_sets(environment: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """Return the instruction set of each library, "unknown" where it does not say (torch may be built without it)."""
    verbose = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", _PROBE], env={**os.environ, **environment, **verbose}, capture_output=True, text=True
    )
    return read(done.stdout)


def read(output: str) -> dict[str, str]:
    """Find the instruction sets in the verbose output of the libraries."""
    found = {name: pattern.search(output) for name, pattern in _FOUND.items()}
    return {name: _short(match[1]) if match else UNKNOWN for name, match in found.items()}


def _short(name: str) -> str:
    """Return MKL's "... Advanced Vector Extensions 512 (Intel(R) AVX-512) with ..." from "AVX-512" on, others as is."""
    name = re.sub(r"Intel\(R\) ", "", name)
    return re.sub(r"^.*?\(([^)]+)\)", r"\1", name) if name.startswith("Advanced") else name


def sentence(found: Mapping[str, str]) -> str:
    """Describe the instruction sets in a few words."""
    return "; ".join(f"{library}: {name}" for library, name in found.items())
