"""--memory_snapshot with the functions of torch replaced: what is recorded, for how long, and where
it is written."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite import pretrain
from megatron_lite.errors import OutOfMemoryError, as_run_error
from megatron_lite.monitor.memory_history import MAX_EVENTS, open_history, write_snapshot
from tests.support.harness import tiny_config

LOGGER = logging.getLogger("test")
FOUND: dict[
    str, Any
] = {}  # what the search for options found: all errors below are of one configuration


class FakeRank(NamedTuple):
    """A rank with a GPU, as far as these functions look at it."""

    rank: int = 3
    device: torch.device = torch.device("cuda", 0)
    world_size: int = 8
    local_world_size: int = 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch's recorder, in order; a snapshot is a file of one byte."""
    found: list[Any] = []

    def record(enabled: str | None = "all", **options: Any) -> None:
        found.append((enabled, options))

    def dump(name: str) -> None:
        Path(name).write_bytes(b"x")
        found.append("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return found


@pytest.mark.parametrize(("iterations", "done"), [(2, 4), (5, 1)])
def test_the_first_iterations_are_recorded(
    tmp_path: Path, calls: list[Any], iterations: int, done: int
) -> None:
    """Recording starts at once with a bound, and ends with one file after N iterations, or at an
    earlier end."""
    history = open_history(
        tiny_config(memory_snapshot=iterations, device="auto"), tmp_path, FakeRank(), LOGGER
    )
    assert history is not None
    assert calls == [("all", {"stacks": "python", "max_entries": MAX_EVENTS})]
    for _ in range(done):
        history.end_iteration()
    assert ("snapshot" in calls) == (done >= iterations)
    history.finish()
    assert calls[1:] == ["snapshot", (None, {})]
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["memory_3.pickle"]


def test_a_cpu_records_nothing_and_says_so_once(
    tmp_path: Path, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One line if --device=auto chose the CPU; an explicit CPU was answered by the options' own
    warnings."""
    cpu = FakeRank(device=torch.device("cpu"))
    for device, lines in (("auto", 1), ("cpu", 0)):
        caplog.clear()
        assert (
            open_history(tiny_config(memory_snapshot=1, device=device), tmp_path, cpu, LOGGER)
            is None
        )
        assert len(caplog.messages) == lines
    assert open_history(tiny_config(device="auto"), tmp_path, FakeRank(), LOGGER) is None
    chosen = tiny_config(4, memory_snapshot=1, profile_ranks=(0, 1), device="auto")
    assert open_history(chosen, tmp_path, FakeRank(), LOGGER) is None, "not of this rank"
    assert not calls


def test_a_snapshot_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", broken)
    path, reason = write_snapshot(tmp_path, FakeRank())
    assert "No space left" in reason and not path.exists()


def once(name: str, find: Callable[[Any], Any], search: Any) -> Any:
    """Search at the first call only."""
    if name not in FOUND:
        FOUND[name] = find(search)
    return FOUND[name]


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], Any]:
    """Return what becomes of an error on one of eight GPUs of 16 GiB."""
    monkeypatch.setattr(pretrain, "device_memory_bytes", lambda *_: 2**34)
    for name in ("remedies", "less_memory"):
        monkeypatch.setattr(pretrain, name, partial(once, name, getattr(pretrain, name)))
    config = tiny_config(8, batch_size=64, hidden_size=1024, sequence_length=2048, device="auto")
    rank: Any = FakeRank()
    experiment: Any = SimpleNamespace(root=tmp_path)
    return lambda error: pretrain.with_remedies(error, config, config, rank, experiment)


@pytest.mark.parametrize(
    ("error", "on_device"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nmore"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (MemoryError(), False),
    ],
    ids=["allocator", "CUDA", "cuBLAS", "host by torch", "host"],
)
def test_the_death_of_a_gpu_run_leaves_a_snapshot_and_options(
    error: Exception,
    on_device: bool,
    tmp_path: Path,
    calls: list[Any],
    explain: Callable[[Exception], Any],
) -> None:
    """The memory of the device ends in code 7 with options and a file; for the host's memory
    neither would help."""
    explained = explain(error)
    assert isinstance(explained, OutOfMemoryError) and explained.exit_code == 7
    assert bool(explained.remedies) == on_device and bool(calls) == on_device
    assert explained.snapshot == (str(tmp_path / "profiles/memory_3.pickle") if on_device else "")
    if on_device:
        assert explained.remedies[0].flag == "micro_batch_size"
        assert explained.details()["advice"][0]["saving_bytes"] > 0
        assert "memory_viz" in explained.lines()[-1]
    else:
        assert "--num_workers" in str(explained)
    assert str(explained).count(";") == 1, "one piece of advice"


def test_an_error_that_all_ranks_raise_together_is_explained_too(
    calls: list[Any], explain: Callable[[Exception], Any]
) -> None:
    """The failure of one rank in the set-up reaches every rank as text; the program's own words
    stay as they are."""
    agreed = as_run_error(torch.OutOfMemoryError("CUDA out of memory."))
    assert agreed is not None
    agreed.agreed = True
    explained = explain(agreed)
    assert isinstance(explained, OutOfMemoryError) and explained.agreed and explained.remedies
    own = OutOfMemoryError("--async_checkpoint=1 copies the weights: leave it out")
    assert explain(own) is own
