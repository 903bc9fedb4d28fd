"""The training benchmark's command line and models, and the choice and construction of its rows."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_lite.cli import parse as command_line
from megatron_lite.config import Config, unflatten
from megatron_lite.config.system import PIPELINE_SCHEDULES
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.validation import resolve
from scripts.benchmarks.commands import matching, measuring_parser
from scripts.benchmarks.processor import cores
from scripts.benchmarks.training.engine import Engine
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.peers import Products, peer
from scripts.benchmarks.training.pipeline_peer import PipelinePeer
from scripts.benchmarks.training.tensor_peer import parallelized

# Adam turns rounding errors into a full step where a gradient is nearly zero, so a high rate makes
# losses diverge: at 1e-4 by 1.6e-5 in 28 steps of eleven configurations.
LEARNING_RATE = 2e-5
# Far above any norm: the norm is computed, but gradients are multiplied by 1.
CLIP_GRAD = 1e6
SEED = 1234
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


def add_sizes(parser: argparse.ArgumentParser, models: Sequence[str]) -> None:
    """Add the choice of a model, the first by default, and a flag per size."""
    parser.add_argument("--model", choices=models, default=models[0], help=f"default {models[0]}")
    for name in Sizes._fields:
        parser.add_argument(f"--{name}", type=int, help="default: the model's")


def set_sizes(options: argparse.Namespace) -> None:
    """Fill in the sizes of the chosen model that no flag gives."""
    for name, default in MODELS[options.model][0]._asdict().items():
        setattr(options, name, getattr(options, name) or default)


def parse(argv: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """Parse the command line of the benchmark and fill in the sizes of the model."""
    parser = measuring_parser(
        description,
        in_quiet=True,
        turns=8,
        steps_per_turn=3,
        micro_batches=1,
        tensor_parallel=1,
        pipeline_parallel=1,
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_sizes(parser, list(MODELS))
    add("--warmup_turns", type=int, default=1, help="default 1")
    add(
        "--data_parallel_shard",
        type=int,
        default=0,
        help="ranks of a hybrid shard, of FSDP2's too (default 0: all)",
    )
    add("--threads", type=int, default=1, help="threads per rank (default 1); 0: one per core")
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 has fp32 weights, gradients and moments",
    )
    add("--ours", default="", help='more engine options for our rows: "split_master_weights=1 ..."')
    add(
        "--one_at_a_time",
        action="store_true",
        help="build, warm up, time and free each row in every round, where all do not fit a GPU",
    )
    add("--profile", action="store_true", help="profile more turns, by kind of operation or kernel")
    add("--only", default="", help="comma-separated rows; * and ? are wildcards")
    options = parser.parse_args(argv)
    if options.profile and options.one_at_a_time:
        parser.error("--profile needs the rows of the last round; leave out --one_at_a_time")
    set_sizes(options)
    options.threads = options.threads or len(cores())
    return options


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
        "seed": SEED,
        "max_position_embeddings": options.sequence_length,
        "tensor_parallel": options.tensor_parallel,
        "pipeline_parallel": options.pipeline_parallel,
        "data_parallel_shard": options.data_parallel_shard,
        "depth_first_micro_batches": options.micro_batches,
        "train_iters": (options.turns + options.warmup_turns) * options.steps_per_turn,
    }
    return resolve(unflatten(values | changes), world_size)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    build: Callable[[Config, Distributed], Contestant] = Engine
    changes: Mapping[str, Any] = field(default_factory=dict)  # engine options of our rows
    untied: bool = False  # needs a head of its own
    default: bool = True  # runs unless --only says otherwise

    @property
    def ours(self) -> bool:
        """Whether the engine trains."""
        return self.build is Engine

    @property
    def trains_the_model(self) -> bool:
        """Whether the row's losses must equal the other rows'."""
        return self.build is not Products and "window_size" not in self.changes


def catalogue(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    """Return every row that exists for this number of ranks, in the order of turns.

    Raises:
        SystemExit: if --tensor_parallel or --pipeline_parallel does not fit the ranks.
    """
    for name in ("tensor_parallel", "pipeline_parallel"):
        if getattr(options, name) not in (1, ranks):
            raise SystemExit(
                f"benchmark: --{name}={getattr(options, name)}: start as many ranks, not {ranks}"
            )
    if options.pipeline_parallel > 1:
        return _pipeline_rows(options)
    if options.tensor_parallel > 1:
        return _tensor_rows()
    one, under = ("torch", "") if ranks == 1 else ("DDP", "DDP")
    make = partial(peer, under=under)
    rows = {one: Row(make), f"{one} compiled": Row(partial(make, compiled=True))}
    if ranks == 1:
        rows["torch compiled full logits"] = Row(partial(make, compiled=True, loss="full"))
    rows |= _engine_rows(options, ranks)
    fsdp = partial(peer, under="FSDP2")
    rows["FSDP2"] = Row(fsdp)
    if ranks > 1:
        rows["FSDP2 all resharded"] = Row(partial(fsdp, separate_ends=True), untied=True)
        rows["FSDP2 no reshard"] = Row(partial(fsdp, reshard=False))
    rows["FSDP2 compiled"] = Row(partial(fsdp, compiled=True))
    rows["products"] = Row(Products, default=False)
    theirs = f"HF {under}".strip()
    rows[theirs] = Row(partial(make, model="HF"))
    rows[f"{theirs} compiled"] = Row(partial(make, model="HF", compiled=True))
    return rows


def _pipeline_rows(options: argparse.Namespace) -> dict[str, Row]:
    rows = {}
    for schedule in PIPELINE_SCHEDULES:
        changes: dict[str, Any] = {
            "pipeline_schedule": schedule,
            "pipeline_placement": "v" if schedule == "zero_bubble_v" else "loop",
        }
        rows[f"torch {schedule}"] = Row(partial(PipelinePeer, **changes), untied=True)
        rows[schedule] = Row(changes=changes | _breadth_first(options))
    return rows


def _tensor_rows() -> dict[str, Row]:
    rows = {}
    for suffix, splits in (("", False), ("+SP", True)):
        rows[f"torch TP{suffix}"] = Row(partial(parallelized, splits_tokens=splits), untied=True)
        rows[f"TP{suffix}"] = Row(changes={"sequence_tensor_parallel": splits})
    return rows


def _breadth_first(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "breadth_first_micro_batches": options.micro_batches,
        "depth_first_micro_batches": 1,
    }


def _engine_rows(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    rows = {}
    for stage in (1, 3) if ranks == 1 else (1, 2, 3):  # with one rank ZeRO-2 is ZeRO-1
        name, changes = f"ZeRO-{stage}", {"zero_stage": stage}
        rows[name] = Row(changes=changes)
        if options.micro_batches > 1 and stage > 1:
            rows[f"{name} breadth-first"] = Row(changes=changes | _breadth_first(options))
        for suffix, more in _variants(options, ranks).items():
            rows[f"{name} {suffix}"] = Row(changes=changes | more, default=False)
    return rows


def _variants(options: argparse.Namespace, ranks: int) -> dict[str, dict[str, Any]]:
    """Return further options of our rows by the suffix of their names."""
    levels = {"activation": "activation", "full": "full"}
    found: dict[str, dict[str, Any]] = {
        f"recompute {word}": {"mlp_recompute_level": level} for word, level in levels.items()
    }
    if options.dtype == "bf16":
        found["fp32"] = {"training_dtype": "fp32"}
        levels["quarter"] = f"activation,full:{-(-options.num_layers // 4)}"
        found |= {
            f"split recompute {word}": {"mlp_recompute_level": level, "split_master_weights": True}
            for word, level in levels.items()
        }
    if ranks == 1:
        found |= {f"fp8 {scaling}": {"fp8": scaling} for scaling in ("tensorwise", "rowwise")}
        found["int8"] = {"int8": True}
    if ranks == 1 and options.one_at_a_time:  # deterministic mode is process-wide
        found["without Triton"] = {"enable_triton_kernels": False}
        found["deterministic"] = {"deterministic": True}
        found[f"window {WINDOW}"] = {"window_size": WINDOW}
    return found


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
    no_compiler = why_not_compiled(device) if any("compiled" in name for name in rows) else None
    reasons = {}
    for name, row in rows.items():
        reason = no_compiler if "compiled" in name else None
        if "HF" in name and importlib.util.find_spec("transformers") is None:
            reason = "transformers is not installed"
        elif row.untied and MODELS[options.model][1]["tie_word_embeddings"]:
            reason = "the head has the embedding's weights"
        if reason is not None:
            reasons[name] = reason
    return reasons


def why_not_compiled(device: torch.device) -> str | None:
    """Return the error of torch.compile (it needs a C++ compiler, or Triton), or None if it
    works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # any cause
        return f"torch.compile fails: {str(error).strip().splitlines()[0][:200]}"
    return None


def row_config(row: Row, options: argparse.Namespace, ranks: int) -> Config:
    """Return the resolved configuration of a row.

    Raises:
        UsageError: if --ours names an option that does not exist, or a value that the engine
        refuses.
    """
    words = options.ours.split() if row.ours else []
    given = command_line.parse([f"--{word}" for word in words]).given
    return engine_config(options, ranks, **{**row.changes, **given})
