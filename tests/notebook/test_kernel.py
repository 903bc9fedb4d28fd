"""`train` and `load` in a real kernel of Jupyter: interrupts, errors, a restart."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import STARTED, find_marked
from tests.support.threads import THREADS

pytestmark = pytest.mark.slow
manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
SET_UP = f"""
import os, signal, sys, threading
import megatron_lite
OPTIONS = {STARTED | {"vocab_size": 257, "tokenizer_file": "byte"}!r}
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    children = open(f"/proc/self/task/{{os.getpid()}}/children").read()
    return handlers, threading.enumerate(), children, sys.stdout, os.fstat(1), os.fstat(2)
before = state()
"""


@pytest.fixture
def kernel() -> Iterator[Any]:
    started, client = manager.start_new_kernel(
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(THREADS),
            "CUDA_VISIBLE_DEVICES": "",
        }
    )
    try:
        yield started, client
    finally:
        client.stop_channels()
        if started.is_alive():
            started.shutdown_kernel(now=True)


def run_cell(
    client: Any, code: str, seen: str = "", then: Callable[[], None] = lambda: None
) -> tuple[str, dict[str, Any]]:
    """Return what a cell prints, and the reply. then: called once when `seen` has been printed."""
    number, printed, waits = client.execute(code), "", bool(seen)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=LIMIT_S)
        if message["parent_header"].get("msg_id") != number:
            continue
        printed += message["content"].get("text", "")
        if waits and seen in printed:
            waits = False
            then()
        if message["content"].get("execution_state") == "idle":
            break
    while (reply := client.get_shell_msg(timeout=LIMIT_S))["parent_header"]["msg_id"] != number:
        pass
    return printed, reply["content"]


def runs_of(folder: Path) -> list[int]:
    """The processes of a run, by its lock."""
    locks = sorted(folder.glob("runs/*/lock.json"))
    return [int(json.loads(lock.read_text())["pid"]) for lock in locks]


def test_a_kernel(kernel: Any, tmp_path: Path) -> None:
    started, client = kernel
    assert run_cell(client, SET_UP)[1]["status"] == "ok"
    folder = str(tmp_path / "run")
    printed, reply = run_cell(
        client, f"result = megatron_lite.train(**OPTIONS, experiment_dir={folder!r})"
    )
    assert reply["status"] == "ok" and "training complete: 6 iterations" in printed
    _, reply = run_cell(client, "megatron_lite.train(lr='x')")
    assert (reply["status"], reply["ename"]) == ("error", "UsageError")
    assert reply["evalue"].startswith("--lr=x: not a number")
    wrong = {"dataset_source": "list", "data_path": "nowhere", "experiment_dir": folder}
    _, reply = run_cell(client, f"megatron_lite.train(**(OPTIONS | {wrong}))")
    assert (reply["status"], reply["ename"]) == ("error", "DataError")
    long = str(tmp_path / "long")
    for number in range(2):  # interrupted, and again in the same kernel
        endless = f"OPTIONS | {{'train_iters': 10**6, 'experiment_dir': {long!r}}}"
        printed, reply = run_cell(
            client,
            f"result = megatron_lite.train(**({endless}))\nprint('status', result.status)",
            " ms/step",
            started.interrupt_kernel,
        )
        assert reply["status"] == "ok" and "status stopped" in printed, printed
        assert ("resumed from" in printed) == bool(number) and "saved " in printed
    looks = "model = megatron_lite.load(result.folder); print(len(model.token_losses('abc')))"
    printed, reply = run_cell(client, f"print(state() == before)\n{looks}")
    assert reply["status"] == "ok" and printed.split()[:1] == ["True"], printed
    assert "\n2\n" in printed


def test_a_run_ends_with_its_kernel(kernel: Any, tmp_path: Path) -> None:
    """It saves, and leaves no process."""
    started, client = kernel
    run_cell(client, SET_UP)
    folder = tmp_path / "run"
    client.execute(
        f"megatron_lite.train(**OPTIONS | {{'train_iters': 10**6, 'experiment_dir': {str(folder)!r}}})"
    )
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "metrics.jsonl").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (process,) = runs_of(folder)
    started.shutdown_kernel(now=True)
    while process in find_marked("", [process]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads((folder / "exit.json").read_text())["status"] == "stopped"
