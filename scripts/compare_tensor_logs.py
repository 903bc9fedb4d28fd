"""Compare the tensor logs of two runs and name the first tensor that differs.

    python scripts/compare_tensor_logs.py RUN_A RUN_B [--rtol 1e-3] [--atol 1e-6] [--limit 20]

Each run is an --experiment_dir (its newest start with tensor logs is read), a folder of tensor logs
(<experiment_dir>/runs/<k>/artifacts), or one file; --save_tensor_logs=1 writes them. Without
tolerances all elements must be equal, including those that were not sampled, because the log has a
checksum of every tensor. With tolerances, samples, mean, standard deviation and extremes may differ
by atol + rtol * RMS, the root mean square of the tensor in RUN_A.

Tensors are matched by name, so runs with different schedules can be compared. Exit codes: 0 the
same, 1 different, 2 nothing to compare.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
import torch
from torch import Tensor

from megatron_lite.cli.script_parser import ScriptParser, number
from megatron_lite.errors import RunError, UsageError
from megatron_lite.monitor.tensor_log import Statistics, TensorEntry, read_tensor_log

Entries = list[TensorEntry]
PATTERN = "tensor_logs_*.safetensors"


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between the runs."""

    file: str
    name: str
    what: str  # in words
    max_abs: float | None = None  # largest difference of a sample, or of a statistic; None: unknown
    max_rel: float | None = None  # max_abs over the root mean square of the tensor of the first run

    def __str__(self) -> str:
        parts = [self.file, self.name, self.what]
        if self.max_abs is not None:
            parts.insert(2, f"max abs {self.max_abs:.3e}, {self.max_rel:.3e} of RMS")
        return " | ".join(parts)


def compare(a: Path, b: Path, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Return the tensors that differ, in the order of the first run.

    Raises:
        UsageError: if a file is missing in either run or cannot be read, or nothing was logged.
    """
    return [
        difference for pair in read_pairs(a, b) for difference in compare_files(*pair, rtol, atol)
    ]


def read_pairs(a: Path, b: Path) -> Iterator[tuple[str, Entries, Entries]]:
    """Yield each file's name and its entries in both runs: the initial weights, then iteration by
    iteration.

    Raises:
        UsageError: as in `compare`.
    """
    first, second = find_files(a), find_files(b)
    if a.is_file() and b.is_file():
        second = dict(zip(first, second.values(), strict=True))  # names may differ
    elif a.is_file():
        second = {name: path for name, path in second.items() if name in first}
    elif b.is_file():
        first = {name: path for name, path in first.items() if name in second}
    for name in sorted(first.keys() ^ second.keys(), key=natural_order):
        has, lacks = (a, b) if name in first else (b, a)
        raise UsageError(
            f"{name} is in {has} but not in {lacks}; run both with the same debug flags and train_iters"
        )
    for name in sorted(first, key=natural_order):
        yield name, read_tensor_log(first[name]), read_tensor_log(second[name])


def find_files(path: Path) -> dict[str, Path]:
    """Return the tensor logs of one run by file name.

    Raises:
        UsageError: if there are none.
    """
    if path.is_file():
        return {path.name: path}
    runs = sorted(
        (path / "runs").glob("*/artifacts"), key=lambda folder: natural_order(folder.parent.name)
    )
    for folder in (path, path / "artifacts", *reversed(runs)):
        if files := {file.name: file for file in folder.glob(PATTERN)}:
            return files
    state = "has no tensor logs" if path.is_dir() else "does not exist"
    raise UsageError(
        f"{path} {state}; give a run's --experiment_dir or runs/<k>/artifacts, from --save_tensor_logs=1"
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def compare_files(
    file: str, a: Entries, b: Entries, rtol: float, atol: float
) -> Iterator[Difference]:
    """Yield the tensors that differ between two files; those found only in the second file come
    last."""
    second = {entry.name: entry for entry in b}
    for entry in a:
        other = second.pop(entry.name, None)
        if other is None:
            yield Difference(file, entry.name, "only in the first run")
        elif difference := compare_entries(file, entry, other, rtol, atol):
            yield difference
    for name in second:
        yield Difference(file, name, "only in the second run")


def compare_entries(
    file: str, a: TensorEntry, b: TensorEntry, rtol: float, atol: float
) -> Difference | None:
    """Return how two tensors of the same name differ, as far as the logs show, or None."""
    if a.shape != b.shape:
        return Difference(file, a.name, f"shapes {a.shape} and {b.shape}")
    exact = rtol == 0 and atol == 0
    what = f"dtypes {a.dtype} and {b.dtype}" if exact and a.dtype != b.dtype else ""
    if a.statistics is None or b.statistics is None:
        return Difference(file, a.name, what) if what else None
    if exact and not what and a.statistics.checksum == b.statistics.checksum:
        return None
    max_abs, rms = statistics_difference(a.statistics, b.statistics), a.statistics.rms
    if a.samples is not None and b.samples is not None and a.samples.shape == b.samples.shape:
        differences = sample_differences(a.samples, b.samples)
        largest, count = float(differences.max()), int((differences > 0).sum())
        where = (
            f"{count:,} of {a.samples.numel():,} samples differ"
            if count
            else "differs outside the samples"
        )
        max_abs = largest if count and exact else max(max_abs, largest)
    else:
        where = "by the statistics"
    if what and max_abs == 0:
        where = "no difference of values found"
    # A tensor with infinities or NaNs has no scale, so its tolerance is atol only.
    if not exact and max_abs <= atol + (rtol * rms if math.isfinite(rms) else 0.0):
        return None
    max_rel = max_abs / rms if rms > 0 and math.isfinite(max_abs) else math.inf if max_abs else 0.0
    return Difference(file, a.name, f"{what}, {where}" if what else where, max_abs, max_rel)


def statistics_difference(a: Statistics, b: Statistics) -> float:
    """Return the largest difference of any statistic; infinity if the counts of non-finite elements
    differ."""
    if a.not_finite != b.not_finite:
        return math.inf
    names = ("mean", "std", "minimum", "maximum")
    first, second = (
        torch.tensor([getattr(one, name) for name in names], dtype=torch.float64) for one in (a, b)
    )
    return float(sample_differences(first, second).max())


def sample_differences(a: Tensor, b: Tensor) -> Tensor:
    """Return absolute differences (n,) in fp64: 0 between two NaNs, infinity between NaN and a
    number."""
    differences = (a.double() - b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return differences.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    parser = ScriptParser(description="Compare the tensor logs of two runs.")
    parser.add_argument(
        "run_a", type=Path, help="an --experiment_dir, a folder with tensor logs, or one file"
    )
    parser.add_argument("run_b", type=Path, help="the run to compare with")
    parser.add_argument(
        "--rtol",
        type=number(float, 0),
        default=0.0,
        help="tolerance as a fraction of the tensor's RMS",
    )
    parser.add_argument("--atol", type=number(float, 0), default=0.0, help="absolute tolerance")
    parser.add_argument(
        "--limit", type=int, default=20, help="number of differences to print (default: 20)"
    )
    options = parser.parse_args(arguments)
    count, files = 0, 0
    differences: list[Difference] = []
    try:
        for name, first, second in read_pairs(options.run_a, options.run_b):
            files += 1
            count += len({entry.name for entry in (*first, *second)})
            differences += compare_files(name, first, second, options.rtol, options.atol)
    except RunError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    if not differences:
        print(f"the same: {count:,} tensors in {files:,} files")
        return 0
    for difference in differences[: options.limit]:
        print(difference)
    if len(differences) > options.limit:
        print(f"... and {len(differences) - options.limit:,} more")
    print(f"different: {len(differences):,} of {count:,} tensors in {files:,} files")
    print(f"first: {differences[0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
