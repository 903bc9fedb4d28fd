"""The end of a dry run: a table of layouts that fit, and a command that does."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.planner import search
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.devices import GPUS, PLANNED_GPU_BYTES, planned_speeds
from megatron_lite.planner.plan import Planner
from megatron_lite.planner.work_time import predict_step
from megatron_lite.validation import resolve
from pretrain_gpt import main
from tests.planner.test_printed_command import command_of
from tests.planner.test_report import page
from tests.support import warm_python
from tests.support.launch import TINY, run

pytestmark = pytest.mark.usefixtures("shared_planners")

ROOT = Path(__file__).resolve().parents[2]
# Fast-LLM's guide for a Mistral-7B, word for word: its run took 16 machines of 8 H100 cards.
(GUIDE,) = re.findall(
    r"```bash\n(export MODEL_ARGS=.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)
SMALL_CLUSTER = "--micro_batch_size=1 --zero_stage=2"


def guide_flags() -> list[str]:
    """The words that a shell makes of the strings in the README."""
    command = GUIDE + "printf '%s\\n' $MODEL_ARGS $TRAINING_ARGS $PERFORMANCE_ARGS $MONITORING_ARGS"
    environment = {**os.environ, "EXP_BASE_DIR": "/experiments/mistral"}
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True
    ).stdout.split()


def fits(text: str) -> bool:
    """Whether a page says that the chosen level of recomputation fits."""
    (title,) = (line for line in text.splitlines() if line.startswith("activations, MiB"))
    (needed,) = (line for line in text.splitlines() if line.startswith("  needed"))
    (device,) = re.findall(r"^  of ([\d.,]+) ", text, re.M)
    chosen = [column.endswith(" *") for column in re.split(r"\s{2,}", title)[1:]].index(True)
    said = float(needed.split()[1 + chosen].replace(",", "")) <= float(device.replace(",", ""))
    assert said == ("does not fit" not in text)
    return said


def planned_bytes(flags: list[str], ranks: int, device_type: str = "cuda") -> int:
    """Return the memory that a rank needs with these flags on GPUs of 80 GB, or on a CPU."""
    config = resolve(parse([*flags, "--dry_run=1"]).config, ranks)  # which needs no data
    config, _ = resolve_auto(config, ranks, device_type, PLANNED_GPU_BYTES)
    return Planner(ranks, device_type).plan(config).needed_bytes()


def check_recommendation(text: str) -> list[str]:
    """Check that the recommended command fits GPUs of 80 GB and leaves 3 % free, and return its
    flags."""
    ranks, flags = command_of(text)
    assert not any(flag.startswith(("--dry_run", "--world_size", "--gpu")) for flag in flags)
    assert planned_bytes(flags, ranks) <= 0.97 * PLANNED_GPU_BYTES, flags
    return flags


def test_the_guides_run_fits_its_own_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """128 cards of 80 GB hold the guide's strings as they are, and 4 to 64 its strings for small
    clusters."""
    flags = guide_flags()
    assert "--min_lr=0.000003" in flags and len(flags) == 37
    text = page(capsys, *flags, "--world_size=128")
    assert fits(text) and "zero_stage 1" in text and "none *" in text
    assert command_of(text) == (128, [*flags, "--zero_stage=3"]), (
        "as fast, and more than 3 % stay free"
    )
    for ranks in (4, 8, 16, 32, 64):
        assert planned_bytes([*flags, *SMALL_CLUSTER.split()], ranks) <= PLANNED_GPU_BYTES


def test_the_example_job_fits_its_16_machines(tmp_path: Path) -> None:
    """The multi-node example, planned for the 128 ranks that it asks Slurm for, fits."""
    torchrun, python = tmp_path / "torchrun", warm_python.folder() / "python"
    torchrun.write_text(
        f'#!/bin/sh\nwhile [ "${{1%%.py}}" = "$1" ]; do shift; done\nexec {python} "$@"\n'
    )
    torchrun.chmod(0o755)
    job = (ROOT / "scripts/examples/slurm_multi_node.sbatch").read_text()
    (nodes,), (gpus,) = (
        re.findall(r"--nodes=(\d+)\n", job),
        re.findall(r"#SBATCH --gpus-per-node=(\d+)", job),
    )
    (flags,) = re.findall(r"    train (--.*) \"\$@\" \|\|", job)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DATA_PATH": "d",
        "EXP_BASE_DIR": "e",
    }
    planned = [*flags.split(), "--dry_run=1", f"--world_size={int(nodes) * int(gpus)}"]
    command = ["bash", "scripts/examples/train_mistral.sh", *planned]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "dry run for 128 GPUs" in result.stdout and fits(result.stdout), (
        result.stdout + result.stderr
    )


def test_a_quarter_of_the_cluster_ends_with_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's strings on 32 cards end with all of them and a few flags that fit."""
    flags = guide_flags()
    text = page(capsys, *flags, "--world_size=32")
    assert not fits(text)
    better = check_recommendation(text)
    assert better[: len(flags)] == flags and 1 <= len(better) - len(flags) <= 3
    assert {flag.partition("=")[0] for flag in better[len(flags) :]} <= {
        "--micro_batch_size",
        "--mlp_recompute_level",
        "--zero_stage",
    }


LARGE = (
    "--num_layers=12 --hidden_size=2048 --num_attention_heads=16 --vocab_size=50000 --sequence_length=16384 "
    "--training_dtype=bf16 --dataset_source=random --world_size=8 --tie_word_embeddings=0 --batch_size"
).split()


# Which options a configuration that a seed draws does not have: see `test_printed_command.py`.
@pytest.mark.parametrize(
    "more",
    [
        "256 --zero_stage=auto --layers_per_stage=auto",
        pytest.param("256 --num_grad_buffers=4 --gated=1", marks=pytest.mark.slow),
        pytest.param(
            "256 --validation_iters=1 --eval_micro_batch_size=32 --micro_batch_size=8",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "250 --allow_nondivisible_batch_size=1 --micro_batch_size=7", marks=pytest.mark.slow
        ),
        "none --batch_size_schedule 0:128 100:256 --micro_batch_size=8",
        pytest.param("256 --freeze=embedding", marks=pytest.mark.slow),
    ],
)
def test_the_recommended_command_fits(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The run as asked does not fit, the recommended command does."""
    text = page(capsys, *LARGE, *more.split())
    assert not fits(text) or "zero_stage=auto" in more
    check_recommendation(text)


def test_a_batch_that_was_not_typed_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the batch follows from micro-batches and ranks, the advice writes it down."""
    flags = "--num_layers=12 --hidden_size=2048 --micro_batch_size=16 --sequence_length=4096 --world_size=2"
    text = page(capsys, *flags.split())
    assert "--batch_size=32" in check_recommendation(text)


def test_nothing_fits_a_model_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    """The page then says how little memory would do, with all flags and with the most GPUs."""
    # No pipeline divides 7 blocks.
    flags = [
        "--num_layers=7",
        "--hidden_size=32768",
        "--num_attention_heads=128",
        "--sequence_length=65536",
    ]
    text = page(capsys, *flags, "--batch_size=4", "--world_size=2", "--training_dtype=bf16")
    assert not fits(text) and "run this" not in text
    joined = " ".join(text.split())
    assert re.search(r"[\d.,]+ GiB on 4 GPUs, the most that share its batch; no flags fit", joined)


LONG = ["@scripts/examples/mistral_7b.flags", "--dataset_source=random", "--micro_batch_size=1"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--world_size=8", "--sequence_length=262144", "--batch_size=8"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["--world_size=4", "--sequence_length=262144", "--batch_size=4"], marks=pytest.mark.slow
        ),
        ["--num_layers=16", "--world_size=auto", "--sequence_length=262144", "--batch_size=2"],
    ],
    ids=str,
)
def test_ranks_share_layers_where_nothing_else_fits(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample is too long for one GPU; the recommended command shares layers, and fits as it
    is."""
    text = " ".join(page(capsys, *LONG, *flags).replace("\\\n", " ").split())
    command = text.rpartition("pretrain_gpt.py ")[2].split()
    assert "--sequence_tensor_parallel=1" in command and re.search(r"TP [248], predicted", text)
    if "--world_size=auto" not in flags:
        (ranks,) = re.findall(r"nothing does with less than --tensor_parallel=(\d)", text)
        assert f"--tensor_parallel={ranks}" in command
    (world_size,) = re.findall(r"--nproc-per-node=(\d+) pretrain_gpt.py", text)
    assert fits(page(capsys, *command, f"--world_size={world_size}"))


SMALL = (
    "--num_layers=4 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096 "
    "--batch_size=16 --training_dtype=bf16 --dataset_source=random --device=cuda"
).split()


def small_page(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the page of a small model."""
    return page(capsys, *SMALL, "--train_iters=1000", *more)


def predicted(ranks: int, *flags: str) -> tuple[float, str]:
    """Return the seconds of a step as asked, and what that rests on."""
    config = resolve(parse([*flags, "--dry_run=1"]).config, ranks)
    speeds = planned_speeds(config.distributed, "cuda", ranks)
    step = predict_step(Planner(ranks, "cuda").plan(config), speeds)
    return step.seconds, " ".join(speeds.assumptions)


def test_devices_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has its memory and its speed; a slow network makes the step longer;
    --device_memory_gib wins."""
    h200 = small_page(capsys, "--world_size=4", "--gpu=h200")
    assert "139.7 GiB each" in h200 and "GPU-hours" in h200
    cpu = page(capsys, *TINY, "--gpu=cpu", "--world_size=4")
    assert "on CPU" in cpu and "GPU-hours" not in cpu
    slow = small_page(
        capsys, "--world_size=4", "--interconnect=ethernet:0.1", "--device_memory_gib=30"
    )
    assert "--interconnect=ethernet 0.1 GB/s" in slow and "exposed communication" in slow
    assert "30.0 GiB each" in slow and "data sheet of h100 (as no --gpu is named)" in slow


@pytest.mark.parametrize(
    "gpu",
    [
        gpu if gpu in ("a100-40", "mi300x") else pytest.param(gpu, marks=pytest.mark.slow)
        for gpu in sorted(GPUS)
    ],
)
def test_speeds_are_labelled(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every card has a plan that names it; shares that no run has confirmed are called assumed."""
    text = " ".join(small_page(capsys, "--world_size=4", "--batch_size=4", f"--gpu={gpu}").split())
    assert f"layouts that fit 4 GPUs ({gpu}), predicted" in text and f"data sheet of {gpu}:" in text
    known = {"a100", "a100-40", "h100", "h200"}
    assert ("assumed, as no run on this device has been measured" in text) == (gpu not in known)


def test_a_gpu_without_bf16_is_slow_in_bf16() -> None:
    """On a V100 fp16 is several times as fast."""
    bf16, fp16 = (
        predicted(4, *SMALL, "--gpu=v100", f"--training_dtype={dtype}")[0]
        for dtype in ("bf16", "fp16")
    )
    assert bf16 > 3 * fp16


@pytest.mark.parametrize("gpu", ["h100", "v100"])
def test_tf32_is_planned_at_half_the_speed_of_16_bits(gpu: str) -> None:
    """Where the GPU has TF32."""
    (plain_s, plain), (rounded_s, rounded) = (
        predicted(4, *SMALL, f"--gpu={gpu}", "--training_dtype=fp32", f"--tf32={tf32}")
        for tf32 in (0, 1)
    )
    assert ("h100: tf32 494.7 TFLOP/s" in rounded) == (gpu == "h100") and ": tf32" not in plain
    assert plain_s > 2 * rounded_s if gpu == "h100" else plain_s == rounded_s


def test_products_in_8_bits_are_planned_at_twice_the_speed_of_16() -> None:
    """Where the GPU has units for them; rounding costs passes over memory, and on others all is
    slower."""
    times = {}
    for gpu, fp8 in itertools.product(("h200", "a100"), ("none", "tensorwise")):
        flags = f"--zero_stage=3 --micro_batch_size=1 --training_dtype=bf16 --gpu={gpu} --fp8={fp8}"
        model = ("--model=mistral-7b", "--num_layers=4", "--sequence_length=8192")
        times[gpu, fp8], _ = predicted(8, *model, *flags.split())
    assert 1.2 < times["h200", "none"] / times["h200", "tensorwise"] < 2
    assert times["a100", "none"] < times["a100", "tensorwise"]


def test_a_search_that_was_cut_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = "others may be faster: the search was cut after 8 s of processor time"
    monkeypatch.setattr(search, "SEARCH_S", 600.0)
    assert cut not in small_page(capsys)
    monkeypatch.setattr(search, "SEARCH_S", 0.0)
    assert cut in small_page(capsys)


def test_rows_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout as asked stands in the table once, also where the search finds the same."""
    for more in ("--world_size=auto", "--world_size=4 --micro_batch_size=4 --zero_stage=2"):
        text = small_page(capsys, *more.split(), "--device_memory_gib=30")
        rows = [
            line[1:]
            for line in text.partition("tokens/s\n")[2].splitlines()
            if line[2:7].strip() in "123"
        ]
        assert len(rows) > 1 and len(set(rows)) == len(rows), text


def test_epochs_over_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of data on this machine the plan says how often training reads it; without them it says that
    it does not know."""
    with IndexedDatasetWriter(str(tmp_path / "corpus"), "<u2") as writer:
        writer.add_document(np.zeros(4097 * 32, np.uint16))
    flags = [flag for flag in SMALL if not flag.startswith("--dataset_source")]
    text = page(
        capsys, *flags, f"--data_path={tmp_path / 'corpus'}", "--split=1,0,0", "--train_iters=2"
    )
    assert (
        "training data: " in text
        and "epochs" in text.partition("training data: ")[2].splitlines()[0]
    )
    missing = page(capsys, *flags, "--data_path=/missing/corpus", "--train_iters=2")
    assert "epochs over the data: unknown; /missing/corpus: no such file, folder or pair" in missing


def test_the_smallest_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--world_size=auto plans for the fewest GPUs that fit: fewer do not."""
    text = small_page(capsys, "--num_layers=8", "--world_size=auto", "--device_memory_gib=6")
    ranks = int(text.split("dry run for ")[1].split()[0])
    assert ranks > 1 and "\nfits: " in text and f"--nproc-per-node={ranks}" in text
    fewer = small_page(
        capsys, "--num_layers=8", f"--world_size={ranks // 2}", "--device_memory_gib=6"
    )
    assert (
        f"and {ranks} GPUs are the fewest that fit: plan for them with --world_size={ranks}"
        in " ".join(fewer.split())
    )
    assert "run this" not in fewer, "the number of ranks is the user's"


def test_nothing_fits_any_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so in one line, once everything was tried, however slow the processor is."""
    monkeypatch.setattr(search, "SEARCH_S", 600.0)
    assert (
        main(
            [
                "--dry_run=1",
                *SMALL,
                "--batch_size=2",
                "--world_size=auto",
                "--device_memory_gib=0.9",
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "--world_size=auto: " in line and "no flags fit" in line


def test_the_job_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is sound shell, holds the recommended words, and is never overwritten."""
    job = tmp_path / "my job.sbatch"
    folder = f"--experiment_dir={tmp_path / 'run'}"
    text = small_page(
        capsys, "--world_size=16", "--experiment_name=it's", folder, f"--write_sbatch={job}"
    )
    assert f"wrote {job}" in text
    script = job.read_text()
    assert subprocess.run(["bash", "-n", str(job)], capture_output=True).returncode == 0
    assert (
        "#SBATCH --cpus-per-task=64\n#SBATCH --mem=0\n" in script
        and "srun --export=ALL --cpus-per-task=64" in script
        and " bash scripts/examples/first_signal.sh bash -c " in script
    )
    assert (
        "#SBATCH --nodes=2\n" in script
        and "#SBATCH --gpus-per-node=8\n" in script
        and "--requeue" in script
    )
    assert (
        "'--experiment_name=it'\"'\"'s'" in script
        and "write_sbatch=" not in script
        and "--dry_run=" not in script
    )
    assert main(["--dry_run=1", *SMALL, "--world_size=16", folder, f"--write_sbatch={job}"]) == 2
    assert "File exists; name another file" in capsys.readouterr().err
    assert job.read_text() == script


def test_a_job_needs_data_and_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without them nothing is written, and the error names the flags."""
    job = tmp_path / "job.sbatch"
    assert (
        main(
            [
                "--dry_run=1",
                *(flag for flag in SMALL if "source" not in flag),
                f"--write_sbatch={job}",
            ]
        )
        == 2
    )
    folder, data = capsys.readouterr().err.splitlines()
    assert "set --experiment_dir" in folder and "write --data_path" in data and not job.exists()


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    for flag, said in (
        ("--interconnect=carrier_pigeon", "must be auto, nvlink, ib or ethernet"),
        ("--interconnect=ib:fast", "as in --interconnect=ib:25"),
        ("--interconnect=auto:5", "as in --interconnect=ib:25"),
        ("--interconnect=ib:-1", "as in --interconnect=ib:25"),
        ("--gpu=h1000", "h100"),
        ("--gpu=cpu", "--device=cuda plans for a GPU"),
        ("--device_memory_gib=0", "must be > 0"),
        ("--world_size=all", "auto"),
    ):
        assert main(["--dry_run=1", *SMALL, flag]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1, flag


def test_the_recommended_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU whose memory does not hold the run as asked, the printed flags train to the end."""
    tiny = "--num_layers=2 --hidden_size=64 --num_attention_heads=4 --vocab_size=512 --sequence_length=512"
    flags = [
        *tiny.split(),
        "--batch_size=64",
        "--train_iters=1",
        "--dataset_source=random",
        "--device=cpu",
    ]
    assert main([*flags, "--dry_run=1", "--device_memory_gib=0.75"]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text
    command = (
        text.rpartition("run this")[2].partition("pretrain_gpt.py")[2].replace("\\\n", " ").split()
    )
    assert command[: len(flags)] != command and set(flags) <= set(command)
    done = run(command)
    assert done.codes == [0] and "training complete: 1 iteration" in done.output, done.output
