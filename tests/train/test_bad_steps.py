"""Bad steps, end to end: a spike or a NaN on one of two ranks is dropped on both without a trace, a
resumed run decides as the one that was never stopped, and a run that has to stop because of one
publishes nothing after it.

The training loop is the program's; what goes wrong is put in between the model and the optimizer.
"""

import dataclasses
import math
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError
from megatron_lite.outputs.run import Run
from megatron_lite.pretrain import log_ending
from megatron_lite.train import train
from tests.support.engine_runs import digest
from tests.support.harness import run_distributed, start_run, tiny_config
from tests.support.launch import TINY, read_exit
from tests.support.launch import run as start_program
from tests.support.metrics import read_metrics

RANKS = 2
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one iteration."""

    rank: int
    gradient: float = 1.0  # factor on the gradient of its micro-batches
    loss: float = 1.0
    signal: int = 0  # that it receives meanwhile


@dataclass
class Story:
    """Record of one start."""

    code: int | None = None
    message: str = ""
    state: str = ""  # digest of this rank's shards in the end: weights and moments
    optimizer: dict[str, Any] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    # Iteration of a fault -> whether its step changed a bit of this rank's shards, or a counter.
    changed: dict[int, bool] = field(default_factory=dict)


def start(distributed: Distributed, options: dict[str, Any], faults: dict[int, Fault]) -> Story:
    """Start the program without its command line: build, resume, train. Run this by
    `run_distributed`."""
    config, story = tiny_config(distributed.world_size, **options), Story()
    run = start_run(distributed, config)
    inject(run, faults, story)
    try:
        story.code, story.message = train(run)
    except NumericsError as error:
        story.code, story.message = error.exit_code, str(error)
    run.model.finish()
    run.trackers.close(story.code)
    log_ending(run, story.message)
    story.state, story.optimizer = state(run), run.optimizer.state()
    return story


def state(run: Run) -> str:
    return digest(part.read(kind) for _, part in run.model.parts() for kind in part.kinds())


def everything(run: Run) -> Any:
    """State that a dropped update must not change: shards, the count of updates, and the rule's
    state."""
    counters = run.optimizer.state()
    return state(run), counters["updates"], counters["rule"]


def inject(run: Run, faults: dict[int, Fault], story: Story) -> None:
    """Inject faults into the gradients, and watch the optimizer judge them."""
    forward_backward = run.model.forward_backward
    step = run.optimizer.step
    rank = run.distributed.rank

    def faulty_forward_backward(micro_batches: Any) -> torch.Tensor:
        fault = faults.get(run.iteration + 1)
        if fault is None or fault.rank != rank:
            return forward_backward(micro_batches)
        run.stop.signal = run.stop.signal or fault.signal
        scaled = [
            dataclasses.replace(one, gradient_scale=one.gradient_scale * fault.gradient)
            for one in micro_batches
        ]
        return forward_backward(scaled) * fault.loss

    def observed_step(*args: Any) -> Any:
        iteration = run.iteration + 1
        watched = iteration in faults
        before = everything(run) if watched else None
        update = step(*args)
        if update.verdict.skipped:
            story.dropped.append(iteration)
        if watched:
            story.changed[iteration] = before != everything(run)
        return update

    run.model.forward_backward = faulty_forward_backward  # type: ignore[method-assign]
    run.optimizer.step = observed_step  # type: ignore[method-assign]


def lines(experiment: Path, after: int) -> list[dict[str, Any]]:
    """Records of metrics.jsonl after an iteration, without times."""
    timing = (
        "_ms",
        "_s",
        "_seconds",
        "tflops",
        "mfu",
        "time",
        "run",
        "tokens_per_sec",
        "tokens_per_sec_per_gpu",
    )
    return [
        {name: value for name, value in record.items() if not name.endswith(timing)}
        for record in read_metrics(experiment / "metrics.jsonl")
        if record["iteration"] > after
    ]


SKIPPING: dict[str, Any] = {
    "skip_bad_steps": True,
    "skip_bad_steps_window": 8,
    "skip_bad_steps_sigma": 6.0,
}
FAULTS = {
    9: Fault(1, gradient=30.0),
    12: Fault(0, gradient=NAN),
    13: Fault(1, gradient=INF),
    14: Fault(0, loss=3.0),
    15: Fault(1, loss=NAN),
    22: Fault(0, gradient=-30.0),
}
# Options, and the checkpoints from which the run is repeated.
FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "zero 1": ({"zero_stage": 1}, (8, 14, 20)),
    "zero 3, bf16": ({"zero_stage": 3, "training_dtype": "bf16"}, (14,)),
    "fp16": ({"zero_stage": 2, "training_dtype": "fp16", "initial_loss_scale": 1024.0}, (12,)),
    "zero 2, all checkpoints": ({"zero_stage": 2}, tuple(range(2, 26, 2))),
}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[] if i == 2 else [pytest.mark.slow])
        for i, form in enumerate(FORMS)
    ],
)
def test_bad_steps_are_dropped_on_all_ranks_and_again_after_a_resume(
    tmp_path: Path, form: str
) -> None:
    """Spikes, NaN and infinities of one rank's gradient or loss change no bit of any rank's weights
    and moments; the run goes on; from its checkpoints it takes the same decisions, writes the same
    lines and ends the same."""
    own, resumed_from = FORMS[form]
    options = {**SKIPPING, **own, "train_iters": 26, "checkpoint_interval": 2, "log_interval": 5}
    reference = tmp_path / "reference"
    whole = run_distributed(RANKS, start, {**options, "experiment_dir": str(reference)}, FAULTS)
    for story in whole:
        assert (story.code, story.dropped) == (0, list(FAULTS)), story.message
        assert story.changed == dict.fromkeys(FAULTS, False)
        assert story.optimizer == whole[0].optimizer
    assert whole[0].optimizer["updates"] == 26 - len(FAULTS)
    if form == "fp16":  # nothing but 12 and 13 was an overflow
        expected = {"dynamic": True, "scale": 512.0, "good": 13, "patience": 0}
        assert whole[0].optimizer["loss_scale"] == expected
    for checkpoint in resumed_from:
        experiment = tmp_path / str(checkpoint)
        shutil.copytree(
            reference / "checkpoints" / str(checkpoint),
            experiment / "checkpoints" / str(checkpoint),
        )
        again = run_distributed(
            RANKS, start, {**options, "experiment_dir": str(experiment)}, FAULTS
        )
        for story, other in zip(again, whole, strict=True):
            assert story.dropped == [
                iteration for iteration in other.dropped if iteration > checkpoint
            ]
            assert (story.state, story.optimizer) == (other.state, other.optimizer)
        assert lines(experiment, checkpoint) == lines(reference, checkpoint)


@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("lion", "sgd"))]
)
def test_every_optimizer_drops_them(optimizer: str) -> None:
    """The other rules drop bad steps without a trace too, including Muon's products of full
    matrices."""
    options = {**SKIPPING, "zero_stage": 3, "optimizer": optimizer, "train_iters": 16}
    for story in run_distributed(RANKS, start, options, FAULTS):
        assert story.code == 0 and story.changed == dict.fromkeys([9, 12, 13, 14, 15], False)


def test_the_log_names_what_was_dropped(tmp_path: Path) -> None:
    """Each line counts dropped steps and names the last one since the previous line, with one
    warning."""
    options = {**SKIPPING, "train_iters": 20, "log_interval": 5, "experiment_dir": str(tmp_path)}
    run_distributed(
        1,
        start,
        options,
        {9: Fault(0, gradient=30.0), 12: Fault(0, gradient=NAN), 15: Fault(0, loss=9.0)},
    )
    records = {record["iteration"]: record for record in lines(tmp_path, 0)}
    counts = {
        iteration: (record["skipped_iters"], record["nan_iters"])
        for iteration, record in records.items()
    }
    assert counts == {1: (0, 0), 6: (0, 0), 11: (1, 0), 16: (3, 1), 20: (3, 1)}
    reasons = {
        iteration: record["skip_reason"]
        for iteration, record in records.items()
        if "skip_reason" in record
    }
    assert re.fullmatch(
        r"iteration 9: gradient norm [\d.]+ above [\d.]+ \(mean \+ 6 sd\)", reasons.pop(11)
    )
    spike = re.fullmatch(
        r"iteration 15: loss ([\d.]+) above ([\d.]+) \(mean \+ 6 sd\)", reasons[16]
    )
    usual = records[11]["loss"]
    assert spike and usual < float(spike[2]) < 2 * usual, "per token, as in the log"
    assert float(spike[1]) == pytest.approx(9 * usual, rel=0.2)
    log = (tmp_path / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")
    warnings = [line for line in log.splitlines() if "dropped since" in line]
    assert len(warnings) == 2 and warnings[1].endswith(
        f"since the last line: 2; the last, {reasons.pop(16)}"
    )
    assert not reasons
    assert records[16]["loss"] < 5.0, "the loss of dropped updates is not in the mean"


def test_other_ranks_resume_the_same_history(tmp_path: Path) -> None:
    """The statistics of usual steps do not depend on the ranks: one rank resumes two ranks' run and
    decides alike."""
    options = {
        **SKIPPING,
        "train_iters": 12,
        "checkpoint_interval": 8,
        "experiment_dir": str(tmp_path),
    }
    faults = {3: Fault(0, gradient=NAN), 6: Fault(1, gradient=2.0)}
    saved = run_distributed(RANKS, start, {**options, "stop_interval": 8}, faults)[0].optimizer[
        "guard"
    ]
    (alone,) = run_distributed(
        1, start, {**options, "zero_stage": 3}, {11: Fault(0, gradient=30.0)}
    )
    assert len(saved["usual"]) == 7 and alone.dropped == [11]
    guard = alone.optimizer["guard"]
    assert guard["usual"][:4] == saved["usual"][-4:], (
        "the newest four are still in the window of eight"
    )
    assert (saved["dropped"]["skipped"], guard["dropped"]["skipped"]) == (2, 3)


# -- stopping
# --------------------------------------------------------------------------------------------------------

ABORT: dict[str, Any] = {**SKIPPING, "on_bad_step": "abort", "log_interval": 50}
STOPPED_BY: dict[str, tuple[dict[str, Any], int]] = {
    "log line": ({"log_interval": 4}, 0),
    "checkpoint": ({"checkpoint_interval": 5}, 0),
    "export": ({"export_interval": 5}, 0),
    "resumable export": ({"export_interval": 5, "export_format": "distributed"}, 0),
    "validation": ({"validation_interval": 5, "validation_iters": 1}, 0),
    "signal": ({}, signal.SIGTERM),
    "signal, nowhere to save": ({"experiment_dir": None}, signal.SIGTERM),
    "planned stop": ({"stop_interval": 15}, 0),
    "end": ({"train_iters": 15}, 0),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(
            what, marks=[pytest.mark.slow] * (what in ("export", "signal, nowhere to save"))
        )
        for what in STOPPED_BY
    ],
)
def test_nothing_is_published_after_a_step_that_stops_the_run(tmp_path: Path, what: str) -> None:
    """The update is dropped at once; whatever comes first of a line, a save, an export, a
    validation or a stop ends the run with exit code 5, and everything that was published is from
    before."""
    options, number = STOPPED_BY[what]
    options = {**ABORT, "train_iters": 30, "experiment_dir": str(tmp_path), **options}
    (story,) = run_distributed(1, start, options, {14: Fault(0, gradient=30.0, signal=number)})
    assert story.code == 5 and story.changed == {14: False}
    assert re.match(
        r"stopped by --on_bad_step=abort: iteration 14: gradient norm .* sd\)\. ", story.message
    )
    published = [
        int(path.name) for path in (*tmp_path.glob("checkpoints/*"), *tmp_path.glob("export/*"))
    ]
    assert sorted(published) == (
        [5, 10] if what in ("checkpoint", "export", "resumable export") else []
    )
    if what == "validation":
        assert [
            line["iteration"] for line in lines(tmp_path, 0) if line["phase"] == "validation"
        ] == [5, 10]


@pytest.mark.parametrize("stopped_at", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_a_streak_of_bad_steps_ends_the_run(tmp_path: Path, stopped_at: int | None) -> None:
    """Six dropped updates in a row: the next save is refused on both ranks, at the same iteration
    and with the same words if the run was stopped and resumed amid them."""
    options = {
        "max_consecutive_bad_steps": 6,
        "checkpoint_interval": 4,
        "log_interval": 50,
        "train_iters": 30,
    }
    options |= {"experiment_dir": str(tmp_path)}
    faults = {iteration: Fault(iteration % 2, gradient=NAN) for iteration in range(6, 30)}
    if stopped_at is not None:
        for story in run_distributed(
            RANKS, start, {**options, "stop_interval": stopped_at}, faults
        ):
            assert story.code == 0 and story.optimizer["guard"]["dropped"]["bad"] == 3
    for story in run_distributed(RANKS, start, options, faults):
        assert (story.code, story.dropped[-1]) == (5, 12)
        assert story.message.startswith("the last 7 updates were dropped"), story.message
        assert "(--max_consecutive_bad_steps=6)" in story.message
        assert "nothing was learned after iteration 5: " in story.message
    assert sorted(int(path.name) for path in tmp_path.glob("checkpoints/*")) == [4, 8]


def test_a_save_after_dropped_updates_deletes_no_older_checkpoint(tmp_path: Path) -> None:
    """A streak of bad steps pushes out none of the checkpoints from before it; the next good update
    tidies up, but for those from which the first three bad steps, 7 to 9, can be repeated."""
    options = {
        "max_checkpoints": 2,
        "checkpoint_interval": 2,
        "experiment_dir": str(tmp_path),
        "train_iters": 24,
    }
    kept = {}
    for stop in (6, 14, 16):
        faults = {iteration: Fault(0, loss=NAN) for iteration in range(7, 15)}
        (story,) = run_distributed(1, start, {**options, "stop_interval": stop}, faults)
        assert story.code == 0, story.message
        kept[stop] = sorted(int(path.name) for path in tmp_path.glob("checkpoints/*"))
    assert kept == {6: [4, 6], 14: [4, 6, 8, 10, 12, 14], 16: [6, 8, 14, 16]}


@pytest.mark.parametrize(
    "dropped, words",
    [
        pytest.param(1, "the last update was", marks=pytest.mark.slow),
        (3, "the last 3 updates were"),
    ],
)
def test_a_run_that_drops_its_last_updates_says_so_in_its_last_line(
    tmp_path: Path, dropped: int, words: str
) -> None:
    """On the console, in the log file and in exit.json, with the reason and the iteration of the
    weights it saved."""
    options = {"train_iters": 12, "experiment_dir": str(tmp_path)}
    (story,) = run_distributed(
        1, start, options, {12 - back: Fault(0, loss=NAN) for back in range(dropped)}
    )
    assert (story.code, story.message) == (
        0,
        f"training complete: 12 iterations, but {words} dropped (iteration 12: loss nan): the weights are those of "
        f"iteration {12 - dropped}",
    )
    log = (tmp_path / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")
    assert log.splitlines()[-1] == f"WARNING: {story.message}"


def test_the_search_of_a_loss_scale_stops_no_run() -> None:
    """Overflows in fp16, on one rank alone too, are dropped on both; with every flag that stops a
    run it goes on. A loss that is not finite is no overflow."""
    stopping = {
        "on_bad_step": "abort",
        "crash_on_nan": True,
        "crash_on_inf": True,
        "train_iters": 18,
    }
    options = {**stopping, "training_dtype": "fp16", "initial_loss_scale": 2.0**22}
    for story in run_distributed(RANKS, start, options, {14: Fault(1, gradient=INF)}):
        assert story.code == 0 and 1 in story.dropped and story.dropped[-1] == 14
        assert story.changed == {14: False}
        assert story.optimizer["loss_scale"]["good"] == 4
    short = {"train_iters": 3, "training_dtype": "fp16", "initial_loss_scale": 2.0**40}
    (story,) = run_distributed(1, start, short, {})
    assert story.code == 0 and story.dropped == [1, 2, 3]
    assert (
        "the last 3 updates were dropped" in story.message
        and "the weights are those that it" in story.message
    )
    for story in run_distributed(RANKS, start, options, {14: Fault(1, loss=INF)}):
        assert story.code == 5 and "iteration 14: loss inf. " in story.message


DIVERGED = {
    # shorter than --max_consecutive_bad_steps
    "--train_iters=20 --log_interval=50": "the last 19 updates were dropped because they were not finite "
    r"\(more than half of.* start again, with a lower --lr$",
    "--train_iters=1000 --log_interval=20 --max_consecutive_bad_steps=30": "updates were dropped",
    "--train_iters=40 --log_interval=30 --checkpoint_interval=8 --crash_on_nan --crash_on_inf=1": (
        r"stopped by --crash_on_(nan|inf)=1: iteration 2: .* more since\)\. "
    ),
}


@pytest.mark.parametrize(
    "flags",
    [pytest.param(flags, marks=[pytest.mark.slow] * (i == 1)) for i, flags in enumerate(DIVERGED)],
)
def test_a_diverged_run_fails(tmp_path: Path, flags: str) -> None:
    """A learning rate that breaks a run, from the command line: exit code 5 with cause and fix,
    once for two ranks and in exit.json; never "complete", no checkpoint."""
    outcome = start_program(
        [*TINY, f"--experiment_dir={tmp_path}", "--lr=1e30", *flags.split()], RANKS
    )
    assert outcome.codes == [5, 5], outcome.output
    (error,) = outcome.error_lines()
    assert error.startswith("ERROR: ") and re.search(DIVERGED[flags], error), error
    assert read_exit(tmp_path)["exit_code"] == 5 and read_exit(tmp_path)["message"] in error
    assert "training complete" not in outcome.output and not list(tmp_path.glob("checkpoints/*"))
