"""Build a micro-batch on the host and copy it to the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.model.layer import MASKED, MicroBatch


class HostBatch(NamedTuple):
    """A micro-batch on the host, in pinned memory if a GPU will read it."""

    tokens: Tensor  # (b, s + 1) int64
    real_samples: int  # real samples in this micro-step over all ranks, without padding
    # (p + 1,) int32: first position of each of the p pieces of documents in the flattened (b s,)
    # inputs, then b s. Every sample begins a piece. None with --cross_document_attention=1.
    starts: Tensor | None = None
    padding: int = 0  # padded rows at the end
    positions: Tensor | None = None  # (b, s) int64, with --reset_position_ids=1
    masked: Tensor | None = (
        None  # (b, s) bool: labels without a loss, padding included; None: only padding
    )

    first_sample: int = 0  # index in training; the others follow

    @property
    def counted(self) -> int:
        """The number of labels with a loss."""
        if self.masked is not None:
            return int((~self.masked).sum())
        rows, width = self.tokens.shape
        return (rows - self.padding) * (width - 1)


def micro_batch(
    batch: HostBatch,
    device: torch.device,
    scale: Tensor | None,
    dropout_seed: int | None,
    loss_weight: float = 1.0,
) -> MicroBatch:
    """Copy a micro-batch to the device: (b, s + 1) tokens -> inputs and labels, (b, s), and their
    documents.

    Labels of padding are masked. `loss_weight` multiplies the gradient scale.
    """
    tokens, documents = batch.tokens.to(device, non_blocking=True), None
    # A real copy: `contiguous` returns a single row as is, and masking its labels would change the
    # tokens.
    labels = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
    if batch.padding:
        labels[-batch.padding :] = MASKED
    if batch.masked is not None:
        labels.masked_fill_(batch.masked.to(device, non_blocking=True), MASKED)
    if scale is not None and loss_weight != 1.0:
        scale = scale * loss_weight
    if batch.starts is not None:
        documents = Documents(
            batch.starts.to(device, non_blocking=True), tuple(batch.starts.diff().tolist())
        )
    positions = None if batch.positions is None else batch.positions.to(device, non_blocking=True)
    return MicroBatch(
        tokens[:, :-1].contiguous(),
        labels,
        scale,
        dropout_seed,
        documents,
        loss_weight,
        positions=positions,
    )
