"""--skip_samples: a run goes on as if its data had never had these samples."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.config import unflatten
from megatron_lite.corpus.run_length import with_length
from megatron_lite.data.counts import Counts
from megatron_lite.data.open_data import open_data
from megatron_lite.data.skipped import Skipped
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.harness import TINY, run_distributed, tiny_config, train_whole
from tests.support.metrics import read_metrics
from tests.support.token_files import write_counting, write_documents
from tests.train.test_counts import RUN, train_run

LENGTH = 16
OPTIONS: dict[str, Any] = RUN | dict(
    sequence_length=LENGTH, batch_size=4, micro_batch_size=2, checkpoint_interval=1, shuffle="none"
)


def rows(config: Any, done: int = 0, began: Any = None) -> np.ndarray:
    """Return the training samples after `done` iterations, each with its tokens."""
    source = open_data(config, 0, 1, began)
    batches = source.batches("training", done)
    return np.concatenate([np.concatenate([one.tokens for one in step]) for step in batches])


def test_ranges_are_removed_from_a_list() -> None:
    """Positions and counts are those of a list without these items, whatever their order and
    overlaps."""
    typed = [(7, 9), (2, 4), (8, 12), (12, 13), (20, 21)]
    removed = {item for first, end in typed for item in range(first, end)}
    left = [item for item in range(60) if item not in removed]
    skipped = Skipped().joined(typed)
    assert skipped.ranges == ((2, 4), (7, 13), (20, 21)) and str(skipped) == "2-3 7-12 20-20"
    assert skipped.positions(np.arange(40)).tolist() == left[:40]
    assert [skipped.position(read) for read in range(40)] == left[:40]
    assert [skipped.kept(end) for end in range(60)] == [
        sum(item < end for item in left) for end in range(60)
    ]


def test_samples_and_counts_of_a_blend(tmp_path: Path) -> None:
    """The samples are those of a run without the option but for the ones left out; the counts are
    those of the rows; the weights change after the same iteration."""
    paths = [write_counting(tmp_path / name, [3000], base=5000 * n) for n, name in enumerate("abc")]
    options = OPTIONS | dict(
        data_path=("0.5", paths[0], "0.3", paths[1], "0.2", paths[2]), vocab_size=20000
    )
    options |= dict(train_iters=20, shuffle="epoch", export_interval=None, checkpoint_interval=None)
    plain = rows(tiny_config(1, **options | {"train_iters": 30}))
    config = tiny_config(1, **options, skip_samples=("10-22", "40-40"))
    found = rows(config)
    assert np.array_equal(found, np.delete(plain, [*range(10, 23), 40], axis=0)[: 20 * 4])
    counted = {row[1]: row[-1] for row in open_data(config, 0, 1).counts.read(20)}
    by_hand = Counter("abc"[first // 5000] for first in found[:, 0].tolist())
    assert counted == by_hand
    # From iteration 10 on only c; the samples left out before do not move that.
    changed = options | dict(data_weights_schedule=("10:0/0/1",), skip_samples=("10-22",))
    sets = rows(tiny_config(1, **changed))[:, 0] // 5000
    assert (sets[10 * 4 + 3 :] == 2).all() and (sets[: 10 * 4 - 3] != 2).any()


def test_an_epoch_is_shorter(tmp_path: Path) -> None:
    """Samples left out count as read, but not those beyond the epochs; errors name the epochs."""
    path = write_counting(tmp_path / "a", [LENGTH * 40 + 1])

    def iterations(ranges: tuple[str, ...], epochs: float = 1.0) -> int:
        options = OPTIONS | dict(data_path=(path,), epochs=epochs, skip_samples=ranges)
        asked = unflatten(TINY | options | dict(export_interval=None, checkpoint_interval=None))
        return with_length(resolve(asked, 1), asked, None, 1)[0].training.train_iters

    assert iterations(()) == 10 and iterations(("4-11", "100-200")) == 8
    with pytest.raises(UsageError, match=r"^--epochs=1, .* --skip_samples=0-50 leaves none"):
        iterations(("0-50",))
    with pytest.raises(
        UsageError, match=r"^--epochs=1e\+30, of 40 samples each: .*2\*\*62 samples"
    ):
        iterations((), 1e30)


def test_samples_that_no_checkpoint_precedes(tmp_path: Path) -> None:
    """Nothing is saved before the first iteration."""
    path = write_counting(tmp_path / "a", [LENGTH * 40 + 1])
    kept = dict(experiment_dir=str(tmp_path / "run"))
    config = tiny_config(1, **OPTIONS, **kept, data_path=(path,), skip_samples=("2-3",))
    began = {"counts": Counts(config).state(5), "iteration": 5}
    with pytest.raises(UsageError, match="samples up to .*start anew in another --experiment_dir"):
        Counts(config, {**began, "counts": {**began["counts"], "skipped": ()}})


def shown(distributed: Any, options: dict[str, Any]) -> tuple[str, ...]:
    """Train; return --skip_samples in config.json."""
    config = tiny_config(distributed.world_size, **options)
    return train_whole(distributed, config).shown_config.data.skip_samples


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_as_if_its_data_lacked_the_samples(tmp_path: Path, ranks: int) -> None:
    """After going back, and at the next start, with or without the option."""
    tokens = np.random.default_rng(3).integers(0, 6000, LENGTH * 80 + 1)
    first, end = 9, 21  # samples left out
    # the label at the seam is the same
    tokens[LENGTH * end] = tokens[LENGTH * first]
    lacking = np.delete(tokens, np.arange(LENGTH * first, LENGTH * end))
    common = OPTIONS | dict(export_interval=None)
    here = common | dict(
        data_path=(write_documents(tmp_path / "all", [tokens]),), experiment_dir=str(tmp_path / "r")
    )
    oracle = common | dict(
        data_path=(write_documents(tmp_path / "lacking", [lacking]),),
        experiment_dir=str(tmp_path / "oracle"),
    )
    skip = dict(skip_samples=(f"{first}-{end - 1}",))
    run_distributed(1, train_run, here | dict(train_iters=6))
    with pytest.raises(Exception, match=r"go back to a checkpoint of iteration 2 or earlier"):
        run_distributed(1, train_run, here | skip | dict(train_iters=7))
    again = here | skip | dict(resume_iteration=2)
    run_distributed(ranks, train_run, again | dict(train_iters=5))
    run_distributed(ranks, train_run, again | dict(train_iters=6))  # goes on from 5
    # keeps the range, and says so
    assert (
        run_distributed(ranks, shown, here | dict(train_iters=8)) == [skip["skip_samples"]] * ranks
    )
    run_distributed(ranks, train_run, oracle | dict(train_iters=8))
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("r", "oracle")]
    losses = [[line["loss"] for line in some if line.get("phase") == "training"] for some in lines]
    assert len(losses[0]) == 8 and losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert ranks > 1 or losses[0] == losses[1]
    state = manifest.read(tmp_path / "r" / "checkpoints" / "8").state["counts"]
    assert state["skipped"] == [(first, end)] and state["sets"][0][-1] == 32


@pytest.mark.parametrize("word", ["7", "9-8", "a-b", "-3", "3-", "1-2-3", "1e3-2e3"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="skip_samples.*<first sample>-<last sample>"):
        tiny_config(1, **OPTIONS, data_path=("a",), skip_samples=(word,))
