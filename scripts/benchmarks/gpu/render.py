"""Put a GPU report into docs/benchmarks.md, between `<!-- table: gpu_report -->` and `<!-- end -->`.

python -m scripts.benchmarks.gpu.render                       docs/gpu_report.json, or "not yet measured" without it
python -m scripts.benchmarks.gpu.render --report=other.json   another report of scripts/gpu_report.sh
python -m scripts.benchmarks.gpu.render --check               only compares; exit code 1 if the document is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
REPORT = ROOT / "docs" / "gpu_report.json"
SECTION = re.compile(r"(<!-- table: gpu_report -->\n).*?(<!-- end -->)", re.S)
NOT_MEASURED = "not yet measured"
MEMORY_BOUND_GOAL = 0.85


@dataclass(frozen=True)
class Target:
    """A row of the table of aims: what is wanted, and how it is read from a report (None: the report lacks it)."""

    name: str
    goal: str
    value: Callable[[dict[str, Any]], float | None]
    at_least: float
    show: Callable[[float], str]


def step(report: dict[str, Any], name: str) -> Any:
    """The results of a step; an empty dict where there are none."""
    return report.get("steps", {}).get(name, {}).get("result") or {}


MISTRAL = ("mistral-7b", "mistral-7b, 16 layers")


def best(report: dict[str, Any], tables: Sequence[str], key: str) -> float | None:
    """The best of a key over our rows of some training tables."""
    rows = [row for table in tables for row in step(report, table).get("configurations", {}).items()]
    values = [row[key] for name, row in rows if name.startswith("ZeRO") and row.get(key)]
    return max(values, default=None)


def speedup(report: dict[str, Any], model: str, *peers: str) -> float | None:
    """Our speed over that of the fastest of some peers: the median of the ratios of each round's step times."""
    ratios = step(report, model).get("configurations", {}).get("ZeRO-1", {}).get("ratios", {})
    found = [ratios[peer]["median"] for peer in peers if ratios.get(peer)]
    return 1 / max(found) if found else None


def recompute(report: dict[str, Any], level: str) -> float | None:
    """Tokens per second at a level of MLP recomputation over those at `none`."""
    variants = step(report, "variants").get("variants", {})
    times = [variants.get(name, {}).get("step_ms", {}).get("median") for name in ("none", level)]
    return times[0] / times[1] if all(times) else None


def memory_bound(report: dict[str, Any]) -> dict[str, float]:
    """Operation -> its share of the measured copy bandwidth, for those that only move bytes."""
    ops = step(report, "ops").get("ops", {})
    found = {
        name: op.get("variants", {}).get("triton", {}).get("fraction_of_copy")
        for name, op in ops.items()
        if op.get("memory_bound")
    }
    return {name: value for name, value in found.items() if value is not None}


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _times(value: float) -> str:
    return f"{value:.3f}x"


TARGETS = (
    Target(
        "Mistral-7B shape, whole (32 layers), sequence 8192",
        "9,000 tokens/s to beat",
        lambda report: best(report, MISTRAL[:1], "tokens_per_s"),
        9000,
        lambda v: f"{v:,.0f} tokens/s",
    ),
    Target(
        "Mistral-7B shape, whole (32 layers), sequence 8192",
        "11,000 tokens/s",
        lambda report: best(report, MISTRAL[:1], "tokens_per_s"),
        11000,
        lambda v: f"{v:,.0f} tokens/s",
    ),
    Target(
        "Mistral-7B shape, 32 or 16 layers, sequence 8192",
        "540 model TFLOP/s",
        lambda report: best(report, MISTRAL, "model_tflops"),
        540,
        lambda v: f"{v:.0f} TFLOP/s",
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
        "MLP recompute `activation` beside `none`",
        "99.6 %",
        lambda report: recompute(report, "activation"),
        0.996,
        _percent,
    ),
    Target("MLP recompute `full` beside `none`", "90 %", lambda report: recompute(report, "full"), 0.90, _percent),
    Target(
        "memory-bound operations, the slowest, of copy bandwidth",
        "85 %",
        lambda report: min(memory_bound(report).values(), default=None),
        MEMORY_BOUND_GOAL,
        _percent,
    ),
    Target(
        "AdamW, of copy bandwidth",
        "85 %",
        lambda report: memory_bound(report).get("adamw"),
        MEMORY_BOUND_GOAL,
        _percent,
    ),
)


def render(report: dict[str, Any] | None) -> str:
    """The section: aims, ceilings, operations, training, tests."""
    lines = ["", *table(("aim", "goal", "measured", ""), list(_target_rows(report or {})))]
    if report is not None:
        for part in (_head, _steps, _ops, _training, _variants, _tests):
            lines += ["", *part(report)]
    return "\n".join([*lines, "", ""])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _target_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        value = target.value(report)
        if value is None:
            yield target.name, target.goal, NOT_MEASURED, ""
        else:
            yield target.name, target.goal, target.show(value), "met" if value >= target.at_least else "missed"


def _head(report: dict[str, Any]) -> Iterator[str]:
    machine, versions, ceilings = report.get("machine", {}), report.get("versions", {}), step(report, "ceilings")
    numbers = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield f"{machine.get('device', 'unknown device')}, driver {machine.get('driver')}; {numbers}; {report.get('date')}."
    if ceilings:
        yield (
            f"Measured ceilings: a copy of {ceilings['copy_bytes'] / 2**31:.0f} GiB moves "
            f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written together; a bf16 product of "
            f"{ceilings['gemm_size']} x {ceilings['gemm_size']} matrices of random numbers does "
            f"{ceilings['gemm_flop_per_s'] / 1e12:.0f} TFLOP/s."
        )


def _steps(report: dict[str, Any]) -> list[str]:
    rows = [
        (name, entry["status"], f"{entry['seconds']:.0f}", str(entry.get("reason", "")))
        for name, entry in report.get("steps", {}).items()
    ]
    return table(("step", "", "seconds", ""), rows)


def _spread(times: dict[str, Any], digits: int) -> str:
    low, high = times["quartiles"]
    return f"{times['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _ops(report: dict[str, Any]) -> Iterator[str]:
    """One line per operation and variant; what failed says so."""
    rows = []
    for name, op in step(report, "ops").get("ops", {}).items():
        for variant, found in op.get("variants", {}).items():
            what = [name, op.get("shape", ""), variant]
            if "ms" not in found:
                rows.append([*what, str(found.get("failed", op.get("status", "")))[:80], *[""] * 5])
                continue
            fractions = [found.get(key) for key in ("fraction_of_copy", "fraction_of_equal_copy")]
            rows.append(
                [
                    *what,
                    _spread(found["ms"], 3),
                    f"{found['bytes_per_s'] / 1e9:,.0f}" if found.get("bytes_per_s") else "",
                    *(_percent(fraction) if fraction else "" for fraction in fractions),
                    f"{found['flop_per_s'] / 1e12:.0f}" if found.get("flop_per_s") else "",
                    f"{found['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in found else "",
                ]
            )
    if rows:
        yield "Each operation at the shapes of Mistral-7B. Bytes are the least that it has to move, each once;"
        yield '"new" is the most memory that a call takes beside its inputs.'
        yield ""
        header = (
            "operation",
            "shape",
            "",
            "ms (quartiles)",
            "GB/s",
            "of copy",
            "of a copy as large",
            "TFLOP/s",
            "new, MiB",
        )
        yield from table(header, rows)


def _training(report: dict[str, Any]) -> Iterator[str]:
    """A table per model; a row that failed or cannot run says why."""
    for model in ("gpt2-124m", "llama-3-8b-8l", *MISTRAL):
        result = step(report, model)
        rows = [[name, *_training_cells(row)] for name, row in result.get("configurations", {}).items()]
        failures = result.get("failures", {}) | result.get("unavailable", {})
        rows += [[name, str(reason)[:120], *[""] * 5] for name, reason in failures.items()]
        if rows:
            yield f"`{result.get('command', model)}`"
            yield ""
            header = ("step, s (quartiles)", "tokens/s", "model TFLOP/s", "MFU causal", "MFU full", "peak, GiB")
            yield from table((model, *header), rows)
            yield ""


def _training_cells(row: dict[str, Any]) -> list[str]:
    def cell(key: str, form: Callable[[float], str]) -> str:
        return form(row[key]) if row.get(key) else ""

    spread = _spread(row["step_s"], 4) if row.get("step_s") else NOT_MEASURED
    return [
        spread,
        cell("tokens_per_s", lambda v: f"{v:,.0f}"),
        cell("model_tflops", lambda v: f"{v:.0f}"),
        cell("mfu", _percent),
        cell("mfu_full", _percent),
        cell("peak_bytes", lambda v: f"{v / 2**30:.2f}"),
    ]


def _variants(report: dict[str, Any]) -> Iterator[str]:
    """Variants of our own configuration beside each other, with the planned and the measured peak of memory."""
    for name in ("variants", "deterministic"):
        result = step(report, name)
        rows = []
        for variant, found in result.get("variants", {}).items():
            if "step_ms" not in found:
                rows.append([variant, str(found.get("failed", NOT_MEASURED))[:80], "", "", "", ""])
                continue
            planned, peak = found["planned_peak_bytes"], found["peak_bytes"]
            rows.append(
                [
                    variant,
                    _spread(found["step_ms"], 1),
                    f"{found['tokens_per_s']:,.0f}",
                    f"{peak / 2**30:.2f}",
                    f"{planned / 2**30:.2f}",
                    f"{100 * (planned / peak - 1):+.1f} %",
                ]
            )
        if rows:
            yield f"Our engine, {result.get('shape', '')}:"
            yield ""
            header = (name, "step, ms (quartiles)", "tokens/s", "peak, GiB", "planned, GiB", "planned off by")
            yield from table(header, rows)
            yield ""


def _tests(report: dict[str, Any]) -> Iterator[str]:
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
    """Write or compare the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    if options.report != REPORT and not options.report.exists():
        parser.error(f"--report: there is no {options.report}")
    report = json.loads(options.report.read_text("utf-8")) if options.report.exists() else None
    text = options.document.read_text("utf-8")
    if not SECTION.search(text):
        parser.error(f"{options.document} lacks the line <!-- table: gpu_report --> with an <!-- end --> after it")
    new = SECTION.sub(lambda found: found[1] + render(report) + found[2], text)
    if options.check:
        if new != text:
            print(f"{options.document} is out of date: run python -m scripts.benchmarks.gpu.render", file=sys.stderr)
        return int(new != text)
    options.document.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
