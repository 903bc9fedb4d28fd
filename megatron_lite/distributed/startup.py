"""Start a process: device, deterministic algorithms, and process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lite import __version__
from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import DIMENSIONS
from megatron_lite.config.system import shard_of_node
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.in_time import NoAnswerError, in_time
from megatron_lite.distributed.peer_watch import END_S, Meeting, MeetingPoint, open_store
from megatron_lite.distributed.process_group import Distributed, peer_errors
from megatron_lite.distributed.processes import own_place, sharing_cores
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.step_watch import StepWatch
from megatron_lite.distributed.traffic import Progress
from megatron_lite.errors import PeerError, UsageError

# NCCL sums in an order that depends on its algorithm, which it chooses by size, topology and
# version. Around a ring the order is fixed for buffers of one size on one set of GPUs; Simple is
# the only protocol that works everywhere.
NCCL_RING = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
_ONE_PROCESS_PER_GPU = "start at most one process per GPU (torchrun --nproc-per-node)"
T = TypeVar("T")
WARM_UP_NUMEL = 2**22  # large enough that NCCL uses the same path as for a step's buffers


def initialize(
    config: DistributedConfig,
    progress: Progress | None = None,
    on_met: Callable[[Meeting], None] = lambda _: None,
    options: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Distributed:
    """Join the process group that torchrun describes in the environment; without torchrun, a group
    of one rank.

    on_met: called as soon as this rank can talk to the others, and again once all ranks have met,
    before they connect to each other; not called for a group of one. options: values that must
    match on all ranks, see `config.values.alike`; versions are added.
    """
    environment = os.environ
    rank, world_size = int(environment.get("RANK") or 0), int(environment.get("WORLD_SIZE") or 1)
    local_rank = int(environment.get("LOCAL_RANK") or 0)
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE") or world_size)
    first = rank - local_rank  # on this machine, if the launcher numbers ranks machine by machine
    local_ranks = range(max(0, first), min(first + local_world_size, world_size))
    if world_size == 1:
        return join(config, rank, world_size, local_rank, local_world_size, progress=progress)
    point, timeout_s = meeting_point(), config.startup_timeout
    versions = {"megatron_lite": [__version__] * 2, "torch": [str(torch.__version__)] * 2}
    alike = {**versions, **options}
    silence_s = config.distributed_timeout
    deadline_s = time.monotonic() + timeout_s

    def enter() -> Meeting:
        store = open_store(point, rank, world_size, timeout_s)
        meeting = Meeting(
            point, store, own_place(rank), world_size, local_ranks, timeout_s, alike, silence_s
        )
        on_met(meeting)
        meeting.enter()
        return meeting

    meeting = _before(deadline_s, enter, point, timeout_s)

    def meet() -> Any:
        _before(deadline_s, lambda: meeting.wait(deadline_s), point, timeout_s)
        on_met(meeting)
        return meeting.store

    distributed = join(config, rank, world_size, local_rank, local_world_size, meet, progress)
    distributed.sharing_cores = sharing_cores(meeting.places, rank, local_ranks)
    return distributed


def _before(deadline_s: float, action: Callable[[], T], point: MeetingPoint, timeout_s: float) -> T:
    """Return the result of a part of the meeting, which keeps the deadline, of the monotonic clock,
    by itself; but the store's calls wait without a limit for a machine that is gone without a word.

    Raises:
        PeerError: a little after the deadline.
    """
    try:
        return in_time(action, max(0.0, deadline_s - time.monotonic()) + END_S)
    except NoAnswerError:
        raise PeerError(
            f"{point.owner}, where the ranks meet ({point}), cannot be reached, or its machine hangs: no answer within "
            f"--startup_timeout={timeout_s:g} s"
        ) from None


def meeting_point() -> MeetingPoint:
    """Return the store that the launcher describes in the environment."""
    environment = os.environ
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # A single torchrun may keep its store when it restarts its ranks; several torchruns count
    # restarts separately.
    alone = (environment.get("GROUP_WORLD_SIZE") or "1") == "1"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    one_machine = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    return MeetingPoint(host, port, hosted, f"megatron_lite/{attempt}", one_machine)


def join(
    config: DistributedConfig,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int | None = None,
    meet: Callable[[], Any] | None = None,
    progress: Progress | None = None,
) -> Distributed:
    """Choose this rank's device and join the process groups.

    Args:
        local_world_size: default: all ranks are on this machine.
        meet: waits for all ranks and returns their store; None for a single rank.

    Raises:
        UsageError: if the requested device or --symmetric_memory is unavailable, or the launcher's
        port is in use. PeerError: if the peers do not join within --startup_timeout.
    """
    if config.deterministic:
        make_deterministic()
    local_world_size = local_world_size or world_size
    device = choose_device(config.device, local_rank, local_world_size)
    on_gpu = device.type == "cuda"
    if on_gpu and config.tf32:
        torch.set_float32_matmul_precision("high")
    if config.symmetric_memory and not on_gpu:
        raise UsageError(
            f"--symmetric_memory=1: needs GPUs, and this run is on {device.type}; leave it out"
        )
    watch = (
        StepWatch(config.distributed_timeout, first_s=config.startup_timeout) if on_gpu else None
    )
    step_timeout = datetime.timedelta(
        seconds=watch.watchdog_timeout_s if watch else config.distributed_timeout
    )
    startup_timeout = datetime.timedelta(seconds=config.startup_timeout)
    store = dist.HashStore() if meet is None else meet()
    with peer_errors(), _quiet_loopback(local_world_size == world_size):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=startup_timeout
        )
        new_group = functools.partial(_new_group, on_gpu, step_timeout, config.symmetric_memory)
        distributed = Distributed(
            rank,
            world_size,
            local_world_size,
            device,
            dist.group.WORLD,
            new_group(),
            watch,
            progress,
        )
        if config.data_parallel_shard is None:
            distributed.nodes = _equal_nodes(distributed, local_rank)
            shard = shard_of_node(config, world_size, distributed.nodes)
            config = dataclasses.replace(config, data_parallel_shard=shard)
        divide(distributed, new_group, config)
    if watch is not None:
        watch.on_watchdog = functools.partial(_set_watchdogs, distributed)
        # independent of its index in this process
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        refuse_shared_gpus(config.device, distributed.gather_objects(uuid))
        warm_up(distributed)
        if config.symmetric_memory:
            _use_symmetric_memory(distributed.groups)
    return distributed


def _equal_nodes(distributed: Distributed, local_rank: int) -> int:
    """Return the number of machines if each has equally many ranks, numbered machine by machine;
    else 1."""
    size = distributed.local_world_size
    found = distributed.gather_objects(size if distributed.rank % size == local_rank else 0)
    return distributed.world_size // size if {*found} == {size} else 1


def _new_group(
    on_gpu: bool, timeout: datetime.timedelta, symmetric: bool, ranks: Sequence[int] | None = None
) -> Any:
    """Create a group for a step's collectives; on a GPU, their kernels precede the products that
    wait."""
    if not on_gpu:
        return dist.new_group(ranks, backend="gloo", timeout=timeout)
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it differs
    if symmetric:
        if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
            raise UsageError(
                f"--symmetric_memory=1: needs NCCL 2.28, and torch {torch.__version__} has less; leave it out"
            )
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    return dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=options)


def _use_symmetric_memory(groups: Sequence[Group]) -> None:
    """Let models place the buffers of collectives in NCCL's symmetric memory from now on.

    With zero CTAs, copy engines instead of multiprocessors gather such buffers between GPUs with
    direct access to each other; other kernels sum them. See "Copy Engine Collectives" in torch's
    manual.
    """
    import torch.distributed._symmetric_memory as library

    library.set_backend("NCCL")
    for group in groups:
        group.symmetric_memory = library if group.world_size > 1 else None


def _set_watchdogs(distributed: Distributed, timeout_s: float) -> None:
    """Set the timeout of collectives from now on, for which torch has no public name."""
    for group in distributed.groups:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group.group)
    for group in distributed.pipeline.messages:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def warm_up(distributed: Distributed) -> None:
    """Let NCCL connect the ranks before the first step's timeout starts: with many machines this
    takes minutes.

    The host blocks in the first collective until all ranks are connected, for at most
    --startup_timeout.
    """
    with distributed.traffic.paused(), peer_errors():
        for group in distributed.groups:
            numel = -(-WARM_UP_NUMEL // group.world_size) * group.world_size
            buffer = torch.zeros(numel, device=distributed.device)
            group.reduce_scatter(buffer).wait()
            group.all_gather(buffer).wait()
        for row in DIMENSIONS:
            if row.in_layers:  # NCCL connects each algorithm at its first use
                getattr(distributed, row.name).all_reduce(buffer, "sum").wait()
        if (experts := distributed.expert).world_size > 1:
            sizes = [numel // experts.world_size] * experts.world_size
            experts.all_to_all(buffer[: sum(sizes)], sizes, sizes)[1].wait()
        distributed.pipeline.connect()
    distributed.wait_for_device()


def make_deterministic() -> None:
    """Allow only deterministic GPU algorithms from now on; call this before anything runs on a
    GPU."""
    # cuBLAS requires it and reads it at first use
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in NCCL_RING.items():  # NCCL reads them when it connects the ranks
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # use_deterministic_algorithms also fills new tensors with NaN to expose uninitialized reads:
    # costly and not needed.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def deterministic_ways(device: torch.device, triton: bool) -> str:
    """Return a log line that describes what --deterministic=1 changes."""
    if device.type != "cuda":
        return f"deterministic: on {device.type} every algorithm is repeatable; --deterministic=1 costs nothing"
    embedding = "" if triton else ", embedding gradients from sorted tokens"
    settings = ", ".join(
        f"{name}={os.environ.get(name, value)}{'' if os.environ.get(name, value) == value else ' as you set it'}"
        for name, value in NCCL_RING.items()
    )
    return (
        "deterministic: attention's backward pass sums in a fixed order and never uses cuDNN, cuBLAS uses one "
        f"workspace{embedding}, NCCL uses one algorithm ({settings}); scripts/gpu_report.sh measures the cost"
    )


def choose_device(name: str, local_rank: int, local_world_size: int) -> torch.device:
    """Return this rank's device; all ranks on a machine make the same choice.

    Raises:
        UsageError: if cuda is requested and absent, or there are more local ranks than GPUs.
    """
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UsageError(
            "--device=cuda: no CUDA device is available; use --device=cpu or --device=auto"
        )
    count = torch.cuda.device_count()
    if 1 < count < local_world_size:
        raise UsageError(
            f"--device={name}: {local_world_size} processes on this machine, but {count} GPUs; {_ONE_PROCESS_PER_GPU}"
        )
    # Slurm may show each task only its own GPU; `refuse_shared_gpus` detects tasks that see the
    # same one.
    index = 0 if count == 1 else local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def refuse_shared_gpus(name: str, uuids: Sequence[str]) -> None:
    """Check that no two ranks use the same GPU. uuids: in rank order.

    Raises:
        UsageError: on every rank, because NCCL would refuse or hang.
    """
    for rank, uuid in enumerate(uuids):
        if (first := uuids.index(uuid)) != rank:
            raise UsageError(
                f"--device={name}: ranks {first} and {rank} have the same GPU ({uuid}); {_ONE_PROCESS_PER_GPU}, or let "
                "Slurm give each task its own (srun --gpus-per-task=1)"
            )


@contextlib.contextmanager
def _quiet_loopback(one_machine: bool) -> Iterator[None]:
    """Let gloo on one machine use the loopback device: resolving the host name may fail."""
    if (
        not one_machine
        or "GLOO_SOCKET_IFNAME" in os.environ
        or not os.path.isdir("/sys/class/net/lo")
    ):
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
