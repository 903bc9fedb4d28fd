"""scripts/benchmarks/training/optimizer.py in miniature: every row is timed beside its peers and does what they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--num_layers=1", "--hidden_size=64", "--ffn_hidden_size=96", "--vocab_size=128", "--turns=2")


def test_every_row_is_measured_and_agrees_with_its_peer(tmp_path: Path) -> None:
    """The program fails where weights are apart; here it is made to say how far they are."""
    output = tmp_path / "optimizer.json"
    program = [sys.executable, "-m", "scripts.benchmarks.training.optimizer", *TINY, f"--output={output}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = json.loads(output.read_text("utf-8"))["rows"]
    assert len(rows) == 7 and all(f"| {name} |" in done.stdout for name in rows)
    for row in rows.values():
        assert row["parameters"] > 30_000
        assert len(row["step_s"]["values"]) == 2 and min(row["step_s"]["values"]) > 0 and len(row["ratios"]) == 2
    compared = {name: row["largest_difference"] for name, row in rows.items() if "largest_difference" in row}
    assert len(compared) == 3 and compared["clip_grad=0"] == 0.0
    assert max(compared.values()) < 1e-6
