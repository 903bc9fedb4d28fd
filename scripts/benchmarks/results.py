"""The result format of all benchmarks, measured by `turns` and shown by `tables`. Imports no torch.

A result is a JSON object with these keys:

- `environment`: `command` as typed, `date`, `commit` of this checkout (with "+" if files are
  changed), `machine` (device, cores, and more where it matters), `versions` of python and of the
  installed packages that compute
- `settings`: every option
- `rows`: one entry per contestant, which holds its figures: numbers, and spreads of numbers over
  the turns (`median`, `quartiles`, `values`). `ratios` in it are spreads of its time over that of
  another row, turn by turn, by the other's name
- `missing`: contestants that cannot run here, each with the reason
- `failures`: contestants that failed, each with the error

Names of figures end with their unit. Each benchmark's module describes further keys.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron_lite
from megatron_lite.run.durable_files import replace_file
from scripts.benchmarks import processor

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 2**20, 2**30
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
Result = dict[str, Any]
Rows = Mapping[str, Mapping[str, Any]]
Spread = dict[str, Any]
_VERSIONS = """
import importlib.metadata, json, platform
known = {"python": platform.python_version()}
for name in ("torch", "triton", "transformers", "accelerate", "litgpt", "deepspeed", "liger_kernel", "torchtitan"):
    try:
        known[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(known))
"""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the description as written and accepts no abbreviated flags."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def matching(known: Collection[str], what: str, text: str) -> list[str]:
    """Return the known names that a comma-separated list of names and wildcards selects, in their
    own order.

    Raises:
        ArgumentTypeError: if nothing matches one of them.
    """
    patterns = names_in(text)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise argparse.ArgumentTypeError(
                f"no {what} is called {pattern!r}; choose from {list(known)}"
            )
    return [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


# -- files
# -----------------------------------------------------------------------------------------------------------


def write_json(path: Path | None, result: Result) -> None:
    """Write a result atomically; without a path do nothing."""
    if path is not None:
        replace_file(path, (json.dumps(result, indent=1, default=str) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it does not exist."""
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def environment(
    command: str,
    argv: Sequence[str],
    machine: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Describe the command, machine, commit and versions.

    Args:
        command: the command without its arguments `argv`.
        machine: further facts about the machine; `device` replaces the processor.
        python: the interpreter whose packages are measured.
    """
    versions = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    ).stdout
    return {
        "command": f"{command} {' '.join(argv)}".strip(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": {"device": processor.name(), "cores": len(processor.cores()), **(machine or {})},
        "versions": {**json.loads(versions), "megatron_lite": megatron_lite.__version__},
    }


def commit() -> str:
    """Return the commit of this checkout, with "+" if files are changed, or "unknown"."""
    words = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=7",
        "--exclude=*",
    ]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def words_for(module: str, function: str, *arguments: object) -> list[str]:
    """Return Python's arguments for a process that calls a module's function and prints what it
    returns as JSON."""
    code = f"import json, os, sys, {module} as module; print(json.dumps(module.{function}(*json.loads(sys.argv[1]))))"
    end = "sys.stdout.flush(); os._exit(0)"  # without waiting for workers
    return ["-W", "ignore", "-c", f"{code}; {end}", json.dumps(arguments, default=str)]


def measured_alone(module: str, function: str, *arguments: object) -> Any:
    """Call a module's function in a process of its own, started in the checkout; return what it
    returns.

    Raises:
        RuntimeError: if the process fails, with the end of its stderr.
    """
    words = [sys.executable, *words_for(module, function, *arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{module}.{function} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def private_environment(folder: Path, pythonpath: str, **more: str) -> dict[str, str]:
    """Return variables that keep libraries offline and their files in `folder`. more: further
    variables.

    Caches of compiled code that are set already stay, so that a later process does not compile
    everything again.
    """
    compiled = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    caches = ["HF_HOME", "XDG_CACHE_HOME", *(name for name in compiled if name not in os.environ)]
    own = {
        "PYTHONPATH": pythonpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    return (
        own
        | {"TMPDIR": str(folder)}
        | {name: str(folder / "cache" / name.lower()) for name in caches}
        | more
    )


# -- figures
# ---------------------------------------------------------------------------------------------------------


def reason_of(error: Exception) -> str:
    """Describe an error in one line of at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, quartiles and values of one or more numbers."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else list(values) * 3
    )
    return {"median": median, "quartiles": [low, high], "values": list(values)}


def ratio(rows: Rows, own: str, other: str) -> Spread | None:
    """Return the ratio of two rows' times, which a result may only hold in the other direction."""
    direct, reverse = (
        rows.get(a, {}).get("ratios", {}).get(b) for a, b in ((own, other), (other, own))
    )
    if direct is not None or reverse is None:
        return direct
    low, high = reverse["quartiles"]
    return {"median": 1 / reverse["median"], "quartiles": [1 / high, 1 / low]}


def compared_with(rows: Rows, name: str) -> Spread | None:
    """Return the time of the first row that is compared with `name`, over that of `name`."""
    return next(
        (row["ratios"][name] for row in rows.values() if name in row.get("ratios", {})), None
    )
