"""The layouts that a dry run offers fit, are the ones that their flags mean, and the fastest comes first."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import flatten, unflatten
from megatron_lite.data.dataset_writer import IndexedDatasetWriter
from megatron_lite.planner.command import changed_words, launcher, layout_of_nodes, quoted
from megatron_lite.planner.devices import gpu_sheet
from megatron_lite.planner.plan import Planner, count_traffic, make_plan
from megatron_lite.planner.runtime import GIB
from megatron_lite.planner.search import Layout, Search, fewest_changes, recommended
from megatron_lite.validation import resolve
from megatron_lite.zero.schedule import training_schedule
from pretrain_gpt import main
from tests.support.launch import run

SMALL = (
    "--num_layers=8 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096 "
    "--batch_size=64 --training_dtype=bf16 --dataset_source=random --device=cuda --dry_run=1"
)


def search(gib: float, ranks: int = 4, more: str = "") -> Search:
    """Return the search for layouts of a small model."""
    asked = parse([*SMALL.split(), *more.split()]).config
    return Search(asked, 64, ranks, "cuda", int(gib * GIB), gpu_sheet(asked.distributed, ranks))


def rebuilt(found: Layout, asked: Search) -> dict[str, object]:
    """Return the options to which the fewest changes of a layout resolve."""
    typed = {**flatten(asked.asked), **fewest_changes(asked.asked, found)}
    return flatten(resolve(unflatten(typed), found.world_size))


@pytest.mark.parametrize("gib", [16, 24, 60])
def test_layouts_fit_and_are_sorted(gib: float) -> None:
    """Each needs what a full plan of its options says, exactly, and sends as much."""
    asked = search(gib)
    layouts = asked.layouts()
    assert layouts and [layout.time.seconds for layout in layouts] == sorted(layout.time.seconds for layout in layouts)
    for layout in layouts[::4]:
        plan = make_plan(layout.config, 4, "cuda")
        assert layout.needed_bytes == plan.needed_bytes() <= asked.device_bytes
        assert layout.state_bytes == plan.state_bytes
        assert layout.wire_bytes == sum(total.wire_bytes for total in plan.traffic.values())
        options = rebuilt(layout, asked)
        for name, value in flatten(layout.config).items():
            assert options[name] == value or name in ("num_weight_buffers", "num_grad_buffers"), name


def test_less_memory_is_slower() -> None:
    """The best layout of a smaller device is never faster."""
    best = [layouts[0].time.seconds if (layouts := search(gib).layouts()) else 1e9 for gib in (80, 12, 8, 6)]
    assert best == sorted(best) and best[0] < best[-1]


def test_a_layout_as_good_as_asked_stays() -> None:
    """Nothing is changed where the asked layout is the fastest, or nearly."""
    asked = search(200)
    config = asked.layouts()[0].config
    again = Search(config, 64, 4, "cuda", asked.device_bytes, asked.speeds)
    best = recommended([*again.layouts(), again.asked_layout(config)], config)
    assert {name: value for name, value in fewest_changes(config, best).items() if value is not None} == {}


def test_command_lines() -> None:
    """Flags of the plan go, changed ones move to the end, values with spaces are quoted, @files stay."""
    argv = [
        "--lr",
        "0.1",
        "--zero-stage=1",
        "--dry_run=1",
        "--world_size",
        "8",
        "--data_path",
        "a b",
        "c",
        "--gpu=h200",
    ]
    words = changed_words(argv, {"zero_stage": 3, "num_grad_buffers": None})
    assert words == ["--lr", "0.1", "--data_path", "a b", "c", "--zero_stage=3"]
    assert quoted(["python", "x.py", *words]) == "python x.py --lr 0.1 --data_path 'a b' c --zero_stage=3"
    files = changed_words(["@model.flags", "--dry_run=1"], {"num_grad_buffers": None, "split_master_weights": False})
    assert files == ["@model.flags", "--num_grad_buffers=none", "--split_master_weights=0"]
    assert parse([*files[1:], "--dataset_source=random"]).config.multi_stage.num_grad_buffers is None


def test_nodes_hold_whole_groups() -> None:
    """Ranks that share each layer share a node, if one holds them."""
    assert [layout_of_nodes(ranks, 8, 4) for ranks in (4, 8, 12, 24)] == [(1, 4), (1, 8), (3, 4), (3, 8)]
    assert layout_of_nodes(12, 8) == (2, 6) and layout_of_nodes(16, 8, 16) == (2, 8)
    assert launcher(12, 8, 4)[1:3] == ["--nnodes=3", "--nproc-per-node=4"]


LONG = ["@scripts/examples/mistral_7b.flags", "--dataset_source=random", "--dry_run=1", "--micro_batch_size=1"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--world_size=8", "--sequence_length=131072", "--batch_size=8"], marks=pytest.mark.slow),
        pytest.param(["--world_size=1", "--sequence_length=262144", "--batch_size=1"], marks=pytest.mark.slow),
        ["--world_size=auto", "--sequence_length=262144", "--batch_size=2"],
    ],
    ids=str,
)
def test_ranks_share_layers_where_nothing_else_fits(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One sample is too long for one GPU; the recommended command shares layers, and fits as it is."""
    assert main([*LONG, *flags]) == 0
    text = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    command = text.rpartition("pretrain_gpt.py ")[2].split()
    assert "--sequence_tensor_parallel=1" in command and re.search(r"to a layer, predicted", text)
    if "--world_size=auto" not in flags:
        (ranks,) = re.findall(r"nothing does unless (\d) ranks share each layer", text)
        assert f"--tensor_parallel={ranks}" in command
    (world_size,) = re.findall(r"--nproc-per-node=(\d+) pretrain_gpt.py", text)
    assert main([*command, "--dry_run=1", f"--world_size={world_size}"]) == 0
    assert re.search(r"^fits: ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(1, (1, 1)), (8, (1, 8)), (16, (2, 8)), (12, (2, 6)), (7, (1, 7)), (11, (11, 1))]
)
def test_nodes(ranks: int, nodes: tuple[int, int]) -> None:
    """As few nodes as hold equal numbers of ranks."""
    assert layout_of_nodes(ranks, 8) == nodes
    assert (launcher(ranks, 8)[0] == "python") == (ranks == 1)
    assert any(word.startswith("--nnodes") for word in launcher(ranks, 8)) == (nodes[0] > 1)


def page(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the page of a dry run."""
    assert main([*SMALL.split(), "--train_iters=1000", *more]) == 0
    return capsys.readouterr().out


def test_devices_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has its memory and its speed; a slow network makes the step longer; --device_memory_gib wins."""
    texts = {gpu: page(capsys, "--world_size=4", f"--gpu={gpu}") for gpu in ("h100", "h200", "a100-40")}
    assert main([*SMALL.replace("--device=cuda", "--gpu=cpu").split(), "--world_size=4"]) == 0
    texts["cpu"] = capsys.readouterr().out
    assert "139.7 GiB each" in texts["h200"] and "data sheet of a100-40" in texts["a100-40"]
    assert "on CPU" in texts["cpu"] and "GPU-hours" not in texts["cpu"] and "GPU-hours" in texts["h100"]
    slow = page(capsys, "--world_size=4", "--interconnect=ethernet:0.1")
    assert "--interconnect=ethernet 0.1 GB/s" in slow and "exchange that nothing hides" in slow
    assert "30.0 GiB each" in page(capsys, "--world_size=4", "--device_memory_gib=30")


def test_a_gpu_without_bf16_is_slow_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """On a V100 fp16 is several times as fast."""
    found = {}
    for dtype in ("bf16", "fp16"):
        text = page(capsys, "--world_size=4", "--gpu=v100", f"--training_dtype={dtype}")
        found[dtype] = float(text.partition("a step of ")[2].split()[0])
    assert found["bf16"] > 3 * found["fp16"]


def test_rows_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout as asked stands in the table once, also where the search finds the same."""
    for more in ("--world_size=auto", "--world_size=4 --micro_batch_size=4 --zero_stage=2"):
        text = page(capsys, *more.split(), "--device_memory_gib=30")
        rows = [line[1:] for line in text.partition("tokens/s\n")[2].splitlines() if line[2:7].strip() in "123"]
        assert len(rows) > 1 and len(set(rows)) == len(rows), text


def test_epochs_over_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of data on this machine the plan says how often training reads it; without them it says that it does not know."""
    with IndexedDatasetWriter(str(tmp_path / "corpus"), "<u2") as writer:
        writer.add_document(np.zeros(4097 * 32, np.uint16))
    flags = SMALL.replace("--dataset_source=random", f"--data_path={tmp_path / 'corpus'} --split=1,0,0").split()
    assert main([*flags, "--train_iters=2"]) == 0
    text = capsys.readouterr().out
    assert "training data: " in text and "epochs" in text.partition("training data: ")[2].splitlines()[0]
    assert (
        main([*SMALL.replace("--dataset_source=random", "--data_path=/missing/corpus").split(), "--train_iters=2"]) == 0
    )
    assert "epochs over the data: unknown; /missing/corpus.idx: no such file\n" in capsys.readouterr().out


def test_the_smallest_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--world_size=auto plans for the fewest GPUs that fit: fewer do not."""
    text = page(capsys, "--world_size=auto", "--device_memory_gib=6")
    ranks = int(text.split("dry run for ")[1].split()[0])
    assert ranks > 1 and "\nfits: " in text and f"--nproc-per-node={ranks}" in text
    fewer = page(capsys, f"--world_size={ranks // 2}", "--device_memory_gib=6")
    assert f"; {ranks} GPUs are the fewest that fit" in " ".join(fewer.split())


def test_nothing_fits_any_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says so in one line."""
    assert main([*SMALL.split(), "--world_size=auto", "--device_memory_gib=0.9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--world_size=auto: " in line and "no flags fit" in line


def test_the_job_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is sound shell, holds the recommended words, and is never overwritten."""
    job = tmp_path / "my job.sbatch"
    text = page(capsys, "--world_size=16", "--experiment_name=it's", f"--write_sbatch={job}")
    assert f"wrote {job}" in text
    script = job.read_text()
    assert subprocess.run(["bash", "-n", str(job)], capture_output=True).returncode == 0
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --gpus-per-node=8\n" in script and "--requeue" in script
    assert "'--experiment_name=it'\"'\"'s'" in script and "write_sbatch=" not in script and "--dry_run=" not in script
    assert main([*SMALL.split(), "--world_size=16", f"--write_sbatch={job}"]) == 2
    assert "File exists; name another file" in capsys.readouterr().err
    assert job.read_text() == script


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--interconnect=carrier_pigeon", "must be auto, nvlink, ib or ethernet"),
        ("--interconnect=ib:fast", "as in --interconnect=ib:25"),
        ("--interconnect=auto:5", "as in --interconnect=ib:25"),
        ("--interconnect=ib:-1", "as in --interconnect=ib:25"),
        ("--gpu=h1000", "h100"),
        ("--gpu=cpu", "--device=cuda plans for a GPU"),
        ("--device_memory_gib=0", "must be > 0"),
        ("--world_size=all", "auto"),
    ],
)
def test_usage_errors(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    assert main([*SMALL.split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_the_recommended_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU whose memory does not hold the run as asked, the printed flags train to the end."""
    tiny = "--num_layers=2 --hidden_size=64 --num_attention_heads=4 --vocab_size=512 --sequence_length=512"
    flags = [*tiny.split(), "--batch_size=64", "--train_iters=1", "--dataset_source=random", "--device=cpu"]
    assert main([*flags, "--dry_run=1", "--device_memory_gib=0.75"]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text
    command = text.rpartition("run this")[2].partition("pretrain_gpt.py")[2].replace("\\\n", " ").split()
    assert command[: len(flags)] != command and set(flags) <= set(command)
    done = run(command)
    assert done.codes == [0] and "training complete: 1 iteration" in done.output, done.output


def test_traffic_of_many_micro_batches() -> None:
    """Extrapolating from two and three micro-batches gives what the whole schedule counts."""
    for stage in (1, 2, 3):
        asked = search(500, 4, f"--zero_stage={stage} --micro_batch_size=2")
        config = resolve(asked.asked, 4)
        assert config.batch.depth_first_micro_batches == 8
        model = Planner(4, "cuda").partition(config).model
        assert make_plan(config, 4, "cuda").traffic == count_traffic(model, training_schedule(model.memory.plans, 8, 1))
