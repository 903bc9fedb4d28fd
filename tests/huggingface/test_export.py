"""Exports: transformers computes from them what a plain forward pass computes from our weights."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.config import BatchConfig, Config, DataConfig, DistributedConfig, ModelConfig
from megatron_lite.errors import StorageError
from megatron_lite.huggingface import export as huggingface
from megatron_lite.huggingface import export_folder
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.validation import resolve
from tests.support.fakes import Layout, World, empty_model, make_specs
from tests.support.thread_ranks import ThreadRank

SEQUENCE_LENGTH = 24
BASE = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    head_groups=4,
    kv_channels=6,
    ffn_hidden_size=40,
    vocab_size=50,
    max_position_embeddings=32,
    use_position_embeddings=False,
    use_rotary_embeddings=True,
    tie_word_embeddings=False,
    add_linear_biases=False,
    gated=True,
    activation_type="silu",
    normalization_type="rms_norm",
    layer_norm_eps=1e-4,
    rotary_embedding_scale=-math.log(500.0),
    init_method_std=0.1,
    init_method_std_embed=0.1,
    init_method_std_qkv=0.1,
    init_method_std_attn_proj=0.1,
    init_method_std_mlp_1=0.1,
    init_method_std_mlp_2=0.1,
)
LAYER_NORM: dict[str, Any] = dict(normalization_type="layer_norm", gated=False, activation_type="gelu")
LEARNED: dict[str, Any] = dict(
    LAYER_NORM, use_rotary_embeddings=False, use_position_embeddings=True, add_linear_biases=True
)


def make_config(dtype: str = "fp32", **changes: Any) -> Config:
    return resolve(
        Config(
            model=dataclasses.replace(BASE, **changes),
            batch=BatchConfig(sequence_length=SEQUENCE_LENGTH),
            distributed=DistributedConfig(training_dtype=dtype),
            data=DataConfig(dataset_source="random"),
        ),
        world_size=1,
    )


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Values of a size at which a mistake in any parameter shows in the logits."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in shapes_of(build_gpt(model, SEQUENCE_LENGTH)).items():
        value = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * value if "norm.weight" in name else value * (0.3 if len(shape) == 1 else 0.2)
    return weights


def reused_memory(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As the real source does: each tensor lies in memory that the next one overwrites."""
    buffer = torch.empty(max(value.numel() for value in weights.values()), dtype=next(iter(weights.values())).dtype)
    for name, value in weights.items():
        view = buffer[: value.numel()].view(value.shape).copy_(value)
        yield name, view
        buffer.fill_(math.nan)


def export(directory: Path, config: Config, weights: dict[str, Tensor], world_size: int = 1) -> None:
    """Export, and raise what any rank raised."""

    def rank_main(distributed: ThreadRank) -> None:
        shapes = shapes_of(build_gpt(config.model, SEQUENCE_LENGTH)).items()
        specs = make_specs([(name, shape, True) for name, shape in shapes])
        model = empty_model(specs, Layout(world_size), distributed.rank)
        huggingface.save_huggingface(directory, model, config, distributed, reused_memory(weights))  # type: ignore[arg-type]

    results = World(world_size).run(rank_main)
    for result in results:
        if isinstance(result, Exception):
            assert [type(other) for other in results] == [type(result)] * world_size, results
            raise result


def load(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    # Before version 5, transformers converts everything to fp32 unless told to keep the dtype of the config.
    options = {} if int(transformers.__version__.split(".")[0]) >= 5 else {"torch_dtype": "auto"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_weights_arrive_bit_for_bit(dtype: str, torch_dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers loads them in the training dtype, with the same bits."""
    config = make_config(dtype)
    weights = {name: value.to(torch_dtype) for name, value in random_weights(config.model).items()}
    export(tmp_path / "7", config, weights)
    model = load(tmp_path / "7")
    assert model.dtype == torch_dtype
    assert torch.equal(model.model.embed_tokens.weight, weights["embedding.word.weight"])
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, weights["blocks.1.mlp.up.weight"].chunk(2)[1])


def test_several_files_and_ranks(tmp_path: Path) -> None:
    """Cut into files by size, with an index that names them all; only rank 0 writes; transformers loads it."""
    config = make_config(head_groups=2)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, export_shard_size="12KB"))
    weights = random_weights(config.model)
    export(tmp_path / "100", config, weights, world_size=3)
    names = sorted(path.name for path in (tmp_path / "100").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    index = json.loads((tmp_path / "100" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    export(tmp_path / "1", make_config(head_groups=2), weights)
    found, whole = (load(tmp_path / name).state_dict() for name in ("100", "1"))
    assert found.keys() == whole.keys() and all(torch.equal(value, whole[name]) for name, value in found.items())


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """Others can read an export if the umask lets them (safetensors itself would write 0600)."""
    previous = os.umask(0o022)
    try:
        config = make_config()
        export(tmp_path / "1", config, random_weights(config.model))
    finally:
        os.umask(previous)
    entries = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "1").iterdir()}
    names = ("README.md", "config.json", "generation_config.json", "model.safetensors")
    assert entries == dict.fromkeys(names, 0o644)
    assert (tmp_path / "1").stat().st_mode & 0o777 == 0o755


def test_exporting_again_replaces_the_folder_and_keeps_foreign_ones(tmp_path: Path) -> None:
    """A second export of an iteration wins; a folder with other files is moved aside, not deleted."""
    config = make_config()
    weights = random_weights(config.model)
    export(tmp_path / "1", config, weights)
    export(tmp_path / "1", config, {name: value + 1 for name, value in weights.items()})
    assert torch.equal(load(tmp_path / "1").model.norm.weight, weights["head.norm.weight"] + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    (tmp_path / "1" / "notes.txt").write_text("mine")
    export(tmp_path / "1", config, weights)
    assert torch.equal(load(tmp_path / "1").model.norm.weight, weights["head.norm.weight"])
    (aside,) = (path for path in tmp_path.iterdir() if path.name != "1")
    assert aside.name.startswith("1.aside-")
    assert (aside / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("fails", ["new_file", "pwrite", "write_text", "publish", "sync_folder"])
def test_a_full_disk_is_a_storage_error_on_every_rank(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens: every rank raises, no export appears, nothing temporary stays."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    owners = {"sync_folder": export_folder, "pwrite": os}
    monkeypatch.setattr(owners.get(fails, files), fails, full)
    monkeypatch.setattr(huggingface, "AGREE_BYTES", 1000)  # noticed in between
    config = make_config()
    with pytest.raises(StorageError, match=r"rank 0: .*No space left on device .*bytes free"):
        export(tmp_path / "1", config, random_weights(config.model), world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_left_over_folders_are_swept(tmp_path: Path) -> None:
    """The next export deletes what a killed one left behind."""
    left = tmp_path / ".tmp-5-0123456789abcdef"
    left.mkdir()
    (left / "model-00001.safetensors").write_bytes(b"partial")
    config = make_config()
    export(tmp_path / "6", config, random_weights(config.model))
    assert [path.name for path in tmp_path.iterdir()] == ["6"]


def test_a_left_out_weight_is_noticed(tmp_path: Path) -> None:
    """An incomplete source of weights never becomes an export."""
    config = make_config()
    weights = random_weights(config.model)
    del weights["blocks.1.mlp_norm.weight"]
    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp_norm\.weight"):
        export(tmp_path / "1", config, weights)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    """AutoTokenizer loads it from the export, and the config knows its end of document."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="not"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = make_config()
    data = dataclasses.replace(config.data, tokenizer_file=str(tmp_path / "tokenizer.json"))
    export(tmp_path / "export" / "1", dataclasses.replace(config, data=data), random_weights(config.model))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "export" / "1")
    assert loaded("to be or not to be")["input_ids"] == [1, 2, 3, 4, 1, 2]
    model = load(tmp_path / "export" / "1")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == loaded.eos_token_id == 0
    export(tmp_path / "export" / "1", dataclasses.replace(config, data=data), random_weights(config.model))
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["1"]


def test_the_config_states_both_spellings() -> None:
    """transformers 5 reads dtype and rope_parameters, older ones torch_dtype and rope_theta; dropout is stated."""
    config = make_config("bf16", attention_dropout=0.1, hidden_dropout=0.2)
    content = hugging_face_config(config, {})
    assert content["dtype"] == content["torch_dtype"] == "bfloat16"
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 500.0
    assert content["attention_dropout"] == 0.1
    assert content["bos_token_id"] is None and content["eos_token_id"] is None
    assert content["max_position_embeddings"] == 32
    longer = dataclasses.replace(config, batch=dataclasses.replace(config.batch, sequence_length=4096))
    assert hugging_face_config(longer, {})["max_position_embeddings"] == 4096
    gpt2 = hugging_face_config(make_config(**LEARNED, hidden_dropout=0.2, attention_dropout=0.1), {})
    assert (gpt2["resid_pdrop"], gpt2["embd_pdrop"], gpt2["attn_pdrop"]) == (0.2, 0.2, 0.1)
    starcoder2 = hugging_face_config(make_config(**LAYER_NORM, hidden_dropout=0.2), {"eos_token_id": 3})
    assert (starcoder2["residual_dropout"], starcoder2["embedding_dropout"]) == (0.2, 0.2)
    assert starcoder2["eos_token_id"] == 3
