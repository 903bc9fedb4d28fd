"""Which linear maps --lora_targets selects, and what is trained."""

import pytest

from megatron_lite.errors import UsageError
from megatron_lite.model.adapters import adapters_of, describe
from megatron_lite.model.gpt import parameters_of
from tests.support.harness import layers_of, tiny_config

LLAMA = dict(gated=True, use_rotary_embeddings=True, normalization_type="rms_norm", num_layers=3)
EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=16, num_shared_experts=1)
EXPERTS |= dict(moe_first_dense_layers=1, moe_router_bias_update_rate=0.0)


def maps(targets: tuple[str, ...], **options: object) -> list[str]:
    """The maps with adapters in the last block, without its name."""
    config = tiny_config(lora_rank=2, lora_targets=targets, **{**LLAMA, **options})
    found = [each.name for one in adapters_of(layers_of(config)) for each in one.maps]
    return [name.removeprefix("blocks.2.") for name in found if name.startswith("blocks.2.")]


EVERY = ["attention.query", "attention.key", "attention.value", "attention.output"]
EVERY += ["mlp.gate", "mlp.up", "mlp.down"]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ((), EVERY),
        (("query", "*.value"), ["attention.query", "attention.value"]),
        (("query_key_value",), EVERY[:3]),
        (("mlp", "regex:.*key"), ["attention.key", *EVERY[4:]]),
        (("blocks.2.mlp.up",), ["mlp.up"]),
        (("blocks.0",), []),
    ],
)
def test_targets(targets: tuple[str, ...], expected: list[str]) -> None:
    assert maps(targets) == expected


def test_maps_that_files_hold_in_one_tensor_have_one_adapter() -> None:
    found = maps((), export_model_type="phi3", tie_word_embeddings=False)
    assert found == ["attention.query_key_value", "attention.output", "mlp.up", "mlp.down"]


def test_experts_have_adapters_and_ends_of_the_model_have_none() -> None:
    shared = ["mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"]
    experts = ["mlp.experts.up", "mlp.experts.down"]
    assert maps(("attention", "mlp.shared"), **EXPERTS) == [*EVERY[:4], *shared]
    assert maps((), **EXPERTS) == [*EVERY[:4], *experts, *shared]
    with pytest.raises(UsageError, match="adapters of experts have none, as in peft, and blocks.1"):
        maps((), lora_dropout=0.1, **EXPERTS)
    for target in ("embedding", "head", "mlp.router"):
        with pytest.raises(UsageError, match="matches nothing"):
            maps((target,), **EXPERTS)


def test_only_adapters_are_trained() -> None:
    config = tiny_config(lora_rank=2, lora_targets=("blocks.1.mlp", "output"), **LLAMA)
    layers = layers_of(config)
    trained = [each.spec for each in parameters_of(layers) if each.spec.trainable]
    assert {spec.name.rsplit(".", 1)[1] for spec in trained} == {"lora_a", "lora_b"}
    line = describe(adapters_of(layers), config.model.num_layers)
    assert f"{sum(spec.numel for spec in trained):,} parameters are trained, in 6" in line
    assert "blocks.*.attention.output (3), blocks.1.mlp.gate" in line
