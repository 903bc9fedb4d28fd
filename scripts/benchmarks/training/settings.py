"""Options of the benchmark, the models it knows, and what they mean as a configuration of the engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.cli import parse as command_line
from megatron_lite.config import Config, unflatten
from megatron_lite.validation import resolve
from scripts.benchmarks.training.model import LOSSES

# Adam turns rounding into a full step where a gradient is nearly zero: a high rate would make losses drift apart, at
# 1e-4 by 1.6e-5 in 28 steps of eleven configurations.
LEARNING_RATE = 2e-5
# Far above any norm: it is computed, and gradients are multiplied by 1, so that weights can be compared to the bit.
CLIP_GRAD = 1e6
COMMON: dict[str, Any] = dict(dataset_source="random", num_workers=0, weight_decay=0.1)
LLAMA: dict[str, Any] = dict(
    use_rotary_embeddings=True,
    gated=True,
    normalization_type="rms_norm",
    add_linear_biases=False,
    tie_word_embeddings=False,
)
GPT2: dict[str, Any] = dict(
    use_rotary_embeddings=False,
    gated=False,
    normalization_type="layer_norm",
    add_linear_biases=True,
    tie_word_embeddings=True,
    activation_type="gelu",
)
# name -> (what the command line can change, the rest)
MODELS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "llama-39m": (
        dict(
            num_layers=8,
            hidden_size=512,
            num_attention_heads=8,
            head_groups=2,
            ffn_hidden_size=1408,
            vocab_size=16384,
            sequence_length=256,
            micro_batch_size=2,
        ),
        LLAMA,
    ),
    # 50,257 entries padded to a multiple of 128, as nanoGPT and llm.c do.
    "gpt2-124m": (
        dict(
            num_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            head_groups=12,
            ffn_hidden_size=3072,
            vocab_size=50304,
            sequence_length=1024,
            micro_batch_size=32,
        ),
        GPT2,
    ),
    "mistral-7b": (
        dict(
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            head_groups=8,
            ffn_hidden_size=14336,
            vocab_size=32000,
            sequence_length=8192,
            micro_batch_size=1,
        ),
        LLAMA,
    ),
    "llama-3-8b-8l": (
        dict(
            num_layers=8,
            hidden_size=4096,
            num_attention_heads=32,
            head_groups=8,
            ffn_hidden_size=14336,
            vocab_size=128256,
            sequence_length=8192,
            micro_batch_size=1,
        ),
        LLAMA | dict(rotary_embedding_scale=-math.log(500000.0)),
    ),
}
MEASURING = dict(micro_batches=1, turns=8, warmup_turns=1, steps_per_turn=3, threads=1, seed=1234)
LAYERS = ("engine", "plain", "both")
MATMULS = ("default", "onednn", "tf32")


def parse(argv: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """The options of the program, sizes of the model filled in."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--model", choices=tuple(MODELS), default="llama-39m", help="default llama-39m; its sizes can be changed:")
    for name in MODELS["llama-39m"][0]:
        add(f"--{name}", type=int, help="default: the model's")
    for name, default in MEASURING.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: weights, gradients and moments stay fp32")
    add(
        "--layers",
        choices=LAYERS,
        default="engine",
        help="of our rows: the engine's own, the peers' plain torch.nn modules, or a row of each",
    )
    add("--recompute", action="store_true", help="rows of ours with --mlp_recompute_level=activation and full")
    add("--ours", default="", help='further options of the engine for our rows: "split_master_weights=1 ..."')
    add("--loss", choices=LOSSES, default="chunked", help="of the plain model")
    add("--hf_attention", default="sdpa", help="attn_implementation of the Hugging Face rows")
    add("--compile_mode", default="default", help="mode of torch.compile for compiled rows")
    add("--compile_backend", default="inductor", help="backend of torch.compile; aot_eager only traces, for tests")
    add(
        "--fp32_matmul",
        choices=MATMULS,
        default="default",
        help="for the whole process: fp32 products through oneDNN (CPU), or with TF32 inputs (GPU)",
    )
    add(
        "--one_at_a_time",
        type=int,
        choices=(0, 1),
        nargs="?",
        const=1,
        help="build, warm up, time, free each row in every round; default: where all may not fit a GPU",
    )
    add("--max_others", type=float, help="share of the CPUs that others may take in a turn that counts")
    add("--peak_tflops", type=float, help="of one GPU, for the MFU; default: known for the usual ones")
    add("--only", default="", help="comma-separated configurations, by the names of the table; * and ? are wildcards")
    add("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.turns < 2 or options.warmup_turns < 0 or min(options.micro_batches, options.steps_per_turn) < 1:
        parser.error(
            "--turns must be at least 2, --micro_batches and --steps_per_turn at least 1, --warmup_turns not negative"
        )
    for name, default in MODELS[options.model][0].items():
        setattr(options, name, getattr(options, name) or default)
    return options


def has_known_shape(options: argparse.Namespace) -> bool:
    """Whether the model is the one of its name, but for the number of layers and the micro-batch."""
    free = ("num_layers", "micro_batch_size")
    sizes = MODELS[options.model][0]
    return all(getattr(options, name) == value for name, value in sizes.items() if name not in free)


def engine_config(options: argparse.Namespace, world_size: int, **changes: Any) -> Config:
    """The resolved configuration: model, batch and optimizer of every row, and what `changes` in one of ours.

    Raises:
        UsageError: if the engine does not take these sizes.
    """
    sizes, rest = MODELS[options.model]
    values = {
        **COMMON,
        **rest,
        **{name: getattr(options, name) for name in sizes},
        "device": options.device,
        "training_dtype": options.dtype,
        "lr": LEARNING_RATE,
        "clip_grad": CLIP_GRAD,
        "seed": options.seed,
        "max_position_embeddings": options.sequence_length,
        "depth_first_micro_batches": options.micro_batches,
        "train_iters": (options.turns + options.warmup_turns) * options.steps_per_turn,
    }
    return resolve(unflatten(values | changes), world_size)


def own_options(text: str) -> dict[str, Any]:
    """--ours as values of the engine's options.

    Raises:
        UsageError: for an option that does not exist, or a value that it does not take.
    """
    return command_line.parse([f"--{word}" for word in text.split()]).given
