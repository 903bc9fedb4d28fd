"""The training benchmark's command line and models, and the choice and construction of its rows."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite.cli import parse as command_line
from megatron_lite.config import Config, unflatten
from megatron_lite.config.system import PIPELINE_SCHEDULES
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import make_deterministic
from megatron_lite.validation import resolve
from scripts.benchmarks.processor import cores
from scripts.benchmarks.results import argument_parser, matching
from scripts.benchmarks.training.engine import Engine, PlainEngine
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import LOSSES, PlainGPT
from scripts.benchmarks.training.peers import PRODUCTS, Products, Row, peer
from scripts.benchmarks.training.pipeline_peer import PipelinePeer
from scripts.benchmarks.training.tensor_peer import parallelized

# Adam turns rounding errors into a full step where a gradient is nearly zero, so a high rate makes
# losses diverge: at 1e-4 by 1.6e-5 in 28 steps of eleven configurations.
LEARNING_RATE = 2e-5
# Far above any norm: the norm is computed, but gradients are multiplied by 1, so weights can be
# compared bitwise.
CLIP_GRAD = 1e6
WINDOW = 4096
COMMON: dict[str, Any] = dict(dataset_source="random", num_workers=0, weight_decay=0.1)
LLAMA: dict[str, Any] = COMMON | dict(
    use_rotary_embeddings=True,
    gated=True,
    normalization_type="rms_norm",
    add_linear_biases=False,
    tie_word_embeddings=False,
)
GPT2: dict[str, Any] = COMMON | dict(
    use_rotary_embeddings=False,
    gated=False,
    normalization_type="layer_norm",
    add_linear_biases=True,
    tie_word_embeddings=True,
    activation_type="gelu",
)


class Sizes(NamedTuple):
    """Sizes of a known model; flags of the same names override them."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    head_groups: int
    ffn_hidden_size: int
    vocab_size: int
    sequence_length: int
    micro_batch_size: int


# name -> (sizes, other options)
MODELS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "llama-39m": (Sizes(8, 512, 8, 2, 1408, 16384, 256, 2), LLAMA),
    "gpt2-11m": (Sizes(6, 384, 6, 6, 1536, 256, 256, 8), GPT2),
    # GPT-2's 50,257 tokens padded to a multiple of 128, as in nanoGPT and llm.c.
    "gpt2-124m": (Sizes(12, 768, 12, 12, 3072, 50304, 1024, 32), GPT2),
    "mistral-7b": (Sizes(32, 4096, 32, 8, 14336, 32000, 8192, 1), LLAMA),
    "llama-3-8b-8l": (
        Sizes(8, 4096, 32, 8, 14336, 128256, 8192, 1),
        LLAMA | {"rotary_base": 500000.0},
    ),
}
MEASURING = dict(micro_batches=1, turns=8, warmup_turns=1, steps_per_turn=3, seed=1234)


def parse(argv: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """Parse the command line of the benchmark and fill in the sizes of the model."""
    parser = argument_parser(description)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--model",
        choices=tuple(MODELS),
        default="llama-39m",
        help="default llama-39m; change its sizes with:",
    )
    for name in Sizes._fields:
        add(f"--{name}", type=int, help="default: the model's")
    for name, default in MEASURING.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add(
        "--tensor_parallel",
        type=int,
        default=1,
        help="tensor-parallel ranks (default 1); if more, all ranks",
    )
    add(
        "--pipeline_parallel",
        type=int,
        default=1,
        help="pipeline ranks (default 1); if more, all ranks",
    )
    add(
        "--data_parallel_shard",
        type=int,
        default=0,
        help="ranks of a hybrid shard, of FSDP2's too (default 0: all)",
    )
    add(
        "--threads",
        type=int,
        default=1,
        help="threads per rank (default 1); 0: as many as this process has cores",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 has fp32 weights, gradients and moments",
    )
    add(
        "--layers",
        choices=("engine", "plain", "both"),
        default="engine",
        help="layers in our rows: the engine's own, the peers' plain torch.nn modules, or a row for each",
    )
    add(
        "--recompute",
        action="store_true",
        help="add rows with --mlp_recompute_level=activation and full",
    )
    add("--ours", default="", help='more engine options for our rows: "split_master_weights=1 ..."')
    add("--loss", choices=LOSSES, default="chunked", help="loss of the plain model")
    add("--hf_attention", default="sdpa", help="attn_implementation of the Hugging Face rows")
    add("--compile_mode", default="default", help="torch.compile mode of the compiled rows")
    add(
        "--compile_backend",
        default="inductor",
        help="torch.compile backend; aot_eager only traces, for tests",
    )
    add(
        "--fp32_matmul",
        choices=("default", "onednn", "tf32"),
        default="default",
        help="fp32 products of the whole process: through oneDNN (CPU), or with TF32 inputs (GPU)",
    )
    add(
        "--one_at_a_time",
        type=int,
        choices=(0, 1),
        nargs="?",
        const=1,
        help="build, warm up, time and free each row in every round; default: where all rows may not fit a GPU",
    )
    add(
        "--max_others",
        type=float,
        help="count only turns in which other processes used at most this share of CPUs",
    )
    add(
        "--profile",
        action="store_true",
        help="profile more turns of each row, by kind of operation or by kernel",
    )
    add(
        "--peak_tflops",
        type=float,
        help="peak of one GPU, for the MFU; default: from a table of common GPUs",
    )
    add(
        "--only",
        default="",
        help="comma-separated rows, by their names in the table; * and ? are wildcards",
    )
    add("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if (
        options.turns < 2
        or options.warmup_turns < 0
        or min(options.micro_batches, options.steps_per_turn) < 1
    ):
        parser.error(
            "--turns must be at least 2, --micro_batches and --steps_per_turn at least 1, --warmup_turns not negative"
        )
    for name, default in MODELS[options.model][0]._asdict().items():
        setattr(options, name, getattr(options, name) or default)
    options.threads = options.threads or len(cores())
    return options


def has_known_shape(options: argparse.Namespace) -> bool:
    """Return whether the model has its named shape, except for the number of layers and the
    micro-batch size."""
    sizes = MODELS[options.model][0]._asdict()
    free = ("num_layers", "micro_batch_size")
    return all(getattr(options, name) == size for name, size in sizes.items() if name not in free)


def engine_config(options: argparse.Namespace, world_size: int, **changes: Any) -> Config:
    """Return the resolved configuration of all rows, with the `changes` of one of our rows.

    Raises:
        UsageError: if the engine refuses these sizes.
    """
    values = {
        **MODELS[options.model][1],
        **{name: getattr(options, name) for name in Sizes._fields},
        "device": options.device,
        "training_dtype": options.dtype,
        "lr": LEARNING_RATE,
        "clip_grad": CLIP_GRAD,
        "seed": options.seed,
        "max_position_embeddings": options.sequence_length,
        "tensor_parallel": options.tensor_parallel,
        "pipeline_parallel": options.pipeline_parallel,
        "data_parallel_shard": options.data_parallel_shard,
        "depth_first_micro_batches": options.micro_batches,
        "train_iters": (options.turns + options.warmup_turns) * options.steps_per_turn,
    }
    return resolve(unflatten(values | changes), world_size)


def catalogue(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    """Return every row that exists for this number of ranks, in the order of turns.

    Raises:
        SystemExit: if --tensor_parallel or --pipeline_parallel does not fit the ranks.
    """
    if options.pipeline_parallel > 1:
        if options.pipeline_parallel != ranks:
            raise SystemExit(
                f"benchmark: --pipeline_parallel={options.pipeline_parallel}: start as many ranks, not {ranks}"
            )
        together = {
            "breadth_first_micro_batches": options.micro_batches,
            "depth_first_micro_batches": 1,
        }
        return {
            f"{prefix}{schedule}": Row(
                trainer,
                model,
                changes=together
                | {
                    "pipeline_schedule": schedule,
                    "pipeline_placement": "v" if schedule == "zero_bubble_v" else "loop",
                },
            )
            for schedule in PIPELINE_SCHEDULES
            for prefix, trainer, model in (
                ("torch ", "torch PP", "plain"),
                ("", "engine", "engine"),
            )
        }
    if options.tensor_parallel > 1:
        if options.tensor_parallel != ranks:
            raise SystemExit(
                f"benchmark: --tensor_parallel={options.tensor_parallel}: start as many ranks, not {ranks}"
            )
        return {
            f"{prefix}TP{suffix}": Row(
                trainer, model, changes={"sequence_tensor_parallel": bool(suffix)}
            )
            for suffix in ("", "+SP")
            for prefix, trainer, model in (
                ("torch ", "torch TP", "plain"),
                ("", "engine", "engine"),
            )
        }
    fsdp, one = Row("FSDP2"), "torch" if ranks == 1 else "DDP"
    rows = {one: Row(one), f"{one} compiled": Row(one, compiled=True)}
    if ranks == 1:
        rows["torch compiled full logits"] = Row("torch", compiled=True, loss="full")
    rows |= dict(_engine_rows(options, ranks)) | {"FSDP2": fsdp}
    if ranks > 1:
        rows["FSDP2 all resharded"] = replace(fsdp, separate_ends=True)
        rows["FSDP2 no reshard"] = replace(fsdp, reshard=False)
        if options.micro_batches > 1:
            rows["FSDP2 no sync"] = replace(fsdp, reshard=False, sync=False)
    rows["FSDP2 compiled"] = replace(fsdp, compiled=True)
    rows[PRODUCTS] = Row(PRODUCTS, default=False)
    for trainer in (one, "FSDP2"):
        name = "" if trainer == "torch" else f" {trainer}"
        runs = trainer != "FSDP2"
        rows[f"HF{name}"] = Row(trainer, "HF", default=runs)
        rows[f"HF{name} compiled"] = Row(trainer, "HF", compiled=True, default=runs)
        rows[f"HF Liger{name}"] = Row(trainer, "HF Liger", default=runs)
    return rows


def _engine_rows(options: argparse.Namespace, ranks: int) -> Iterator[tuple[str, Row]]:
    stages = (1, 3) if ranks == 1 else (1, 2, 3)  # with one rank ZeRO-2 is ZeRO-1
    for model, prefix in (("engine", ""), ("plain", "plain ")):
        runs = options.layers in (model, "both")
        for stage in stages:
            name, changes = f"{prefix}ZeRO-{stage}", {"zero_stage": stage}
            yield name, Row("engine", model, changes=changes, default=runs)
            if options.micro_batches > 1 and stage > 1:
                order = {
                    "breadth_first_micro_batches": options.micro_batches,
                    "depth_first_micro_batches": 1,
                }
                yield (
                    f"{name} breadth-first",
                    Row("engine", model, changes=changes | order, default=runs),
                )
            for suffix, more in _variants(options, ranks, stage) if model == "engine" else ():
                asked = (
                    runs
                    and options.recompute
                    and stage == 1
                    and suffix in ("recompute activation", "recompute full")
                )
                yield (
                    f"{name} {suffix}",
                    Row("engine", model, changes=changes | more, default=asked),
                )


def _variants(
    options: argparse.Namespace, ranks: int, stage: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name suffix, options) of variants of our rows."""
    if options.dtype != "fp32":
        yield "fp32", {"training_dtype": "fp32"}
    quarter = f"activation,full:{-(-options.num_layers // 4)}"
    for word, level in (("activation", "activation"), ("quarter", quarter), ("full", "full")):
        if word != "quarter":
            yield f"recompute {word}", {"mlp_recompute_level": level}
        if stage < 3 and options.dtype == "bf16":  # needs a weight buffer per stage
            yield (
                f"split recompute {word}",
                {"mlp_recompute_level": level, "split_master_weights": True},
            )
    if ranks > 1 and options.device == "cuda":
        yield "without throttle", {"throttle_cpu": False}
    if ranks == 1:
        for scaling in ("tensorwise", "rowwise"):
            yield f"fp8 {scaling}", {"fp8": scaling}
        yield "int8", {"int8": True}
    if ranks == 1 and options.one_at_a_time:  # deterministic mode is process-wide
        yield "without Triton", {"enable_triton_kernels": False}
        yield "deterministic", {"deterministic": True}
        yield f"window {WINDOW}", {"window_size": WINDOW}


def chosen(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    """Return the rows that --only names, or the default rows.

    Raises:
        SystemExit: if a name in --only matches no row.
    """
    rows = catalogue(options, ranks)
    try:
        names = matching(rows, "row", options.only)
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"benchmark: --only: {error}") from error
    return {
        name: row for name, row in rows.items() if (name in names if options.only else row.default)
    }


def unavailable(
    rows: dict[str, Row], options: argparse.Namespace, device: torch.device
) -> dict[str, str]:
    """Return the rows that cannot run here, each with the reason."""
    no_compiler = None
    if any(row.compiled for row in rows.values()) and options.compile_backend == "inductor":
        no_compiler = why_not_compiled(device)
    tied = MODELS[options.model][1]["tie_word_embeddings"]
    lacks = {
        name for name in ("transformers", "liger_kernel") if importlib.util.find_spec(name) is None
    }
    reasons = {}
    for name, row in rows.items():
        reason = no_compiler if row.compiled else None
        if row.model.startswith("HF") and "transformers" in lacks:
            reason = "transformers is not installed"
        elif row.model == "HF Liger" and "liger_kernel" in lacks:
            reason = "liger_kernel is not installed"
        elif row.model == "HF Liger" and (device.type == "cpu" or "gpt2" in options.model):
            reason = "Liger's kernels need a GPU, and Liger has none for GPT-2"
        elif row.trainer == "torch PP" and tied:
            reason = "tied weights on two ranks have two gradients"
        elif row.trainer == "torch TP" and tied:
            reason = "loss_parallel needs a head of its own"
        elif row.separate_ends and tied:
            reason = "a tied embedding cannot be a group of its own"
        if reason is not None:
            reasons[name] = reason
    return reasons


def torchtitan() -> dict[str, str]:
    """Explain why torchtitan has no row."""
    installed = importlib.util.find_spec("torchtitan") is not None
    state = (
        "installed, but its trainer owns the processes and the step"
        if installed
        else "not installed"
    )
    return {"torchtitan": f"{state}; the row FSDP2 compiled follows its recipe"}


def why_not_compiled(device: torch.device) -> str | None:
    """Return the error of torch.compile (it needs a C++ compiler, or Triton), or None if it
    works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # any cause
        return f"torch.compile fails: {str(error).strip().splitlines()[0][:200]}"
    return None


def row_config(row: Row, options: argparse.Namespace, ranks: int) -> Config:
    """Return the resolved configuration of one of our rows.

    Raises:
        UsageError: if --ours names an option that does not exist, or a value that the engine
        refuses.
    """
    given = command_line.parse([f"--{word}" for word in options.ours.split()]).given
    return engine_config(options, ranks, **{**row.changes, **given})


def make(row: Row, options: argparse.Namespace, distributed: Distributed) -> Contestant:
    """Build one row, ready to train.

    Raises:
        UsageError: as in `row_config`.
    """
    device, ranks = distributed.device, distributed.world_size
    if row.trainer == "engine":
        config = row_config(row, options, ranks)
        if config.distributed.deterministic:
            make_deterministic()
        if row.model == "engine":
            return Engine(config, distributed)
        return PlainEngine(config, distributed, PlainGPT(config, options.loss, device))
    config = engine_config(options, ranks)
    if row.trainer == "torch PP":
        return PipelinePeer(
            config, distributed, row.changes["pipeline_schedule"], row.changes["pipeline_placement"]
        )
    if row.trainer == "torch TP":
        return parallelized(config, distributed, row.changes["sequence_tensor_parallel"])
    if row.trainer == PRODUCTS:
        return Products(
            config, torch.float32 if options.dtype == "fp32" else torch.bfloat16, device
        )
    return peer(row, options, config, distributed)
