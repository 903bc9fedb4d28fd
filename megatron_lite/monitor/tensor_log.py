"""Summarize tensors logged for debugging, and store the summaries in files.

The level determines how much is logged: 1 shape, dtype and device; 2 also statistics; from 3 on
also 2**(level - 3) samples, spread evenly over the flattened tensor. A file is an ordinary
safetensors file: samples by name, the rest as JSON in its metadata.
`scripts/compare_tensor_logs.py` compares two files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatron_lite.errors import UsageError
from megatron_lite.monitor.hashes import bit_hash
from megatron_lite.run.durable_files import replace_file

# Elements converted to fp64 at a time; keeps temporaries below about 100 MiB.
CHUNK_NUMEL = 2**22
FORMAT = "megatron_lite tensor log 1"
SHOWN_SAMPLES = 8  # in a log line


class Statistics(NamedTuple):
    """Statistics of all elements, computed in fp64 for every dtype."""

    mean: float
    std: float  # around the mean, divided by the number of elements: mean**2 + std**2 is the mean square
    minimum: float
    maximum: float
    not_finite: int  # elements that are infinite or NaN
    checksum: int  # 64 bits; differs if any element does, for tensors of one dtype and shape

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.hypot(self.mean, self.std)


class TensorEntry(NamedTuple):
    """One logged tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    level: int
    statistics: Statistics | None = None  # level 2; None also for a tensor without elements
    samples: Tensor | None = None  # level 3: fp32 (n,), on the CPU

    def line(self) -> str:
        """Return the log line, with the first samples."""
        parts = [self.name, f"{self.shape} {self.dtype} {self.device}"]
        if self.statistics is not None:
            parts.append(f"mean {self.statistics.mean:.4e}, std {self.statistics.std:.4e}")
            if self.statistics.not_finite:
                parts.append(f"{self.statistics.not_finite:,} NOT FINITE")
        if self.samples is not None:
            shown = " ".join(f"{value:.4e}" for value in self.samples[:SHOWN_SAMPLES].tolist())
            count = self.samples.numel()
            parts.append(
                f"samples {shown}" + (f" ... ({count:,} in all)" if count > SHOWN_SAMPLES else "")
            )
        return " | ".join(parts)


def summarize(name: str, tensor: Tensor, level: int) -> TensorEntry:
    """Summarize a floating-point tensor of any shape at `level`; reads the device from level 2
    on."""
    flat = tensor.detach().reshape(-1)
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        level=level,
        statistics=compute_statistics(flat) if level >= 2 and flat.numel() else None,
        samples=take_samples(flat, 2 ** (level - 3)) if level >= 3 else None,
    )


def take_samples(flat: Tensor, count: int) -> Tensor:
    """Return `count` elements of a tensor (n,), one from each of as many pieces, or all elements:
    fp32 on the CPU.

    The position within the piece varies (multiples of the golden ratio, in integers). At equal
    distances all samples of a matrix would come from one or two columns, because its width divides
    most distances.
    """
    count = min(count, flat.numel())
    index = torch.arange(count, device=flat.device)
    piece_numel = flat.numel() // max(count, 1)
    positions = (
        index * flat.numel() // max(count, 1) + (index * 40503 % 65536) * piece_numel // 65536
    )
    return flat[positions].float().cpu()


def canonical(chunk: Tensor) -> Tensor:
    """Map both zeros to one value, and all NaNs to one: a log treats them as equal."""
    return torch.where(chunk.isnan(), torch.nan, chunk) + 0.0  # -0.0 + 0.0 is 0.0


def compute_statistics(flat: Tensor) -> Statistics:
    """Return the statistics of a tensor (n,), n > 0, in two passes: a plain sum of squares would
    lose a small std."""
    chunks = flat.split(CHUNK_NUMEL)
    mean = torch.stack([chunk.double().sum() for chunk in chunks]).sum() / flat.numel()
    squares = torch.stack([(chunk.double() - mean).square().sum() for chunk in chunks])
    lows, highs = torch.stack([torch.stack(torch.aminmax(chunk)) for chunk in chunks]).unbind(1)
    return Statistics(
        mean=float(mean),
        std=float((squares.sum() / flat.numel()).sqrt()),
        minimum=float(lows.amin()),
        maximum=float(highs.amax()),
        not_finite=flat.numel() - sum(int(torch.isfinite(chunk).sum()) for chunk in chunks),
        checksum=int(bit_hash(flat, canonical)) % 2**64,
    )


def write_tensor_log(path: Path, entries: Sequence[TensorEntry], about: Mapping[str, str]) -> None:
    """Write a file atomically, with `about` in its metadata; a repeated name gets a number.

    Raises:
        OSError: if the file cannot be written.
    """
    entries = list(unique_names(entries))
    samples = {entry.name: entry.samples for entry in entries if entry.samples is not None}
    metadata = {
        **about,
        "format": FORMAT,
        "entries": json.dumps([_to_json(entry) for entry in entries]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # not `save_file`: it hides the file from the user's group
    replace_file(path, save(samples, metadata))


def read_tensor_log(path: Path) -> list[TensorEntry]:
    """Return the entries of a file in the order of logging.

    Raises:
        UsageError: if the file cannot be read or is not a tensor log.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UsageError(
                    f"{path} is not a tensor log of this program; write one with --save_tensor_logs=1"
                )
            samples = {name: file.get_tensor(name) for name in file.keys()}
        return [_from_json(fields, samples) for fields in json.loads(metadata["entries"])]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} is damaged ({type(error).__name__}: {error}); run again to rewrite it"
        ) from None


def _to_json(entry: TensorEntry) -> dict[str, Any]:
    """Return everything but the samples; infinities, which JSON lacks, become text."""
    fields = {name: getattr(entry, name) for name in ("name", "shape", "dtype", "device", "level")}
    statistics = {} if entry.statistics is None else entry.statistics._asdict()
    return fields | {
        name: value if math.isfinite(value) else str(value) for name, value in statistics.items()
    }


def _from_json(fields: dict[str, Any], samples: dict[str, Tensor]) -> TensorEntry:
    numbers = {name: fields.pop(name) for name in Statistics._fields if name in fields}
    numbers = {
        name: float(value) if isinstance(value, str) else value for name, value in numbers.items()
    }
    found = samples[fields["name"]] if fields["level"] >= 3 else None
    fields["shape"] = tuple(fields["shape"])
    return TensorEntry(
        **fields, statistics=Statistics(**numbers) if numbers else None, samples=found
    )


def unique_names(entries: Sequence[TensorEntry]) -> Iterator[TensorEntry]:
    """Yield the entries; a repeated name gets a number."""
    seen: dict[str, int] = {}
    for entry in entries:
        count = seen[entry.name] = seen.get(entry.name, 0) + 1
        yield entry if count == 1 else entry._replace(name=f"{entry.name} #{count}")
