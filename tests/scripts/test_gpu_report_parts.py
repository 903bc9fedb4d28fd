"""The GPU report in several calls: what each of them runs, and how their results become one
report."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.gpu import report as gpu_report
from scripts.benchmarks.gpu.report import Step

pytestmark = pytest.mark.benchmarks


def test_each_part_fits_into_one_call() -> None:
    """Its budgets and its start add up to the limit at most, which is well below ten minutes. The
    tests come first, and every step can be chosen by its name."""
    known = gpu_report.steps(1)
    for part in gpu_report.PARTS:
        assert (
            gpu_report.START_S + sum(step.budget_s for step in known if step.part == part)
            <= gpu_report.LIMIT_S
        ), part
    assert gpu_report.LIMIT_S <= 540
    assert [step.part for step in known] == sorted(
        (step.part for step in known), key=gpu_report.PARTS.index
    )
    tests = [
        step.name
        for step in known
        if step.read in (gpu_report.read_tests, gpu_report.read_smoke_test)
    ]
    assert tests == [step.name for step in known if step.part == "correctness"]
    for step in known:
        assert gpu_report.parse([f"--only={step.name}"]).only == [step.name]


def test_a_call_runs_the_chosen_parts_and_steps() -> None:
    def names(*arguments: str) -> list[str]:
        return [
            step.name
            for step in gpu_report.chosen(gpu_report.steps(1), gpu_report.parse(arguments).only)
        ]

    assert names() == ["sanity", "kernel tests", "GPU tests", "smoke test", "flex_attention tests"]
    assert names("--only=training")[0] == "mistral-7b" and names("--only=peers")[0] == "gpt2-124m"
    assert "ops" in names("--only=operations")
    assert names("--only=smoke test,ops") == ["smoke test", "ops"]
    every = names(f"--only={','.join(gpu_report.PARTS)}", "--limit_s=3000")
    assert every == [step.name for step in gpu_report.steps(1)]


A_GPU = {
    "machine": {"device": "A GPU", "driver": "1"},
    "versions": {"torch": "2.13.0"},
    "commit": "none",
}


def part_of_report(date: str, **steps: Any) -> dict[str, Any]:
    entries = {
        name.replace("_", " "): {"status": "ok", "seconds": 1.0, "result": found}
        for name, found in steps.items()
    }
    return {
        "ok": True,
        "environment": A_GPU | {"date": date},
        "limit_s": 520.0,
        "seconds": 10.5,
        "steps": entries,
    }


def test_reports_of_several_calls_become_one(tmp_path: Path) -> None:
    """In the order of the steps, whatever the order of the calls; a step that ran twice counts as
    it ended last."""
    first, second, whole = (tmp_path / name for name in ("first.json", "second.json", "whole.json"))
    first.write_text(json.dumps(part_of_report("2026-01-01", ops=1, smoke_test=0)), "utf-8")
    again = part_of_report("2026-01-02", smoke_test=2, kernel_tests=3)
    again["steps"]["smoke test"]["status"] = "failed"
    second.write_text(json.dumps(again), "utf-8")
    assert gpu_report.main([f"--merge={first},{second}", f"--output={whole}"]) == 1
    found = json.loads(whole.read_text("utf-8"))
    assert [(name, step["result"]) for name, step in found["steps"].items()] == [
        ("kernel tests", 3),
        ("smoke test", 2),
        ("ops", 1),
    ]
    assert (
        found["ok"] is False
        and found["seconds"] == 21.0
        and found["environment"]["date"] == "2026-01-02"
    )
    assert found["environment"]["machine"] == A_GPU["machine"]


def test_reports_of_other_machines_or_commits_are_not_joined(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(part_of_report("2026-01-01", ops=1)), "utf-8")
    machine = {"device": "B GPU", "driver": "1"}
    for change, said in (
        ({"machine": machine}, "device A GPU and B GPU"),
        ({"commit": "abc"}, "commit none and abc"),
    ):
        other: dict[str, Any] = {"environment": A_GPU | change}
        second.write_text(json.dumps(part_of_report("2026-01-01", variants=1) | other), "utf-8")
        with pytest.raises(ValueError, match=said):
            gpu_report.main([f"--merge={first},{second}", f"--output={tmp_path / 'whole.json'}"])
        assert not (tmp_path / "whole.json").exists()
        with pytest.raises(
            ValueError, match=f"first.json holds the report of another machine or version .{said}"
        ):
            gpu_report.earlier_report(first, other)


def test_several_calls_make_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program with a fake GPU: each call adds its part; one on another machine runs
    nothing."""
    described = dict(A_GPU)
    command = ("-c", "import json, sys; json.dump({'n': 1}, open(sys.argv[1], 'w'))", "{output}")
    fakes = [Step(part, command, 30, gpu_report.read_output, part) for part in gpu_report.PARTS]
    monkeypatch.setattr(gpu_report, "describe", lambda: described)
    monkeypatch.setattr(gpu_report, "steps", lambda parallel: fakes)
    monkeypatch.setattr(gpu_report, "private_environment", lambda *_, **__: {})
    output = tmp_path / "report.json"
    for count, part in enumerate(gpu_report.PARTS, start=1):
        more = [] if count == 1 else [f"--only={part}"]
        assert gpu_report.main([f"--output={output}", *more]) == 0
        found = json.loads(output.read_text("utf-8"))
        assert list(found["steps"]) == [*gpu_report.PARTS[:count]] and found["ok"]
    # A step that fails replaces its result; the file is whole, and the other results stay.
    fakes[1] = Step(
        fakes[1].name, ("-c", "raise SystemExit(3)"), 30, gpu_report.read_output, fakes[1].part
    )
    assert gpu_report.main([f"--output={output}", f"--only={fakes[1].name}"]) == 1
    found = json.loads(output.read_text("utf-8"))
    assert [step["status"] for step in found["steps"].values()] == [
        "ok",
        "failed",
        "ok",
        "ok",
    ] and not found["ok"]
    described["machine"] = {"device": "B GPU"}
    with pytest.raises(ValueError, match="device A GPU and B GPU"):
        gpu_report.main([f"--output={output}"])
    assert json.loads(output.read_text("utf-8")) == found


# A step whose device fails in its second turn, after it has written what the first one measured.
STAND_IN = """
import json, os, signal, sys, time

def device_fails(how):
    if how == "crash":
        os.abort()
    if how == "hang":
        print("hangs", flush=True)
        time.sleep(600)
    if how == "memory":
        raise MemoryError("CUDA out of memory")
    os.kill(os.getpid(), signal.SIGKILL)

how, output = sys.argv[1:]
print("tests/test_a.py::test_b PASSED", flush=True)
json.dump({"rows": {"ZeRO-1": {"tokens_per_s": 1.0}}}, open(output, "w"))
device_fails(how)
"""


class Impatient(subprocess.Popen[bytes]):
    """A process whose deadline comes as soon as it hangs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._log = Path(options["stdout"].name)
        super().__init__(*args, **options)

    def wait(self, timeout: float | None = None) -> int:
        while timeout == gpu_report.STACKS_S or "hangs" not in self._log.read_text("utf-8"):
            if timeout is None or self.poll() is not None:
                return super().wait(timeout)
            time.sleep(0.01)
        return super().wait(0.001 if timeout is not None else None)


@pytest.mark.parametrize(
    ("how", "reason", "trace"),
    [
        ("crash", "exit code -6", ["Fatal Python error: Aborted", "in device_fails"]),
        (
            "hang",
            "did not end before its deadline",
            ["hangs", "Fatal Python error: Aborted", "in device_fails"],
        ),
        pytest.param(
            "memory",
            "exit code 1",
            ["Traceback (most recent", "in device_fails", "MemoryError: CUDA out of memory"],
            marks=pytest.mark.slow,
        ),
        pytest.param("killed", "exit code -9", [], marks=pytest.mark.slow),
    ],
)
def test_every_step_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str, trace: list[str]
) -> None:
    """The whole report with a stand-in for the device, which fails in each step: log, stacks and
    measured rows stay."""
    every = [
        replace(step, command=("-c", STAND_IN, how, "{output}"), budget_s=60.0)
        for step in gpu_report.steps(1)
    ]
    monkeypatch.setattr(gpu_report, "describe", lambda: A_GPU)
    monkeypatch.setattr(gpu_report, "steps", lambda parallel: every)
    monkeypatch.setattr(gpu_report, "private_environment", lambda *_, **__: {})
    monkeypatch.setattr(gpu_report.subprocess, "Popen", Impatient)
    output = tmp_path / "report.json"
    flags = [f"--only={','.join(gpu_report.PARTS)}", "--limit_s=10000"]
    assert gpu_report.main([f"--output={output}", *flags]) == 1
    found = json.loads(output.read_text("utf-8"))
    assert list(found["steps"]) == [step.name for step in every] and not found["ok"]
    measured = {
        gpu_report.read_tests: {"counts": {"passed": 1}, "failures": []},
        gpu_report.read_smoke_test: None,
    }
    for step in every:
        entry = found["steps"][step.name]
        log = tmp_path / "report_logs" / f"{step.name.replace(' ', '_')}.log"
        assert (
            entry["status"] == ("stopped" if how == "hang" else "failed")
            and entry["reason"] == reason
        ), step.name
        assert entry["result"] == measured.get(
            step.read, {"rows": {"ZeRO-1": {"tokens_per_s": 1.0}}}
        ), step.name
        tail = "\n".join(entry["log_tail"])
        assert all(part in tail for part in ["test_b PASSED", *trace]) and tail in log.read_text(
            "utf-8"
        ), step.name
