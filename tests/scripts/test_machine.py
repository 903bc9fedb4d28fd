"""scripts.benchmarks.machine writes what the planner reads, and predicted steps take as long as
measured ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.speeds import read_speeds
from scripts.benchmarks.machine import __main__ as machine
from scripts.benchmarks.machine import host, operations
from tests.support.harness import run_distributed
from tests.support.launch import ROOT


def make_quick() -> None:
    """Measure next to nothing, once."""
    operations.SIZES = {"cpu": {"tokens": (64,), "inputs": (64,), "outputs": (64, 128)}}  # type: ignore[dict-item]
    # type: ignore[assignment]
    operations.LENGTHS = (16, 32)
    operations.ATTENTION_TOKENS = {"cpu": 32}
    operations.UPDATED = {"cpu": 1024}
    host.PASS_WARM_UP = 0
    host.PASSES = 1
    host.SMALLEST = 1
    host.SIZES["cpu"].update(
        hidden_size=16, num_attention_heads=2, sequence_length=16, vocab_size=64
    )
    operations.POOL_BYTES = 2**22
    operations.FEWEST_TURNS = 1
    operations.MOST_TURNS = 1
    host.MORE_BLOCKS = 3
    host.WARM_UP = 1
    host.STEPS = 1
    operations.COLLECTIVE_TURNS = 1
    operations.LARGE_NUMEL = {"cpu": 2**12}
    operations.SIDE = {"cpu": 32}


def measured(distributed: Distributed, dtypes: list[str]) -> dict[str, Any]:
    """Return the contents of the file, measured in no time."""
    make_quick()
    return machine.measure(dtypes, distributed, 1)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_planner_reads_what_is_written(ranks: int, tmp_path: Path) -> None:
    """All dtypes and ranks: every kind of work has a time, and two ranks have speeds of
    collectives."""
    result, *_ = run_distributed(ranks, measured, ["fp32", "bf16"])
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(result))
    speeds = read_speeds(path)
    assert speeds.world_size == ranks and set(speeds.collectives) == (
        {"gather", "reduce"} if ranks > 1 else set()
    )
    assert 0 <= speeds.overlap <= 1 and speeds.block_s >= 0
    assert len(path.read_bytes()) < 20_000
    for measured_dtype in speeds.dtypes.values():
        kinds = {
            "copy_",
            "silu_backward",
            "native_layer_norm",
            "exp2_",
            "gradient norm",
            "update adamw",
        }
        assert kinds <= measured_dtype.seconds_per_byte.keys()


@pytest.mark.slow
def test_predictions_are_within_15_percent() -> None:
    """Six models of two families on this machine's CPU: 0.8 to 67 million parameters, short and
    long samples."""
    command = [sys.executable, "-m", "scripts.benchmarks.machine.predictions"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Llama") == done.stdout.count("GPT-2") == 3
