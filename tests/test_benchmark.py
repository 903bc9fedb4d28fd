"""scripts/benchmark.py in miniature: peers compute what we compute; the JSON holds what docs/benchmarks.md says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")
TINY = (
    "--device=cpu", "--num_layers=2", "--hidden_size=64", "--num_attention_heads=4", "--head_groups=2",
    "--ffn_hidden_size=96", "--vocab_size=128", "--sequence_length=32", "--steps=3", "--warmup_steps=1",
    "--micro_batches=2",
)  # fmt: skip
NAMES = {
    "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-2 breadth-first", "ZeRO-3", "ZeRO-3 breadth-first", "FSDP2", "FSDP2 no reshard",
    "FSDP2 no sync",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run on two ranks."""
    output = tmp_path_factory.mktemp("benchmark") / "results.json"
    command = [sys.executable, *TORCHRUN, str(ROOT / "scripts" / "benchmark.py"), *TINY, f"--output={output}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=output.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name in NAMES:
        assert f"| {name} |" in done.stdout
    return json.loads(output.read_text("utf-8"))


def test_peers_compute_the_same_losses(result: dict[str, Any]) -> None:
    """Every configuration has the same loss as ZeRO-1 at every step, and the loss moves, so that training took part."""
    rows = result["configurations"]
    assert set(rows) == NAMES
    for row in rows.values():
        assert len(row["losses"]) == 4
        assert row["losses"] == pytest.approx(rows["ZeRO-1"]["losses"], rel=0, abs=1e-5)
    assert len(set(rows["ZeRO-1"]["losses"])) == 4
    assert result["largest_loss_difference"] <= result["loss_tolerance"] == 1e-5


def test_json_has_what_the_docs_promise(result: dict[str, Any]) -> None:
    """Every key that docs/benchmarks.md lists is there, at the top and for each configuration."""
    document = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    top, row = (set(re.findall(r"^- `(\w+)`", part, re.M)) for part in document.split("Keys of")[1:3])
    assert top and top == set(result)
    for name, values in result["configurations"].items():
        optional = set() if name.startswith("ZeRO") else {"formula_bytes", "padding_bytes"}
        assert row - optional == set(values), name
        for key in ("step_s", "cpu_s", "ratio_to_ddp", "ratio_to_fsdp2"):
            low, high = values[key]["quartiles"]
            assert 0 < low <= values[key]["median"] <= high
            assert len(values[key]["values"]) == 3
    assert result["configurations"]["DDP"]["ratio_to_ddp"]["values"] == [1.0] * 3


def test_state_memory_is_the_formula_plus_padding(result: dict[str, Any]) -> None:
    """What the engine allocates is what the design's formula says, up to the padding of parameters and shards."""
    for name, row in result["configurations"].items():
        if name.startswith("ZeRO"):
            assert 0 <= row["padding_bytes"] <= 0.01 * row["formula_bytes"], name
            assert row["state_bytes"] == row["formula_bytes"] + row["padding_bytes"]
