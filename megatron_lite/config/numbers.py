"""Numbers with bounds: plain int and float to mypy, while the parser and `validation` hold their bounds."""

from __future__ import annotations

from typing import Annotated

PositiveInt = Annotated[int, {"minimum": 1}]
NonNegativeInt = Annotated[int, {"minimum": 0}]
LONGEST_WINDOW = 10_000
WindowLength = Annotated[int, {"minimum": 2, "maximum": LONGEST_WINDOW}]
PositiveFloat = Annotated[float, {"above": 0.0}]
NonNegativeFloat = Annotated[float, {"minimum": 0.0}]
Fraction = Annotated[float, {"minimum": 0.0, "maximum": 1.0}]
ProperFraction = Annotated[float, {"minimum": 0.0, "below": 1.0}]
