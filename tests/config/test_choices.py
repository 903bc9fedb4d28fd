"""Where the code branches on an option's choice, a choice without a branch is refused instead of
taken for another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.config.model import ACTIVATIONS, ROPE_TYPES
from megatron_lite.huggingface import architectures
from megatron_lite.kernels.attention.gpu import fused_attention
from megatron_lite.kernels.choice import REFERENCES
from megatron_lite.model.layer import Norm
from megatron_lite.model.parameter_patterns import set_weight_decay
from megatron_lite.model.rotary import rotary_frequencies
from megatron_lite.optimizer.rules.muon import shape_factor
from megatron_lite.outputs.step_inputs import loss_weights
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.schedules.stages import Stage, stage_rate
from tests.support.harness import layers_of, tiny_config

NEW = "new"


def with_choice(area: str, **values: Any) -> Config:
    """A resolved configuration with a choice that no option has."""
    config = tiny_config(
        1, train_iters=10, use_rotary_embeddings=True, lr_decay_style="linear", lr_warmup=0
    )
    return dataclasses.replace(
        config, **{area: dataclasses.replace(getattr(config, area), **values)}
    )


def rope(kind: str) -> Any:
    numbers: dict[str, Any] = {
        name: 1.0 + place
        for place, name in enumerate(
            ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_slow")
        )
    }
    numbers |= dict(rope_original_max_position_embeddings=64, rope_beta_fast=32.0)
    numbers |= dict(rope_short_factor=(1.0,) * 4, rope_long_factor=(2.0,) * 4)
    return rotary_frequencies(
        with_choice("model", rope_type=kind, **numbers).model, 8, torch.device("cpu")
    )


BRANCHES: dict[str, Callable[[], Any]] = {
    "lr_decay_style": lambda: learning_rate(with_choice("learning_rate", lr_decay_style=NEW), 5),
    "lr_schedule": lambda: stage_rate([Stage(NEW, 0, 10, 1.0, 0.1, 1.0)], 5),
    "loss_reduction": lambda: loss_weights([4, 2, 1], NEW),
    "normalization_type": lambda: Norm(
        "norm", with_choice("model", normalization_type=NEW).model, REFERENCES
    ),
    "rope_type": lambda: rope(NEW),
    "attention_backend": lambda: fused_attention(*torch.ones(3, 1, 1, 2, 8), NEW),
    "muon_adjust_lr": lambda: shape_factor(2, 3, NEW),
    "weight_decay_default_mask": lambda: set_weight_decay(
        [*layers_of(tiny_config(1))[0].parameters()], NEW, ()
    ),
}


@pytest.mark.parametrize("option", BRANCHES)
def test_a_choice_without_a_branch_is_refused(option: str) -> None:
    """The error names the choice."""
    with pytest.raises((AssertionError, KeyError), match=NEW):
        BRANCHES[option]()


@pytest.mark.parametrize("kind", [kind for kind in ROPE_TYPES if kind != "default"])
def test_every_type_of_rotary_frequencies_has_a_branch(kind: str) -> None:
    assert rope(kind).shape == (4,)


def test_every_activation_has_a_name_in_hugging_face_configurations() -> None:
    """Otherwise a model that trains could not be exported."""
    assert set(architectures.ACTIVATIONS.values()) == set(ACTIVATIONS)
