"""Measure every machine and link before a long run, and name the odd one (--preflight).

Every rank reports its versions and clock, and multiplies matrices with a bit-exactly known product.
In each group that the run uses, neighbours exchange a buffer. A link is slow compared with other
links of its kind (between machines, or within one), with an earlier start on the same machines, or
with any network.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lite.distributed.agreement import raise_first
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.processes import own_place
from megatron_lite.distributed.rank_group import Group
from megatron_lite.errors import (
    LinkError,
    NumericsError,
    RunError,
    StorageError,
    UsageError,
    shorten,
)
from megatron_lite.monitor.logging import MIB, get_logger
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.progress_line import aligned

FILE_NAME = "preflight.json"
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")
REPEATS = 3  # exchanges, and clock readings; the best counts
BUFFER_BYTES = {"cpu": 4 * MIB, "cuda": 64 * MIB}
LARGEST_SKEW_S = 1.0
SLOW_SHARE = 0.25
LEAST_MB_S = 10.0  # a network of 100 Mbit/s
SIDE, NONZERO = 512, 16  # of the matrices; see `multiply`

Links = Mapping[tuple[int, int], float]  # ranks, lower one first -> MB/s in each direction


class Facts(NamedTuple):
    """Measurements of one rank."""

    host: str
    machine: str  # distinguishes hosts with equal names, and containers
    versions: dict[str, str]
    clock_s: float  # how far its clock is ahead of rank 0's
    is_right: bool  # whether its product is
    tflops: float
    links: list[tuple[list[int], float]]  # a pair of ranks, the lower one first, and its MB/s


def preflight(
    distributed: Distributed, dtype: torch.dtype, folder: Path | None, lack: str | None
) -> None:
    """Measure, log a table, and write the figures into `folder`. Collective.

    dtype: of the product. folder: this start's artifacts. lack: on rank 0, which space is missing
    for checkpoints.

    Raises: on every rank, naming each odd one: UsageError for versions, NumericsError for a
        product, LinkError for a link or a clock, StorageError for space.
    """
    distributed.progress.enter("the preflight")
    device = distributed.device
    place = own_place(distributed.rank)
    clock_s = _clock_s(distributed)
    is_right, tflops = multiply(device, dtype)
    links = _links(distributed)
    measured = Facts(
        place.host,
        f"{place.host} {place.machine}",
        _versions(device),
        clock_s,
        is_right,
        tflops,
        links,
    )
    ranks = [Facts(*values) for values in distributed.gather_objects(measured)]
    failure = None
    if distributed.rank == 0:
        speeds = {(low, high): speed for facts in ranks for (low, high), speed in facts.links}
        for line in table(ranks, speeds):
            get_logger().info("%s", line)
        earlier = (
            {} if folder is None else _record(folder, [facts.machine for facts in ranks], speeds)
        )
        found = [*problems(ranks, speeds, earlier)]
        if lack:
            found.append((StorageError, lack))
        if found:
            kind, _ = found[0]
            failure = kind("preflight: " + "; ".join(text for _, text in found))
    raise_first(distributed, failure)
    get_logger().info("preflight: all checks passed")


# -- measure
# ------------------------------------------------------------------------------------------------------


def _versions(device: torch.device) -> dict[str, str]:
    """Return the versions of the computing software by name, and a GPU's kind."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        installed = metadata.distributions(name=name)
        found[name] = next((one.version for one in installed), "none")
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "GPU": torch.cuda.get_device_name(device)}
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def multiply(device: torch.device, dtype: torch.dtype) -> tuple[bool, float]:
    """Return whether two products are bit-exact, and the TFLOP/s of the second.

    Entries are -1, 0 and 1, with so few nonzeros per row that every partial sum is an integer up to
    256, which each dtype represents exactly, in whatever order a library sums.
    """
    tiles = 16 if device.type == "cuda" else 1  # 8,192 rows
    generator = torch.Generator().manual_seed(0)
    signs = 2 * torch.randint(2, (2, SIDE, SIDE), generator=generator) - 1
    places = torch.rand(SIDE, SIDE, generator=generator).argsort(dim=1) < NONZERO
    left, right = signs[0] * places, signs[1]
    known = (tiles * (left @ right)).to(device, dtype).repeat(tiles, tiles)
    a, b = (matrix.to(device, dtype).repeat(tiles, tiles) for matrix in (left, right))
    is_right, seconds = True, 0.0
    for _ in range(2):
        _finish(device)
        start_s = time.perf_counter()
        product = a @ b
        _finish(device)
        seconds = time.perf_counter() - start_s
        is_right &= torch.equal(product, known)
    return is_right, 2 * (tiles * SIDE) ** 3 / seconds / 1e12


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock_s(distributed: Distributed) -> float:
    """Return how far this rank's clock is ahead of rank 0's; ranks leave a barrier at about the
    same time."""
    offsets_s = []
    for _ in range(REPEATS):
        distributed.barrier()
        now_s = time.time()
        offsets_s.append(now_s - distributed.broadcast_object(now_s))
    return min(offsets_s, key=abs)


def _links(distributed: Distributed) -> list[tuple[list[int], float]]:
    """Exchange a buffer with both neighbours in each group, pair by pair; return the pairs and
    MB/s each way."""
    device = distributed.device
    own, other = (
        torch.zeros(BUFFER_BYTES[device.type], dtype=torch.uint8, device=device) for _ in range(2)
    )
    found = []
    with distributed.traffic.paused():
        for group in distributed.groups:
            rank = torch.tensor([distributed.rank], device=device)
            members = group.gathered(rank, "sum").flatten().tolist()
            for pairs in _turns(group.world_size):
                distributed.barrier()
                for peer in (sum(pair) - group.rank for pair in pairs if group.rank in pair):
                    seconds = _exchange_s(group, own, other, peer)
                    pair = sorted((distributed.rank, members[peer]))
                    found.append((pair, own.nbytes / 1e6 / seconds))
    return found


def _turns(size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours around a ring, in turns in which no rank has two."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)]
    return [turn for turn in (pairs[::2], pairs[1::2], [(0, size - 1)] if size > 2 else []) if turn]


def _exchange_s(group: Group, own: torch.Tensor, other: torch.Tensor, peer: int) -> float:
    """Return the seconds of the fastest of several exchanges, after one that connects the ranks."""
    times_s = []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        group.exchange(own, other, peer)
        _finish(group.device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s[1:])


# -- judge
# --------------------------------------------------------------------------------------------------------


def table(ranks: Sequence[Facts], links: Links) -> list[str]:
    """Return a table's lines, one row per machine."""
    rows = [("preflight", "ranks", "clock", "product", "TFLOP/s", "slowest link")]
    for machine in dict.fromkeys(facts.machine for facts in ranks):
        own = [rank for rank, facts in enumerate(ranks) if facts.machine == machine]
        clock_s = max((ranks[rank].clock_s for rank in own), key=abs)
        product = "right" if all(ranks[rank].is_right for rank in own) else "WRONG"
        slowest = min(
            ((speed, pair) for pair, speed in links.items() if {*pair} & {*own}), default=None
        )
        link = (
            "-"
            if slowest is None
            else f"{slowest[0]:,.0f} MB/s, ranks {slowest[1][0]} and {slowest[1][1]}"
        )
        tflops = min(ranks[rank].tflops for rank in own)
        shown = f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}"
        rows.append(
            (ranks[own[0]].host, shown, f"{clock_s:+.3f} s", product, f"{tflops:,.3g}", link)
        )
    return aligned(rows)


def problems(
    ranks: Sequence[Facts], links: Links, earlier: Links
) -> Iterator[tuple[type[RunError], str]]:
    """Yield each problem with its error class. earlier: links at an earlier start on the same
    machines."""
    for name in ranks[0].versions:
        found: dict[str, list[str]] = {}
        for rank, facts in enumerate(ranks):
            found.setdefault(facts.versions[name], []).append(f"{rank} ({facts.host})")
        if len(found) > 1:
            odd_first = sorted(found.items(), key=lambda item: len(item[1]))
            places = "; ".join(
                f"{version} on rank {shorten(where, 3)}" for version, where in odd_first
            )
            yield UsageError, f"{name} differs, {places}: install the same on all machines"
    for rank, facts in enumerate(ranks):
        if not facts.is_right:
            yield (
                NumericsError,
                f"rank {rank} on {facts.host} multiplies wrongly: take the device out of service",
            )
    usual_s = statistics.median_low(facts.clock_s for facts in ranks)
    for host, clock_s in {facts.host: facts.clock_s - usual_s for facts in ranks}.items():
        if abs(clock_s) > LARGEST_SKEW_S:
            side = "ahead" if clock_s > 0 else "behind"
            yield (
                LinkError,
                f"the clock of {host} is {abs(clock_s):.1f} s {side}; let it follow a time server",
            )
    slow = dict(_slow(ranks, links, earlier))
    for rank, count in Counter(itertools.chain(*slow)).most_common(1):
        if count > 1:
            where = f"rank {rank} on {ranks[rank].host}"
            yield LinkError, f"{count} of {len(slow)} slow links lead to {where}"
    for pair, text in slow.items():
        places = " and ".join(f"rank {rank} on {ranks[rank].host}" for rank in pair)
        yield LinkError, f"the link of {places} is slow: {links[pair]:,.1f} MB/s, {text}"


def _slow(
    ranks: Sequence[Facts], links: Links, earlier: Links
) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield each slow link, and what it was compared with. Links within a machine of CPUs depend on
    its load."""
    on_gpus = any("GPU" in facts.versions for facts in ranks)
    for is_between, kind in ((True, "between machines"), (False, "within a machine")):
        alike = {
            (low, high): speed
            for (low, high), speed in links.items()
            if (ranks[low].machine != ranks[high].machine) == is_between
        }
        compared = is_between or on_gpus
        usual = statistics.median(alike.values()) if compared and len(alike) > 2 else 0.0
        for pair, speed in alike.items():
            before = earlier.get(pair, 0.0) if compared else 0.0
            if speed < SLOW_SHARE * usual:
                yield pair, f"half of those {kind} have {usual:,.1f} or more"
            elif speed < SLOW_SHARE * before:
                yield pair, f"at an earlier start it had {before:,.1f}"
            elif speed < LEAST_MB_S:
                yield pair, f"less than {LEAST_MB_S:g}"


def _record(folder: Path, machines: list[str], links: Links) -> Links:
    """Write this start's figures into its folder; return the links at the latest start on the same
    machines."""
    earlier: Links = {}
    starts = folder.parent.parent.glob(f"*/{folder.name}/{FILE_NAME}")
    for path in sorted(starts, key=lambda path: path.stat().st_mtime, reverse=True):
        # a damaged file is not compared
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["machines"] == machines:
                earlier = {(low, high): float(mb_per_s) for low, high, mb_per_s in record["links"]}
                break
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "machines": machines,
        "links": [[*pair, mb_per_s] for pair, mb_per_s in links.items()],
    }
    replace_file(folder / FILE_NAME, json.dumps(record).encode())
    return earlier
