"""Put a GPU report into docs/benchmarks.md, between `<!-- table: gpu_report -->` and `<!-- end -->`, and the budget
that its goals leave between `<!-- table: gpu_budget -->` and `<!-- end -->`.

python -m scripts.benchmarks.gpu.render                       docs/gpu_report.json, or "not yet measured" without it
python -m scripts.benchmarks.gpu.render --report=other.json   another report of scripts/gpu_report.sh
python -m scripts.benchmarks.gpu.render --check               compare only; exit code 1 if the document is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import argument_parser, markdown_table, spread_cell
from scripts.benchmarks.gpu import budget

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
REPORT = ROOT / "docs" / "gpu_report.json"
SECTION = re.compile(r"(<!-- table: gpu_report -->\n).*?(<!-- end -->)", re.S)
BUDGET = re.compile(r"(<!-- table: gpu_budget -->\n).*?(<!-- end -->)", re.S)
NOT_MEASURED = "not yet measured"
MISTRAL = ("mistral-7b", "mistral-7b 16 layers")
Report = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A row of the table of goals: the wanted value, and how to read it from a report (None: not measured)."""

    name: str
    goal: str
    value: Callable[[Report], float | None]
    at_least: float
    show: Callable[[float], str]


def step(report: Report, name: str) -> Any:
    """Return the results of a step, or an empty dict."""
    return report.get("steps", {}).get(name, {}).get("result") or {}


def best(report: Report, key: str, *tables: str) -> float | None:
    """Return the best value of a key over our rows of some training tables."""
    rows = [row for table in tables for row in step(report, table).get("configurations", {}).items()]
    values = [row[key] for name, row in rows if name.startswith("ZeRO") and row.get(key)]
    return max(values, default=None)


def speedup(report: Report, model: str, *peers: str) -> float | None:
    """Return our speed over that of the fastest of some peers, by the median of the ratios of each round."""
    ratios = step(report, model).get("configurations", {}).get("ZeRO-1", {}).get("ratios", {})
    found = [ratios[peer]["median"] for peer in peers if ratios.get(peer)]
    return 1 / max(found) if found else None


def recompute(report: Report, level: str) -> float | None:
    """Return the tokens per second at a level of MLP recomputation over those at `none`."""
    variants = step(report, "variants").get("variants", {})
    times = [variants.get(name, {}).get("step_ms", {}).get("median") for name in ("none", level)]
    return times[0] / times[1] if all(times) else None


def uses_cudnn(report: Report) -> float | None:
    """Return 1 if attention without a window was cuDNN's, 0 if not; None if it was not measured."""
    backend = step(report, "variants").get("variants", {}).get("none", {}).get("attention")
    return None if backend is None else float(backend == "cudnn")


def memory_bound(report: Report) -> dict[str, float]:
    """Return each memory-bound operation's share of the measured copy bandwidth."""
    found = {}
    for name, op in step(report, "ops").get("ops", {}).items():
        fraction = op.get("variants", {}).get("triton", {}).get("fraction_of_copy")
        if op.get("memory_bound") and fraction is not None:
            found[name] = fraction
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _tokens(value: float) -> str:
    return f"{value:,.0f} tokens/s"


def _times(value: float) -> str:
    return f"{value:.3f}x"


_WHOLE = "Mistral-7B shape, whole (32 layers), sequence 8192"
TARGETS = (
    Target(_WHOLE, "9,000 tokens/s to beat", lambda report: best(report, "tokens_per_s", MISTRAL[0]), 9000, _tokens),
    Target(_WHOLE, "11,000 tokens/s", lambda report: best(report, "tokens_per_s", MISTRAL[0]), 11000, _tokens),
    Target(
        "Mistral-7B shape, 32 or 16 layers, sequence 8192",
        "540 model TFLOP/s",
        lambda report: best(report, "model_tflops", *MISTRAL),
        540,
        lambda value: f"{value:.0f} TFLOP/s",
    ),
    Target(
        "Llama-3-8B dimensions, 8 layers, beside FSDP2 compiled",
        "1.15x",
        lambda report: speedup(report, "llama-3-8b-8l", "FSDP2 compiled"),
        1.15,
        _times,
    ),
    Target(
        "GPT-2 124M, sequence 1024, beside plain PyTorch compiled",
        "1.10x",
        lambda report: speedup(report, "gpt2-124m", "torch compiled", "torch compiled full logits"),
        1.10,
        _times,
    ),
    Target(
        "attention of a Mistral-7B shape without a window",
        "by cuDNN",
        uses_cudnn,
        1.0,
        lambda value: "by cuDNN" if value else "by another backend",
    ),
    Target(
        "MLP recompute `activation` beside `none`",
        "99.6 %",
        lambda report: recompute(report, "activation"),
        0.996,
        _percent,
    ),
    Target("MLP recompute `full` beside `none`", "90 %", lambda report: recompute(report, "full"), 0.90, _percent),
    Target(
        "slowest memory-bound operation, of copy bandwidth",
        "85 %",
        lambda report: min(memory_bound(report).values(), default=None),
        0.85,
        _percent,
    ),
    Target("AdamW, of copy bandwidth", "85 %", lambda report: memory_bound(report).get("adamw"), 0.85, _percent),
)


def render(report: Report | None) -> str:
    """Return the section: goals, ceilings, operations, training, tests."""
    lines = ["", *markdown_table(("what", "goal", "measured", ""), list(_target_rows(report or {})))]
    if report is not None:
        for part in (_head, _steps, _ops, _training, _variants, _tests):
            lines += ["", *part(report)]
    return "\n".join([*lines, "", ""])


def _target_rows(report: Report) -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        value = target.value(report)
        if value is None:
            yield target.name, target.goal, NOT_MEASURED, ""
        else:
            yield target.name, target.goal, target.show(value), "met" if value >= target.at_least else "missed"


def _head(report: Report) -> Iterator[str]:
    machine, versions, ceilings = report.get("machine", {}), report.get("versions", {}), step(report, "ceilings")
    numbers = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield f"{machine.get('device', 'unknown device')}, driver {machine.get('driver')}; {numbers}; {report.get('date')}."
    if ceilings:
        yield (
            f"Measured ceilings: a copy of {ceilings['copy_bytes'] / 2**31:.0f} GiB moves "
            f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, reads and writes together; a bf16 product of "
            f"{ceilings['gemm_size']} x {ceilings['gemm_size']} matrices of random numbers reaches "
            f"{ceilings['gemm_flop_per_s'] / 1e12:.0f} TFLOP/s."
        )


def _steps(report: Report) -> list[str]:
    rows = [
        (name, entry["status"], f"{entry['seconds']:.0f}", str(entry.get("reason", "")))
        for name, entry in report.get("steps", {}).items()
    ]
    return markdown_table(("step", "", "seconds", ""), rows)


def _cell(found: dict[str, Any], key: str, form: str, unit: float = 1.0) -> str:
    """Format a number in a unit; empty if it is missing or zero."""
    return format(found[key] / unit, form) if found.get(key) else ""


def _ops(report: Report) -> Iterator[str]:
    """Yield a line per operation and variant; a failed variant shows its error."""
    rows = []
    for name, op in step(report, "ops").get("ops", {}).items():
        for variant, found in op.get("variants", {}).items():
            cells = [str(found.get("failed", op.get("status", "")))[:80], *[""] * 5]
            if "ms" in found:
                cells = [
                    spread_cell(found["ms"], 3),
                    _cell(found, "bytes_per_s", ",.0f", 1e9),
                    _cell(found, "fraction_of_copy", ".1f", 0.01),
                    _cell(found, "fraction_of_equal_copy", ".1f", 0.01),
                    _cell(found, "flop_per_s", ".0f", 1e12),
                    f"{found['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in found else "",
                ]
            rows.append([name, op.get("shape", ""), variant, *cells])
    if rows:
        yield "Each operation at the shapes of Mistral-7B. Bytes are the minimum, each counted once; new memory is the"
        yield "most that a call allocates beside its inputs."
        yield ""
        rates = ("ms (quartiles)", "GB/s", "% of copy", "% of equal copy", "TFLOP/s", "new, MiB")
        yield from markdown_table(("operation", "shape", "", *rates), rows)


def _training(report: Report) -> Iterator[str]:
    """Yield a table per model; a row that failed or cannot run shows the reason."""
    for model in ("gpt2-124m", "llama-3-8b-8l", *MISTRAL):
        result = step(report, model)
        rows = [[name, *_training_cells(row)] for name, row in result.get("configurations", {}).items()]
        failures = result.get("failures", {}) | result.get("unavailable", {})
        rows += [[name, str(reason)[:120], *[""] * 5] for name, reason in failures.items()]
        if rows:
            yield f"`{result.get('command', model)}`"
            yield ""
            header = ("step, s (quartiles)", "tokens/s", "model TFLOP/s", "MFU causal", "MFU full", "peak, GiB")
            yield from markdown_table((model, *header), rows)
            yield ""


def _training_cells(row: dict[str, Any]) -> list[str]:
    return [
        spread_cell(row.get("step_s"), 4) or NOT_MEASURED,
        _cell(row, "tokens_per_s", ",.0f"),
        _cell(row, "model_tflops", ".0f"),
        _cell(row, "mfu", ".1%"),
        _cell(row, "mfu_full", ".1%"),
        _cell(row, "peak_bytes", ".2f", 2**30),
    ]


def _variants(report: Report) -> Iterator[str]:
    """Yield our own variants beside each other, with the planned and the measured peak of memory."""
    for name in ("variants", "deterministic"):
        result = step(report, name)
        rows = []
        for variant, found in result.get("variants", {}).items():
            cells = [str(found.get("failed", NOT_MEASURED))[:80], *[""] * 5]
            if "step_ms" in found:
                cells = [
                    str(found.get("attention", "")),
                    spread_cell(found["step_ms"], 1),
                    _cell(found, "tokens_per_s", ",.0f"),
                    _cell(found, "peak_bytes", ".2f", 2**30),
                    _cell(found, "planned_peak_bytes", ".2f", 2**30),
                    f"{100 * (found['planned_peak_bytes'] / found['peak_bytes'] - 1):+.1f} %",
                ]
            rows.append([variant, *cells])
        if rows:
            yield f"Our engine, {result.get('shape', '')}:"
            yield ""
            header = (
                name,
                "attention",
                "step, ms (quartiles)",
                "tokens/s",
                "peak, GiB",
                "planned, GiB",
                "error of the plan",
            )
            yield from markdown_table(header, rows)
            yield ""


def _tests(report: Report) -> Iterator[str]:
    for name in ("kernel tests", "GPU tests", "flex_attention tests"):
        found = step(report, name)
        if found:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items()) or "none ran"
            yield f"{name[0].upper()}{name[1:]} on the device: {counts}."
            yield from (f"- `{failure}`" for failure in found["failures"][:20])
    smoke = step(report, "smoke test")
    if smoke:
        yield f"Smoke test: {'ok' if smoke.get('ok') else smoke.get('reason', 'failed')}, {smoke.get('seconds')} s."


def main(argv: Sequence[str]) -> int:
    """Write or compare the section; return the exit code."""
    parser = argument_parser(__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help="default docs/gpu_report.json")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if the document is stale")
    options = parser.parse_args(argv)
    if options.report != REPORT and not options.report.exists():
        parser.error(f"--report: {options.report} does not exist")
    report = json.loads(options.report.read_text("utf-8")) if options.report.exists() else None
    text = options.document.read_text("utf-8")
    if not SECTION.search(text):
        parser.error(f"--document: {options.document} needs <!-- table: gpu_report --> and <!-- end --> after it")
    new = SECTION.sub(lambda found: found[1] + render(report) + found[2], text)
    new = BUDGET.sub(lambda found: found[1] + budget.table() + found[2], new)
    if options.check:
        if new != text:
            print(f"{options.document} is out of date: run python -m scripts.benchmarks.gpu.render", file=sys.stderr)
        return int(new != text)
    options.document.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
