"""Runs that train adapters: what a checkpoint holds, which model it goes on with, and layouts of
ranks. Values are compared with peft in tests/huggingface/test_adapters.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.checkpoint.frozen_base import digest_of
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface.model_folder import source_folders
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.pretrain import _next_step
from tests.huggingface.test_families import config_of, flags, train
from tests.support.families import write_folder
from tests.support.harness import layers_of, run_distributed, tiny_config

ITERATIONS = 4
LORA = ("--lora_rank=3", "--lora_dropout=0.1", "--lora_targets=query,value,mlp")


def run(folder: Path, experiment: Path, *more: str, ranks: int = 1, tensor: int = 1) -> None:
    ends = (f"--train_iters={ITERATIONS}", f"--export_interval={ITERATIONS}")
    words = flags(folder, experiment, "--checkpoint_interval=2", *ends, *LORA, *more)
    run_distributed(ranks, train, words, tensor_parallel=tensor)


def adapters(experiment: Path) -> dict[str, Tensor]:
    return load_file(experiment / "export" / str(ITERATIONS) / "adapter_model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(tmp_path: Path) -> None:
    """Its checkpoints hold adapters alone, and it goes on with the same model and function only."""
    folder = write_folder("llama", tmp_path / "model")
    run(folder, tmp_path / "whole")
    run(folder, tmp_path / "parts", "--stop_interval=2", "--zero_stage=3")
    run(folder, tmp_path / "parts")
    assert same(adapters(tmp_path / "whole"), adapters(tmp_path / "parts"))
    saved = tmp_path / "parts" / "checkpoints" / str(ITERATIONS)
    content = json.loads((saved / "manifest.json").read_text())
    assert all(name.endswith((".lora_a", ".lora_b")) for name in content["parameters"])
    elements = sum(tensor.numel() for tensor in adapters(tmp_path / "parts").values())
    assert 12 * elements <= content["files"]["rank_000.safetensors"]["size"] < 16 * elements

    exports = tmp_path / "parts" / "export"
    for place in (exports, exports / str(ITERATIONS)):
        told = (
            f"{ITERATIONS}: it holds an adapter .* convert_checkpoint --from=.*/{ITERATIONS} writes"
        )
        with pytest.raises(CheckpointError, match=told):
            source_folders(place)
    words = [*flags(folder, tmp_path / "parts", *LORA), "--train_iters=4", "--tokenizer_file=byte"]
    assert f"--model {tmp_path}/parts " in _next_step(config_of(words, 1))

    for change in ("--lora_alpha=4", "--lora_scaling=sqrt_rank", "--lora_targets=query,value"):
        with pytest.raises(RuntimeError, match="was trained with another architecture"):
            run(folder, tmp_path / "parts", change, "--train_iters=5")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][2, 3] += 1e-5
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        RuntimeError, match="CheckpointError: .* holds adapters to a model of digest"
    ):
        run(folder, tmp_path / "parts", "--train_iters=5")
    file.unlink()  # the next run needs the model, too
    with pytest.raises(CheckpointError, match="/model: it holds neither"):
        config_of([f"--pretrained_checkpoint_path={saved}", *flags(folder, tmp_path / "x")[1:]], 1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_ranks_and_stages_compute_the_same(name: str, tmp_path: Path) -> None:
    """Tensor-parallel ranks with split tokens, then data-parallel ranks with ZeRO-3, which read
    what the former wrote; the digest of the model is the same in both."""
    folder = write_folder(name, tmp_path / "model")
    run(folder, tmp_path / "one", "--lora_dropout=0")
    sizes = ("--tensor_parallel=3", "--sequence_tensor_parallel=1") if name == "gpt2" else ()
    ranks = 3 if sizes else 2
    more = ("--lora_dropout=0", *(sizes or ("--zero_stage=2",)), "--stop_interval=2")
    run(folder, tmp_path / "many", *more, ranks=ranks, tensor=ranks if sizes else 1)
    run(folder, tmp_path / "many", "--lora_dropout=0", "--zero_stage=3", ranks=2)
    expected = adapters(tmp_path / "one")
    for key, found in adapters(tmp_path / "many").items():
        torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-6)


def test_ranks_share_out_and_split_adapters_of_experts(tmp_path: Path) -> None:
    """Ranks that share the experts out, then ranks that split each, which read what the former
    wrote; the model is random."""
    words = "--hidden_size=32 --num_attention_heads=4 --kv_channels=8 --num_layers=2 --vocab_size=61 --ffn_hidden_size=24"
    words += " --gated=1 --normalization_type=rms_norm --add_linear_biases=0 --use_rotary_embeddings=1 --num_experts=4"
    words += " --num_experts_per_token=2 --moe_router_bias_update_rate=0"
    words += " --lora_dropout=0 --lora_targets=mlp.experts,query"

    def train_on(experiment: str, ranks: int, *more: str, **groups: int) -> None:
        ends = (
            "--train_iters=4",
            "--export_interval=4",
            "--checkpoint_interval=2",
            "--lora_rank=3",
        )
        flags_ = [*flags(tmp_path, tmp_path / experiment, *words.split(), *ends, *more)[1:]]
        flags_ += [f"--{name}={size}" for name, size in groups.items()]
        run_distributed(ranks, train, flags_, **groups)  # type: ignore[arg-type]

    train_on("one", 1)
    train_on("many", 2, "--stop_interval=2", "--zero_stage=2", expert_parallel=2)
    train_on("many", 2, tensor_parallel=2)
    expected = adapters(tmp_path / "one")
    assert any(".experts.base_layer.lora_A" in key for key in expected)
    for key, found in adapters(tmp_path / "many").items():
        torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-6)


def digest(distributed: Distributed, sizes: dict[str, int]) -> str:
    """The digest of a model with experts on one of its ranks."""
    experts = dict(num_experts=4, moe_router_bias_update_rate=0.0, **sizes)
    options = dict(lora_rank=2, lora_targets=("attention",), **experts)
    config = tiny_config(distributed.world_size, **options)
    model = partitioned(config, layers_of(config, distributed), distributed)
    model.initialize(1)
    return digest_of(model, distributed)


def test_the_digest_counts_each_expert_once() -> None:
    """Also where ranks share the experts out, and split them: a checkpoint resumes in any
    layout."""
    found = run_distributed(1, digest, {})
    for ranks, sizes in (
        (2, {"expert_parallel": 2}),
        (4, {"expert_parallel": 2, "tensor_parallel": 2}),
        (4, {"expert_parallel": 2, "zero_stage": 3}),
    ):
        groups = {name: size for name, size in sizes.items() if name != "zero_stage"}
        found += run_distributed(ranks, digest, sizes, **groups)
    assert len({*found}) == 1 and len(found[0]) == 16


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--freeze=blocks.0", "the model is frozen"),
        ("--lr_scales=*.lora_a:0", "a scale of 0 would freeze adapters"),
        ("--num_experts=4", "the bias is part of the frozen model"),
        ("--mup=1 --mup_base_hidden_size=32", "its factors are for models trained from random"),
    ],
)
def test_refused_by_name(words: str, problem: str) -> None:
    model = "--dataset_source=random --hidden_size=64 --num_attention_heads=4 --vocab_size=64"
    with pytest.raises(UsageError, match=problem):
        config_of(f"{model} --train_iters=1 --lora_rank=2 {words}".split(), 1)
