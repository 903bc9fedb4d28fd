"""Run training in a process of its own, started as from a command line, and tell how it ended.

Whatever training does to its process (signal handlers, threads that end it, process groups) happens
there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from megatron_lite.config import JsonObject
from megatron_lite.errors import EXIT_DONE, EXIT_PREEMPTED, RunError
from megatron_lite.run.exit_status import CHECKOUT, EXIT_FILE

TIED = Path(__file__).with_name("tied_process.py")


LONGEST_ERROR = 10_000  # characters at the end of the output in which an error is looked for


def visible_gpus() -> list[str]:
    """Return the GPUs that runs may use, in the words of CUDA_VISIBLE_DEVICES; imports torch."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [*map(str, range(count))]


def program(ranks: int) -> list[str]:
    """Return the words after `python` that start a run of this many ranks on this machine."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    is_checkout = (CHECKOUT / "setup.py").is_file()
    return launcher + (
        [str(CHECKOUT / "pretrain_gpt.py")] if is_checkout else ["-m", "pretrain_gpt"]
    )


class RunProcess:
    """A run in a session of its own. It saves and ends when asked to, or when this process dies.

    Args:
        words: its command line.
        folder: its experiment directory.
        output: file for what it prints; None: the pipe `process.stdout`.
        variables: of its environment, beside those of this process.
    """

    def __init__(
        self,
        words: Sequence[str],
        ranks: int,
        folder: Path,
        output: IO[bytes] | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._exit_file = folder / EXIT_FILE
        self._before = self._ending()
        self._was_stopped = False
        own = [sys.executable, "-IS", str(TIED), str(os.getpid()), sys.executable]
        self.process = subprocess.Popen(
            [*own, *program(ranks), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of this process's group is passed on once
            env={**os.environ, **variables},
        )

    def stop(self) -> None:
        """Ask the run to save and end, as Ctrl-C does; asked again a second later, it ends at
        once."""
        self._was_stopped = True
        self.process.send_signal(signal.SIGINT)

    def failure(self, said: str) -> RunError | None:
        """Wait for the end and return why the run failed, in its own words; None if it is done or
        was stopped.

        said: the end of its output, which has the words of a start that did not get the folder.
        """
        code, ending = self.process.wait(), self._ending()
        own = ending.get("exit_code") if ending != self._before else None  # torchrun flattens codes
        if (
            code == EXIT_DONE
            or EXIT_PREEMPTED in (code, own)
            or (self._was_stopped and own is None)
        ):
            return None
        printed = re.split(r"^ERROR(?: on rank \d+)?: ", said, flags=re.M)
        if own is not None:
            message = str(ending["message"])
        elif len(printed) > 1:
            message = printed[1].strip()
        else:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            message = f"the run ended without a word ({name}); dmesg tells of a lack of memory"
        kinds = reversed(RunError.__subclasses__())  # of several with a code, the first one
        return {kind.exit_code: kind for kind in kinds}.get(own or code, RunError)(message)

    def _ending(self) -> JsonObject:
        with contextlib.suppress(OSError, ValueError):
            content: JsonObject = json.loads(self._exit_file.read_bytes())
            return content
        return {}
