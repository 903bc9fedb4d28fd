"""Folders of models with experts: names on disk and in memory, 4-bit floats, layers and keys that
are left out or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface.config_file import hugging_face_config, model_values
from megatron_lite.tiles import Tile
from megatron_lite.validation import resolve
from tests.huggingface.test_families import flags, train
from tests.support.families import FAMILIES, load_model, make_config, make_model, write_folder
from tests.support.folder_checks import checked, our_config, read_whole
from tests.support.harness import run_distributed

EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe")


@pytest.mark.parametrize("family", EXPERTS)
def test_names_in_memory_are_read_as_those_on_disk(family: str, tmp_path: Path) -> None:
    """transformers writes either; every tensor has a place, and every element the same value."""
    model = make_model(family)
    found = []
    for original in (True, False):
        folder = tmp_path / str(original)
        model.save_pretrained(folder, save_original_format=original)
        source, shapes = checked(folder)
        found.append(read_whole(source, shapes))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    names = [{*load_file(tmp_path / str(kind) / "model.safetensors")} for kind in (True, False)]
    assert (names[0] == names[1]) == (family == "gpt_oss")


def write_four_bits(folder: Path) -> dict[str, np.ndarray]:
    """Write a gpt-oss with experts of random bytes in MXFP4, as published; return their weights by
    the formula of the reference: by tensor, as in 16 bits."""
    write_folder("gpt_oss", folder, hidden_size=64, intermediate_size=96)
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    generator, weights = torch.Generator().manual_seed(3), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        size = (experts, rows, inputs // 32)
        blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        scales.clamp_(max=252)  # beyond, fp32 overflows
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        low, high = blocks.numpy() & 15, blocks.numpy() >> 4
        nibble = np.stack([low, high], -1).reshape(experts, rows, inputs // 32, 32)
        value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibble & 7] * np.where(nibble > 7, -1, 1)
        factors = 2.0 ** (scales.numpy().astype(int) - 127)[..., None]
        decoded = (value * factors).reshape(experts, rows, inputs)
        weights[name] = decoded.transpose(0, 2, 1)
    save_file(tensors, file, {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(content))
    return weights


def test_four_bit_floats_equal_the_formula(tmp_path: Path) -> None:
    """Bit for bit, whole and in tiles as a rank reads them: gate and up of an expert take turns."""
    weights = write_four_bits(tmp_path)
    source, shapes = checked(tmp_path)
    ours = read_whole(source, shapes)
    for block in range(2):
        theirs = weights[f"model.layers.{block}.mlp.experts.gate_up_proj"]
        up = np.concatenate((theirs[..., 0::2], theirs[..., 1::2]), -1).transpose(0, 2, 1)
        down = weights[f"model.layers.{block}.mlp.experts.down_proj"].transpose(0, 2, 1)
        for kind, expected in (("up", up), ("down", down)):
            name = f"blocks.{block}.mlp.experts.{kind}.weight"
            expected = np.ascontiguousarray(expected, dtype=np.float32).reshape(shapes[name])
            assert np.array_equal(ours[name].numpy(), expected), name
            width, part = expected.shape[1], torch.full((7 * 5,), torch.nan)
            source.read(name, Tile(11 * width + 3, 7, 5, width), part)
            assert np.array_equal(part.view(7, 5).numpy(), expected[11:18, 3:8])
            run = torch.full((3 * width + 5,), torch.nan)
            source.read(name, Tile.run(190 * width - 2, run.numel()), run)
            flat = expected.reshape(-1)[190 * width - 2 :][: run.numel()]
            assert np.array_equal(run.numpy(), flat)


def test_damaged_four_bit_floats_are_refused(tmp_path: Path) -> None:
    """Scales of another shape, or none."""
    write_four_bits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = tensors.pop(name)
    for damaged in ({}, {name: scales[..., 1:].contiguous()}):
        save_file({**tensors, **damaged}, file, {"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"down_proj_scales are not \[5, 64, 96\] in MXFP4"
        ):
            checked(tmp_path)


def test_a_missing_and_an_extra_expert_are_refused(tmp_path: Path) -> None:
    write_folder("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    last = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checked(tmp_path)
    save_file({**tensors, name: last, name.replace(".4.", ".5."): last.clone()}, file)
    with pytest.raises(CheckpointError, match=r"experts\.5\.w2\.weight is not a tensor of this"):
        checked(tmp_path)


def test_keys_with_two_names() -> None:
    """Published Qwen3-MoE files say num_experts, transformers 5.24 writes num_local_experts; an
    export says both, and a file that says two numbers is refused."""
    content = json.loads(make_config("qwen3_moe").to_json_string(use_diff=False))
    assert (content["num_local_experts"], content.get("num_experts")) == (6, None)
    published = {key: value for key, value in content.items() if key != "num_local_experts"}
    assert model_values({**published, "num_experts": 6}) == model_values(content)
    with pytest.raises(CheckpointError, match="num_experts is 5, but num_local_experts is 6"):
        model_values({**content, "num_experts": 5})
    written = hugging_face_config(our_config("qwen3_moe"), {})
    assert (written["num_experts"], written["num_local_experts"]) == (6, 6)
    oss = json.loads(make_config("gpt_oss").to_json_string(use_diff=False))
    assert model_values({**oss, "experts_per_token": 2})["num_experts_per_token"] == 2
    with pytest.raises(
        CheckpointError, match="experts_per_token is 4, but num_experts_per_tok is 2"
    ):
        model_values({**oss, "experts_per_token": 4})


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; only None can be expressed"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; only 0.0"),
        ("mixtral", {"num_local_experts": 1}, "num_local_experts is 1; it must be 2 or more"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; only 1.702 can be expressed"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "only the first layers can have no experts"),
        ("qwen3_moe", {"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ("glm4_moe", {"shared_gate": True}, "shared_gate: True is not known"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    family: str, changes: dict[str, Any], said: str
) -> None:
    content = json.loads(make_config(family).to_json_string(use_diff=False))
    with pytest.raises(CheckpointError, match=said):
        model_values({**content, **changes})


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path) -> None:
    """As transformers does, which names them; one line says which."""
    write_folder("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {
        name.replace("layers.2.", "layers.3."): value.clone()
        for name, value in tensors.items()
        if "layers.2." in name
    }
    save_file({**tensors, **more, "model.layers.3.eh_proj.weight": torch.ones(30, 60)}, file)
    source, _ = checked(tmp_path)
    assert source.description == (
        "a Hugging Face folder, glm4_moe, without layers 3, which predict later tokens (MTP)"
    )


def resolved(folder: Path, tmp_path: Path, *more: str) -> Config:
    return resolve(parse(flags(folder, tmp_path / "run", *more)).config, 1)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_published_router_keeps_its_way_to_balance(family: str, tmp_path: Path) -> None:
    """Bias updates are never switched on for a model that was trained without."""
    model = resolved(write_folder(family, tmp_path / "model"), tmp_path).model
    has_bias = family == "glm4_moe"
    assert model.moe_router_choice_bias == has_bias
    assert (model.moe_router_bias_update_rate > 0) == has_bias
    coefficient = make_config(family).to_dict().get("router_aux_loss_coef", 0.0)
    assert model.expert_auxiliary_loss_coefficient == coefficient
    if not has_bias:
        with pytest.raises(ValueError, match="there is no bias to update"):
            resolved(tmp_path / "model", tmp_path, "--moe_router_bias_update_rate=0.001")


def test_the_router_of_glm_stays_in_fp32(tmp_path: Path) -> None:
    """A folder loaded by transformers in bf16 and saved has two dtypes; it is read as bf16, and its
    export in bf16 has the same bytes."""
    from transformers import AutoModelForCausalLM

    write_folder("glm4_moe", tmp_path / "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "bf16")
    source, _ = checked(tmp_path / "bf16")
    assert source.dtype == "bf16"
    expected = load_file(tmp_path / "bf16" / "model.safetensors")
    for dtype in ("fp32", "bf16"):
        more = (f"--training_dtype={dtype}", "--export_dtype=bf16")
        argv = flags(tmp_path / "bf16", tmp_path / dtype, *more)
        argv = [flag for flag in argv if not flag.startswith("--train_iters")]
        run_distributed(1, train, argv)
        exported = load_file(tmp_path / dtype / "export" / "0" / "model.safetensors")
        assert exported.keys() == expected.keys()
        for name, value in expected.items():
            assert exported[name].dtype == value.dtype, name
            assert torch.equal(exported[name], value), name


def test_experts_are_divided_among_files_in_order(tmp_path: Path) -> None:
    """Expert 10 follows expert 9, no file exceeds the limit, and transformers loads the files, whose
    own ones hold all experts of a block together, whatever their size."""
    folder = write_folder("mixtral, window, tied", tmp_path / "model")
    argv = flags(folder, tmp_path / "run", "--export_shard_size=20KB")
    run_distributed(1, train, [flag for flag in argv if not flag.startswith("--train_iters")])
    export = tmp_path / "run" / "export" / "0"
    places = json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]
    found = [
        places[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        for expert in range(12)
    ]
    assert found == sorted(found) and len({*found}) > 5
    for file in {*places.values()}:
        assert sum(value.nbytes for value in load_file(export / file).values()) <= 20_000
    exported = load_model(export).state_dict()
    for name, value in load_model(folder).state_dict().items():
        assert torch.equal(exported[name], value), name


def test_every_family_is_tried() -> None:
    assert {name.partition(",")[0] for name in FAMILIES} >= {*EXPERTS}
