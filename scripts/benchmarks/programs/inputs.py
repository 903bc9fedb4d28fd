"""The data of all programs: one token stream from the project's own texts, in each program's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from megatron_lite.config import Config
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.huggingface.weight_map import by_tensor, pieces
from scripts.benchmarks.results import ROOT
from scripts.benchmarks.training.model import parameter_specs

# pickle.dumps({"vocab_size": ...}, 0), which nanoGPT reads; nothing here writes pickles.
_META = "(dS'vocab_size'\nI{}\ns."
DOCUMENT_TOKENS = 4096


def tokens_of_texts(vocab_size: int) -> NDArray[np.uint16]:
    """Return the project's documents and sources as tokens: bytes, or pairs of bytes for a large vocabulary."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("megatron_lite/**/*.py")])
    written = b"\n".join(path.read_bytes() for path in files)
    text: NDArray[Any] = np.frombuffer(written, dtype=np.uint8).astype(np.uint16)
    if vocab_size >= 1 << 14:
        text = text[: len(text) // 2 * 2] & 127
        text = text[::2] * 128 + text[1::2]
    return np.remainder(text, vocab_size, dtype=np.uint16)


def write_inputs(folder: Path, vocab_size: int) -> None:
    """Write the programs' inputs: train.bin and val.bin of 16-bit tokens, meta.pkl, ours.bin and ours.idx."""
    tokens = tokens_of_texts(vocab_size)
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(tokens.astype("<u2").tobytes())
    (folder / "meta.pkl").write_text(_META.format(vocab_size))
    with IndexedDatasetWriter(str(folder / "ours"), "uint16") as writer:
        for first in range(0, len(tokens), DOCUMENT_TOKENS):
            writer.add_document(tokens[first : first + DOCUMENT_TOKENS])


def write_llama_weights(folder: Path, config: Config) -> None:
    """Write zero weights under Hugging Face's names; picotron reads their shapes and draws its own values."""
    zeros: dict[str, torch.Tensor] = {}
    for own_name, spec in parameter_specs(config).items():
        tensors = by_tensor(pieces(own_name, spec.shape, "llama", config.model))
        zeros |= {name: torch.zeros(parts[0].their_shape) for name, parts in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(zeros, folder / "model.safetensors")


def write_json_file(path: Path, value: Any) -> Path:
    """Write JSON and create parent folders; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))
    return path


def write_tokenizer(folder: Path, texts: Path, vocab_size: int, sequence_length: int) -> None:
    """Write a one-word-per-token tokenizer and train.jsonl in words, for programs that tokenize by themselves."""
    model = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(vocab_size)}, "unk_token": "t0"}
    parts: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    splitter = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": splitter, "model": model}
    write_json_file(folder / "tokenizer.json", tokenizer)
    write_json_file(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokens = tokens_of_texts(vocab_size)
    length = 16 * sequence_length + 1  # equal for all lines, because a batch becomes one array
    texts.mkdir(parents=True, exist_ok=True)
    with (texts / "train.jsonl").open("w") as file:
        for first in range(0, len(tokens) - length + 1, length):
            words = " ".join(f"t{token}" for token in tokens[first : first + length])
            file.write(json.dumps({"text": words}) + "\n")
