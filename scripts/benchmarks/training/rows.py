"""The configurations that the benchmark can compare: which there are, which take part, which cannot."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_lite.distributed.process_group import Distributed
from scripts.benchmarks.training import peers
from scripts.benchmarks.training.engine import Engine, PlainEngine
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import PlainGPT
from scripts.benchmarks.training.settings import MODELS, engine_config, own_options


@dataclass(frozen=True)
class Row:
    """One configuration: a model, what trains it, and whether it is compiled."""

    trainer: str  # "engine", "torch" (one process), "DDP" or "FSDP2"
    model: str = "plain"  # "engine" (its own layers), "plain", "HF" or "HF Liger"
    compiled: bool = False
    # Ours:
    zero_stage: int = 1
    breadth_first: bool = False
    recompute: str = "none"
    # FSDP2: reshard_after_forward; embedding and head in groups of their own; gradients exchanged once a step
    reshard: bool = True
    ends_apart: bool = False
    sync: bool = True
    # Plain model: instead of --loss
    loss: str | None = None
    default: bool = True  # takes part unless --only says otherwise


def catalogue(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    """Every configuration there is for so many ranks, in the order in which they take turns."""
    rows = dict(_ours(options, ranks))
    fsdp = Row("FSDP2")
    if ranks == 1:
        rows = {
            "torch": Row("torch"),
            "torch compiled": Row("torch", compiled=True),
            "torch compiled full logits": Row("torch", compiled=True, loss="full"),
            **rows,
            "FSDP2": fsdp,
        }
    else:
        rows = {"DDP": Row("DDP"), "DDP compiled": Row("DDP", compiled=True), **rows, "FSDP2": fsdp}
        rows["FSDP2 all resharded"] = replace(fsdp, ends_apart=True)
        rows["FSDP2 no reshard"] = replace(fsdp, reshard=False)
        if options.micro_batches > 1:
            rows["FSDP2 no sync"] = replace(fsdp, reshard=False, sync=False)
    rows["FSDP2 compiled"] = replace(fsdp, compiled=True)
    for trainer in ("torch", "FSDP2") if ranks == 1 else ("DDP", "FSDP2"):
        name = "" if trainer == "torch" else f" {trainer}"
        first = trainer != "FSDP2"
        rows[f"HF{name}"] = Row(trainer, "HF", default=first)
        rows[f"HF{name} compiled"] = Row(trainer, "HF", compiled=True, default=first)
        rows[f"HF Liger{name}"] = Row(trainer, "HF Liger", default=first)
    return rows


def _ours(options: argparse.Namespace, ranks: int) -> Iterator[tuple[str, Row]]:
    stages = (1, 3) if ranks == 1 else (1, 2, 3)  # on one rank ZeRO-2 is ZeRO-1
    for model in ("engine", "plain"):
        taking_part = options.layers in (model, "both")
        for stage in stages:
            name, row = f"ZeRO-{stage}", Row("engine", model, zero_stage=stage, default=taking_part)
            name = name if model == "engine" else f"plain {name}"
            yield name, row
            if options.micro_batches > 1 and stage > 1:
                yield f"{name} breadth-first", replace(row, breadth_first=True)
            if model == "engine":
                for level in ("activation", "full"):
                    shown = taking_part and options.recompute and stage == 1
                    yield f"{name} recompute {level}", replace(row, recompute=level, default=shown)


def chosen(options: argparse.Namespace, ranks: int) -> dict[str, Row]:
    """The configurations that --only names, or those that take part by default.

    Raises:
        SystemExit: if a name in --only fits nothing.
    """
    rows = catalogue(options, ranks)
    patterns = [pattern.strip() for pattern in options.only.split(",")]
    patterns = [pattern for pattern in patterns if pattern]
    for pattern in patterns:
        if not fnmatch.filter(rows, pattern):
            raise SystemExit(f"benchmark: --only: no configuration is called {pattern!r}; there are {list(rows)}")
    taken = {name for pattern in patterns for name in fnmatch.filter(rows, pattern)}
    return {name: row for name, row in rows.items() if (name in taken if patterns else row.default)}


def unavailable(rows: dict[str, Row], options: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The configurations that cannot run here, each with the reason."""
    compiles = None
    if any(row.compiled for row in rows.values()) and options.compile_backend == "inductor":
        compiles = why_not_compiled(device)
    reasons = {}
    for name, row in rows.items():
        reason = compiles if row.compiled else None
        if row.model.startswith("HF") and importlib.util.find_spec("transformers") is None:
            reason = "transformers is not installed"
        elif row.model == "HF Liger" and importlib.util.find_spec("liger_kernel") is None:
            reason = "liger_kernel is not installed"
        elif row.model == "HF Liger" and (device.type == "cpu" or "gpt2" in options.model):
            reason = "Liger's kernels need a GPU, and it has none for GPT-2"
        if row.ends_apart and MODELS[options.model][1]["tie_word_embeddings"]:
            reason = "a tied embedding cannot be a group of its own"
        if reason is not None:
            reasons[name] = reason
    return reasons


def torchtitan() -> dict[str, str]:
    """Why there is no row of torchtitan's own."""
    installed = importlib.util.find_spec("torchtitan") is not None
    state = "installed, but its trainer runs alone" if installed else "not installed"
    return {"torchtitan": f"{state}; the row FSDP2 compiled follows its recipe"}


def why_not_compiled(device: torch.device) -> str | None:
    """What torch.compile says when it cannot compile here (it needs a C++ compiler, or Triton); None if it can."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # whatever is missing
        return f"torch.compile fails: {str(error).strip().splitlines()[0][:200]}"
    return None


def make(row: Row, options: argparse.Namespace, distributed: Distributed) -> Contestant:
    """One configuration, ready to train."""
    device, ranks = distributed.device, distributed.world_size
    if row.trainer == "engine":
        micro_batches = options.micro_batches
        order = dict(breadth_first_micro_batches=micro_batches, depth_first_micro_batches=1)
        changes = {
            "zero_stage": row.zero_stage,
            "mlp_recompute_level": row.recompute,
            **(order if row.breadth_first else {}),
            **own_options(options.ours),
        }
        config = engine_config(options, ranks, **changes)
        if row.model == "engine":
            return Engine(config, distributed)
        return PlainEngine(config, distributed, PlainGPT(config, options.loss, device))
    config = engine_config(options, ranks)
    model: PlainGPT | peers.HuggingFace
    if row.model == "plain":
        model = PlainGPT(config, row.loss or options.loss, device)
    else:
        model = peers.HuggingFace(config, options.hf_attention, device)
    patch = peers.Liger(model.model) if isinstance(model, peers.HuggingFace) and "Liger" in row.model else None
    if row.compiled:
        peers.compile_model(model, row.trainer == "torch", options.compile_mode, options.compile_backend)
    if row.trainer == "FSDP2":
        peer = peers.fsdp(config, distributed, model, row.reshard, row.ends_apart, not row.sync)
    else:
        peer = (peers.ddp if row.trainer == "DDP" else peers.alone)(config, distributed, model)
    if patch is not None:
        peer.patch = patch
    return peer
