"""Which iterations of a start are profiled: --profile_skip, and then cycles of wait, warm-up and active iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lite.config.profiling import ProfilingConfig

Place = Literal["off", "warmup", "active", "last", "over"]


@dataclass(frozen=True)
class Cycles:
    """The cycles of one start; every number counts iterations, except `repeat`."""

    skip: int
    wait: int
    warmup: int
    active: int
    repeat: int

    @classmethod
    def of(cls, config: ProfilingConfig) -> Cycles:
        """Return the cycles that the options ask for."""
        return cls(
            config.profile_skip,
            config.profile_wait,
            config.profile_warmup,
            config.profile_active,
            config.profile_cycles,
        )

    @property
    def first(self) -> int:
        """The first iteration of a start that is profiled, counted from 1."""
        return self.skip + self.wait + self.warmup + 1

    def place(self, done: int) -> Place:
        """Return the part that the next iteration plays, after N iterations of this start.

        "last" is the last active iteration of a cycle; after "over" no iteration is profiled.
        """
        cycle, position = divmod(done - self.skip, self.wait + self.warmup + self.active)
        if done < self.skip:
            return "off"
        if cycle >= self.repeat:
            return "over"
        if position < self.wait:
            return "off"
        if position < self.wait + self.warmup:
            return "warmup"
        return "active" if position < self.wait + self.warmup + self.active - 1 else "last"
