"""Placeholder until the operations are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes."""

    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


@dataclass(frozen=True)
class Op:
    """One."""

    name: str
    make: Callable[[Shape], dict[str, Callable[[], Any]]]
    bytes: Callable[[Shape], int]
    flops: Callable[[Shape], int]
    describe: Callable[[Shape], str]
    memory_bound: bool = True


OPS: tuple[Op, ...] = ()
