"""The scripts' flags: both spellings, a suggestion for a typo, one line for any mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lite.cli.script_parser import ScriptParser
from tests.cli.test_user_mistakes import every_typo

SCRIPTS = Path(__file__).parents[2] / "scripts"
NAMES = ("model", "max_new_tokens", "prompts_file", "top_k", "top_p", "json_lines")
# build_corpus.py needs no package of ours; smoke_test.py (behind smoke_test.sh) passes other flags to pretrain_gpt.py.
OWN_PARSERS = {"build_corpus.py", "smoke_test.py"}


def parser() -> ScriptParser:
    """Return a parser as the scripts have it, with a flag that is required."""
    made = ScriptParser(prog="generate.py")
    for name in NAMES:
        made.add_argument(f"--{name}", required=name == "model")
    made.add_argument("texts", nargs="*")
    return made


def refusal(*words: str) -> str:
    """Return the one line of an error with exit code 2."""
    lines: list[str] = []

    class Captured(ScriptParser):
        def exit(self, status: int = 0, message: str | None = None) -> None:  # type: ignore[override]
            assert status == 2
            lines.append(message or "")
            raise SystemExit(2)

    made = parser()
    made.__class__ = Captured
    with pytest.raises(SystemExit):
        made.parse_args(words)
    (line,) = lines
    assert line.count("\n") == 1 and line.startswith("generate.py: error: ")
    return line


def test_both_spellings() -> None:
    """Dashes in a name are underscores; values, words behind -- and texts stay as they are."""
    words = ["--max-new-tokens=5", "--model", "a-b", "--prompts-file=x-y", "--", "--top-k"]
    options = parser().parse_args(words)
    assert (options.max_new_tokens, options.model, options.prompts_file) == ("5", "a-b", "x-y")
    assert options.texts == ["--top-k"]


def test_every_typo_gets_its_flag() -> None:
    """Any edit of one letter names the flag that was meant, even where a required flag is missing, too."""
    for name in NAMES:
        for typo in every_typo(name):
            if typo in NAMES or typo == "help":
                continue
            assert re.search(rf"did you mean .*--{name}\b", refusal(f"--{typo}=1")), typo


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_tokens=5"], "unknown flag --max_tokens; did you mean --max_new_tokens?"),
        (["--prompt", "x"], "unknown flag --prompt; did you mean --prompts_file?"),
        (["--zebra"], "unknown flag --zebra; no flag has a similar name"),
        (["--top_k=1"], "the following arguments are required: --model"),
        (["--=5"], "unknown flag --"),
        (["--model=--"], "--model=--: -- ends the flags, so it cannot be a value"),
        (["--model=x", "a\0b"], "a word of the command line has a NUL character"),
    ],
)
def test_mistakes(words: list[str], expected: str) -> None:
    """The answer begins with the flag that is wrong."""
    assert refusal(*words).startswith(f"generate.py: error: {expected}")


def test_every_script_uses_it() -> None:
    """No script that users type has a parser of its own."""
    own = {path.name for path in SCRIPTS.glob("*.py") if "argparse.ArgumentParser(" in path.read_text("utf-8")}
    assert own <= OWN_PARSERS
