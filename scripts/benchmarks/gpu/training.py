"""Compare variants of our training on one GPU, in turns: step time, and peak memory beside the planned peak.

    python -m scripts.benchmarks.gpu.training --variants=speed --output=FILE           recomputation, and no Triton
    python -m scripts.benchmarks.gpu.training --variants=deterministic --output=FILE   the cost of --deterministic=1

Trains six layers of Mistral-7B's dimensions at sequence 8192 in bf16, with complete training steps. Every round builds,
warms up, times and frees each variant. The file is written after every turn.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed.startup import join
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.planner.plan import make_plan
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.schedules.batch_options import iteration_tokens
from megatron_lite.setup_run import build
from megatron_lite.train import train_step
from megatron_lite.validation import resolve
from scripts.benchmarks.common import argument_parser, reason_of, spread_of, write_json
from scripts.benchmarks.training.settings import MODELS

LAYERS, ROUNDS, WARM_UP, STEPS = 6, 2, 3, 8
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "speed": {
        "none": {},
        "activation": {"mlp_recompute_level": "activation"},
        "full": {"mlp_recompute_level": "full"},
        "without Triton": {"enable_triton_kernels": False},
        "window 4096": {"window_size": 4096},
    },
    "deterministic": {"deterministic=0": {}, "deterministic=1": {"deterministic": True}},
}


def configured(options: dict[str, Any]) -> Config:
    """Return the resolved configuration of a variant."""
    sizes, model_options = MODELS["mistral-7b"]
    values = {
        **model_options,
        **sizes._asdict(),
        "num_layers": LAYERS,
        "batch_size": 1,
        "training_dtype": "bf16",
        "lr": 1e-4,
        "train_iters": 1000,
        "device": "cuda",
    }
    return resolve(unflatten(values | options), 1)


def turn(config: Config) -> dict[str, Any]:
    """Train one run; return the milliseconds of each step, the last loss and the peak of allocated memory."""
    device, steps = torch.device("cuda"), WARM_UP + STEPS
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    distributed = join(config.distributed, 0, 1, 0)
    stop = StopSignal()
    try:
        run = build(config, distributed, Experiment(config, distributed), stop, ())
        attention = choose_kernels(config, distributed.device).attention  # as `build` chose: trials are remembered
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for iteration, batch in enumerate(run.data.batches("training", 0, steps), start=1):
            update = train_step(run, batch, iteration)
            events[iteration].record()
        torch.cuda.synchronize(device)
        loss = float(update.loss) / iteration_tokens(run.config.batch, iteration)
        run.data.close()
    finally:
        stop.restore()
        distributed.close()
    peak = torch.cuda.max_memory_allocated(device) - before
    times = [a.elapsed_time(b) for a, b in zip(events[WARM_UP:], events[WARM_UP + 1 :], strict=False)]
    return {"ms": times, "loss": loss, "peak_bytes": peak, "attention": attention}


def reset() -> None:
    """Free the memory of the last variant and undo its process-wide switches."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


def summarize(turns: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """Return step times over all turns, tokens per second, and the measured and planned peak of memory."""
    step_ms = spread_of([time_ms for one in turns for time_ms in one["ms"]])
    return {
        "step_ms": step_ms,
        "tokens_per_s": config.batch.sequence_length / step_ms["median"] * 1e3,
        "turns_ms": [statistics.median(one["ms"]) for one in turns],
        "loss": turns[0]["loss"],
        "attention": turns[0]["attention"],
        "peak_bytes": max(one["peak_bytes"] for one in turns),
        "planned_peak_bytes": make_plan(config, 1, "cuda").peak_bytes(),
    }


def main(argv: Sequence[str]) -> int:
    """Measure and write; return 1 if a variant failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--variants", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.variants == "deterministic":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for both variants, before cuBLAS is first used
    variants: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[dict[str, Any]]] = {}
    for _ in range(ROUNDS):
        for name, changes in VARIANTS[options.variants].items():
            if "failed" in variants.get(name, {}):
                continue
            began = time.monotonic()
            try:
                config = configured(changes)
                turns.setdefault(name, []).append(turn(config))
                variants[name] = summarize(turns[name], config)
            except Exception as error:  # out of memory, or a missing backend: the others still run
                variants[name] = {"failed": reason_of(error)}
            reset()
            print(f"{name}: {time.monotonic() - began:.1f} s, {variants[name]}", flush=True)
            shape = f"{LAYERS} layers of Mistral-7B, sequence 8192, micro-batch 1, bf16"
            write_json(options.output, {"shape": shape, "variants": variants})
    return int(any("failed" in variant for variant in variants.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
