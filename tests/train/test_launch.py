"""The program as users start it: directly, under torchrun, in a pipe, under a batch system; nothing
is simulated."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import warm_python
from tests.support.launch import (
    MARKER,
    PROGRAM,
    ROOT,
    TINY,
    Outcome,
    Start,
    find_marked,
    free_port,
    is_loopback,
    listening,
    python_warnings,
    read_exit,
    run,
)
from tests.support.metrics import read_metrics
from tests.support.token_files import write_documents

# The README's command that needs no file, with fewer iterations and lines to compare.
NO_FILE = [
    *"--num_layers=2 --hidden_size=64 --num_attention_heads=4 --vocab_size=256 --sequence_length=128".split(),
    *"--train_iters=7 --batch_size=8 --dataset_source=random --log_interval=5 --validation_iters=1".split(),
    "--test_iters=1",
]
KEYS = set(
    "phase iteration train_iters loss learning_rate grad_norm loss_scale batch_size consumed_samples "
    "consumed_tokens step_time_ms data_wait_ms tokens_per_sec tokens_per_sec_per_gpu model_tflops hardware_tflops "
    "skipped_iters nan_iters run time".split()
)


def assert_quiet(outcome: Outcome) -> None:
    """Check for exit code 0 and no library output."""
    assert set(outcome.codes) == {0}, outcome.output
    assert not outcome.error_lines(), outcome.stderrs
    assert not re.search(r"\w+Warning|Traceback|deprecat", outcome.output), outcome.output


def test_no_file_command_alone_and_under_torchrun(tmp_path: Path) -> None:
    """Both succeed, leave stderr empty, print each line once, log the keys of the design, and agree
    to 1e-6."""
    records = []
    for ranks, how in ((1, "forked"), (2, "warm torchrun")):
        experiment = tmp_path / str(ranks)
        outcome = run([*NO_FILE, "--device=cpu", f"--experiment_dir={experiment}"], ranks, how)
        assert_quiet(outcome)
        assert outcome.output.count("training complete: 7 iterations") == 1
        log = (experiment / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")
        assert log.count("training @ iteration") == 3
        assert f"  ranks ........................................... {ranks}\n" in outcome.output
        assert read_exit(experiment)["exit_code"] == 0
        records.append(read_metrics(experiment / "metrics.jsonl"))
    for alone, both in zip(*records, strict=True):
        assert (alone["phase"], alone["iteration"]) == (both["phase"], both["iteration"])
        assert both["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        if alone["phase"] == "training":
            # not from the first step
            forecast = {"remaining_seconds"} if alone["iteration"] > 1 else set()
            assert alone.keys() == both.keys() == KEYS | forecast
            assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)
    assert [(record["phase"], record["iteration"]) for record in records[0]] == [
        *(("training", iteration) for iteration in (1, 6, 7)),
        ("validation", 7),
        ("test", 7),
    ]
    assert all(0 < record["loss"] < 10 for record in records[0])


def test_every_part_at_once_is_quiet(tmp_path: Path) -> None:
    """Two ranks without torchrun: bf16, ZeRO-3, data workers, saves, exports, a path with spaces
    and umlauts that the console cannot spell. Nothing on stderr but what the program says, and no
    process left."""
    prefix = str(tmp_path / "corpus")
    write_documents(
        prefix, (np.arange(document, document + 100, dtype=np.int64) % 64 for document in range(20))
    )
    experiment = tmp_path / "run über alles"
    command = [
        *TINY,
        "--dataset_source=list",
        f"--data_path={prefix}",
        *"--split=8,1,1 --num_workers=2 --training_dtype=bf16 --zero_stage=3 --checkpoint_interval=2".split(),
        *"--max_checkpoints=1 --export_interval=3 --validation_iters=1 --validation_interval=2".split(),
        *"--hidden_dropout=0.1".split(),
        f"--experiment_dir={experiment}",
    ]
    outcome = run(command, 2, variables={"PYTHONIOENCODING": "ascii"})
    assert_quiet(outcome)
    assert sorted(os.listdir(experiment / "checkpoints")) == ["6"]
    assert sorted(os.listdir(experiment / "export")) == ["3", "6"]
    assert sorted(os.listdir(experiment / "runs" / "0" / "logs")) == [
        "logs_rank_000.txt",
        "logs_rank_001.txt",
    ]
    names = {path.name for path in experiment.iterdir()}
    files = {"config.json", "exit.json", "metrics.jsonl", "report.html"}
    folders = {"checkpoints", "export", "runs"}
    assert names <= files | folders | {"dataset_cache"}


@pytest.mark.parametrize(
    ("dtype", "times"), [("bf16", 1), pytest.param("fp32", 0, marks=pytest.mark.slow)]
)
def test_a_cpu_without_instructions_for_the_training_dtype_is_reported(
    dtype: str, times: int
) -> None:
    """The process of an older CPU says once, before training, that bf16 saves no time there; in
    fp32 nothing."""
    older = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    outcome = run(
        [*TINY, "--device=cpu", f"--training_dtype={dtype}"], 1, "processes", variables=older
    )
    assert_quiet(outcome)
    assert (
        outcome.output.count(
            "this CPU (as far as oneDNN may use it) has no instructions for products"
        )
        == times
    )
    before, _, _ = outcome.output.partition("training @ iteration")
    assert before.count("--training_dtype=bf16 saves memory but no time here") == times


def test_run_that_saves_nothing_is_quiet() -> None:
    """Two ranks without --experiment_dir: one warning on rank 0's stdout, nothing from rank 1."""
    outcome = run(TINY, 2)
    assert_quiet(outcome)
    assert outcome.stdouts[0].count("WARNING: --experiment_dir is not set") == 1
    assert outcome.stdouts[1] == ""


def shell(command: str, marker: str) -> subprocess.CompletedProcess[str]:
    """Run in bash; every process that it starts carries a marker in its environment."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        MARKER: marker,
    }
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def typed(*flags: str, python: str = sys.executable) -> str:
    """Return the command line as typed into a shell."""
    return shlex.join([python, str(PROGRAM), *flags])


def test_reader_of_the_log_that_goes_away(tmp_path: Path) -> None:
    """`| head -1` ends the log on the console, not the training, which saves and exits with 0."""
    experiment = tmp_path / "run"
    command = typed(
        *TINY, f"--experiment_dir={experiment}", python=str(warm_python.folder() / "python")
    )
    result = shell(f"{command} | head -1; echo code ${{PIPESTATUS[0]}}", experiment.as_posix())
    assert result.stdout.splitlines()[-1] == "code 0", result
    assert "arguments" in result.stdout.splitlines()[0] and len(result.stdout.splitlines()) == 2
    assert result.stderr == ""
    assert sorted(os.listdir(experiment / "checkpoints")) == ["6"]
    assert read_exit(experiment)["exit_code"] == 0
    log = (experiment / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text("utf-8")
    assert "training complete: 6 iterations" in log
    assert not find_marked(experiment.as_posix())


def test_no_console_at_all(tmp_path: Path) -> None:
    """A run whose stdout and stderr are closed (as by some daemons) trains and saves all the
    same."""
    experiment = tmp_path / "run"
    result = shell(f"{typed(*TINY, f'--experiment_dir={experiment}')} <&- >&- 2>&-", "closed")
    assert result.returncode == 0
    assert sorted(os.listdir(experiment / "checkpoints")) == ["6"]


@pytest.mark.parametrize("flag", ["--help", pytest.param("--help_all", marks=pytest.mark.slow)])
def test_reader_of_the_help_that_goes_away(flag: str) -> None:
    """`--help | head -1` prints a line and no traceback."""
    result = shell(f"{typed(flag)} | head -1; echo code ${{PIPESTATUS[0]}}", "help")
    assert result.stderr == "", result.stderr
    assert len(result.stdout.splitlines()) == 2 and result.stdout.endswith("code 0\n"), (
        result.stdout
    )


def wait_for_lines(start: Start, experiment: Path, count: int) -> None:
    path = experiment / "metrics.jsonl"
    assert start.wait_until(
        lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"{count} lines"
    )


def endless(experiment: Path) -> list[str]:
    return [*TINY, f"--experiment_dir={experiment}", "--train_iters=1000000", "--log_interval=10"]


@pytest.mark.parametrize(
    "everything",
    [
        pytest.param(False, id="launcher", marks=pytest.mark.slow),
        pytest.param(True, id="every-process"),
    ],
)
def test_sigterm_under_torchrun(tmp_path: Path, everything: bool) -> None:
    """A batch system signals torchrun, which passes it on, or (scancel, a preempted Slurm step)
    every process at once, so that ranks get it twice: the run is saved, exit.json says 75, nothing
    stays."""
    experiment = tmp_path / "run"
    with Start(endless(experiment), 2, "torchrun") as start:
        wait_for_lines(start, experiment, 2)
        for pid in start.left_over() if everything else [start.processes[0].pid]:
            os.kill(pid, signal.SIGTERM)
        begun = time.monotonic()
        outcome = start.wait(60)
        assert time.monotonic() - begun < 20, "torchrun had to kill the ranks"
        start.assert_nothing_left()
    assert outcome.codes[0] != 0
    ended = read_exit(experiment)
    assert (ended["exit_code"], ended["status"]) == (75, "stopped"), (ended, outcome.output[-3000:])
    newest = max(
        int(path.name) for path in (experiment / "checkpoints").iterdir() if path.name.isdecimal()
    )
    assert f"saved at iteration {newest};" in ended["message"]
    assert outcome.stdouts[0].splitlines()[-2:] == [
        ended["message"],
        "the traceback that follows is torchrun's way to report the signal",
    ]


@pytest.mark.slow
def test_ranks_save_after_a_signal_that_torchrun_dies_of(tmp_path: Path) -> None:
    """A scheduler that signals every process with SIGUSR1 kills torchrun, and with it the store
    where the ranks met; the ranks save nevertheless, and then nothing stays."""
    experiment = tmp_path / "run"
    with Start(endless(experiment), 2, "torchrun") as start:
        wait_for_lines(start, experiment, 2)
        for pid in start.left_over():
            os.kill(pid, signal.SIGUSR1)
        assert start.wait(60).codes == [-signal.SIGUSR1]
        start.assert_nothing_left(20)
    ended = read_exit(experiment)
    assert ended["exit_code"] == 75, ended
    assert (
        f"saved at iteration {max(os.listdir(experiment / 'checkpoints'), key=int)};"
        in ended["message"]
    )


@pytest.mark.slow
def test_the_last_lines_of_torchrun_say_why_a_run_ended(tmp_path: Path) -> None:
    """SIGTERM for one rank: every rank ends with 75, and torchrun's report ends with our reason
    instead of a hint about tracebacks."""
    experiment = tmp_path / "run"
    with Start(endless(experiment), 2, "torchrun") as start:
        wait_for_lines(start, experiment, 2)
        rank = next(pid for pid in start.left_over() if pid != start.processes[0].pid)
        os.kill(rank, signal.SIGTERM)
        outcome = start.wait(60)
    message = read_exit(experiment)["message"]
    report = outcome.stderrs[0].splitlines()
    assert report[-2] == f"  traceback : {message}", report
    assert [line.split()[2] for line in report if "exitcode  :" in line] == ["75", "75"]
    assert not any("To enable traceback" in line for line in report)


@pytest.mark.slow
def test_exit_code_under_torchrun(tmp_path: Path) -> None:
    """torchrun turns every failure into 1; exit.json keeps the code, and the message is printed
    once."""
    experiment = tmp_path / "run"
    missing = tmp_path / "missing"
    command = [
        *TINY,
        "--dataset_source=list",
        f"--data_path={missing}",
        f"--experiment_dir={experiment}",
    ]
    outcome = run(command, 2, "torchrun")
    assert outcome.codes == [1]
    assert read_exit(experiment)["exit_code"] == 3
    assert outcome.output.count("ERROR: ") == 1 and str(missing) in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_kill_under_torchrun(tmp_path: Path, victim: str) -> None:
    """A killed rank takes the others and the launcher with it; ranks whose launcher was killed are
    gone in five seconds, and exit.json says why."""
    experiment = tmp_path / "run"
    with Start(endless(experiment), 2, "torchrun") as start:
        wait_for_lines(start, experiment, 2)
        launcher = start.processes[0].pid
        ranks = [pid for pid in start.left_over() if pid != launcher]
        assert len(ranks) == 2
        # torchrun itself listens at all addresses
        sockets = [place for rank in ranks for place in listening(rank)]
        assert len(sockets) > 2 and all(map(is_loopback, sockets)), sockets
        os.kill(launcher if victim == "launcher" else ranks[0], signal.SIGKILL)
        outcome = start.wait(60)
        start.assert_nothing_left(5 if victim == "launcher" else 20)
        if victim == "rank":
            assert outcome.codes == [1]
        else:
            assert (
                f"torchrun (process {launcher} on {socket.gethostname()}), which"
                in read_exit(experiment)["message"]
            )
        assert read_exit(experiment)["exit_code"] == 6


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_resumes(tmp_path: Path) -> None:
    """`torchrun --max-restarts`, with either of its stores: after SIGKILL to a rank the same run
    goes on."""
    for rendezvous in ([], ["--rdzv-backend=static", f"--rdzv-endpoint=localhost:{free_port()}"]):
        experiment = tmp_path / f"run{len(rendezvous)}"
        flags = [*endless(experiment), "--train_iters=200", "--checkpoint_interval=5"]
        with Start(flags, 2, "torchrun", launcher=[*rendezvous, "--max-restarts=2"]) as start:
            wait_for_lines(start, experiment, 2)
            rank = next(pid for pid in start.left_over() if pid != start.processes[0].pid)
            os.kill(rank, signal.SIGKILL)
            outcome = start.wait(100)
            start.assert_nothing_left()
        assert outcome.codes == [0], outcome.output[-3000:]
        assert outcome.output.count("resumed from") == 1 and read_exit(experiment)["run"] == 1


def test_warnings_are_told_from_lines_that_look_like_them() -> None:
    """Python's warnings count, also those that torch raises from C++; lines of C++ libraries and of
    the log do not."""
    program = "import warnings\nwarnings.warn('old', FutureWarning)\nwarnings.warn('odd')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert [line.split(": ", 1)[1] for line in python_warnings(done.stderr)] == [
        "FutureWarning: old",
        "UserWarning: odd",
    ]
    from_cpp = "/x/y.py:12: UserWarning: slow (Triggered internally at /torch/a.cpp:3.)"
    others = (
        "[W1122 10:11:12.345678901 ProcessGroupNCCL.cpp:5138] Warning: using GPU 0 as device (function operator())",
        "[rank0]:[W1122 10:11:12.345678901 Context.cpp:67] Warning: deterministic is slow",
        "WARNING: --wandb_entity_name has no effect",
        "iteration 3: Warning signs: none",
    )
    assert python_warnings("\n".join([others[0], from_cpp, *others[1:]])) == [from_cpp]
