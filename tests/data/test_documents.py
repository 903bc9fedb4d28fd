"""The documents in samples with --cross_document_attention=0, compared with files read by brute
force.

All tokens of a test's data sets differ from each other, so a token tells which place in which file
it was read from.
"""

import functools
import itertools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.open_data import open_data
from megatron_lite.data.reading import reads_of
from megatron_lite.data.tokenizing import BYTE_FILE
from tests.support.token_files import data_config, read_batches, write_counting, write_documents

LENGTH = 16

LAYOUTS: dict[str, list[int]] = {
    "one token each": [1] * 150,
    "a sample each": [LENGTH] * 12,
    "a sample and its label each": [LENGTH + 1] * 12,
    "longer than samples": [100, 3, 70, 41, 200],
    "one document": [400],
    "many empty ones": [0, 0, 5, 0, 20, *[0] * 1100, 1, 0, 30, 0, 0, 90, 0, 7, *[0] * 600],
    "mixed": np.random.default_rng(3).integers(0, 40, 60).tolist(),
}


def documents_of_tokens(prefix: str, dtype: str = "<i4") -> dict[int, tuple[str, int]]:
    """Return the document of each token, from the bytes of the files as the format describes
    them."""
    index, tokens = Path(prefix + ".idx").read_bytes(), np.fromfile(prefix + ".bin", dtype).tolist()
    (count,) = struct.unpack_from("<Q", index, 18)
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    return {token: (prefix, number) for token, number in zip(tokens, numbers, strict=True)}


def expected_starts(tokens: torch.Tensor, documents: dict[int, tuple[str, int]]) -> list[int]:
    """Return where pieces begin in the flattened inputs of (b, s + 1) tokens, and where the last
    one ends."""
    lengths = [
        len(list(piece))
        for sample in tokens[:, :-1].tolist()
        for _, piece in itertools.groupby(documents[token] for token in sample)
    ]
    return [0, *itertools.accumulate(lengths)]


config = functools.partial(
    data_config,
    batch_size=12,
    micro_batch_size=3,
    sequence_length=LENGTH,
    train_iters=6,
    vocab_size=10_000,
    cross_document_attention=False,
)


def read(values: Config, **which: Any) -> list[HostBatch]:
    """All micro-batches of some iterations, see `read_batches`."""
    return list(itertools.chain(*read_batches(values, **which)))


def starts(batch: HostBatch) -> list[int]:
    assert batch.starts is not None and batch.starts.dtype == torch.int32
    return batch.starts.tolist()


def test_documents_that_follow_each_other_are_one_read() -> None:
    """A sample in the order of the file costs one read, however many documents it has."""
    assert reads_of([(0, 3), (3, 1), (4, 9)]) == [(0, 13)]
    assert reads_of([(5, 2), (7, 1), (20, 4), (3, 17)]) == [(5, 3), (20, 4), (3, 17)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_are_those_of_the_files(tmp_path: Path, layout: str) -> None:
    """Several epochs, each shifted in the stream, on two ranks show every border and no other."""
    prefix = write_counting(tmp_path / "x", LAYOUTS[layout])
    documents = documents_of_tokens(prefix)
    values = config(prefix)
    for rank in range(2):
        for batch in read(values, rank=rank, world_size=2):
            assert starts(batch) == expected_starts(batch.tokens, documents)
            assert set(range(0, 3 * LENGTH + 1, LENGTH)) <= set(starts(batch)), (
                "a piece spans two samples"
            )


def test_every_phase_has_its_documents(tmp_path: Path) -> None:
    """Splits begin in the middle of the file, and bytes of the index become tokens by the width of
    the token dtype."""
    for dtype, phase in itertools.product(
        ("<u2", "<i4", "<i8"), ("training", "validation", "test")
    ):
        prefix = write_counting(tmp_path / f"{dtype}{phase}", LAYOUTS["mixed"], dtype)
        documents = documents_of_tokens(prefix, dtype)
        for batch in read(
            config(prefix, split=(5.0, 3.0, 2.0), validation_iters=2, test_iters=2),
            phase=phase,
            count=2,
        ):
            assert starts(batch) == expected_starts(batch.tokens, documents)


def test_blends_workers_and_resume(tmp_path: Path) -> None:
    """With two data sets of different dtypes, workers deliver what the process itself reads, from
    any iteration on."""
    first = write_counting(tmp_path / "a", LAYOUTS["mixed"], "<u2")
    second = write_counting(tmp_path / "b", LAYOUTS["longer than samples"], "<i4", base=5000)
    documents = {**documents_of_tokens(first, "<u2"), **documents_of_tokens(second)}
    data_path = ("0.3", first, "0.7", second)
    whole = read(config(*data_path))
    assert {token >= 5000 for batch in whole for token in batch.tokens[:, 0].tolist()} == {
        True,
        False,
    }
    for batch in whole:
        assert starts(batch) == expected_starts(batch.tokens, documents)
    resumed = read(config(*data_path, num_workers=2), done=3)
    assert [starts(batch) for batch in resumed] == [starts(batch) for batch in whole[12:]]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(resumed, whole[12:], strict=True))


@pytest.mark.parametrize("source", ["list", "random"])
def test_the_flag_changes_no_token(tmp_path: Path, source: str) -> None:
    """The option does not change tokens; switched on, it looks nothing up. A random sample is one
    document."""
    prefix = write_counting(tmp_path / "x", LAYOUTS["mixed"])
    crossing = read(config(prefix, dataset_source=source, cross_document_attention=True))
    apart = read(config(prefix, dataset_source=source))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(crossing, apart, strict=True))
    assert all(batch.starts is None for batch in crossing)
    whole = [list(range(0, 3 * LENGTH + 1, LENGTH))] * len(apart)
    assert ([starts(batch) for batch in apart] == whole) == (source == "random")


def test_data_without_the_token_that_a_gemma_needs_are_told(tmp_path: Path) -> None:
    """One line for each data set, if the family and the tokenizer have such a token."""
    bare = write_documents(tmp_path / "bare", [[*range(30), 256]] * 8)
    good = write_documents(tmp_path / "good", [[66, *range(30), 256]] * 8)
    file = tmp_path / "tokenizer.json"
    shutil.copy(BYTE_FILE, file)

    def told(model_type: str | None, *paths: str, tokenizer: str = str(file)) -> list[str]:
        values = dict(sequence_length=LENGTH, batch_size=1, train_iters=2, vocab_size=257)
        more: dict[str, Any] = dict(export_model_type=model_type, tokenizer_file=tokenizer)
        source = open_data(data_config(*paths, **values, **more), 0, 1)
        source.close()
        return [line for line in source.warnings if "--begin_of_document" in line]

    assert told("gemma2", bare) == [], "the tokenizer has no such token"
    named = {"bos_token": "B", "eos_token": "<|endoftext|>"}
    file.with_name("tokenizer_config.json").write_text(json.dumps(named))
    (line,) = told("gemma2", "1", bare, "1", good)
    assert line.startswith(f"{bare}: B begins no document")
    assert line.endswith("prepare_data --begin_of_document='B'")
    assert [len(told(name, bare)) for name in ("gemma", "gemma3_text", "llama", None)] == [
        1,
        1,
        0,
        0,
    ]
    assert told("gemma", bare, tokenizer="byte") == []


def test_flags_that_find_no_borders_are_told(tmp_path: Path) -> None:
    """One document, or ends of documents inside of them, with any such flag; a conversation may
    have them."""
    documents = [[*range(10), 256] * 3, [*range(40), 256]] * 4
    good, bad = [[*range(30), 256]] * 8, write_documents(tmp_path / "bad", documents)
    one = write_documents(tmp_path / "one", [list(range(200))])
    good = write_documents(tmp_path / "good", good)
    mask = write_documents(
        tmp_path / "mask", [[1] * len(document) for document in documents], "|u1"
    )

    def told(*paths: str, **values: Any) -> list[str]:
        fixed: dict[str, Any] = {
            "sequence_length": LENGTH,
            "batch_size": 1,
            "train_iters": 2,
            "vocab_size": 257,
        }
        source = open_data(data_config(*paths, **{**fixed, **values}), 0, 1)
        source.close()
        return [
            line.partition(":")[0] for line in source.warnings if "--split_documents_at" in line
        ]

    for flags in (
        {"cross_document_attention": False},
        {"reset_position_ids": True},
        {"mask_document_starts": True},
    ):
        assert told("1", one, "1", bad, "1", good, tokenizer_file="byte", **flags) == [one, bad]
        assert told("1", one, "1", bad, **flags) == [one]
        assert told(bad, loss_mask=(mask,), tokenizer_file="byte", **flags) == []
    assert told("1", one, "1", bad, tokenizer_file="byte") == []
    packed = {"truncate_documents": False, "tokenizer_file": "byte", "sequence_length": 64}
    assert told("1", bad, "1", good, **packed) == [bad]
