"""Every flag of every script with hostile values: the script ends with an exit code and at most a short message."""

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

from megatron_lite.data.tokenizing import save_byte_tokenizer
from tests.cli.test_parse import HOSTILE
from tests.scripts.test_generate import save_model
from tests.support.harness import run_distributed

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
    flags = set(re.findall(r"(?:^  (?:-\w, )?|\[)--(\w+)", call(script, "--help")[1], re.M)) - {"help", "version"}
    assert flags
    pairs = [(flag, value) for flag in sorted(flags) for value in HOSTILE]
    return [[f"--{flag}={value}"] for flag, value in pairs] + [[f"--{flag}", value] for flag, value in pairs]


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
    script = importlib.import_module(f"scripts.{name}")
    for case in random.Random(name).sample(cases(script), 30):
        survives(script, COMMANDS[name].replace("RUN", "absent").split(), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_survives_every_value(name: str, folder: Path, run: Path) -> None:
    """The full table, with everything that the script asks for."""
    script = importlib.import_module(f"scripts.{name}")
    for case in cases(script):
        survives(script, COMMANDS[name].replace("RUN", str(run)).split(), case)
