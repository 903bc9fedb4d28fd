"""The threads of a process: from the work, the cores and the ranks, never from the load; and they spin only shortly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.run import launch, libraries, threads
from megatron_lite.run.threads import available_cores, threads_of
from tests.support.harness import tiny_config
from tests.support.launch import TINY, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("hidden_size", "tokens", "cores", "ranks", "expected"),
    [
        (64, 4096, 4, 1, 1),  # the README's command without a file, 248 thousand parameters
        (384, 2048, 4, 1, 4),
        (384, 2048, 64, 1, 18),
        (256, 512, 4, 1, 2),  # where two threads clearly pay
        (128, 512, 4, 1, 1),
        (384, 2048, 4, 2, 2),
        (4096, 8192, 4, 8, 1),
        (4096, 8192, 96, 8, 12),
        (16, 1, 1, 1, 1),
    ],
)
def test_threads_follow_from_the_work_and_a_fair_share(
    hidden_size: int, tokens: int, cores: int, ranks: int, expected: int
) -> None:
    config = tiny_config(hidden_size=hidden_size, sequence_length=tokens, micro_batch_size=1, batch_size=1)
    assert threads_of(config, cores, ranks).number == expected


def test_cores_are_those_of_the_affinity_and_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for quota, expected in ((None, 6), (2.5, 2), (0.4, 1), (64.0, 6)):
        monkeypatch.setattr(threads, "_quota", lambda quota=quota: quota)
        assert available_cores() == expected


def test_the_users_number_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own 1, which its environment does not have, is not the user's."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for text, expected in (("3", 3), ("1", 1), ("", None), ("0", None), ("many", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert launch.requested_threads() == expected


@pytest.mark.parametrize("given", [True, False])
def test_one_thread_by_torchrun_is_not_the_users(given: bool) -> None:
    child = "from megatron_lite.run.launch import requested_threads; print(requested_threads())"
    torchrun = (
        "import os, subprocess, sys; os.environ |= dict(OMP_NUM_THREADS='1', TORCHELASTIC_RUN_ID='x', "
        f"LOCAL_WORLD_SIZE='2'); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": "1"} if given else {})
    command = [sys.executable, "-c", torchrun]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1" if given else "None"]


@pytest.mark.parametrize("name", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_threads_sleep_after_a_short_wait_unless_the_user_says_otherwise(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(other, "")  # restored at the end of the test
        monkeypatch.delenv(other)
    if name is not None:
        monkeypatch.setenv(name, "7")
    libraries.limit_spinning()
    assert os.environ.get("OMP_WAIT_POLICY") == ({None: "PASSIVE", "OMP_WAIT_POLICY": "7"}.get(name))
    assert os.environ.get("GOMP_SPINCOUNT") == ({None: str(libraries.SPINS), "GOMP_SPINCOUNT": "7"}.get(name))


@pytest.mark.parametrize("command", ["pretrain_gpt.py", "scripts/generate.py", "scripts/evaluate.py"])
def test_every_command_that_computes_prepares_libraries_before_torch_is_imported(command: str) -> None:
    """OpenMP reads its variables when its library is loaded; `main` and what it imports come later."""
    stub = "import sys; assert 'torch' not in sys.modules; print('prepared'); sys.exit(0)"
    start = (
        "import runpy, sys, megatron_lite.run.libraries as libraries; sys.argv = [{0!r}, *{1!r}.split()]; "
        "libraries.prepare_libraries = lambda: exec({2!r}); runpy.run_path({0!r}, run_name='__main__')"
    )
    flags = "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --vocab_size=16 --dataset_source=random"
    code = start.format(str(ROOT / command), flags, stub)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "prepared\n", done.stderr


def test_the_log_says_how_many_threads_and_why() -> None:
    outcome = run([*TINY, "--device=cpu"], 1, "processes")
    assert "1 thread per rank (OMP_NUM_THREADS)" in outcome.output


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
@pytest.mark.parametrize("variable", [None, "MALLOC_ARENA_MAX"])
def test_freed_memory_is_used_again(variable: str | None) -> None:
    """Blocks of 2 to 20 MiB take new pages once and not a hundred times, unless the user has set glibc's variables."""
    code = (
        "import resource; from megatron_lite.run.libraries import prepare_libraries; prepare_libraries(); "
        "import numpy; faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "use = lambda: [numpy.ones(mib * 131072) for mib in (2, 20, 7)]; use(); before = faults(); "
        "all(use() for _ in range(100)); print(faults() - before)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"PYTHONPATH": str(ROOT), "NUMPY_MADVISE_HUGEPAGE": "0"} | ({variable: "8"} if variable else {})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (int(done.stdout) < 1000) == (variable is None), done.stdout + done.stderr
