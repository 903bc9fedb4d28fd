"""The steps of the GPU report, in parts: the tests, single operations, training. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.results import ROOT, read_json

PARTS = ("correctness", "operations", "training")  # in this order: numbers of a wrong program are worth nothing
OPS = ("-m", "scripts.benchmarks.gpu.ops")
# A line of `pytest -v`, with and without pytest-xdist.
OUTCOME = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
TEST_LINE = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>{OUTCOME}) (?P<a>\S+::.*)|(?P<b>\S+::.*) (?P<last>{OUTCOME})(?: .*)?)$"
)
SUMMARY_LINE = re.compile(r"^(FAILED|ERROR) (tests/.*)$")
DROPPED_FROM_ROWS = ("losses", "state_bytes_by_kind", "cpu_s", "others")


@dataclass(frozen=True)
class Step:
    """Arguments of Python, a time limit, and a reader of the results: (file that the step wrote, its log) -> results.

    {output} in the command: the file that the step writes.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    read: Callable[[Path, Path], Any]
    part: str = PARTS[0]
    resumes: bool = False  # restart after any exit code but 0 and 1: the step continues behind the crash


def steps(parallel_tests: int) -> list[Step]:
    """Return all steps in the order of their parts."""
    pytest: tuple[str, ...] = ("-m", "pytest", "-p", "no:cacheprovider", "-v", "--color=no", "-rfE")
    if parallel_tests > 1:
        pytest += ("-n", str(parallel_tests), "--dist=worksteal")
    # Some test files cannot be imported without all packages of the test extra.
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    pytest += ("--continue-on-collection-errors",)
    # flex_attention compiles for some ten seconds per shape, so its tests run last.
    pytest_gpu = (*pytest, "-m", "gpu", "-k", "not flex", *files)
    pytest_flex = (*pytest, "-m", "gpu", "-k", "flex", *files)

    def table(
        name: str, model: str, only: str, turns: int, budget_s: float, *options: str, part: str = PARTS[2]
    ) -> Step:
        flags = ("--device=cuda", f"--model={model}", "--dtype=bf16", f"--only={only}", f"--turns={turns}", *options)
        command = ("-m", "scripts.benchmarks.training", *flags, "--output={output}")
        return Step(name, command, budget_s, read_benchmark, part)

    gpt2, llama = "ZeRO-1,torch compiled*,FSDP2 compiled", "ZeRO-1,FSDP2 compiled,torch compiled"
    split = "ZeRO-1 split recompute"
    alone, layers = "--one_at_a_time", "--num_layers=16"  # 16 layers fit with all activations; 32 need memory options
    variants = "ZeRO-1,ZeRO-1 recompute activation,ZeRO-1 recompute full,ZeRO-1 without Triton,ZeRO-1 window 4096"
    few = (alone, "--num_layers=6", "--steps_per_turn=6")
    return [
        Step("kernel tests", (*pytest, "-m", "not slow and not gpu", "tests/kernels"), 110, read_tests),
        Step("GPU tests", pytest_gpu, 100, read_tests),
        Step("smoke test", ("scripts/smoke_test.py", "--device=cuda"), 80, read_smoke_test),
        Step("flex_attention tests", pytest_flex, 120, read_tests),
        Step("ceilings", (*OPS, "--ceilings", "--output={output}"), 40, read_output, PARTS[1]),
        Step("ops", (*OPS, "--output={output}"), 120, read_output, PARTS[1], resumes=True),
        table("variants", "mistral-7b", variants, 2, 85, *few, part=PARTS[1]),
        table("deterministic", "mistral-7b", "ZeRO-1,ZeRO-1 deterministic", 2, 50, *few, part=PARTS[1]),
        table("gpt2-124m", "gpt2-124m", gpt2, 5, 90, "--steps_per_turn=8"),
        table("llama-3-8b-8l", "llama-3-8b-8l", llama, 3, 90, alone),
        table("mistral-7b", "mistral-7b", f"{split} activation,{split} quarter,ZeRO-3 recompute full", 2, 130, alone),
        table("mistral-7b 16 layers", "mistral-7b", "ZeRO-1,ZeRO-3", 3, 50, alone, layers),
    ]


# -- readers ---------------------------------------------------------------------------------------------------------


def read_output(output: Path, log: Path) -> Any:
    """Return the JSON file, or None if the step wrote none."""
    return read_json(output)


def read_smoke_test(output: Path, log: Path) -> Any:
    """Return the last line of the log that is a JSON object."""
    for line in reversed(log.read_text("utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def read_tests(output: Path, log: Path) -> dict[str, Any]:
    """Return the number of tests per outcome, and the failures, from the log of `pytest -v -rfE`."""
    counts: dict[str, int] = {}
    failures, failed = [], []
    for line in log.read_text("utf-8", errors="replace").splitlines():
        found = TEST_LINE.match(line)
        if found:
            outcome = (found["first"] or found["last"]).lower()
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome in ("failed", "error"):
                failed.append((found["a"] or found["b"]).strip())
        elif summary := SUMMARY_LINE.match(line):
            failures.append(summary[2][:300])
    return {"counts": counts, "failures": failures or failed}  # a stopped run has no summary


def read_benchmark(output: Path, log: Path) -> Any:
    """Return the JSON of the training benchmark without the long lists in its rows."""
    result = read_json(output)
    for row in result["rows"].values() if result is not None else ():
        for key in DROPPED_FROM_ROWS:
            row.pop(key, None)
    return result


def chosen(known: Sequence[Step], wanted: Sequence[str]) -> list[Step]:
    """Return the steps whose name, or whose part, is wanted."""
    return [step for step in known if step.name in wanted or step.part in wanted]
