"""Balance the loads of experts: sums over a step's tokens, and an update of the choice bias.

    c[e] += rate * (d[e] - mean d),  d[e] = sign(mean n - n[e])        n[e]: tokens that chose e

n counts the tokens of all micro-batches of all ranks, so every layout computes the same bits (Wang
et al. 2024, arXiv:2408.15664, with the mean of c kept at 0). A dropped update changes no bias. A
router that has no backward pass, because nothing up to it is trained, counts nothing and keeps its
bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from megatron_lite.config import JsonObject, ModelConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.routing import Sums, summarized
from megatron_lite.model.experts import Router
from megatron_lite.zero.stage import Stage


class Balance:
    """The sums and biases of all routers, on every rank. stages: of all pipeline ranks."""

    def __init__(
        self, config: ModelConfig, stages: Sequence[Stage], distributed: Distributed
    ) -> None:
        self._model, self._distributed = config, distributed
        self._routers = [
            module
            for stage in stages
            for layer in stage.layers
            for module in layer.modules()
            if isinstance(module, Router)
        ]
        self._parts = [part for stage in stages for part in stage.parts if part.is_state]
        count, device = self._model.num_experts, distributed.device
        shape = len(self._routers), 2 * count + 3
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)  # of this rank's tokens
        self._totals = torch.zeros_like(self._sums)  # of all tokens of the newest step
        self._loads = torch.zeros(len(self._routers), count, device=device)
        for index, router in enumerate(self._routers):
            router.index, router.loads = index, self._loads[index]
            router.sums = Sums(self._sums[index])

    def end_step(self, skipped: Tensor) -> None:
        """Sum over ranks and update the biases. skipped: whether the update is dropped, () bool."""
        groups = self._distributed.data, self._distributed.pipeline
        totals = self._sums
        for group in groups:
            totals = group.sum_in_rank_order(totals)
        self._totals.copy_(totals)
        self._sums.zero_()
        self._use(self._totals[:, : self._model.num_experts], self._totals[:, -1:])
        rate = self._model.moe_router_bias_update_rate
        if not rate:
            return
        counts = self._totals[:, : self._model.num_experts]
        signs = (counts.mean(1, keepdim=True) - counts).sign()
        changes = rate * (signs - signs.mean(1, keepdim=True)) * ~skipped
        for router, change in zip(self._routers, changes, strict=True):
            balance = cast(Tensor, router.balance).detach()
            if not balance.is_meta:  # otherwise another pipeline rank's
                balance.copy_(balance + change)
        for part in self._parts:
            part.is_whole = True

    def record(self) -> JsonObject:
        """Return the newest step's losses, averaged over the blocks that counted, and the largest
        load over the mean, for a log line (reads the device)."""
        count, totals = self._model.num_experts, self._totals[self._totals[:, -1] > 0]
        if not len(totals):
            return {}
        tokens = totals[:, -1:]
        loads, shares = (totals[:, : 2 * count] / tokens).view(-1, 2, count).unbind(1)
        balance, z = count * (loads * shares).sum(1).mean(), (totals[:, -3:-2] / tokens).mean()
        if self._model.moe_balance == "micro_batch":  # averaged over the blocks first
            balance = count * (loads.mean(0) * shares.mean(0)).sum()
        largest = summarized(totals)[:, 0].amax()
        values = torch.stack([balance, z, largest]).tolist()
        return {
            "expert_auxiliary_loss": values[0],
            "expert_z_loss": values[1],
            "largest_expert_load": values[2],
        }

    @property
    def sums(self) -> dict[str, Tensor]:
        """This rank's sums of the current step by router; see `Sums`."""
        names = (router.name for router in self._routers)
        return dict(zip(names, self._sums, strict=True))

    def state(self) -> JsonObject:
        """Return the newest step's counts by router, with its tokens, for a checkpoint (reads the
        device). The biases are saved with the weights."""
        counts = self._totals[:, [*range(self._model.num_experts), -1]].long().tolist()
        return {router.name: row for router, row in zip(self._routers, counts, strict=True)}

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; routers missing from it start fresh."""
        empty = [0] * (self._model.num_experts + 1)
        rows = [state.get(router.name, empty) for router in self._routers]
        fitting = [row if len(row) == len(empty) else empty for row in rows]
        counts = torch.tensor(fitting, dtype=torch.float64, device=self._loads.device)
        self._use(counts[:, :-1], counts[:, -1:])

    def _use(self, counts: Tensor, tokens: Tensor) -> None:
        """Set the loads of the next step's balance loss."""
        self._loads.copy_(counts / tokens.clamp(min=1.0))
