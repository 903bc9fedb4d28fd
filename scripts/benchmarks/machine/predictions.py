"""Predict the step times of six models from this machine's measured speeds, and time the steps.

    python -m scripts.benchmarks.machine.predictions --output=docs/planner.md

Prints a Markdown table. The steps are the program's own (gather, forward, backward, update) on
random tokens, without data loading and logs, in fp32 on a CPU. With one thread all times are
process time, which other programs hardly affect; with several they are wall time, which needs a
quiet machine. --output puts the table into a document, between `<!-- table: predictions -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.run.host import prepare_libraries

if __name__ == "__main__":
    prepare_libraries()  # before torch is imported

import torch

from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.config import unflatten
from megatron_lite.distributed import startup
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.speeds import Speeds, read_speeds
from megatron_lite.planner.work_time import predict_step
from scripts.benchmarks.machine.__main__ import measure
from scripts.benchmarks.machine.host import step_seconds
from scripts.benchmarks.pipeline import write_json
from scripts.benchmarks.training.settings import GPT2, LLAMA, Sizes
from scripts.docs.tables import markdown_table, with_tables, write_documents

TOLERANCE = 0.15
MODELS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "GPT-2, 0.8M": (Sizes(3, 128, 4, 4, 512, 1000, 128, 8), GPT2),
    "GPT-2, 11M": (Sizes(6, 384, 6, 6, 1536, 256, 256, 8), GPT2),
    "GPT-2, 67M, large vocabulary": (Sizes(4, 768, 12, 12, 3072, 50304, 512, 1), GPT2),
    "Llama, 11M, narrow": (Sizes(12, 256, 8, 4, 704, 4096, 512, 4), LLAMA),
    "Llama, 28M, long samples": (Sizes(4, 640, 10, 2, 1728, 8192, 2048, 1), LLAMA),
    "Llama, 39M": (Sizes(8, 512, 8, 2, 1408, 16384, 256, 2), LLAMA),
}


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a model."""
    sizes, family = MODELS[name]
    options = {**family, **sizes._asdict(), "train_iters": 100}
    return {
        **options,
        "batch_size": options["micro_batch_size"],
        "max_position_embeddings": options["sequence_length"],
    }


def measured(threads: int, distributed: Distributed) -> Speeds:
    """Measure this machine's speeds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        write_json(path, measure(["fp32"], distributed, threads))
        return read_speeds(path)


def main(argv: Sequence[str]) -> int:
    """Measure, predict, print; return the exit code: 1 if a prediction misses by more than
    TOLERANCE."""
    parser = ScriptParser(prog="predictions", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="document whose table to replace")
    options = parser.parse_args(argv)
    distributed = startup.initialize(unflatten({"device": "cpu"}).distributed)
    torch.set_num_threads(options.threads)
    speeds = measured(options.threads, distributed)
    rows = []
    ratios = []
    for name in MODELS:
        config, seconds = step_seconds(options_of(name), torch.device("cpu"))
        step = predict_step(make_plan(config, 1, "cpu"), speeds)
        ratios.append(step.seconds / seconds)
        times = [f"{seconds * 1e3:,.0f}", f"{step.seconds * 1e3:,.0f}", f"{ratios[-1]:.2f}"]
        shares = [f"{part / step.seconds:.0%}" for part in step.parts.values()]
        rows.append([name, *times, *shares])
    head = ["model", "measured, ms", "predicted, ms", "predicted / measured", *step.parts]
    lines = markdown_table(head, rows)
    print("\n".join([*lines, "", speeds.device]))
    if options.output is not None:
        tables = {"predictions": lambda: lines}
        write_documents(
            {options.output: lambda text: with_tables(text, tables, separated=False)}, False, ""
        )
    distributed.close()
    return int(any(abs(ratio - 1) > TOLERANCE for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
