"""muP: factors by width, against the paper's tables written out by hand, its authors' package, and
torch."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.compatibility import check_architecture
from megatron_lite.config import Config, flatten
from megatron_lite.config.mup import with_factors
from megatron_lite.data.open_data import open_data
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.model.gpt import parameters_of
from megatron_lite.monitor.banner import mup_lines
from megatron_lite.parameter import ParameterSpec
from tests.support.harness import (
    LLAMA,
    Trajectory,
    layers_of,
    run_distributed,
    same_weights,
    tiny_config,
    train_several,
)
from tests.support.plain_gpt import PlainGPT

Options = dict[str, Any]
ITERATIONS = 5
RATIO, BASE = 4, dict(mup=True, mup_base_hidden_size=8, lr_warmup=3)
# 4 times as wide: as many heads as the base, of 2 channels there and 8 here
TIED: Options = dict(mup_base_kv_channels=2, **BASE)
UNTIED: Options = dict(LLAMA, **BASE)
MATRICES = ("query_key_value.weight", "attention.output.weight", "up.weight", "down.weight")


def specs(config: Config) -> list[ParameterSpec]:
    return [parameter.spec for parameter in parameters_of(layers_of(config))]


def by_hand(name: str, of_matrices: float) -> tuple[float, float]:
    """Factors on initial std and learning rate: table 3 of Yang et al. for Adam; its embedding and
    head agree with table 8 where they are one tensor."""
    if name.endswith(MATRICES):
        return 1 / math.sqrt(RATIO), of_matrices
    return (1 / RATIO, 1 / RATIO) if name == "head.output.weight" else (1.0, 1.0)


@pytest.mark.parametrize("options", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("optimizer", "of_matrices"),
    [
        (dict(optimizer="adamw"), 1 / RATIO),
        (dict(optimizer="lion"), 1 / RATIO),
        (dict(optimizer="muon", muon_adjust_lr="original"), 1.0),
        (dict(optimizer="muon"), 1 / math.sqrt(RATIO)),
    ],
    ids=["adamw", "lion", "original muon", "muon"],
)
def test_each_tensor_has_the_factors_of_the_paper(
    options: Options, optimizer: Options, of_matrices: float
) -> None:
    """Initial std and learning rate by name; weight decay per step is as without muP; --lr_scales
    multiply."""
    common = dict(init_method_std=0.5, lr_scales=("blocks.1:3",), **optimizer)
    without = {name: value for name, value in options.items() if not name.startswith("mup")}
    pairs = zip(
        specs(tiny_config(**common, **options)),
        specs(tiny_config(**common, **without)),
        strict=True,
    )
    for spec, usual in pairs:
        std, rate = by_hand(spec.name, of_matrices)
        assert spec.initializer.scale == pytest.approx(usual.initializer.scale * std), spec.name
        assert spec.lr_scale == pytest.approx(usual.lr_scale * rate), spec.name
        per_step = spec.lr_scale * spec.weight_decay
        assert per_step == pytest.approx(usual.lr_scale * usual.weight_decay), spec.name


def plain_loop(
    config: Config, initial: dict[str, np.ndarray]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The oracle: a torch.nn model with the factors of this file, and torch.optim.AdamW with a
    group per tensor."""
    tied, channels = config.model.tie_word_embeddings, config.model.kv_channels
    base = config.model.mup_base_kv_channels
    assert base is not None
    factors = dict(
        attention_scale=math.sqrt(base) / channels, logit_scale=1 / RATIO if tied else 1.0
    )
    model = PlainGPT(dataclasses.replace(config.model, mup=False, **factors))
    model.load(initial)
    rates, groups = [], []
    for name, parameter in model.named_parameters():
        rates.append(by_hand(name, 1 / RATIO)[1])
        decay = config.optimizer.weight_decay / rates[-1] if parameter.dim() > 1 else 0.0
        groups.append({"params": [parameter], "weight_decay": decay})
    optimizer, losses = torch.optim.AdamW(groups), []
    batches = open_data(config, 0, 1).batches("training", 0, ITERATIONS)
    for iteration, ((tokens, *_),) in enumerate(batches, start=1):
        loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * config.learning_rate.lr * min(1.0, iteration / 3)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.numpy() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize(
    "options", [pytest.param(TIED, marks=pytest.mark.slow), UNTIED], ids=["tied", "untied"]
)
def test_training_equals_plain_torch(options: Options) -> None:
    """On two ranks, with ZeRO 1, 2 and 3, which have the same bits."""
    runs = [{**options, "zero_stage": stage} for stage in (1, 2, 3)]
    ours, *others = run_distributed(2, train_several, runs, ITERATIONS)[0]
    for other in others:
        assert other.losses == ours.losses and same_weights(other.weights, ours.weights)
    losses, weights = plain_loop(tiny_config(**options), ours.initial)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)
    for name, weight in weights.items():
        difference = np.abs(ours.weights[name] - weight)
        if name.endswith("query_key_value.bias"):
            difference[32:64] = 0  # of keys: without a gradient, Adam makes noise of rounding
        assert difference.max() < 1e-5, name


@pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_that_share_a_model_train_as_plain_torch(split: str) -> None:
    """The factors do not depend on which rank has a tensor, or a part of it."""
    groups: dict[str, Any] = {split: 2}
    ((ours,), _) = run_distributed(2, train_several, [UNTIED | groups], ITERATIONS, **groups)
    losses, _ = plain_loop(tiny_config(**UNTIED), ours.initial)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)


def test_a_model_as_wide_as_its_base_trains_as_without() -> None:
    def losses(options: Options) -> Trajectory:
        return run_distributed(1, train_several, [options], ITERATIONS)[0][0]

    ours = losses(dict(mup=True, mup_base_hidden_size=32, optimizer="muon"))
    usual = losses(dict(optimizer="muon"))
    assert ours.losses == usual.losses and same_weights(ours.weights, usual.weights)


def test_attention_scores_equal_those_of_the_base_at_its_head_size() -> None:
    """Divided by d from there on; a factor on scores or logits is the base's."""

    def factors(**options: Any) -> tuple[float | None, float]:
        model = with_factors(tiny_config(**BASE, **options).model)
        return model.attention_scale, model.logit_scale

    assert factors() == (None, 1 / RATIO)  # 1 / sqrt(8), as the base has it
    assert factors(mup_base_kv_channels=4) == (0.5 * 4 / 8, 1 / RATIO)
    assert factors(mup_base_kv_channels=4, attention_scale=0.3) == (0.3 * 4 / 8, 1 / RATIO)
    assert factors(logit_scale=0.5, tie_word_embeddings=False) == (None, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mup=True), "--mup=1: the width of the base model is missing"),
        (
            dict(mup=True, mup_base_hidden_size=12),
            "--hidden_size=32: write a divisor of hidden_size",
        ),
        (dict(BASE, mup_base_kv_channels=3), "--kv_channels=8: write a divisor of kv_channels"),
        (dict(BASE, optimizer="sgd"), "--mup=1, --optimizer=sgd: clipping changes SGD's factors"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Options, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny_config(**options)
    assert message in str(caught.value)


def test_exports_state_the_factors_or_are_refused_by_name() -> None:
    """An untied head has its factors in its weights; Granite states factors on logits and
    scores."""
    assert check_exportable(tiny_config(**UNTIED).model) == "llama"
    with pytest.raises(UsageError, match=r"--logit_scale=1 \(not 0.25, with muP's factors\)"):
        check_exportable(tiny_config(**TIED).model, "gpt2")
    granite = tiny_config(**{**UNTIED, **TIED, "tie_word_embeddings": True})
    content = hugging_face_config(granite, {})
    assert content["model_type"] == "granite" and content["logits_scaling"] == RATIO
    assert content["attention_multiplier"] == pytest.approx(math.sqrt(2) / 8)


def test_a_checkpoint_keeps_its_base() -> None:
    """Another base, or muP for a run that began without, is refused by name."""
    for other in (dict(BASE, mup_base_hidden_size=16), {}):
        with pytest.raises(CheckpointError, match="--mup_base_hidden_size: "):
            check_architecture(flatten(tiny_config(**other)), tiny_config(**BASE), "there")


def test_the_banner_has_the_table() -> None:
    config = tiny_config(**UNTIED)
    title, _, *rows = mup_lines(config, layers_of(config))
    assert title.startswith("muP for 4 times the width")
    sizes = {"input": 2208, "hidden": 23040, "output": 2048}
    found = {
        name: (int(count.replace(",", "")), *cells) for name, count, *cells in map(str.split, rows)
    }
    assert found == {
        "input": (sizes["input"], "1", "1", "1", "1"),
        "hidden": (sizes["hidden"], "0.5", "0.25", "4", "1"),
        "output": (sizes["output"], "0.25", "0.25", "4", "1"),
    }
    tied = tiny_config(**TIED)
    assert list(mup_lines(tied, layers_of(tied)))[2].split()[-1] == "0.25"


@pytest.mark.parametrize("options", [TIED, UNTIED], ids=["tied", "untied"])
def test_the_authors_package_has_the_same_factors(options: Options) -> None:
    """Initial values by its `normal_`, learning rate and decay by `MuAdamW`; its untied head, as in
    table 8, divides by the width what is in our weights, as in table 3."""
    mup = pytest.importorskip("mup")
    config = tiny_config(**options)
    tied = config.model.tie_word_embeddings

    def model_of(width: int) -> torch.nn.ModuleDict:
        word = torch.nn.Embedding(64, width)
        head = mup.MuSharedReadout(word.weight, bias=False)
        if not tied:
            head = mup.MuReadout(width, 64, bias=False)
        up = torch.nn.Linear(width, 4 * width)
        return torch.nn.ModuleDict({"word": word, "up": up, "head": head})

    model = model_of(32)
    mup.set_base_shapes(model, model_of(8), delta=model_of(16), rescale_params=False)
    groups = mup.MuAdamW(model.parameters(), lr=1.0, weight_decay=1.0).param_groups
    names = {"word.weight": "embedding.word.weight", "up.weight": "blocks.0.mlp.up.weight"}
    names |= {} if tied else {"head.weight": "head.output.weight"}
    ours = {spec.name: spec for spec in specs(config)}
    usual = {spec.name: spec for spec in specs(tiny_config(**{**options, "mup": False}))}
    parameters = dict(model.named_parameters())
    for theirs, name in names.items():
        parameter, spec = parameters[theirs], ours[name]
        (group,) = (each for each in groups if any(some is parameter for some in each["params"]))
        output = 1 / model["head"].width_mult() if theirs == "head.weight" else 1.0
        torch.manual_seed(0)
        drawn = torch.empty_like(parameter).normal_()
        torch.manual_seed(0)
        factor = float((mup.init.normal_(parameter).detach() / drawn).mean()) * output
        scale = usual[name].initializer.scale * math.sqrt(RATIO)  # as the base's default
        assert spec.initializer.scale == pytest.approx(scale * factor), name
        assert spec.lr_scale == pytest.approx(group["lr"] * output), name
        per_step = spec.lr_scale * spec.weight_decay
        assert per_step == pytest.approx(group["lr"] * group["weight_decay"]), name
    output = 1 / model["head"].width_mult() if tied else 1.0
    assert with_factors(config.model).logit_scale == output
