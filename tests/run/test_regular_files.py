"""Nothing waits for a pipe in a folder of a model or a tokenizer: its files are read where they are
regular, and refused or left out by name where they are not."""

import os
from pathlib import Path

import pytest

from megatron_lite.corpus.tokenizer_folder import effective
from megatron_lite.data.tokenizing import read_files
from megatron_lite.errors import CheckpointError, DataError
from megatron_lite.huggingface.adapter_folder import _opened
from megatron_lite.huggingface.origin import read_origin
from megatron_lite.run.regular_files import open_regular, read_bytes
from tests.support.token_files import save_byte_tokenizer


def test_links_and_other_things(tmp_path: Path) -> None:
    """A link is followed only where that is asked for; a folder, a pipe and a device never are
    files."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "file", 7) == b"content"
    assert read_bytes(tmp_path / "link", 7, follow_links=True) == b"content"
    with pytest.raises(ValueError, match="7 bytes, at most 6"):
        read_bytes(tmp_path / "file", 6)
    with pytest.raises(OSError, match="a symbolic link"):
        open_regular(tmp_path / "link")
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(other)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json"],
)
def test_a_tokenizer_beside_a_pipe(tmp_path: Path, name: str) -> None:
    save_byte_tokenizer(tmp_path / "tokenizer.json")
    os.mkfifo(tmp_path / name)
    file = str(tmp_path / "tokenizer.json")
    assert read_files(file).config == {}
    with pytest.raises(DataError, match=f"{name}: not a regular file"):
        effective(file)


def test_files_of_models(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "README.md", "config.json", "adapter_model.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"tokenizer\.json: .*not a regular file"):
        read_files(tmp_path / "tokenizer.json")
    assert read_origin(tmp_path) == {"ids": {}, "generation": {}, "card": []}
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors cannot be read .*not a reg"
    ):
        _opened(tmp_path)
