"""Put a GPU report into docs/benchmarks.md, between `<!-- table: gpu_report -->` and `<!-- end
-->`.

python -m scripts.benchmarks.gpu.render                       docs/gpu_report.json, or "not yet measured" without it
python -m scripts.benchmarks.gpu.render --report=other.json   another report of scripts/gpu_report.sh
python -m scripts.benchmarks.gpu.render --check               compare only; exit code 1 if the document is stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from scripts.benchmarks.pipeline import (
    GIB,
    MIB,
    NOT_MEASURED,
    Column,
    Result,
    Rows,
    number,
    profile_table,
    remarks,
    render,
    spread,
    surroundings,
    table,
)
from scripts.docs.tables import ROOT, markdown_table

REPORT = ROOT / "docs" / "gpu_report.json"
MISTRAL = ("mistral-7b", "mistral-7b 16 layers", "mistral-7b 16 layers x 8")
OURS = "ZeRO-1"


class Target(NamedTuple):
    """A row of the table of goals: the target, and how to read its value from a report (None: not
    measured)."""

    name: str
    goal: str
    at_least: float
    show: Callable[[float], str]
    value: Callable[[Result], float | None]


def step(report: Result, name: str) -> Any:
    """Return the results of a step, or an empty dict."""
    return report.get("steps", {}).get(name, {}).get("result") or {}


def best(key: str, *tables: str) -> Callable[[Result], float | None]:
    """Return the best value of a key over our rows in some training tables."""

    def read(report: Result) -> float | None:
        rows = [row for name in tables for row in step(report, name).get("rows", {}).items()]
        return max(
            (row[key] for name, row in rows if name.startswith("ZeRO") and row.get(key)),
            default=None,
        )

    return read


def speedup(table: str, *others: str, row: str = OURS) -> Callable[[Result], float | None]:
    """Return a row's speed over that of the fastest of `others`, by the median ratio over
    rounds."""

    def read(report: Result) -> float | None:
        ratios = step(report, table).get("rows", {}).get(row, {}).get("ratios", {})
        found = [ratios[other]["median"] for other in others if ratios.get(other)]
        return 1 / max(found) if found else None

    return read


def uses_cudnn(report: Result) -> float | None:
    """Return 1 if attention without a window used cuDNN, 0 if not; None if not measured."""
    backend = step(report, "variants").get("rows", {}).get(OURS, {}).get("attention")
    return None if backend is None else float(backend == "cudnn")


def copy_fraction(report: Result, wanted: str = "") -> float | None:
    """Return the least fraction of the speed of a copy of equal size over the memory-bound
    operations, or one's."""
    found = {}
    for name, op in step(report, "ops").get("ops", {}).items():
        fraction = op.get("variants", {}).get("triton", {}).get("fraction_of_equal_copy")
        if op.get("memory_bound") and fraction is not None and wanted in ("", name):
            found[name] = fraction
    return min(found.values(), default=None)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_WHOLE = "Mistral-7B shape, whole (32 layers), sequence 8192"
_EITHER = "Mistral-7B shape, 32 or 16 layers, sequence 8192"
_LLAMA = "Llama-3-8B dimensions, 8 layers, over FSDP2 compiled"
_GPT2 = "GPT-2 124M, sequence 1024, over plain PyTorch compiled"
_SPEED = "{:,.0f} tokens/s".format
_RATIO = "{:.3f}x".format
_TFLOPS = "{:.0f} TFLOP/s".format
_CUDNN = ("by another backend", "by cuDNN")
_ACTIVATION, _FULL = (
    speedup("variants", OURS, row=f"{OURS} recompute {level}") for level in ("activation", "full")
)
TARGETS = (
    Target(_WHOLE, "9,000 tokens/s to beat", 9000, _SPEED, best("tokens_per_s", MISTRAL[0])),
    Target(_WHOLE, "11,000 tokens/s", 11000, _SPEED, best("tokens_per_s", MISTRAL[0])),
    Target(_EITHER, "540 model TFLOP/s", 540, _TFLOPS, best("model_tflops", *MISTRAL)),
    Target(_LLAMA, "1.15x", 1.15, _RATIO, speedup("llama-3-8b-8l", "FSDP2 compiled")),
    Target(
        _GPT2,
        "1.10x",
        1.10,
        _RATIO,
        speedup("gpt2-124m", "torch compiled", "torch compiled full logits"),
    ),
    Target(
        "attention of a Mistral-7B shape without a window",
        "by cuDNN",
        1,
        lambda found: _CUDNN[int(found)],
        uses_cudnn,
    ),
    Target("MLP recompute `activation` over `none`", "99.6 %", 0.996, _percent, _ACTIVATION),
    Target("MLP recompute `full` over `none`", "90 %", 0.90, _percent, _FULL),
    Target(
        "slowest memory-bound operation, of a copy of equal size",
        "85 %",
        0.85,
        _percent,
        copy_fraction,
    ),
    Target(
        "AdamW, of a copy of equal size",
        "85 %",
        0.85,
        _percent,
        partial(copy_fraction, wanted="adamw"),
    ),
)


OPERATION_COLUMNS = (
    spread("ms (quartiles)", "ms", 3),
    number("GB/s", "bytes_per_s", ",.0f", 1e-9),
    number("% of copy", "fraction_of_copy", ".1f", 100),
    number("% of equal copy", "fraction_of_equal_copy", ".1f", 100),
    number("TFLOP/s", "flop_per_s", ".0f", 1e-12),
    number("new, MiB", "peak_bytes", ",.0f", 1 / MIB),
)


def _plan_error(rows: Rows, name: str) -> str:
    planned, peak = (rows[name].get(key) for key in ("planned_peak_bytes", "peak_bytes"))
    return f"{100 * (planned / peak - 1):+.1f} %" if planned and peak else ""


TRAINING_COLUMNS = (
    Column(
        "step, s (quartiles)",
        lambda rows, name: spread("", "step_s", 4).cell(rows, name) or NOT_MEASURED,
    ),
    number("tokens/s", "tokens_per_s", ",.0f"),
    number("model TFLOP/s", "model_tflops", ".0f"),
    number("MFU causal", "mfu", ".1%"),
    number("MFU full", "mfu_full", ".1%"),
    number("peak, GiB", "peak_bytes", ".2f", 1 / GIB),
    number("planned, GiB", "planned_peak_bytes", ".2f", 1 / GIB),
    Column("error of the plan", _plan_error),
    Column("attention", lambda rows, name: str(rows[name].get("attention", ""))),
)


def section(report: Result) -> list[str]:
    """Return the section: goals, ceilings, operations, training, tests."""
    lines = markdown_table(("what", "goal", "measured", ""), list(_target_rows(report)))
    for part in (_head, _steps, _ops, _training, _profiles, _tests) if report else ():
        lines += ["", *part(report)]
    return lines


def _target_rows(report: Result) -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        value = target.value(report)
        if value is None:
            yield target.name, target.goal, NOT_MEASURED, ""
        else:
            yield (
                target.name,
                target.goal,
                target.show(value),
                "met" if value >= target.at_least else "missed",
            )


def _head(report: Result) -> Iterator[str]:
    described, ceilings = report.get("environment", {}), step(report, "ceilings")
    if described:
        yield f"{surroundings(described)}, driver {described['machine'].get('driver')}."
    if ceilings:
        yield (
            f"Measured ceilings: a copy of {ceilings['copy_bytes'] / 2**31:.0f} GiB moves "
            f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, reads and writes together; a bf16 product of "
            f"{ceilings['gemm_size']} x {ceilings['gemm_size']} matrices of random numbers reaches "
            f"{ceilings['gemm_flop_per_s'] / 1e12:.0f} TFLOP/s."
        )


def _steps(report: Result) -> list[str]:
    rows = [
        (name, entry["status"], f"{entry['seconds']:.0f}", str(entry.get("reason", "")))
        for name, entry in report.get("steps", {}).items()
    ]
    return markdown_table(("step", "", "seconds", ""), rows)


def _ops(report: Result) -> Iterator[str]:
    """Yield a line per operation and variant; a failed variant shows its error."""
    lines = []
    for name, op in step(report, "ops").get("ops", {}).items():
        variants = op.get("variants", {})
        for variant, found in variants.items():
            cells = [
                str(found.get("failed", op.get("status", "")))[:80],
                *[""] * (len(OPERATION_COLUMNS) - 1),
            ]
            if "ms" in found:
                cells = [column.cell(variants, variant) for column in OPERATION_COLUMNS]
            lines.append([name, op.get("shape", ""), variant, *cells])
    if lines:
        yield "Each operation at the shapes of Mistral-7B. Bytes are the minimum, each counted once; new memory is the"
        yield "most that a call allocates besides its inputs."
        yield ""
        yield from markdown_table(
            ("operation", "shape", "", *(column.title for column in OPERATION_COLUMNS)), lines
        )


def _training(report: Result) -> Iterator[str]:
    """Yield a table per training step, followed by the rows that failed or cannot run."""
    for name in ("variants", "deterministic", "gpt2-124m", "llama-3-8b-8l", *MISTRAL):
        result = step(report, name)
        if result:
            yield f"`{result['environment']['command']}`"
            yield ""
            yield from table(result["rows"], TRAINING_COLUMNS, name)
            yield ""
            yield from (f"- {line}" for line in remarks(result))
            yield ""


def _profiles(report: Result) -> Iterator[str]:
    """Yield a table of ms by kind of kernel per profiled model."""
    for name in ("profile", "profile gpt2-124m"):
        if lines := profile_table(step(report, name).get("rows", {})):
            yield f"`{step(report, name)['environment']['command']}`"
            yield ""
            yield from lines
            yield ""


def _tests(report: Result) -> Iterator[str]:
    for name in ("kernel tests", "GPU tests", "flex_attention tests"):
        found = step(report, name)
        if found:
            counts = (
                ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items())
                or "none ran"
            )
            yield f"{name[0].upper()}{name[1:]} on the device: {counts}."
            yield from (f"- `{failure}`" for failure in found["failures"][:20])
    smoke = step(report, "smoke test")
    if smoke:
        yield f"Smoke test: {'ok' if smoke.get('ok') else smoke.get('reason', 'failed')}, {smoke.get('seconds')} s."


def main(argv: Sequence[str]) -> int:
    """Write or compare the table; return the exit code."""
    tables = {"gpu_report": section}
    return render(argv, __doc__, REPORT, tables, "python -m scripts.benchmarks.gpu.render")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
