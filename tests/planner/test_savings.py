"""The options that a run which died of memory leaves behind: each saves to the byte what the list says."""

from __future__ import annotations

import math

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.planner.advice import Question
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.savings import SMALLEST_SAVING, remedies
from megatron_lite.validation import resolve

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
    found = remedies(Question(asked, batch_size, ranks, "cuda", 80 * 2**30))
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
