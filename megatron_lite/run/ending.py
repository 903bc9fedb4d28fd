"""The early end of a start: whatever ends it is reported once, by the thread that notices first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_lite.distributed import peers
from megatron_lite.distributed.meeting import Meeting
from megatron_lite.distributed.peer_watch import PeerWatch
from megatron_lite.distributed.peers import Place
from megatron_lite.distributed.progress import Progress, Status
from megatron_lite.errors import EXIT_PREEMPTED, PeerError, as_run_error
from megatron_lite.run import exit_status
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import is_first_on_machine, tell_torchrun
from megatron_lite.run.lost_peer import explained, hanging, timed_out
from megatron_lite.run.stacks import Stacks

REPORT_S = 10.0  # for another thread that is reporting already
LAUNCHER_S = 3.0  # the same, within the five seconds after the launcher's end
# A scheduler signals torchrun, which dies of SIGUSR1, and the ranks: within this time of each other.
SAME_SIGNAL_S = 1.0
SAVING_S = 1800.0  # for a save after a signal that torchrun has died of
ASK_S = 1.5  # ranks write their stacks within a second after they are asked


class Ending:
    """Reports why a start ends early, from any thread, and writes exit.json.

    Attributes:
        progress: what this rank is doing.
        places: of all ranks; empty before they have met.
        newest: finds iteration and folder of the newest checkpoint.
        kill_children: ends at once what must not outlive this process.
        is_saving: whether a stop signal has come, after which the ranks save and end.
    """

    def __init__(self, experiment_dir: str | None, rank: int) -> None:
        self.progress = Progress()
        self.stacks = Stacks(rank, self.progress)
        self.places: Sequence[Place] = ()
        self.newest: Callable[[], tuple[int, Path] | None] = lambda: None
        self.kill_children: Callable[[], None] = lambda: None
        self.is_saving: Callable[[], bool] = lambda: False
        self._run = -1  # until this start has a number
        self._directory, self._rank = experiment_dir, rank
        self._experiment: Experiment | None = None
        self._watch: PeerWatch | None = None
        self._hanging: list[Place] = []  # ranks of this machine, after a time-out
        self._recordable = False  # whether exit.json belongs to this start, which has not ended yet
        self._reporting = threading.Lock()
        self._done = threading.Event()  # nothing is left but the end of the process

    def met(self, meeting: Meeting) -> None:
        """Watch the other ranks from now on."""
        self.places = meeting.places
        self._watch = PeerWatch(meeting, self.progress, self._lost, lambda: self.stacks.write("as another rank asked"))

    def opened(self, experiment: Experiment) -> None:
        """Use the files of this start from now on."""
        self._experiment, self._run, self._recordable = experiment, experiment.run, experiment.root is not None
        self.stacks.open(experiment.artifacts)

    def finish(self) -> None:
        """Stop watching; call this on every rank before the first rank ends, and before the last exit.json."""
        self._recordable = False
        self._done.set()
        if self._watch is not None:
            self._watch.finish()
        self.stacks.close()

    def on_request(self) -> None:
        """Answer SIGUSR2, whose handler has written the stacks of this rank already: ask the other ranks for theirs."""
        self.stacks.complete()
        if self._watch is not None:
            self._watch.request_stacks()

    def report(self, error: BaseException) -> tuple[int, BaseException]:
        """Report an error; return the exit code and the error in its final words. Waits if another thread reports."""
        if not self._reporting.acquire(blocking=False):
            time.sleep(REPORT_S)  # the other thread ends the process
            os._exit(PeerError.exit_code)
        if self._watch is not None:
            self._watch.finish()
        final = self._explained(error)
        code = exit_status.report(
            final,
            self._own_directory(),
            prints=self._rank == 0,
            rank=self._rank,
            run=self._run,
            owns_folder=self._experiment is not None,
        )
        return code, final

    def release(self) -> None:
        """Let another start have the experiment directory."""
        if self._experiment is not None:
            self._experiment.release()

    def stopped(self, number: int) -> NoReturn:
        """Answer a stop signal before there is anything to save."""
        code = 128 + number
        if not self._reporting.acquire(timeout=REPORT_S):
            os._exit(code)
        if lost := peers.gone(self.places, self._rank, 0.0) if self.places else []:
            # torchrun signals the others when one has died.
            self._reporting.release()
            code, _ = self.report(PeerError(f"lost {lost[0]}"))
        elif self._recordable:
            code = EXIT_PREEMPTED
            name = signal.Signals(number).name
            message = f"stopped by {name} during the set-up: nothing to save; the same command starts again"
            if exit_status.failure_of_peer(self._directory, self._run) is None:
                exit_status.write_exit(self._own_directory(), code, "stopped", message, self._run)
            tell_torchrun(message)
            if self._rank == 0:
                exit_status.print_page(message)
        exit_status.leave(code)

    def launcher_gone(self, message: str) -> None:
        """Leave a word about the launcher's death, which ends this process right afterwards; let it save before."""
        time.sleep(SAME_SIGNAL_S)
        self._let_it_save()
        if not self._reporting.acquire(timeout=LAUNCHER_S):
            return
        with contextlib.suppress(Exception):
            self.kill_children()
        if is_first_on_machine():
            if self._recordable:
                exit_status.write_exit(self._own_directory(), PeerError.exit_code, "failed", message, self._run)
            exit_status.print_error(message, self._rank)

    def end_hanging(self) -> None:
        """Kill the ranks of this machine that hang, after a time-out: they keep their GPU, and torchrun waiting."""
        for place in self._hanging:
            _send(place, signal.SIGKILL)

    def _own_directory(self) -> str | None:
        """Return the directory for exit.json; None if it is another start's by now."""
        return None if self._experiment is not None and self._experiment.is_lost() else self._directory

    def _lost(self, error: PeerError) -> None:
        """End this process: a rank is gone, and the main thread may wait for it for an hour."""
        self._let_it_save()  # torchrun may be gone, with the store; a save without a rank fails by itself
        code, _ = self.report(error)
        with contextlib.suppress(Exception):
            self.kill_children()
        self.end_hanging()
        exit_status.leave(code)

    def _let_it_save(self) -> None:
        """Return when this process is not saving after a stop signal, or fails to; if it saves, wait for its end."""
        if not self.is_saving():
            return
        signal.alarm(0)  # see `launcher_watch.end_with_parent`
        self._done.wait(SAVING_S)
        if self._done.is_set():
            time.sleep(REPORT_S)

    def _explained(self, error: BaseException) -> BaseException:
        lost, statuses = as_run_error(error), list[Status]()
        if isinstance(lost, PeerError) and self._watch is not None:
            statuses = self._watch.statuses()
            if timed_out(lost):
                self._ask_for_stacks(statuses)
        newest, own = self.newest(), self.progress.status()
        return explained(error, self.places, self._rank, self._own_directory(), self._run, newest, statuses, own)

    def _ask_for_stacks(self, statuses: list[Status]) -> None:
        """Let every rank write its stacks; one that hangs may answer only to a signal."""
        assert self._watch is not None
        self._watch.request_stacks()
        self.stacks.write("after a time-out")
        beside = peers.neighbours(self.places, self._rank)
        self._hanging = [place for place in hanging(self.places, self._rank, statuses) if place in beside]
        for place in self._hanging:
            _send(place, signal.SIGUSR2)
        time.sleep(ASK_S)


def _send(place: Place, number: int) -> None:
    if not peers.has_ended(place.pid):
        with contextlib.suppress(OSError):
            os.kill(place.pid, number)
