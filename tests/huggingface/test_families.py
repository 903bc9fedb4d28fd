"""Every Hugging Face family, whole: a folder of transformers is imported, trained and exported, as
a user would.

The oracle is a loop of transformers' own model, autograd, torch.optim.AdamW and clip_grad_norm_ on
the same tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.validation import resolve
from tests.support.families import (
    FAMILIES,
    FIRST_BY_DEFAULT,
    SEQUENCE_LENGTH,
    load_model,
    logits_of,
    random_tokens,
    write_folder,
    write_with_images,
)
from tests.support.harness import run_distributed, train_whole

ITERATIONS = 5
LR = 1e-3
# Adam divides a gradient by its own size. With the usual epsilon of 1e-8 float32 decides nothing where a
# gradient is zero but for rounding: then transformers in float32 and in float64 differ by up to 3e-5 after five
# updates, and 8e-7 with this one.
EPS = 1e-4
UNBALANCED = ("--expert_auxiliary_loss_coefficient=0", "--moe_router_bias_update_rate=0")


@dataclass(frozen=True)
class Trained:
    """Results of a run: the loss of every iteration, and the folder of its export."""

    losses: list[float]
    export: Path


def has_experts(name: str) -> bool:
    return "num_experts_per_tok" in FAMILIES[name]


def flags(folder: Path, experiment: Path, *more: str) -> list[str]:
    return [
        f"--pretrained_checkpoint_path={folder}",
        f"--experiment_dir={experiment}",
        "--dataset_source=random",
        f"--sequence_length={SEQUENCE_LENGTH}",
        "--batch_size=4",
        f"--train_iters={ITERATIONS}",
        f"--export_interval={ITERATIONS}",
        "--log_interval=1",
        f"--lr={LR}",
        f"--adam_eps={EPS}",
        "--weight_decay=0.1",
        "--device=cpu",
        *more,
    ]


def config_of(argv: list[str], world_size: int) -> Config:
    return resolve(parse(argv).config, world_size)


def train(distributed: Distributed, argv: list[str]) -> None:
    """A run on one of its ranks, from the flags on."""
    train_whole(distributed, config_of(argv, distributed.world_size))


def run_from(folder: Path, experiment: Path, *more: str, ranks: int = 1) -> Trained:
    run_distributed(ranks, train, flags(folder, experiment, *more))
    lines = map(json.loads, (experiment / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["phase"] == "training"]
    return Trained(losses, experiment / "export" / str(ITERATIONS))


def batches(argv: list[str]) -> Iterator[Tensor]:
    """The tokens (b, s + 1) of each iteration."""
    for micro_batches in open_data(config_of(argv, 1), 0, 1).batches("training", 0, ITERATIONS):
        yield torch.cat([micro_batch.tokens for micro_batch in micro_batches])


def oracle(folder: Path, argv: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of transformers' model."""
    model = load_model(folder).train()
    parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[parameter.dim() > 1 and not name.endswith("bias")].append(parameter)
    groups = [
        {"params": parts[True], "weight_decay": 0.1},
        {"params": parts[False], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=EPS)
    losses = []
    for tokens in batches(argv):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


# Gradients of all families are compared in test_weight_map.py, configurations both ways in
# test_architectures.py.
@pytest.mark.parametrize("name", FIRST_BY_DEFAULT)
def test_training_equals_transformers(name: str, tmp_path: Path) -> None:
    """Five updates from an imported folder: losses to 1e-6 relative, exported weights to 1e-6, a
    thousandth of an update. Nothing balances the loads of experts, as in transformers here."""
    folder = write_folder(name, tmp_path / "model")
    more = UNBALANCED if has_experts(name) else ()
    ours = run_from(folder, tmp_path / "run", *more)
    losses, weights = oracle(folder, flags(folder, tmp_path / "run", *more))
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)
    exported = load_model(ours.export).state_dict()
    assert exported.keys() == weights.keys()
    for key, expected in weights.items():
        torch.testing.assert_close(
            exported[key],
            expected,
            atol=1e-6,
            rtol=1e-6,  # of norms around 1 or 2
            msg=lambda text, key=key: f"{key}: {text}",
        )


@pytest.mark.parametrize("name", FIRST_BY_DEFAULT)
def test_an_import_is_exported_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Nothing trained: transformers reloads the very tensors and the same architecture."""
    folder = write_folder(name, tmp_path / "model")
    argv = [
        flag for flag in flags(folder, tmp_path / "run") if not flag.startswith("--train_iters")
    ]
    run_distributed(1, train, argv)
    original, exported = load_model(folder), load_model(tmp_path / "run" / "export" / "0")
    assert type(original) is type(exported)
    assert original.state_dict().keys() == exported.state_dict().keys()
    for key, expected in original.state_dict().items():
        assert torch.equal(exported.state_dict()[key], expected), key


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_text_part_of_a_model_of_texts_and_images(is_nested: bool, tmp_path: Path) -> None:
    """It is imported, and exported as the text model: the same tensors, and the same logits of
    texts. transformers has had two layouts of the names."""
    folder = write_with_images(tmp_path / "model")
    original, tokens = load_model(folder), random_tokens()
    expected = logits_of(original, tokens)
    if is_nested:
        file = folder / "model.safetensors"
        tensors = load_file(file).items()
        save_file(
            {
                "model." + name.replace("language_model.model.", "language_model."): value
                for name, value in tensors
            },
            file,
        )
    argv = [
        flag for flag in flags(folder, tmp_path / "run") if not flag.startswith("--train_iters")
    ]
    run_distributed(1, train, argv)
    export = tmp_path / "run" / "export" / "0"
    content = json.loads((export / "config.json").read_text())
    assert (content["model_type"], content["eos_token_id"]) == ("gemma3_text", 2)
    exported = load_model(export)
    assert type(exported).__name__ == "Gemma3ForCausalLM"
    assert torch.equal(logits_of(exported, tokens), expected)
    for key, value in exported.model.state_dict().items():
        assert torch.equal(value, original.model.language_model.state_dict()[key]), key


LAYOUTS = {
    "llama, llama3 rope, tied, attention biases": "fp32",
    "gpt2": "bf16",
    "qwen3": "bf16",
    "gpt_oss": "fp32",
    "glm4_moe": "fp32",
}
SLOW_LAYOUTS = ("qwen3", "glm4_moe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_LAYOUTS)) for name in LAYOUTS],
)
def test_ranks_and_zero_stages_export_the_same(name: str, tmp_path: Path) -> None:
    """Import, train, export on two ranks: the same files at ZeRO 1 and 3, and one rank's to
    rounding."""
    folder = write_folder(name, tmp_path / "model")
    dtype = f"--training_dtype={LAYOUTS[name]}"
    more = (dtype, "--export_dtype=fp32", "--export_shard_size=20KB", "--micro_batch_size=2")
    first = run_from(folder, tmp_path / "zero1", *more, "--zero_stage=1", ranks=2)
    third = run_from(folder, tmp_path / "zero3", *more, "--zero_stage=3", ranks=2)
    alone = run_from(folder, tmp_path / "alone", *more)
    files = sorted(path.name for path in first.export.iterdir())
    assert files == sorted(path.name for path in third.export.iterdir()) and len(files) > 4
    for file in files:
        assert (first.export / file).read_bytes() == (third.export / file).read_bytes(), file
    assert first.losses == third.losses
    tolerance = 1e-6 if LAYOUTS[name] == "fp32" else 1e-3
    np.testing.assert_allclose(alone.losses, first.losses, rtol=tolerance)
    weights, others = (
        {
            key: value
            for file in sorted(folder.glob("*.safetensors"))
            for key, value in load_file(file).items()
        }
        for folder in (first.export, alone.export)
    )
    for key, value in weights.items():
        # An update moves a weight by about the learning rate; a sign that rounding turns, by twice
        # that.
        bound = 1e-5 if LAYOUTS[name] == "fp32" else 2 * ITERATIONS * LR
        difference = value - others[key]
        assert difference.abs().max() < bound, key
        assert difference.abs().mean() < 0.1 * bound, key
