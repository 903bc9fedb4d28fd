"""Tasks of EleutherAI's lm-eval, for the command `evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.errors import EXIT_DONE, CheckpointError, StorageError, UsageError
from megatron_lite.generation.model import choose_device
from megatron_lite.huggingface.model_folder import source_folders
from megatron_lite.monitor.trackers.metrics_file import MetricsFile
from megatron_lite.run.exit_status import METRICS_FILE, print_failure, print_page
from megatron_lite.run.experiment import is_in_use


def print_tasks(options: argparse.Namespace) -> int:
    """Let lm-eval measure each model; print its tables, or with --json its results, and add them to
    the metrics of its run. Return the exit code."""
    try:
        _print(options)
    except Exception as error:
        return print_failure(error, "write a smaller --micro_batch_size, or --dtype=bf16")
    return EXIT_DONE


def _print(options: argparse.Namespace) -> None:
    """Measure and print.

    Raises:
        UsageError: without the package, or for a task that it does not know.
        CheckpointError: for a folder without a model in Hugging Face's format.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UsageError(
            f"--tasks needs lm-eval ({error}); pip install lm_eval accelerate"
        ) from None
    manager = TaskManager(include_path=options.include_path)
    if unknown := [name for name in options.tasks if not manager.match_tasks([name])]:
        raise UsageError(
            f"--tasks={' '.join(unknown)}: lm-eval has no such task; write one of `lm_eval ls tasks`, or name the folder of "
            "your own with --include_path"
        )
    for model in options.model:
        folder = _folder(model)
        arguments = {"pretrained": str(folder)}
        if options.dtype:
            arguments["dtype"] = options.dtype
        found = simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=list(options.tasks),
            task_manager=manager,
            batch_size=options.micro_batch_size,
            device=choose_device(options.device).type,
        )
        if options.json:
            print_page(json.dumps({"model": str(model), "tasks": found["results"]}, default=str))
        else:
            print_page(f"{model}\n{make_table(found)}")
        record_results(folder.resolve(), found["results"])


def record_results(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Append the results of an iteration's export to the metrics.jsonl of its run, if it is in
    one."""
    numbers = {
        f"{task}/{name.removesuffix(',none')}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float)
    }
    for root in folder.parents[1:3]:  # export/1000, export/merged/1000
        if folder.name.isdecimal() and (path := root / METRICS_FILE).is_file():
            try:
                file = MetricsFile(path, repairs=not is_in_use(root))
            except StorageError:  # the run of somebody else
                print(f"{path} cannot be written and lacks these results", file=sys.stderr)
            else:
                now = round(time.time(), 3)
                file.log({"phase": "tasks", "iteration": int(folder.name), "time": now, **numbers})
                file.close()


def _folder(model: Path) -> Path:
    """Return the newest Hugging Face folder of a model."""
    merged = model / "export" / "merged"  # of a run of adapters
    found = source_folders(model) + (source_folders(merged) if merged.is_dir() else [])
    for kind, folder in found:
        if kind == "huggingface":
            return folder
    raise CheckpointError(
        f"--tasks: {model} has no model in Hugging Face's format; export one (--export_interval, or convert_checkpoint)"
    )
