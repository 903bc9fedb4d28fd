"""Tokenizers: exact round trips, equal ids everywhere, folders that transformers loads."""

import json
import os
from pathlib import Path

import pytest

from megatron_lite.data.tokenizing import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    JsonTokenizer,
    copy_tokenizer,
    load_tokenizer,
    read_object,
    train_tokenizer,
)
from megatron_lite.errors import DataError, StorageError, UsageError
from tests.support.token_files import save_byte_tokenizer

TEXTS = [
    "",
    "plain",
    "  spaces\t\n\r\nand lines ",
    "Zürich 東京 🦙 \u0000\u007f\u00a0\ufeff",
    f"a {END_OF_DOCUMENT} in text",
    "def read(self, size=-1):\n    return self.buffer.read(size)\n" * 5,
]


@pytest.fixture
def trained(tmp_path: Path) -> JsonTokenizer:
    return train_tokenizer(iter(TEXTS * 3), 300, str(tmp_path / "bpe.json"))


@pytest.fixture
def byte_file(tmp_path: Path) -> str:
    save_byte_tokenizer(str(tmp_path / "byte.json"))
    return str(tmp_path / "byte.json")


def test_round_trips_are_exact(trained: JsonTokenizer, byte_file: str) -> None:
    """Text to tokens to text changes nothing, for bytes, bytes from a file and a trained BPE."""
    for tokenizer in (ByteTokenizer(), JsonTokenizer(byte_file), trained):
        batch = tokenizer.encode_batch(TEXTS)
        for text, ids in zip(TEXTS, batch, strict=True):
            assert tokenizer.encode(text) == ids.tolist()
            assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_document]) == text
            assert (
                tokenizer.end_of_document not in ids
                and max(ids.tolist(), default=0) < tokenizer.vocab_size
            )


def test_byte_file_has_the_ids_of_the_byte_tokenizer(byte_file: str) -> None:
    """The saved byte tokenizer gives byte values as ids, for every byte that UTF-8 can have."""
    text = "".join(map(chr, [*range(0x800), 0xFFFF, 0x10000, 0x10FFFF]))
    tokenizer = JsonTokenizer(byte_file)
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert ByteTokenizer().decode([0x68, 0xFF, 0x69]) == "h\ufffdi"


def test_training_is_deterministic_and_compresses(trained: JsonTokenizer, tmp_path: Path) -> None:
    """The same texts give the same bytes of file; the vocabulary has the size asked for and
    shortens the text."""
    again = train_tokenizer(iter(TEXTS * 3), 300, str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "bpe.json").read_bytes()
    assert again.vocab_size == trained.vocab_size == 300
    assert len(trained.encode(TEXTS[-1])) < len(TEXTS[-1].encode()) / 2
    with pytest.raises(UsageError, match="vocabulary of 256 is too small"):
        train_tokenizer(iter(TEXTS), 256, str(tmp_path / "small.json"))
    with pytest.raises(StorageError, match="cannot be written"):
        train_tokenizer(iter(TEXTS), 257, str(tmp_path / "missing" / "x.json"))


def test_special_tokens_in_text_are_text_unless_asked_for(byte_file: str) -> None:
    """A text cannot forge the end of a document; with special_tokens it is meant to."""
    assert 256 not in JsonTokenizer(byte_file).encode(END_OF_DOCUMENT)
    assert JsonTokenizer(byte_file, special_tokens=True).encode(END_OF_DOCUMENT) == [256]


def test_truncation_and_padding_of_a_file_are_off(byte_file: str) -> None:
    """Files that say "cut at 5 tokens, pad to 8" must not do so to documents."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(byte_file)
    library.enable_truncation(5)
    library.enable_padding(length=8)
    library.save(byte_file)
    tokenizer = JsonTokenizer(byte_file)
    assert len(tokenizer.encode("x" * 20)) == 20 and len(tokenizer.encode_batch(["x"])[0]) == 1


def test_end_of_document_is_found_or_asked_for(byte_file: str, tmp_path: Path) -> None:
    """tokenizer_config.json beside the file wins, then common names; none at all is an error unless
    none is needed."""
    renamed = Path(byte_file).read_text().replace(END_OF_DOCUMENT, "[STOP]")
    (tmp_path / "odd").mkdir()
    odd = tmp_path / "odd" / "tokenizer.json"
    odd.write_text(renamed)
    with pytest.raises(DataError, match="no usual end-of-document token"):
        JsonTokenizer(str(odd))
    assert JsonTokenizer(str(odd), needs_end=False).end_of_document == -1
    for value in ("[STOP]", {"content": "[STOP]", "lstrip": False}):
        (tmp_path / "odd" / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert JsonTokenizer(str(odd)).end_of_document == 256
        assert load_tokenizer(str(odd)).end_of_document == 256


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    """A missing file, no JSON, other JSON or no text gives one error line with the file's name."""
    path = tmp_path / "t.json"
    for content in (None, b"", b"{", b"{}", b"\xff\xfe"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match="t.json: (cannot be read|not a tokenizer.json)"):
            load_tokenizer(str(path))
    with pytest.raises(DataError, match="is a folder; give the tokenizer.json in it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["byte", "trained"])
def test_transformers_loads_the_folder(
    trained: JsonTokenizer, byte_file: str, tmp_path: Path, kind: str
) -> None:
    """AutoTokenizer loads what copy_tokenizer writes: same ids, exact round trip, eos token."""
    transformers = pytest.importorskip("transformers")
    source = JsonTokenizer(byte_file if kind == "byte" else trained.path)
    folder = tmp_path / "export"
    folder.mkdir()
    ids = copy_tokenizer(Path(source.path), folder)
    assert ids == {"bos_token_id": None, "eos_token_id": source.end_of_document}
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert loaded.eos_token == END_OF_DOCUMENT and loaded.eos_token_id == source.end_of_document
    for text in TEXTS[:4]:
        assert loaded(text)["input_ids"] == source.encode(text)
        assert loaded.decode(source.encode(text)) == text


def write_beside(folder: Path, tokenizer: bytes, **files: object) -> Path:
    """Make a tokenizer folder like those on the hub, with files of other tools beside it; return
    its tokenizer.json."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / "tokenizer.json"


def test_copy_keeps_special_tokens_and_needs_no_end_of_document(
    byte_file: str, tmp_path: Path
) -> None:
    """A tokenizer without a known end of document is exported anyway, so that hours of training are
    not lost."""
    renamed = Path(byte_file).read_bytes().replace(END_OF_DOCUMENT.encode(), b"[STOP]")
    source = write_beside(tmp_path / "source", renamed)
    assert copy_tokenizer(str(source), tmp_path) == {"bos_token_id": None, "eos_token_id": None}
    named = {"bos_token": "[STOP]", "tokenizer_class": "Other"}
    source = write_beside(tmp_path / "named", renamed, **{"tokenizer_config.json": named})
    assert copy_tokenizer(str(source), tmp_path, keep_class=True) == {
        "bos_token_id": 256,
        "eos_token_id": None,
    }
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()).items() >= named.items()
    # after training the ids count, which another class could change
    copy_tokenizer(str(source), tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (
        written["tokenizer_class"] == "PreTrainedTokenizerFast" and written["bos_token"] == "[STOP]"
    )


BESIDE = {
    "tokenizer_config.json": {
        "eos_token": END_OF_DOCUMENT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "x": [1],
    },
    "special_tokens_map.json": {"eos_token": END_OF_DOCUMENT},
    "added_tokens.json": {END_OF_DOCUMENT: 256},
    "vocab.json": {},
    "merges.txt": "",
    "chat_template.jinja": "{{ messages }}",
}
OTHER = dict.fromkeys(
    ("README.md", "pytorch_model.bin", "modeling_evil.py", "config.json", ".env"),
    "not to be copied",
)


def test_files_of_the_tokenizer_come_along_and_no_others(byte_file: str, tmp_path: Path) -> None:
    """Files of a tokenizer are copied byte for byte; beside a file of another name, only special
    tokens are read."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_beside(source, Path(byte_file).read_bytes(), **BESIDE, **OTHER)
    target.mkdir()
    assert copy_tokenizer(source / "tokenizer.json", target) == {
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    assert {path.name for path in target.iterdir()} == {"tokenizer.json", *BESIDE}
    assert all(path.read_bytes() == (source / path.name).read_bytes() for path in target.iterdir())
    (source / "tokenizer.json").rename(source / "mine.tokenizer.json")
    other = tmp_path / "other"
    other.mkdir()
    assert copy_tokenizer(source / "mine.tokenizer.json", other)["eos_token_id"] == 256
    assert {path.name for path in other.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_missing_entries_of_a_tokenizer_config_are_added(byte_file: str, tmp_path: Path) -> None:
    """An export names a class that loads tokenizer.json, and the end of a document from
    special_tokens_map.json."""
    source = tmp_path / "source"
    write_beside(
        source, Path(byte_file).read_bytes(), **{"tokenizer_config.json": {"model_max_length": 77}}
    )
    assert copy_tokenizer(source / "tokenizer.json", tmp_path)["eos_token_id"] == 256
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    assert config == {"model_max_length": 77, **added}
    (source / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "A"}, "bos_token": "B"})
    )
    assert copy_tokenizer(source / "tokenizer.json", tmp_path) == {
        "bos_token_id": 66,
        "eos_token_id": 65,
    }


def test_a_huge_object_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 2**40 bytes would not fit into memory."""
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    os.truncate(path, 2**40)
    assert read_object(path) == {}
