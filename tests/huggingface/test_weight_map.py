"""Our parameters and the tensors of Hugging Face models, against models that transformers made."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.huggingface.weight_map import constants, known_name, pieces
from megatron_lite.model import gpt
from megatron_lite.model.embedding_and_head import Head
from megatron_lite.model.layer import Layer, MicroBatch
from megatron_lite.parameter import Parameter
from tests.support.families import FAMILIES, SEQUENCE_LENGTH, logits_of, make_model, random_tokens
from tests.support.folder_checks import Weights, our_config, to_ours

families = pytest.mark.parametrize("family", FAMILIES)


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return gpt.shapes_of(gpt.build_gpt(model, SEQUENCE_LENGTH))


def state_of(theirs: torch.nn.Module, model: ModelConfig) -> Weights:
    """Return the tensors in a file of their model, without a tied head."""
    names = theirs.state_dict()
    if model.tie_word_embeddings:
        del names["lm_head.weight"]
    return dict(names)


def to_theirs(ours: Weights, architecture: str, model: ModelConfig) -> Weights:
    """Return their tensors, including constants; elements missing from the table are NaN."""
    theirs: Weights = {}
    for name, tensor in ours.items():
        for piece in pieces(name, tuple(tensor.shape), architecture, model, in_memory=True):
            made = theirs.setdefault(piece.name, torch.full(piece.their_shape, torch.nan))
            rows = piece.place(made, tensor)
            assert bool(rows.isnan().all()), f"{piece} is written twice"
            rows.copy_(tensor[piece.first_row : piece.first_row + piece.rows] + piece.plus)
    for constant in constants(architecture, model):
        assert constant.name not in theirs
        theirs[constant.name] = torch.full(constant.shape, constant.value)
    return theirs


def filled_layers(model: ModelConfig, weights: Weights) -> list[Layer]:
    """Return our layers with these weights."""
    layers, left = gpt.build_gpt(model, SEQUENCE_LENGTH), dict(weights)
    for module in (module for layer in layers for module in layer.modules()):
        for attribute, declared in list(module.named_parameters(recurse=False)):
            spec = cast(Parameter, declared).spec
            filled = Parameter(left.pop(spec.name).clone(), requires_grad=False)
            filled.spec, filled.casts = spec, {}
            setattr(module, attribute, filled)
    assert not left, f"no such parameters: {list(left)}"
    return layers


def our_logits(model: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Return the logits (b, s, v) of our layers for tokens (b, s)."""
    *layers, head = filled_layers(model, weights)
    hidden = None
    for layer in layers:
        hidden = layer(hidden, MicroBatch(tokens, tokens))
    assert isinstance(head, Head) and hidden is not None
    return head.logits(hidden)


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@families
def test_a_state_dict_survives_the_way_there_and_back(family: str) -> None:
    """Bit for bit, with every tensor of theirs in exactly one parameter of ours, and every element
    in both once."""
    model, architecture = our_config(family).model, FAMILIES[family]["model_type"]
    theirs = state_of(make_model(family), model)
    ours = to_ours(theirs, shapes_of(model), architecture, model)
    assert not any(bool(tensor.isnan().any()) for tensor in ours.values())
    assert sum(tensor.numel() for tensor in ours.values()) == sum(
        tensor.numel() for tensor in theirs.values()
    )
    assert not list(constants(architecture, model))
    assert_same(to_theirs(ours, architecture, model), theirs)
    owners = [
        {piece.name for piece in pieces(name, tuple(tensor.shape), architecture, model, True)}
        for name, tensor in ours.items()
    ]
    assert sum(len(names) for names in owners) == len(set().union(*owners))


@families
def test_every_gradient_is_that_of_transformers(family: str) -> None:
    """In fp32 to 1e-5 of the largest element of each parameter, those of key biases, which are zero
    but for rounding, with the biases of queries and values."""
    model, architecture = our_config(family).model, FAMILIES[family]["model_type"]
    theirs, tokens = make_model(family), random_tokens(length=SEQUENCE_LENGTH + 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    logits = theirs(input_ids=inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    shapes = shapes_of(model)
    layers = filled_layers(model, to_ours(state_of(theirs, model), shapes, architecture, model))
    parameters = gpt.parameters_of(layers)
    for parameter, name in zip(parameters, shapes, strict=True):
        parameter.requires_grad_()
        parameter.main_grad = torch.zeros(shapes[name])
    scale = torch.tensor(1 / labels.numel())
    hidden = None
    for layer in layers:
        hidden = layer(hidden, MicroBatch(inputs, labels, scale))
    assert hidden is not None
    hidden.backward()
    torch.testing.assert_close(hidden.item() * scale.item(), loss.item(), rtol=1e-6, atol=0)
    gradients = {name: cast(Tensor, value.grad) for name, value in theirs.named_parameters()}
    trained = [parameter for parameter in parameters if parameter.spec.trainable]
    own_shapes = {parameter.spec.name: parameter.spec.shape for parameter in trained}
    expected = to_ours(gradients, own_shapes, architecture, model)
    for parameter, (name, gradient) in zip(trained, expected.items(), strict=True):
        difference = (parameter.main_grad - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max(), name


# Models without a fixture: what an export writes for parameters that they have or lack.
EXPORTED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "zero-centred norms": ("llama", dict(zero_centered_normalization=True), "llama", 0),
    "zero-centred layer norms": ("gpt2", dict(zero_centered_normalization=True), "gpt2", 0),
    "zero-centred q/k norms": ("qwen3", dict(zero_centered_normalization=True), "qwen3", 0),
    "norms without weights": ("llama", dict(use_layer_norm_weight=False), "llama", 5),
    "q/k norms without weights": ("qwen3", dict(use_layer_norm_weight=False), "qwen3", 9),
    "layer norms without weights": ("gpt2", dict(use_layer_norm_weight=False), "gpt2", 14),
    "GPT-2 without biases": (
        "gpt2",
        dict(add_linear_biases=False, add_qkv_biases=False, add_mlp_biases=False),
        "gpt2",
        12,
    ),
    "biases of q, k, v alone": ("llama", dict(add_qkv_biases=True), "qwen2", 0),
    "biases of q, k, v and the MLP": (
        "llama",
        dict(add_qkv_biases=True, add_mlp_biases=True),
        "llama",
        2,
    ),
    "biases of the attention output alone": ("llama", dict(add_linear_biases=True), "llama", 6),
    "biases of q, k, v in a Qwen3": ("qwen3", dict(add_qkv_biases=True), "qwen3", 2),
    "biases of a StarCoder2's MLP": (
        "starcoder2, yarn, untied, no biases",
        dict(add_mlp_biases=True),
        "starcoder2",
        8,
    ),
    "multi-query with learned positions": ("gpt2", dict(head_groups=1), "gpt_bigcode", 0),
    "a Qwen2 with a window and no biases": (
        "qwen2, window, tied",
        dict(add_qkv_biases=False),
        "mistral",
        0,
    ),
    "quick gelu": ("gpt2", dict(activation_type="quick_gelu"), "gpt2", 0),
    "tanh": ("gpt2", dict(activation_type="tanh"), "gpt2", 0),
    "relu": ("llama", dict(activation_type="relu"), "llama", 0),
    "exact gelu and an untied head": (
        "gpt2",
        dict(activation_type="gelu_exact", tie_word_embeddings=False),
        "gpt2",
        0,
    ),
    "squared relu": ("gpt2", dict(activation_type="squared_relu"), "gpt2", 0),
    "identity and wide heads": (
        "starcoder2, window",
        dict(activation_type="identity", kv_channels=16, tie_word_embeddings=True),
        "starcoder2",
        0,
    ),
    "a window of one": (
        "mistral, window",
        dict(window_size=1, tie_word_embeddings=True),
        "mistral",
        0,
    ),
    "heads that do not divide the width": (
        "mistral, window",
        dict(hidden_size=22, num_attention_heads=3, head_groups=3, kv_channels=8),
        "mistral",
        0,
    ),
    "a padded vocabulary": ("llama", dict(make_vocab_size_divisible_by=64), "llama", 0),
    "every dropout": (
        "gpt2",
        dict(hidden_dropout=0.1, attention_dropout=0.2, embedding_dropout=0.3),
        "gpt2",
        0,
    ),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_exported_models_compute_the_same_logits(case: str) -> None:
    """Return a transformers model with our config.json and our weights, mapped by the table and the
    constants."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes, architecture, num_constants = EXPORTED[case]
    config = our_config(family, **changes)
    model = config.model
    assert check_exportable(model) == architecture
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes_of(model).items()
    }
    content = hugging_face_config(config, {})
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**content), attn_implementation="eager"
    ).eval()
    assert len(list(constants(architecture, model))) == num_constants
    state = to_theirs(weights, architecture, model)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: tuple(tensor.shape) for name, tensor in state_of(theirs, model).items()
    }
    theirs.load_state_dict(state, strict=not model.tie_word_embeddings)
    tokens = random_tokens()
    torch.testing.assert_close(
        logits_of(theirs, tokens), our_logits(model, weights, tokens), atol=1e-5, rtol=0
    )


def test_names_in_files() -> None:
    """Files of models without a head, buffers of older versions, and heads that are tied."""
    gpt2, llama = our_config("gpt2").model, our_config("llama").model
    assert (
        known_name("h.0.attn.c_attn.weight", "gpt2", gpt2) == "transformer.h.0.attn.c_attn.weight"
    )
    assert known_name("transformer.wte.weight", "gpt2", gpt2) == "transformer.wte.weight"
    assert known_name("h.0.attn.bias", "gpt2", gpt2) is None
    assert known_name("h.0.attn.c_attn.bias", "gpt2", gpt2) == "transformer.h.0.attn.c_attn.bias"
    assert known_name("lm_head.weight", "gpt2", gpt2) is None
    assert known_name("lm_head.weight", "llama", llama) == "lm_head.weight"
    assert (
        known_name("layers.1.mlp.up_proj.weight", "llama", llama)
        == "model.layers.1.mlp.up_proj.weight"
    )
    assert known_name("model.layers.0.self_attn.rotary_emb.inv_freq", "llama", llama) is None


def test_a_parameter_that_an_architecture_has_not() -> None:
    with pytest.raises(KeyError):
        pieces("embedding.position.weight", (40, 30), "llama", our_config("llama").model)
    with pytest.raises(KeyError):
        pieces("blocks.0.attention.query_norm.weight", (8,), "gpt2", our_config("gpt2").model)
