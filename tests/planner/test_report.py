"""`pretrain_gpt.py --dry_run=1`: its page, and that it needs no other ranks, no device and little
memory."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_lite.zero.layout import round_up
from pretrain_gpt import main
from tests.support import warm_python

pytestmark = pytest.mark.usefixtures("shared_planners")

ROOT = Path(__file__).resolve().parents[2]

MISTRAL = ["@scripts/examples/mistral_7b.flags"]
TINY = "--num_layers=4 --hidden_size=64 --num_attention_heads=4 --vocab_size=256 --sequence_length=64".split()
TINY += ["--train_iters=3"]

# Runs the program several times, forbids process groups and GPUs, and prints the MiB of memory that
# it took.
WATCHED = """
import resource, sys
import torch, torch.distributed
import megatron_lite.kernels.triton_support  # asks whether there is a GPU, to import Triton or not

def forbidden(*args, **kwargs):
    raise AssertionError("a dry run joined a process group or looked at a device")

torch.distributed.init_process_group = torch.distributed.new_group = forbidden
torch.cuda.is_available = torch.cuda.get_device_properties = torch.cuda.init = forbidden
import pretrain_gpt

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for world_size in sys.argv[1].split(","):
    assert pretrain_gpt.main([f"--world_size={world_size}", *sys.argv[2:]]) == 0
    print("<<next>>")
assert not torch.distributed.is_initialized()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the page that a dry run in this process prints."""
    assert main(["--dry_run=1", *flags]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


def numbers(text: str, row: str) -> list[str]:
    """Return the cells of the row that begins with `row`."""
    (line,) = (line.strip() for line in text.splitlines() if line.strip().startswith(row))
    return re.split(r"\s{2,}", line)[1:]


def test_mistral_on_gpus(tmp_path: Path) -> None:
    """The README's command plans for any number of GPUs on a machine without GPUs and with little
    memory."""
    flags = [
        "--dry_run=1",
        *MISTRAL,
        "--micro_batch_size=1",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    command = [str(warm_python.folder() / "python"), "-c", WATCHED, "4,128", *flags]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=warm_python.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and not result.stderr, result.stdout + result.stderr
    *pages, grown_by_mib = result.stdout.split("<<next>>")
    for ranks, text in zip((4, 128), pages, strict=True):
        check_mistral(text, ranks)
    assert int(grown_by_mib) < 500
    assert not (tmp_path / "run").exists(), "nothing is written"


def check_mistral(text: str, ranks: int) -> None:
    assert "parameters: 7,241,732,096 (7,241,732,096 trainable, 0 frozen)" in text
    assert (
        "34 stages, 34 weight buffers, 34 gradient buffers (zero_stage 1, layers_per_stage 1)"
        in text
    )
    assert f"dry run for {ranks} GPUs (h100), 79.1 GiB each (--device=auto), bf16" in text
    assert (
        f"batch: 128 samples = 1 per micro-batch x {128 // ranks} depth-first x 1 breadth-first"
        in text
    )
    assert (
        "1,048,576 tokens per iteration, 8,192 per sample; 524,288,000,000 tokens in 500,000 iterations"
        in text
    )
    assert numbers(text, "blocks.0 to 31") == ["1", "218,112,000", "218,112,000", "416.02"]
    elements = sum(
        round_up(stage, 64 * ranks) for stage in (131_072_000, *[218_112_000] * 32, 131_076_096)
    )
    assert numbers(text, "total")[1] == f"{elements * 6 + elements * 12 // ranks:,}"
    for kind, itemsize in (("gathers", 2), ("reductions", 4)):
        sent = elements * itemsize * (ranks - 1) / ranks
        expected = [
            "34",
            f"{elements:,}",
            f"{elements * itemsize / 2**20:,.2f}",
            f"{sent / 2**20:,.2f}",
        ]
        assert numbers(text, kind) == expected
    held = [float(cell.replace(",", "")) for cell in numbers(text, "all layers, 1 micro-batch")]
    assert [round(held[0] - other, 2) for other in held] == [0.0, 7168.0, 21504.0]
    assert len(text.splitlines()) <= 72 and max(map(len, text.splitlines())) <= 120


def test_auto_says_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        *MISTRAL,
        "--num_layers=8",
        "--dataset_source=random",
        "--num_workers=0",
        "--micro_batch_size=1",
    ]
    text = page(capsys, *flags, "--world_size=8", "--zero_stage=auto", "--layers_per_stage=auto")
    assert re.search(
        r"^--zero_stage=auto is \d, the lowest stage whose predicted memory fits: ZeRO-1 [\d.]+ GiB",
        text,
        re.M,
    )
    assert (
        "\n--layers_per_stage=auto is 1: the weights of a block take 416.0 MiB, and with 8 ranks"
        in text
    )


def test_frozen_parameters_and_the_other_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--freeze",
        "embedding",
        "blocks.0",
        "--tie_word_embeddings=0",
        "--world_size=2",
        "--device=cpu",
    ]
    text = page(capsys, *TINY, *flags)
    assert "dry run for 2 ranks on CPU" in text and "(--device=cpu), fp32" in text
    counts = re.search(r"\(([\d,]+) trainable, ([\d,]+) frozen\)", text)
    assert counts is not None
    trainable, frozen = (int(count.replace(",", "")) for count in counts.groups())
    block = 12 * 64**2 + 13 * 64
    assert frozen == 256 * 64 + 64 * 64 + block and trainable == 3 * block + 256 * 64 + 2 * 64
    assert numbers(text, "communication scratch")[0] == "1", "gloo's receive memory"
    assert numbers(text, "blocks.0 ") == numbers(text, "blocks.1 to 3"), (
        "as large, but apart from each other"
    )


def test_one_rank_and_no_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, *TINY, "--train_iters=0", "--mlp_recompute_level=full")
    assert (
        "dry run for 1 GPU (h100), 79.1 GiB each" in text and "traffic: none with one rank" in text
    )
    assert "full *" in text and "none *" not in text
    assert "--train_iters=0 trains nothing" in text


def test_levels_by_block_get_a_column_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The column holds what all blocks keep together, between those of the two levels."""
    text = page(capsys, *TINY, "--num_layers=4", "--mlp_recompute_level=activation,full:1")
    assert "by block *" in text and "full *" not in text
    assert "* --mlp_recompute_level=activation,full:1;" in text
    held = [float(cell.replace(",", "")) for cell in numbers(text, "all layers, 1 micro-batch")]
    _, activation, full, mixed = held
    assert mixed == pytest.approx(activation - (activation - full) / 4, abs=0.02)


def test_batches_that_change_or_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    """The page plans the largest batch, shows padding, and counts validations in larger
    micro-batches."""
    flags = [
        "--batch_size=none",
        "--batch_size_schedule=0:4 10:13",
        "--micro_batch_size=2",
        "--train_iters=20",
    ]
    text = page(
        capsys,
        *TINY,
        *flags,
        "--allow_nondivisible_batch_size=1",
        "--world_size=2",
        "--sequence_length=32",
    )
    assert (
        "largest batch: 13 samples = 2 per micro-batch x 4 depth-first x 1 breadth-first x 2 ranks"
        in text
    )
    assert " - 3 padding" in text and "416 tokens per iteration" in text
    assert f"{32 * (10 * 4 + 10 * 13):,} tokens in 20 iterations" in text
    assert "schedule (iterations done:samples per iteration from there on): 0:4 10:13" in text
    small = ["--micro_batch_size=1", "--batch_size=32", "--validation_iters=2"]
    large = page(capsys, *TINY, *small, "--eval_micro_batch_size=32")
    assert "32 samples per micro-batch of a validation" in large and "evaluation" in large
    peaks = [
        float(numbers(text, "peak  ")[0].replace(",", ""))
        for text in (page(capsys, *TINY, *small), large)
    ]
    assert peaks[0] < peaks[1] / 2


def test_the_copy_for_asynchronous_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes for which a start asks the host: on a CPU they count as needed; for GPUs they have
    their own line."""
    flags = [
        *TINY,
        "--world_size=2",
        "--training_dtype=bf16",
        "--experiment_dir=/nowhere",
        "--checkpoint_interval=1",
    ]
    plain, copying, on_gpus = (
        page(capsys, *flags, *more)
        for more in (
            ["--device=cpu"],
            ["--device=cpu", "--async_checkpoint=1"],
            ["--async_checkpoint=1"],
        )
    )
    shards = [
        int(numbers(plain, row)[1].replace(",", ""))
        for row in ("weight shards", "optimizer moments")
    ]
    assert f"host memory of each rank for --async_checkpoint=1: {sum(shards):,} bytes, " in on_gpus
    assert numbers(copying, "copy for async_checkpoint") == [f"{sum(shards) / 2**20:,.2f}"] * 3
    needed = [float(numbers(text, "needed")[0]) for text in (plain, copying)]
    assert needed[1] - needed[0] == pytest.approx(sum(shards) / 2**20, abs=0.011)
    assert "async_checkpoint" not in plain


def test_only_one_rank_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a launcher starts many processes, only rank 0 prints."""
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "RANK": "0"}
    for name, value in {**launched, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "dry run for 4 GPUs" in page(capsys, *TINY)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert page(capsys, *TINY) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num_layers=nan"], "--num_layers"),
        (["--world_size=0"], "--world_size"),
        (["--world_size=3", "--batch_size=4"], "--batch_size=4"),
        (["--freeze=nothing"], "nothing"),
        (["--hidden_size=1000000000000000"], "--hidden_size"),
        (["--vocab_size=9000000000000000000"], "smaller"),
        (["--dry_runn=1"], "--dry_run"),
    ],
)
def test_wrong_flags_are_answered_as_ever(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    """Wrong flags give one message and exit code 2, without a stack trace."""
    assert main(["--dry_run=1", *TINY, *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err and not printed.out


def test_recomputed_blocks_keep_their_input(capsys: pytest.CaptureFixture[str]) -> None:
    """A recomputed block keeps 64 tokens x 64 channels x 4 bytes; recomputing more blocks holds
    less."""
    held = []
    for layers in (0, 2, 4):
        text = page(capsys, *TINY, "--batch_size=1", "--device=cpu", f"--recompute_layers={layers}")
        if layers:
            assert numbers(text, f"each of the first {layers}") == ["0.02"] * 3
        held.append(float(numbers(text, "all layers, 1 micro-batch")[0]))
    assert (
        "  recompute " in text
        and held[0] - held[1] == pytest.approx(held[1] - held[2], abs=0.02)
        and held[2] < 0.2
    )
