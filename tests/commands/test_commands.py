"""`megatron_lite <verb>`: the list of verbs, a mistyped one, and the scripts that are the same
commands."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.commands import VERBS, command, generate, start
from megatron_lite.config.values import FLAGS
from tests.support.light_imports import heavy_imports

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"megatron_lite": "-m megatron_lite", "pretrain_gpt": "pretrain_gpt.py"}


def test_help_lists_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line of its module's docstring each; so does the bare command."""
    pages = []
    for words in (["--help"], []):
        monkeypatch.setattr(sys, "argv", ["megatron_lite", *words])
        assert command() == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    lines = pages[0].splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(VERBS)
    for line in lines:
        verb, summary = line.split(maxsplit=1)
        assert (importlib.import_module(VERBS[verb]).__doc__ or "").startswith(summary) and len(
            line
        ) <= 120


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("genrate", "unknown command genrate; did you mean generate?"),
        ("watch", "unknown command watch; did you mean watch_run?"),
        ("zzz", f"unknown command zzz; the commands are {', '.join(VERBS)}"),
    ],
)
def test_an_unknown_verb_is_one_line(
    verb: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron_lite", verb])
    assert command() == 2
    assert capsys.readouterr() == ("", f"ERROR: {said}\n")


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers at once."""
    code = (
        "import runpy, sys; sys.argv = ['megatron_lite', '--help']\n"
        "try: runpy.run_module('megatron_lite', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code"
    )
    assert not heavy_imports(code)


@pytest.mark.parametrize("words", ["--help", "--no_such_flag"])
@pytest.mark.parametrize(
    "verb", ["generate", "evaluate", "convert_checkpoint", "verify_checkpoint"]
)
def test_help_and_a_mistake_of_a_command_import_nothing_heavy(verb: str, words: str) -> None:
    """A model takes torch, an explanation does not."""
    code = (
        f"import sys; from megatron_lite.commands import start\n"
        f"try: start({verb!r}, [{words!r}])\n"
        "except SystemExit as end: print(end.code, [name for name in sys.modules if name in "
        "('torch', 'numpy', 'tokenizers', 'transformers', 'safetensors')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith(f"{0 if words == '--help' else 2} []\n")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "pretrain_gpt"])
def test_a_script_is_its_verb(verb: str) -> None:
    """Both run the same function; only the command in their messages differs."""
    module = importlib.import_module(VERBS[verb])
    source = (ROOT / "scripts" / f"{verb}.py").read_text("utf-8")
    assert f'start("{verb}", ' in source or f"from {module.__name__} import main" in source
    for program in (None, f"megatron_lite {verb}"):
        with pytest.raises(SystemExit) as end:
            module.main(["--no_such_flag"], program)
        assert end.value.code == 2


@pytest.mark.parametrize("verb", [verb for verb in VERBS if "commands" in VERBS[verb]])
def test_help_shows_the_whole_summary(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the module's docstring, also where it has two lines."""
    module = importlib.import_module(VERBS[verb])
    summary, _, _ = (module.__doc__ or "").partition("\n\n")
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and summary and " ".join(summary.split()) in page


def test_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command without a traceback."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "main", interrupted)
    assert start("generate", ["--chat"]) == 130 and capsys.readouterr() == ("", "interrupted\n")


def test_the_documented_lines_complete_commands_and_flags() -> None:
    """The two lines of docs/installation.md, with this checkout's programs under the names of the
    installed ones."""
    page = (ROOT / "docs" / "installation.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("complete ")]
    programs = [f"{name}() {{ {sys.executable} {where} $@; }}" for name, where in PROGRAMS.items()]
    script = "\n".join([*programs, *lines, *(f"complete -p {name}" for name in PROGRAMS)])
    result = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = result.stdout.replace("'", " ").split()
    assert not result.stderr and words[0] == "complete"
    assert {*VERBS, "--zero_stage", "--lr"} <= {*words} and {f"--{name}" for name in FLAGS} <= {
        *words
    }
