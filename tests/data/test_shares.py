"""Data sets without weights: every token once in an epoch, as in one data set of the same
documents."""

import logging
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.config import Config, changed
from megatron_lite.corpus.from_text import resolve_data
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import run_distributed
from tests.support.token_files import data_config, read_batches, write_counting

LENGTH = 8
TOKENS = {"a": 41, "b": 1001, "c": 171, "d": 9}  # 5, 125, 21 and 1 samples


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, ...]:
    """Data sets whose tokens tell their place."""
    return tuple(
        write_counting(tmp_path / name, [count // 2, count - count // 2], "<u2", 2000 * number)
        for number, (name, count) in enumerate(TOKENS.items())
    )


def values(prefixes: tuple[str, ...], **more: Any) -> Config:
    return data_config(
        *prefixes,
        sequence_length=LENGTH,
        vocab_size=10_000,
        batch_size=8,
        micro_batch_size=8,
        **more,
    )


def resolved(distributed: Distributed, config: Config, began: dict[str, Any] | None) -> Config:
    return resolve_data(config, distributed, None, logging.getLogger("megatron_lite"), began)[0]


def words(
    config: Config, began: dict[str, Any] | None = None, flag: str = "data_path"
) -> tuple[str, ...]:
    """Return the words of data sets with which a start goes on."""
    found: tuple[str, ...] = getattr(run_distributed(1, resolved, config, began)[0].data, flag)
    return found


def counted(config: Config, iterations: int) -> list[int]:
    """Return the samples of each data set in the first iterations."""
    batches = read_batches(changed(config, {"train_iters": iterations}))
    found = Counter(int(token) // 2000 for (batch,) in batches for token in batch.tokens[:, 0])
    return [found[number] for number in range(len(TOKENS))]


def test_an_epoch_reads_every_token_once(prefixes: tuple[str, ...]) -> None:
    """After as many samples as there are, each was read once; after twice as many, twice.
    Validation data, too."""
    config = values(prefixes, valid_data_path=prefixes, validation_iters=1)
    config = changed(config, {"data_path": words(config)})
    assert counted(config, 19) == [5, 125, 21, 1]
    assert counted(config, 38) == [10, 249, 43, 2]
    batches = read_batches(changed(config, {"train_iters": 19}))
    read = [int(token) for (batch,) in batches for token in batch.tokens[:, 0]]
    assert len(set(read)) == len(read) == 152
    assert words(config, flag="valid_data_path") == config.data.data_path
    assert words(values(prefixes[:1])) == prefixes[:1]


def test_a_run_keeps_the_shares_with_which_it_began(prefixes: tuple[str, ...]) -> None:
    """Those of its checkpoint, or equal ones if an earlier version began it; weights that are typed
    win."""
    saved = tuple(word for pair in zip("2311", prefixes, strict=True) for word in pair)
    config = values(prefixes)
    assert words(config, {"config": {"data_path": saved}}) == saved
    assert words(config, {"config": {"data_path": prefixes}})[::2] == ("1",) * 4
    assert words(values(saved), {"config": {"data_path": prefixes}}) == saved
    fewer = words(values(prefixes[:2]), {"config": {"data_path": saved}})
    assert fewer == words(values(prefixes[:2]), {"config": {"data_path": prefixes}}) != prefixes[:2]
    assert fewer == ("41", prefixes[0], "1001", prefixes[1])


def test_a_schedule_of_weights(prefixes: tuple[str, ...]) -> None:
    """One that begins at 0 says all; before a later change, tokens count."""
    assert words(values(prefixes[:2], data_weights_schedule=("0:1/1", "5:1/3"))) == prefixes[:2]
    later = values(prefixes[:2], data_weights_schedule=("5:1/3",))
    assert words(later) == ("41", prefixes[0], "1001", prefixes[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_shares_of_megatron_core(prefixes: tuple[str, ...]) -> None:
    """Its index for a blend without weights has as many samples of each data set."""
    pytest.importorskip("megatron")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=(list(prefixes), None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=types.SimpleNamespace(eod=0, vocab_size=10_000, unique_identifiers={}),
        mid_level_dataset_surplus=0.0,
    )
    blend = BlendedMegatronDatasetBuilder(
        GPTDataset, [152, None, None], lambda: True, config
    ).build()[0]
    theirs = np.bincount(blend.dataset_index, minlength=len(prefixes)).tolist()
    ours = values(prefixes)
    assert theirs == counted(changed(ours, {"data_path": words(ours)}), 19)
