"""Pretrained folders: every element lands where transformers has it, and a bad folder is refused by
name.

The oracle is transformers: it makes the folders, and its own state dict says which values belong
where.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lite.checkpoint import files
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.tiles import Tile
from tests.support.families import write_folder
from tests.support.folder_checks import checked, expected, read_whole

SOME = (
    "llama, llama3 rope, tied, attention biases",
    "gpt2",
    "gpt_bigcode, multi-head, untied",
    "starcoder2, window",
)
FAST = "mistral, yarn, tied"


@pytest.mark.parametrize("name", SOME)
def test_every_slice_is_read_from_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any range of any parameter, read in chunks smaller than a matrix from several files, equals
    transformers'."""
    folder = write_folder(name, tmp_path / "model", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    monkeypatch.setattr(files, "CHUNK_BYTES", 600)
    source, shapes = checked(folder)
    generator = torch.Generator().manual_seed(0)
    for parameter, value in expected(folder, source, shapes).items():
        numel = value.numel()
        for first, last in [
            (0, numel),
            *torch.randint(numel + 1, (4, 2), generator=generator).sort().values.tolist(),
        ]:
            target = torch.full((last - first,), float("nan"))
            source.read(parameter, Tile.run(first, last - first), target)
            assert torch.equal(target, value.flatten()[first:last]), (parameter, first, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_files(dtype: torch.dtype, tmp_path: Path) -> None:
    """Files in other precisions are rounded once, to the dtype of the target."""
    folder = write_folder(FAST, tmp_path / "model")
    tensors = {
        name: value.to(dtype) + 0.1
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    source, shapes = checked(folder)
    target = torch.empty(shapes["embedding.word.weight"], dtype=torch.bfloat16)
    source.read("embedding.word.weight", Tile.run(0, target.numel()), target.view(-1))
    assert torch.equal(target, tensors["model.embed_tokens.weight"].bfloat16())


def test_real_files_may_hold_extra_tensors(tmp_path: Path) -> None:
    """Names without the prefix, masks, rotary frequencies, the copy of a tied head, and symbolic
    links are accepted."""
    folder = write_folder("gpt2", tmp_path / "model")
    source, shapes = checked(folder)
    before = read_whole(source, shapes)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8) for i in range(3)}
    bare |= {
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.1.attn.rotary_emb.inv_freq": torch.ones(4),
    }
    bare["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    (folder / "blobs").mkdir()
    save_file(bare, folder / "blobs" / "1")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("blobs/1")  # as in the cache of the hub
    source, shapes = checked(folder)
    after = read_whole(source, shapes)
    assert all(torch.equal(before[name], after[name]) for name in shapes)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor created while reading is larger than a chunk, whatever the size of the
    parameter."""
    folder = write_folder("gpt2", tmp_path / "model")
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    source, shapes = checked(folder)
    made: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = empty(*args, **kwargs)
        made.append(result.nbytes)
        return result

    targets = {
        name: torch.zeros(shape, dtype=torch.float64).view(-1) for name, shape in shapes.items()
    }
    monkeypatch.setattr(torch, "empty", counting)
    for name, target in targets.items():
        source.read(name, Tile.run(0, target.numel()), target)
    assert made and max(made) <= 1000


# -- what is refused
# -------------------------------------------------------------------------------------------------


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    changed = change(content)
    (folder / name).write_text(json.dumps(content if changed is None else changed))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data[8 + length :]
    )


def header(**values: Any) -> Callable[[Path], None]:
    """Change the entry of a tensor in the header of the file."""
    return lambda folder: edit_header(folder, lambda content: content[QUERY].update(values))


def config(**values: Any) -> Callable[[Path], None]:
    """Change config.json."""
    return lambda folder: edit(folder, "config.json", lambda content: content.update(values))


def tensors(**values: Any) -> Callable[[Path], None]:
    """Add or change tensors; "__" stands for "."; functions compute them from the word
    embedding."""
    made = lambda value, found: value(found[WORDS]) if callable(value) else value  # noqa: E731
    return lambda folder: edit_tensors(
        folder,
        lambda found: found.update(
            {k.replace("__", "."): made(v, found) for k, v in values.items()}
        ),
    )


def only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def index(folder: Path, files_of: Callable[[str], str]) -> None:
    """Replace model.safetensors by one shard and an index."""
    names = load_file(folder / "model.safetensors")
    os.rename(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    content = {"metadata": {}, "weight_map": {name: files_of(name) for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


SHARD = "model-00001-of-00001.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
WORDS = "model.embed_tokens.weight"


def pickles(folder: Path) -> None:
    only(folder, "config.json")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")


def overlap(header: dict[str, Any]) -> None:
    header[QUERY]["data_offsets"] = header[QUERY.replace("layers.0", "layers.1")]["data_offsets"]


def repeat(folder: Path) -> None:
    """Write the same entry twice."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.dumps({QUERY: json.loads(data[8 : 8 + length])[QUERY]})[1:-1].encode()
    text = data[8 : 8 + length].rstrip()[:-1] + b"," + entry + b"}"
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data[8 + length :]
    )


def lone_pipe(folder: Path) -> None:
    only(folder, "config.json")
    os.mkfifo(folder / "model.safetensors")


# Name -> what is done to a good folder, and words of the refusal.
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "no weights": (lambda f: only(f, "config.json"), "neither model.safetensors nor"),
    "a pickle": (pickles, "safe_serialization=True"),
    "a pickle alone": (
        lambda f: (only(f), (f / "model.pt").write_bytes(b"\x80")),
        "model.pt is a pickle",
    ),
    "another format": (
        lambda f: (only(f, "config.json"), (f / "a.gguf").touch()),
        "a.gguf is in an unsupported",
    ),
    "shards, no index": (
        lambda f: os.rename(f / "model.safetensors", f / SHARD),
        "no model.safetensors.index.json",
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "not here (not named); convert_checkpoint takes",
    ),
    "empty": (only, "the folder is empty"),
    "cut off": (
        lambda f: os.truncate(f / "model.safetensors", 5000),
        "not a complete safetensors file of 5,000 bytes",
    ),
    "cut off in its header": (
        lambda f: os.truncate(f / "model.safetensors", 100),
        "of 100 bytes (Error while",
    ),
    "no bytes": (lambda f: os.truncate(f / "model.safetensors", 0), "header too small"),
    "longer": (lambda f: os.truncate(f / "model.safetensors", 10**6), "file not fully covered"),
    "a link into nothing": (
        lambda f: (only(f, "config.json"), (f / "model.safetensors").symlink_to("x")),
        "No such",
    ),
    "a link to itself": (
        lambda f: (
            only(f, "config.json"),
            (f / "model.safetensors").symlink_to("model.safetensors"),
        ),
        "symbolic links",
    ),
    "a pipe": (lone_pipe, "not a regular file"),
    "a folder for a file": (
        lambda f: (only(f, "config.json"), (f / "model.safetensors").mkdir()),
        "regular file",
    ),
    "header is a list": (lambda f: edit_header(f, lambda h: [1]), "invalid type: sequence"),
    "header overlaps": (lambda f: edit_header(f, overlap), "invalid offset for tensor"),
    "header lies about a shape": (header(shape=[10**9, 10**9]), "overflow computing buffer size"),
    "header lies about a dtype": (header(dtype="F16"), "invalid shape"),
    "header with a gap": (
        lambda f: edit_header(f, lambda h: h.pop(QUERY) and None),
        "invalid offset for tensor",
    ),
    "header repeats a name": (repeat, "(a repeated name)"),
    "header with a list for an entry": (
        lambda f: edit_header(
            f,
            lambda h: h.update({QUERY: [h[QUERY][k] for k in ("dtype", "shape", "data_offsets")]}),
        ),
        "is malformed",
    ),
    "header with an object for a dtype": (header(dtype={"F32": None}), "is malformed"),
    "header with an unknown dtype": (header(dtype="X7"), "variant `X7`"),
    "header with negative offsets": (header(data_offsets=[-8, 0]), "invalid value: integer `-8`"),
    "header with offsets that run back": (
        header(dtype="U8", data_offsets=[8, 0]),
        "invalid offset for tensor",
    ),
    "header with a number for a dtype": (header(dtype=7), "invalid type: integer `7`"),
    "wrong shape": (
        tensors(**{QUERY: torch.zeros(7, 7)}),
        "has shape [7, 7], the model needs [60, 30]",
    ),
    "wrong dtype": (
        tensors(**{QUERY: torch.zeros(60, 30).to(torch.int8)}),
        "quantized weights are not supported",
    ),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(QUERY)), f"{QUERY} is missing"),
    "extra tensor": (tensors(model__extra=torch.ones(1)), "model.extra is not a tensor"),
    "a tensor with and without prefix": (tensors(norm__weight=torch.ones(30)), "is there twice"),
    "a tied head that differs": (
        tensors(lm_head__weight=lambda t: t + 1),
        "although tie_word_embeddings",
    ),
    "a tied head of another shape": (
        tensors(lm_head__weight=lambda t: t[:3].clone()),
        "is not a copy",
    ),
    "missing shard": (
        lambda f: index(f, lambda n: "model-00002-of-00002.safetensors"),
        "00002.safetensors: No such",
    ),
    "index points outside": (
        lambda f: index(f, lambda n: "../a.safetensors"),
        "not the name of a safetensors file",
    ),
    "index points to /etc": (
        lambda f: index(f, lambda n: "/etc/passwd"),
        "not the name of a safetensors file",
    ),
    "index names a pickle": (
        lambda f: index(f, lambda n: "pytorch_model.bin"),
        "not the name of a safetensors file",
    ),
    "index names a number": (lambda f: index(f, lambda n: 3), "not the name of a safetensors file"),  # type: ignore
    "index names an absent tensor": (
        lambda f: (
            index(f, lambda n: SHARD),
            edit(
                f, "model.safetensors.index.json", lambda c: c["weight_map"].update(nothing=SHARD)
            ),
        ),
        "'nothing' is not in it",
    ),
    "index without a map": (
        lambda f: (
            index(f, lambda n: SHARD),
            (f / "model.safetensors.index.json").write_text("{}"),
        ),
        "weight_map",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[1]"),
        "config.json: not a JSON object",
    ),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json: not readable",
    ),
    "config is deep": (
        lambda f: (f / "config.json").write_text("[" * 10**5),
        "config.json: not readable",
    ),
    "config is binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x80"),
        "config.json: not readable",
    ),
    "config is huge": (lambda f: os.truncate(f / "config.json", 2**33), "bytes, at most"),
    "config repeats a key": (
        lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'),
        "a repeated name",
    ),
    "unknown model_type": (config(model_type="rwkv"), "rwkv"),
    "no model_type": (config(model_type=None), "model_type"),
    "extra key": (config(secret_sauce=1), "secret_sauce"),
    "extra keys": (config(**{f"key_{i}": i for i in range(9)}), "(and 3 more)"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config"),
    "a size of the wrong type": (config(hidden_size="30"), "hidden_size"),
    "heads that do not divide": (config(num_key_value_heads=4), "divisor of 6"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder: six query heads of ten channels, three of keys, a tied head."""
    return write_folder(FAST, tmp_path_factory.mktemp("good") / "model")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_end_in_one_line(name: str, good: Path, tmp_path: Path) -> None:
    """Each is a CheckpointError of one line that begins with the folder, says what is wrong, and is
    not long."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    checked(folder)  # good so far
    change, words = HOSTILE[name]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        checked(folder)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{folder}: ") and "\n" not in message and len(message) < 900
    assert ";" in message or ":" in message.removeprefix(str(folder))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda f: None, None, "there is no such folder"),
        (lambda f: f.write_text("x"), None, "this is a file; give its folder"),
        (lambda f: f.mkdir(), None, "the folder is empty"),
        (lambda f: f.symlink_to("nowhere"), None, "No such file"),
        (
            lambda f: (f / "runs").mkdir(parents=True) or (f / "checkpoints").mkdir(),
            None,
            "directory without",
        ),
        (
            lambda f: (f / "7").mkdir(parents=True) or (f / "7" / "config.json").touch(),
            None,
            "7: it holds neither",
        ),
        (lambda f: f.mkdir() or (f / "readme.md").touch(), None, "neither config.json"),
        (lambda f: (f / "snapshots").mkdir(parents=True), None, "give one of the folders in"),
        (
            lambda f: f.mkdir() or (f / "manifest.json").touch(),
            "huggingface",
            "distributed weights, not huggingface",
        ),
        (
            lambda f: f.mkdir() or (f / "config.json").touch(),
            "distributed",
            "huggingface weights, not distributed",
        ),
        (
            lambda f: f.mkdir() or (f / "manifest.json").touch(),
            None,
            "usable checkpoint: manifest.json: not readable",
        ),
        (
            lambda f: (f / "3").mkdir(parents=True),
            None,
            "no usable checkpoint: manifest.json: No such file",
        ),
    ],
)
def test_folders_without_a_model_are_refused(
    make: Callable[[Path], Any], kind: str | None, words: str, tmp_path: Path
) -> None:
    """The error names the content of the folder and what to give instead."""
    folder = tmp_path / "org" / "name"
    folder.parent.mkdir()
    make(folder)
    with pytest.raises(CheckpointError, match="^" + str(folder)) as caught:
        open_source(folder, kind)
    assert words in str(caught.value) and "\n" not in str(caught.value)
