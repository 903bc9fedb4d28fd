"""`train`: a run as the command would start it, in a process of its own, with its output shown
here."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.names import find_checkpoints
from megatron_lite.cli.checks import resolved
from megatron_lite.cli.parse import HelpRequested, parse
from megatron_lite.config import JsonObject
from megatron_lite.config.values import written
from megatron_lite.errors import EXIT_DONE, UsageError
from megatron_lite.run.exit_status import METRICS_FILE
from megatron_lite.run.run_process import LONGEST_ERROR, RunProcess
from megatron_lite.validation import planned_world_size

LOOK_S = 0.05  # between looks for output


@dataclass(frozen=True)
class Result:
    """The outcome of a run; docs/runs.md describes its folder.

    Attributes:
        folder: its experiment directory.
        status: done, or stopped: the same call goes on.
        metrics: the records of metrics.jsonl, without those that a later start has repeated.
        best_checkpoint: of those that are there, the one with the lowest validation loss, or the
            newest if none was validated; None without any.
    """

    folder: Path
    status: str
    metrics: list[dict[str, Any]] = field(repr=False)
    best_checkpoint: Path | None


def train(*flags: str, ranks: int = 1, **options: Any) -> Result:
    """Run or resume a training with the flags of pretrain_gpt: `train("--lr=1e-3", batch_size=8)`.

    An interrupt saves and returns; another one a second later ends the run at once.

    Args:
        flags: words of a command line.
        ranks: processes on this machine, one per GPU.
        options: more flags by name; numbers, texts, 0 and 1 or False and True, lists of words.

    Raises: RunError of the kind and with the words of the command's error.
    """
    words = [*flags, *(f"--{name}={_as_typed(value)}" for name, value in options.items())]
    folder = _checked(words, ranks)
    run = RunProcess(words, ranks, folder)
    with run.process:
        try:
            said = _shown(run)
        except BaseException:
            run.stop()
            raise
    if (failure := run.failure(said)) is not None:
        raise failure
    status = "done" if run.process.returncode == EXIT_DONE else "stopped"
    metrics = list(_metrics(folder))
    return Result(folder, status, metrics, _best_checkpoint(folder, metrics))


def _as_typed(value: Any) -> str:
    return written(tuple(value) if isinstance(value, list) else value)


def _checked(words: list[str], ranks: int) -> Path:
    """Return the experiment directory of a valid command line."""
    try:
        arguments = parse(words)
    except HelpRequested as page:
        raise UsageError(f"train() trains; for help, type pretrain_gpt --help:\n{page}") from None
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: write a number of at least 1")
    config = resolved(arguments, planned_world_size(arguments.config, ranks))
    if config.distributed.dry_run:
        raise UsageError("--dry_run=1: train() trains; leave dry_run out, or type the command")
    if (folder := arguments.config.run.experiment_dir) is None:
        raise UsageError(
            "--experiment_dir is missing: train() reads its result there; write experiment_dir='run'"
        )
    return Path(folder)


def _shown(run: RunProcess) -> str:
    """Print what a run prints until it ends, pass interrupts on, and return the end of it."""
    decoder, said = codecs.getincrementaldecoder("utf-8")("replace"), ""
    assert run.process.stdout is not None
    pipe = run.process.stdout.fileno()
    while True:
        try:
            has_ended = run.process.poll() is not None  # all that it wrote is in the pipe
            # A process that the run leaves behind may keep the pipe open.
            if select.select([pipe], [], [], LOOK_S)[0] and (data := os.read(pipe, 2**16)):
                text = decoder.decode(data)
                said = (said + text)[-LONGEST_ERROR:]
                sys.stdout.write(text)
                sys.stdout.flush()
            elif has_ended:
                return said
            else:
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            run.stop()


def _metrics(folder: Path) -> Iterator[JsonObject]:
    """Yield the records that count: the last one of an iteration and phase, and none that another
    start has trained anew."""
    found: dict[tuple[str, int], JsonObject] = {}
    run = None
    path = folder / METRICS_FILE
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a line that was cut
            record = json.loads(line)
            phase, iteration = record["phase"], record["iteration"]
            if "run" not in record:  # of `evaluate --tasks`, whose records add up
                record = {**found.get((phase, iteration), {}), **record}
            elif record["run"] != run:
                run, first = record["run"], iteration + (phase != "training")
                found = {key: kept for key, kept in found.items() if key[1] < first}
            found[phase, iteration] = record
    yield from found.values()


def _best_checkpoint(folder: Path, metrics: list[JsonObject]) -> Path | None:
    losses = {
        record["iteration"]: record["loss"]
        for record in metrics
        if record["phase"] == "validation" and record.get("loss") is not None
    }
    saved = find_checkpoints(folder / "checkpoints")  # newest first
    best = min(saved, key=lambda one: losses.get(one[0], math.inf), default=(0, None))
    return best[1]
