"""Two ranks with different command lines, as after an edit on one machine: refused before anything
is trained."""

import random
import re
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import flatten
from megatron_lite.config.values import FLAGS, Flag, abridged, is_legal
from megatron_lite.errors import RunError
from megatron_lite.validation import resolve
from tests.support.launch import TINY, run, succeed

# A rank that only plans, or looks for another device, never meets the other one.
NEVER_MEET = {"dry_run", "device"}
TEXTS = ("0", "1", "2", "4", "0.5", "0.25", "100", "1e-5", "32", "word")


def resolved(*flags: str) -> dict[str, Any]:
    """Return the options of a command line for two ranks.

    Raises: RunError if it is refused.
    """
    return flatten(resolve(parse(flags).config, 2))


def other_flags(flag: Flag, base: dict[str, Any]) -> list[str]:
    """Return the spellings of other values of an option with which the command line is valid."""
    found = []
    for text in (*flag.choices, *TEXTS):
        word = f"--{flag.name}={text}"
        if is_legal(flag, text):
            try:
                values = resolved(*TINY, word)
            except RunError:
                continue
            if values[flag.name] != base[flag.name]:
                found.append(word)
    return found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_an_option_that_differs_is_named_with_both_values(seed: int) -> None:
    """An option drawn at random has another value on rank 1: both ranks end with exit code 2, in
    one line."""
    draw = random.Random(seed)
    base = resolved(*TINY)
    found = list[str]()
    compared = sorted(
        name for name, flag in FLAGS.items() if not flag.may_differ and name not in NEVER_MEET
    )
    while not found:
        name = draw.choice(compared)
        found = other_flags(FLAGS[name], base)
    word = draw.choice(found)
    theirs, ours = abridged(resolved(*TINY, word)[name]), abridged(base[name])
    outcome = run(TINY, 2, flags_of={1: [word]})
    assert outcome.codes == [2, 2], outcome.output
    (line,) = outcome.error_lines()
    place = r"\(process \d+ on \S+\)"
    expected = rf"ERROR: --{name}={re.escape(theirs)} on rank 1 {place}, but {re.escape(ours)} on rank 0 {place}; "
    assert re.match(expected, line), (expected, line)
    assert outcome.stdouts == ["", ""]


def test_options_of_one_machine_may_differ() -> None:
    """Each rank has its own folder for a cache, and its own number of data workers."""
    flags = ["--dataset_cache=/elsewhere", "--num_workers=1", "--wandb_tags=b"]
    assert all(FLAGS[flag[2:].partition("=")[0]].may_differ for flag in flags)
    succeed(TINY, 2, flags_of={1: flags})
