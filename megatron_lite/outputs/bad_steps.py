"""Write a folder for a bad step: everything its replay needs, and the first tensor that was not
finite.

The device drops a bad update unknown to the host, which learns of it at a log line or a save. The
forward and backward passes of the step are then repeated, and every tensor is checked. They change
no weight; their gradients overwrite the newest step's, which are no longer needed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.names import newest_before, parse_json
from megatron_lite.config import JsonObject, flatten
from megatron_lite.config.dimensions import DATA, SAMPLES
from megatron_lite.distributed.agreement import together
from megatron_lite.optimizer.bad_steps import BadStep
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.step_inputs import counted_labels, step_inputs
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.regular_files import read_bytes
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.seeds import dropout_seed
from megatron_lite.zero.finite import not_finite
from megatron_lite.zero.stage import Observer

FILE_NAME = "bad_step.json"
LARGEST_FILE_BYTES = 2**24
MOST_FOLDERS = 3  # per start; each takes some 10 KB and costs a step


class Watch(Observer):
    """Records on the device whether each tensor of a step is finite, in order of computation.

    layers: names in the order of the model.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._tensors: list[
            tuple[bool, int, int, str]
        ] = []  # gradient?, micro-batch, position along its path, name
        self._finite: list[Tensor] = []

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        self._add((False, micro_batch, self._layers.index(name), f"the output of {name}"), output)

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        if gradient is not None:
            self._add(
                (
                    True,
                    micro_batch,
                    -self._layers.index(name),
                    f"the gradient of the input of {name}",
                ),
                gradient,
            )

    def first(self) -> tuple[int, tuple[bool, int, int, str]] | None:
        """Return index and description of the first non-finite tensor, or None (reads the
        device)."""
        finite = torch.stack(self._finite).tolist() if self._finite else []
        return (
            (finite.index(False), self._tensors[finite.index(False)]) if False in finite else None
        )

    def _add(self, described: tuple[bool, int, int, str], tensor: Tensor) -> None:
        self._tensors.append(described)
        self._finite.append(tensor.isfinite().all())


def leave_bad_step(run: Run, step: BadStep | None) -> None:
    """Examine a bad step and write its folder, once per step. Collective.

    On a full disk the run continues without the folder.
    """
    artifacts = run.experiment.artifacts
    if (
        step is None
        or artifacts is None
        or step.iteration in run.bad_steps
        or len(run.bad_steps) >= MOST_FOLDERS
    ):
        return
    run.bad_steps.append(step.iteration)
    with run.timer.excluded(), run.distributed.traffic.paused():
        found = examine(run, step.iteration)
    folder = artifacts / f"bad_step_{step.iteration}"
    if run.distributed.rank != 0:
        return
    try:
        run.experiment.check()
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(
            folder / FILE_NAME, (json.dumps(content(run, step, found), indent=2) + "\n").encode()
        )
    except OSError as error:
        run.logger.warning(
            "cannot write %s: %s; the run continues without it", folder, error.strerror or error
        )
        return
    first, last = _samples(run, step.iteration)
    own = newest_before(run.experiment.checkpoints, step.iteration)
    back = "in another --experiment_dir" if own is None else f"--resume_iteration={own.name}"
    run.logger.warning(
        "bad step %d: %s; to replay it: python scripts/replay_step.py %s; to leave its samples out: "
        "--skip_samples=%d-%d %s",
        step.iteration,
        found["in_words"],
        folder,
        first,
        last,
        back,
    )


def _samples(run: Run, iteration: int, first: int = 0, count: int | None = None) -> tuple[int, int]:
    """Return first and last of `count` samples from an iteration's `first`, by default of all, as
    numbers of the run's order."""
    schedule, skipped = batch_schedule(run.config.batch), run.data.counts.skipped
    before = schedule.consumed_samples(iteration - 1) + first
    count = schedule.batch_size(iteration) if count is None else count
    return skipped.position(before), skipped.position(before + count - 1)


def content(run: Run, step: BadStep, found: JsonObject) -> JsonObject:
    """Return the JSON content for a bad step's folder."""
    older = newest_before(run.experiment.checkpoints, step.iteration)
    if older is None and run.resumed.iteration < step.iteration:
        older = run.resumed.folder  # from --load_checkpoint_path
    first, last = _samples(run, step.iteration)
    return {
        "iteration": step.iteration,
        "loss": step.numbers[0].hex(),
        "grad_norm": step.numbers[1].hex(),
        "limits": [limit.hex() for limit in step.limits],
        "found": found,
        "weights_of_iteration": run.iteration - run.optimizer.guard.dropped.streak(),
        "first_sample": first,
        "samples": last + 1 - first,
        "world_size": run.distributed.world_size,
        "checkpoint": None if older is None else str(older.absolute()),
        "config": flatten(run.config),
    }


def held_checkpoints(root: Path) -> set[int]:
    """Return the iterations of the checkpoints that replays of the newest bad steps start from.

    root: the experiment directory. At most MOST_FOLDERS bad steps count, so that many starts do not
    fill the disk.
    """
    held: set[int] = set()
    with contextlib.suppress(OSError):  # a folder is being deleted
        paths = (root / "runs").glob(f"*/artifacts/bad_step_*/{FILE_NAME}")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[-MOST_FOLDERS:]:
            # no checkpoint, or a damaged file
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                held.add(
                    int(Path(parse_json(read_bytes(path, LARGEST_FILE_BYTES))["checkpoint"]).name)
                )
    return held


def examine(run: Run, iteration: int) -> JsonObject:
    """Repeat an iteration's passes with the current weights and find the first non-finite tensor.

    Collective; all ranks get the same answer. No weight, moment or counter changes.
    """
    watch = Watch([layer.name for stage in run.model.all_stages for layer in stage.layers])
    distributed = run.distributed
    before = [stage.observer for stage in run.model.stages]
    run.model.observe(watch)
    try:
        micro_batches = together(distributed, lambda: run.data.batch("training", iteration))
        counted = counted_labels(run, micro_batches)
        run.model.forward_backward(step_inputs(run, micro_batches, iteration, counted))
    finally:
        for stage, observer in zip(run.model.stages, before, strict=True):
            stage.observer = observer
    distributed.wait_for_device()
    mine = {"first": watch.first(), "squares": _squares(run), "state": not_finite(run.model)}
    everyone = distributed.gather_objects(mine)
    found: JsonObject = {}
    firsts: dict[
        int, tuple[int, int, Any]
    ] = {}  # the lowest index of each pipeline rank, with rank and description
    place = distributed.grid.place
    for rank, one in enumerate(everyone):
        if one["first"] is not None:
            index, described = one["first"]
            pipeline_rank = place(rank)["pipeline"]
            firsts[pipeline_rank] = min(
                firsts.get(pipeline_rank, (index, rank, described)), (index, rank, described)
            )
    if firsts:  # among several pipeline ranks, the one that the others follow
        _, rank, (_, micro_batch, _, name) = min(firsts.values(), key=itemgetter(2))
        piece = run.data.split("training", iteration).piece(micro_batch, place(rank)[SAMPLES])
        first, last = _samples(run, iteration, *piece)
        found |= {
            "tensor": name,
            "rank": rank,
            "micro_batch": micro_batch,
            "first_sample": first,
            "samples": last + 1 - first,
            "dropout_seed": dropout_seed(
                run.config.distributed.seed, iteration, micro_batch, place(rank)[DATA]
            ),
        }
    squares: dict[str, float] = defaultdict(float)
    for name, square in (pair for one in everyone for pair in one["squares"].items()):
        squares[name] += square
    broken = [
        spec.name for spec in run.model.specs() if not math.isfinite(squares.get(spec.name, 0.0))
    ]
    states = [f"{one['state']} on rank {rank}" for rank, one in enumerate(everyone) if one["state"]]
    found |= {"parameters_not_finite": broken[:20], "state_not_finite": states[:20]}
    if not broken and squares:
        name = max(squares, key=lambda name: squares[name])
        found |= {"largest_gradient": name, "share": squares[name] / (sum(squares.values()) or 1.0)}
    return found | {"in_words": _in_words(found)}


def _squares(run: Run) -> dict[str, float]:
    """Return each parameter's sum of squared gradients over this rank's elements, without
    replicas."""
    sums: dict[str, Tensor] = {}
    for _, part in run.model.parts():
        for spec, tile in part.layout.tiles(part.rank) if part.has_state else ():
            for low, high in part.counted(tile.offset, tile.end):
                square = part.grad_shard[low:high].double().square().sum()
                sums[spec.name] = sums[spec.name] + square if spec.name in sums else square
    return dict(zip(sums, torch.stack(list(sums.values())).tolist() if sums else [], strict=True))


def _in_words(found: JsonObject) -> str:
    if found["state_not_finite"]:
        return f"not finite before the step: {found['state_not_finite'][0]}"
    if "tensor" in found:
        first, last = found["first_sample"], found["first_sample"] + found["samples"] - 1
        where = f"rank {found['rank']}, micro-batch {found['micro_batch'] + 1}, samples {first} to {last}"
        gradients = "".join(
            f"; of its gradients first {name}" for name in found["parameters_not_finite"][:1]
        )
        return f"the first tensor that is not finite is {found['tensor']} ({where}){gradients}"
    if found["parameters_not_finite"]:
        return (
            f"all layers are finite, but the gradient of {found['parameters_not_finite'][0]} is not"
        )
    return (
        "with the current weights all its tensors are finite, and the largest gradient is that of "
        f"{found['largest_gradient']}, {100 * found['share']:.0f}% of the squared norm"
    )
