"""Fill-in-the-middle: nothing is lost, the shares are those asked for, and samples depend on seed
and index only."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_lite.config import Config
from megatron_lite.config.training import DataConfig
from megatron_lite.data.fill_in_the_middle import Draws, FillInTheMiddle
from megatron_lite.data.tokenizing import JsonTokenizer, train_tokenizer
from megatron_lite.errors import DataError, UsageError
from megatron_lite.validation import resolve
from tests.support.token_files import (
    data_config,
    read_batches,
    save_byte_tokenizer,
    write_documents,
)

SENTINELS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
TEXTS = [
    "def area(width, height):\n    return width * height\n",
    "Grüße aus Köln, 你好,世界! Ελληνικά 🙂🙃",
    "x",
    "  many   spaces\t\tand\n\n\nlines  ",
    "import os\n\nprint(os.environ)\n" * 4,
]


def add_tokens(path: Path, *tokens: str) -> str:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([*tokens, "<file_sep>"])
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return tokenizers with sentinels: of bytes, of merged bytes, and one that puts a space before
    every text."""
    folder = tmp_path_factory.mktemp("tokenizers")
    save_byte_tokenizer(str(folder / "bytes.json"))
    train_tokenizer(iter(TEXTS * 3), 400, str(folder / "merged.json"))
    characters = sorted(
        {character for text in TEXTS for character in text.replace(" ", "▁")} | {"▁", "?"}
    )
    spaced = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[])
    )
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    spaced.decoder = decoders.Metaspace()
    spaced.save(str(folder / "spaced.json"))
    qwen = [token.replace("<", "<|").replace(">", "|>") for token in SENTINELS]
    return {
        "bytes": add_tokens(folder / "bytes.json", *SENTINELS),
        "merged": add_tokens(folder / "merged.json", *qwen),
        "spaced": add_tokens(folder / "spaced.json", *SENTINELS),
    }


def made(tokenizer_file: str, key: int = 1, **options: Any) -> FillInTheMiddle:
    return FillInTheMiddle(
        DataConfig(tokenizer_file=tokenizer_file, **{"fim_rate": 1.0, **options}), 2**20, key
    )


def ordered(ids: list[int], tokenizer: JsonTokenizer) -> tuple[list[int], bool]:
    """Return the tokens without sentinels in the order of the text, and whether the suffix came
    first."""
    prefix, middle, suffix = (
        next(place for place, number in enumerate(ids) if number in numbers)
        for numbers in (
            [tokenizer.token_id(f"<fim_{name}>"), tokenizer.token_id(f"<|fim_{name}|>")]
            for name in ("prefix", "middle", "suffix")
        )
    )
    assert prefix == 0 and suffix < middle
    if suffix == 1:
        return ids[middle + 1 :] + ids[2:middle], True
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle], False


@pytest.mark.parametrize("kind", ["bytes", "merged", "spaced"])
@pytest.mark.parametrize("options", [{}, {"fim_max_middle_len": 3}, {"fim_spm_rate": 1.0}])
def test_no_character_is_lost(
    tokenizers: dict[str, str], kind: str, options: dict[str, Any]
) -> None:
    """Put back in order, every document reads as before; special tokens inside are kept whole."""
    fill = made(tokenizers[kind], **options)
    tokenizer = JsonTokenizer(tokenizers[kind], needs_end=False)
    separator = tokenizer.token_id("<file_sep>")
    assert separator is not None
    documents = [tokenizer.encode(text) for text in TEXTS]
    documents.append([separator, *documents[0], separator, separator, *documents[1], separator])
    documents.append([separator])
    orders = set()
    for index, ids in itertools.product(range(25), documents):
        changed = fill.document(ids, Draws(1, index))
        back, suffix_first = ordered(changed, tokenizer)
        orders.add(suffix_first)
        assert texts(back, separator, tokenizer) == texts(ids, separator, tokenizer)
    assert orders == ({True} if options.get("fim_spm_rate") else {True, False})


def texts(ids: list[int], separator: int, tokenizer: JsonTokenizer) -> list[str]:
    """Return the texts between separators."""
    places = [-1, *(place for place, number in enumerate(ids) if number == separator), len(ids)]
    return [tokenizer.decode(ids[first + 1 : end]) for first, end in itertools.pairwise(places)]


def test_bytes_are_permuted(tokenizers: dict[str, str]) -> None:
    """Documents of any bytes, also those that are no text, as where a sample begins in the middle
    of a character."""
    fill, random = made(tokenizers["bytes"]), np.random.default_rng(0)
    tokenizer = JsonTokenizer(tokenizers["bytes"])
    sentinels = sorted(
        number for name in SENTINELS[:3] if (number := tokenizer.token_id(name)) is not None
    )
    for index in range(300):
        ids = random.integers(0, 256 if index % 2 else 128, random.integers(1, 40)).tolist()
        changed = fill.document(ids, Draws(1, index))
        assert (
            sorted(changed) == sorted([*ids, *sentinels]) and ordered(changed, tokenizer)[0] == ids
        )


def test_cuts_are_between_characters(tokenizers: dict[str, str]) -> None:
    """A merged token is cut inside; each place of a text is drawn; the middle is no longer than
    asked for."""
    tokenizer = JsonTokenizer(tokenizers["merged"])
    ids, text = tokenizer.encode(TEXTS[0]), TEXTS[0]
    assert len(ids) < len(text) / 2
    middle = tokenizer.token_id("<|fim_middle|>")
    for limit in (None, 4):
        fill = made(tokenizers["merged"], fim_spm_rate=0.0, fim_max_middle_len=limit)
        lengths = set()
        for index in range(600):
            changed = fill.document(ids, Draws(2, index))
            lengths.add(len(tokenizer.decode(changed[changed.index(middle) + 1 :])))
        assert lengths == set(range(5)) if limit else len(lengths) > 0.8 * len(text)


def test_the_shares_are_those_asked_for(tokenizers: dict[str, str]) -> None:
    """Documents, suffixes first and files of a document are drawn with their rates, up to 4
    standard deviations."""
    tokenizer = JsonTokenizer(tokenizers["bytes"])
    prefix, separator = tokenizer.token_id("<fim_prefix>"), tokenizer.token_id("<file_sep>")
    assert separator is not None
    fill = made(tokenizers["bytes"], fim_rate=0.3, fim_spm_rate=0.2)
    changed = [fill.document([65, 66, 67], Draws(3, index)) for index in range(3000)]
    selected = [ids for ids in changed if ids[0] == prefix]
    assert abs(len(selected) - 900) < 4 * np.sqrt(3000 * 0.3 * 0.7)
    # An empty prefix looks like a suffix that comes first: 3 characters give 16 pairs of places,
    # and 7 leave it empty.
    first = sum(ordered(ids, tokenizer)[1] for ids in selected)
    expected = len(selected) * (0.2 + 0.8 * 7 / 16)
    assert abs(first - expected) < 4 * np.sqrt(len(selected) * 0.25)
    files = made(
        tokenizers["bytes"], fim_rate=0.5, fim_split_sample="<file_sep>", fim_fragment_rate=0.25
    )
    document = [65, separator, 66, 67, separator, separator, 68]
    counts = [
        files.document(document, Draws(4, index)).count(prefix or -1) for index in range(3000)
    ]
    assert abs(sum(counts) - 3000 * 0.5 * 3 * 0.25) < 4 * np.sqrt(3000 * 3 * 0.125)
    assert all(
        files.document(document, Draws(4, index)).count(separator) == 3 for index in range(50)
    )
    never, always = Draws(5, 0), Draws(5, 0)
    never._words = itertools.chain([0], itertools.repeat(2**64 - 1))
    assert not any(never.happens(0.0) for _ in range(1000)) and all(
        always.happens(1.0) for _ in range(1000)
    )


def test_documents_that_stay(tokenizers: dict[str, str]) -> None:
    """A prefix to ignore keeps a document; the end of a document stays at its end, the begin at its
    begin."""
    tokenizer = JsonTokenizer(tokenizers["bytes"])
    end = tokenizer.end_of_document
    ignoring = made(tokenizers["bytes"], fim_ignore_prefix="#!")
    shebang = tokenizer.encode("#!/bin/sh\n")
    assert ignoring.document(shebang, Draws(1, 0)) == shebang
    assert ignoring.document(shebang[1:], Draws(1, 0)) != shebang[1:]
    changed = made(tokenizers["bytes"]).document([65, 66, end, end, 67, end], Draws(1, 0))
    assert changed[5:7] == [end, end] and changed[-1] == end and len(changed) == 12


@pytest.mark.parametrize("kind", ["bytes", "merged"])
def test_documents_may_keep_their_length(tokenizers: dict[str, str], kind: str) -> None:
    """With --fim_truncate_or_pad=1 suffixes pay for the sentinels; too short ones leave the
    document as it was."""
    tokenizer = JsonTokenizer(tokenizers[kind])
    fill = made(tokenizers[kind], fim_truncate_or_pad=True)
    kept = 0
    for index, text in itertools.product(range(50), TEXTS):
        ids = tokenizer.encode(text)
        changed = fill.document(ids, Draws(1, index))
        assert len(changed) == len(ids)
        kept += changed == ids
        if changed != ids:
            back = [
                number
                for number in ordered(changed, tokenizer)[0]
                if number != tokenizer.token_id("<fim_pad>")
            ]
            assert text.startswith(tokenizer.decode(back).rstrip("\ufffd"))
    assert 50 <= kept < 200  # the text of one character always
    assert all(fill.document([65, 66, 67], Draws(1, index)) == [65, 66, 67] for index in range(100))


LENGTH = 32


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set of bytes, with an end of document after each."""
    random, prefix = np.random.default_rng(1), str(tmp_path_factory.mktemp("data") / "bytes")
    return write_documents(
        prefix,
        [np.append(random.integers(97, 123, random.integers(0, 50)), 256) for _ in range(60)],
    )


def config(prefix: str, tokenizer_file: str | None, world_size: int = 1, **values: Any) -> Config:
    options: dict[str, Any] = dict(
        batch_size=8, micro_batch_size=8, sequence_length=LENGTH, train_iters=6
    )
    options |= dict(vocab_size=300, fim_rate=0.7, tokenizer_file=tokenizer_file)
    options |= dict(cross_document_attention=False, mask_document_starts=True)
    return resolve(data_config(prefix, **{**options, **values}), world_size)


def test_samples_depend_on_seed_and_index_only(prefix: str, tokenizers: dict[str, str]) -> None:
    """Every layout, worker and restart gives the same samples; another seed gives others."""
    path = tokenizers["bytes"]
    whole = read_batches(config(prefix, path))
    tokens = np.stack([step[0].tokens.numpy() for step in whole])
    assert any(259 in sample for sample in tokens.reshape(-1, LENGTH + 1).tolist())
    worker = read_batches(config(prefix, path, num_workers=1))
    for one, other in zip(itertools.chain(*whole), itertools.chain(*worker), strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    resumed = read_batches(config(prefix, path), done=4)
    np.testing.assert_array_equal(tokens[4:], [step[0].tokens for step in resumed])
    ranks = [read_batches(config(prefix, path, 2, micro_batch_size=2), rank, 2) for rank in (0, 1)]
    for step in range(6):
        rows = [ranks[rank][step][micro].tokens for micro in (0, 1) for rank in (0, 1)]
        np.testing.assert_array_equal(tokens[step], np.concatenate(rows))
    other = read_batches(config(prefix, path, seed=5, shuffle="none"))
    plain = read_batches(config(prefix, path, shuffle="none"))
    assert not np.array_equal(other[0][0].tokens, plain[0][0].tokens)


def test_an_evaluation_depends_on_no_seed(prefix: str, tokenizers: dict[str, str]) -> None:
    """The same documents are cut at the same places in every run."""
    values = {"train_iters": 0, "validation_iters": 2, "split": (0.0, 1.0, 0.0)}
    first, second = (
        read_batches(config(prefix, tokenizers["bytes"], seed=seed, **values), phase="validation")
        for seed in (1234, 5)
    )
    tokens = [[batch.tokens for step in steps for batch in step] for steps in (first, second)]
    assert all(np.array_equal(*pair) for pair in zip(*tokens, strict=True))


def test_borders_and_padding_follow_the_tokens(prefix: str, tokenizers: dict[str, str]) -> None:
    """Pieces begin after each end of a document, and the last one is cut; the labels that begin
    one, and padding, do not count. With a rate of 0 a sample is what it is without these
    options."""
    path = tokenizers["bytes"]
    without = read_batches(config(prefix, path, fim_rate=0.0))
    none = read_batches(config(prefix, path, fim_rate=1e-300))
    for (one,), (other,) in zip(without, none, strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    changed = read_batches(config(prefix, path, fim_spm_rate=0.0))
    for (batch,), (plain,) in zip(changed, without, strict=True):
        assert batch.starts is not None and batch.masked is not None
        inputs = batch.tokens[:, :-1].numpy()
        first = np.ones(inputs.shape, dtype=bool)
        first[:, 1:] = inputs[:, :-1] == 256
        np.testing.assert_array_equal(np.flatnonzero(first), batch.starts[:-1])
        np.testing.assert_array_equal(batch.masked.numpy(), inputs == 256)
        for sample, before in zip(batch.tokens.tolist(), plain.tokens.tolist(), strict=True):
            letters = [number for number in sample if number < 256]
            assert set(letters) <= set(before) and len(sample) == len(before)


def test_padding_does_not_count(tokenizers: dict[str, str], tmp_path: Path) -> None:
    """Documents that were tokenized into single bytes get shorter where they are cut: the sample is
    padded."""
    tokenizer = JsonTokenizer(tokenizers["merged"])
    ids = [number for character in TEXTS[0] for number in tokenizer.encode(character)]
    single = write_documents(tmp_path / "single", [ids] * 100)
    values: dict[str, Any] = {"vocab_size": 512, "mask_document_starts": False, "fim_rate": 1.0}
    found, pad = 0, tokenizer.token_id("<|fim_pad|>")
    for (batch,) in read_batches(config(single, tokenizers["merged"], **values)):
        assert batch.masked is not None and batch.starts is not None
        padded = batch.tokens.numpy() == pad
        np.testing.assert_array_equal(batch.masked, padded[:, 1:])
        for row, column in np.argwhere(padded[:, 1:-1] & ~padded[:, :-2]):
            assert row * LENGTH + column + 1 in batch.starts  # a document of its own
            found += 1
        assert batch.starts[-1] == 8 * LENGTH
    assert found > 10


def test_packed_documents_keep_their_place(prefix: str, tokenizers: dict[str, str]) -> None:
    """With --truncate_documents=0 documents are as long as before, and padding, also inside them,
    does not count."""
    options: dict[str, Any] = {"truncate_documents": False, "fim_truncate_or_pad": True}
    changed = read_batches(config(prefix, tokenizers["bytes"], **options))
    plain = read_batches(config(prefix, tokenizers["bytes"], **options, fim_rate=0.0))
    different = 0
    for (one,), (other,) in zip(changed, plain, strict=True):
        assert one.starts is not None and other.starts is not None and one.masked is not None
        np.testing.assert_array_equal(one.starts, other.starts)
        np.testing.assert_array_equal(one.masked, other.masked)
        np.testing.assert_array_equal(one.tokens == 256, other.tokens == 256)
        different += int((one.tokens != other.tokens).sum())
    assert different > 100
    with pytest.raises(
        UsageError, match="--truncate_documents=0, --fim_rate=0.7: .*write --fim_truncate_or_pad=1"
    ):
        config(prefix, tokenizers["bytes"], truncate_documents=False)


def test_what_is_missing_is_named(prefix: str, tokenizers: dict[str, str], tmp_path: Path) -> None:
    """One line, before training."""
    path = tokenizers["bytes"]
    save_byte_tokenizer(str(tmp_path / "plain.json"))
    plain = str(tmp_path / "plain.json")
    no_sentinel = r"plain.json \(--tokenizer_file\): has no <fim_prefix> or "
    for kind, message, values in (
        (DataError, no_sentinel, {"tokenizer_file": plain}),
        (
            UsageError,
            "--vocab_size=260: .* has ids up to 261, .*write 262 or more",
            {"vocab_size": 260},
        ),
        (UsageError, "--fim_split_sample=<x>: not a token of", {"fim_split_sample": "<x>"}),
    ):
        with pytest.raises(kind, match=message):
            read_batches(config(prefix, **{"tokenizer_file": path, **values}))
