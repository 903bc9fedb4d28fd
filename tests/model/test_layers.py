"""The chain of layers as the engine sees it: names, and gradients of a model that is trained in
part."""

import random
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.kernels.triton_support import is_interpreted
from megatron_lite.model.layer import Layer, MicroBatch, dropout
from megatron_lite.parameter import Parameter
from tests.support.harness import layers_of, tiny_config
from tests.support.kernel_checks import covering, empty_gradient, saved_tensors
from tests.support.plain_gpt import PlainGPT

LENGTH = 16
BOTH = {"use_rotary_embeddings": True, "use_position_embeddings": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "use_rotary_embeddings": True,
        "gated": True,
        "add_linear_biases": False,
        "normalization_type": "rms_norm",
        "head_groups": 2,
        "tie_word_embeddings": False,
    },
    "every norm": {"qk_layernorm": True, "hybrid_norm": True, "input_embedding_norm": True, **BOTH},
}
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
by_interpreter = pytest.mark.skipif(
    not is_interpreted(), reason="kernels run natively here: tests/test_gpu.py"
)


def build(
    architecture: str, is_frozen: Callable[[str], bool], **options: Any
) -> tuple[list[Layer], dict[str, Parameter]]:
    """Layers with memory, the same values every time; gradients of what is trained start as NaN."""
    layers = layers_of(
        tiny_config(**{**ARCHITECTURES[architecture], "sequence_length": LENGTH, **options})
    )
    parameters = {}
    for module in (module for layer in layers for module in layer.modules()):
        for attribute, declared in list(module.named_parameters(recurse=False)):
            spec = cast(Parameter, declared).spec
            values = torch.randn(
                spec.shape, generator=torch.Generator().manual_seed(len(parameters))
            )
            made = empty_gradient(0.1 * values, trained=not is_frozen(spec.name))
            setattr(module, attribute, made)
            parameters[spec.name] = made
    return layers, parameters


def some_tokens() -> Tensor:
    """Make the tokens of one micro-batch, (3, s + 1)."""
    return torch.arange(3 * (LENGTH + 1)).view(3, -1) * 11 % 64


def run(
    layers: list[Layer],
    scale: float | None = 0.5,
    labels: Tensor | None = None,
    loss_weight: float = 1.0,
    dropout_seed: int | None = None,
) -> Tensor:
    """The loss of one micro-batch, (), with its graph."""
    tokens = some_tokens()
    labels = tokens[:, 1:] if labels is None else labels
    scaled = None if scale is None else torch.tensor(scale)
    micro_batch = MicroBatch(tokens[:, :-1], labels, scaled, dropout_seed, loss_weight=loss_weight)
    hidden = None
    for layer in layers:
        hidden = layer(hidden, micro_batch)
    assert hidden is not None
    return hidden


def gradients(
    architecture: str, is_frozen: Callable[[str], bool], **options: Any
) -> dict[str, Tensor]:
    """Name -> gradient of every parameter that is trained."""
    layers, parameters = build(architecture, is_frozen, **options)
    run(layers).backward()
    trained = {name: parameter for name, parameter in parameters.items() if not is_frozen(name)}
    assert all(
        hasattr(parameter, "main_grad") == (name in trained)
        for name, parameter in parameters.items()
    )
    return {name: parameter.main_grad for name, parameter in trained.items()}


@architectures
def test_layer_names_begin_their_parameters_names(architecture: str) -> None:
    layers, parameters = build(architecture, lambda name: False)
    assert [layer.name for layer in layers] == ["embedding", "blocks.0", "blocks.1", "head"]
    placed = {id(parameter): name for name, parameter in parameters.items()}
    for layer in layers:
        names = [placed[id(parameter)] for parameter in layer.parameters()]
        assert names and all(name.startswith(f"{layer.name}.") for name in names)


PATTERNS = (
    ["embedding.*"],
    ["embedding.word.*"],
    ["embedding.*", "blocks.0.*"],
    ["blocks.*"],
    ["head.*"],
    ["*norm*"],
    ["*.bias"],
    ["blocks.*.weight"],
    ["*.up.*"],
    ["*.down.*"],
    ["*.query_key_value.*", "blocks.1.attention.output.*"],
    ["embedding.*", "head.output.*"],
    ["embedding.*", "blocks.*"],
    ["[!b]*"],
)


@architectures
def test_freezing_a_part_changes_no_gradient_of_the_rest(architecture: str) -> None:
    """The gradients of what is trained are bit for bit those of the model trained whole; the rest
    has none.

    Whole parts, and thirty choices drawn at random, each with a random level of recomputation.
    """
    whole = gradients(architecture, lambda name: False)
    generator = random.Random(1)
    choices = [
        {name for name in whole if any(fnmatch(name, pattern) for pattern in some)}
        for some in PATTERNS
    ]
    choices += [
        set(generator.sample(sorted(whole), generator.randrange(1, len(whole)))) for _ in range(30)
    ]
    for frozen in choices:
        level = generator.choice(["none", "activation", "full"])
        part = gradients(architecture, frozen.__contains__, mlp_recompute_level=level)
        assert part.keys() == whole.keys() - frozen
        for name, gradient in part.items():
            assert torch.equal(gradient, whole[name]), (name, frozen, level)


def plain_gradients(
    architecture: str, labels: Tensor, z_loss: float, scale: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed loss and its gradients by torch alone, from the same weights; labels below zero are
    left out."""
    _, parameters = build(architecture, lambda name: False, **options)
    config = tiny_config(**{**ARCHITECTURES[architecture], "sequence_length": LENGTH, **options})
    model = PlainGPT(config.model)
    model.load({name: parameter.detach().numpy() for name, parameter in parameters.items()})
    kept, real = labels.flatten() >= 0, labels.flatten()
    logits = model(some_tokens()[:, :-1]).flatten(0, 1)[kept].double()
    lse = logits.logsumexp(-1)
    loss = (lse - logits.gather(-1, real[kept, None])[:, 0] + z_loss * lse.square()).sum()
    (scale * loss).backward()
    return loss.detach(), {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}


LOSSES = [
    *(
        pytest.param(*row.values, "torch", marks=row.marks)
        for row in covering([*ARCHITECTURES], [None, 7, 24], [None, 5])
    ),
    pytest.param("llama", None, None, "triton", marks=by_interpreter),
    pytest.param("gpt2", 40, 2, "triton", marks=by_interpreter),
]


@pytest.mark.parametrize(("architecture", "size", "splits", "kernel"), LOSSES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_the_z_loss_and_masked_labels_are_those_of_plain_torch(
    architecture: str,
    splits: int | None,
    size: int | None,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss and every gradient, with half of a sample and a whole one masked; an evaluation has
    no z-loss."""
    if kernel == "triton":
        monkeypatch.setattr(sys.modules[__name__], "LENGTH", 7)
    options = dict(
        cross_entropy_splits=splits, cross_entropy_block_size=size, cross_entropy_impl=kernel
    )
    layers, parameters = build(architecture, lambda name: False, logit_z_loss=0.3, **options)
    labels = some_tokens()[:, 1:].clone()
    labels[0, 5:] = labels[2] = -1
    loss = run(layers, 0.5, labels)
    loss.backward()
    expected, gradients = plain_gradients(architecture, labels, 0.3, 0.5)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max())
        assert (
            float((parameters[name].main_grad - gradient).abs().max()) <= 2e-5 * largest + 1e-6
        ), name
    without, _ = plain_gradients(architecture, labels, 0.0, 0.5)
    torch.testing.assert_close(run(layers, None, labels).detach(), without, rtol=1e-6, atol=0)
    assert abs(float(expected - without)) > 10


ATTENTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "attention_softmax_in_fp32": True}),
    (
        "llama",
        {"rotary_percent": 0.5, "rope_type": "linear", "rope_factor": 3.0, "rotary_base": 30.0},
    ),
    (
        "llama",
        {
            "rotary_percent": 0.4,
            "kv_channels": 11,
            "scale_attn_by_inverse_layer_idx": True,
            "window_size": 5,
        },
    ),
]


@pytest.mark.parametrize(("architecture", "options"), ATTENTIONS, ids=str)
def test_options_of_attention_are_those_of_plain_torch(
    architecture: str, options: dict[str, Any]
) -> None:
    """Loss and every gradient: a part of the channels rotated, stretched positions, scores divided
    by the layer."""
    layers, parameters = build(architecture, lambda name: False, **options)
    for name, parameter in parameters.items():
        if name.endswith("query_key_value.weight"):
            parameter.data *= 10  # scores that tell positions apart
    loss = run(layers)
    loss.backward()
    model = PlainGPT(
        tiny_config(**{**ARCHITECTURES[architecture], "sequence_length": LENGTH, **options}).model
    )
    model.load({name: parameter.detach().numpy() for name, parameter in parameters.items()})
    expected = 3 * LENGTH * model.loss(some_tokens())
    (0.5 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, plain in model.named_parameters():
        assert plain.grad is not None
        difference = float((parameters[name].main_grad - plain.grad).abs().max())
        assert difference <= 2e-5 * float(plain.grad.abs().max()) + 1e-6, name


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "embedding_dropout"])
@pytest.mark.parametrize(
    "more", [{}, {"recompute_layers": 2}, {"mlp_recompute_level": "full"}], ids=str
)
@architectures
def test_each_dropout_drops_in_training_alone(
    architecture: str, more: dict[str, Any], option: str
) -> None:
    """Its seed decides, in training; without one nothing is dropped; the others drop nothing of
    their own."""
    plain, _ = build(architecture, lambda name: False)
    dropped = {"hidden_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0} | {
        option: 0.3
    }
    layers, _ = build(architecture, lambda name: False, **dropped, **more)
    losses = [float(run(layers, dropout_seed=seed).detach()) for seed in (1, 1, 2, None)]
    assert losses[0] == losses[1] != losses[2] and losses[3] not in losses[:3]
    # by another backend of attention
    assert losses[3] == pytest.approx(float(run(plain).detach()), rel=1e-6)


@architectures
def test_a_weight_multiplies_the_loss_and_no_gradient(architecture: str) -> None:
    """The gradient's scale holds it already."""
    results = []
    for weight in (1.0, 2.5):
        layers, parameters = build(architecture, lambda name: False)
        loss = run(layers, loss_weight=weight)
        loss.backward()
        results.append(
            (loss.item() / weight, [parameter.main_grad for parameter in parameters.values()])
        )
    (first, ones), (second, others) = results
    assert first == pytest.approx(second, rel=1e-12) and all(map(torch.equal, ones, others))


@architectures
def test_a_model_in_inference_keeps_nothing_and_computes_no_gradient(architecture: str) -> None:
    layers, _ = build(architecture, lambda name: True)
    with saved_tensors() as kept:
        loss = run(layers, scale=None)
    assert not kept and not loss.requires_grad


@architectures
def test_each_recomputation_level_keeps_less_by_the_stated_bytes(architecture: str) -> None:
    """Over the whole model: per block and level, tokens x ffn_hidden_size values (three times that
    when gated)."""
    kept: dict[str, int] = {}
    for level in ("none", "activation", "full"):
        layers, _ = build(architecture, lambda name: False, mlp_recompute_level=level)
        memories: dict[int, int] = {}

        def keep(tensor: Tensor, memories: dict[int, int] = memories) -> Tensor:
            memories[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = run(layers)
        kept[level] = sum(memories.values())
        del loss
    gated = ARCHITECTURES[architecture].get("gated", False)
    per_level = 2 * 4 * 3 * LENGTH * (4 * 32)  # blocks x bytes x tokens x width
    assert kept["none"] - kept["activation"] == per_level
    assert kept["none"] - kept["full"] == per_level * (3 if gated else 2)


@by_interpreter
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "gpt2" else [])
        for name in ARCHITECTURES
    ],
)
def test_triton_kernels_give_the_gradients_of_the_references(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of one block with every kernel that there is, and with the references: to
    rounding."""
    monkeypatch.setattr(sys.modules[__name__], "LENGTH", 5)
    options = dict(mlp_recompute_level="activation", num_layers=1)
    references = gradients(architecture, lambda name: False, **options)
    kernels = gradients(architecture, lambda name: False, enable_triton_kernels=True, **options)
    assert kernels.keys() == references.keys()
    for name, gradient in kernels.items():
        assert float((gradient - references[name]).abs().max()) <= 2e-5 * float(
            references[name].abs().max()
        ), name


def test_dropout() -> None:
    x = torch.ones(100, 100, requires_grad=True)
    y = dropout(x, 0.25, seed=3)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) == {
        0.0,
        float(torch.tensor(1 / 0.75)),
    } and torch.equal(x.grad, y)
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(dropout(x, 0.25, seed=3), y) and not torch.equal(dropout(x, 0.25, seed=4), y)
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, 3) is x
