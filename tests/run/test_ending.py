"""Whatever ends a start early leaves its reason in exit.json, once: of a lost rank what is known,
and nothing else."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_lite.distributed import processes
from megatron_lite.distributed.processes import Place, own_place
from megatron_lite.distributed.traffic import Collective
from megatron_lite.errors import (
    PeerError,
    RunError,
    StoppedError,
    UnreachableError,
    UsageError,
    lost_peer,
)
from megatron_lite.run import ending, exit_status
from megatron_lite.run.ending import Ending
from tests.support.launch import ended_process


class LeaveError(Exception):
    """The process would have ended."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ending]:
    """A start that has got its experiment directory, as its fourth start."""

    def leave(code: int) -> None:
        raise LeaveError(code)

    monkeypatch.setattr(exit_status, "leave", leave)
    monkeypatch.setattr(processes, "LEAVING_S", 0.0)
    monkeypatch.setattr(ending, "KNOWING_PEER_S", 0.2)
    for name in ("ASK_S", "SAME_SIGNAL_S"):
        monkeypatch.setattr(ending, name, 0.0)
    before = signal.getsignal(signal.SIGUSR2)
    one = Ending(str(tmp_path), 0)
    experiment: Any = SimpleNamespace(run=3, is_lost=lambda: False)
    one.experiment = experiment
    yield one
    one.finish()
    signal.signal(signal.SIGUSR2, before)


def ended(tmp_path: Path) -> tuple[int, str, str]:
    content = json.loads((tmp_path / "exit.json").read_text())
    assert content["run"] == 3
    return content["exit_code"], content["status"], content["message"]


def test_a_stop_signal_during_the_set_up(start: Ending, tmp_path: Path) -> None:
    """Nothing is lost and the same command goes on, as after a stop later; batch systems look at
    exit.json."""
    with pytest.raises(LeaveError, match="75"):
        start.stopped(signal.SIGTERM)
    assert ended(tmp_path) == (
        75,
        "stopped",
        "stopped by SIGTERM in the start: nothing to save; the same command starts again",
    )


def test_a_stop_signal_names_the_checkpoint(start: Ending, tmp_path: Path) -> None:
    """And the phase; nothing claims that there is no checkpoint."""
    start.newest, start.progress.phase = lambda: NEWEST, "the rendezvous"
    with pytest.raises(LeaveError, match="75"):
        start.stopped(signal.SIGUSR1)
    resumes = (
        "the same command resumes from the newest checkpoint, iteration 400 (/run/checkpoints/400)"
    )
    assert ended(tmp_path)[2] == f"stopped by SIGUSR1 in the rendezvous: nothing to save; {resumes}"


def test_a_stop_signal_without_a_directory() -> None:
    """Nothing was begun: 75, as with a directory."""
    before = signal.getsignal(signal.SIGUSR2)
    one = Ending(None, 0)
    assert one.report(StoppedError("stopped"))[0] == 75
    one.finish()
    signal.signal(signal.SIGUSR2, before)


def test_exit_json_has_the_phase_of_a_start(start: Ending, tmp_path: Path) -> None:
    """From the first phase on, with the space for any ending; what was said at the end stays."""
    start.progress.enter("the rendezvous")
    assert ended(tmp_path) == (None, "starting", "in the rendezvous")
    assert (tmp_path / "exit.json").stat().st_size == exit_status.RESERVED_BYTES
    start.progress.enter("the loading")
    assert ended(tmp_path) == (None, "starting", "in the loading")
    start.tell("running")
    assert ended(tmp_path) == (None, "running", "")
    start.report(UsageError("no"))
    late = threading.Thread(target=start.progress.enter, args=("the loading",), daemon=True)
    late.start()
    late.join(0.1)
    assert ended(tmp_path) == (2, "failed", "no")
    start._reporting.release()  # for the thread
    late.join(10)


@pytest.mark.parametrize(("rank", "number"), [(1, 3), (0, -1)])
def test_only_the_owner_says_that_it_starts(
    start: Ending, tmp_path: Path, rank: int, number: int
) -> None:
    """Rank 0, and not before it has the directory."""
    start._rank, start.experiment.run = rank, number  # type: ignore[union-attr]
    start.progress.enter("the rendezvous")
    assert not (tmp_path / "exit.json").exists()


def test_a_stop_signal_after_a_peer_was_stopped(start: Ending, tmp_path: Path) -> None:
    """A scheduler signals all processes, and torchrun, which kept the store, has died of it."""
    exit_status.write_exit(str(tmp_path), 75, "stopped", "stopped by SIGUSR1", run=3)
    start.places = [
        own_place(0),
        Place(1, own_place(1).host, own_place(1).machine, ended_process()),
    ]
    with pytest.raises(LeaveError, match="75"):
        start.stopped(signal.SIGUSR1)
    assert ended(tmp_path) == (75, "stopped", "stopped by SIGUSR1")


class FakeMeeting:
    """What ranks tell each other, with what another rank has announced already."""

    places: Sequence[Place] = ()

    def __init__(self, said: RunError | None = None) -> None:
        self.said, self.parted = said, False

    def bounded(self, action: Callable[[], Any], limit_s: float = 0.0) -> Any:
        return action()

    def announce(self, error: RunError) -> RunError:
        self.said = self.said or error
        return self.said

    def announced(self) -> RunError | None:
        return self.said

    def part(self) -> None:
        self.parted = True


def test_while_the_ranks_meet_the_first_reason_is_that_of_all(
    start: Ending, tmp_path: Path
) -> None:
    """torchrun signals the others when a rank has ended because of its own error."""
    meeting: Any = FakeMeeting(UsageError("rank 8: no GPU"))
    start.met(meeting)
    with pytest.raises(LeaveError, match="2"):
        start.stopped(signal.SIGTERM)
    assert ended(tmp_path) == (2, "failed", "rank 8: no GPU") and meeting.parted


def test_a_rank_that_loses_a_stopped_peer_was_stopped_too(start: Ending, tmp_path: Path) -> None:
    """The backend reports a closed connection before this rank looks at the store."""
    meeting: Any = FakeMeeting(StoppedError("stopped by SIGTERM in the loading"))
    start.met(meeting)
    start.places = [
        own_place(0),
        Place(1, own_place(1).host, own_place(1).machine, ended_process()),
    ]
    assert start.report(GLOO)[0] == 75
    assert (
        ended(tmp_path) == (75, "stopped", "stopped by SIGTERM in the loading") and meeting.parted
    )


def test_a_stop_signal_after_the_death_of_a_peer(start: Ending, tmp_path: Path) -> None:
    """torchrun signals the others when a rank has died: the death is the reason."""
    pid = ended_process()
    start.places = [own_place(0), Place(1, own_place(1).host, own_place(1).machine, pid)]
    with pytest.raises(LeaveError, match="6"):
        start.stopped(signal.SIGTERM)
    code, status, message = ended(tmp_path)
    assert (code, status) == (6, "failed") and message.startswith(f"lost rank 1 (process {pid} on ")


def test_the_death_of_torchrun_is_named_unless_the_run_is_over(
    start: Ending, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    start.kill_children = lambda: killed.append(os.getpid())
    start.launcher_gone("torchrun is gone")
    assert ended(tmp_path) == (6, "failed", "torchrun is gone") and killed
    assert capsys.readouterr().err == "ERROR: torchrun is gone\n"


def test_the_last_exit_json_is_not_replaced(start: Ending, tmp_path: Path) -> None:
    """A run that is over may lose its launcher while it leaves its groups."""
    start.finish()
    exit_status.write_exit(str(tmp_path), 0, "done", "training complete", 3)
    start.launcher_gone("torchrun is gone")
    assert ended(tmp_path) == (0, "done", "training complete")


def test_only_the_first_reason_is_reported(
    start: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "LAUNCHER_S", 0.1)
    start.report(MemoryError("first"))
    start.launcher_gone("second")
    assert ended(tmp_path)[0] == 7


# -- a lost rank
# ------------------------------------------------------------------------------------------------------

GLOO = RuntimeError(
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:33484. GLHF!"
)
NEWEST = (400, Path("/run/checkpoints/400"))
HERE = Place(0, "node0", "a", os.getpid())
BESIDE = Place(1, "node0", "a", os.getpid())
ELSEWHERE = Place(2, "node1", "b", 1)


def lose(start: Ending, places: Sequence[Place], error: Exception = GLOO) -> str:
    """Let rank 0 lose a peer, in the words of a backend; return the message for the user."""
    start.places, start.newest = places, lambda: NEWEST
    explained = start._explained(lost_peer(error))
    assert str(error) in explained.detail and "gloo" not in str(explained)
    return str(explained)


def test_ranks_that_are_alive_are_not_accused(start: Ending) -> None:
    """On one host the step may just be slow; of another host nothing is known here but its name."""
    message = lose(start, [HERE, BESIDE])
    assert (
        message.startswith("all ranks are alive")
        and "iteration 400 (/run/checkpoints/400)" in message
    )
    message = lose(start, [HERE, BESIDE, ELSEWHERE])
    assert message.startswith("no rank of node0 is gone: one on another host (node1)")


def test_a_rank_that_came_less_far_than_the_others_is_named(start: Ending) -> None:
    """Alive but silent: the others wait in a collective that this rank has not started. It may be
    on any machine."""
    places = [HERE, BESIDE, ELSEWHERE]
    step = Collective(813, 0.0, "reduce", 8, "the step", 41)
    behind = Collective(812, 0.0, "gather", 8, "the save", 40)
    late = RuntimeError("[gloo] Timed out waiting 60000ms for recv operation to complete")
    watch, rows = MagicMock(), [json.dumps([*one, 0]).encode() for one in (step, step, behind)]
    start._watch = watch
    watch.rows.return_value = rows
    watch.heard.return_value = {BESIDE, ELSEWHERE}
    where = "in the save, iteration 40, after collective 812 (gather); the others wait in collective 813"
    message = lose(start, places, late)
    assert message.startswith(
        f"no answer from rank 2 (process 1 on node1): alive, but it hangs {where}"
    )
    watch.heard.return_value = {BESIDE}
    message = lose(start, places, late)
    why = "it cannot be reached, or its machine hangs; it was last heard of"
    assert message.startswith(f"no answer from rank 2 (process 1 on node1): {why} {where}")
    watch.rows.return_value = rows[:2]
    assert lose(start, places[:2], late).startswith("all ranks are alive, but one does not answer")
    assert watch.request_stacks.call_count == 3


def test_a_loss_that_the_watch_has_found_says_where_the_run_resumes(start: Ending) -> None:
    start.places, start.newest = [HERE, BESIDE], lambda: NEWEST
    message = str(start._explained(UnreachableError("rank 1 cannot be reached")))
    assert message.startswith(
        "rank 1 cannot be reached\n  the same command resumes from the newest checkpoint, iteration "
    )


def test_only_a_save_that_all_ranks_can_end_is_waited_for(
    start: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that cannot be reached writes no shard, so a save after a signal would wait for its
    time-out."""
    waits = MagicMock()
    monkeypatch.setattr(start, "_let_it_save", waits)
    monkeypatch.setattr(start, "report", lambda error: (error.exit_code, error))
    monkeypatch.setattr(exit_status, "leave", MagicMock(side_effect=SystemExit))
    for kind in (PeerError, UnreachableError):
        with pytest.raises(SystemExit):
            start._end(kind("lost rank 1"))
        assert waits.call_count == 1


def test_the_out_of_memory_killer_is_blamed_by_its_own_count(
    start: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/vmstat counts its victims: a process more than at the start is evidence, the same
    number is none."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "process_state", lambda pid: "Z")
    places = [Place(0, "node0", "a", 1, oom_kills=3), Place(1, "node0", "a", 2, oom_kills=3)]
    for count, words in (
        (3, "is often the work of the kernel's"),
        (4, "killer has ended a process on node0 since"),
    ):
        vmstat.write_text(f"oom_kill_other 9\noom_kill {count}\n")
        assert words in lose(start, places)
    vmstat.unlink()
    assert "is often the work of the kernel's" in lose(start, places)


def test_without_a_directory_nothing_resumes(start: Ending) -> None:
    start._directory = None
    message = lose(start, [HERE, BESIDE])
    assert "resume" not in message and "\n" not in message


def test_the_words_of_a_rank_beside_the_lost_one_are_taken_over(
    start: Ending, tmp_path: Path
) -> None:
    """A rank of the same host can name the lost one, and writes exit.json first."""
    words = "lost rank 2 (process 1 on node1). ...\n  the same command resumes"
    exit_status.write_exit(str(tmp_path), 6, "failed", words, run=3)
    assert lose(start, [HERE, ELSEWHERE]) == words


def test_a_rank_that_gave_its_reason_is_not_said_to_be_killed(
    start: Ending, tmp_path: Path
) -> None:
    exit_status.write_exit(str(tmp_path), 1, "failed", "IndexError: no\nmore", run=3)
    assert lose(start, [HERE, ELSEWHERE]) == "lost a rank, which failed by itself: IndexError: no"
    exit_status.write_exit(str(tmp_path), 1, "failed", "of an earlier start", run=2)
    assert "another host" in lose(start, [HERE, ELSEWHERE])


def test_other_errors_are_left_alone(start: Ending) -> None:
    error, start.places = IndexError("no"), [HERE, BESIDE]
    assert start.report(error) == (1, error)


def test_until_the_ranks_meet_the_first_of_each_machine_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without a GPU says so by itself: rank 0, on another one, knows nothing of it."""
    before = signal.getsignal(signal.SIGUSR2)
    for local_rank, said in ((0, "ERROR on rank 8: no GPU\n"), (1, "")):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        one = Ending(str(tmp_path), 8 + local_rank)
        one.report(UsageError("no GPU"))
        assert capsys.readouterr().err == said
        one.finish()
    signal.signal(signal.SIGUSR2, before)
