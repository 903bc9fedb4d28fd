"""docs/data.md: its programs and commands run as written, on a small model."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import JsonTokenizer, save_byte_tokenizer
from tests.support import warm_python

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "data.md").read_text("utf-8")
SMALLER = {
    "--model=gpt2": "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --batch_size=2",
    "--sequence_length=1024": "--sequence_length=64",
    "--train_iters=1000": "--train_iters=2 --split=1",
}

QUICKER = {"--train_iters=400": "--train_iters=2", "--hidden_size=128": "--hidden_size=32"}
PREPARING = (
    "From a folder to a model in two commands",
    "Tokens",
    "What is in a pair, and whether it is whole",
    "Several data sets",
)


def programs(title: str) -> list[tuple[str, str]]:
    """Return the blocks of a section: language and content."""
    section = GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)\n```$", section, re.M | re.S)


def run(language: str, text: str, folder: Path) -> str:
    """Run a block in a checkout; it must end well."""
    python = warm_python.folder() / "python"
    command = [str(python), "-c", text] if language == "python" else ["bash", "-c", text]
    result = subprocess.run(
        command, cwd=folder, env=warm_python.environment(), capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, f"{text}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pretrain_gpt.py", "scripts", "megatron_lite"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_masks_of_conversations(checkout: Path) -> None:
    """The program writes two pairs with the same documents; training starts with both."""
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (checkout / "chats.jsonl").write_text(f"{json.dumps(messages)}\n" * 40)
    (first, program), (second, command) = programs("Loss masks")
    assert (first, second) == ("python", "bash")
    run(first, program, checkout)
    tokens, mask = (IndexedDataset(str(checkout / "data" / name)) for name in ("chats", "chats_mask"))
    said = bytes(tokens.document(3)[mask.document(3) == 1][:-1].tolist()).decode()
    assert said == "assistant: 4\n" and tokens.num_documents == mask.num_documents == 40
    for written, smaller in SMALLER.items():
        assert written in command
        command = command.replace(written, smaller)
    printed = run(second, command, checkout)
    assert "loss mask data/chats_mask" in printed and "whole documents" in printed


def test_sentinels_for_a_tokenizer(checkout: Path) -> None:
    """The program adds what --fim_rate needs."""
    save_byte_tokenizer(str(checkout / "tokenizer.json"))
    ((language, program),) = programs("Fill-in-the-middle")
    run(language, program, checkout)
    tokenizer = JsonTokenizer(str(checkout / "tokenizer.json"))
    assert None not in [tokenizer.token_id(f"<fim_{name}>") for name in ("prefix", "middle", "suffix", "pad")]


def test_preparing(checkout: Path) -> None:
    """From a folder of mixed files to trained models, in the order of the guide."""
    corpus = checkout / "corpus"
    corpus.mkdir()
    texts = [f"Once upon a time there were {number} models. " * 20 for number in range(100)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (corpus / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (corpus / "b.txt").write_text("Then they were trained.\n" * 40)
    if importlib.util.find_spec("zstandard") is not None:
        (corpus / "c.jsonl.zst").write_bytes(importlib.import_module("zstandard").compress(lines))
    if importlib.util.find_spec("pyarrow") is not None:
        table = importlib.import_module("pyarrow").table({"text": texts})
        importlib.import_module("pyarrow.parquet").write_table(table, corpus / "d.parquet")
    for title in PREPARING:
        for language, text in programs(title):
            for written, smaller in QUICKER.items():
                text = text.replace(written, smaller)
            run(language, f"set -e\n{text}", checkout)
    assert len(list((checkout / "experiments").glob("*/checkpoints/2"))) == 3
    assert len(list((checkout / "data").glob("*.idx"))) == 4
