"""Where the norms of a model are, how they begin, and what an fp32 residual stream is made of."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.model.block import Block
from megatron_lite.zero.stage import Observer
from tests.support.harness import layers_of, tiny_config
from tests.support.memory_meters import a_model, micro_batches

NORMS = ("qk_layernorm", "hybrid_norm", "input_embedding_norm")
PLACES = {
    "qk_layernorm": [
        f"blocks.{i}.attention.{norm}" for i in (0, 1) for norm in ("query_norm", "key_norm")
    ],
    "hybrid_norm": [
        f"blocks.{i}.{norm}"
        for i in (0, 1)
        for norm in ("attention_output_norm", "mlp_output_norm")
    ],
    "input_embedding_norm": ["embedding.norm"],
}


def norms_of(**options: Any) -> dict[str, Any]:
    """Name -> spec of the parameters of all norms."""
    specs = [
        parameter.spec
        for layer in layers_of(tiny_config(**options))
        for parameter in layer.parameters()
    ]
    return {spec.name: spec for spec in specs if "norm." in spec.name}


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("option", NORMS)
def test_names_of_norms(option: str, kind: str) -> None:
    """Each option adds its norms and no other; an RMS norm has no bias; norms of heads are as long
    as a head."""
    plain = norms_of(normalization_type=kind)
    added = norms_of(normalization_type=kind, **{option: True})
    suffixes = ["weight", "bias"] if kind == "layer_norm" else ["weight"]
    assert added.keys() - plain.keys() == {
        f"{place}.{suffix}" for place in PLACES[option] for suffix in suffixes
    }
    assert plain.keys() < added.keys()
    for name in added.keys() - plain.keys():
        assert added[name].shape == ((8,) if option == "qk_layernorm" else (32,))


def test_norms_are_vectors_that_do_not_decay() -> None:
    """So that weight decay does not pull weights around zero to zero, and Muon leaves them to
    AdamW."""
    for spec in norms_of(**dict.fromkeys(NORMS, True)).values():
        assert not spec.weight_decay and not spec.matrix_rows and not spec.embedding


def test_norms_without_weights_have_no_parameters() -> None:
    for kind in ("layer_norm", "rms_norm"):
        assert not norms_of(
            normalization_type=kind, use_layer_norm_weight=False, **dict.fromkeys(NORMS, True)
        )


@pytest.mark.parametrize("init_range", [0.0, 0.2])
def test_weights_around_zero_begin_as_those_around_one_do(init_range: float) -> None:
    """The same values, less one, which fp32 holds to 1e-7 around one."""
    weights = []
    for zero_centered in (False, True):
        options = dict(layer_norm_init_range=init_range, zero_centered_normalization=zero_centered)
        model = a_model(tiny_config(qk_layernorm=True, **options))
        weights.append(
            {
                name: weight.clone()
                for name, weight in model.full_weights()
                if name.endswith("norm.weight")
            }
        )
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight - 1, weights[1][name], rtol=0, atol=1e-5)
        assert float(weights[1][name].abs().max()) <= init_range and (
            init_range == 0 or weight.unique().numel() > 4
        )


class Outputs(Observer):
    """Outputs of the layers, and the gradients of their inputs."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        self.outputs[name] = output

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        if gradient is not None:
            self.gradients[name] = gradient


@pytest.mark.parametrize("option", [*NORMS, "use_position_embeddings"])
@pytest.mark.parametrize("wide", [False, True])
def test_the_stream_and_its_gradient_are_in_fp32_if_asked_for(wide: bool, option: str) -> None:
    """And in the training dtype otherwise: between all layers, also where they are computed
    again."""
    config = tiny_config(
        training_dtype="bf16", full_precision_residual=wide, recompute_layers=1, **{option: True}
    )
    model, outputs = a_model(config), Outputs()
    model.observe(outputs)
    model.forward_backward(micro_batches(config))
    dtype = torch.float32 if wide else torch.bfloat16
    del outputs.outputs["head"]
    assert (
        list(outputs.outputs) == ["embedding", "blocks.0", "blocks.1"]
        and len(outputs.gradients) == 3
    )
    for tensor in (*outputs.outputs.values(), *outputs.gradients.values()):
        assert tensor.dtype == dtype


def test_a_wide_stream_is_rounded_nowhere() -> None:
    """A block adds the bf16 outputs of its parts to the stream as it is, and they read its norms in
    bf16."""
    config = tiny_config(
        training_dtype="bf16", full_precision_residual=True, normalization_type="rms_norm"
    )
    model, (micro_batch,) = a_model(config), micro_batches(config)
    model.stages[1].gather()
    block = model.stages[1].layers[0]
    assert isinstance(block, Block)
    before = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        middle = before + block.attention(block.attention_norm(before, torch.bfloat16), micro_batch)
        expected = middle + block.mlp(block.mlp_norm(middle, torch.bfloat16), micro_batch)
        output = block(before, micro_batch)
    assert output.dtype == torch.float32 and not torch.equal(output, output.bfloat16().float())
    assert torch.equal(output, expected)


def test_a_wide_stream_keeps_small_contributions() -> None:
    """24 blocks add contributions near the rounding of a bf16 stream: it loses a third of their
    sum, a wide one 0.4 %.

    Compared with the same weights in fp32. The bounds are far above what another order of additions
    changes.
    """
    contributions = []
    for options in (
        dict(),
        dict(training_dtype="bf16"),
        dict(training_dtype="bf16", full_precision_residual=True),
    ):
        small = dict(init_method_std_attn_proj=1e-3, init_method_std_mlp_2=1e-3)
        config = tiny_config(num_layers=24, init_method_std_embed=1.0, **small, **options)
        model, outputs = a_model(config), Outputs()
        model.observe(outputs)
        with torch.no_grad():
            for stage in model.stages:
                stage.gather()
                for _, parameter in stage.parameters():
                    parameter.copy_(parameter.bfloat16())  # the same weights in all three
        model.forward_backward(micro_batches(config))
        contributions.append(
            outputs.outputs["blocks.23"].float() - outputs.outputs["embedding"].float()
        )
    exact, narrow, wide = contributions
    assert (narrow - exact).norm() > 0.2 * exact.norm()
    assert (wide - exact).norm() < 0.02 * exact.norm()


def test_the_weights_of_an_embedding_norm_are_there_for_its_backward_pass() -> None:
    """Where another stage has taken their buffer in the meantime: every gradient is that of a
    buffer for each stage."""
    gradients = []
    for buffers in (None, 1):
        options = dict(
            tie_word_embeddings=False, num_weight_buffers=buffers, layer_norm_init_range=0.5
        )
        config = tiny_config(training_dtype="bf16", input_embedding_norm=True, **options)
        model = a_model(config)
        model.forward_backward(micro_batches(config))
        assert model.memory.buffer_counts()[0] == (buffers or 4)
        gradients.append([part.grad_shard.clone() for _, part in model.parts()])
    assert all(map(torch.equal, *gradients))
