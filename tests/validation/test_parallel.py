"""Rules of tensor parallelism: one line each, with flags, values, rule and a fix that works, before anything starts."""

from __future__ import annotations

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
from megatron_lite.errors import UsageError
from megatron_lite.monitor.banner import placement_warnings
from megatron_lite.validation import examine, resolve
from tests.support.harness import TINY
from tests.support.tables import rows

GOOD = "--tensor_parallel=4 --num_attention_heads=4 --ffn_hidden_size=64 --sequence_tensor_parallel=1"
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
    words = {**TINY, "lr_warmup_iters": 0}
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
    """The --tensor_parallel of every line can be written, and no options raise anything but one of our errors."""
    draw, fixes = random.Random(0), 0
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 61, 64, 1000, 2**31, 2**62]
    names = "tensor_parallel num_attention_heads head_groups ffn_hidden_size sequence_length vocab_size kv_channels"
    for _ in range(200):
        options: dict[str, Any] = {**TINY, "vocab_size": 2**20, "batch_size": None, "kv_channels": 2}
        options |= {name: draw.choice(sizes) for name in names.split() if draw.random() < 0.6}
        options |= {"sequence_tensor_parallel": draw.random() < 0.5, "gated": draw.random() < 0.5}
        options |= {"update_rms_clip": 1.0 if draw.random() < 0.2 else None}
        ranks = draw.choice([1, 2, 3, 4, 6, 8, 24, 2**24])
        _, problems = examine(unflatten(options), ranks)
        mine = ("tensor_parallel", "sequence_tensor_parallel")
        messages = [each.message for each in problems if each.names[0] in mine]
        found = {int(number) for line in messages for number in re.findall(r"write --tensor_parallel=(\d+)", line)}
        assert len(found) <= 1 and not any("\n" in message for message in messages)
        for fix in found:
            fixes += 1
            _, left = examine(unflatten({**options, "tensor_parallel": fix}), ranks)
            assert not [each for each in left if "write --tensor_parallel" in each.message], (options, ranks)
    assert fixes > 50


def test_an_enormous_number_takes_no_time() -> None:
    began = time.thread_time()
    _, problems = examine(unflatten({**TINY, "tensor_parallel": 2**62 - 1}), 2**24 - 3)
    assert problems and time.thread_time() - began < 0.5


@pytest.mark.parametrize(("ranks", "local", "warned"), [(1, 3, 0), (2, 4, 0), (4, 4, 0), (8, 4, 1), (2, 3, 1)])
def test_layers_shared_by_machines_are_warned_of(ranks: int, local: int, warned: int) -> None:
    config: Any = SimpleNamespace(distributed=SimpleNamespace(tensor_parallel=ranks))
    distributed: Any = SimpleNamespace(local_world_size=local)
    found = list(placement_warnings(config, distributed))
    words = f"--tensor_parallel={ranks}: with {local} ranks on a machine, some tensor-parallel groups span machines"
    assert [line.startswith(words) for line in found] == [True] * warned


def test_ranks_report_before_they_meet() -> None:
    """Under a launcher whose store nobody serves, ranks end at once; the first one of a machine prints the line."""
    variables = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
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
