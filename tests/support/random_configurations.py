"""Small configurations drawn by a seed: families of models, and options that change memory, files
and traffic."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_lite.config import Config
from tests.support.harness import tiny_config

Options = dict[str, Any]


class Drawn(NamedTuple):
    """One configuration, as `tiny_config` takes it."""

    ranks: int
    options: Options

    def config(self, **more: Any) -> Config:
        """Return the configuration, resolved; `more` overrides."""
        return tiny_config(self.ranks, **{**self.options, **more})


def draw_configuration(seed: int) -> Drawn:
    """Return the configuration of a seed: any is valid, and has a peak of some MB and at most 5
    million parameters."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 3, 4, 8))
    model = {**_sizes(draw), **draw.choice(FAMILIES)(draw)}
    return Drawn(
        ranks, {**model, **_batch(draw, ranks), **_memory(draw, model["num_layers"], ranks)}
    )


def draw_configurations(count: int, seed: int = 17) -> list[Drawn]:
    """Return the configurations of consecutive seeds."""
    return [draw_configuration(seed * 1000 + number) for number in range(count)]


def _sizes(draw: random.Random) -> Options:
    heads, channels = draw.choice((4, 6, 8)), draw.choice((16, 24, 32))
    return dict(
        num_layers=draw.randint(2, 6),
        num_attention_heads=heads,
        hidden_size=heads * channels,
        ffn_hidden_size=draw.choice((256, 384, 520, 768)),
        sequence_length=draw.choice((128, 192, 250, 320)),
        vocab_size=draw.choice((100, 517, 1000, 4096)),
        tie_word_embeddings=draw.random() < 0.5,
    )


def _gpt2(draw: random.Random) -> Options:
    return dict(
        activation_type=draw.choice(("gelu", "gelu_exact", "relu")),
        hidden_dropout=draw.choice((0.0, 0.1)),
        embedding_dropout=draw.choice((0.0, 0.1)),
        add_linear_biases=draw.random() < 0.7,
    )


def _llama(draw: random.Random) -> Options:
    return dict(
        activation_type="silu",
        gated=draw.random() < 0.8,
        normalization_type="rms_norm",
        add_linear_biases=False,
        use_rotary_embeddings=True,
        head_groups=draw.choice((1, 2)),
        window_size=draw.choice((None, None, 48, 100)),
    )


def _qwen3(draw: random.Random) -> Options:
    return {**_llama(draw), "qk_layernorm": True, "kv_channels": draw.choice((16, 40, 64))}


FAMILIES: tuple[Callable[[random.Random], Options], ...] = (_gpt2, _llama, _qwen3)


def _batch(draw: random.Random, ranks: int) -> Options:
    micro = draw.choice((1, 2, 3))
    depth = draw.choice((1, 1, 2))
    breadth = draw.choice((1, 1, 2, 3))
    return dict(
        micro_batch_size=micro,
        depth_first_micro_batches=depth,
        breadth_first_micro_batches=breadth,
        batch_size=micro * depth * breadth * ranks,
    )


def _memory(draw: random.Random, blocks: int, ranks: int) -> Options:
    stage, half = draw.choice((1, 2, 3)), draw.random() < 0.6
    levels = draw.choice(
        (
            "none",
            "activation",
            "full",
            f"activation,full:{blocks // 2}",
            f"none,activation:{blocks - 1}",
        )
    )
    options = dict(
        zero_stage=stage,
        layers_per_stage=draw.choice((1.0, 1.0, 1.5, 2.0)),
        mlp_recompute_level=levels,
        recompute_layers=draw.choice((0, 0, 0, 1, blocks)),
        training_dtype="bf16" if half else "fp32",
        ema_type=draw.choice(("none", "none", "ema")),
        optimizer=draw.choice(("adamw", "adamw", "adamw", "muon", "lion", "sgd")),
        cross_entropy_splits=draw.choice((None, None, 2, 5)),
    )
    if half:
        options |= dict(
            split_master_weights=stage < 3 and draw.random() < 0.4,
            full_precision_gradients=draw.random() < 0.8,
            full_precision_residual=draw.random() < 0.3,
        )
    return options
