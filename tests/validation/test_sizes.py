"""Sizes that no machine can hold, or that --tensor_parallel does not divide, are refused before
anything starts."""

import os
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import unflatten
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import OutOfMemoryError, RunError, UsageError, as_run_error
from megatron_lite.huggingface.model_folder import resolved_model
from megatron_lite.monitor.banner import placement_warnings
from megatron_lite.planner import search
from megatron_lite.planner.report import dry_run
from megatron_lite.validation import examine, resolve
from megatron_lite.validation.sizes import check_passes
from tests.support.harness import TINY, tiny_config
from tests.support.shared_planners import shared_planners
from tests.support.tables import rows

SMALL = "--num_layers=2 --hidden_size=32 --num_attention_heads=2 --sequence_length=16 --vocab_size=64 --train_iters=2"
INTEGERS = [flag.name for flag in FLAGS.values() if flag.kind == "int" or flag.words]


def planned(*words: str, ranks: int = 2) -> None:
    arguments = parse(
        [*SMALL.split(), "--micro_batch_size=1", "--dataset_source=random", "--dry_run", *words]
    )
    config = resolve(arguments.config, ranks)
    check_passes(config)
    dry_run(config, arguments.config, ranks, arguments.notes, (), prints=True)


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))]
)
def test_every_integer_option_at_once(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option, with one of three values in turn, is legal and planned, or refused in one error of
    ours; neither takes long."""
    monkeypatch.setattr(search, "SEARCH_S", 0.0)
    assert len(INTEGERS) > 60
    slow = []
    with shared_planners():
        for place, name in enumerate(INTEGERS):
            value, began = (2**31, 10**18, 2**62)[(place + turn) % 3], time.thread_time()
            try:
                planned(f"--{name}={value}", "--device=cuda")
            except RunError as error:
                assert isinstance(error, UsageError) and "--" in str(error), name
            if time.thread_time() - began > 2:
                slow.append(name)
    assert not slow


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--hidden_size=1000000000 --num_attention_heads=1000",
            "--hidden_size=1000000000, --ffn_hidden_size=4000",
        ),
        (
            f"--vocab_size={2**62}",
            f"--vocab_size={2**62}, --hidden_size=32: the model would have 1.5e+20 weights",
        ),
        (f"--batch_size={2**60}", f"--batch_size={2**60}, --micro_batch_size=1: a step would pass"),
        (f"--train_iters={2**62}", "more than 2**62 samples"),
        (f"--micro_batch_size={2**50}", "a tensor of a micro-batch would have"),
        (
            f"--micro_batch_size={2**31}",
            f"--micro_batch_size={2**31}: a micro-batch has at most 262,144 samples",
        ),
        (
            f"--batch_size={2**32} --validation_iters=1 --eval_micro_batch_size={2**31}",
            f"--eval_micro_batch_size={2**31}: a micro-batch has at most",
        ),
        (
            f"--num_experts=2 --num_shared_experts={2**62}",
            f"--num_experts=2, --num_shared_experts={2**62}: the model would have",
        ),
        (
            f"--num_experts=2 --num_shared_experts={2**40} --batch_size=512 --micro_batch_size=256",
            "a tensor of a micro-batch would have",
        ),
    ],
)
def test_one_line_names_the_sizes(flags: str, words: str) -> None:
    """The line names the options whose product is too large, and what to write."""
    with pytest.raises(UsageError) as caught:
        planned(*flags.split())
    assert (
        words in str(caught.value)
        and "write" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_experts_are_few_enough_for_a_list() -> None:
    """A layer lists the rows of all its experts."""
    with pytest.raises(UsageError, match="num_experts=1000000000: must be >= 1 and <= 10000"):
        planned("--num_experts=1000000000", "--moe_ffn_hidden_size=1")


def test_a_file_describes_no_larger_model() -> None:
    """A hostile config.json is refused before a layer is declared."""
    with pytest.raises(
        RunError, match=r"it describes a model that cannot be built: .* 1\.4e\+20 weights"
    ):
        resolved_model({"hidden_size": 10**9, "num_attention_heads": 1000}, "folder")


def test_a_tensor_that_cannot_be_addressed_is_out_of_memory() -> None:
    """The backend's error about it is a lack of memory, not a defect of the program."""
    error = as_run_error(
        RuntimeError("Storage size calculation overflowed with sizes=[3000000000, 4000000000]")
    )
    assert isinstance(error, OutOfMemoryError)


GOOD = (
    "--tensor_parallel=4 --num_attention_heads=4 --ffn_hidden_size=64 --sequence_tensor_parallel=1"
)
# Ranks of the run, flags on top of GOOD, and the one line.
CASES = """
6
    --tensor_parallel=4: the run has 6 ranks, which must be a multiple; start more with torchrun, or write
    --tensor_parallel=2
1
    --tensor_parallel=4: the run has 1 rank, which must be a multiple; start more with torchrun, or write
    --tensor_parallel=1
8 --batch_size=3
    --batch_size=3 on 2 data-parallel ranks: with 1 sequential micro-batch, batch_size must be a multiple of 2; nearest:
    2 or 4
4 --num_attention_heads=6 --hidden_size=24
    --tensor_parallel=4, --num_attention_heads=6: each rank takes equally many query heads; write --tensor_parallel=2,
    or nearest heads: 4 or 8
4 --num_attention_heads=2
    --tensor_parallel=4, --num_attention_heads=2: there are more ranks than query heads, of which each rank takes
    equally many; write --tensor_parallel=2, or nearest heads: 4
4 --num_attention_heads=12 --hidden_size=48 --head_groups=3
    --tensor_parallel=4, --head_groups=3: key/value heads must divide by the ranks or the ranks by them; write
    --tensor_parallel=1
4 --ffn_hidden_size=66
    --tensor_parallel=4, --ffn_hidden_size=66: each rank takes equally many channels of the MLP; nearest
    ffn_hidden_size: 64 or 68; or write --tensor_parallel=2
4 --sequence_length=18
    --sequence_tensor_parallel=1, --tensor_parallel=4, --sequence_length=18: each rank takes equally many positions;
    nearest sequence_length: 16 or 20; or leave sequence_tensor_parallel out
4 --vocab_size=9 --make_vocab_size_divisible_by=4
    --tensor_parallel=4, --vocab_size=9: with 4 rows of the vocabulary per rank, some of the 4 ranks would have none;
    write a smaller --tensor_parallel or --make_vocab_size_divisible_by, or --parallel_embeddings=0
"""


def options_of(flags: str) -> dict[str, Any]:
    words = {**TINY, "lr_warmup": 0}
    line = [f"--{name}={value}" for name, value in words.items()]
    return parse([*line, *GOOD.split(), *flags.split()]).given


@pytest.fixture(autouse=True)
def started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parser believe in four ranks."""
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("case", "line"), rows(CASES))
def test_one_line_with_flag_value_rule_and_fix(case: str, line: str) -> None:
    ranks, _, flags = case.partition(" ")
    with pytest.raises(UsageError) as caught:
        resolve(unflatten(options_of(flags)), int(ranks))
    assert str(caught.value) == line


def test_the_fix_is_legal() -> None:
    """The --tensor_parallel of every line can be written, and no options raise anything but one of
    our errors."""
    draw, fixes = random.Random(0), 0
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 61, 64, 1000, 2**31, 2**62]
    names = "tensor_parallel num_attention_heads head_groups ffn_hidden_size sequence_length vocab_size kv_channels"
    for _ in range(200):
        options: dict[str, Any] = {
            **TINY,
            "vocab_size": 2**20,
            "batch_size": None,
            "kv_channels": 2,
        }
        options |= {name: draw.choice(sizes) for name in names.split() if draw.random() < 0.6}
        options |= {"sequence_tensor_parallel": draw.random() < 0.5, "gated": draw.random() < 0.5}
        options |= {"update_rms_clip": 1.0 if draw.random() < 0.2 else None}
        ranks = draw.choice([1, 2, 3, 4, 6, 8, 24, 2**24])
        _, problems = examine(unflatten(options), ranks)
        mine = ("tensor_parallel", "sequence_tensor_parallel")
        messages = [each.message for each in problems if each.names[0] in mine]
        found = {
            int(number)
            for line in messages
            for number in re.findall(r"write --tensor_parallel=(\d+)", line)
        }
        assert len(found) <= 1 and not any("\n" in message for message in messages)
        for fix in found:
            fixes += 1
            _, left = examine(unflatten({**options, "tensor_parallel": fix}), ranks)
            assert not [each for each in left if "write --tensor_parallel" in each.message], (
                options,
                ranks,
            )
    assert fixes > 50


def test_an_enormous_number_takes_no_time() -> None:
    began = time.thread_time()
    _, problems = examine(unflatten({**TINY, "tensor_parallel": 2**62 - 1}), 2**24 - 3)
    assert problems and time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("ranks", "local", "warned"), [(1, 3, 0), (2, 4, 0), (4, 4, 0), (8, 4, 1), (2, 3, 1)]
)
def test_layers_shared_by_machines_are_warned_of(ranks: int, local: int, warned: int) -> None:
    config: Any = SimpleNamespace(distributed=SimpleNamespace(tensor_parallel=ranks))
    distributed: Any = SimpleNamespace(local_world_size=local)
    found = list(placement_warnings(config, distributed))
    words = f"--tensor_parallel={ranks}: with {local} ranks on a machine, some tensor-parallel groups span machines"
    assert [line.startswith(words) for line in found] == [True] * warned


def test_ranks_report_before_they_meet() -> None:
    """Under a launcher whose store nobody serves, ranks end at once; the first one of a machine
    prints the line."""
    variables = {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    line = [f"--{name}={value}" for name, value in TINY.items()]
    command = [sys.executable, "pretrain_gpt.py", *line, "--tensor_parallel=4"]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (process.communicate(timeout=60) for process in started)
    assert started[0].returncode == started[1].returncode == 2
    (report,) = first[1].splitlines()
    assert "--tensor_parallel=4: the run has 6 ranks" in report
    assert not first[0] + second[0] + second[1]


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("", ("zero_bubble_v", "v")),
        ("--zero_stage=3", ("breadth_first", "v")),
        ("--layers_per_stage=2", ("one_f_one_b", "loop")),
        ("--layers_per_stage=2 --zero_stage=3", ("breadth_first", "loop")),
        ("--pipeline_placement=loop", ("one_f_one_b", "loop")),
        ("--pipeline_schedule=interleaved", ("interleaved", "loop")),
    ],
)
def test_tied_weights_take_the_placement_without_a_copy_if_there_are_stages(
    flags: str, chosen: tuple[str, str]
) -> None:
    options = {**TINY, "num_layers": 4, "pipeline_parallel": 2, **parse(flags.split()).given}
    config = resolve(unflatten(options), 2).multi_stage
    assert (config.pipeline_schedule, config.pipeline_placement) == chosen


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (2, {"num_experts": 1}, "--num_experts=1: a dense model has no experts to share out"),
        (2, {"num_experts": 3}, "each rank has equally many of them; write --expert_parallel=1"),
        (3, {}, "the 3 data-parallel ranks must be a multiple"),
        (4, {"tensor_parallel": 4}, "the 1 data-parallel rank must be a multiple"),
        (4, {"data_parallel_shard": 1}, "the ranks of a replica have all experts"),
        (2, {"symmetric_memory": True, "device": "cuda"}, "--symmetric_memory=1: its buffers"),
    ],
)
def test_experts_are_shared_out_evenly(ranks: int, options: dict[str, Any], words: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_token": 2, "expert_parallel": 2}
    with pytest.raises(UsageError) as error:
        tiny_config(ranks, **experts | {"batch_size": 12} | options)
    assert "--expert_parallel=2" in str(error.value) and words in str(error.value)
