"""Measure this machine's compute and communication speeds, for the predictions of a dry run.

    python -m scripts.benchmarks.machine --output=machine.json
    torchrun --nproc-per-node=2 -m scripts.benchmarks.machine --output=machine.json
    python pretrain_gpt.py ... --dry_run=1 --machine_speeds=machine.json

Launch it like the run, with as many ranks per machine, because they share cores, memory and links.
It times the program's own operations: products by shape and dtype, attention by length, elementwise
passes, collectives (gloo on a CPU, NCCL on GPUs), and the host overhead of a step. That takes less
than a minute per dtype on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
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
from megatron_lite.errors import EXIT_DONE, RunError
from megatron_lite.kernels.matmul_library import library_for, use_library
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import DTYPES
from megatron_lite.planner.speeds import FORMAT, VERSION
from megatron_lite.run import exit_status
from megatron_lite.run.launch import requested_threads
from scripts.benchmarks import processor
from scripts.benchmarks.commands import names_in
from scripts.benchmarks.machine.host import host_times, seconds_per_byte
from scripts.benchmarks.machine.operations import Operations, measure_collectives
from scripts.benchmarks.pipeline import write_json


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(
        prog="machine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--dtypes",
        default="fp32",
        help="training dtypes to measure, such as fp32,bf16 (default fp32)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads per rank; default: its share of the cores"
    )
    options = parser.parse_args(argv)
    options.dtypes = list(dict.fromkeys(names_in(options.dtypes)))
    if unknown := [name for name in options.dtypes if name not in DTYPES] or not options.dtypes:
        parser.error(
            f"--dtypes: {unknown if options.dtypes else 'none'}; write some of {', '.join(DTYPES)}"
        )
    if not 0 <= options.threads <= 4096:
        parser.error(
            f"--threads={options.threads} must be from 1 to 4096, or 0 for its share of the cores"
        )
    return options


def main(argv: Sequence[str]) -> int:
    """Measure on all ranks, write on rank 0; return the exit code."""
    options = parse(argv)
    try:
        distributed = startup.initialize(unflatten({"device": options.device}).distributed)
    except RunError as error:
        return exit_status.report(error, None, prints=True)
    threads = (
        options.threads
        or requested_threads()
        or max(1, len(processor.cores()) // distributed.sharing_cores)
    )
    torch.set_num_threads(threads)
    start_s = time.perf_counter()
    result = measure(options.dtypes, distributed, threads)
    code = EXIT_DONE
    if distributed.rank == 0:
        try:
            write_json(options.output, result)
            print(
                f"{options.output}: measured in {time.perf_counter() - start_s:.0f} s on {result['device']}"
            )
        except OSError as error:
            print(f"machine: error: --output={options.output}: {error.strerror}", file=sys.stderr)
            code = 2
    distributed.barrier()
    distributed.close()
    return code


def measure(dtypes: Sequence[str], distributed: Distributed, threads: int) -> dict[str, Any]:
    """Return the content of the file: medians over ranks, all of which measure at the same time."""
    device = distributed.device
    if device.type == "cpu":  # the library that a run would choose
        use_library(library_for("auto"))
    triton = runs_on(device) and device.type == "cuda"
    own: dict[str, Any] = {"dtypes": {}}
    for name in dtypes:
        distributed.barrier()
        operations = Operations(device, DTYPES[name], triton)
        own["dtypes"][name] = {
            "products": operations.products(),
            "attention_flops_per_s": operations.attention(),
            "seconds_per_byte": seconds_per_byte(device, name) | operations.update(),
        }
    distributed.barrier()
    own |= host_times(device, dtypes[0])
    own |= measure_collectives(distributed)
    ranks = distributed.gather_objects(own)
    return {
        "format": FORMAT,
        "version": VERSION,
        "device": processor.name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "device_type": device.type,
        "world_size": distributed.world_size,
        "threads": threads,
        **_medians(ranks),
    }


def _medians(values: list[Any]) -> Any:
    """Return the elementwise median over ranks of nested objects and lists."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _medians([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_medians(list(items)) for items in zip(*values, strict=True)]
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
