#!/usr/bin/env python3
"""Pretrain a GPT: `python pretrain_gpt.py --help`, or `torchrun --nproc-per-node=N pretrain_gpt.py
...`.

pip installs a command and a module: `pretrain_gpt ...`, and `torchrun --nproc-per-node=N -m
pretrain_gpt ...`. Data workers import this file again, so everything that a run needs is imported
inside of `main`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from megatron_lite.run.launcher_watch import LauncherWatch


def main(argv: list[str], launcher: LauncherWatch | None = None) -> int:
    """Parse, validate, train; return the exit code. Nothing heavy is imported before the flags are
    known to be good.

    launcher: ends this process if torchrun dies.
    """
    from megatron_lite.cli.checks import resolved
    from megatron_lite.cli.parse import HelpRequested, folder_of, parse
    from megatron_lite.errors import EXIT_DONE, RunError
    from megatron_lite.run import exit_status
    from megatron_lite.run.host import prepare_libraries
    from megatron_lite.run.launch import (
        is_first_on_machine,
        launch_rank,
        launch_world_size,
        slurm_variables,
    )
    from megatron_lite.run.secrets import without_secrets
    from megatron_lite.validation import planned_world_size

    experiment_dir = None
    try:
        os.environ |= slurm_variables(os.environ)
        arguments = parse(argv)
        experiment_dir = folder_of(arguments.config)
        world_size = planned_world_size(arguments.config, launch_world_size())
        config = resolved(arguments, world_size)
        if config.distributed.dry_run:
            from megatron_lite.planner.report import dry_run

            words = without_secrets(argv)
            return dry_run(
                config,
                arguments.config,
                world_size,
                arguments.notes,
                words,
                prints=launch_rank() == 0,
            )
    except HelpRequested as request:
        if launch_rank() == 0:
            exit_status.print_page(str(request))
        return EXIT_DONE
    except RunError as error:
        return exit_status.report(
            error, error.experiment_dir or experiment_dir, prints=is_first_on_machine()
        )

    prepare_libraries()
    gc.disable()  # imports leave no garbage, and looking for some takes a tenth of their time
    from megatron_lite.pretrain import pretrain

    gc.enable()
    sys.argv[1:] = without_secrets(argv)  # some libraries record the command line
    return pretrain(config, arguments.notes, arguments.environment, launcher, arguments.config)


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """End the process after a stop signal, as nothing was begun."""
    from megatron_lite.errors import EXIT_PREEMPTED

    os._exit(EXIT_PREEMPTED)


def command() -> int:
    """Run the program on the words of the command line; the command that pip installs."""
    stops = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    for number in stops:  # until the run handles them
        signal.signal(number, leave)

    from megatron_lite.run.launcher_watch import LauncherWatch

    launcher_watch = LauncherWatch()  # before anything that takes time

    from megatron_lite.run.exit_status import name_missing_package

    sys.excepthook = name_missing_package
    code = main(sys.argv[1:], launcher_watch)
    for number in stops:  # the end is known; without a handler a signal would change the exit code
        signal.signal(number, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(command())
