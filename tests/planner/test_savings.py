"""The options that a run which died of memory leaves behind: each saves to the byte what the list says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.runtime import GIB
from megatron_lite.planner.search import SMALLEST_SAVING, Search, remedies
from megatron_lite.validation import resolve
from tests.planner.test_recommendation import page
from tests.support.launch import ROOT

MODEL = "--num_layers=12 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096"
RUN = f"{MODEL} --dataset_source=random --training_dtype=bf16 --tie_word_embeddings=0"


def needed(words: str, ranks: int) -> int:
    return make_plan(resolve(parse(words.split()).config, ranks), ranks, "cuda").needed_bytes()


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (
            f"{RUN} --batch_size=32",
            "micro_batch_size mlp_recompute_level mlp_recompute_level recompute_layers zero_stage zero_stage "
            "tensor_parallel split_master_weights world_size",
        ),
        (f"{RUN} --micro_batch_size=2 --sequential_micro_batches=4", "micro_batch_size mlp_recompute_level"),
        (
            f"{RUN} --batch_size=64 --micro_batch_size=1 --breadth_first_micro_batches=4 --zero_stage=3",
            "breadth_first_micro_batches mlp_recompute_level",
        ),
        (
            f"{RUN} --batch_size=64 --micro_batch_size=1 --mlp_recompute_level=full --recompute_layers=12"
            " --validation_iters=1 --eval_micro_batch_size=16",
            "eval_micro_batch_size",
        ),
    ],
    ids=["plain", "no batch size", "breadth-first", "validation"],
)
def test_each_option_alone_saves_what_the_list_says(words: str, flags: str) -> None:
    """Appended to the command, each makes the plan smaller by its saving; options that save nothing are left out."""
    ranks, asked = 4, parse(words.split()).config
    batch_size = resolve(asked, ranks).batch.batch_size
    assert batch_size
    found = remedies(Search(asked, batch_size, ranks, "cuda", 80 * 2**30))
    assert " ".join(remedy.flag for remedy in found).startswith(flags)
    before = needed(words, ranks)
    for remedy in found:
        assert remedy.saving_bytes >= math.ceil(SMALLEST_SAVING * before)
        if remedy.append:
            assert f"--{remedy.flag}={remedy.value}" in remedy.append.split()
            assert before - needed(f"{words} {remedy.append}", ranks) == remedy.saving_bytes, remedy
            assert resolve(parse(f"{words} {remedy.append}".split()).config, ranks).batch.batch_size == batch_size
        else:
            assert before - needed(words, int(remedy.value)) == remedy.saving_bytes, remedy


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
