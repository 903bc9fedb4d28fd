"""Profiles: which iterations, the trace and tables of PyTorch's own profiler, and the times of the
schedule."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.profiling.profiles import WatchedStage
from megatron_lite.monitor.profiling.schedule_report import (
    mean_parts,
    page,
    summary,
    tables,
    trace_events,
)
from megatron_lite.monitor.profiling.schedule_times import (
    DeviceClock,
    HostClock,
    IterationTimes,
    ScheduleRecorder,
    TimedVerb,
    Transfer,
    hid_behind,
    parts,
    runs,
)
from megatron_lite.zero.stage import Stage
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.launch import TINY, run
from tests.test_structure import PACKAGE

# -- pure arithmetic on times
# ----------------------------------------------------------------------------------------

# One iteration of 100 ms: data 10, forward 30 (5 of it waiting for a gather), backward 40, a wait
# of 4, optimizer 10, of which 2 gather ahead, log 4; 2 ms between the steps.
TRANSFERS = [
    Transfer("gather", 0, 2**20, posted_s=-0.003, waits_s=0.011, done_s=0.016, alone_s=0.012),
    Transfer("reduce", 0, 2**21, posted_s=0.063, waits_s=0.083, done_s=0.087, alone_s=0.030),
    Transfer("sum", None, 16, posted_s=0.088, waits_s=0.088, done_s=0.089),
]
STEPS = [
    TimedVerb("gather", 0, None, 0.010, 0.011),
    TimedVerb("forward", 0, 0, 0.011, 0.041, [TRANSFERS[0]]),
    TimedVerb("backward", 0, 0, 0.043, 0.083),
    TimedVerb("reduce", 0, None, 0.083, 0.083),
    TimedVerb("finish", 0, None, 0.083, 0.087, [TRANSFERS[1]]),
    TimedVerb("gather", 0, None, 0.094, 0.096),
]
TIMES = IterationTimes(7, 0.0, 0.100, STEPS, TRANSFERS)


def test_parts_add_up_to_the_wall_time() -> None:
    """Each part by hand; waits inside and outside of the steps count as exposed, once."""
    expected = {
        "forward": 25,
        "backward": 40,
        "starting gathers and reductions": 3,
        "waits for gathers": 5,
        "waits for reduces": 4,
        "waits for sums": 1,
        "data and inputs": 10,
        "gaps": 2,
        "optimizer": 6,
        "log, evaluation, saves": 4,
    }
    found = parts(TIMES)
    assert found == pytest.approx({name: ms / 1e3 for name, ms in expected.items()})
    assert sum(found.values()) == pytest.approx(0.100)
    assert mean_parts([TIMES, TIMES]) == pytest.approx(found)
    line = "schedule of iteration 7: 100.00 ms each: backward 40%, forward 25%, data and inputs 10%, optimizer 6%"
    assert summary([TIMES]).startswith(line)


def test_hidden_time_is_what_nobody_waited_for() -> None:
    """takes - exposed, at least 0, at most the time between posting and waiting; unknown without a
    duration."""
    assert [t.exposed_s for t in TRANSFERS] == pytest.approx([0.005, 0.004, 0.001])
    assert TRANSFERS[0].hidden_s == pytest.approx(0.007)
    # 26 ms were not waited for, but it began only 20 before
    assert TRANSFERS[1].hidden_s == pytest.approx(0.020)
    assert TRANSFERS[2].hidden_s is None
    late = Transfer("gather", 0, 1, posted_s=0.0, waits_s=0.01, done_s=0.05, alone_s=0.002)
    assert late.hidden_s == 0.0  # the wait was for a rank that came later
    assert hid_behind(TRANSFERS[1], STEPS) == pytest.approx({("backward", 0): 0.020})
    assert hid_behind(TRANSFERS[0], STEPS) == {}
    both = Transfer("gather", 0, 1, posted_s=0.031, waits_s=0.053, done_s=0.053)
    assert hid_behind(both, STEPS) == pytest.approx({("forward", 0): 0.010, ("backward", 0): 0.010})


def test_collectives_on_one_stream_run_one_after_the_other() -> None:
    """The second is posted while the first still runs, so its time counts from the end of the
    first."""
    assert runs([0.0, 1.0, 9.0], [4.0, 6.0, 10.0]) == [(0.0, 4.0), (4.0, 6.0), (9.0, 10.0)]
    # Posted at 31 ms, it ran from 33 to 63 ms, the last 10 of which were waited for.
    seen = Transfer(
        "gather",
        0,
        1,
        posted_s=0.031,
        waits_s=0.053,
        done_s=0.063,
        ran_s=(0.033, 0.063),
        alone_s=9.0,
    )
    assert (seen.takes_s, seen.hidden_s, seen.exposed_s) == pytest.approx((0.030, 0.020, 0.010))
    assert hid_behind(seen, STEPS) == pytest.approx({("forward", 0): 0.008, ("backward", 0): 0.010})


def test_tables_name_steps_collectives_and_what_hid_them() -> None:
    """Rows with numbers of one iteration, as means over both."""
    text = tables([TIMES, TIMES], rank=1, world_size=2)
    assert text.startswith("schedule of iteration 7, rank 1 of 2;")
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["sum"][-1] == "-"  # of the collectives; hidden time unknown
    assert rows["forward stage 0"][-3:] == ["1", "25.000", "25.000"]
    reduce = re.search(
        r"^reduce stage 0 +1 +2\.00 +30\.000 +4\.000 +20\.000 +backward stage 0 100%$", text, re.M
    )
    assert reduce, text
    assert re.search(r"^total +100\.000 +100\.0%$", text, re.M)


def check_trace(trace: dict[str, Any]) -> None:
    """Rules of the Trace Event Format: complete events with a duration, and nested, never crossing,
    on each thread."""
    for event in trace["traceEvents"]:
        assert (
            event["ph"] in ("M", "X")
            and isinstance(event["pid"], int)
            and isinstance(event["tid"], int)
        )
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for thread in {event["tid"] for event in spans}:
        open_until: list[float] = []
        for event in sorted(
            (e for e in spans if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])
        ):
            assert event["ts"] >= 0 and event["dur"] >= 0
            # times are rounded to nanoseconds
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.002, event
            open_until.append(event["ts"] + event["dur"])


def test_the_trace_of_a_schedule_nests() -> None:
    """Waits lie inside of steps, steps inside of the iteration, and collectives that overlap on
    different threads."""
    overlapping = [Transfer("gather", 1, 8, 0.001, 0.041, 0.042), *TRANSFERS]
    trace = trace_events([IterationTimes(7, 0.0, 0.1, STEPS, overlapping)], rank=3)
    check_trace(trace)
    names = Counter(event["name"] for event in trace["traceEvents"])
    assert names["forward stage 0, micro-batch 0"] == 1 and names["wait for reduce stage 0"] == 1
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"steps", "collectives 1", "collectives 2"}
    reduce = next(e for e in trace["traceEvents"] if e["name"] == "reduce stage 0" and e["tid"] > 0)
    assert reduce["args"] == pytest.approx(
        {"bytes": 2**21, "exposed_ms": 4, "takes_ms": 30, "hidden_ms": 20}
    )


def test_the_page_of_a_schedule(tmp_path: Path) -> None:
    """One file, without anything from elsewhere; a bar for each event, with its numbers; long
    profiles are cut."""
    text = page([TIMES], rank=1, world_size=2)
    assert "http" not in text and 'src="' not in text and "<link" not in text
    assert text.count("<rect ") == len(STEPS) + 2 * len(TRANSFERS) + 1
    words = "reduce stage 0: 24.000 ms, exposed 4.000 ms, takes 30.000 ms, hidden 20.000 ms"
    assert (
        f'<rect class="reduce" x="66000.0" y="26" width="24000.0" height="20" data-name="{words}"/>'
        in text
    )
    assert tables([TIMES], 1, 2) in text
    many = IterationTimes(8, 0.0, 0.1, STEPS * 4000, TRANSFERS)
    assert "Shown: iteration 7." in page([TIMES, many], 0, 1) and "Shown" not in page([many], 0, 1)


@pytest.mark.guides
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    """Chromium runs the script without an error: the wheel zooms in around the pointer, which reads
    out a bar."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    script = """<script>
    const inside = svg.getBoundingClientRect();
    const point = { clientX: inside.left + inside.width / 2, clientY: inside.top + 12 };
    svg.dispatchEvent(new WheelEvent("wheel", { deltaY: -500, cancelable: true, ...point }));
    svg.dispatchEvent(new PointerEvent("pointermove", point));
    </script>"""
    (tmp_path / "page.html").write_text(page([TIMES], 0, 1) + script)
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=1000,600",
    ]
    command += [
        f"--user-data-dir={tmp_path / 'browser'}",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in shown.stderr and 'id="words" data-ready="1"' in shown.stdout
    box = re.search(r'viewBox="([\d.]+) 0 ([\d.]+) ', shown.stdout)
    assert box and float(box[2]) == pytest.approx(103000 / math.e, rel=1e-3)
    assert float(box[1]) == pytest.approx(103000 / 2 * (1 - 1 / math.e), rel=1e-2)  # the border
    assert (
        '<p id="words" data-ready="1">backward stage 0, micro-batch 0: 40.000 ms, waited 0.000 ms</p>'
        in shown.stdout
    )


# -- recording
# -------------------------------------------------------------------------------------------------------


class StepClock:
    """A clock that only `pass_` moves."""

    def __init__(self, sees_arrivals: bool = False) -> None:
        self.now, self._sees_arrivals = 0.0, sees_arrivals

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        return self.now

    def arrival(self, work: Any) -> float | None:
        return 1.75 if self._sees_arrivals else None

    def seconds(self, mark: float) -> float:
        return mark


class SlowWork:
    """A collective that is not there yet: the first wait takes a second."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self.waits = clock, 0

    def wait(self) -> None:
        self.waits += 1
        self._clock.pass_(1.0 if self.waits == 1 else 0.0)


@pytest.mark.parametrize("sees_arrivals", [False, True])
def test_waits_are_exposed_where_they_happen(sees_arrivals: bool) -> None:
    """A gather posted in the warm-up and waited for in a forward pass; the second wait for it is
    free."""
    clock = StepClock(sees_arrivals)
    recorder = ScheduleRecorder(clock, {("gather", 1): 1.5})
    work = SlowWork(clock)
    with recorder.around("gather", 1, None):
        handle = recorder.started("gather", 4096, work)
    with recorder.around("finish", 1, None):
        clock.pass_(0.5)
    recorder.lap(1, keep=False)
    with recorder.around("forward", 1, 0):
        clock.pass_(0.25)
        handle.wait()
        handle.wait()
    with recorder.around("finish", 1, None):
        pass
    recorder.lap(2, keep=True)
    (times,) = recorder.take()
    assert (times.iteration, times.start_s, times.end_s, work.waits) == (2, 0.5, 1.75, 2)
    gather = Transfer(
        "gather", 1, 4096, 0.0, 0.75, 1.75, (0.0, 1.75) if sees_arrivals else None, 1.5
    )
    assert times.steps[0] == TimedVerb("forward", 1, 0, 0.5, 1.75, [gather])
    assert times.transfers == [gather]
    assert times.transfers[0].hidden_s == (0.75 if sees_arrivals else 0.5)


def test_the_clock_of_a_gpu_sees_arrivals_from_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for streams and events: another stream waits for arrivals, and the host for
    none."""
    now_ms = 0.0
    current = ["main"]
    log = list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            # what that stream waits for comes later
            self.at_ms = now_ms + (5.0 if current[-1] == "side" else 0.0)

        def synchronize(self) -> None:
            log.append("host waits")

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    @contextlib.contextmanager
    def stream(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    class Work:
        def wait(self) -> None:
            log.append(f"{current[-1]} waits")

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: "side")
    monkeypatch.setattr("torch.cuda.stream", stream)
    recorder = ScheduleRecorder(DeviceClock(torch.device("cuda")), {})
    with recorder.around("gather", 0, None):
        handle = recorder.started("gather", 64, Work())
    now_ms = 2.0
    with recorder.around("forward", 0, 0):
        handle.wait()
        now_ms = 9.0
    with recorder.around("finish", 0, None):
        pass
    recorder.lap(1, keep=True)
    assert log == ["side waits", "main waits"]
    # the only place where the host may wait
    ((transfer,),) = [times.transfers for times in recorder.take()]
    assert transfer.ran_s == (0.0, 0.005) and transfer.hidden_s == 0.002


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3, "depth_first_micro_batches": 2},
        pytest.param({"zero_stage": 1}, marks=pytest.mark.slow),
    ],
)
def test_every_step_of_the_schedule_is_timed_once(options: dict[str, Any]) -> None:
    """One simulated rank of two: the verbs come in the order of the schedule, and the numbers stay
    the same."""
    options = {"batch_size": None, "micro_batch_size": 1, "num_layers": 3, **options}
    plain, profiled = Engine(SimulatedRanks(), options), Engine(SimulatedRanks(), options)
    assert [*plain.model._verbs.values()] == plain.model.stages
    recorder = ScheduleRecorder(HostClock(), {})
    profiled.model.wrap(lambda stage: cast(Stage, WatchedStage(stage, [recorder.around])))
    for engine in (plain, profiled):
        engine.model.gather_ahead()
    recorder.lap(0, keep=False)
    losses = [[float(value) for value in engine.step(1)] for engine in (plain, profiled)]
    recorder.lap(1, keep=True)
    profiled.model.wrap(None)
    assert [*profiled.model._verbs.values()] == profiled.model.stages and losses[0] == losses[1]
    (times,) = recorder.take()
    done = [(step.verb, step.stage, step.micro_batch) for step in times.steps]
    assert [step for step in done if step[0] in ("forward", "backward")] == [
        (step.kind, step.stage, step.micro_batch) for step in profiled.model.training_schedule
    ]
    assert sum(verb == "reduce" for verb, _, _ in done) == sum(
        len(step.reduce) for step in profiled.model.training_schedule
    )
    assert sum(parts(times).values()) == pytest.approx(times.end_s - times.start_s)


# -- the real profiler and real ranks
# ----------------------------------------------------------------------------------


def profiled_run(distributed: Distributed, folder: str, options: dict[str, Any]) -> None:
    """A run to its end, after which nothing of the profiles is left in the way of a step.

    A stand-in for torch's compiler has the one setting that the profiler reads: its import takes
    seconds.
    """
    config: Any = SimpleNamespace(triton=SimpleNamespace(cudagraphs=False))
    compiler: Any = SimpleNamespace(config=config)
    sys.modules |= {"torch._inductor": compiler, "torch._inductor.config": config}
    run = train_whole(
        distributed, tiny_config(distributed.world_size, experiment_dir=folder, **options)
    )
    if run.profiles is not None:
        run.profiles.close()
    assert [
        *run.model._verbs.values()
    ] == run.model.stages and run.distributed.traffic.recorder is None


def read_trace(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


@pytest.mark.parametrize(
    ("skip", "profiled", "begun"),
    [(0, "iterations_2-3", {2, 3}), (3, "iteration_5", {5, 6})],
    ids=["whole", "cut"],
)
def test_two_ranks(tmp_path: Path, skip: int, profiled: str, begun: set[int]) -> None:
    """Warm-up 1, profile 2-3; or warm-up 4, profile from 5 on, where --stop_interval ends the
    start: 6 has just begun.

    Rank 1 alone writes traces with our names, and tables; every step is there, once each.
    """
    options = {
        "train_iters": 8,
        "stop_interval": 5,
        "zero_stage": 3,
        "micro_batch_size": 1,
        "profile_cpu": True,
        "profile_schedule": True,
        "profile_ranks": (1,),
        "profile_skip": skip,
        "profile_active": 2,
    }
    run_distributed(2, profiled_run, str(tmp_path), options)
    files = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    kinds = ["averages.txt", "schedule.html", "schedule.json.gz", "schedule.txt", "trace.json.gz"]
    assert files == [f"{profiled}_rank_001.{kind}" for kind in kinds]
    start = tmp_path / "profiles" / f"{profiled}_rank_001"
    trace = read_trace(start.with_suffix(".trace.json.gz"))
    names = Counter(
        event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
    )
    assert {number for number in range(1, 9) if names[f"iteration {number}"]} == begun
    schedule = read_trace(start.with_suffix(".schedule.json.gz"))
    check_trace(schedule)
    timed = Counter(event["name"] for event in schedule["traceEvents"] if event.get("tid") == 0)
    iterations = len(begun - {6})
    for stage in range(4):  # the embedding, two blocks, the head; two micro-batches
        for verb in ("forward", "backward"):
            for micro_batch in range(2):
                name = f"{verb} stage {stage}, micro-batch {micro_batch}"
                assert timed[name] == names[name] == iterations, name
        assert timed[f"wait for reduce stage {stage}"] >= iterations
    assert any(
        event["name"].startswith("gather stage") and event["tid"]
        for event in schedule["traceEvents"]
    )
    assert "aten::" in start.with_suffix(".averages.txt").read_text()
    rows = start.with_suffix(".schedule.txt").read_text()
    assert re.search(r"^total +[\d.]+ +100\.0%$", rows, re.M) and re.search(
        r"^gather stage 1 +3 ", rows, re.M
    ), rows


def run_with_a_slow_rank(distributed: Distributed, folder: str, delay_s: float) -> None:
    """Rank 1 takes longer for the backward pass of the head."""
    options = {"train_iters": 4, "zero_stage": 3, "profile_schedule": True, "profile_active": 2}
    backward = Stage.backward

    def slow(stage: Stage, grad: torch.Tensor | None, slot: int) -> torch.Tensor | None:
        if stage.index == 3 and distributed.rank == 1:
            time.sleep(delay_s)
        return backward(stage, grad, slot)

    Stage.backward = slow  # type: ignore[method-assign]
    profiled_run(distributed, folder, options)


@pytest.mark.slow
def test_the_wait_for_a_slow_rank_is_exposed(tmp_path: Path) -> None:
    """One rank is late by 200 ms an iteration: the other stands still so long, in a collective that
    takes far less."""
    run_distributed(2, run_with_a_slow_rank, str(tmp_path), 0.2)
    exposed_ms, takes_ms = [], []
    for rank in range(2):
        trace = read_trace(
            tmp_path / "profiles" / f"iterations_3-4_rank_{rank:03d}.schedule.json.gz"
        )
        collectives = [
            event["args"] for event in trace["traceEvents"] if "exposed_ms" in event.get("args", {})
        ]
        exposed_ms.append(sum(values["exposed_ms"] for values in collectives) / 2)
        takes_ms.append(sum(values.get("takes_ms", 0.0) for values in collectives) / 2)
    assert exposed_ms[0] > 150 > 2 * takes_ms[0] and exposed_ms[1] < 100, (exposed_ms, takes_ms)


def test_nothing_imports_profiles_while_they_are_off() -> None:
    """The code of profiles is imported inside of a function behind the options only, if not by
    itself."""
    modules = [module for module in PACKAGE.rglob("*.py") if module.parent.name != "profiling"]
    at_once = re.compile(r"^(import|from) .*monitor\.profiling", re.M)
    assert [module.name for module in modules if at_once.search(module.read_text("utf-8"))] == []


def test_flags_say_what_they_do(tmp_path: Path) -> None:
    """A line in the log, and the names of the files; a profile that never begins, and one without a
    result, say so."""
    outcome = run(
        [*TINY, "--train_iters=3", f"--experiment_dir={tmp_path}", "--profile_schedule=1"]
    )
    assert outcome.codes == [0]
    assert re.search(
        r"^schedule of iteration 3: [\d.]+ ms each: .*backward \d+%", outcome.output, re.M
    )
    assert (
        "profile of iteration 3: iteration_3_rank_000.schedule.txt, iteration_3_rank_000.sch"
        in outcome.output
    )
    outcome = run(
        [*TINY, "--train_iters=2", "--profile_schedule=1", "--profile_cuda=1", "--profile_skip=9"]
    )
    assert "--profile_skip=9: no iteration is profiled" in outcome.output
    assert (
        "no iteration was profiled: the first would have been iteration 11 of this start"
        in outcome.output
    )
    assert "--profile_schedule has no effect without --experiment_dir" in outcome.output
    assert "--profile_cuda=1 has no effect on a CPU" in outcome.output


def test_a_stopped_run_saves_first(tmp_path: Path) -> None:
    """A start ends in its first profile: the checkpoint is saved before the profile is written."""
    flags = [*TINY, f"--experiment_dir={tmp_path}", "--stop_interval=4"]
    outcome = run([*flags, "--profile_schedule=1", "--profile_active=100"])
    assert (
        outcome.codes == [0]
        and (tmp_path / "profiles" / "iterations_3-4_rank_000.schedule.txt").is_file()
    )
    saved, profiled = (
        outcome.output.index(text) for text in ("checkpoints/4 (", "profile of iterations 3-4: ")
    )
    assert saved < profiled
