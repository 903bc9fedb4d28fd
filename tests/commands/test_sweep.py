"""`megatron_lite sweep`: mistakes before the first run, a ranking, and the same one after kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.commands import sweep
from megatron_lite.errors import StorageError, UsageError
from tests.support import warm_python
from tests.support.launch import STARTED, read_exit

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"{number} of many lines of some text to read.\n" for number in range(400))
SIZES = {name: value for name, value in STARTED.items() if name not in ("lr", "weight_decay")}
PYTHON = sys.executable
FLAGS = (
    *map("--{}={}".format, SIZES, SIZES.values()),
    "--vocab_size=257",
    "--tokenizer_file=byte",
    "--split=1,1,0",
)
FLAGS += ("--validation_iters=2", "--validation_interval=2", "--checkpoint_interval=1")
FLAGS += ("--dataset_source=list", "--max_checkpoints=2")
RANDOM = [
    word for word in FLAGS if not word.startswith(("--split", "--dataset_source=list", "--tok"))
]
WARM = "import sys; sys.executable = sys.argv.pop(1)\n"
COMMAND = (
    "import sys; from megatron_lite.commands import start; sys.exit(start('sweep', sys.argv[1:]))"
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An interpreter that has imported torch, in which runs start; handlers as they were."""
    python = str(warm_python.folder() / "python")
    monkeypatch.setattr(sys, "executable", python)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield python
    for number, handler in before.items():
        signal.signal(number, handler)


def shared(folder: Path, name: str) -> list[str]:
    """The flags behind --, after the text that they name has been written."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(2):
        (folder / "text" / f"{number}.txt").write_text(TEXT * (number + 1))
    return [*FLAGS, f"--data_path={folder}/text", f"--experiment_dir={folder / name}"]


def ranking(folder: Path) -> list[list[str]]:
    """The rows of the leaderboard without the speed."""
    table = (folder / "leaderboard.txt").read_text().splitlines()
    place = table[0].split("  ")
    speed = next(number for number, cell in enumerate(filter(None, place)) if "tokens/s" in cell)
    rows = [line.split() for line in table[1:]]
    return [[*row[:speed], *row[speed + 1 :]] for row in rows]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr=1e-3,1e-2"], "write [--parallel=N] [--ranks=N] --OPTION=VALUE,VALUE ... --"),
        (["--", "--lr=1"], "write [--parallel=N]"),
        (["--lr", "1e-3", "--"], "--lr: before -- write --<option>=<value>,<value>"),
        (["--lrr=1e-3,1e-2", "--"], "unknown flag --lrr"),
        (["--lr=1e-3,x", "--"], "ERROR: --lr=x: --lr=x: not a number"),
        (["--lr=1e-3,", "--"], "ERROR: --lr=: --lr"),
        (["--lr=1e-3", "--learning-rate=1e-2", "--"], "--lr is given twice; write all"),
        (["--lr=1e-3,0.001", "--"], "--lr=0.001: this combination is given twice"),
        (["--seed=1,2", "--", "--seed=3"], "--seed is given twice, before and after --"),
        (["--split=90,10,0", "--"], "--split=90,10,0: may be one value with a comma in it"),
        (["--tokenizer_file=a,b", "--"], "--tokenizer_file=a,b: may be one value with a comma"),
        (
            ["--head_groups=4,3", "--seed=1,2", "--"],
            "--head_groups=3 --seed=1; --head_groups=3 --seed=2: --",
        ),
        (["--lr=1e-3,1e-2", "--", "--validation_iters=0"], "write --validation_iters"),
        (["--lr=1e-3,1e-2", "--", "--experiment_dir=none"], "--experiment_dir is missing after --"),
        (["--parallel=0", "--lr=1e-3,1e-2", "--"], "argument --parallel: 0 is not a whole number"),
    ],
)
def test_mistakes_are_found_before_the_first_run(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All refused combinations are named, once for each reason."""
    place = words.index("--") + 1 if "--" in words else len(words)
    flags = shared(tmp_path, "sweep") if place > 1 and "--" in words else []
    try:
        code = sweep.main([*words[:place], *flags, *words[place:]])
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and said in error, error
    assert not (tmp_path / "sweep").exists()


def test_a_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep").touch()
    code = sweep.main(["--lr=1e-3,1e-2", "--", *shared(tmp_path, "sweep")])
    said = capsys.readouterr().err
    assert code == StorageError.exit_code and "Traceback" not in said
    assert f"ERROR: --experiment_dir={tmp_path}/sweep: the sweep cannot write there (File" in said


def test_gpus_and_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "visible_gpus", lambda: ["2", "3", "5", "7"])
    monkeypatch.setattr(sweep, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus = "CUDA_VISIBLE_DEVICES"
    assert sweep.divide(2, None, True) == (2, gpus, ["2,3", "5,7"])
    assert sweep.divide(2, 1, True) == (1, gpus, ["2", "3"])
    assert sweep.divide(1, None, True) == (4, gpus, ["2,3,5,7"])
    with pytest.raises(UsageError, match="--parallel=2 runs on 3 ranks each: there are 4 GPUs"):
        sweep.divide(2, 3, True)
    assert sweep.divide(2, 2, False) == (2, "OMP_THREAD_LIMIT", ["2", "2"])


def test_the_ranking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest loss first, with its iteration; failures last, the first line of each."""
    monkeypatch.setattr(sweep, "read_losses", list)  # drawing is tested elsewhere
    monkeypatch.setattr(sweep, "draw", lambda runs, _: [run.name for run in runs])
    monkeypatch.setattr(sweep, "write_picture", lambda picture, output: f"{output} {picture}")
    trials = []
    for rate, losses in (("1", [5.0, 4.0]), ("2", [3.5, 3.75]), ("3", [3.0]), ("4", [])):
        folder = tmp_path / f"lr={rate}"
        folder.mkdir()
        trials.append(sweep.Trial([rate], folder, []))
        lines = [
            {"phase": phase, "iteration": 10 * (place + 1), "loss": loss, "run": 0}
            | {"tokens_per_sec": 1234.5}
            for place, loss in enumerate(losses)
            for phase in ("training", "validation")
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sweep.rank(["lr"], trials, {"lr=3": "out of memory\nmore", "lr=4": "no such file"})
    table = (tmp_path / "leaderboard.txt").read_text()
    assert [line.split(maxsplit=4) for line in table.splitlines()[1:]] == [
        ["2", "3.50000", "10", "1,234"],
        ["1", "4.00000", "20", "1,234"],
        ["3", "3.00000", "10", "1,234", "out of memory"],
        ["4", "-", "-", "-", "no such file"],
    ]
    assert "losses.png ['lr=2', 'lr=1', 'lr=3']" in capsys.readouterr().out
    assert "lr=2" in (tmp_path / "report.html").read_text()


def test_text_is_prepared_once(tmp_path: Path) -> None:
    """All runs find it in one folder, unless the flags name one."""
    for more, cache in ((), f"{tmp_path}/one/dataset_cache"), (("--dataset_cache=x",), "x"):
        flags = [*shared(tmp_path, "one"), *more]
        trials = sweep.combinations({"lr": ["1e-2", "1e-3"]}, flags, parse(flags), 1)
        configs = [parse(trial.words).config for trial in trials]
        assert [config.data.dataset_cache for config in configs] == [cache] * 2
        folders = [f"{tmp_path}/one/lr={rate}" for rate in ("0.01", "0.001")]
        assert [config.run.experiment_dir for config in configs] == folders


def test_a_killed_sweep_goes_on(
    quick: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranking is that of an undisturbed one; no finished run starts again, and a failure is a
    row and the exit code."""
    monkeypatch.setattr(sweep, "write_picture", lambda _, output: output)
    options = ["--load_policy=auto,require", "--", *RANDOM, "--report=0"]
    assert sweep.main([*options, f"--experiment_dir={tmp_path}/whole"]) == 1
    assert "2 runs, 1 at a time, each on 1 rank" in capsys.readouterr().out
    good, failed = ranking(tmp_path / "whole")
    assert good[0] == "auto" and failed[:4] == ["require", "-", "-", "--load_policy=require:"]
    folder = tmp_path / "cut" / "load_policy=auto"
    flags = [*options, f"--experiment_dir={tmp_path}/cut"]
    words = [PYTHON, "-c", WARM + COMMAND, quick]
    with subprocess.Popen([*words, *flags], cwd=ROOT, env=warm_python.environment()) as process:
        while not list(folder.glob("checkpoints/[1-5]")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "cut" / "leaderboard.txt").exists()
    assert sweep.main(flags) == 1
    assert ranking(tmp_path / "cut")[0] == good and len(ranking(tmp_path / "cut")) == 2
    assert "resumed from" in folder.with_name(f"{folder.name}.txt").read_text()

    def refused(words: list[str], *_: object) -> None:
        raise StorageError(words[-1])

    monkeypatch.setattr(sweep, "RunProcess", refused)
    assert sweep.main(flags) == 8  # of the run that is not finished
    assert capsys.readouterr().err.endswith("/load_policy=require\n")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_twenty_kills(parallel: int, tmp_path: Path) -> None:
    """Real interpreters, killed or stopped after random numbers of iterations, in a run, in the
    start of one or between two: the ranking is the same."""
    draw = random.Random(parallel)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(name: str) -> subprocess.Popen[bytes]:
        options = ["--lr=1e-2,1e-3,1e-4", "--weight_decay=0,0.5", f"--parallel={parallel}", "--"]
        options += [*shared(tmp_path, name), "--train_iters=80", "--validation_interval=20"]
        command = [PYTHON, "-c", COMMAND, *options]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def logged() -> int:
        files = tmp_path.glob("cut/*/metrics.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    assert start("whole").wait(600) == 0
    ended = list[int]()
    while len(ended) < 20:
        process, until = start("cut"), logged() + draw.randrange(36)
        while logged() < until:
            assert process.poll() is None, (ended, process.returncode)
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5))
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        process.send_signal(number)
        ended.append(process.wait(120))
        # 130, or a traceback of Python: interrupted before anything was begun
        assert ended[-1] in (-number, 75, *[130, 1] * (number != signal.SIGKILL)), ended
    assert not (tmp_path / "cut" / "leaderboard.txt").exists()
    assert start("cut").wait(600) == 0
    assert ranking(tmp_path / "cut") == ranking(tmp_path / "whole")
    endings = [read_exit(file.parent) for file in tmp_path.glob("cut/*/exit.json")]
    assert [ending["exit_code"] for ending in endings] == [0] * 6
