"""`--model`: each preset equals the import of its publisher's config.json, to the last
parameter."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config.source import PRESETS
from megatron_lite.config.training import MODEL_TYPES
from megatron_lite.huggingface.config_file import model_values
from megatron_lite.huggingface.model_folder import resolved_model
from megatron_lite.model.gpt import active_numel, build_gpt, parameters_of, shapes_of
from megatron_lite.monitor.metrics import model_flops
from megatron_lite.validation import resolve
from pretrain_gpt import main
from tests.support.launch import succeed
from tests.support.public_configs import PUBLIC, SIZES, public_config

COMMAND = ["--dataset_source=random", "--sequence_length=256", "--train_iters=1", "--batch_size=1"]


def test_a_preset_is_its_public_config() -> None:
    """Every option that config.json sets has its value, and the model has the published number of
    parameters."""
    assert set(PRESETS) == set(PUBLIC)
    for preset in PRESETS:
        model = resolve(parse([*COMMAND, f"--model={preset}"]).config, world_size=1).model
        values = model_values(public_config(preset))
        assert {option: getattr(model, option) for option in values} == values, preset
        shapes = shapes_of(build_gpt(model, 256))
        assert sum(math.prod(shape) for shape in shapes.values()) == PUBLIC[preset][1], preset


ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_353_032_704,
    "olmoe-1b-7b": 1_282_017_280,
    "gpt-oss-20b": 4_187_440_704,
}


@pytest.mark.parametrize("preset", ACTIVE)
def test_active_parameters(preset: str) -> None:
    """Of the experts those that a token chooses, and all others."""
    model = resolve(parse([*COMMAND, f"--model={preset}"]).config, world_size=1).model
    specs = [parameter.spec for parameter in parameters_of(build_gpt(model, 256))]
    numels = [(spec.name, spec.numel) for spec in specs]
    assert active_numel(numels, model) == ACTIVE[preset]
    # two operations for each weight of an active matrix, in three passes; sinks are no matrix
    matrices = [
        (spec.name, spec.numel) for spec in specs if len(spec.shape) == 2 and not spec.embedding
    ]
    no_attention = dataclasses.replace(model, window_size=1, attention_pattern=())
    flops = model_flops(no_attention, 10**9, 1)
    scores = 6 * model.num_layers * model.num_attention_heads * model.kv_channels * 2
    assert flops == pytest.approx(6 * active_numel(matrices, model) + scores, rel=1e-8)


def test_the_dry_run_prints_the_published_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run of a preset, and of a folder with only the publisher's config.json, prints the
    published number."""
    (tmp_path / "config.json").write_text(PUBLIC["starcoder2-3b"][0])
    folder = [f"--pretrained_checkpoint_path={tmp_path}", "--load_parts=architecture"]
    for preset, source in (("gpt2", ["--model=gpt2"]), ("starcoder2-3b", folder)):
        assert (
            main(["--dry_run=1", "--device=cpu", "--training_dtype=bf16", *COMMAND, *source]) == 0
        )
        assert f"parameters: {PUBLIC[preset][1]:,} (" in capsys.readouterr().out


def test_models_without_a_preset_have_the_published_number() -> None:
    """One of each family that has no preset. The bias that balances loads is no parameter, but state."""
    for name, (_, parameters) in SIZES.items():
        model = resolved_model(model_values(public_config(name)), name)
        specs = [parameter.spec for parameter in parameters_of(build_gpt(model, 256))]
        assert sum(spec.numel for spec in specs if not spec.is_state) == parameters, name
    kinds = {public_config(name)["model_type"] for name in (*PUBLIC, *SIZES)}
    assert kinds == {*MODEL_TYPES} - {"gpt_bigcode"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_dry_run_of_each_family(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(SIZES[name][0])
    source = [f"--pretrained_checkpoint_path={tmp_path}", "--load_parts=architecture"]
    assert main(["--dry_run=1", "--device=cpu", "--training_dtype=bf16", *COMMAND, *source]) == 0
    assert f"parameters: {SIZES[name][1]:,} (" in capsys.readouterr().out


def test_a_dry_run_and_a_run_print_active_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four experts: their 2 x 2 x 32 x 128 weights in each of two blocks do not compute a
    token."""
    sizes = ["--num_layers=2", "--hidden_size=32", "--num_attention_heads=2", "--vocab_size=64"]
    flags = [*COMMAND, *sizes, "--num_experts=4", "--num_experts_per_token=2", "--device=cpu"]
    flags += ["--add_linear_biases=0"]
    assert main([*flags, "--dry_run=1"]) == 0
    planned = capsys.readouterr().out
    (total,) = re.findall(r"parameters: ([\d,]+) \(", planned)
    (active,) = re.findall(r"active parameters: ([\d,]+) for each token", planned)
    idle = 2 * 2 * 2 * 32 * 128
    assert int(total.replace(",", "")) - int(active.replace(",", "")) == idle
    assert f"{total}, {active} of them for each token" in succeed(flags).output


def test_typed_flags_win_over_a_preset() -> None:
    """Typed flags win in any position, and derived values follow them."""
    for argv in (["--hidden_size=96", "--model=gpt2"], ["--model=gpt2", "--hidden_size=96"]):
        model = resolve(parse([*COMMAND, *argv]).config, world_size=1).model
        assert (model.hidden_size, model.ffn_hidden_size, model.kv_channels, model.num_layers) == (
            96,
            384,
            8,
            12,
        )


def test_values_that_depend_on_an_overridden_option_are_dropped() -> None:
    """Llama 3.1 with plain rotary positions, another scaling, or its base under the other name."""
    for argv, factor, base in (
        (["--rope_type=default"], None, 500000.0),
        (["--rope_type=linear", "--rope_factor=2"], 2.0, 500000.0),
        (["--rope_type=llama3"], 8.0, 500000.0),
        (["--rotary_embedding_scale=-9.210340371976184"], 8.0, 10000.0),
    ):
        model = resolve(parse([*COMMAND, "--model=llama-3.1-8b", *argv]).config, world_size=1).model
        assert (model.rope_factor, model.rotary_base) == (factor, base)
        assert (model.rope_low_freq_factor is None) == (model.rope_type != "llama3")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PUBLIC | SIZES)
def test_the_published_number_is_that_of_transformers(preset: str) -> None:
    """transformers builds a model with the same number of parameters from config.json, on the meta
    device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**public_config(preset)))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == (PUBLIC | SIZES)[preset][1]
