"""The training benchmark in miniature: peers compute what we compute; the JSON holds what is
promised."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import checkpoint, pipeline
from scripts.benchmarks.commands import TORCHRUN
from scripts.benchmarks.training import profile, report
from tests.support import warm_python
from tests.support.launch import free_port

pytestmark = pytest.mark.benchmarks

ROOT = Path(__file__).resolve().parents[2]


TINY = (
    "--num_layers=2 --hidden_size=64 --num_attention_heads=4 --head_groups=2 --micro_batch_size=2 --ffn_hidden_size=96"
    " --vocab_size=128 --sequence_length=32 --turns=2 --warmup_turns=1 --steps_per_turn=2"
).split()
# Keys of our rows alone, on a GPU, and with --profile.
OURS_ONLY = {"wire_counted_bytes", "attention"}
ELSEWHERE = {"profile_s", "planned_peak_bytes", "peak_bytes", "mfu", "mfu_full"}


def run(program: list[str], output: Path) -> tuple[str, dict[str, Any]]:
    """The output of a benchmark, and its JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *program, f"--output={output}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, json.loads(output.read_text("utf-8"))


def run_on_ranks(ranks: int, output: Path, *options: str) -> dict[str, Any]:
    """The JSON of scripts/benchmarks/training, whose table names every configuration in it."""
    program = [
        "-m",
        "scripts.benchmarks.training",
        "--device=cpu",
        *TINY,
        *options,
    ]
    command = [str(warm_python.folder() / "python"), *program, f"--output={output}"]
    job = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": free_port(),
        "MASTER_ADDR": "localhost",
    }
    processes = []
    for rank in range(ranks):
        own = {
            name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=warm_python.environment() | own, **streams)
        )
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "".join(texts)[-4000:]
    text, result = texts[0], json.loads(output.read_text("utf-8"))
    assert all(f"| {name} |" in text for name in result["rows"])
    assert all(f"not run: {name}: " in text for name in result["missing"])
    return result


NAMES = {"DDP", "ZeRO-1", "ZeRO-2 breadth-first", "ZeRO-3", "ZeRO-3 breadth-first", "FSDP2"}
NAMES |= {"FSDP2 all resharded", "FSDP2 no reshard"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The benchmark of configurations that compile nothing, with two micro-batches."""
    output = tmp_path_factory.mktemp("benchmark") / "results.json"
    return run_on_ranks(2, output, "--micro_batches=2", f"--only={','.join(NAMES)}")


def test_peers_compute_the_same_losses(result: dict[str, Any]) -> None:
    """Every configuration has the same loss as ZeRO-1 at every step, and the loss moves, so that
    training took part."""
    rows = result["rows"]
    assert set(rows) == NAMES
    for row in rows.values():
        assert len(row["losses"]) == 6
        assert row["losses"] == pytest.approx(rows["ZeRO-1"]["losses"], rel=0, abs=1e-5)
    assert len(set(rows["ZeRO-1"]["losses"])) == 6
    assert result["largest_loss_difference"] <= result["loss_tolerance"] == 1e-5


@pytest.mark.slow
def test_one_rank_at_a_time_in_gpt2s_shape(tmp_path: Path) -> None:
    """Configurations that are rebuilt for every turn, of a model with positions, biases, layer norm
    and a tied head.

    Every turn starts from the same weights and computes the same losses everywhere, recomputing or
    not.
    """
    names = {"torch", "ZeRO-3", "FSDP2"}
    names |= {f"ZeRO-1{more}" for more in ("", " recompute activation", " recompute full")}
    options = (
        "--model=gpt2-124m",
        "--head_groups=4",
        "--one_at_a_time",
        f"--only={','.join(names)},HF",
    )
    result = run_on_ranks(1, tmp_path / "results.json", *options)
    rows = result["rows"]
    assert set(rows) == names | ({"HF"} if find_spec("transformers") else set())
    for name, row in rows.items():
        assert len(row["losses"]) == 4
        assert row["losses"] == pytest.approx(rows["torch"]["losses"], rel=0, abs=1e-5), name
        assert row["step_s"]["median"] > 0 and len(row["ratios"]["torch"]["values"]) == 2
        assert row["model_tflops"] > 0
    assert result["failures"] == {}


@pytest.mark.slow
def test_bf16_rows_agree_to_its_rounding(tmp_path: Path) -> None:
    """Each side in bf16 as it is meant: ours with fp32 masters, autocast under DDP,
    MixedPrecisionPolicy in FSDP2."""
    result = run_on_ranks(
        2, tmp_path / "results.json", "--dtype=bf16", "--only=DDP,ZeRO-1,ZeRO-3,FSDP2"
    )
    rows = result["rows"]
    assert 1e-5 < result["largest_loss_difference"] <= result["loss_tolerance"]
    assert {"DDP", "ZeRO-1", "ZeRO-3", "FSDP2"} <= set(rows)
    # 6 + 12 / N bytes
    assert 1 <= rows["ZeRO-1"]["state_bytes"] / (12 * result["parameters"]) < 1.01
    # fp32 weights, gradients and moments everywhere; ours have bf16 weights besides.
    assert rows["DDP"]["state_bytes"] == 16 * result["parameters"]


@pytest.mark.slow
def test_tensor_parallel_rows_agree(tmp_path: Path) -> None:
    """Ours and torch's, with and without sequence parallelism: equal losses from the same weights,
    traffic counted."""
    result = run_on_ranks(2, tmp_path / "results.json", "--tensor_parallel=2")
    rows = result["rows"]
    assert set(rows) == {"torch TP", "TP", "torch TP+SP", "TP+SP"}
    assert result["largest_loss_difference"] <= result["loss_tolerance"] == 1e-5
    assert len(set(rows["TP"]["losses"])) == 6
    # Each layer exchanges (b s, h) four times, embedding and head once each, all of them in fp32,
    # both ways.
    exchanged = (4 * 2 + 2) * 2 * 32 * 64 * 4 * 2
    assert exchanged < rows["TP"]["wire_counted_bytes"] < 1.1 * exchanged
    for peer in ("torch TP", "torch TP+SP"):
        assert len(rows["TP"]["ratios"][peer]["values"]) == 2


@pytest.mark.slow
def test_rows_of_hybrid_shards_agree(tmp_path: Path) -> None:
    """Two pairs of ranks, with two micro-batches: equal losses, state that shows who shards over
    what, traffic of ours to the formula."""
    names = {"DDP", "ZeRO-2 breadth-first", "ZeRO-3", "FSDP2", "FSDP2 no reshard"}
    options = ("--data_parallel_shard=2", "--micro_batches=2", f"--only={','.join(names)}")
    result = run_on_ranks(4, tmp_path / "results.json", *options)
    rows, parameters = result["rows"], result["parameters"]
    assert (
        set(rows) == names and result["largest_loss_difference"] <= result["loss_tolerance"] == 1e-5
    )
    assert len(set(rows["FSDP2"]["losses"])) == 6
    # In both directions each pair exchanges halves of all parameters, and ranks of equal places
    # halves of their halves.
    counted = rows["ZeRO-2 breadth-first"]["wire_counted_bytes"]
    assert 1 <= counted / (2 * 4 * 4 * parameters * (1 / 2 + 1 / 4)) < 1.01
    assert 1 <= rows["FSDP2"]["state_bytes"] / (16 / 2 * parameters) < 1.01  # of one pair's two


@pytest.mark.slow
def test_compiled_rows_train(tmp_path: Path) -> None:
    """Through the compiler itself, where there is one: the same losses again."""
    result = run_on_ranks(1, tmp_path / "results.json", "--only=torch*,FSDP2*,HF*")
    if any("torch.compile fails" in reason for reason in result["missing"].values()):
        pytest.skip(str(result["missing"]))
    assert {"torch compiled", "torch compiled full logits", "FSDP2 compiled"} <= set(result["rows"])
    assert result["largest_loss_difference"] <= 1e-5


def test_json_has_the_keys_that_are_promised(result: dict[str, Any]) -> None:
    """Every key that the report's module lists is there, at the top and for each configuration."""
    every, document = pipeline.__doc__ or "", report.__doc__ or ""
    common, top, row = (
        set(re.findall(r"^- `(\w+)`", part, re.M))
        for part in (every, *document.split("Keys of one row"))
    )
    assert common and top and common | top == set(result)
    for name, values in result["rows"].items():
        absent = ELSEWHERE if "ZeRO" in name else ELSEWHERE | OURS_ONLY
        assert row - absent == set(values), name
        for spread in (values["step_s"], *values["ratios"].values()):
            low, high = spread["quartiles"]
            assert 0 < low <= spread["median"] <= high
            assert len(spread["values"]) == 2
    assert result["rows"]["DDP"]["ratios"]["DDP"]["values"] == [1.0] * 2


def test_memory_and_traffic_of_the_engine(result: dict[str, Any]) -> None:
    """ZeRO-1 has 8 + 8 / N bytes per parameter and moves every parameter out of every rank twice;
    accumulation that is breadth-first saves traffic."""
    ours, parameters = result["rows"], result["parameters"]
    # Two ranks: half of the gradients and half of the weights each, in fp32, padding of at most 1 %
    # included.
    assert 1 <= ours["ZeRO-1"]["state_bytes"] / (12 * parameters) < 1.01
    assert 1 <= ours["ZeRO-1"]["wire_counted_bytes"] / (2 * 4 * parameters) < 1.01
    counted = {name: row.get("wire_counted_bytes") for name, row in ours.items()}
    assert counted["ZeRO-3"] > counted["ZeRO-3 breadth-first"]


@pytest.mark.slow
def test_memory_is_measured_one_configuration_at_a_time(tmp_path: Path) -> None:
    """Peaks are above a bare process, and at least what the state takes where that is more than a
    little."""
    program = ["-m", "scripts.benchmarks.training.memory", *TINY, "--ranks=1"]
    program += ["--only=torch,ZeRO-3", "--vocab_size=65536"]
    text, memory = run(program, tmp_path / "memory.json")
    assert set(memory["rows"]) == {"torch", "ZeRO-3"}
    assert memory["rows"]["torch"]["ratios"]["torch"]["median"] == 1.0
    for name, row in memory["rows"].items():
        assert f"| {name} |" in text
        assert row["peak_bytes"] > row["state_bytes"] > 50 * 2**20


@pytest.mark.slow
def test_a_profile_names_where_a_step_goes(tmp_path: Path) -> None:
    """Every row has the seconds of every kind of operation, most of which run in each of them."""
    output = tmp_path / "results.json"
    program = [
        *TORCHRUN,
        "--nproc-per-node=1",
        "-m",
        "scripts.benchmarks.training",
        "--device=cpu",
        *TINY,
    ]
    text, result = run([*program, "--profile", "--only=torch,ZeRO-1"], output)
    for name in ("torch", "ZeRO-1"):
        seconds = result["rows"][name]["profile_s"]
        assert set(seconds) == {*profile.KINDS, profile.REST} and seconds["compiled"] == 0
        assert all(
            0 < seconds[kind] < 1 for kind in seconds if kind not in ("compiled", profile.REST)
        ), seconds
        assert seconds[profile.REST] < 1
    assert re.search(r"\|  \| profiled step, ms \| attention \| products \|.*\| rest \|", text)


def test_operations_are_sorted_by_name() -> None:
    kinds = {
        "aten::addmm": "products",
        "aten::addmm_": "products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::_fused_adamw_": "optimizer",
        "aten::_foreach_norm": "norms",
        "aten::native_layer_norm_backward": "norms",
        "aten::gelu_backward": "activation",
        "aten::copy_": "copies, sums, others",
        "autograd::engine::evaluate_function: MmBackward0": None,
        "gloo:all_reduce": None,
    }
    assert {name: profile.kind_of(name) for name in kinds} == kinds


@pytest.mark.slow
def test_checkpoints_are_timed_beside_their_peers(tmp_path: Path) -> None:
    """The benchmark of checkpoints runs, has every row of the document, and leaves nothing in its
    folder."""
    folder = tmp_path / "disk"
    program = [
        *TORCHRUN,
        "--nproc-per-node=2",
        "-m",
        "scripts.benchmarks.checkpoint",
        f"--folder={folder}",
    ]
    text, result = run([*program, "--mib=32", "--turns=1", "--step_s=0"], tmp_path / "results.json")
    assert list(result["rows"]) == [*checkpoint.SAVES, *checkpoint.LOADS]
    assert all(f"| {name} |" in text for name in result["rows"]) and not folder.exists()
