"""The start of the program: what is imported before the first step, in the run and in its data
workers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.support.launch import PROGRAM, ROOT, TINY
from tests.support.token_files import write_documents

# Each takes 0.1 to 1 s to import, and a run on a CPU with none of their options needs none of them.
HEAVY = set(
    "matplotlib pandas scipy sympy tokenizers torch._dynamo torch._inductor "
    "torch.fx.experimental.symbolic_shapes transformers triton wandb".split()
)


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh process without Triton's interpreter; return the last line of its
    output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()[-1]


def test_a_run_on_a_cpu_imports_nothing_heavy(tmp_path: Path) -> None:
    """Training, recomputation, a validation, a checkpoint and data workers take PyTorch, NumPy and
    safetensors only."""
    write_documents(tmp_path / "data", (np.arange(length) % 50 for length in range(20, 100)))
    code = (
        "import sys, pretrain_gpt\n"
        "assert pretrain_gpt.main(sys.argv[1:]) == 0\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    flags = [
        f"--data_path={tmp_path / 'data'}",
        *"--dataset_source=list --split=80,20,0 --train_iters=2 --validation_iters=1 --recompute_layers=1".split(),
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    assert run_python(code, *TINY, *flags) == "heavy: []"


def test_data_workers_import_only_what_they_need() -> None:
    """A worker process imports the program's file again: that takes no module of the command line,
    and no torch."""
    code = (
        f"import runpy, sys\nrunpy.run_path({str(PROGRAM)!r}, run_name='__mp_main__')\n"
        "print('imported:', sorted(name for name in sys.modules if name.split('.')[0] in ('megatron_lite', 'torch')))"
    )
    assert run_python(code) == "imported: []"
