"""The report of a CPU: every command in it is legal, results add up, and docs/benchmarks.md shows
the newest ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.cpu import __main__ as cpu_report
from scripts.benchmarks.cpu import render
from scripts.benchmarks.cpu.__main__ import RUNS
from scripts.benchmarks.processor import ISAS
from scripts.benchmarks.programs import __main__ as programs
from scripts.benchmarks.training import settings

pytestmark = pytest.mark.benchmarks

ROOT = Path(__file__).resolve().parents[2]


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "quartiles": [median / 2, median * 2]}


def spreads(**medians: float) -> dict[str, Any]:
    return {name.replace("_", "-"): spread(median) for name, median in medians.items()}


MACHINE = {
    "device": "A CPU",
    "cores": 2,
    "instruction_sets": {"torch": "AVX2", "oneDNN": "AVX2", "MKL": "AVX2"},
}
ENVIRONMENT = {
    "machine": MACHINE,
    "versions": {"torch": "2.13"},
    "commit": "abc",
    "date": "2026-01-01",
}
PROGRAM = {"step_s": spread(0.2), "start_s": spread(3.5), "ratios": {}}
PROFILED = {
    "step_s": spread(1.0),
    "ratios": {},
    "profile_s": {"products": 0.5, "compiled": 0.0, "rest": 0.1},
}


def result(missing: dict[str, str], **rows: Any) -> dict[str, Any]:
    return {"environment": ENVIRONMENT, "failures": {}, "missing": missing, "rows": rows}


OURS = PROGRAM | {"peak_rss_bytes": 100 << 20, "ratios": spreads(nanoGPT=0.7)}
THEIRS = PROGRAM | {"peak_rss_bytes": 200 << 20}
DDP = {"step_s": spread(1.0), "ratios": spreads(DDP=1, ZeRO_1=1.25)}
ROWS = {name: PROFILED for name in ("torch", "torch compiled", "ZeRO-1")}
REPORT: dict[str, Any] = {
    "programs gpt2-11m all cores": {
        "avx2": result({"litgpt": "litgpt is not installed"}, megatron_lite=OURS, nanoGPT=THEIRS)
    },
    "steps gpt2-11m one thread": {"all": result({}, **ROWS)},
    "steps llama-39m two ranks": {
        "all": result({}, DDP=DDP, **{"ZeRO-1": {"step_s": spread(0.8), "ratios": {}}})
    },
}


def test_commands_are_legal(tmp_path: Path) -> None:
    """Each benchmark accepts its arguments, and the document has rows of their names."""
    for run in RUNS:
        if run.kind == "programs":
            options = programs.parse(run.arguments())
            assert options.ranks == run.ranks and options.model == run.model
            continue
        rows = settings.chosen(settings.parse(run.arguments()), run.ranks)
        assert len(rows) >= 2 and f"--nproc-per-node={run.ranks}" in run.command(
            cpu_report.parse([]), "all", tmp_path
        )


def rendered(folder: Path, report: dict[str, Any]) -> str:
    """Return docs/benchmarks.md with the tables of a report."""
    document, output = folder / "benchmarks.md", folder / "report.json"
    document.write_text((ROOT / "docs" / "benchmarks.md").read_text("utf-8"), "utf-8")
    output.write_text(json.dumps(report), "utf-8")
    assert render.main([f"--report={output}", f"--document={document}"]) == 0
    return document.read_text("utf-8")


def test_tables_show_what_was_measured(tmp_path: Path) -> None:
    """Goals met are plain, goals missed are bold, missing programs are named, unmeasured tables say
    so."""
    text = rendered(tmp_path, REPORT)
    assert "| one process, all cores: program / nanoGPT | 0.92 | 0.80 |  | 0.70 |  |  |" in text
    assert (
        "| one process, all cores: peak memory / smallest peer's | 1.00 |  |  | 0.50 |  |  |"
        in text
    )
    assert "| two ranks: step / DDP | 0.90 | 0.82 |  |  | 0.80 |  |" in text
    assert (
        "| GPT-2 11M | nanoGPT |  |  |  |  | 0.70 (0.35-1.40) | 200 (100-400) | 200 | 3.5 |" in text
    )
    assert "Not run: litgpt (litgpt is not installed)." in text
    assert (
        "A CPU, 2 cores; torch: AVX2; oneDNN: AVX2; MKL: AVX2; torch 2.13; commit abc, 2026-01-01."
        in text
    )
    table = "GPT-2 11M, one thread, everything:\n\n|  | profiled step, ms | products | rest |\n| --- | --- | --- | --- |\n"
    assert f"{table}| torch | 600 | 500.0 | 100.0 |\n| ZeRO-1 | 600 | 500.0 | 100.0 |\n" in text
    missed = json.loads(json.dumps(REPORT).replace("0.7", "0.97"))
    assert "| 0.92 | 0.80 |  | **0.97** |" in rendered(tmp_path, missed)
    assert "not yet measured" in rendered(tmp_path, {})


def test_results_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call replaces what it measures again and keeps the rest; a run without a result
    fails the call."""
    output = tmp_path / "report.json"
    results = iter(
        [{"n": 1, "losses": [1.0]}, {"n": 2, "settings": {"python": "/secret"}}, {"n": 3}, None]
    )
    monkeypatch.setattr(cpu_report, "measure", lambda *_: next(results))
    only = "--only=steps llama-39m all cores"
    assert cpu_report.main([only, f"--output={output}"]) == 0
    assert cpu_report.main([only, "--isa=avx2", f"--output={output}"]) == 0
    report = json.loads(output.read_text())
    assert report == {"steps llama-39m all cores": {"all": {"n": 1}, "avx2": {"n": 3}}}
    assert cpu_report.main([only, "--isa=all", f"--output={output}"]) == 1
    assert json.loads(output.read_text()) == report


def test_every_goal_reads_a_number() -> None:
    """No goal names a row or a run that is never measured."""
    report = json.loads(render.REPORT.read_text("utf-8"))
    cells = {
        goal.title: [goal.cell(report, model, isa) for model in render.MODELS for isa in ISAS]
        for goal in render.GOALS
    }
    assert [title for title, values in cells.items() if not any(values)] == []
