"""prepare_data --tokenizer char: a token for each character of the input."""

from pathlib import Path

import pytest

from megatron_lite.cli.prepare_data import main
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import load_tokenizer

TEXT = "To be, or not:\n  ça — 🙂\ttab\r\n<|unk|> x\u0301"


def test_a_token_for_each_character(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of Unicode, after the two tokens that are no character; a text comes back
    exactly, and transformers reads the same ids."""
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    arguments = [f"{tmp_path}/a.txt", f"--output_prefix={tmp_path}/a", "--tokenizer=char"]
    assert main(arguments) == 0
    assert f"vocabulary        {len(set(TEXT)) + 2} " in capsys.readouterr().out
    characters = sorted(set(TEXT))
    ids = [characters.index(one) + 2 for one in TEXT]
    assert IndexedDataset(f"{tmp_path}/a").tokens.read(0, len(TEXT) + 1).tolist() == [*ids, 0]
    tokenizer = load_tokenizer(f"{tmp_path}/a.tokenizer.json")
    assert tokenizer.decode(ids) == TEXT and tokenizer.encode("Zo") == [
        1,
        characters.index("o") + 2,
    ]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/a.tokenizer.json")
    assert theirs(TEXT)["input_ids"] == ids and theirs.decode(ids) == TEXT
