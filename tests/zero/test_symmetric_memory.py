"""With --symmetric_memory=1, weights and gradients travel between registered buffers.

A library that allocates and registers ordinary memory stands in for torch's, which needs GPUs.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.rank_group import Group
from megatron_lite.errors import UsageError
from tests.support.harness import Trajectory, run_distributed, same_weights, train_tiny


class Library:
    """torch.distributed._symmetric_memory. `refuses`: the registration of any buffer fails."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.allocated: list[Tensor] = []
        self.registered: list[tuple[int, int]] = []  # first and last address

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert numel > 0
        self.allocated.append(torch.full((numel,), 7, dtype=dtype, device=device))
        return self.allocated[-1]

    def rendezvous(self, tensor: Tensor, group_name: str) -> None:
        if self.refuses:
            raise RuntimeError("NCCL error: no access\nmore")
        assert (
            group_name and tensor.data_ptr() == self.allocated[len(self.registered)].data_ptr()
        ), "in order, whole"
        self.registered.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))

    def holds(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(
            start <= first and first + tensor.nbytes <= end for start, end in self.registered
        )


def train_registered(
    distributed: Distributed, options: dict[str, Any]
) -> tuple[Trajectory, list[str], list[int]]:
    """Train; return also the kinds of collectives in registered memory, and the sizes of all
    registered buffers."""
    library, kinds = Library(), set[str]()

    def checked(name: str, usual: str) -> Any:
        real = getattr(Group, name)

        def collective(self: Group, buffer: Tensor, kind: str = usual) -> Any:
            if kind == usual:
                assert library.holds(buffer), f"{kind} of other memory"
                kinds.add(kind)
            return real(self, buffer, kind)

        return mock.patch.object(Group, name, collective)

    distributed.data.symmetric_memory = library
    with checked("all_gather", "gather"), checked("reduce_scatter", "reduce"):
        trajectory = train_tiny(distributed, options, iterations=3)
    distributed.data.symmetric_memory = None
    return trajectory, sorted(kinds), [end - start for start, end in library.registered]


CASES = [
    dict(zero_stage=1, training_dtype="bf16"),
    dict(zero_stage=2, ema_type="ema"),
    dict(zero_stage=3, optimizer="muon", tie_word_embeddings=False),
]


def both_ways(distributed: Distributed) -> list[list[int]]:
    """Return for each case the sizes of the registered buffers."""
    every = []
    for options in CASES:
        trajectory, kinds, sizes = train_registered(distributed, options)
        usual = train_tiny(distributed, options, iterations=3)
        assert kinds == ["gather", "reduce"] and trajectory.memory_bytes == usual.memory_bytes, (
            options
        )
        assert trajectory.losses == usual.losses and same_weights(
            trajectory.weights, usual.weights
        ), options
        every.append(sizes)
    return every


def test_every_gather_and_reduction_is_in_registered_memory() -> None:
    """The same losses, weights and bytes as in ordinary memory; ranks register the same sizes in
    the same order."""
    first, second = run_distributed(2, both_ways)
    assert first == second and all(first)


def refused(distributed: Distributed) -> str:
    distributed.symmetric_memory = Library(refuses=distributed.rank == 1)
    with pytest.raises(UsageError) as error:
        train_tiny(distributed, {}, iterations=1)
    return str(error.value)


def test_a_refused_registration_is_an_error_on_every_rank() -> None:
    expected = (
        "rank 1: --symmetric_memory=1: NCCL refuses a buffer (NCCL error: no access); leave it out"
    )
    assert run_distributed(2, refused) == [expected, expected]
