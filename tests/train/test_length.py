"""--train_tokens and --epochs: the iterations that read so many tokens, whatever earlier starts
have read."""

import re
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.launch import TINY, run, succeed
from tests.support.token_files import write_counting

FLAGS = [flag for flag in TINY if not flag.startswith("--train_iters")]


def test_tokens_of_a_run_with_two_batch_sizes(tmp_path: Path) -> None:
    """The goal counts what was read: 5 iterations of 4 samples and 3 of 8 read 704 of 640 tokens or
    more."""
    flags = [
        *FLAGS,
        "--train_tokens=640",
        f"--experiment_dir={tmp_path}",
        "--lr_decay_style=cosine",
    ]
    said = succeed([*flags, "--stop_interval=5"]).output
    assert "--train_tokens=640: --train_iters=10, after 640 tokens or more" in said
    said = succeed([*flags, "--batch_size=8"]).output
    assert "--train_iters=8," in said and re.search(r"total tokens \.+ 704$", said, re.MULTILINE)
    assert "lr_decay_iters: 10 in the checkpoint, 8 now" in said
    assert "the run is complete: iteration 8 of 8" in succeed([*flags, "--batch_size=8"]).output


def test_epochs_read_every_token_once(tmp_path: Path) -> None:
    """Of several data sets together; --max_epochs of as many does not object to the last batch."""
    sets = [
        write_counting(tmp_path / name, [size], "<u2", 0) for name, size in (("a", 33), ("b", 30))
    ]
    flags = [*FLAGS, "--dataset_source=list", "--split=1,0,0", "--data_path", *sets]
    said = succeed([*flags, "--epochs=3", "--max_epochs=3"]).output
    assert "--epochs=3, of 3 samples each: --train_iters=3, after 144 tokens or more" in said
    assert "12 samples out of 63 tokens" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--train_tokens=2", "--train_iters=3"], "--train_iters and --train_tokens: write one of"),
        (
            ["--epochs=2", "--dry_run=1", "--dataset_source=list"],
            "a dry run reads no data; write --train_tokens",
        ),
        (["--epochs=2"], "lists of data sets have weights, and random tokens never end"),
        (
            ["--epochs=2", "--dataset_source=list", "--data_path", "1", "a", "2", "b"],
            "no iteration has read every",
        ),
    ],
)
def test_what_does_not_say_a_length(more: list[str], said: str) -> None:
    outcome = run([*FLAGS, *more])
    assert outcome.codes == [2] and said in outcome.output, outcome.output


def test_tokens_of_a_schedule() -> None:
    """Iterations of a plan, too: 4 batches of 2 samples and 2 of 8 read 24 samples of 16 tokens."""
    words = [*FLAGS, "--batch_size=none", "--batch_size_schedule=0:2 4:8", "--train_tokens=384"]
    assert resolve(parse(words).config, 1).training.train_iters == 6
    assert resolve(parse([*words[:-1], "--train_tokens=385"]).config, 1).training.train_iters == 7
    with pytest.raises(UsageError, match="--train_tokens"):
        resolve(parse([*words[:-1], "--train_tokens=0"]).config, 1)
