"""An all-reduce of whole buffers between threads whose transfers are as late as transfers may be."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed import cpu_collectives


class LateTransfers:
    """Stands in for torch.distributed: the receiver reads the sender's memory only when it waits."""

    def __init__(self) -> None:
        self._sends: dict[tuple[str, int, int], tuple[Tensor, threading.Event, threading.Event]] = {}
        self._lock = threading.Lock()

    def _slot(self, sender: str, receiver: int, tag: int) -> tuple[Tensor, threading.Event, threading.Event]:
        with self._lock:
            key = (sender, receiver, tag)
            return self._sends.setdefault(key, (torch.empty(0), threading.Event(), threading.Event()))

    def isend(self, tensor: Tensor, group: str, group_dst: int, tag: int) -> Any:
        _, posted, read = self._slot(group, group_dst, tag)
        self._sends[group, group_dst, tag] = (tensor, posted, read)
        posted.set()
        return _Work(lambda: read.wait(10))

    def irecv(self, tensor: Tensor, group: str, group_src: int, tag: int) -> Any:
        key = (str(group_src), int(group), tag)

        def receive() -> None:
            _, posted, read = self._slot(*key)
            assert posted.wait(10)
            threading.Event().wait(0.03 * int(group))  # a sender that does not wait has changed its memory by now
            tensor.copy_(self._sends[key][0])
            read.set()

        return _Work(receive)


class _Work:
    def __init__(self, run: Any) -> None:
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(20)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_sum_in_rank_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, of values whose sum depends on the order; and no buffer changes before all others have read it."""
    monkeypatch.setattr(cpu_collectives, "dist", LateTransfers())
    buffers = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(ranks)]
    expected = buffers[0].clone()
    for buffer in buffers[1:]:
        expected += buffer

    def run(rank: int) -> None:
        handle = cpu_collectives.WholeExchange(buffers[rank], torch.empty(ranks - 1, 1000), rank, str(rank), tag=7)
        handle.wait()
        handle.wait()  # does nothing again

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for buffer in buffers:
        assert torch.equal(buffer, expected)
