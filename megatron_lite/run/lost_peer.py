"""The message about a lost rank: which one, where, why that may be, and from where the run resumes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.distributed import peers
from megatron_lite.distributed.peers import Place
from megatron_lite.distributed.progress import Status
from megatron_lite.errors import PeerError, as_run_error, shorten
from megatron_lite.run import exit_status

# A rank beside the lost one knows more, and writes exit.json within this time.
KNOWING_PEER_S = 3.0


def explained(
    error: BaseException,
    places: Sequence[Place],
    rank: int,
    experiment_dir: str | None,
    run: int,
    newest: tuple[int, Path] | None,
    statuses: Sequence[Status] = (),
    own: Status | None = None,
) -> BaseException:
    """Return a backend's error about a peer as a message for the user; every other error as it is.

    places: of all ranks; empty before they have met. newest: iteration and folder of the newest checkpoint. statuses:
    what each rank was doing last, in rank order; empty if unknown. own: what this rank was doing.
    """
    lost = as_run_error(error)
    if not isinstance(lost, PeerError) or not places:
        return error
    found = peers.gone(places, rank, 0.0 if timed_out(lost) else peers.LEAVING_S)
    others = list(dict.fromkeys(place.host for place in places if place.machine != places[rank].machine))
    said = exit_status.failure_of_peer(experiment_dir, run)
    deadline_s = time.monotonic() + KNOWING_PEER_S
    while not found and others and said is None and time.monotonic() < deadline_s:
        time.sleep(peers.POLL_S)
        said = exit_status.failure_of_peer(experiment_dir, run)
    if said is not None and said.exit_code == PeerError.exit_code:
        message = said.message
    elif said is not None:
        first_line, _, _ = said.message.partition("\n")
        message = f"lost {_names(found) or 'a rank'}, which failed by itself: {first_line}"
    elif lost.names_rank and not found:
        message = str(lost)
    else:
        message = _cause(found, places, rank, others, statuses, own)
        if experiment_dir is not None:
            message += f"\n  {_resumes(newest)}"
    explanation = PeerError(message)
    explanation.detail = lost.detail or str(lost)
    return explanation


def timed_out(lost: PeerError) -> bool:
    """Whether a rank does not answer, rather than that its connection is closed."""
    return "imed out" in lost.detail or "did not end within" in str(lost)


def hanging(places: Sequence[Place], rank: int, statuses: Sequence[Status]) -> list[Place]:
    """Return the ranks for which the others wait: stopped by a signal, or the ones that came least far."""
    if stopped := peers.stopped(places, rank):
        return stopped
    behind = [place for place, status in zip(places, statuses, strict=False) if status.number == _least(statuses)]
    return behind if len(behind) < len(statuses) else []


def _least(statuses: Sequence[Status]) -> int:
    return min(status.number for status in statuses)


def _cause(
    found: list[Place],
    places: Sequence[Place],
    rank: int,
    others: list[str],
    statuses: Sequence[Status],
    own: Status | None,
) -> str:
    host = places[rank].host
    when = "" if own is None else f" while this rank was in {own.place()}"
    if found and (killed := peers.oom_kills() - places[rank].oom_kills) > 0:
        processes = f"{killed} processes" if killed > 1 else "a process"
        return (
            f"lost {_names(found)}{when}. The kernel's out-of-memory killer has ended {processes} on {host} since the "
            "start (see `dmesg` there)"
        )
    if found:
        return (
            f"lost {_names(found)}{when}. Without a message of its own, it was killed by a signal: SIGKILL is often "
            f"the work of the kernel's out-of-memory killer (see `dmesg` on {host})"
        )
    if hung := hanging(places, rank, statuses):
        why = "stopped by a signal (SIGSTOP) or a debugger" if peers.stopped(places, rank) else "alive, but it hangs"
        if statuses:
            status = statuses[hung[0].rank]
            why += f" in {status.place()}, after collective {status.number:,} ({status.kind or 'none'}); the others "
            why += f"wait in collective {max(one.number for one in statuses):,}"
        return f"no answer from {_names(hung)}: {why}"
    if others:
        return (
            f"no rank of {host} is gone: one on another host ({shorten(others)}) died, hangs or cannot be reached; see "
            "the messages there"
        )
    return "all ranks are alive, but one does not answer: it hangs, or a step takes longer than --distributed_timeout"


def _resumes(newest: tuple[int, Path] | None) -> str:
    if newest is None:
        return "no checkpoint was saved yet: the same command starts again"
    iteration, folder = newest
    return f"the same command resumes from the newest checkpoint, iteration {iteration} ({folder})"


def _names(places: Sequence[Place]) -> str:
    return shorten([str(place) for place in places], limit=3)
