"""Step time and peak memory of variants of our own training on one GPU, taking turns; memory also as it was planned.

    python -m scripts.benchmarks.gpu.training --variants=speed --output=FILE    MLP recompute levels, and without Triton
    python -m scripts.benchmarks.gpu.training --variants=deterministic --output=FILE   what --deterministic=1 costs

Layers are Mistral-7B's, a few of them, at sequence 8192 in bf16, with whole steps as in a run. In each round each
variant is built, warmed up, timed and thrown away. The file is written after every turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.plan import make_plan
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.setup_run import build
from megatron_lite.train import train_step
from megatron_lite.validation import resolve

MISTRAL: dict[str, Any] = dict(
    hidden_size=4096,
    num_attention_heads=32,
    head_groups=8,
    ffn_hidden_size=14336,
    vocab_size=32000,
    sequence_length=8192,
    use_rotary_embeddings=True,
    gated=True,
    normalization_type="rms_norm",
    add_linear_biases=False,
    tie_word_embeddings=False,
    micro_batch_size=1,
    batch_size=1,
    training_dtype="bf16",
    dataset_source="random",
    num_workers=0,
    lr=1e-4,
    train_iters=1000,
    device="cuda",
)
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "speed": {
        "none": {},
        "activation": dict(mlp_recompute_level="activation"),
        "full": dict(mlp_recompute_level="full"),
        "without Triton": dict(enable_triton_kernels=False),
    },
    "deterministic": {"deterministic=0": {}, "deterministic=1": dict(deterministic=True)},
}


def configured(num_layers: int, options: dict[str, Any]) -> Config:
    """The resolved configuration of a variant."""
    return resolve(unflatten({**MISTRAL, "num_layers": num_layers, **options}), 1)


def turn(config: Config, warm_up: int, steps: int) -> dict[str, Any]:
    """Milliseconds of each step, the last loss, and the peak of allocated memory of one run of its own."""
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    distributed = Distributed(config.distributed, 0, 1, 0)
    stop = StopSignal()
    try:
        run = build(config, distributed, Experiment(config, distributed), stop, ())
        events = [torch.cuda.Event(enable_timing=True) for _ in range(warm_up + steps + 1)]
        events[0].record()
        for iteration, batch in enumerate(run.data.batches("training", 0, warm_up + steps), start=1):
            update = train_step(run, batch, iteration)
            events[iteration].record()
        torch.cuda.synchronize(device)
        loss = float(update.loss) / run.tokens(iteration)
        run.data.close()
    finally:
        stop.restore()
        distributed.close()
    peak = torch.cuda.max_memory_allocated(device) - before
    times = [a.elapsed_time(b) for a, b in zip(events[warm_up:], events[warm_up + 1 :], strict=False)]
    return {"ms": times, "loss": loss, "peak_bytes": peak}


def forget() -> None:
    """Give back what the last variant held, and its process-wide switches."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


def summarize(turns: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """Median and quartiles over all steps of all turns, tokens per second, and memory beside its plan."""
    times = [time_ms for one in turns for time_ms in one["ms"]]
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "step_ms": {"median": median, "quartiles": [low, high]},
        "tokens_per_s": config.batch.sequence_length / median * 1e3,
        "turns_ms": [statistics.median(one["ms"]) for one in turns],
        "loss": turns[0]["loss"],
        "peak_bytes": max(one["peak_bytes"] for one in turns),
        "planned_peak_bytes": make_plan(config, 1, "cuda").peak_bytes(),
    }


def main(argv: Sequence[str]) -> int:
    """Measure and write; exit code 1 if a variant failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variants", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.variants == "deterministic":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for both, before cuBLAS is first used
    result: dict[str, Any] = {
        "shape": f"{options.num_layers} layers of Mistral-7B, sequence 8192, micro-batch 1, bf16",
        "variants": {},
    }
    turns: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name, changes in VARIANTS[options.variants].items():
            if "failed" in result["variants"].get(name, {}):
                continue
            began = time.monotonic()
            try:
                config = configured(options.num_layers, changes)
                turns.setdefault(name, []).append(turn(config, options.warm_up, options.steps))
                result["variants"][name] = summarize(turns[name], config)
            except Exception as error:  # out of memory, or a backend that is not there: the others go on
                result["variants"][name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            forget()
            print(f"{name}: {time.monotonic() - began:.1f} s, {result['variants'][name]}", flush=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return int(any("failed" in variant for variant in result["variants"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
