"""The start of a process on a GPU, with fakes: its device, NCCL's settings, and what happens before
the first step."""

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed import startup
from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.in_time import in_time
from megatron_lite.distributed.peer_watch import Meeting, MeetingPoint, open_store
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.startup import (
    choose_device,
    deterministic_ways,
    join,
    refuse_shared_gpus,
)
from megatron_lite.errors import PeerError, UsageError
from tests.support.harness import run_distributed, tiny_config
from tests.support.launch import free_port
from tests.support.mirrors import WITHIN_S, wait_until
from tests.support.s3_server import Proxy

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_world_size", "index"),
    [(8, 3, 8, 3), (8, 0, 1, 0), (1, 0, 1, 0), (1, 5, 8, 0)],
    ids=["torchrun", "one process", "one GPU", "srun: each task sees its own GPU"],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, local_world_size: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", local_rank, local_world_size) == torch.device("cuda", index)
    assert chosen == [index]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        UsageError,
        match="8 processes on this machine, but 4 GPUs; start at most one process per GPU",
    ):
        choose_device("cuda", 0, 8)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    """torchrun with two processes on a machine with one GPU: each sees a GPU, and it is the same
    one."""
    refuse_shared_gpus("auto", ["a", "b", "c"])
    with pytest.raises(
        UsageError, match=r"--device=auto: ranks 1 and 3 have the same GPU \(b\); start at most one"
    ):
        refuse_shared_gpus("auto", ["a", "b", "c", "b"])


NCCL = SimpleNamespace(
    Options=lambda **more: SimpleNamespace(config=SimpleNamespace(), **more),
    NCCL_CTA_POLICY_ZERO="zero",
)


def joined(
    monkeypatch: pytest.MonkeyPatch, uuids: list[str], nccl: Any = NCCL, **options: Any
) -> list[Any]:
    """Join with fakes in place of the GPU and of every collective; return the calls in order."""
    calls: list[Any] = []

    def collective(name: str) -> Any:
        def start(self: Distributed, buffer: Any, *_: Any) -> Any:
            calls.append((name, buffer))
            return SimpleNamespace(wait=lambda: calls.append("wait"))

        return start

    monkeypatch.setattr(startup, "choose_device", lambda *_: CUDA)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="unused")
    )
    monkeypatch.setattr(startup.torch, "zeros", lambda numel, device: numel)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda name, **more: calls.append((name, more["timeout"].total_seconds())),
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)

    def new_group(ranks: Any, backend: str, timeout: Any, pg_options: Any) -> Any:
        assert pg_options.is_high_priority_stream and pg_options._timeout == timeout, (
            "products must not delay it"
        )
        assert all(pg_options is not other for other in given), "a group writes into its options"
        assert vars(pg_options.config) == (
            {"cta_policy": "zero"} if options.get("symmetric_memory") else {}
        )
        given.append(pg_options)
        calls.append((backend, timeout.total_seconds()))
        return f"group {len(given)}"

    given = list[Any]()
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_set_pg_timeout",
        lambda timeout, group: calls.append((group, timeout.total_seconds())),
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    monkeypatch.setattr(Distributed, "gather_objects", lambda self, value: uuids)
    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(Distributed, name, collective(name))
    monkeypatch.setattr(
        Distributed, "wait_for_device", lambda self: calls.append("wait for the device")
    )
    with contextlib.suppress(UsageError):
        distributed = join(DistributedConfig(device="cuda", **options), 0, len(uuids), 0)
        calls.append("joined")
        assert distributed.watch is not None
        distributed.watch.on_watchdog(distributed.watch.watchdog_timeout_s)
    return calls


def test_nccl_connects_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog has more time than our own message needs, for the first step;
    `test_step_watch.py` says when it has less. The first collectives are over when `join`
    returns."""
    calls = joined(monkeypatch, ["a", "b", "c"], distributed_timeout=60.0, startup_timeout=3600.0)
    numel = 4194306  # a multiple of the number of ranks
    assert calls == [
        ("gloo", 3600.0),
        ("nccl", 2 * 3600.0 + 60.0),
        ("reduce_scatter", numel),
        "wait",
        ("all_gather", numel),
        "wait",
        "wait for the device",
        "joined",
        ("group 1", 2 * 3600.0 + 60.0),
    ]


def test_symmetric_memory_is_used_where_there_are_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups ask for zero CTAs; buffers may be registered after the first collectives, and only
    then."""
    from torch.distributed import _symmetric_memory as library

    groups: list[Distributed] = []
    real = startup.warm_up
    monkeypatch.setattr(
        startup, "warm_up", lambda distributed: (groups.append(distributed), real(distributed))
    )
    backends = list[str]()
    monkeypatch.setattr(library, "set_backend", backends.append)
    for uuids, options in ((["a"], True), (["a", "b"], False), (["a", "b"], True)):
        assert joined(monkeypatch, uuids, symmetric_memory=options)[-2] == "joined"
    assert [group.symmetric_memory for group in groups] == [None, None, library]
    assert backends == ["NCCL", "NCCL"]


def test_symmetric_memory_needs_gpus_and_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match="^--symmetric_memory=1: needs GPUs, and this run is on cpu; leave it out$"
    ):
        join(DistributedConfig(device="cpu", symmetric_memory=True), 0, 1, 0)
    old = SimpleNamespace(Options=NCCL.Options)
    assert joined(monkeypatch, ["a", "b"], old, symmetric_memory=True) == [("gloo", 3600.0)], (
        "it must not go on"
    )
    with pytest.raises(
        UsageError,
        match="^--symmetric_memory=1: needs NCCL 2.28, and torch .* has less; leave it out",
    ):
        startup._new_group(True, datetime.timedelta(1), True)
    with pytest.raises(UsageError, match="^--symmetric_memory=1, --deterministic=1: "):
        tiny_config(1, device="cuda", symmetric_memory=True, deterministic=True)


def test_tf32_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[str]()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    joined(monkeypatch, ["a"])
    assert chosen == []
    joined(monkeypatch, ["a"], tf32=True)
    assert chosen == ["high"]


def test_nccl_is_not_asked_to_connect_ranks_that_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = joined(monkeypatch, ["a", "a"])
    assert [name for name, _ in calls] == ["gloo", "nccl"]


def nccl_settings(distributed: Distributed) -> tuple[str | None, str | None]:
    return os.environ.get("NCCL_ALGO"), os.environ.get("NCCL_PROTO")


@pytest.mark.parametrize(
    ("deterministic", "settings"), [(True, ("Ring", "Simple")), (False, (None, None))]
)
def test_deterministic_runs_pin_the_algorithm_of_nccl(
    deterministic: bool, settings: tuple[str | None, ...]
) -> None:
    """Before the process group exists, and only with --deterministic=1."""
    assert run_distributed(1, nccl_settings, deterministic=deterministic) == [settings]


def test_the_users_own_settings_of_nccl_win_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        startup.make_deterministic()
        assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Tree", "Simple")
        assert (
            "NCCL uses one algorithm (NCCL_ALGO=Tree as you set it, NCCL_PROTO=Simple)"
            in deterministic_ways(CUDA, triton=True)
        )
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills
        for name in ("NCCL_PROTO", "CUBLAS_WORKSPACE_CONFIG"):
            os.environ.pop(name, None)


def test_each_group_of_a_step_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, data-parallel and tensor-parallel."""
    monkeypatch.setattr(Group, "reduce_scatter", lambda self, buffer: Works())
    monkeypatch.setattr(Group, "all_gather", lambda self, buffer: Works())
    monkeypatch.setattr(Group, "all_reduce", lambda self, buffer, kind: Works())
    calls = joined(monkeypatch, ["a", "b", "c", "d"], tensor_parallel=2)
    assert [call for call in calls if call[0] == "nccl"] == [("nccl", 7260.0)] * 5, (
        "all, 2 data, 2 tensor"
    )
    assert [call[0] for call in calls if call[0].startswith("group")] == [
        "group 1",
        "group 2",
        "group 4",
    ]


@pytest.mark.parametrize("is_silent", [True, False], ids=["connecting", "meeting"])
def test_a_store_that_falls_silent_ends_the_start_in_time(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cable of rank 0's machine is cut: torch's store would wait for it for a quarter of an
    hour."""
    monkeypatch.setattr(startup, "END_S", 0.1)
    point = MeetingPoint("127.0.0.1", free_port(), hosted=True, prefix="megatron_lite/0")
    rank_0 = open_store(point, 0, 2, 30.0)
    with Proxy(point.port).listen() as proxy:
        if is_silent:
            proxy.open.clear()
        for name, value in {
            **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(proxy.port)},
        }.items():
            monkeypatch.setenv(name, value)

        def cut() -> None:
            wait_until(lambda: rank_0.add("came", 0) == 1)
            proxy.open.clear()

        cutting = threading.Thread(target=cut, daemon=True)
        cutting.start()
        config = DistributedConfig(device="cpu", startup_timeout=3.0)
        begin_s = time.monotonic()
        with pytest.raises(
            PeerError, match="rank 0, where the ranks meet .*, cannot be reached, or its machine"
        ):
            startup.initialize(config)
        assert 3.0 < time.monotonic() - begin_s < WITHIN_S
        rank_0.add("came", 1)
        cutting.join()


def test_an_error_of_the_store_is_not_its_silence() -> None:
    point = MeetingPoint("127.0.0.1", 1, hosted=True, prefix="megatron_lite/0")

    def refuse() -> None:
        raise TimeoutError("the store's own")

    with pytest.raises(TimeoutError, match="the store's own"):
        startup._before(time.monotonic() + 3.0, refuse, point, 3.0)


def test_the_wait_for_the_store_and_for_the_others_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is missing is said before the store is called silent, which has END_S more."""
    opened: list[float] = []
    deadlines: list[float] = []
    limits: list[float] = []

    def opening(*arguments: Any) -> Any:
        opened.append(time.monotonic())
        return open_store(*arguments)

    def wait(_: Meeting, deadline_s: float) -> None:
        deadlines.append(deadline_s)
        raise PeerError("rank 1 is missing")

    def bounded(action: Callable[[], Any], limit_s: float) -> Any:
        limits.append(limit_s)
        return in_time(action, limit_s)

    monkeypatch.setattr(startup, "open_store", opening)
    monkeypatch.setattr(startup, "in_time", bounded)
    monkeypatch.setattr(Meeting, "wait", wait)
    for name, value in {
        **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }.items():
        monkeypatch.setenv(name, value)
    begin_s = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 is missing"):
        startup.initialize(DistributedConfig(device="cpu", startup_timeout=30.0))
    assert begin_s + 30.0 <= deadlines[0] <= opened[0] + 30.0
    assert limits[1] <= limits[0] <= 30.0 + startup.END_S
