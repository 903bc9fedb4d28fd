"""Sizes whose products no machine can hold are refused at once, before anything counts or allocates them."""

from __future__ import annotations

import time

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import OutOfMemoryError, RunError, UsageError, as_run_error
from megatron_lite.huggingface.model_folder import resolved_model
from megatron_lite.planner import search
from megatron_lite.planner.report import dry_run
from megatron_lite.validation import resolve
from megatron_lite.validation.sizes import check_passes

SMALL = "--num_layers=2 --hidden_size=32 --num_attention_heads=2 --sequence_length=16 --vocab_size=64 --train_iters=2"
INTEGERS = [flag.name for flag in FLAGS.values() if flag.kind in ("int", "list of int") or flag.words]


def planned(*words: str, ranks: int = 2) -> None:
    arguments = parse([*SMALL.split(), "--micro_batch_size=1", "--dataset_source=random", "--dry_run", *words])
    config = resolve(arguments.config, ranks)
    check_passes(config)
    dry_run(config, arguments.config, ranks, arguments.notes, (), prints=True)


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
def test_every_integer_option_at_once(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option, with one of three values in turn, is legal and planned, or refused in one error of ours; neither takes
    long."""
    monkeypatch.setattr(search, "SEARCH_S", 0.0)
    assert len(INTEGERS) > 60
    slow = []
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
        ("--hidden_size=1000000000 --num_attention_heads=1000", "--hidden_size=1000000000, --ffn_hidden_size=4000"),
        (f"--vocab_size={2**62}", f"--vocab_size={2**62}, --hidden_size=32: the model would have 1.5e+20 weights"),
        (f"--batch_size={2**60}", f"--batch_size={2**60}, --micro_batch_size=1: a step would pass"),
        (f"--train_iters={2**62}", "more than 2**62 samples"),
        (f"--micro_batch_size={2**50}", "a tensor of a micro-batch would have"),
        (f"--micro_batch_size={2**31}", f"--micro_batch_size={2**31}: a micro-batch has at most 262,144 samples"),
        (
            f"--batch_size={2**32} --validation_iters=1 --eval_micro_batch_size={2**31}",
            f"--eval_micro_batch_size={2**31}: a micro-batch has at most",
        ),
    ],
)
def test_one_line_names_the_sizes(flags: str, words: str) -> None:
    """The line names the options whose product is too large, and what to write."""
    with pytest.raises(UsageError) as caught:
        planned(*flags.split())
    assert words in str(caught.value) and "write" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_describes_no_larger_model() -> None:
    """A hostile config.json is refused before a layer is declared."""
    with pytest.raises(RunError, match=r"it describes a model that cannot be built: .* 1\.4e\+20 weights"):
        resolved_model({"hidden_size": 10**9, "num_attention_heads": 1000}, "folder")


def test_a_tensor_that_cannot_be_addressed_is_out_of_memory() -> None:
    """The backend's error about it is a lack of memory, not a defect of the program."""
    error = as_run_error(RuntimeError("Storage size calculation overflowed with sizes=[3000000000, 4000000000]"))
    assert isinstance(error, OutOfMemoryError)
