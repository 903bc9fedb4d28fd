"""Run the steps of the GPU report in separate processes, under one deadline, and collect them in
one JSON file.

    python -m scripts.benchmarks.gpu.report --output=report.json [--only=correctness] [--limit_s=520]
    python -m scripts.benchmarks.gpu.report --merge=first.json,second.json --output=report.json

The steps are grouped in parts, one per call, whose budgets add up to less than the deadline. A
later call adds its steps to the file. A step that fails or times out is recorded with its partial
results and does not stop the other steps. The file is written after every step, and everything that
the steps print is kept beside it, in report_logs/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.commands import argument_parser, matching, names_in, private_environment
from scripts.benchmarks.pipeline import Result, read_json, write_json
from scripts.docs.tables import ROOT

# In this order: timings of an incorrect program are worthless.
PARTS = ("correctness", "operations", "training", "peers")
OPS = ("-m", "scripts.benchmarks.gpu.ops")
# In a line of `pytest -v`, with and without pytest-xdist.
OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


@dataclass(frozen=True)
class Step:
    """Python arguments, a time limit, and a reader of the results: (output file, log) -> results.

    {output} in the command stands for the output file.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    read: Callable[[Path, Path], Any]
    part: str = PARTS[0]


ALONE = "--model=mistral-7b --one_at_a_time"
SIX = f"{ALONE} --num_layers=6 --turns=2 --steps_per_turn=6"
SIXTEEN = f"{ALONE} --num_layers=16"
_RECOMPUTE = "ZeRO-1 recompute activation,ZeRO-1 recompute full"
_VARIANTS = f"ZeRO-1,{_RECOMPUTE},ZeRO-1 without Triton,ZeRO-1 window 4096"
_ROUNDED = "ZeRO-1,ZeRO-1 fp8 tensorwise,ZeRO-1 fp8 rowwise,ZeRO-1 int8"
_SPLIT = "ZeRO-1 split recompute"
_WHOLE = f"{_SPLIT} activation,{_SPLIT} quarter,ZeRO-3 recompute full"


def steps(parallel_tests: int) -> list[Step]:
    """Return all steps, ordered by part."""
    pytest: tuple[str, ...] = ("-m", "pytest", "-p", "no:cacheprovider", "-v", "--color=no", "-rfE")
    if parallel_tests > 1:
        pytest += ("-n", str(parallel_tests), "--dist=worksteal")
    if importlib.util.find_spec("pytest_timeout"):
        pytest += ("--timeout=60",)
    # Some test files cannot be imported without all packages of the test extra.
    files = sorted(
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text("utf-8")
    )
    pytest += ("--continue-on-collection-errors",)
    # Without these every other step is worthless: how products are added, the attention backends,
    # and a few steps.
    pytest_sanity = (*pytest, "-m", "gpu", "-k", "added_in_fp32 or probe or changes_losses", *files)
    # flex_attention compiles for some ten seconds per shape, so its tests run last.
    pytest_gpu = (*pytest, "-m", "gpu", "-k", "not flex", *files)
    pytest_flex = (*pytest, "-m", "gpu", "-k", "flex", *files)

    return [
        Step("sanity", pytest_sanity, 40, read_tests),
        Step(
            "kernel tests",
            (*pytest, "-m", "not slow and not gpu", "tests/kernels"),
            110,
            read_tests,
        ),
        Step("GPU tests", pytest_gpu, 100, read_tests),
        Step(
            "smoke test", ("scripts/smoke_test.py", "--device=cuda", "--quick"), 80, read_smoke_test
        ),
        Step("flex_attention tests", pytest_flex, 120, read_tests),
        Step("ceilings", (*OPS, "--ceilings", "--output={output}"), 40, read_output, PARTS[1]),
        Step("ops", (*OPS, "--output={output}"), 120, read_output, PARTS[1]),
        table("variants", 85, f"{SIX} --only='{_VARIANTS}'", PARTS[1]),
        table("fp8", 70, f"{SIX} --only='{_ROUNDED}'", PARTS[1]),
        table("deterministic", 50, f"{SIX} --only='ZeRO-1,ZeRO-1 deterministic'", PARTS[1]),
        table("mistral-7b", 130, f"{ALONE} --turns=2 --only='{_WHOLE}'"),
        # 16 layers fit with all activations; 32 need memory options.
        table("mistral-7b 16 layers", 50, f"{SIXTEEN} --turns=3 --only=ZeRO-1,ZeRO-3"),
        # Eight micro-batches spread the update over eight times the tokens.
        table(
            "mistral-7b 16 layers x 8",
            120,
            f"{SIXTEEN} --turns=2 --micro_batches=8 --steps_per_turn=1"
            " --only='ZeRO-1,ZeRO-1 window 4096'",
        ),
        table(
            "profile",
            40,
            "--model=mistral-7b --num_layers=6 --turns=2 --steps_per_turn=2 --profile --only=ZeRO-1",
        ),
        table(
            "gpt2-124m",
            150,
            "--model=gpt2-124m --turns=5 --steps_per_turn=8"
            " --only='ZeRO-1,torch compiled*,FSDP2 compiled'",
            PARTS[3],
        ),
        table(
            "profile gpt2-124m",
            70,
            "--model=gpt2-124m --turns=2 --steps_per_turn=4 --profile"
            " --only='ZeRO-1,torch compiled full logits'",
            PARTS[3],
        ),
        table(
            "llama-3-8b-8l",
            150,
            "--model=llama-3-8b-8l --one_at_a_time --turns=3"
            " --only='ZeRO-1,FSDP2 compiled,torch compiled'",
            PARTS[3],
        ),
    ]


def table(name: str, budget_s: float, flags: str, part: str = PARTS[2]) -> Step:
    """Return a step of the training benchmark. flags: as typed."""
    words = ("-m", "scripts.benchmarks.training", "--device=cuda", "--dtype=bf16")
    return Step(
        name, (*words, *shlex.split(flags), "--output={output}"), budget_s, read_benchmark, part
    )


# -- readers
# ---------------------------------------------------------------------------------------------------------


def read_output(output: Path, log: Path) -> Any:
    """Return the content of the JSON file, or None if the step wrote none."""
    return read_json(output)


def read_smoke_test(output: Path, log: Path) -> Any:
    """Return the last JSON object in the log."""
    for line in reversed(log.read_text("utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def read_tests(output: Path, log: Path) -> dict[str, Any]:
    """Return the number of tests by outcome, and the failures, from the log of `pytest -v -rfE`."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    found = [OUTCOME.search(line) for line in lines if "::" in line and line not in summary]
    counts = Counter(outcome[0].lower() for outcome in found if outcome)
    failures = [
        line.split(" ", 1)[1][:300] for line in summary if line.split(" ")[1].startswith("tests/")
    ]
    return {"counts": counts, "failures": failures}


def read_benchmark(output: Path, log: Path) -> Any:
    """Return the result of the training benchmark without the losses of its rows."""
    result = read_json(output)
    for row in result["rows"].values() if result is not None else ():
        row.pop("losses", None)
    return result


def chosen(known: Sequence[Step], wanted: Sequence[str]) -> list[Step]:
    """Return the steps whose name or part is wanted."""
    return [step for step in known if step.name in wanted or step.part in wanted]


LIMIT_S = 520.0  # within nine minutes, with time to stop the last step and to start Python
START_S = 20.0  # part of the limit, in addition to the budgets: finding and describing the device
MIN_STEP_S = 10.0  # with less time left, no step starts
TAIL_LINES = 30  # lines of a failed step's log to report
STACKS_S = 5.0  # for a step that hangs to write where it is


def difference(a: Result, b: Result) -> str | None:
    """Return the first machine or software property in which two reports differ, or None; such
    reports do not mix."""
    first, second = (
        {
            **described.get("machine", {}),
            **described.get("versions", {}),
            "commit": described.get("commit"),
        }
        for described in (report.get("environment", {}) for report in (a, b))
    )
    names = (name for name in {**first, **second} if first.get(name) != second.get(name))
    return next((f"{name} {first.get(name)} and {second.get(name)}" for name in names), None)


def merged(reports: Sequence[Result], order: Sequence[str]) -> Result:
    """Merge the steps of all reports in this order; later reports replace steps of earlier ones.

    Raises:
        ValueError: if the reports come from different machines or versions.
    """
    entries: dict[str, Any] = {}
    for report in reports:
        if (found := difference(reports[0], report)) is not None:
            raise ValueError(f"the reports come from different machines or versions: {found}")
        entries |= report.get("steps", {})
    names = sorted(entries, key=lambda name: order.index(name) if name in order else len(order))
    seconds = round(sum(report.get("seconds", 0.0) for report in reports), 1)
    steps = {name: entries[name] for name in names}
    return {**reports[-1], "ok": all_ok(steps), "seconds": seconds, "steps": steps}


def all_ok(entries: Mapping[str, Any]) -> bool:
    """Return whether there are steps, and none of them failed."""
    return bool(entries) and all(step["status"] == "ok" for step in entries.values())


class Report:
    """The results of this call so far, and the file that they are merged into."""

    def __init__(
        self, output: Path, limit_s: float, head: Result, earlier: Result | None = None
    ) -> None:
        """earlier: the file's report, of the same machine and versions; its other steps are
        kept."""
        self.output, self.earlier = output, earlier
        self.folder = output.with_name(f"{output.stem}_logs")  # what each step printed and wrote
        self.folder.mkdir(parents=True, exist_ok=True)
        self.order = [step.name for step in steps(1)]
        self.started = time.monotonic()
        self.deadline = self.started + limit_s
        self.result: dict[str, Any] = {"ok": False, **head, "limit_s": limit_s, "steps": {}}
        self.write()

    def write(self) -> None:
        """Write the file."""
        self.result["seconds"] = round(time.monotonic() - self.started, 1)
        self.result["ok"] = all_ok(self.result["steps"])
        whole = (
            self.result if self.earlier is None else merged([self.earlier, self.result], self.order)
        )
        # JSON has no numbers that are not finite; they become "nan", "inf" and "-inf".
        write_json(
            self.output,
            json.loads(json.dumps(whole, default=str), parse_constant=lambda one: str(float(one))),
        )

    def run_all(self, wanted: Sequence[Step]) -> None:
        """Run the steps in order. A step may also use the time that the steps before it left."""
        for index, step in enumerate(wanted):
            self.run(step, reserved_s=sum(later.budget_s for later in wanted[index + 1 :]))

    def run(self, step: Step, reserved_s: float = 0.0) -> None:
        """Run one step and record its results or its failure. reserved_s: the time that later steps
        need."""
        left_s = self.deadline - time.monotonic()
        seconds = min(max(step.budget_s, left_s - reserved_s), left_s)
        entry: dict[str, Any] = {"status": "not run", "budget_s": step.budget_s, "seconds": 0.0}
        self.result["steps"][step.name] = entry
        if seconds < min(MIN_STEP_S, step.budget_s):
            entry["reason"] = f"{max(seconds, 0.0):.0f} s were left"
        else:
            began = time.monotonic()
            entry.update(self._outcome(step, began + seconds))
            entry["seconds"] = round(time.monotonic() - began, 1)
        print(f"gpu_report: {step.name}: {entry['status']}, {entry['seconds']:.0f} s", flush=True)
        if "reason" in entry:
            print(f"gpu_report:   {entry['reason']}", flush=True)
        self.write()

    def _outcome(self, step: Step, deadline: float) -> dict[str, Any]:
        stem = step.name.replace(" ", "_")
        output, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        output.unlink(missing_ok=True)
        words = [word.replace("{output}", str(output)) for word in step.command]
        code = call(words, log, deadline)
        entry: dict[str, Any] = {"status": "ok"}
        if code is None:
            entry = {"status": "stopped", "reason": "did not end before its deadline"}
        elif code:
            entry = {"status": "failed", "reason": f"exit code {code}"}
        try:
            entry["result"] = step.read(output, log)
        except Exception as error:  # a truncated or unexpected file must not stop the other steps
            entry |= {
                "status": "failed",
                "reason": f"results cannot be read: {type(error).__name__}: {error}",
            }
        if entry["status"] != "ok" and log.exists():
            entry["log_tail"] = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return entry


def call(command: Sequence[str], log: Path, deadline: float) -> int | None:
    """Run Python with these arguments in the checkout; return its exit code, or None at the
    deadline.

    The process gets its own process group, which is killed at the end, so that nothing stays on the
    device. One that crashes or hangs writes the stacks of its threads into the log.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def describe() -> Result:
    """Return the device and versions, queried in a separate process; `missing` says why there is no
    GPU."""
    done = subprocess.run(
        [sys.executable, *OPS, "--describe"], cwd=ROOT, capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr[-2000:].strip()
        return (
            {"missing": said}
            if done.returncode == 2
            else {"machine": {}, "versions": {}, "failed": said}
        )


def parallel_tests() -> int:
    """Return the number of test processes, several because kernels compile on the CPU; 1 without
    pytest-xdist."""
    return min(12, (os.cpu_count() or 1) // 2) if importlib.util.find_spec("xdist") else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser, known = argument_parser(__doc__), steps(1)
    default = Path(os.environ.get("TMPDIR") or "/tmp") / "gpu_report.json"
    parser.add_argument(
        "--output", type=Path, default=default, help=f"JSON file to write; default {default}"
    )
    choices = partial(matching, [*PARTS, *(step.name for step in known)], "step")
    parser.add_argument(
        "--only",
        type=choices,
        default=PARTS[0],
        help=f"comma-separated parts or steps; default {PARTS[0]}",
    )
    parser.add_argument(
        "--limit_s", type=float, default=LIMIT_S, help=f"limit for all steps; default {LIMIT_S:g}"
    )
    parser.add_argument(
        "--merge", default="", help="run nothing: merge these comma-separated files into --output"
    )
    options = parser.parse_args(argv)
    options.merge = [Path(name) for name in names_in(options.merge)]
    needed_s = START_S + sum(step.budget_s for step in chosen(known, options.only))
    if needed_s > options.limit_s:
        parser.error(
            f"the budgets of these steps add up to {needed_s:g} s, and --limit_s={options.limit_s:g}: choose fewer by "
            f"--only ({', '.join(PARTS)} are one call each), or raise the limit"
        )
    return options


def read_report(path: Path) -> Result:
    """Return a report from its file.

    Raises:
        ValueError: if the file is not a report.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a report: {error}") from error
    if not isinstance(report, dict) or "steps" not in report:
        raise ValueError(f"{path} is not a report")
    return report


def earlier_report(output: Path, head: Result) -> Result | None:
    """Return the report that this call adds its steps to; None if the file does not exist yet.

    Raises:
        ValueError: if the file is not a report, or from another machine or version.
    """
    if not output.exists():
        return None
    earlier = read_report(output)
    if (found := difference(earlier, head)) is not None:
        raise ValueError(
            f"{output} holds the report of another machine or version ({found}): name another --output"
        )
    return earlier


def main(argv: Sequence[str]) -> int:
    """Run the steps; return 0 if all succeeded or there is no GPU."""
    options, started = parse(argv), time.monotonic()
    options.output = options.output.resolve()
    if options.merge:
        whole = merged(
            [read_report(path) for path in options.merge], [step.name for step in steps(1)]
        )
        write_json(options.output, whole)
        return 0 if whole["ok"] else 1
    described = describe()
    if "missing" in described:
        print(f"gpu_report: nothing to report: {described['missing']}")
        return 0
    # GiB, for a crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    folder = Path(tempfile.mkdtemp(prefix="megatron_lite_gpu_report_"))
    pythonpath = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(private_environment(folder, pythonpath, PYTHONUNBUFFERED="1"))
    try:
        head = {"environment": described}
        earlier = earlier_report(options.output, head)
        report = Report(
            options.output, options.limit_s - (time.monotonic() - started), head, earlier
        )
        try:
            report.run_all(chosen(steps(parallel_tests()), options.only))
        finally:
            report.write()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ok = report.result["ok"]
    print(
        f"gpu_report: {report.result['seconds']:.0f} s; {'ok' if ok else 'not ok'}; {options.output}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"gpu_report: {error}")
