"""Values that differ between blocks: `activation,full:8` is full in the first 8 blocks, and activation in the others.

A part with a number takes that many blocks, from the first on, in the order of the parts. The part without a number
takes the blocks that are left; `written` puts it first. Checks are in `values.py`.
"""

from __future__ import annotations


def parts_of(text: str) -> list[tuple[str, str | None]]:
    """Return each part's value and number, None without a number."""
    parts = (part.partition(":") for part in text.split(","))
    return [(value.strip(), number.strip() if colon else None) for value, colon, number in parts]


def written(parts: list[tuple[str, str | None]]) -> str:
    """Join parts; the one without a number comes first."""
    ordered = sorted(parts, key=lambda part: part[1] is not None)
    return ",".join(value if number is None else f"{value}:{number}" for value, number in ordered)


def numbered_blocks(text: str) -> int:
    """Return the number of blocks that the parts with a number take."""
    return sum(int(number or 0) for _, number in parts_of(text))


def by_block(text: str, blocks: int) -> tuple[str, ...]:
    """Return the value of each block of a model."""
    parts = parts_of(text)
    (others,) = (value for value, number in parts if number is None)
    first = [value for value, number in parts for _ in range(int(number or 0))]
    return (*first, *[others] * (blocks - len(first)))
