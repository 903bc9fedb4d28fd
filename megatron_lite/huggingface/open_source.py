"""Open the weights in a folder: a Hugging Face model, or the newest good one of our checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.checkpoint import files
from megatron_lite.config import ModelConfig
from megatron_lite.errors import CheckpointError, DamagedError, RunError, shorten
from megatron_lite.huggingface.folder_kind import source_folders
from megatron_lite.huggingface.huggingface_source import HuggingFaceSource
from megatron_lite.huggingface.weight_source import CheckpointSource, WeightSource


def open_one(
    folder: Path, kind: str, model: ModelConfig | None = None, weights: str = "raw", state: bool = False
) -> WeightSource:
    """Open exactly this folder; see `open_source`.

    Raises:
        DamagedError: if the folder is a damaged checkpoint.
        CheckpointError: if it cannot be used.
    """
    if kind == "distributed":
        return CheckpointSource(folder, weights == "average", state)
    if weights == "average":
        raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights; leave --weights=average out")
    return HuggingFaceSource(folder, model)


def open_source(
    folder: Path,
    kind: str | None = None,
    model: ModelConfig | None = None,
    weights: str = "raw",
    whole: bool = False,
    state: bool = False,
) -> WeightSource:
    """Open a Hugging Face folder, a checkpoint, or the newest good one in a folder of checkpoints.

    Args:
        kind: one of folder_kind.KINDS; None: whichever the folder holds.
        model: the resolved model to fill; None: the model that the files describe.
        weights: raw, or average: the running averages in a checkpoint.
        whole: with several checkpoints, also read the values: damaged ones are skipped with a warning, as on resume.
        state: moments and averages will also be read; see `CheckpointSource`.

    Raises:
        CheckpointError: if there is none; suggests a fix.
    """
    found, paths = source_folders(folder, kind)
    problems = []
    for path in paths:
        try:
            source = open_one(path, found, model, weights, state)
            if len(paths) == 1 or not whole or (problem := source.damage()) is None:
                return source
            source.close()
        except DamagedError as error:
            problem = str(error)
        problems.append(f"{path.name}: {problem}" if len(paths) > 1 else problem)
        if len(paths) > 1:
            files.logger.warning("checkpoint %s: %s; skipped, looking for an older one", path, RunError(problem))
    raise unusable(folder, problems)


def unusable(folder: Path, problems: list[str]) -> CheckpointError:
    """Return the error for a folder in which all checkpoints are damaged."""
    return CheckpointError(f"{folder}: no usable checkpoint: {shorten(problems)}; restore one")
