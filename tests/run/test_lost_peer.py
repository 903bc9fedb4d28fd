"""The message about a lost rank says what its writer knows, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lite.distributed import peers
from megatron_lite.distributed.peers import Place
from megatron_lite.distributed.progress import Status
from megatron_lite.errors import PeerError
from megatron_lite.run import exit_status, lost_peer
from megatron_lite.run.lost_peer import explained

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:33484. GLHF!")
NEWEST = (400, Path("/run/checkpoints/400"))
HERE = Place(0, "node0", "a", os.getpid())
BESIDE = Place(1, "node0", "a", os.getpid())
ELSEWHERE = Place(2, "node1", "b", 1)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LEAVING_S", 0.0)
    monkeypatch.setattr(lost_peer, "KNOWING_PEER_S", 0.2)


def lose(places: list[Place], directory: Path | None) -> str:
    error = explained(GLOO, places, 0, None if directory is None else str(directory), 3, NEWEST)
    assert isinstance(error, PeerError) and error.exit_code == 6
    assert "Connection closed" in error.detail and "GLHF" not in str(error)
    return str(error)


def test_ranks_that_are_alive_are_not_accused(tmp_path: Path) -> None:
    """On one host the step may just be slow; of another host nothing is known here but its name."""
    message = lose([HERE, BESIDE], tmp_path)
    assert message.startswith("all ranks are alive") and "iteration 400 (/run/checkpoints/400)" in message
    message = lose([HERE, BESIDE, ELSEWHERE], tmp_path)
    assert message.startswith("no rank of node0 is gone: one on another host (node1)")


def test_a_rank_that_came_less_far_than_the_others_is_named(tmp_path: Path) -> None:
    """Alive but silent: the others wait in a collective that this rank has not started. It may be on any machine."""
    places = [HERE, BESIDE, ELSEWHERE]
    step = Status(813, "the step", 41, "reduce")
    behind = Status(812, "the save", 40, "gather")
    late = RuntimeError("[gloo] Timed out waiting 60000ms for recv operation to complete")
    error = explained(late, places, 0, str(tmp_path), 3, NEWEST, [step, step, behind], step)
    assert str(error).startswith(
        "no answer from rank 2 (process 1 on node1): alive, but it hangs in the save, iteration 40, after collective "
        "812 (gather); the others wait in collective 813"
    )
    same = str(explained(late, places[:2], 0, str(tmp_path), 3, NEWEST, [step, step], step))
    assert same.startswith("all ranks are alive, but one does not answer")


def test_the_out_of_memory_killer_is_blamed_by_its_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/vmstat counts its victims: a process more than at the start is evidence, the same number is none."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(peers, "VMSTAT", vmstat)
    monkeypatch.setattr(peers, "process_state", lambda pid: "Z")
    places = [Place(0, "node0", "a", 1, oom_kills=3), Place(1, "node0", "a", 2, oom_kills=3)]
    for count, words in ((3, "is often the work of the kernel's"), (4, "killer has ended a process on node0 since")):
        vmstat.write_text(f"oom_kill_other 9\noom_kill {count}\n")
        assert words in lose(places, None)
    vmstat.unlink()
    assert "is often the work of the kernel's" in lose(places, None)


def test_without_a_directory_nothing_resumes() -> None:
    message = lose([HERE, BESIDE], None)
    assert "resume" not in message and "\n" not in message


def test_the_words_of_a_rank_beside_the_lost_one_are_taken_over(tmp_path: Path) -> None:
    """A rank of the same host can name the lost one, and writes exit.json first."""
    words = "lost rank 2 (process 1 on node1). ...\n  the same command resumes"
    exit_status.write_exit(str(tmp_path), 6, "failed", words, run=3)
    assert lose([HERE, ELSEWHERE], tmp_path) == words


def test_a_rank_that_gave_its_reason_is_not_said_to_be_killed(tmp_path: Path) -> None:
    exit_status.write_exit(str(tmp_path), 1, "failed", "IndexError: no\nmore", run=3)
    assert lose([HERE, ELSEWHERE], tmp_path) == "lost a rank, which failed by itself: IndexError: no"
    exit_status.write_exit(str(tmp_path), 1, "failed", "of an earlier start", run=2)
    assert "another host" in lose([HERE, ELSEWHERE], tmp_path)


def test_other_errors_are_left_alone() -> None:
    error = IndexError("no")
    assert explained(error, [HERE, BESIDE], 0, None, 0, None) is error
