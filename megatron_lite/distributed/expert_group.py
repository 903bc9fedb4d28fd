"""A group of ranks that share out the experts, and exchange tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Handle, Traffic


class ExpertGroup(Group):
    """A group whose ranks send each other unequal numbers of rows."""

    def all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        """Start sending the ranks their rows of a contiguous tensor (n, ...), in rank order; return
        those from all ranks, (m, ...), and when they are there.

        sent, received: the numbers of rows to and from each rank; any may be 0.
        """
        if self.world_size == 1:
            return rows, Works()
        found = rows.new_empty(sum(received), *rows.shape[1:])
        work = self._exchange(found, rows, sent, received)
        wire_bytes = rows.nbytes - rows[: sent[self.rank]].nbytes
        return found, self.traffic.started("expert exchange", found, work, wire_bytes)

    def read(self, values: Tensor) -> Any:
        """Return a small tensor as lists. Reads the device, within the timeout of a step."""
        if self.watch is not None:
            values, event = values.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
            self.watch.wait_for(event)
        return values.tolist()

    def _exchange(
        self, found: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Handle:
        sizes = [*received], [*sent]
        return dist.all_to_all_single(found, rows, *sizes, group=self.group, async_op=True)


NOT_SHARED = ExpertGroup(0, 1, torch.device("cpu"), None, Traffic())
