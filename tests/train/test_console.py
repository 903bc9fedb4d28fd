"""The console of whole runs: short, loss first, progress from the first iterations on; the log file
has everything."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config import Config, flatten
from tests.support.launch import TINY, read_exit, run, succeed
from tests.support.metrics import read_metrics
from tests.support.token_files import write_documents

LINE = re.compile(
    r"iteration +\d+/20 \| loss \d\.\d{4} \| lr \d\.\d\de-\d\d \| grad norm \S+ \| \S+ ms/step \| [\d,]+ tokens/s"
    r"( \| 0:\d\d:\d\d left)?( \| data wait \S+ ms)?"
)
RUN = [
    *TINY,
    "--device=cpu",
    "--train_iters=20",
    "--log_interval=8",
    "--log_offset=0",
    "--validation_iters=1",
]


def log_of(experiment: Path, start: int = 0) -> str:
    """Return the log file of rank 0."""
    return (experiment / "runs" / str(start) / "logs" / "logs_rank_000.txt").read_text("utf-8")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_console_is_short_and_the_log_file_complete(tmp_path: Path, ranks: int) -> None:
    """The console has what differs and lines at 1, 2, 4, 8, 16, 20; the file has all options and
    the seed's lines."""
    outcome = run([*RUN, f"--experiment_dir={tmp_path}"], ranks)
    assert set(outcome.codes) == {0} and outcome.stdouts[1:] == [""] * (ranks - 1)
    lines = outcome.stdouts[0].splitlines()
    paths = [line for line in lines if str(tmp_path) in line]
    assert (
        len(lines) < 32
        and max(len(line.partition(" | data wait")[0]) for line in lines if line not in paths)
        <= 120
    )
    assert "gpu" not in outcome.output.lower()
    assert f"{tmp_path}/config.json" in lines[0]
    shown = [line for line in lines if line.startswith("iteration ")]
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [1, 2, 4, 8, 16, 20]
    assert all(LINE.fullmatch(line) for line in shown), shown
    assert [line.partition(" | ")[0] for line in lines if "@" in line] == [
        "validation @ iteration 20/20"
    ]
    log = log_of(tmp_path)
    assert all(f"\n  {name} .." in log or f"\n* {name} .." in log for name in flatten(Config()))
    assert [
        int(number) for number in re.findall(r"^training @ iteration +(\d+)/20 \|", log, re.M)
    ] == [8, 16, 20]
    assert re.search(
        r"\| consumed samples: .*tokens/s/gpu \|.* \| language model loss: \d+\.\d{5}$", log, re.M
    )
    assert log.splitlines()[-1] == lines[-1] == "training complete: 20 iterations"


def test_early_lines_change_no_number(tmp_path: Path) -> None:
    """metrics.jsonl has the lines of --log_interval only, each the mean of its iterations, as
    without early lines."""
    records = {}
    for interval in (1, 20):  # an interval of 1 leaves no room for early lines
        run([*RUN, f"--log_interval={interval}", f"--experiment_dir={tmp_path / str(interval)}"], 2)
        records[interval] = [
            record
            for record in read_metrics(tmp_path / str(interval) / "metrics.jsonl")
            if record["phase"] == "training"
        ]
    assert [record["iteration"] for record in records[20]] == [20]
    every = [record["loss"] for record in records[1]]
    assert len(every) == 20 and records[20][0]["loss"] == pytest.approx(sum(every) / 20, rel=1e-12)
    assert records[20][0]["grad_norm"] == records[1][-1]["grad_norm"]


def test_planned_stop_says_why_and_what_continues(tmp_path: Path) -> None:
    """The last line names the flag, the checkpoint and the same command, which then does
    continue."""
    command = [*RUN, f"--experiment_dir={tmp_path}", "--stop_interval=13"]
    outcome = run(command)
    last = outcome.stdouts[0].splitlines()[-1]
    assert outcome.codes == [0] and last == (
        f"stopped at iteration 13 of 20 as planned by --stop_interval=13; saved {tmp_path}/checkpoints/13; "
        "the same command continues"
    )
    assert read_exit(tmp_path)["message"] == last == log_of(tmp_path).splitlines()[-1]
    assert run(command).stdouts[0].splitlines()[-1] == "training complete: 20 iterations"


def test_every_end_has_a_last_line(tmp_path: Path) -> None:
    """One iteration is singular; nothing to train and nothing to do are said."""
    for flags, end in (
        (
            ["--train_iters=1"],
            "training complete: 1 iteration; nothing is saved without --experiment_dir",
        ),
        (["--train_iters=0"], "nothing to train: --train_iters=0"),
    ):
        assert run([*RUN, *flags]).stdouts[0].splitlines()[-1] == end
    command = [*RUN, "--train_iters=1", f"--experiment_dir={tmp_path}"]
    run(command)
    assert (
        run(command).stdouts[0].splitlines()[-1]
        == "the run is complete: iteration 1 of 1; nothing to do"
    )
    run([*command, "--train_iters=2"])
    assert run([*command, "--export_interval=1"]).stdouts[0].splitlines()[-1] == (
        "the run is complete: iteration 2, more than --train_iters=1; nothing to do; scripts/convert_checkpoint.py "
        "exports its checkpoint"
    )


def test_longer_run_whose_learning_rate_jumps_is_warned_of(tmp_path: Path) -> None:
    """The rate before and after, and a flag that keeps the old schedule and the warning away."""
    command = [*RUN, f"--experiment_dir={tmp_path}", "--lr_decay_style=cosine", "--min_lr=0.001"]
    run(command)
    longer = [*command, "--train_iters=24", "--stop_interval=1"]
    (warning,) = (
        line for line in run(longer).stdouts[0].splitlines() if "learning rate of" in line
    )
    assert re.fullmatch(
        r"WARNING: the learning rate of iteration 21 is [1-9]\.\d{3}e-03, but 1\.000e-03 by the schedule of the "
        r"checkpoint; to keep that schedule, write --lr_decay_iters=20",
        warning,
    )
    kept = run([*command, "--train_iters=24", "--lr_decay_iters=20", "--stop_interval=1"]).stdouts[
        0
    ]
    assert "resumed from" in kept


@pytest.mark.slow
def test_a_run_that_waits_for_its_data_says_so_once(tmp_path: Path) -> None:
    """Documents of one token, shuffled, take longer to collect than a tiny model to train on
    them."""
    write_documents(tmp_path / "x", (np.array([1]) for _ in range(20_000)))
    flags = [
        "--dataset_source=list",
        f"--data_path={tmp_path / 'x'}",
        "--split=1",
        "--shuffle_documents=1",
    ]
    outcome = succeed([*TINY, *flags, "--num_workers=0", "--batch_size=64", "--train_iters=120"])
    (line,) = [line for line in outcome.output.splitlines() if "data is the bottleneck" in line]
    assert line.endswith("use --num_workers=2")


@pytest.mark.slow
def test_the_log_of_a_long_job_stays_small(tmp_path: Path) -> None:
    """A job's output without a terminal is under 1 MB in 10,000 iterations, validations and saves
    included."""
    iterations = 2000
    regular = ["--checkpoint_interval=200", "--validation_interval=100", "--max_checkpoints=2"]
    flags = [
        *TINY,
        *"--log_interval=100 --device=cpu --validation_iters=1".split(),
        *regular,
        f"--experiment_dir={tmp_path}",
    ]
    sizes = []
    for last in (iterations // 2, iterations):  # the second start resumes the first
        outcome = succeed([*flags, f"--train_iters={iterations}", f"--stop_interval={last}"])
        sizes.append(len(outcome.output.encode()))
    assert sum(sizes) * 10_000 / iterations < 1e6, sizes
    assert sizes[0] < 10_000, sizes
