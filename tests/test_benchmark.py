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
SCRIPTS = ROOT / "scripts"
TINY = (
    "--num_layers=2", "--hidden_size=64", "--num_attention_heads=4", "--head_groups=2",
    "--ffn_hidden_size=96", "--vocab_size=128", "--sequence_length=32", "--turns=3", "--warmup_turns=1",
    "--steps_per_turn=2",
)  # fmt: skip
OWN = {"ZeRO-1", "ZeRO-2", "ZeRO-2 breadth-first", "ZeRO-3", "ZeRO-3 breadth-first"}
PLAIN = {f"plain {name}" for name in OWN}
NAMES = {"DDP", *OWN, *PLAIN, "FSDP2", "FSDP2 all resharded", "FSDP2 no reshard", "FSDP2 no sync"}
# Keys of our rows alone.
OURS_ONLY = {"formula_bytes", "padding_bytes", "wire_theory_bytes", "wire_counted_bytes"}


def run(program: list[str], output: Path) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and the JSON that it writes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *program, f"--output={output}"]
    done = subprocess.run(command, cwd=output.parent, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, json.loads(output.read_text("utf-8"))


def run_on_two_ranks(output: Path, *options: str) -> dict[str, Any]:
    """The JSON of scripts/benchmark.py, whose table names every configuration in it."""
    text, result = run([*TORCHRUN, str(SCRIPTS / "benchmark.py"), "--device=cpu", *TINY, *options], output)
    assert all(f"| {name} |" in text for name in result["configurations"])
    return result


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All configurations, two micro-batches."""
    output = tmp_path_factory.mktemp("benchmark") / "results.json"
    return run_on_two_ranks(output, "--layers=both", "--micro_batches=2")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that trains the plain layers, one micro-batch."""
    return run_on_two_ranks(tmp_path_factory.mktemp("benchmark") / "results.json", "--layers=plain")


def test_peers_compute_the_same_losses(result: dict[str, Any]) -> None:
    """Every configuration has the same loss as ZeRO-1 at every step, and the loss moves, so that training took part."""
    rows = result["configurations"]
    assert set(rows) == NAMES
    for row in rows.values():
        assert len(row["losses"]) == 8
        assert row["losses"] == pytest.approx(rows["ZeRO-1"]["losses"], rel=0, abs=1e-5)
    assert len(set(rows["ZeRO-1"]["losses"])) == 8
    assert result["largest_loss_difference"] <= result["loss_tolerance"] == 1e-5


def test_json_has_what_the_docs_promise(result: dict[str, Any]) -> None:
    """Every key that docs/benchmarks.md lists is there, at the top and for each configuration."""
    document = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    top, row = (set(re.findall(r"^- `(\w+)`", part, re.M)) for part in document.split("Keys of")[1:3])
    assert top and top == set(result)
    for name, values in result["configurations"].items():
        assert row - (set() if "ZeRO" in name else OURS_ONLY) == set(values), name
        for key in ("step_s", "cpu_s", "ratio_to_ddp", "ratio_to_fsdp2", "ratio_to_fsdp2_all_resharded"):
            low, high = values[key]["quartiles"]
            assert 0 < low <= values[key]["median"] <= high
            assert len(values[key]["values"]) == 3
    assert result["configurations"]["DDP"]["ratio_to_ddp"]["values"] == [1.0] * 3


def test_state_memory_is_the_formula_plus_padding(result: dict[str, Any]) -> None:
    """What the engine allocates is what the design's formula says, up to the padding of parameters and shards."""
    for name in OWN | PLAIN:
        row = result["configurations"][name]
        assert 0 <= row["padding_bytes"] <= 0.01 * row["formula_bytes"], name
        assert row["state_bytes"] == row["formula_bytes"] + row["padding_bytes"]


def test_traffic_is_what_the_schedule_says(result: dict[str, Any], single: dict[str, Any]) -> None:
    """The books of the schedule equal what the engine counts; ZeRO-1 moves every parameter out of every rank twice."""
    rows = [*single["configurations"].items(), *result["configurations"].items()]
    ours = {name: row for name, row in rows if "ZeRO" in name}
    for name, row in ours.items():
        assert row["wire_counted_bytes"] == row["wire_theory_bytes"], name
    # Two ranks: half of the gradients and half of the weights each, in fp32, padding of at most 1 % included.
    assert 1 <= ours["ZeRO-1"]["wire_theory_bytes"] / (2 * 4 * result["parameters"]) < 1.01
    assert ours["plain ZeRO-3"]["wire_theory_bytes"] > ours["plain ZeRO-3 breadth-first"]["wire_theory_bytes"]


def test_plain_layers_train_to_the_weights_of_ddp(result: dict[str, Any], single: dict[str, Any]) -> None:
    """With the same layers the engine ends with DDP's very weights, at every ZeRO stage.

    Depth-first accumulation reduces every micro-batch: equal to rounding only. So do our own layers, with their own
    order of sums; that tells that the comparison is one of trained weights.
    """
    rows = single["configurations"]
    assert {name: rows[name]["weights_as_ddp"] for name in rows if "ZeRO" in name} == {
        "plain ZeRO-1": True, "plain ZeRO-2": True, "plain ZeRO-3": True,
    }  # fmt: skip
    rows = result["configurations"]
    for name in ("plain ZeRO-1", "plain ZeRO-2 breadth-first", "plain ZeRO-3 breadth-first"):
        assert rows[name]["weights_as_ddp"], name
    assert not rows["ZeRO-1"]["weights_as_ddp"]
    assert max(row["weights_to_ddp"] for row in rows.values()) < 1e-6


def test_memory_is_measured_one_configuration_at_a_time(tmp_path: Path) -> None:
    """Peaks are above a bare process, and at least what the state takes where that is more than a little."""
    program = [str(SCRIPTS / "benchmark_memory.py"), *TINY, "--layers=plain", "--only=DDP,plain ZeRO-3"]
    text, memory = run([*program, "--vocab_size=65536", "--turns=2"], tmp_path / "memory.json")
    assert set(memory["configurations"]) == {"DDP", "plain ZeRO-3"}
    assert memory["configurations"]["DDP"]["ratio_to_ddp"] == 1.0
    for name, row in memory["configurations"].items():
        assert f"| {name} |" in text
        assert row["peak_bytes"] > row["state_bytes"] > 50 * 2**20
