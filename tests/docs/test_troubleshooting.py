"""docs/troubleshooting.md quotes messages that the program still has, and knows every exit code."""

import ast
import functools
import re

import pytest

from megatron_lite import errors
from megatron_lite.cli.unknown_flags import HELP
from megatron_lite.config.values import SPELLINGS
from megatron_lite.errors import EXIT_DONE, EXIT_PREEMPTED, RunError
from pretrain_gpt import main
from tests.support import documents
from tests.test_structure import MODULES, parse

pytestmark = pytest.mark.guides
GUIDE = documents.read("troubleshooting")
VALUE = "\0"  # in place of a value in a message
# First cells of the tables; of the symptoms, only quotations with dots or from three words on.
CELLS = re.findall(r"^\| (.*?) \| .* \| .* \|$", GUIDE, re.M)
OTHERS = ("torchrun ... with SIGKILL",)  # words of other programs
PRODUCED = {
    "unknown flag ...; did you mean ...?": "--lrr=1",
    "batch_size must be a multiple of ...; nearest: ...": "--batch_size=7 --micro_batch_size=2",
}


def quotations() -> list[str]:
    """Messages in the first column, and in the cells of symptoms."""
    quoted = {quote for cell in CELLS for quote in re.findall(r"`([^`]+)`", cell)}
    quoted |= {
        quote
        for quote in re.findall(r"`([^`]+)`", GUIDE.split("## By symptom")[1])
        if "..." in quote
    }
    return sorted(quote for quote in quoted if len(quote.split()) > 2 and quote not in OTHERS)


@functools.cache
def templates() -> tuple[str, ...]:
    """Texts in the source with `VALUE` for each value; texts that are added to each other are
    one."""
    found = []
    for path in MODULES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.BinOp | ast.JoinedStr | ast.Constant):
                text = _text(node)
                found.append(re.sub(r"%(\.\d)?[sdrf]", VALUE, text) if "%" in text else text)
    return tuple(dict.fromkeys(text for text in found if len(text) > 8))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VALUE


def is_in_source(quotation: str) -> bool:
    """Whether the parts of a quotation stand in one text in this order, with anything where it has
    dots."""
    return any(pattern(quotation).search(text) for text in templates())


def pattern(quotation: str) -> re.Pattern[str]:
    return re.compile(".*?".join(re.escape(part) for part in quotation.split("...")), re.S)


@pytest.mark.parametrize("quotation, flags", PRODUCED.items())
def test_messages_put_together_from_parts(
    quotation: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model=gpt2", "--train_iters=1", *flags.split()]) == 2
    assert quotation in quotations()
    assert pattern(quotation).search(capsys.readouterr().err)


def test_quoted_messages_are_those_of_the_program() -> None:
    assert not [
        quotation
        for quotation in quotations()
        if quotation not in PRODUCED and not is_in_source(quotation)
    ]


def test_other_words_are_not_found() -> None:
    """The search is no rubber stamp: a word more, a word less, another order."""
    assert len(quotations()) > 40
    for wrong in (
        "unknown flag ...; did you perhaps mean ...?",
        "another run is using it; wait for that run",
        "GB free, make room, or keep fewer (--max_checkpoints), but the checkpoints to come take",
    ):
        assert not is_in_source(wrong)


def test_every_exit_code_is_here() -> None:
    """Codes with a message of their own have a section each."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, RunError)
    ]
    codes = {kind.exit_code for kind in kinds} - {EXIT_PREEMPTED}
    assert {int(code) for code in re.findall(r"^## Exit code (\d+)", GUIDE, re.M)} == codes
    table = {int(code) for code in re.findall(r"^\| \[?(\d+)\b", GUIDE, re.M)}
    assert table == codes | {EXIT_DONE, EXIT_PREEMPTED}


def test_flags_exist() -> None:
    """Every flag is one of the program, or of the other programs of the page."""
    others = {
        "standalone",
        "nproc-per-node",
        "master-port",
        "node-rank",
        "gpus-per-task",
        "mem",
        "once",
    }
    code = re.sub(r"`unknown flag[^`]*`", "", GUIDE)
    named = set(re.findall(r"--([a-z][a-z_-]+)", code))
    assert not {name for name in named - others if name not in SPELLINGS and name not in HELP}
