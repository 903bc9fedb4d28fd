"""What a run leaves, for comparison: checkpoints, exports and the curve, bit for bit."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.checkpoint import blocks, manifest
from tests.support.metrics import read_metrics

# What metrics.jsonl must have in common with an uninterrupted run; the rest of a line is about
# time.
SAME = (
    "loss",
    "averaged_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "batch_size",
    "consumed_samples",
    "consumed_tokens",
    "skipped_iters",
    "nan_iters",
)


def checkpoints(experiment: Path) -> list[int]:
    """Return the iterations of the published checkpoints, oldest first."""
    root = experiment / "checkpoints"
    return (
        sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
        if root.is_dir()
        else []
    )


def assert_all_good(experiment: Path) -> None:
    """Check that every published checkpoint is complete: manifest, sizes, checksums."""
    for iteration in checkpoints(experiment):
        folder = experiment / "checkpoints" / str(iteration)
        content = manifest.read(folder)
        assert content.iteration == iteration
        for name, file in content.files.items():
            blocks.check_blocks(folder, name, file)


def weights(experiment: Path) -> dict[str, str]:
    """Return a digest per parameter and Adam moment of the newest checkpoint, for any layout."""
    folder = experiment / "checkpoints" / str(checkpoints(experiment)[-1])
    digests = {
        f"{name} {kind}": hashlib.sha256(values.tobytes()).hexdigest()
        for name, kind, values in saved_values(folder)
    }
    assert digests
    return digests


def saved_values(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (parameter, kind, elements as raw bytes) of a checkpoint, without the code that loads
    it."""
    content = manifest.read(folder)
    files = {file: (folder / file).read_bytes() for file in content.files}
    for name, parameter in content.parameters.items():
        for kind, pieces in parameter.slices.items():
            size, row = (
                getattr(torch, parameter.dtype_of(kind)).itemsize,
                math.prod(parameter.shape[1:]),
            )
            values, filled = np.zeros(math.prod(parameter.shape), f"V{size}"), 0
            for piece in pieces:
                runs = np.frombuffer(
                    files[piece.file], values.dtype, piece.num_bytes // size, piece.offset
                )
                for index, run in enumerate(runs.reshape(-1, piece.run)):
                    values[piece.first + index * row :][: piece.run] = run
                    filled += piece.run
            assert filled == values.size, (name, kind)
            yield name, kind, values


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder, by relative path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def curve(experiment: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lines of metrics.jsonl by phase and iteration, with floats as bits."""
    return {
        (record["phase"], record["iteration"]): {
            **{key: float(record[key]).hex() for key in SAME if record.get(key) is not None},
            "skip_reason": record.get("skip_reason"),
        }
        for record in read_metrics(experiment / "metrics.jsonl")
    }


def assert_same_run(experiment: Path, reference: Path) -> None:
    """Check that two runs differ in timing only."""
    assert curve(experiment) == curve(reference)
    assert checkpoints(experiment)[-1] == checkpoints(reference)[-1]
    assert weights(experiment) == weights(reference)
    assert digests(experiment / "export") == digests(reference / "export")
