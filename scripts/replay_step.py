"""Replay a bad step of a run with every tensor logged, and report whether it is reproduced.

    torchrun --nproc-per-node=N scripts/replay_step.py <experiment_dir>/runs/<k>/artifacts/bad_step_<iteration>

A run writes such a folder when it drops an update: see docs/runs.md. The replay loads the newest
checkpoint before the step, or starts from the initial weights, trains up to the step as the run
did, and writes the tensors of the step to FOLDER/replay, for scripts/compare_tensor_logs.py.
Nothing else is written. N must be the run's number of ranks; without torchrun it is 1. Exit codes:
0 the step has the same loss and gradient norm, 1 it does not; others as in training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.run.launcher_watch import LauncherWatch

if __name__ == "__main__":
    launcher_watch = LauncherWatch()  # before anything that takes time

from megatron_lite.checkpoint.names import is_folder, newest_before
from megatron_lite.checkpoint.saved_state import check_options, with_current_names
from megatron_lite.config import CheckpointConfig, Config, RunConfig, unflatten
from megatron_lite.config.values import FLAGS
from megatron_lite.distributed.agreement import together
from megatron_lite.errors import DamagedError, RunError, UsageError
from megatron_lite.monitor.tensor_debug import LEVELS, open_debugger
from megatron_lite.outputs.bad_steps import FILE_NAME, LARGEST_FILE_BYTES, examine
from megatron_lite.outputs.run import Run
from megatron_lite.pretrain import close, opened
from megatron_lite.run.exit_status import print_failure
from megatron_lite.run.host import prepare_libraries
from megatron_lite.run.launch import launch_rank, launch_world_size
from megatron_lite.run.regular_files import read_bytes
from megatron_lite.train import train_step

LEVEL = 6  # mean, deviation and 8 samples of each tensor


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of a bad step")
    parser.add_argument(
        "--checkpoint",
        help="checkpoint to start from; none: the initial weights (default: as recorded in the folder)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="(default: that of the run)"
    )
    return parser.parse_args(argv)


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the content of bad_step.json.

    Raises:
        UsageError: if the file is missing or does not describe a bad step.
    """
    path = folder / FILE_NAME
    try:
        content = json.loads(read_bytes(path, LARGEST_FILE_BYTES))
        for number in (content["iteration"], content["world_size"]):
            if type(number) is not int or number < 1:
                raise ValueError("not a description of a bad step")
        if not isinstance(content["checkpoint"], str | None):
            raise ValueError("its checkpoint is not a path")
        check_options(content["config"])
        content["numbers"] = (float.fromhex(content["loss"]), float.fromhex(content["grad_norm"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, DamagedError) as error:
        raise UsageError(f"{path}: {error}; give a folder bad_step_<iteration> of a run") from None
    return dict(content)


def configuration(
    content: dict[str, Any], checkpoint: Path | None, device: str | None = None
) -> Config:
    """Return the run's configuration with the checkpoint to load and without any output.

    Raises:
        UsageError: if this version of the program does not know an option.
    """
    earlier, saved = content["config"], with_current_names(content["config"])
    if earlier.get("load_pretrained_weights") is False:
        saved["load_parts"] = ["architecture"]
    elif earlier.get("load_pretrained_optimizer"):
        saved["load_parts"] = [
            "model",
            "optimizer",
            *["step"] * ("step" in saved.get("load_parts", [])),
        ]
    if unknown := [name for name in saved if name not in FLAGS]:
        raise UsageError(
            f"{FILE_NAME} has options that this version does not know: {', '.join(unknown[:5])}"
        )
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }
    config = unflatten(values)
    levels: dict[str, Any] = dict.fromkeys(LEVELS, LEVEL)
    quiet = RunConfig(log_interval=1, show_tensor_logs=False, save_tensor_logs=True, **levels)
    training = dataclasses.replace(
        config.training,
        sample_interval=None,
        export_interval=None,
        export_callback_script="",
        export_callback_env="",
    )
    distributed = dataclasses.replace(
        config.distributed, device=device or config.distributed.device
    )
    loading = CheckpointConfig(
        load_checkpoint_path=None if checkpoint is None else str(checkpoint),
        allow_data_change=config.checkpoint.allow_data_change,
    )
    return dataclasses.replace(
        config, run=quiet, training=training, distributed=distributed, checkpoint=loading
    )


def replay(run: Run, content: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Train up to the bad step and repeat it; return the exit code and a description of the
    result."""
    bad = content["iteration"]
    for iteration in range(run.iteration + 1, bad + 1):
        last = iteration == bad
        if last:
            run.logger.info("iteration %d: %s", bad, examine(run, bad)["in_words"])
            if run.distributed.rank == 0:
                folder.mkdir(exist_ok=True)
            run.distributed.barrier()
            run.debugger = open_debugger(run.config, run.logger, run.distributed, folder)
            assert run.debugger is not None, "the levels are on"
            run.debugger.attach(run.model)
        micro_batches = together(run.distributed, lambda: run.data.batch("training", iteration))  # noqa: B023
        update = train_step(run, micro_batches, iteration)
        run.iteration = iteration
    tokens = run.data.split("training", bad).samples * run.config.batch.sequence_length
    now = (float(update.loss) / tokens, float(update.grad_norm))
    then = content["numbers"]
    same = [number.hex() for number in now] == [number.hex() for number in then]
    words = f"loss {now[0]:.9g} and gradient norm {now[1]:.9g}, in the run {then[0]:.9g} and {then[1]:.9g}"
    dropped = "dropped again" if bool(update.verdict.skipped) else "not dropped"
    result = "the bad step is the same again" if same else "the bad step is not the same"
    return int(not same), f"{result}: {words}; its update is {dropped}; tensor logs are in {folder}"


def main(argv: Sequence[str] | None = None, launcher: LauncherWatch | None = None) -> int:
    """Replay; return the exit code. launcher: ends this process if torchrun dies."""
    args = options(argv)
    try:
        content = read_folder(args.folder)
        ranks = content["world_size"]
        if launch_world_size() != ranks:
            raise UsageError(
                f"the run had {ranks} ranks, and this is one of {launch_world_size()}: start with torchrun "
                f"--nproc-per-node={ranks} scripts/replay_step.py {args.folder}"
            )
        config = configuration(content, checkpoint_of(content, args.checkpoint), args.device)
    except RunError as error:
        return print_failure(error, "") if launch_rank() == 0 else error.exit_code
    prepare_libraries()
    with opened(config, (), launcher=launcher) as run:
        run.debugger = None  # until the last step
        for stage in run.model.stages:
            stage.observer = None
        run.logger.info(
            "replaying iteration %d from iteration %d", content["iteration"], run.iteration
        )
        code, message = replay(run, content, args.folder / "replay")
        close(run, 0, message)
    return code


def checkpoint_of(content: dict[str, Any], wanted: str | None) -> Path | None:
    """Return the checkpoint to start from: the wanted one, the recorded one, or the newest before
    the bad step.

    None: the initial weights.

    Raises:
        UsageError: if the run had checkpoints but none is left, or the wanted one is too new.
    """
    if wanted is not None and wanted != "none":
        path = Path(wanted).expanduser().absolute()
        if not path.name.isdecimal() or int(path.name) >= content["iteration"]:
            raise UsageError(
                f"--checkpoint={wanted}: give a folder checkpoints/<iteration> from before the bad step"
            )
        return path
    named = content["checkpoint"]
    if named is None or wanted is not None:
        return None
    found = (
        Path(named)
        if is_folder(Path(named))
        else newest_before(Path(named).parent, content["iteration"])
    )
    if found is None:
        raise UsageError(
            f"{named} is gone and there is no older checkpoint; write --checkpoint=<folder>, or --checkpoint=none to "
            "start from the initial weights"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(launcher=launcher_watch))
