"""docs/data.md: its programs and commands run as written, on a small model."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.tokenizing import JsonTokenizer
from tests.support import documents
from tests.support.token_files import save_byte_tokenizer

pytestmark = pytest.mark.guides

GUIDE = documents.read("data")
QUICKER = {"--train_iters=400": "--train_iters=2", "--hidden_size=128": "--hidden_size=32"}
PREPARING = (
    "From a folder to a model in two commands",
    "Tokens",
    "What is in a pair, and whether it is whole",
    "Token files of other programs",
    "Several data sets",
)


def program(title: str, language: str = "python") -> str:
    """The only block of a language in a section."""
    (found,) = documents.blocks(documents.section(GUIDE, f"{title}\n"), language)
    return found


def run_program(text: str, folder: Path) -> str:
    """Run a program in a checkout; it must end well."""
    (folder / "program.py").write_text(text)
    return documents.run("python program.py", folder)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return documents.make_checkout(tmp_path)


def test_conversations(checkout: Path) -> None:
    """The four commands, as written, end with a model that answers; so does its export in
    transformers."""
    title = "Conversations"
    printed = [
        documents.run(text, checkout)
        for text in documents.blocks(documents.section(GUIDE, f"{title}\n"))
    ]
    assert len(printed) == 4 and printed[-1].splitlines()[-1] == "Paris."
    assert "loss mask data/chats_mask" in printed[2] and "whole documents" in printed[2]
    transformers = pytest.importorskip("transformers")
    export = checkout / "experiments" / "chat" / "export" / "150"
    tokenizer, model = (
        getattr(transformers, name).from_pretrained(export)
        for name in ("AutoTokenizer", "AutoModelForCausalLM")
    )
    for question, answer in (
        ("What is the capital of Spain?", "Madrid."),
        ("Who wrote Hamlet?", "Shakespeare."),
    ):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == answer


def test_sentinels_for_a_tokenizer(checkout: Path) -> None:
    """The program adds what --fim_rate needs."""
    save_byte_tokenizer(str(checkout / "tokenizer.json"))
    run_program(program("Fill-in-the-middle"), checkout)
    tokenizer = JsonTokenizer(str(checkout / "tokenizer.json"))
    assert None not in [
        tokenizer.token_id(f"<fim_{name}>") for name in ("prefix", "middle", "suffix", "pad")
    ]


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
    (checkout / "shards").mkdir()
    np.array([*range(50256, 0, -1)] * 2, "uint16").tofile(checkout / "shards" / "a.npy")
    for title in PREPARING:
        for text in documents.blocks(documents.section(GUIDE, f"{title}\n")):
            documents.run(f"set -e\n{documents.smaller(text, QUICKER)}", checkout)
    assert len(list((checkout / "experiments").glob("*/checkpoints/2"))) == 3
    assert len(list((checkout / "data").glob("*.idx"))) == 6
