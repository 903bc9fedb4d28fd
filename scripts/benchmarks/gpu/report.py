"""The GPU report behind gpu_report.sh: steps in processes of their own, under one deadline, into one JSON file.

    python -m scripts.benchmarks.gpu.report --output=report.json [--only=ceilings,ops] [--limit_s=520]

A step that fails or takes too long is recorded as such and does not stop the others; what it had written by then
counts. Each gets its budget or what is left, whichever is less. The file is written anew after every step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.gpu.report_read import read_benchmark, read_json, read_smoke_test, read_tests

ROOT = Path(__file__).resolve().parents[3]

LIMIT_S = 520.0  # of the nine minutes; the rest is for the end of a step that is stopped, and for starting Python
LEAST_S = 10.0  # with less than this left, no step is begun
TAIL_LINES = 30  # of the log of a step that did not end well
ATTEMPTS = 4  # of a step that goes on where its last process ended

# Exits 0 where torch finds a GPU; prints why not otherwise.
PROBE = """
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"torch cannot be imported ({error})")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA device")
"""


@dataclass(frozen=True)
class Step:
    """A command, the seconds it may take, and how its results are read: from the file that it writes, and its log."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    read: Callable[[Path, Path], Any]  # (file, log) -> results; None where there are none
    resumes: bool = False  # ended by anything but an exit code of 0 or 1, it goes on, started again, behind that


def steps(parallel_tests: int) -> list[Step]:
    """All steps in order: first what is needed to trust or to read the rest. {output}: the file that a step writes."""
    pytest: tuple[str, ...] = ("-m", "pytest", "-p", "no:cacheprovider", "-v", "--color=no", "-rfE")
    if parallel_tests > 1:
        pytest += ("-n", str(parallel_tests), "--dist=worksteal")
    # Not all test files can be imported where the packages of the test extra are not all there.
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    pytest += ("--continue-on-collection-errors",)
    # flex_attention is compiled for every shape, for some ten seconds each: last, if time is left.
    pytest_gpu = (*pytest, "-m", "gpu", "-k", "not flex", *files)
    pytest_flex = (*pytest, "-m", "gpu", "-k", "flex", *files)
    ops, training = ("-m", "scripts.benchmarks.gpu.ops"), ("-m", "scripts.benchmarks.gpu.training")

    def table(model: str, only: str, turns: int, *options: str) -> tuple[str, ...]:
        return (
            "-m",
            "scripts.benchmarks.training",
            "--device=cuda",
            f"--model={model}",
            "--dtype=bf16",
            f"--only={only}",
            f"--turns={turns}",
            "--output={output}",
            *options,
        )

    # As many layers as fit with every activation kept, beside the peers; and all 32, which need the memory options.
    gpt2 = table("gpt2-124m", "ZeRO-1,torch compiled*,FSDP2 compiled", 5, "--steps_per_turn=8")
    llama = table("llama-3-8b-8l", "ZeRO-1,FSDP2 compiled,torch compiled", 3, "--one_at_a_time")
    mistral = table("mistral-7b", "ZeRO-1,ZeRO-3", 3, "--one_at_a_time", "--num_layers=16")
    whole = table("mistral-7b", "ZeRO-3 recompute full", 2, "--one_at_a_time")
    return [
        Step("ceilings", (*ops, "--ceilings", "--output={output}"), 40, read_json),
        Step("kernel tests", (*pytest, "-m", "not slow and not gpu", "tests/kernels"), 110, read_tests),
        Step("ops", (*ops, "--output={output}"), 120, read_json, resumes=True),
        Step("gpt2-124m", gpt2, 90, read_benchmark),
        Step("llama-3-8b-8l", llama, 90, read_benchmark),
        Step("mistral-7b", whole, 50, read_benchmark),
        Step("mistral-7b, 16 layers", mistral, 50, read_benchmark),
        Step("variants", (*training, "--variants=speed", "--output={output}"), 60, read_json),
        Step("GPU tests", pytest_gpu, 100, read_tests),
        Step("smoke test", ("scripts/smoke_test.py", "--device=cuda"), 80, read_smoke_test),
        Step("deterministic", (*training, "--variants=deterministic", "--output={output}"), 40, read_json),
        Step("flex_attention tests", pytest_flex, 120, read_tests),
    ]


def without_infinities(value: Any) -> Any:
    """The same with "nan", "inf" and "-inf" in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_infinities(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Report:
    """The results so far, and the file that has them."""

    def __init__(self, output: Path, folder: Path, limit_s: float, head: dict[str, Any]) -> None:
        self.output, self.folder = output, folder
        self.started = time.monotonic()
        self.deadline = self.started + limit_s
        self.result: dict[str, Any] = {"ok": False, **head, "limit_s": limit_s, "steps": {}}
        self.write()

    def write(self) -> None:
        """Aside, then renamed: the file is whole whenever somebody looks."""
        self.result["seconds"] = round(time.monotonic() - self.started, 1)
        states = [step["status"] for step in self.result["steps"].values()]
        self.result["ok"] = bool(states) and all(state == "ok" for state in states)
        aside = self.output.with_name(self.output.name + ".part")
        text = json.dumps(without_infinities(self.result), indent=1, allow_nan=False, default=str)
        aside.write_text(text + "\n", "utf-8")
        aside.replace(self.output)

    def run(self, step: Step) -> None:
        """One step, whatever becomes of it."""
        seconds = min(step.budget_s, self.deadline - time.monotonic())
        entry: dict[str, Any] = {"status": "not run", "budget_s": step.budget_s, "seconds": 0.0}
        self.result["steps"][step.name] = entry
        if seconds < min(LEAST_S, step.budget_s):
            entry["reason"] = f"{max(seconds, 0.0):.0f} s were left"
        else:
            began = time.monotonic()
            entry.update(self._attempts(step, began + seconds))
            entry["seconds"] = round(time.monotonic() - began, 1)
        print(f"gpu_report: {step.name}: {entry['status']}, {entry['seconds']:.0f} s", flush=True)
        if "reason" in entry:
            print(f"gpu_report:   {entry['reason']}", flush=True)
        self.write()

    def _attempts(self, step: Step, deadline: float) -> dict[str, Any]:
        stem = step.name.replace(" ", "_")
        output, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        entry: dict[str, Any] = {}
        for _ in range(ATTEMPTS if step.resumes else 1):
            code = call([word.replace("{output}", str(output)) for word in step.command], log, deadline)
            status, reason = "ok", ""
            if code is None:
                status, reason = "stopped", "it had not ended by its deadline"
            elif code:
                status, reason = "failed", f"exit code {code}"
            entry = {"status": status, **({"reason": reason} if reason else {})}
            if code in (0, 1, None) or time.monotonic() + LEAST_S > deadline:
                break
        try:
            entry["result"] = step.read(output, log)
        except Exception as error:  # half a line, or a file of another shape: the other steps go on
            entry |= {"status": "failed", "reason": f"results cannot be read: {type(error).__name__}: {error}"}
        if entry["status"] != "ok" and log.exists():
            entry["log_tail"] = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return entry


def call(command: Sequence[str], log: Path, deadline: float) -> int | None:
    """Run Python with these arguments from the checkout; its exit code, or None when it was stopped at the deadline.

    It gets a process group of its own, so that nothing that it has started stays behind on the device.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            return process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def private_environment(folder: Path) -> dict[str, str]:
    """Environment variables that keep every library offline and its files inside `folder`."""
    caches = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TMPDIR": str(folder),
    } | {name: str(folder / "cache" / name.lower()) for name in caches}


def without_gpu() -> str | None:
    """Why there is no GPU to report on; None where there is one."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    lines = probe.stderr.strip().splitlines()
    return lines[-1] if lines else f"a probe of torch ended with exit code {probe.returncode}"


def describe() -> dict[str, Any]:
    """The device and what computes on it, as asked of a process of its own."""
    asked = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.gpu.ops", "--describe"], cwd=ROOT, capture_output=True, text=True
    )
    try:
        return json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"machine": {}, "versions": {}, "describe_failed": asked.stderr[-2000:]}


def parallel_tests() -> int:
    """Test processes side by side: compiling kernels takes the processor, not the GPU. One without pytest-xdist."""
    found = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True)
    return min(6, (os.cpu_count() or 1) // 2) if found.returncode == 0 else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = Path(os.environ.get("TMPDIR") or "/tmp") / "gpu_report.json"
    parser.add_argument("--output", type=Path, default=default, help=f"JSON file to write; default {default}")
    parser.add_argument("--only", default="", help="comma-separated steps")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help=f"for all of it; default {LIMIT_S:g}")
    options = parser.parse_args(argv)
    options.only = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = set(options.only) - {step.name for step in steps(1)}
    if unknown:
        parser.error(f"--only: no step is called {sorted(unknown)}; there are {[step.name for step in steps(1)]}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the steps; exit code 0 if all ended well, or if there is no GPU."""
    options, started = parse(argv), time.monotonic()
    options.output = options.output.resolve()
    reason = without_gpu()
    if reason is not None:
        print(f"gpu_report: nothing to report: {reason}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="megatron_lite_gpu_report_"))
    os.environ.update(private_environment(folder))
    head = {"date": datetime.date.today().isoformat(), **describe()}
    report = Report(options.output, folder, options.limit_s - (time.monotonic() - started), head)
    try:
        for step in steps(parallel_tests()):
            if not options.only or step.name in options.only:
                report.run(step)
    finally:
        report.write()
        shutil.rmtree(folder, ignore_errors=True)
    verdict = "ok" if report.result["ok"] else "not ok"
    print(f"gpu_report: {report.result['seconds']:.0f} s; {verdict}; {options.output}")
    return 0 if report.result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
