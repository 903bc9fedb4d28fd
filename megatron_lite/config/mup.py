"""muP, the maximal update parametrization: what was tuned on a narrow base model fits wider ones.

The options state what holds for the base. A model r times as wide multiplies it by

                                        initial std   learning rate   output
    input: embeddings, norms, biases    1             1               1, of a tied head 1 / r
    hidden: matrices of the blocks      1 / sqrt(r)   1 / r           1
    output: an untied head              1 / r         1 / r           1

as in Yang et al. 2022 (arXiv:2203.03466), table 3 for Adam, and table 8 where a tied head rules out
table 3; both train alike. Weight decay per step, learning rate times decay, does not depend on r.
Attention scores are divided by d instead of sqrt(d) for heads of d channels, and equal the base's
where d does.

Lion's steps have the size of its learning rate, like Adam's. For Muon, feature learning needs
updates whose largest singular value does not depend on r in matrices of one shape (Yang, Simon &
Bernstein 2023, arXiv:2310.17813). That is so with muon_adjust_lr=original (Jordan et al. 2024), but
match_rms_adamw (Liu et al. 2025) multiplies it by the root of the width, so that 1 / sqrt(r) is
left. SGD has other factors, and clipping by a global norm, which depends on r, changes them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from megatron_lite.config import Config, ModelConfig


class Factors(NamedTuple):
    """Factors on what the options state for one kind of tensors."""

    initial_std: float
    learning_rate: float
    output: float = 1.0


def width_ratio(model: ModelConfig) -> float:
    """Return r, how many times as wide as its base a resolved model is."""
    assert model.mup_base_hidden_size is not None
    return model.hidden_size / model.mup_base_hidden_size


def factors(config: Config) -> dict[str, Factors]:
    """Return the factors of each kind of tensors in a resolved configuration with --mup."""
    ratio, options = width_ratio(config.model), config.optimizer
    of_matrices = 1 / ratio
    if options.optimizer == "muon":
        adjusted = {"original": 1.0, "match_rms_adamw": ratio**-0.5}
        of_matrices = adjusted[options.muon_adjust_lr]
    return {
        "input": Factors(1.0, 1.0, _of_logits(config.model)),
        "hidden": Factors(ratio**-0.5, of_matrices),
        "output": Factors(1 / ratio, 1 / ratio),
    }


def with_factors(model: ModelConfig) -> ModelConfig:
    """Return a resolved model whose own options include muP's factors on scores and logits."""
    if not model.mup:
        return model
    channels, base = model.kv_channels, model.mup_base_kv_channels
    assert base is not None
    scale = model.attention_scale
    if base != channels:
        scale = (scale or base**-0.5) * base / channels
    return dataclasses.replace(
        model,
        mup=False,
        attention_scale=scale,
        logit_scale=model.logit_scale * _of_logits(model),
    )


def _of_logits(model: ModelConfig) -> float:
    return 1 / width_ratio(model) if model.tie_word_embeddings else 1.0
