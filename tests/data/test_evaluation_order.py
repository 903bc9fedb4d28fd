"""Which samples an evaluation reads: a function of the data set alone, by an independent
computation of the order."""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.open_data import open_data
from megatron_lite.validation import resolve
from tests.support.token_files import data_config, write_counting

LENGTH, BATCH = 16, 4
SIZES = {
    "batch_size": BATCH,
    "micro_batch_size": 2,
    "sequence_length": LENGTH,
    "vocab_size": 30_000,
    "train_iters": 0,
}
config = functools.partial(data_config, **SIZES)
WORD = 2**64


def mixed(word: int) -> int:
    """SplitMix64's output function."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def place(slot: int, key: int, size: int) -> int:
    """A Feistel network over pairs, walked until the result is in the range."""
    a = math.isqrt(size - 1) + 1
    widths = a, -(-size // a)
    while True:
        left, right = slot % widths[0], slot // widths[0]
        for step in range(8):
            word = mixed((key + (step + 1) * 0x9E3779B97F4A7C15) % WORD)
            left, right = right, (left + mixed(right ^ word) % widths[step % 2]) % widths[step % 2]
        slot = right * widths[0] + left
        if slot < size:
            return slot


def starts(
    num_tokens: int, samples: int, seed: int = 1234, phase: str = "validation", number: int = 0
) -> list[int]:
    """The first tokens of the first samples of a stream, by the recipe of docs/samples.md, by
    hand."""
    text = f"str:sample order\0int:{seed}\0str:{phase}\0int:{number}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    size, rest = divmod(num_tokens - 1, LENGTH)
    found = []
    for index in range(samples):
        epoch, slot = divmod(index, size)
        key = mixed((own + epoch * 0x9E3779B97F4A7C15) % WORD)
        found.append(place(slot, key, size) * LENGTH + mixed(key ^ 0xD1B54A32D192ED03) % (rest + 1))
    return found


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """Data sets of other sizes, whose tokens count up from 0, 5,000 and 10,000, so that a token
    tells its place."""
    sizes = {"a": [50] * 20, "b": [37] * 9, "c": [211] * 4}
    return {
        name: write_counting(tmp_path / name, documents, "<u2", 5000 * number)
        for number, (name, documents) in enumerate(sizes.items())
    }


TOKENS = {"a": 1000, "b": 333, "c": 844}
BASES = {"a": 0, "b": 5000, "c": 10_000}


def firsts(phase: str, options: dict[str, Any], order: str = "data") -> list[int]:
    """The first token of each sample that a phase reads."""
    source = open_data(resolve(options.pop("config"), 1), 0, 1, None if order == "data" else {})
    try:
        return [
            int(row[0])
            for step in source.batches(phase)
            for batch in step
            for row in batch.tokens[: len(batch.tokens) - batch.padding]
        ]
    finally:
        source.close()


def expected(name: str, samples: int, **origin: Any) -> list[int]:
    return [BASES[name] + start for start in starts(TOKENS[name], samples, **origin)]


@pytest.mark.parametrize("count", [3, "all"])
def test_one_set_for_any_seed(count: Any, sets: dict[str, str]) -> None:
    """N batches and the whole set, as a share of the data or as a set of its own, in validation and
    test."""
    samples = (TOKENS["b"] - 1) // LENGTH if count == "all" else 3 * BATCH
    wanted = expected("b", samples)
    assert len(set(wanted)) == min(samples, 20)
    kinds = ("validation_iters", "test_iters") if count != "all" else ("validation_iters",)
    for seed, iters in itertools.product((1234, 99), kinds):
        phase, split = (
            ("validation", (0.0, 1.0, 0.0))
            if iters == "validation_iters"
            else ("test", (0.0, 0.0, 1.0))
        )
        shared = config(sets["b"], seed=seed, split=split, **{iters: count})
        assert firsts(phase, {"config": shared}) == wanted
        flag = "valid_data_path" if phase == "validation" else "test_data_path"
        own = config(sets["a"], seed=seed, **{flag: (sets["b"],), iters: count})
        assert firsts(phase, {"config": own}) == wanted


def test_each_set_of_a_blend_at_any_place(sets: dict[str, str]) -> None:
    """Alone it is read as it would be without the others; in the blend, too, as far as its share
    goes."""
    for paths, (count, seed) in itertools.product(("abc", "cab"), ((2, 7), ("all", 99))):
        blend = tuple(word for name in paths for word in ("1", sets[name]))
        values = config(sets["a"], seed=seed, valid_data_path=blend, validation_iters=count)
        for name in "abc":
            samples = (TOKENS[name] - 1) // LENGTH if count == "all" else 2 * BATCH
            assert firsts(f"validation/{name}", {"config": values}) == expected(name, samples)
        whole = firsts("validation", {"config": values})
        for name in "abc":
            own = [first for first in whole if BASES[name] <= first < BASES[name] + 5000]
            assert own == expected(name, len(own)) and own


def test_a_run_of_an_earlier_version_keeps_its_order(sets: dict[str, str]) -> None:
    """Seed, phase and place decide, as they did."""
    blend = ("1", sets["b"], "1", sets["c"])
    for seed, (phase, flag, iters) in itertools.product(
        (1234, 99),
        (
            ("validation", "valid_data_path", "validation_iters"),
            ("test", "test_data_path", "test_iters"),
        ),
    ):
        values = config(sets["a"], seed=seed, **{flag: blend, iters: 2})
        for number, name in enumerate("bc"):
            wanted = expected(name, 2 * BATCH, seed=seed, phase=phase, number=number)
            assert firsts(f"{phase}/{name}", {"config": values}, "seed") == wanted


def test_training_keeps_its_seed(sets: dict[str, str]) -> None:
    """The order of training samples has not changed."""
    for order, seed in itertools.product(("data", "seed"), (1234, 99)):
        values = config(sets["b"], seed=seed, train_iters=3)
        assert firsts("training", {"config": values}, order) == expected(
            "b", 12, seed=seed, phase="training"
        )


@pytest.mark.parametrize(
    "options", [{"truncate_documents": False}, {"dataset_source": "random", "data_path": ()}]
)
def test_other_kinds_of_samples(options: dict[str, Any], sets: dict[str, str]) -> None:
    """Packed documents and random tokens depend on no seed, either, but in the order of an earlier
    version."""

    def read(seed: int, order: str = "data") -> list[int]:
        values = {
            "split": (0.0, 1.0, 0.0),
            "validation_iters": 3,
            "seed": seed,
            "sequence_length": 40,
            **options,
        }
        paths: Iterable[str] = values.pop("data_path", (sets["b"],))
        return firsts("validation", {"config": config(*paths, **values)}, order)

    assert read(1234) == read(99) == read(1234, "seed") != read(99, "seed")
