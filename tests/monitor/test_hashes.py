"""Hashes of what all ranks hold alike: every changed bit is found, and the rank that differs is
named."""

import pytest
import torch

from megatron_lite.config.values import digest
from megatron_lite.monitor.hashes import bit_hash, describe_differences, weight_hashes
from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.tiles import WHOLE, Block, Split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    """One flipped bit, one swapped pair, or another sign of zero changes the hash."""
    weights = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = weights.view({2: torch.int16, 4: torch.int32}[weights.element_size()])
    seen = {int(bit_hash(weights))}
    for index in (0, 1, 36):
        for bit in range(8 * weights.element_size()):
            changed = bits.clone()
            changed[index] ^= torch.tensor(
                -(2**bit) if bit == 8 * weights.element_size() - 1 else 2**bit
            ).to(bits)
            seen.add(int(bit_hash(changed.view(dtype))))
    assert len(seen) == 1 + 3 * 8 * weights.element_size()
    assert int(bit_hash(weights.roll(1))) not in seen and int(bit_hash(weights[:0])) == 0
    assert int(bit_hash(torch.zeros(1).to(dtype))) != int(bit_hash(-torch.zeros(1).to(dtype)))


def test_the_odd_rank_is_named() -> None:
    """The majority is right; without one every rank is suspect."""
    weights = [(spec("a", (3, 2)), torch.ones(3, 2)), (spec("b", (1,)), torch.zeros(1))]
    good = weight_hashes(iter(weights))[1, (0,)] | {"c": digest({"x": 1.5})}
    bad = {**good, "a": "0"}
    assert describe_differences([good] * 3) == ""
    assert describe_differences([good, good, bad]) == "a on rank 2"
    assert describe_differences([bad, good, good, {**bad, "b": "1", "c": "1"}, good, good]) == (
        "a on ranks 0, 3; b; c on rank 3"
    )
    assert describe_differences([good, bad]) == "a on 2 of 2 ranks, without a majority"


def test_pieces_are_compared_on_the_ranks_that_hold_them() -> None:
    """Of four ranks, two groups of two: rows of queries differ between the ranks of a group, key
    heads do not."""
    split = Split(2, 0, 0, (Block.of(4, 2), Block.of(2, 1)))
    of_ranks = []
    for rank in range(4):
        of_rank = spec("w", (6, 3), split).on(rank % 2)
        (found,) = [weight_hashes(iter([(of_rank, of_rank.local(torch.arange(18.0).view(6, 3)))]))]
        assert found.keys() == {(1, (rank % 2,)), (1, (0, 1))}
        of_ranks.append(
            {name: value for fingerprint in found.values() for name, value in fingerprint.items()}
        )
    assert [list(names) for names in of_ranks] == 2 * [["w[0:2]", "w[4:6]"], ["w[2:4]", "w[4:6]"]]
    assert describe_differences(of_ranks) == ""
    of_ranks[3]["w[4:6]"] = of_ranks[2]["w[0:2]"] = "0"
    assert (
        describe_differences(of_ranks)
        == "w[0:2] on 2 of 2 ranks (0, 2), without a majority; w[4:6] on rank 3"
    )


def spec(name: str, shape: tuple[int, ...], split: Split = WHOLE) -> ParameterSpec:
    return ParameterSpec(name, shape, Initializer("constant", 0.0), split=split)
