"""docs/parallelism.md: ranks, and what must divide, are the program's; test_guides.py compares its formulas."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from megatron_lite.errors import UsageError
from megatron_lite.monitor.banner import describe_ranks
from megatron_lite.planner.plan import SimulatedGroup
from tests.support import documents
from tests.support.harness import tiny_config

pytestmark = pytest.mark.guides

GUIDE = documents.read("parallelism")


def rows(text: str) -> list[list[str]]:
    """The cells of a table."""
    return [line.strip("| ").split(" | ") for line in text.strip().splitlines()]


def test_ranks_are_numbered_so() -> None:
    """The three rows of the page, by the groups of each rank."""
    header, _, of_data, of_tensor = rows(
        "\n".join(re.findall(r"^\| (?:ranks|---|data-p|tensor-p).*$", GUIDE, re.M)[:4])
    )
    groups = [SimulatedGroup(int(rank), 8, "cpu", tensor_parallel=2) for rank in header[1:]]
    assert [str(group.data.rank) for group in groups] == of_data[1:]
    assert [str(group.tensor.rank) for group in groups] == of_tensor[1:]
    assert f"`ranks: {describe_ranks(cast(Any, groups[0]))}`" in GUIDE


def test_what_must_divide() -> None:
    """What the page says is refused at 4 ranks."""
    sizes: list[dict[str, Any]] = [
        dict(num_attention_heads=6, hidden_size=36),
        dict(ffn_hidden_size=130),
        dict(num_attention_heads=12, hidden_size=36, head_groups=3),
        dict(sequence_length=18, sequence_tensor_parallel=True),
    ]
    for options in sizes:
        with pytest.raises(UsageError, match="tensor_parallel"):
            tiny_config(4, tensor_parallel=4, **options)


def test_a_vocabulary_of_any_size_and_shared_heads_are_taken() -> None:
    """The other rows: padding in memory, and heads that several ranks have."""
    tiny_config(4, tensor_parallel=4, vocab_size=61, num_attention_heads=8, head_groups=2)
