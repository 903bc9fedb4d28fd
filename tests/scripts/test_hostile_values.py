"""Every flag of every script with hostile or wrong values: an exit code, and a short message that
names the flag."""

import contextlib
import importlib
import io
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_lite.commands import VERBS
from tests.cli.test_parse import HOSTILE
from tests.scripts.test_generate import save_model
from tests.support.harness import run_distributed
from tests.support.token_files import save_byte_tokenizer

# A command of each script that works, but for its flags: RUN is a finished run.
COMMANDS = {
    "prepare_data": "text.txt --output_prefix=out/x --overwrite --num_processes=1",
    "generate": "--model=RUN/export/1 --prompt=a --max_new_tokens=2 --device=cpu",
    "evaluate": "--model=RUN/export/1 --text=text.txt --device=cpu",
    "convert_checkpoint": "--from=RUN/export/1 --to=converted/x --format=distributed",
    "verify_checkpoint": "RUN",
    "plot_run": "RUN --output=loss.png",
    "replay_step": "RUN",
    "compare_tensor_logs": "RUN RUN",
    "concatenate_dataset": "out --output=list.json",
    "watch_run": "RUN --once",
    "report_run": "RUN --output=report.html",
    "compare_runs": "RUN RUN",
}
CODES = {0, 1, 2, 3, 4, 8}
LIMIT_S = 10


def of(name: str) -> ModuleType:
    """The module of a script or of a command."""
    return importlib.import_module(VERBS.get(name, f"scripts.{name}"))


def call(script: ModuleType, *words: str) -> tuple[int, str]:
    """The exit code and the output of a script in this process; a hang raises."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"no end after {LIMIT_S} s")

    said = io.StringIO()
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return int(script.main([*words])), said.getvalue()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cases(script: ModuleType) -> list[list[str]]:
    """Each flag with each value, behind = and as the next word."""
    flags = set(re.findall(r"(?:^  (?:-\w, )?|\[)--(\w+)", call(script, "--help")[1], re.M)) - {
        "help",
        "version",
    }
    assert flags
    pairs = [(flag, value) for flag in sorted(flags) for value in HOSTILE]
    return [[f"--{flag}={value}"] for flag, value in pairs] + [
        [f"--{flag}", value] for flag, value in pairs
    ]


def survives(script: ModuleType, command: list[str], case: list[str]) -> None:
    """A known exit code, and no message that fills a screen."""
    what = [word[:60] for word in case]
    try:
        code, said = call(script, *command, *case)
    except Exception as error:
        raise AssertionError(f"{script.__name__} {what}") from error
    assert code in CODES and "Traceback" not in said, what
    assert code == 0 or (len(said) < 4000 and len(said.splitlines()) <= 40), what


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a text."""
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one iteration with a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    run_distributed(1, save_model, str(folder))
    yield folder / "run"


@pytest.mark.parametrize("name", COMMANDS)
def test_some_flags_survive_some_values(name: str, folder: Path) -> None:
    """Pairs drawn at random; but for prepare_data, without the run that the script asks for."""
    script = of(name)
    for case in random.Random(name).sample(cases(script), 30):
        survives(script, COMMANDS[name].replace("RUN", "absent").split(), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_survives_every_value(name: str, folder: Path, run: Path) -> None:
    """The full table, with everything that the script asks for."""
    script = of(name)
    for case in cases(script):
        survives(script, COMMANDS[name].replace("RUN", str(run)).split(), case)


GENERATE, EVALUATE = "--model=x --prompt=x", "--model=x"
# Script, its words, and what the only line of the error says.
USAGE = [
    ("generate", f"{GENERATE} --temperature=-1", "at least 0"),
    ("generate", f"{GENERATE} --temperature=nan", "at least 0"),
    ("generate", f"{GENERATE} --top_k=x", "x"),
    ("generate", f"{GENERATE} --max_new_tokens=0", "at least 1"),
    ("generate", f"{GENERATE} --top_p=0", "above 0"),
    ("generate", f"{GENERATE} --top_p=1.5", "at most 1"),
    ("generate", f"{GENERATE} --stop=", "empty"),
    ("generate", f"{GENERATE} --temperature=0 --top_k=3", "does not sample"),
    ("generate", f"{GENERATE} --dtype=fp8", "fp8"),
    ("generate", "--model=x", "--prompt"),
    ("evaluate", f"{EVALUATE} --text x --samples=3", "--samples"),
    ("evaluate", f"{EVALUATE} --data_path x --json_key=y", "--json_key"),
    ("evaluate", EVALUATE, "--text"),
    ("compare_runs", ". . --loss_tolerance=-1", "--loss_tolerance"),
    ("compare_runs", ". . --loss_tolerance=nan", "--loss_tolerance"),
    ("compare_runs", ". . --loss_tolerance=x", "--loss_tolerance"),
    ("compare_tensor_logs", "", "required"),
    ("compare_tensor_logs", "a", "required"),
    ("compare_tensor_logs", "a b --rtol=-1", "--rtol"),
    ("compare_tensor_logs", "a b --atol=nan", "--atol"),
    ("compare_tensor_logs", "a b --x", "--x"),
    *(
        ("plot_run", f". --baseline {value}", "--baseline")
        for value in ("x", "=3", "x=", "x=nan", "x=inf")
    ),
    ("benchmarks.machine.__main__", "--output=x --dtypes=fp8", "--dtypes"),
    ("benchmarks.machine.__main__", "--output=x --dtypes=", "--dtypes"),
    ("benchmarks.machine.__main__", "--output=x --threads=-1", "--threads"),
    ("benchmarks.machine.__main__", "--output=x --threads=x", "--threads"),
    ("benchmarks.machine.__main__", "", "--output"),
    ("benchmarks.cpu.__main__", "--only=stepps", "--only: no run is called 'stepps'"),
    (
        "benchmarks.cpu.__main__",
        "--isa=sse",
        "no instruction set is called 'sse'; choose from ['all', 'avx2']",
    ),
    ("benchmarks.programs.__main__", "--only=nanogpt", "--only: no program is called 'nanogpt'"),
    ("benchmarks.programs.__main__", "--nanogpt=.", "--nanogpt: . holds no train.py"),
    (
        "benchmarks.programs.__main__",
        "--turns=0",
        "argument --turns: 0 is not a whole number of at least 1",
    ),
    ("benchmarks.gpu.report", "--only=opps", "no step is called 'opps'"),
    (
        "benchmarks.gpu.report",
        "--only=correctness,training",
        "correctness, operations, training, peers are one call each",
    ),
    ("benchmarks.gpu.report", "--limit_s=300", "the budgets of these steps add up to"),
    (
        "benchmarks.gpu.report",
        "--only=ceilings,ops --limit_s=179",
        "the budgets of these steps add up to",
    ),
]


def test_usage_errors_name_the_flag(folder: Path) -> None:
    """Exit code 2 before anything runs, and the flag or the rule in the last line."""
    for name, words, fact in USAGE:
        code, said = call(of(name), *words.split(" ") if words else ())
        assert code == 2 and fact in said.splitlines()[-1], (name, words, said)
        assert "benchmarks" in name or said.count("\n") == 1, (name, words, said)
