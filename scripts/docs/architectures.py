"""Write docs/models.md's table of Hugging Face architectures from the table of the code.

python -m scripts.docs.architectures            # --check: only compare
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megatron_lite.config.values import FLAGS, written
from megatron_lite.huggingface.architectures import ARCHITECTURES, Architecture
from scripts.docs.tables import ROOT, markdown_table, with_tables, write_documents

DOCUMENT = ROOT / "docs" / "models.md"
DERIVED = {"norm_placement": "pre"}  # defaults that follow from others
BIASES = {
    (): "none",
    ("add_qkv_biases",): "query, key, value",
    ("add_linear_biases", "add_qkv_biases"): "attention",
    ("add_linear_biases", "add_mlp_biases", "add_qkv_biases"): "any",
}


def flags_of(architecture: Architecture) -> Iterator[str]:
    """Yield the flags that a model needs beside our defaults; one of several values may be ours."""
    needed = {
        name: value
        for name, value in architecture.fixed.items()
        if not name.endswith(("biases", "position_embeddings"))
        and DERIVED.get(name, FLAGS[name].default) not in (value, *str(value).split("|"))
    }
    scale = architecture.embedding_scale(FLAGS["hidden_size"].default)
    if scale is not None:
        needed["embedding_scale"] = scale
    if "num_experts" in architecture.keys.values():
        needed["num_experts"] = 8
    always = architecture.always_biased
    if "add_linear_biases" not in always:
        needed |= {"add_linear_biases": False} | dict.fromkeys(always, True)
    for name, value in needed.items():
        yield f"--{name}={written(value)}"


def biases_of(architecture: Architecture) -> str:
    """Return the places of biases in words."""
    stated = {option for options in architecture.biases.values() for option in options}
    return BIASES[tuple(sorted(stated | set(architecture.always_biased)))]


def rows() -> Iterator[list[str]]:
    """Yield one row per architecture."""
    for name, architecture in ARCHITECTURES.items():
        keys = architecture.defaults
        window = "none" if "sliding_window" not in keys else "all blocks"
        window = "any blocks" if "layer_types" in keys else window
        flags = " ".join(flags_of(architecture))
        yield [name, f"`{flags}`" if flags else "", biases_of(architecture), window]


def table() -> list[str]:
    """Return the table's lines."""
    return markdown_table(["`model_type`", "flags", "biases", "window in"], [*rows()])


def main(argv: Sequence[str]) -> int:
    """Write or compare the table."""
    command = "python -m scripts.docs.architectures"
    renew = {DOCUMENT: lambda text: with_tables(text, {"architectures": table}, separated=False)}
    return write_documents(renew, "--check" in argv, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
