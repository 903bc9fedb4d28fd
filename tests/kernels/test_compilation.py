"""All kernels compile to machine code for an H100, H200 or B200, on a machine without one.

Only the compiler finds type errors, block sizes that are not powers of two, globals that are not
constants and too much shared memory. Other tests check what the kernels compute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).parents[1] / "support" / "compile_kernels.py"
SHARED_BYTES = 227 * 2**10  # available to one program on these GPUs


def compiled(cache: Path, *flags: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return kernels with their resources, and a verdict with failures and kernels that nothing
    launched."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr[-3000:]
    *kernels, verdict = map(json.loads, done.stdout.splitlines())
    return kernels, verdict


def check(cache: Path, *flags: str) -> None:
    """Check that every kernel compiles and fits into shared memory and registers."""
    kernels, verdict = compiled(cache, *flags)
    assert verdict == {"failures": {}, "never launched": []}
    assert len(kernels) >= 15
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in kernels), kernels
    spilled = [
        (kernel["kernel"], kernel["shapes"])
        for kernel in kernels
        if kernel["common"] and kernel["stack"]
    ]
    assert not spilled, f"registers spill to memory at ordinary sizes: {spilled}"


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Compile in bf16 at the shapes of a large model."""
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_kernels_compile_for_a_gpu_in_every_variant(dtype: str, arch: int, tmp_path: Path) -> None:
    """Compile all activations, biases, odd sizes, sizes of one and very wide rows in every
    dtype."""
    check(tmp_path, f"--arch={arch}", f"--dtype={dtype}", "--all")
