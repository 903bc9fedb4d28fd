"""The flags that a plan which does not fit ends with: appended to the command, they make it fit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.planner import advice
from megatron_lite.planner.advice import Choice, Question, cheapest_fit, fewest_ranks, least_bytes
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.runtime import GIB
from megatron_lite.validation import resolve
from pretrain_gpt import main
from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]
# Fast-LLM's guide for a Mistral-7B, word for word: its run took 16 machines of 8 H100 cards.
GUIDE = r"""
export MODEL_ARGS="\
--num_layers=32 \
--hidden_size=4096 \
--vocab_size=32000 \
--num_attention_heads=32 \
--head_groups=8 \
--add_linear_biases=0 \
--ffn_hidden_size=14336 \
--kv_channels=128 \
--use_rotary_embeddings=1 \
--rotary_embedding_scale=-9.210340371976184 \
--gated=1 \
--activation_type=silu \
--normalization_type=rms_norm \
--tie_word_embeddings=0 \
--window_size=4096 \
"
export TRAINING_ARGS="\
--batch_size=128 \
--sequence_length=8192 \
--train_iters=500000 \
--weight_decay=0.1 \
--adam_beta1=0.9 \
--adam_beta2=0.95 \
--clip_grad=1.0 \
--lr=0.0001 \
--lr_warmup_iters=1000 \
--lr_decay_style=cosine \
--lr_decay_iters=500000 \
--min_lr=0.000003 \
"
export PERFORMANCE_ARGS="\
--training_dtype=bf16 \
--num_workers=8 \
"
export MONITORING_ARGS="\
--experiment_dir=$EXP_BASE_DIR \
--validation_iters=25 \
--validation_interval=1000 \
--max_checkpoints=5 \
--export_interval=25000 \
--log_interval=10 \
--log_offset=0 \
--checkpoint_interval=500 \
"
"""
SMALL_CLUSTER = "--micro_batch_size=1 --zero_stage=2"


def guide_flags() -> list[str]:
    """The words that a shell makes of the guide's strings."""
    command = GUIDE + "printf '%s\\n' $MODEL_ARGS $TRAINING_ARGS $PERFORMANCE_ARGS $MONITORING_ARGS"
    environment = {**os.environ, "EXP_BASE_DIR": "/experiments/mistral"}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True).stdout.split()


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["--dry_run=1", *flags]) == 0
    return capsys.readouterr().out


def fits(text: str) -> bool:
    """Whether a page says that the chosen level of recomputation fits."""
    (title,) = (line for line in text.splitlines() if line.startswith("activations, MiB"))
    (needed,) = (line for line in text.splitlines() if line.startswith("  needed"))
    (device,) = re.findall(r"^  of ([\d.,]+) ", text, re.M)
    chosen = [column.endswith(" *") for column in re.split(r"\s{2,}", title)[1:]].index(True)
    said = float(needed.split()[1 + chosen].replace(",", "")) <= float(device.replace(",", ""))
    assert said == ("does not fit" not in text)
    return said


def recommended(text: str) -> tuple[str, list[str]] | None:
    """The number of ranks and the flags of the command that a page ends with; None if nothing fits."""
    if "\nrun this" not in text:
        return None
    command = text.rpartition("\nrun this")[2].partition(":\n")[2].replace("\\\n", " ")
    launcher, _, flags = command.partition("pretrain_gpt.py")
    sizes = {name: int(size) for name, size in re.findall(r"--(nnodes|nproc-per-node)=(\d+)", launcher)}
    return str(sizes.get("nnodes", 1) * sizes.get("nproc-per-node", 1)), shlex.split(flags)


def check_recommendation(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Check that the recommended command fits, and return its flags."""
    found = recommended(text)
    assert found is not None, text
    ranks, flags = found
    assert not any(flag.startswith(("--dry_run", "--world_size", "--gpu")) for flag in flags)
    device = ["--gpu=cpu"] if "on CPU" in text else []
    better = page(capsys, *flags, f"--world_size={ranks}", *device)
    assert fits(better), flags
    return flags


def test_the_guides_run_fits_its_own_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """128 cards of 80 GB hold the guide's strings as they are, and 4 to 64 its strings for small clusters."""
    flags = guide_flags()
    assert "--min_lr=0.000003" in flags and len(flags) == 37
    text = page(capsys, *flags, "--world_size=128")
    assert fits(text) and "zero_stage 1" in text and "none *" in text
    assert recommended(text) == ("128", flags), "nothing is much faster"
    for ranks in (8, 16, 32, 64):
        assert fits(page(capsys, *flags, *SMALL_CLUSTER.split(), f"--world_size={ranks}"))


def test_the_example_job_fits_its_16_machines(tmp_path: Path) -> None:
    """The multi-node example, planned for the 128 ranks that it asks Slurm for, fits."""
    torchrun, python = tmp_path / "torchrun", warm_python.folder() / "python"
    torchrun.write_text(f'#!/bin/sh\nwhile [ "${{1%%.py}}" = "$1" ]; do shift; done\nexec {python} "$@"\n')
    torchrun.chmod(0o755)
    job = (ROOT / "scripts/examples/slurm_multi_node.sbatch").read_text()
    (nodes,), (gpus,) = re.findall(r"--nodes=(\d+)\n", job), re.findall(r"#SBATCH --gpus-per-node=(\d+)", job)
    (flags,) = re.findall(r"    train (--.*) \"\$@\" \|\|", job)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA_PATH": "d", "EXP_BASE_DIR": "e"}
    planned = [*flags.split(), "--dry_run=1", f"--world_size={int(nodes) * int(gpus)}"]
    command = ["bash", "scripts/examples/train_mistral.sh", *planned]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert "dry run for 128 GPUs" in result.stdout and fits(result.stdout), result.stdout + result.stderr


def test_a_quarter_of_the_cluster_ends_with_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's strings on 32 cards end with all of them and a few flags that fit."""
    flags = guide_flags()
    text = page(capsys, *flags, "--world_size=32")
    assert not fits(text)
    better = check_recommendation(text, capsys)
    assert better[: len(flags)] == flags and 1 <= len(better) - len(flags) <= 3
    assert {flag.partition("=")[0] for flag in better[len(flags) :]} <= {
        "--micro_batch_size",
        "--mlp_recompute_level",
        "--zero_stage",
    }


MODELS = (
    "--num_layers=24 --hidden_size=2048",
    "--num_layers=40 --hidden_size=5120",
    "--num_layers=8 --hidden_size=8192",
)
MORE = (
    "--zero_stage=2",
    "--zero_stage=auto --layers_per_stage=auto",
    "--breadth_first_micro_batches=4",
    "--depth_first_micro_batches=2",
    "--num_grad_buffers=4 --gated=1",
    "--mlp_recompute_level=activation",
    "--validation_iters=1 --eval_micro_batch_size=8 --micro_batch_size=1",
    "--allow_nondivisible_batch_size=1 --batch_size=250 --micro_batch_size=7",
    "--batch_size=none --batch_size_schedule=0:128 100:256 --micro_batch_size=2",
    "--recompute_layers=2 --ema_type=ema",
    "--split_master_weights=1",
    "--optimizer=muon",
    "--freeze=embedding --tie_word_embeddings=0",
)


def drawn(seed: int) -> list[str]:
    """A configuration that often does not fit, with one of MORE."""
    draw = random.Random(seed)
    words = ["--batch_size=256", "--vocab_size=50000", "--num_attention_heads=16", "--training_dtype=bf16"]
    words += [*draw.choice(MODELS).split(), f"--sequence_length={draw.choice((2048, 8192, 16384))}"]
    words += re.split(r" (?=--)", MORE[seed])
    return [*words, "--dataset_source=random", f"--world_size={draw.choice((1, 2, 8, 32))}", "--tie_word_embeddings=0"]


# Which of them fit at once, fit with advice, or cannot fit, differs: a third has all three.
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed % 3 == 1 else pytest.mark.slow, id=more) for seed, more in enumerate(MORE)],
)
def test_the_recommended_command_fits(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The recommended command fits; without one there is none to give."""
    flags = drawn(seed)
    text = page(capsys, *flags)
    if recommended(text) is not None:
        check_recommendation(text, capsys)
    else:
        assert not fits(text) and "no flags fit" in text
        frugal = "--micro_batch_size=1 --depth_first_micro_batches=none --breadth_first_micro_batches=none"
        frugal += " --zero_stage=3 --split_master_weights=0 --mlp_recompute_level=full --num_grad_buffers=none"
        assert not fits(page(capsys, *flags, *frugal.split(), "--world_size=128", "--batch_size=128"))


def question(words: str, device_bytes: int, ranks: int) -> Question:
    asked = parse([*words.split(), "--dry_run=1", "--dataset_source=random", "--training_dtype=bf16"]).config
    batch_size = resolve(asked, ranks).batch.batch_size
    assert batch_size
    return Question(asked, batch_size, ranks, "cuda", device_bytes)


SMALL = "--num_layers=12 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096"


def test_cheaper_changes_come_first() -> None:
    """The less memory a device has, the more the advice costs: smaller micro-batches before recomputation of blocks."""
    steps = []
    whole = make_plan(resolve(question(SMALL + " --batch_size=32", 1, 4).asked, 4), 4, "cuda").needed_bytes()
    for share in (0.9, 0.7, 0.5, 0.4):
        fit = cheapest_fit(question(SMALL + " --batch_size=32", int(whole * share), 4))
        assert fit is not None and fit.needed_bytes <= whole * share
        steps.append(fit.changes)
    assert set(steps[0]) <= {"mlp_recompute_level", "zero_stage", "micro_batch_size"} and len(steps[0]) == 1
    assert all("recompute_layers" not in step and "split_master_weights" not in step for step in steps[:3])


@pytest.mark.parametrize(
    ("present", "choices"),
    [
        ("none", ["activation", "activation,full:3", "activation,full:6", "activation,full:9", "full"]),
        ("activation,full:4", ["activation,full:6", "activation,full:9", "full"]),
        ("none,full:6", ["activation,full:6", "activation,full:9", "full"]),
        ("full", []),
    ],
)
def test_levels_that_save_more_are_offered_in_quarters(present: str, choices: list[str]) -> None:
    """Each costs more than the one before and never less than none; no block gives up what it saves already."""
    config = resolve(question(f"{SMALL} --batch_size=4 --mlp_recompute_level={present}", 1, 1).asked, 1)
    offered = [choice for choice in advice._recomputation(config) if "recompute_layers" not in choice.changes]
    assert [choice.changes.get("mlp_recompute_level") for choice in offered] == [None, *choices]
    costs = [choice.cost for choice in offered]
    assert costs == sorted(set(costs)) and costs[0] == 0.0


def test_a_part_of_the_blocks_is_enough_if_little_memory_is_missing() -> None:
    """With less than `activation` needs, and more than `activation,full:6`, only some blocks repeat the up product."""
    asked = question(f"{SMALL} --batch_size=1 --zero_stage=3", 1, 1)
    needs = asked.needs(resolve(asked.asked, 1))

    def needed(level: str) -> int:
        return needs(Choice(0.0, {"mlp_recompute_level": level}))

    fit = cheapest_fit(
        dataclasses.replace(asked, device_bytes=(needed("activation") + needed("activation,full:3")) // 2)
    )
    assert fit is not None and fit.flags == "--mlp_recompute_level=activation,full:3"


def test_more_ranks_are_the_last_resort() -> None:
    """If no flags fit, the smallest number of GPUs that shares the batch is found; if none fits, there is no advice."""
    asked = question(SMALL + " --batch_size=64", 0, 1)
    least = {ranks: least_bytes(asked.on(ranks)) for ranks in (1, 2, 4, 8, 64)}
    assert sorted(least.values(), reverse=True) == list(least.values())
    alone = question(SMALL + " --batch_size=64", int(least[4]) + 1, 1)
    assert cheapest_fit(alone) is None
    fit = fewest_ranks(alone)
    assert fit is not None and fit.world_size == 4 and fit.needed_bytes <= alone.device_bytes
    nowhere = question(SMALL + " --batch_size=64", int(least[64]) - GIB // 4, 1)
    assert cheapest_fit(nowhere) is None and fewest_ranks(nowhere) is None


def test_a_batch_that_was_not_typed_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the batch follows from micro-batches and ranks, the advice writes it down."""
    flags = [
        "--num_layers=24",
        "--hidden_size=2048",
        "--micro_batch_size=64",
        "--sequence_length=4096",
        "--world_size=2",
    ]
    text = page(capsys, *flags)
    assert "--batch_size=128" in check_recommendation(text, capsys)


def test_nothing_fits_a_model_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    """The page then says how little memory would do, with all flags and with the most GPUs."""
    flags = ["--num_layers=96", "--hidden_size=16384", "--num_attention_heads=128", "--sequence_length=65536"]
    text = page(capsys, *flags, "--batch_size=4", "--world_size=2", "--training_dtype=bf16")
    assert not fits(text) and recommended(text) is None
    joined = " ".join(text.split())
    assert re.search(r"[\d.,]+ GiB on 4 GPUs, the most that share its batch; no flags fit", joined)


def test_a_run_that_runs_out_of_memory_gets_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a run that cannot allocate ends with flags whose plan needs much less than its own."""
    flags = "--num_layers=2 --hidden_size=256 --num_attention_heads=4 --vocab_size=256 --sequence_length=4096"
    words = [*flags.split(), "--batch_size=4096", "--dataset_source=random", "--device=cpu", "--train_iters=1"]
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2); import pretrain_gpt; "
    limited += "sys.exit(pretrain_gpt.main(sys.argv[1:]))"
    command = [sys.executable, "-c", limited, *words, f"--experiment_dir={tmp_path / 'run'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 7, result.stderr
    found = re.search(r"to plan ([\d.,]+) GiB instead of ([\d.,]+) GiB, append (--.*)", result.stderr)
    exit_json = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert found is not None and found[0] in exit_json["message"]
    less, before = (float(number.replace(",", "")) for number in found.groups()[:2])
    first, *_ = advice = exit_json["advice"]
    assert [remedy["flag"] for remedy in advice][:3] == [
        "micro_batch_size",
        "mlp_recompute_level",
        "mlp_recompute_level",
    ]
    log = (tmp_path / "run" / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text()
    for text in (result.stderr, log):
        lines = text.splitlines()[-len(advice) :]
        for line, remedy in zip(lines, advice, strict=True):
            assert line.split() == [remedy["append"], f"{remedy['saving_bytes'] / GIB:,.2f}", "GiB"]
    smaller = [
        make_plan(resolve(parse([*words, *more]).config, 1), 1, "cpu").needed_bytes()
        for more in ([], first["append"].split())
    ]
    assert smaller[0] - smaller[1] == first["saving_bytes"]
    assert less < 0.9 * before
    (row,) = re.findall(r"^  needed .*", page(capsys, *words, *found[3].split(), "--world_size=1"), re.M)
    assert min(map(float, row.replace(",", "").split()[1:])) / 1024 <= less + 0.1
