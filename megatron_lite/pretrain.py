"""Pretrain: join the other ranks, set up, train in a `with` block, and close the run or report an
error.

Either way, rank 0 writes an HTML report.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_lite.checkpoint.names import newest_checkpoint
from megatron_lite.config import Config
from megatron_lite.config.values import alike
from megatron_lite.corpus.confined import end_process
from megatron_lite.corpus.tokenizer_folder import compare_exports, has_library
from megatron_lite.distributed import startup
from megatron_lite.distributed.agreement import rank_0_works, together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    LESS_MEMORY,
    OUT_OF_MEMORY,
    DataError,
    OutOfMemoryError,
    Remedy,
    RunError,
    StorageError,
    as_installed,
    as_run_error,
)
from megatron_lite.huggingface.architectures import check_exports
from megatron_lite.monitor.export_callback import STOPPED_WAIT_S
from megatron_lite.monitor.logging import get_logger, log_both
from megatron_lite.monitor.memory_history import write_snapshot
from megatron_lite.outputs.run import Run
from megatron_lite.planner.auto import device_memory_bytes
from megatron_lite.planner.search import Search, less_memory, remedies
from megatron_lite.reports.report import REPORT_FILE, write_report
from megatron_lite.run import exit_status
from megatron_lite.run.ending import Ending
from megatron_lite.run.exit_status import METRICS_FILE
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.host import choose_threads
from megatron_lite.run.launch import launch_rank, tell_torchrun
from megatron_lite.run.launcher_watch import LauncherWatch
from megatron_lite.run.stop_files import StopFiles
from megatron_lite.run.stop_signal import StopSignal, idle_limit, time_limits
from megatron_lite.setup_run import build
from megatron_lite.train import train
from megatron_lite.validation.rules import Note

_LESS_HOST_MEMORY = "try fewer --num_workers, --async_checkpoint=0, or fewer ranks per machine"
# Size limits of metrics.jsonl, which is read at 20 MB/s on a busy core: a stopped or failed run has
# seconds left.
LARGEST_BYTES, LARGEST_IN_A_HURRY_BYTES = 2**27, 2**25
LEAVE_TOGETHER_S = (
    5.0  # ranks that fail with one error wait this long for each other before they end
)


def pretrain(
    config: Config,
    notes: tuple[Note, ...],
    environment: Mapping[str, str] | None = None,
    launcher: LauncherWatch | None = None,
    asked: Config | None = None,
) -> int:
    """Train as configured and return the exit code, which exit.json repeats.

    notes: from the command line, logged below the banner. environment: variables of
    --export_callback_env. launcher: ends this process if torchrun dies. asked: `config` as typed.
    """
    with opened(config, notes, environment, launcher, asked) as run:
        code, message = train(run)
        close(run, code, message)
    return code


@contextlib.contextmanager
def opened(
    config: Config,
    notes: tuple[Note, ...],
    environment: Mapping[str, str] | None = None,
    launcher: LauncherWatch | None = None,
    asked: Config | None = None,
) -> Iterator[Run]:
    """Join the other ranks and set up a run for a `with` block, which must end with `close`.

    An error here or in the block is reported and ends the process. asked: `config` as typed.
    """
    rank = launch_rank()
    run = None
    distributed = None
    experiment = None
    asked = asked or config
    ending = Ending(config.run.experiment_dir, rank)
    stop = StopSignal(ending.stopped, ending.on_request)
    stop.limits = time_limits(config)
    ending.is_saving = lambda: stop.is_saving
    if launcher is not None:
        launcher.on_gone = ending.launcher_gone
    try:
        options = alike(config, asked)
        experiment = ending.experiment = Experiment(config, rank, stop.fail)
        checkpoints = experiment.checkpoints
        ending.newest = lambda: newest_checkpoint(checkpoints)
        ending.progress.enter("the rendezvous")
        distributed = startup.initialize(config.distributed, ending.progress, ending.met, options)
        if distributed.device.type == "cpu":
            local_world_size, sharing = distributed.local_world_size, distributed.sharing_cores
            torch.set_num_threads(choose_threads(config, local_world_size, sharing).number)
        experiment.share(distributed)
        ending.stacks.open(experiment.artifacts)
        run = build(config, distributed, experiment, stop, notes, environment, asked)
        ending.kill_children, run.ending = run.callback.kill, ending
        file, model_type = run.config.data.tokenizer_file, check_exports(run.config)
        if rank == 0 and file and model_type and has_library():
            run.comparison = compare_exports(file, model_type, run.logger.warning)
        run.logs_early = asked.run.log_interval is None
        minutes, saving = config.checkpoint.checkpoint_minutes, asked.checkpoint
        if minutes is not None and saving.checkpoint_minutes is None:
            run.saves_by_default = saving.max_checkpoints is None
            run.logger.info(
                "without --checkpoint_interval it saves every %g minutes (--checkpoint_minutes)",
                minutes,
            )
        stop.saves = True
        for limit in stop.limits:
            run.logger.info(limit.describe())
        if rank == 0 and (root := experiment.root) is not None:
            run.stop_files = StopFiles(
                Path(config.training.stop_file or root / "stop"), root / "save"
            )
            stop.limits = (*stop.limits, run.stop_files.limit)
        if (warning := idle_limit(config, stop.limits)) is not None:
            run.logger.warning(warning)
        together(distributed, lambda: experiment.record(run.shown_config) if rank == 0 else None)
        ending.tell("running")
        yield run
    except BaseException as raised:
        code, error = ending.report(with_remedies(raised, config, asked, distributed, experiment))
        if run is not None:
            if run.memory_history is not None and not (
                isinstance(error, OutOfMemoryError) and error.snapshot
            ):
                run.memory_history.finish()  # a snapshot would contain the history already
            run.callback.close(0.0)
            end_process()
            run.data.close()  # workers that are still starting would outlive this process
            run.trackers.close(code)
            leave_report(run, in_a_hurry=True, failed=True)
            if isinstance(error, RunError) and error.agreed:
                _finish_save(run, error)
        if (
            distributed is not None
            and experiment is not None
            and isinstance(error, RunError)
            and error.agreed
        ):
            # Leaving first could cut off a peer's last step or its report.
            distributed.wait_for_peers(LEAVE_TOGETHER_S)
        ending.end_hanging()
        if experiment is not None:
            experiment.release()
        # a normal exit could hang: peers may wait for this rank in a collective
        exit_status.leave(code)


def with_remedies(
    error: BaseException,
    config: Config,
    asked: Config,
    distributed: Distributed | None,
    experiment: Experiment | None,
) -> BaseException:
    """Return the error, or an out-of-memory error with remedies and a memory snapshot.

    config: resolved. asked: as typed.
    """
    expected = as_run_error(error)
    if (
        not isinstance(expected, OutOfMemoryError)
        or distributed is None
        or not str(expected).startswith(OUT_OF_MEMORY)
    ):
        return error  # another kind of error, or one of our own messages, which already name a fix
    reason = str(expected).removesuffix(f"; {LESS_MEMORY}")
    on_gpu = distributed.device.type == "cuda"
    snapshot = ""
    found = list[Remedy]()
    advice = ""
    if on_gpu and (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
        advice = _LESS_HOST_MEMORY  # the host ran out of memory, not the device
    else:
        if on_gpu and experiment is not None and experiment.root is not None:
            path, failure = write_snapshot(experiment.root, distributed)
            snapshot = "" if failure else str(path)
        # memory is scarce: a failed search must not hide the error
        with contextlib.suppress(Exception):
            device_bytes = expected.free_bytes or device_memory_bytes(
                distributed.device, distributed.local_world_size
            )
            batch_size, device_type = config.batch.batch_size or 1, distributed.device.type
            search = Search(asked, batch_size, distributed.world_size, device_type, device_bytes)
            found = remedies(search)
            advice = less_memory(search)
    explained = OutOfMemoryError(f"{reason}; {advice or LESS_MEMORY}")
    explained.remedies = found
    explained.snapshot = snapshot
    explained.agreed = expected.agreed
    log_both(get_logger(), console="", file="\n".join([f"ERROR: {explained}", *explained.lines()]))
    return explained


def _finish_save(run: Run, error: RunError) -> None:
    """Publish the checkpoint that was being written when all ranks failed; it predates the
    error."""
    if run.saving is not None and not isinstance(error, StorageError):
        with contextlib.suppress(Exception):  # the error that ends the run is the one to report
            run.saving.finish(hurry=True)
            run.logger.info("saved %s, which was being written", run.saving.save.folder)


def close(run: Run, code: int, message: str) -> None:
    """End a run without an error: wait for its callback, write exit.json, leave the process groups.

    message: how the run ended.
    """
    distributed = run.distributed
    distributed.progress.phase = "the end"
    run.data.close()
    run.model.finish()
    if run.memory_history is not None:
        run.memory_history.finish()
    limit_s = (
        STOPPED_WAIT_S if code == EXIT_PREEMPTED else run.config.distributed.startup_timeout / 2
    )
    run.callback.close(limit_s, lambda: code != EXIT_PREEMPTED and bool(run.stop.received))
    if run.comparison is not None and code == EXIT_DONE:
        run.comparison.join(STOPPED_WAIT_S)
    end_process()
    run.trackers.close(code)
    together(distributed, run.experiment.check)
    if run.ending is not None:
        run.ending.finish()
    if distributed.rank == 0:
        status = "done" if code == EXIT_DONE else "stopped"
        exit_status.write_exit(
            run.config.run.experiment_dir, code, status, message, run.experiment.run
        )
    if run.stop_files is not None:
        run.stop_files.obeyed(run.stop_files.stop)
    leave_report(run, in_a_hurry=code != EXIT_DONE)
    # after exit.json, as the launcher may not wait for so long
    if run.config.checkpoint.mirror is not None:
        mirror, limit_s = run.mirror, run.config.distributed.startup_timeout / 2
        stop = None if code == EXIT_PREEMPTED else run.stop
        rank_0_works(distributed, lambda: mirror.close(limit_s, stop) if mirror else None)
    # now, as writing a trace may take longer than a stopped run has left
    if run.profiles is not None:
        run.profiles.close()
    log_ending(run, message)
    if code != EXIT_DONE and tell_torchrun(message):
        run.logger.info("the traceback that follows is torchrun's way to report the signal")
    distributed.barrier()
    run.experiment.release()
    run.stop.ignore()  # a peer may end from here on, and torchrun then signals this rank
    distributed.close()


def log_ending(run: Run, message: str) -> None:
    """Log the closing message, as a warning if the last updates were dropped."""
    run.logger.log(
        logging.WARNING if run.optimizer.guard.dropped.streak() else logging.INFO, message
    )


def _next_step(config: Config) -> str:
    """Return what to try with the weights of a finished run, after "; ", or nothing."""
    random_base = config.adapters.lora_rank and config.source.pretrained_checkpoint_path is None
    if config.data.tokenizer_file is None or random_base:
        return ""
    model = f"--model {config.run.experiment_dir}"
    return "; continue a text with: " + as_installed(
        f"python scripts/generate.py {model} --prompt TEXT"
    )


def leave_report(run: Run, in_a_hurry: bool, failed: bool = False) -> None:
    """Write report.html on rank 0, or log in one line why not; skip a lost directory or a run
    without records.

    failed: the run ends with an error, which must be the last line, so log nothing.
    """
    root = run.experiment.root
    if root is None or not run.config.run.report or run.distributed.rank != 0:
        return
    limit = LARGEST_IN_A_HURRY_BYTES if in_a_hurry else LARGEST_BYTES
    later = as_installed(f"python scripts/report_run.py {root}")
    try:
        if run.experiment.is_lost() or not (root / METRICS_FILE).exists():
            return
        if (root / METRICS_FILE).stat().st_size > limit:
            if not failed:
                run.logger.info(
                    "no %s now: %s is large; write it with: %s", REPORT_FILE, METRICS_FILE, later
                )
            return
        write_report([root], root / REPORT_FILE)
        if not in_a_hurry:
            run.logger.info("%s shows this run%s", root / REPORT_FILE, _next_step(run.config))
    except Exception as error:  # the report must not fail the run
        if not failed and not isinstance(error, DataError):
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            run.logger.warning("no %s: %s; write it with: %s", REPORT_FILE, reason, later)
