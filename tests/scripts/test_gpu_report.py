"""scripts/gpu_report.sh without a GPU: its deadlines and records with other programs as steps, and
what is made of a report that is written here."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.kernels import choice as kernels_choice
from megatron_lite.kernels.attention import choice as attention_choice
from megatron_lite.kernels.attention.choice import Machine
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.planner.plan import make_plan
from scripts.benchmarks.gpu import ops as gpu_ops
from scripts.benchmarks.gpu import render as rendering
from scripts.benchmarks.gpu import report as gpu_report
from scripts.benchmarks.gpu.operation import Op, Shape
from scripts.benchmarks.gpu.ops_table import FULL, OPS, WINDOWED, attention_flops
from scripts.benchmarks.gpu.report import Report, Step
from scripts.benchmarks.training import settings as benchmark_settings
from tests.scripts.test_benchmark_programs import process_state
from tests.support import documents, warm_python

pytestmark = pytest.mark.benchmarks

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> tuple[str, ...]:
    return ("-c", f"import json, os, sys, time\n{code}")


def run(folder: Path, limit_s: float, *steps: Step) -> dict[str, Any]:
    """The file that a report of these steps leaves."""
    Report(folder / "report.json", limit_s, {"date": "2026-01-01"}).run_all(steps)
    return json.loads((folder / "report.json").read_text("utf-8"))


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Exit code 0, one line, and no file."""
    done = documents.typed(
        f"bash {ROOT}/scripts/gpu_report.sh", tmp_path, PYTHON=str(warm_python.folder() / "python")
    )
    assert done.returncode == 0, done.stdout
    assert (
        done.stdout.startswith("gpu_report: nothing to report: torch ")
        and done.stdout.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    """The reason and the end of the log are recorded; what the step had written counts; the next
    one runs."""
    write = "open(sys.argv[1], 'w').write(json.dumps({'rows': 3}))"
    found = run(
        tmp_path,
        60.0,
        Step(
            "bad",
            (*python(f"{write}; print('so it goes'); sys.exit(7)"), "{output}"),
            30,
            gpu_report.read_output,
        ),
        Step("silent", python("pass"), 30, gpu_report.read_output),
        Step(
            "broken",
            (*python("open(sys.argv[1], 'w').write('{')"), "{output}"),
            30,
            gpu_report.read_output,
        ),
        Step("good", (*python(write), "{output}"), 30, gpu_report.read_output),
    )
    bad, silent, broken, good = found["steps"].values()
    assert (
        bad["status"] == "failed"
        and bad["reason"] == "exit code 7"
        and bad["result"] == {"rows": 3}
    )
    assert bad["log_tail"] == ["so it goes"]
    assert silent["status"] == "ok" and silent["result"] is None
    assert broken["status"] == "failed" and "cannot be read" in broken["reason"]
    assert good["status"] == "ok" and good["result"] == {"rows": 3}
    assert found["ok"] is False and found["date"] == "2026-01-01"


def test_deadlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends with its budget or with the time of all, and all its processes with it; later
    ones are not begun."""
    monkeypatch.setattr(gpu_report, "MIN_STEP_S", 0.3)
    child = tmp_path / "child"
    start_child = f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    partial = "open(sys.argv[1], 'w').write(json.dumps({'rows': 1})); time.sleep(60)"
    found = run(
        tmp_path,
        1.6,
        Step("slow", (*python(partial), "{output}"), 0.8, gpu_report.read_output),
        Step(
            "endless",
            python(f"import subprocess; {start_child}; time.sleep(60)"),
            30,
            gpu_report.read_output,
        ),
        Step("late", python("pass"), 30, gpu_report.read_output),
    )
    slow, endless, late = found["steps"].values()
    assert slow["status"] == "stopped" and slow["seconds"] < 1.6 and slow["result"] == {"rows": 1}
    assert endless["status"] == "stopped" and endless["seconds"] < 1.6
    assert late["status"] == "not run" and late["reason"] == "0 s were left"
    assert found["seconds"] < 2.4 and found["ok"] is False
    deadline = time.monotonic() + 10
    while process_state(int(child.read_text())) not in "ZX":
        assert time.monotonic() < deadline, "what a stopped step has started lives on"
        time.sleep(0.01)


def test_training_tables_name_rows_that_exist() -> None:
    """The report asks the training benchmark for models and rows that it knows, by which the goals
    are read off."""
    rows = {}
    for step in gpu_report.steps(1):
        if step.command[:2] == ("-m", "scripts.benchmarks.training"):
            options = benchmark_settings.parse(step.command[2:])
            rows[step.name] = set(benchmark_settings.chosen(options, 1))
    assert rows == {
        "variants": {
            *(
                "ZeRO-1",
                "ZeRO-1 recompute activation",
                "ZeRO-1 recompute full",
                "ZeRO-1 without Triton",
            ),
            "ZeRO-1 window 4096",
        },
        "fp8": {"ZeRO-1", "ZeRO-1 fp8 tensorwise", "ZeRO-1 fp8 rowwise", "ZeRO-1 int8"},
        "deterministic": {"ZeRO-1", "ZeRO-1 deterministic"},
        "gpt2-124m": {"ZeRO-1", "torch compiled", "torch compiled full logits", "FSDP2 compiled"},
        "llama-3-8b-8l": {"ZeRO-1", "torch compiled", "FSDP2 compiled"},
        "mistral-7b": {
            "ZeRO-1 split recompute activation",
            "ZeRO-1 split recompute quarter",
            "ZeRO-3 recompute full",
        },
        "mistral-7b 16 layers": {"ZeRO-1", "ZeRO-3"},
        "mistral-7b 16 layers x 8": {"ZeRO-1", "ZeRO-1 window 4096"},
        "profile": {"ZeRO-1"},
        "profile gpt2-124m": {"ZeRO-1", "torch compiled full logits"},
    }


def configurations(step: str) -> dict[str, Config]:
    """Return the resolved configurations of the rows of a step, which are all ours."""
    (asked,) = (one for one in gpu_report.steps(1) if one.name == step)
    options = benchmark_settings.parse(asked.command[2:])
    rows = benchmark_settings.chosen(options, 1).items()
    return {name: benchmark_settings.row_config(row, options, 1) for name, row in rows}


def test_variants_of_training_fit_an_h200() -> None:
    """Every one is a legal configuration, and its plan leaves a tenth of 139 GiB."""
    for config in (configurations("variants") | configurations("deterministic")).values():
        assert 10 * 2**30 < make_plan(config, 1, "cuda").peak_bytes() < 0.9 * 139 * 2**30


def test_the_whole_mistral_fits_an_h200() -> None:
    """By the plan, with everything that the runtime takes, each row needs less than 139 GiB; level
    `none` would not.

    The row with `full` in a quarter of the blocks is there because `activation` in all of them
    leaves 2.7 GiB.
    """
    rows = configurations("mistral-7b")
    needed = {
        name: make_plan(config, 1, "cuda").needed_bytes() / 2**30 for name, config in rows.items()
    }
    assert {name: round(size, 1) for name, size in needed.items()} == {
        "ZeRO-1 split recompute activation": 136.3,
        "ZeRO-1 split recompute quarter": 132.8,
        "ZeRO-3 recompute full": 123.6,
    }
    plain = make_plan(rows["ZeRO-1 split recompute activation"], 1, "cuda")
    assert (
        plain.state_bytes / 2**30 == pytest.approx(107.9, abs=0.05)
        and plain.needed_bytes("none") / 2**30 > 141
    )


def test_cudnn_computes_the_attention_of_every_table_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU of the table whose backends all work stands in for an H100: cuDNN is chosen; with a
    window it is not."""
    monkeypatch.setattr(attention_choice, "machine_of", lambda device: Machine((9, 0), 91501))
    monkeypatch.setattr(kernels_choice, "failure", lambda *asked: None)
    monkeypatch.setattr(kernels_choice, "runs_on", lambda device: True)
    cases: list[dict[str, Any]] = [{}, {"window_size": 512}, {"deterministic": True}]
    for model in ("gpt2-124m", "mistral-7b", "llama-3-8b-8l"):
        options = benchmark_settings.parse(["--device=cuda", f"--model={model}", "--dtype=bf16"])
        for more, backend in zip(cases, ("cudnn", "varlen", "flash"), strict=True):
            config = benchmark_settings.engine_config(options, 1, **more)
            assert choose_kernels(config, torch.device("cuda", 0)).attention == backend, (
                model,
                more,
            )


SMALL = Shape(
    6, 16, 24, heads=4, groups=2, head_size=8, vocab=40, large_vocab=70, shard=256, device="cpu"
)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_operations_are_called_as_they_want_to_be(op: Op) -> None:
    """Each with its Triton kernels and its reference, in small, twice as when it is timed; and it
    moves or computes."""
    # A CPU's torch has no product of bf16 matrices that is written or added in fp32.
    left_out = ("torch compiled", "to fp32")
    calls = {name: call for name, call in op.make(SMALL).items() if not name.endswith(left_out)}
    for name, call in calls.items():
        if name not in (*FULL, *WINDOWED):  # these need a GPU
            call()
            call()
    assert calls and op.bytes(SMALL) + op.flops(SMALL) > 0 and op.describe(SMALL)
    assert not op.memory_bound or "triton" in calls, (
        "what is aimed at is measured of Triton's variant"
    )


class FakeClock:
    """Half a millisecond for everything."""

    def ms(self, call: Any, for_ms: float = 60.0) -> dict[str, Any]:
        call()
        return ms(0.5)

    def copy_ms(self, bytes_: int) -> float:
        return 0.25


def test_the_measurements_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates from bytes and operations; a variant that fails is recorded, and the others are
    measured."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    ops = {op.name: op for op in OPS}
    clock: Any = FakeClock()
    norm = gpu_ops.measure_op(ops["rms_norm backward"], SMALL, clock, 1e6)
    moved = 3 * 6 * 16 * 2
    assert norm["status"] == "ok" and norm["bytes"] == moved and norm["memory_bound"]
    assert norm["variants"]["triton"] == {
        "ms": ms(0.5),
        "peak_bytes": 600,
        "bytes_per_s": moved / 5e-4,
        "fraction_of_copy": moved / 5e-4 / 1e6,
        "fraction_of_equal_copy": 0.5,
    }
    attention = gpu_ops.measure_op(ops["attention forward"], SMALL, clock, 1e6)
    assert attention["status"] == "failed" and set(attention["variants"]) == set(FULL) - {
        "flash3",
        "flash4",
    }
    product = gpu_ops.measure_op(ops["weight gradient"], SMALL, clock, 1e6)["variants"][
        "training dtype alone"
    ]
    assert product["flop_per_s"] == 2 * 6 * 16 * 24 / 5e-4 and "bytes_per_s" not in product
    measured = {"rms_norm backward": norm, "attention forward": attention}
    text = rendered(
        {"steps": {"ops": {"status": "failed", "seconds": 1.0, "result": {"ops": measured}}}}
    )
    assert (
        "| rms_norm backward | 6 x 16 | triton | 0.500 (0.450-0.550) |" in text and "cudnn" in text
    )


def test_operations_of_attention() -> None:
    """Pairs of positions that look at each other, counted one by one."""
    shape = Shape(tokens=9, heads=3, head_size=5)
    for window in (None, 1, 4, 9, 100):
        pairs = sum(min(row + 1, window or 9) for row in range(9))
        assert attention_flops(shape, window, 3.5) == 3.5 * 4 * pairs * 3 * 5


LOG = """
tests/kernels/test_a.py::test_one[x y] PASSED                            [ 33%]
tests/kernels/test_a.py::test_two FAILED                                 [ 66%]
tests/kernels/test_a.py::test_six[no CUDA] SKIPPED (no CUDA device)      [ 67%]
FAILED is what tests/kernels/test_a.py::test_two printed, and A GPU TOO
[gw1] [ 66%] PASSED tests/kernels/test_a.py::test_three[bf16]
[gw0] [ 70%] SKIPPED tests/test_gpu.py::test_four
[gw0] [ 99%] FAILED tests/test_gpu.py::test_five
FAILED tests/test_gpu.py::test_five - assert 1 == 2
"""


def test_logs_of_pytest(tmp_path: Path) -> None:
    """With and without pytest-xdist."""
    log = tmp_path / "log"
    log.write_text(LOG, "utf-8")
    found = gpu_report.read_tests(log, log)
    assert found["counts"] == {"passed": 2, "failed": 2, "skipped": 2}
    assert found["failures"] == ["tests/test_gpu.py::test_five - assert 1 == 2"]


def test_the_result_of_the_smoke_test(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('smoke_test: prepare\n{"ok": true, "seconds": 30.0}\n', "utf-8")
    assert gpu_report.read_smoke_test(log, log) == {"ok": True, "seconds": 30.0}


def ms(median: float) -> dict[str, Any]:
    return {"median": median, "quartiles": [0.9 * median, 1.1 * median]}


def a_report() -> dict[str, Any]:
    """One in which the aims are met but for two, and some things failed."""

    def table(ratios: dict[str, float], **tokens_per_s: float) -> dict[str, Any]:
        known = {
            "mfu": 0.5,
            "mfu_full": None,
            "peak_bytes": 100 * 2**30,
            "planned_peak_bytes": 102 * 2**30,
        }
        rows: dict[str, Any] = {
            name: known
            | {"step_s": ms(8192 / value), "tokens_per_s": value, "model_tflops": value / 20}
            for name, value in tokens_per_s.items()
        }
        for row in rows.values():
            row["attention"] = "cudnn"
        if "ZeRO-1" in rows:
            rows["ZeRO-1"]["ratios"] = {name: {"median": ratio} for name, ratio in ratios.items()}
        return {
            "environment": {"command": "scripts/benchmarks/training"},
            "rows": rows,
            "failures": {"HF": "out of memory"},
            "missing": {"HF": "transformers is not installed"},
        }

    def variants(**slower: float) -> dict[str, Any]:
        found = table(
            {},
            **{"ZeRO-1": 500.0},
            **{f"ZeRO-1 recompute {name}": 500 / by for name, by in slower.items()},
        )
        for name, by in slower.items():
            found["rows"][f"ZeRO-1 recompute {name}"]["ratios"] = {"ZeRO-1": {"median": by}}
        return found

    def op(fraction: float) -> dict[str, Any]:
        one = {
            "ms": ms(0.1),
            "bytes_per_s": 4e12,
            "fraction_of_copy": fraction,
            "fraction_of_equal_copy": fraction,
        }
        return {
            "status": "ok",
            "shape": "8192 x 4096",
            "memory_bound": True,
            "variants": {"triton": one},
        }

    def done(result: Any, status: str = "ok") -> dict[str, Any]:
        return {"status": status, "seconds": 1.0, "result": result}

    machine = {"device": "A GPU", "driver": "1.2", "cores": 16}
    versions = {"torch": "2.11.0", "cudnn": None}
    ceilings = {
        "copy_bytes": 2**33,
        "copy_bytes_per_s": 4.3e12,
        "gemm_size": 8192,
        "gemm_flop_per_s": 7.9e14,
    }
    failed = {"status": "failed", "variants": {"": {"failed": "RuntimeError: no"}}}
    return {
        "environment": {
            "date": "2026-01-01",
            "commit": "abc",
            "machine": machine,
            "versions": versions,
        },
        "seconds": 100.0,
        "steps": {
            "ceilings": done(ceilings),
            "ops": done(
                {"ops": {"rms_norm": op(0.9), "adamw": op(0.86), "rotary": failed}}, "failed"
            ),
            "gpt2-124m": done(
                table(
                    {"torch compiled": 0.9, "torch compiled full logits": 0.98}, **{"ZeRO-1": 500.0}
                )
            ),
            "llama-3-8b-8l": done(
                table({"FSDP2 compiled": 0.8, "torch compiled": 0.9}, **{"ZeRO-1": 360.0})
            ),
            "mistral-7b": done(table({}, **{"ZeRO-3 recompute full": 10000.0})),
            "mistral-7b 16 layers": done(table({}, **{"ZeRO-1": 11000.0, "ZeRO-3": 10900.0})),
            "variants": done(variants(activation=1.001, full=1.09)),
            "kernel tests": done(
                {"counts": {"passed": 9, "failed": 1}, "failures": ["x.py::test - no"]}, "failed"
            ),
            "smoke test": {"status": "not run", "seconds": 0.0, "reason": "3 s were left"},
        },
    }


def rendered(report: dict[str, Any]) -> str:
    return "\n".join(rendering.section(report))


def test_rendering_of_a_report() -> None:
    """Aims are read off the right rows; failures are shown; what is not there is not made up."""
    text = rendered(a_report())
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = {name + goal: " | ".join([name, goal, *others]) for name, goal, *others in cells}
    aims = {
        "9,000 tokens/s": "10,000 tokens/s | met",
        "11,000 tokens/s": "10,000 tokens/s | missed",
    }
    aims |= {"540 model": "550 TFLOP/s | met", "1.15x": "1.250x | met", "1.10x": "1.020x | missed"}
    aims |= {"99.6 %": "99.9 % | met", "by cuDNN": "by cuDNN | met", "90 %": "91.7 % | met"}
    aims |= {"slowest": "86.0 % | met", "AdamW": "86.0 % | met"}
    for aim, measured in aims.items():
        assert any(aim in key and measured in line for key, line in rows.items()), (aim, rows)
    parts = [
        "4.30 TB/s",
        "790 TFLOP/s",
        "RuntimeError: no",
        "x.py::test - no",
        "3 s were left",
        "+2.0 %",
    ]
    assert not [
        part
        for part in (*parts, "out of memory", "transformers is not", "torch 2.11.0")
        if part not in text
    ]
    assert "cudnn None" not in text and "NaN" not in text


def test_a_partial_report_can_be_rendered() -> None:
    """Whatever had been measured when it was stopped."""
    report = a_report()
    for kept in range(10):
        text = rendered(report | {"steps": dict(list(report["steps"].items())[:kept])})
        assert (rendering.NOT_MEASURED in text) == (kept < 7), kept
    text = rendered({})
    assert text.count(rendering.NOT_MEASURED) == len(rendering.TARGETS) and "met" not in text


def test_a_stale_document_is_noticed(tmp_path: Path) -> None:
    document, report = tmp_path / "benchmarks.md", tmp_path / "report.json"
    document.write_text("before\n<!-- table: gpu_report -->\n<!-- end -->\nafter\n", "utf-8")
    report.write_text(json.dumps(a_report()), "utf-8")
    arguments = [f"--document={document}", f"--report={report}"]
    assert rendering.main([*arguments, "--check"]) == 1
    assert rendering.main(arguments) == 0 and rendering.main([*arguments, "--check"]) == 0
    text = document.read_text("utf-8")
    assert (
        text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "A GPU" in text
    )


def test_numbers_that_json_does_not_have_do_not_end_the_report(tmp_path: Path) -> None:
    """A loss that is not a number is written as text, however deep it lies; the other steps go
    on."""
    report = gpu_report.Report(tmp_path / "report.json", 60.0, {})
    report.result["steps"]["a"] = {
        "status": "ok",
        "losses": [math.nan, {"largest": math.inf}],
        "x": (-math.inf, 1.5),
    }
    report.write()
    written = json.loads((tmp_path / "report.json").read_text())["steps"]["a"]
    assert written == {"status": "ok", "losses": ["nan", {"largest": "inf"}], "x": ["-inf", 1.5]}
