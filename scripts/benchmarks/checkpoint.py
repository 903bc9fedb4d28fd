"""Time checkpoints, a plain copy of the same bytes, and torch.distributed.checkpoint (DCP).

    torchrun --nproc-per-node=2 -m scripts.benchmarks.checkpoint --folder=/data/scratch --output=checkpoint.json

Every rank holds its ZeRO-3 shards of a model: weights and both moments of AdamW, 1 GiB over all
ranks by default. Each turn measures everything once, in rotating order: writes and syncs every
rank's bytes to a plain file, saves with this program and with DCP, both also asynchronously, and
reads everything back after dropping the files from the page cache. Ratios are taken within a turn.
`blocked` is the time in which a training loop could not continue: starting the save, waiting for
the copy before an update --step_s later, publishing. `memory` is the increase in peak resident
memory, on the largest rank. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from megatron_lite.checkpoint import reading
from megatron_lite.checkpoint.files import chunks
from megatron_lite.checkpoint.resume import find
from megatron_lite.checkpoint.writing import (
    HostCopy,
    Save,
    Saving,
    shards_bytes,
    tensors_of,
    write_now,
)
from megatron_lite.config import Config, DistributedConfig, unflatten
from megatron_lite.distributed import startup
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.metrics import LogWindow
from megatron_lite.validation import resolve
from scripts.benchmarks import processor
from scripts.benchmarks.commands import measuring_parser
from scripts.benchmarks.pipeline import (
    MIB,
    Column,
    Figures,
    Turns,
    describe,
    first_ratio,
    publish,
    spread,
    table,
)
from scripts.benchmarks.training.engine import built

BYTES_PER_PARAMETER = 12
HIDDEN_SIZE, VOCAB_SIZE = 768, 2912
SAVES = ("copy", "save", "DCP save", "save in the background", "DCP save in the background")
LOADS = ("read", "load", "DCP load")  # read what the saves have written


class Bench:
    """The model of one rank and all timed operations."""

    def __init__(
        self, config: Config, distributed: Distributed, folder: Path, step_s: float
    ) -> None:
        self.config = config
        self.distributed = distributed
        self.folder = folder
        self.step_s = step_s
        self.model, optimizer, _ = built(config, distributed)
        window = LogWindow(distributed.device)
        self.state = {
            "optimizer": optimizer.state(),
            "window": window.state(),
            "evaluation_due": False,
        }
        self.tensors = tensors_of(self.model.parts())
        # One tensor per shard and rank: cheaper for DCP to plan than DTensors, which it cannot copy
        # without a GPU (torch 2.13).
        self.dcp_state = {
            f"rank_{distributed.rank}.{tensor.name}": tensor.read() for tensor in self.tensors
        }
        # for DCP's thread, while the main thread continues
        self.dcp_group = dist.new_group(backend="gloo")
        # Reuses its host copy between saves, as ours does; memory that it allocates itself would be
        # pinned.
        self.dcp_stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self.dcp_stager.state_dict_cache = _create_cpu_state_dict(self.dcp_state)
        self.host_copy = HostCopy(self.model, distributed)
        # A row may return the seconds for which a training loop is blocked; otherwise it is blocked
        # all the time.
        self.rows: dict[str, Callable[[], object]] = {
            "copy": self.copy,
            "save": lambda: write_now(self._save("ours")),
            "DCP save": lambda: dcp.save(
                self.dcp_state, checkpoint_id=folder / "dcp", process_group=self.dcp_group
            ),
            "save in the background": self.save_in_background,
            "DCP save in the background": self.dcp_save_in_background,
            "read": self.read,
            "load": self.load,
            # Verifies nothing.
            "DCP load": lambda: dcp.load(
                self.dcp_state, checkpoint_id=folder / "dcp", process_group=self.dcp_group
            ),
        }

    def copy(self) -> None:
        """Write this rank's bytes to a plain file and sync it."""
        with open(self._plain(), "xb", buffering=0) as file:
            for tensor in self.tensors:
                for chunk in chunks(tensor.read()):
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())

    def save_in_background(self) -> float:
        """Save asynchronously: copy to the host, write in a thread, publish."""
        begun_s = time.perf_counter()
        saving = Saving(self._save("ours async"), copy=self.host_copy)
        blocked_s = time.perf_counter() - begun_s
        time.sleep(self.step_s)  # forward and backward; an update must wait for the copy
        begun_s = time.perf_counter()
        saving.wait_for_copy()
        blocked_s += time.perf_counter() - begun_s
        while not saving.advance():  # once an iteration
            time.sleep(0.01)
        begun_s = time.perf_counter()
        saving.finish()
        return blocked_s + time.perf_counter() - begun_s

    def dcp_save_in_background(self) -> float:
        """Save asynchronously with DCP."""
        begun_s = time.perf_counter()
        future: Any = dcp.async_save(
            self.dcp_state,
            checkpoint_id=self.folder / "dcp async",
            process_group=self.dcp_group,
            async_stager=self.dcp_stager,
        )
        blocked_s = time.perf_counter() - begun_s
        getattr(future, "upload_completion", future).result()
        return blocked_s

    def read(self) -> None:
        """Read this rank's plain file."""
        with open(self._plain(), "rb", buffering=0) as file:
            for tensor in self.tensors:
                view = tensor.read().view(torch.uint8).numpy().data
                while view:
                    view = view[file.readinto(view) :]

    def load(self) -> None:
        """Find, verify and load the checkpoint."""
        root = self.folder / "ours"
        assert (
            reading.load_first_good(find(root), root, self.model, self.distributed, print)
            is not None
        )

    def clear(self) -> None:
        """Delete the files of this turn and sync the disk."""
        self.distributed.barrier()
        if self.distributed.rank == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            os.sync()
        self.distributed.barrier()

    def drop_cache(self) -> None:
        """Drop this turn's files from the page cache."""
        self.distributed.barrier()
        if self.distributed.rank == 0:
            os.sync()
            for path in self.folder.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
        self.distributed.barrier()

    def measure(self, name: str, turn: int) -> Figures:
        """Time one row on all ranks; return the maximum over ranks."""
        self.drop_cache()
        before = processor.reset_peak()
        begun_s = time.perf_counter()
        returned = self.rows[name]()
        blocked_s = returned if isinstance(returned, float) else time.perf_counter() - begun_s
        self.distributed.barrier()
        seconds, memory = time.perf_counter() - begun_s, processor.memory_bytes("VmHWM") - before
        if "background" in name:
            # the host copy, reused between turns
            memory += sum(tensor.num_bytes for tensor in self.tensors)
        figures = {"seconds": seconds, "blocked_s": blocked_s, "memory_bytes": memory}
        ranks = self.distributed.gather_objects(figures)
        return {figure: max(rank[figure] for rank in ranks) for figure in figures}

    def _save(self, name: str) -> Save:
        root = self.folder / name
        return Save(root, 1, self.model, self.state, self.config, self.distributed, lambda: None)

    def _plain(self) -> Path:
        return self.folder / f"plain_{self.distributed.rank}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measuring_parser(__doc__, turns=7, mib=1024)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="new folder on the disk to measure; deleted at the end",
    )
    parser.add_argument(
        "--step_s",
        type=float,
        default=0.5,
        help="seconds between a save's begin and the next update",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    distributed = startup.initialize(DistributedConfig(device="cpu"))
    bench = Bench(
        config_of(options.mib, distributed.world_size), distributed, options.folder, options.step_s
    )
    if distributed.rank == 0:
        options.folder.mkdir(parents=True)
    distributed.barrier()
    turns = [
        Turns(names, bench.measure, options.turns, warm_up=1, prints=distributed.rank == 0)
        for names in (SAVES, LOADS)
    ]
    try:
        for _ in zip(*(one.run() for one in turns), strict=True):  # each round: saves, then loads
            bench.clear()
    finally:
        if distributed.rank == 0:
            shutil.rmtree(options.folder, ignore_errors=True)
    if distributed.rank == 0:
        rows = {name: row for one in turns for name, row in measured_rows(one).items()}
        ranks, num_bytes = distributed.world_size, shards_bytes(bench.model, distributed.world_size)
        command = f"torchrun --nproc-per-node={ranks} -m scripts.benchmarks.checkpoint"
        result = describe(command, argv, vars(options))
        result |= {"rows": rows, "bytes": num_bytes, "ranks": ranks}
        about = f"{num_bytes / MIB:,.0f} MiB, {ranks} ranks; "
        publish(result, options.output, about, table(rows, COLUMNS))
    distributed.barrier()
    distributed.close()
    return 0


def config_of(mib: int, world_size: int) -> Config:
    """Return the configuration of a model with a checkpoint of about this size."""
    block = 12 * HIDDEN_SIZE**2
    layers = max(1, round((mib * MIB / BYTES_PER_PARAMETER - 2 * VOCAB_SIZE * HIDDEN_SIZE) / block))
    options = dict(
        num_layers=layers,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=12,
        vocab_size=VOCAB_SIZE,
        sequence_length=16,
        dataset_source="random",
        train_iters=1,
        batch_size=world_size,
        device="cpu",
        zero_stage=3,
    )
    return resolve(unflatten(options), world_size)


def measured_rows(turns: Turns) -> dict[str, dict[str, Any]]:
    """Return the figures of some rows, with ratios to the first (plain copy or read), and of ours
    to DCP's."""
    reference, *_ = names = list(turns.counted)
    peers = {
        name: [one for one in (reference, f"DCP {name}") if one in names and one != name]
        for name in names
    }
    rows = turns.rows("seconds", "blocked_s", "memory_bytes", others=peers.__getitem__)
    for name, row in rows.items():
        row["blocked_ratio"] = turns.ratio(name, reference, "blocked_s", "seconds")
    return rows


def _in_background(title: str, figure: str, otherwise: str) -> Column:
    """Return the column of a figure that only asynchronous saves have."""
    column = spread(title, figure, 2)
    return Column(
        title, lambda rows, name: column.cell(rows, name) if "background" in name else otherwise
    )


COLUMNS = (
    spread("seconds", "seconds", 2),
    first_ratio("of the copy or read"),
    _in_background("blocked (s)", "blocked_s", "all"),
    _in_background("of the copy", "blocked_ratio", ""),
    spread("memory (MiB)", "memory_bytes", 0, 1 / MIB),
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
