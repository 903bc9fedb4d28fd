"""The table of docs/reliability.md that says what listens, beside the sockets of processes."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, TINY, Start, is_loopback, listening_at
from tests.support.token_files import write_documents

Sockets = dict[str, set[tuple[str, str]]]  # process -> address and port of each socket that listens
ENDLESS = (*TINY, "--train_iters=1000000", "--log_interval=1")


def promised(start: str) -> Sockets:
    """Return what the table has for a start."""
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    table = re.search(r"<!-- table: sockets -->(.*?)<!-- end -->", text, re.DOTALL)
    assert table is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table[1].strip().splitlines()[2:]
    ]
    found: Sockets = {}
    for name, process, socket, address, port, *_ in rows:
        if name == start:
            found.setdefault(process, set()).update(() if socket == "none" else [(address, port)])
    assert found, start
    return found


def seen(
    processes: dict[str, list[int]], master_port: int = 0, launcher_port: str = "any free"
) -> Sockets:
    """Return what processes listen on, in the words of the table."""

    def place(address: str, port: int, name: str) -> tuple[str, str]:
        where = (
            "loopback"
            if is_loopback(address)
            else "all addresses"
            if set(address) == {"0"}
            else address
        )
        others = launcher_port if name == "torchrun" else "any free"
        return where, "MASTER_PORT" if port == master_port else others

    return {
        name: {
            place(address, port, name)
            for process in numbers
            for address, port in listening_at(process)
        }
        for name, numbers in processes.items()
    }


def training(start: Start, experiment: Path) -> None:
    """Wait until a run has taken a step."""
    metrics = experiment / "metrics.jsonl"
    assert start.wait_until(
        lambda: metrics.is_file() and metrics.stat().st_size > 0, "a line of metrics.jsonl"
    )


def test_one_rank_its_workers_and_who_watches(tmp_path: Path) -> None:
    """Data workers have no socket, nor has watch_run beside a run."""
    write_documents(tmp_path / "tokens", [list(range(20))] * 40)
    flags = [
        *ENDLESS,
        "--dataset_source=list",
        f"--data_path={tmp_path / 'tokens'}",
        "--split=1,0,0",
    ]
    with Start([*flags, "--num_workers=1", f"--experiment_dir={tmp_path / 'run'}"]) as start:
        training(start, tmp_path / "run")
        rank = start.processes[0].pid
        workers = [number for number in start.left_over() if number != rank]
        assert workers
        assert seen({"rank 0": [rank], "data workers": workers}) == promised("one rank")
        command = [sys.executable, str(ROOT / "scripts" / "watch_run.py"), str(tmp_path / "run")]
        ours, theirs = os.openpty()  # without a terminal it would show one page and end
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        ) as watch:
            try:
                assert select.select([ours], [], [], 60)[0] and os.read(ours, 100)
                assert seen({"watch_run": [watch.pid]}) == promised("watch_run")
            finally:
                watch.kill()
                os.close(ours)
                os.close(theirs)


def test_ranks_on_one_machine(tmp_path: Path) -> None:
    """Rank 0's store at the port that it was told, and gloo, at loopback."""
    with Start([*ENDLESS, f"--experiment_dir={tmp_path / 'run'}"], ranks=2) as start:
        training(start, tmp_path / "run")
        assert start._port is not None
        first, *others = [process.pid for process in start.processes]
        found = seen({"rank 0": [first], "other ranks": others}, start._port.getsockname()[1])
    assert found == promised("ranks on one machine")


@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """torchrun's store is open to the network, and nothing of ours is."""
    with Start(
        [*ENDLESS, f"--experiment_dir={tmp_path / 'run'}"], ranks=2, how="torchrun"
    ) as start:
        training(start, tmp_path / "run")
        launcher = start.processes[0].pid
        ranks = {
            re.search(rb"\0RANK=(\d)", b"\0" + Path(f"/proc/{number}/environ").read_bytes()): number
            for number in start.left_over()
            if number != launcher
        }
        first = [
            number for match, number in ranks.items() if match is not None and match[1] == b"0"
        ]
        others = [
            number for match, number in ranks.items() if match is not None and match[1] == b"1"
        ]
        assert first and others
        found = seen(
            {"torchrun": [launcher], "rank 0": first, "other ranks": others},
            launcher_port="its own",
        )
    assert found == promised("torchrun on one machine")
