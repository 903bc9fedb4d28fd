"""End a start early: the first thread that notices the reason reports it once; write a rank's
stacks.

A backend's error about a lost rank becomes a message for the user: which rank, where, the likely
cause, and where the run resumes. Stacks are written on SIGUSR2 and on a timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_lite.distributed import processes
from megatron_lite.distributed.peer_watch import PART_S, Meeting, PeerWatch, statuses
from megatron_lite.distributed.processes import Place
from megatron_lite.distributed.traffic import Collective, Progress
from megatron_lite.errors import (
    EXIT_PREEMPTED,
    PeerError,
    RunError,
    StoppedError,
    UnreachableError,
    as_run_error,
    shorten,
)
from megatron_lite.run import exit_status
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import is_first_on_machine

REPORT_S = 10.0  # limit on waiting for another thread's report
TELL_S = 1.0  # limit on waiting for another thread that writes exit.json while the start continues
LAUNCHER_S = 3.0  # the same after the launcher's death, which allows five seconds
SAME_SIGNAL_S = (
    1.0  # between a scheduler's signals to torchrun, which SIGUSR1 kills, and to the ranks
)
SAVING_S = 1800.0  # limit on a save after a signal that killed torchrun
ASK_S = 1.5  # ranks write their stacks within a second of a request
KNOWING_PEER_S = (
    3.0  # a rank on the lost rank's machine knows more, and writes exit.json within this time
)
PAUSE_S = 10.0  # between stacks: if all ranks are signalled, each also requests all others'


class Ending:
    """Reports why a start ends early, from any thread, and writes exit.json.

    Attributes:
        progress: what this rank is doing.
        places: all ranks' processes; empty before they have met.
        experiment: this start's directory; None before rank 0 has taken it.
        newest: finds the newest checkpoint's iteration and folder.
        kill_children: kills child processes that must not outlive this one.
        is_saving: whether a stop signal has arrived, after which the ranks save and end.
    """

    def __init__(self, experiment_dir: str | None, rank: int) -> None:
        self.progress = Progress()
        self.progress.on_phase = lambda phase: self.tell("starting", f"in {phase}")
        self.stacks = Stacks(rank, self.progress)
        self.places: Sequence[Place] = ()
        self.newest: Callable[[], tuple[int, Path] | None] = lambda: None
        self.kill_children: Callable[[], None] = lambda: None
        self.is_saving: Callable[[], bool] = lambda: False
        self._directory, self._rank = experiment_dir, rank
        self.experiment: Experiment | None = None
        self._meeting: Meeting | None = None
        self._watch: PeerWatch | None = None
        self._hanging: list[Place] = []  # local ranks, after a timeout
        self._reporting = threading.Lock()
        self._done = threading.Event()  # only the end of the process remains

    def met(self, meeting: Meeting) -> None:
        """Start communicating with the other ranks, and watch them once all have met."""
        self._meeting, self.places = meeting, meeting.places
        if self.places:
            asked = "as another rank asked"
            self._watch = PeerWatch(
                meeting, self.progress, self._end, lambda: self.stacks.write(asked)
            )

    def tell(self, status: str, message: str = "") -> None:
        """Record in exit.json on rank 0 that the start continues; if another thread reports its
        end, wait for that."""
        with self._reporting:
            if self._rank == 0 and self._is_recorded():
                exit_status.write_exit(self._own_directory(), None, status, message, self._run)

    def finish(self) -> None:
        """Stop watching; call this on every rank before the first rank ends, and before the last
        exit.json."""
        self._done.set()
        if self._watch is not None:
            self._watch.finish()
        self.stacks.close()

    def on_request(self) -> None:
        """Answer SIGUSR2, whose handler has already written this rank's stacks: request the other
        ranks'."""
        self.stacks.complete()
        if self._watch is not None:
            self._watch.request_stacks()

    def report(self, error: BaseException) -> tuple[int, BaseException]:
        """Report an error, unless another thread is reporting one; return the exit code and the
        explained error."""
        if not self._reporting.acquire(timeout=TELL_S):
            time.sleep(REPORT_S)  # the other thread ends the process
            os._exit(PeerError.exit_code)
        if self._watch is not None:
            self._watch.finish()
        meeting, own = self._meeting, as_run_error(error)
        announces = not self.places or isinstance(own, StoppedError)
        error = own or error
        if meeting is not None and own is not None:
            first = meeting.bounded(
                lambda: meeting.announce(own) if announces else meeting.announced()
            )
            if announces or isinstance(first, StoppedError):
                error = first or own
        if isinstance(error, PeerError) and not isinstance(error, StoppedError) and self.places:
            error = self._explained(error)
        directory = self._own_directory()
        # machines may differ until ranks meet
        prints = self._rank == 0 or (not self.places and is_first_on_machine())
        code = exit_status.report(error, directory, prints=prints, rank=self._rank, run=self._run)
        if meeting is not None and (announces or isinstance(error, StoppedError)):
            meeting.bounded(meeting.part, PART_S)
        return code, error

    def stopped(self, number: int) -> NoReturn:
        """Handle a stop signal before there is anything to save."""
        where = f"stopped by {signal.Signals(number).name} in {self.progress.phase}"
        error: PeerError = StoppedError(f"{where}: nothing to save; {self._resumes()}")
        if lost := processes.gone(self._near()):
            # torchrun signals the remaining ranks when one has died.
            error = PeerError(f"lost {lost[0]}")
        self._end(error)

    def launcher_gone(self, message: str) -> None:
        """Report the launcher's death, after which this process ends; let a save finish first."""
        time.sleep(SAME_SIGNAL_S)
        self._let_it_save()
        if not self._reporting.acquire(timeout=LAUNCHER_S):
            return
        with contextlib.suppress(Exception):
            self.kill_children()
        if is_first_on_machine():
            if self._is_recorded():
                exit_status.write_exit(
                    self._own_directory(), PeerError.exit_code, "failed", message, self._run
                )
            exit_status.print_error(message, self._rank)

    def end_hanging(self) -> None:
        """Kill local ranks that hung until a timeout: they occupy their GPU and keep torchrun
        waiting."""
        for place in self._hanging:
            _send(place, signal.SIGKILL)

    def _is_recorded(self) -> bool:
        """Return whether exit.json belongs to this start and the start has not ended."""
        return self._run >= 0 and not self._done.is_set()

    @property
    def _run(self) -> int:
        """The number of this start; negative before this rank knows it."""
        return -1 if self.experiment is None else self.experiment.run

    def _own_directory(self) -> str | None:
        """Return the directory for exit.json; None if another start owns it by now."""
        return (
            None if self.experiment is not None and self.experiment.is_lost() else self._directory
        )

    def _near(self) -> list[Place]:
        """Return the other local ranks; empty before the ranks have met."""
        return processes.neighbors(self.places, self.places[self._rank]) if self.places else []

    def _end(self, error: RunError) -> NoReturn:
        """End this process: the main thread could wait for an hour for a lost rank."""
        if not isinstance(error, UnreachableError):
            self._let_it_save()  # torchrun and its store may be gone; a save that lacks a rank fails by itself
        code, _ = self.report(error)
        with contextlib.suppress(Exception):
            self.kill_children()
        self.end_hanging()
        exit_status.leave(code)  # and keep the lock: others would consider the directory lost

    def _let_it_save(self) -> None:
        """Wait for this process to end if it is saving after a stop signal; return if not, or if
        the save fails."""
        if not self.is_saving():
            return
        signal.alarm(0)  # see `launcher_watch.end_with_parent`
        if self._done.wait(SAVING_S):
            time.sleep(REPORT_S)

    # -- a lost rank
    # ---------------------------------------------------------------------------------------------

    def _explained(self, lost: PeerError) -> PeerError:
        """Return a lost peer's error with an explanation for the user, or the error that it was
        stopped."""
        near = self._near()
        machine = self.places[self._rank].machine
        directory = self._own_directory()
        # rather than a closed connection
        is_silent = "imed out" in lost.detail or "did not end within" in str(lost)
        # gloo's attempts to connect to a dead rank time out, too
        is_silent = is_silent and not processes.gone(near)
        rows = [] if self._watch is None else self._watch.rows()
        newest, stopped = statuses(rows), processes.stopped(near)
        hung = stopped or _furthest_behind(self.places, newest)
        if is_silent and self._watch is not None:
            self._ask_for_stacks(self._watch, [place for place in hung if place in near])
        found = processes.gone(near, 0.0 if is_silent else processes.LEAVING_S)
        others = list(
            dict.fromkeys(place.host for place in self.places if place.machine != machine)
        )
        deadline_s = time.monotonic() + (KNOWING_PEER_S if others and not found else 0.0)
        while (
            said := exit_status.failure_of_peer(directory, self._run)
        ) is None and time.monotonic() < deadline_s:
            time.sleep(processes.POLL_S)
        if said is not None and said[0] == PeerError.exit_code:
            message = said[1]
        elif said is not None and said[0] == EXIT_PREEMPTED:
            return StoppedError(said[1])
        elif said is not None:
            first_line, _, _ = said[1].partition("\n")
            message = (
                f"lost {processes.names(found) or 'a rank'}, which failed by itself: {first_line}"
            )
        elif lost.names_rank and not found:
            message = str(lost)
        else:
            why = (
                "stopped by a signal (SIGSTOP) or a debugger" if stopped else "alive, but it hangs"
            )
            if (
                self._watch is not None
                and not found
                and hung
                and not set(hung) & self._watch.heard(rows)
            ):
                why = "it cannot be reached, or its machine hangs; it was last heard of"
            message = self._loss(found) if found else self._silence(hung, why, others, newest)
        if directory is not None and not said:
            message += f"\n  {self._resumes()}"
        explanation = PeerError(message)
        explanation.detail = lost.detail or str(lost)
        return explanation

    def _ask_for_stacks(self, watch: PeerWatch, hanging: list[Place]) -> None:
        """Make every rank write its stacks; a hanging local rank may respond only to a signal."""
        watch.request_stacks()
        self.stacks.write("after a time-out")
        self._hanging = hanging
        for place in hanging:
            _send(place, signal.SIGUSR2)
        time.sleep(ASK_S)

    def _loss(self, found: Sequence[Place]) -> str:
        """Return the message about local ranks whose processes are gone."""
        host = self.places[self._rank].host
        killed = processes.oom_kills() - self.places[self._rank].oom_kills
        why = (
            "Without a message of its own, it was killed by a signal: SIGKILL is often the work of the kernel's "
            f"out-of-memory killer (see `dmesg` on {host})"
        )
        if killed > 0:
            victims = f"{killed} processes" if killed > 1 else "a process"
            why = f"The kernel's out-of-memory killer has ended {victims} on {host} since the start (see `dmesg` there)"
        return f"lost {processes.names(found)} while this rank was in {self.progress.status().place()}. {why}"

    def _silence(
        self, hung: Sequence[Place], why: str, others: Sequence[str], newest: Sequence[Collective]
    ) -> str:
        """Return the message when all local processes are alive. why: `hung` do not answer. others:
        other machines."""
        if hung:
            if newest:
                status, furthest = newest[hung[0].rank], max(status.number for status in newest)
                last = f"collective {status.number:,} ({status.kind or 'none'})"
                why += f" in {status.place()}, after {last}; the others wait in collective {furthest:,}"
            return f"no answer from {processes.names(hung)}: {why}"
        if others:
            return (
                f"no rank of {self.places[self._rank].host} is gone: one on another host ({shorten(others)}) died, "
                "hangs or cannot be reached; see the messages there"
            )
        return "all ranks are alive, but one does not answer: it hangs, or a step takes longer than --distributed_timeout"

    def _resumes(self) -> str:
        if (newest := self.newest()) is None:
            return "the same command starts again"
        iteration, folder = newest
        return (
            f"the same command resumes from the newest checkpoint, iteration {iteration} ({folder})"
        )


def _furthest_behind(places: Sequence[Place], statuses: Sequence[Collective]) -> list[Place]:
    """Return the ranks that the others wait for. statuses: each rank's progress, in rank order, if
    known."""
    least = min((status.number for status in statuses), default=0)
    behind = [
        place for place, status in zip(places, statuses, strict=False) if status.number == least
    ]
    return behind if len(behind) < len(statuses) else []


def _send(place: Place, number: int) -> None:
    if not processes.has_ended(place.pid):
        with contextlib.suppress(OSError):
            os.kill(place.pid, number)


class Stacks:
    """Writes this rank's thread stacks and newest collectives to stderr, or after `open` to a file.

    `faulthandler` writes the stacks inside the C signal handler, so that it works while a library
    has the GIL. The collectives follow as soon as a thread can run. Training continues.
    """

    def __init__(self, rank: int, progress: Progress) -> None:
        self._rank, self._progress = rank, progress
        self._path: Path | None = None
        self._descriptor = 2
        self._written_s = -PAUSE_S
        self._lock = threading.Lock()
        # for the wake-up descriptor of `StopSignal`
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
        self._register()

    def open(self, folder: Path | None) -> None:
        """Write to a file in this folder from now on; keep stderr if it is None or the file cannot
        be opened."""
        if folder is None:
            return
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"stacks_rank_{self._rank:03d}.txt"
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            self._register()

    def close(self) -> None:
        """Stop handling requests, and remove an empty file."""
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a late request must not end the process
        with contextlib.suppress(OSError):
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()  # fails if the folder has other files

    def write(self, reason: str) -> None:
        """Write all threads' stacks and the newest collectives, at most once every PAUSE_S
        seconds."""
        with self._lock:
            if time.monotonic() - self._written_s < PAUSE_S:
                return
            self._written_s = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(self._descriptor, all_threads=True)
            self._write_collectives(reason)

    def complete(self) -> None:
        """Append the newest collectives to the stacks written by the signal handler."""
        with self._lock:
            self._written_s = time.monotonic()
            self._write_collectives("SIGUSR2")
            # faulthandler resets this: do not interrupt system calls
            signal.siginterrupt(signal.SIGUSR2, False)

    def _write_collectives(self, reason: str) -> None:
        progress = self._progress
        lines = [
            f"Above: rank {self._rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {reason}.",
            f"It is in {progress.phase}, iteration {progress.iteration}. Its newest collectives:",
            *(f"  {one}" for one in progress.recent),
        ]
        with contextlib.suppress(OSError):
            os.write(self._descriptor, ("\n".join(lines) + "\n\n").encode())

    def _register(self) -> None:
        if self._descriptor == 2 and sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a closed stderr
            faulthandler.register(signal.SIGUSR2, self._descriptor, all_threads=True, chain=True)
            signal.siginterrupt(signal.SIGUSR2, False)
