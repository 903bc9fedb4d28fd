"""What we aim at, and how a run of the benchmark compares with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """A number of one of our rows that should be at most `goal` (a ratio of step times) or at least (a rate)."""

    row: str
    measure: str  # a row of the peers: ratio of step times; or "model_tflops", "tokens_per_s_per_rank"
    goal: float
    moonshot: float | None = None
    where: dict[str, Any] = field(default_factory=dict)  # settings of the runs that it speaks of

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.measure in ("model_tflops", "tokens_per_s_per_rank")

    def value(self, rows: dict[str, dict[str, Any]]) -> float | None:
        """What was measured (ratios: the median of the ratios of each round); None if it was not."""
        row = rows.get(self.row, {})
        found = row.get(self.measure) if self.is_rate else row.get("ratios", {}).get(self.measure)
        return found["median"] if isinstance(found, dict) else found


def _cpu(accumulates: bool, ranks: str = "several", dtype: str = "fp32") -> dict[str, Any]:
    return {"device": "cpu", "model": "llama-39m", "dtype": dtype, "accumulates": accumulates, "ranks": ranks}


def _gpu(model: str, **more: Any) -> dict[str, Any]:
    return {"device": "cuda", "model": model, "dtype": "bf16", "ranks": "one", **more}


_RESHARDED, _SAVING = "FSDP2 all resharded", "ZeRO-3 recompute full"
TARGETS = (
    *(Target(row, "DDP", 0.90, 0.80, _cpu(False)) for row in ("ZeRO-1", "ZeRO-2")),
    Target("ZeRO-1", "DDP", 0.92, 0.82, _cpu(True)),
    *(Target("ZeRO-3", peer, 0.55, 0.48, _cpu(False)) for peer in ("FSDP2", _RESHARDED)),
    *(Target("ZeRO-3 breadth-first", peer, 0.55, 0.48, _cpu(True)) for peer in ("FSDP2", _RESHARDED)),
    *(Target("ZeRO-3", peer, 0.60, 0.50, _cpu(False, dtype="bf16")) for peer in ("FSDP2", _RESHARDED)),
    Target("ZeRO-1", "torch", 0.90, 0.80, _cpu(False, "one")),
    # The engine alone, under the peers' own layers.
    *(Target(row, "DDP", 1.00, None, _cpu(False)) for row in ("plain ZeRO-1", "plain ZeRO-2")),
    Target("plain ZeRO-1", "DDP", 1.00, None, _cpu(True)),
    Target("plain ZeRO-2", "DDP", 1.03, None, _cpu(True)),
    *(Target("plain ZeRO-3", peer, 0.60, None, _cpu(False)) for peer in ("FSDP2", _RESHARDED)),
    *(Target("plain ZeRO-3", peer, 0.66, None, _cpu(True)) for peer in ("FSDP2", _RESHARDED)),
    *(Target("plain ZeRO-3 breadth-first", peer, 0.58, None, _cpu(True)) for peer in ("FSDP2", _RESHARDED)),
    # One GPU: 1.10 and 1.15 times a peer's speed; what recomputing costs elsewhere: 0.4 % and 10 % of the speed.
    *(Target(row, "model_tflops", 540.0, None, _gpu("mistral-7b")) for row in ("ZeRO-1", "ZeRO-3", _SAVING)),
    *(
        Target(row, "tokens_per_s_per_rank", 11000.0, 12000.0, _gpu("mistral-7b", num_layers=32))
        for row in ("ZeRO-3", _SAVING)
    ),
    Target("ZeRO-1", "FSDP2 compiled", 1 / 1.15, None, _gpu("llama-3-8b-8l")),
    *(
        Target("ZeRO-1", peer, 1 / 1.10, None, _gpu("gpt2-124m"))
        for peer in ("torch compiled", "torch compiled full logits")
    ),
    *(
        Target(f"ZeRO-{stage} recompute {level}", f"ZeRO-{stage}", 1 / (1 - loss), None, _gpu("mistral-7b"))
        for stage in (1, 3)
        for level, loss in (("activation", 0.004), ("full", 0.10))
    ),
)


def compare(rows: dict[str, dict[str, Any]], settings: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """The aims that this run tells something about, with what was measured."""
    known = settings | {"ranks": "one" if ranks == 1 else "several", "accumulates": settings["micro_batches"] > 1}
    result = []
    for target in TARGETS:
        value = target.value(rows)
        if value is None or any(known[name] != wanted for name, wanted in target.where.items()):
            continue
        reached = value >= target.goal if target.is_rate else value <= target.goal
        result.append(
            {
                "row": target.row,
                "measure": target.measure,
                "value": value,
                "goal": target.goal,
                "moonshot": target.moonshot,
                "at_least": target.is_rate,
                "met": reached,
            }
        )
    return result


def verdicts(compared: list[dict[str, Any]]) -> list[str]:
    """A line for each."""
    lines = []
    for target in compared:
        what = f"{target['row']}{', ' if target['at_least'] else ' / '}{target['measure']}"
        aim = f"at {'least' if target['at_least'] else 'most'} {target['goal']:.4g}"
        more = "" if target["moonshot"] is None else f", moonshot {target['moonshot']:.4g}"
        lines.append(f"{what}: {target['value']:.4g}, aim: {aim}{more}: {'met' if target['met'] else 'missed'}")
    return lines
