"""Options of Levanter and Fast-LLM, typed with their own values: who follows the answer gets what
the option meant.

tests/vectors/seed_options.txt lists the options, values and outcomes, written by hand from the text
of their pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.config import flatten
from megatron_lite.config.values import PATHS, REMOTE, written
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.validation import resolve

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
# A run in which any single option makes sense; what a row types comes after it and wins.
RUN = "--dry_run=1 --experiment_dir=runs/a --train_iters=100000 --lr_decay_style=cosine".split()
# What a user writes in place of a <placeholder>; {} is the typed value.
MEANT = {
    "<every>:<until> <every>": "1000:10000 5000",
    "<every>:": "1000:",
    "<iteration:size ...>": "0:32 1000:64",
    "<training>,<validation>,<test>": "95,5,0",
    "<weight> <prefix> ...": "0.7 web 0.3 code",
    "<save_interval>": "15",
    "<iterations>": "1000",
    "<num_layers>": "12",
    "<N>": "2",
    "<program>": "upload.sh",
    "<tokenizer.json>": "tokenizer.json",
    "<type>": "{}",
    "<4 * hidden_size>": "4096",
    "<3 * hidden_size>": "3072",
}
FLAG = re.compile(r""" ?--(\w+)(?:=("[^"]*"|'[^']*'|(?:<[^>]*>|[^\s<,;)]|,(?=\S))+))?""")
# Of a message that begins with a reason, rather than with what to write.
REFUSED = re.compile(
    r"is not a flag here: (?!write |for \w+ leave|flags have no dots; write )"
    r"|is refused: |: must be 1: |a URL is neither read nor written"
)
Outcome = dict[str, str] | str  # the options with their values, or the message of a refusal


class Case(NamedTuple):
    name: str
    beside: list[str]
    value: str
    expected: str


def cases() -> Iterator[Case]:
    """Yield each typed value of the table."""
    for line in (VECTORS / "seed_options.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            head, _, values = line.partition(": ")
            name, _, beside = head.partition(" {")
            for pair in values.split(" | "):
                value, _, expected = pair.rpartition(" -> ")
                yield Case(name, beside.rstrip("}").split(), value, expected)


def outcome(words: list[str]) -> Outcome:
    """Return the resolved options of a command line, or its error."""
    try:
        config = parse([*RUN, *words]).config
        ranks = (
            config.distributed.world_size if isinstance(config.distributed.world_size, int) else 1
        )
        return {name: written(value) for name, value in flatten(resolve(config, ranks)).items()}
    except (CheckpointError, UsageError) as error:
        return str(error)


def to_write(answer: str, value: str) -> list[str] | None:
    """Return the words that an answer says to write instead, for this value; None if it has
    none."""
    if re.search(rf"\bfor {re.escape(value)} leave it out|: leave it out", answer):
        return []
    text = answer.partition(" write ")[2]
    words, end = [], 0
    while match := FLAG.match(text, end):
        name = match[1]
        given = match[2]
        end = match.end()
        given = value if given is None else given.strip("\"'")
        for placeholder, meant in MEANT.items():
            given = given.replace(placeholder, meant.format(value))
        words.append(f"--{name}={given}")
    return words or None


def followed(case: Case) -> tuple[Outcome, list[str]]:
    """Type a case, then what the answers say, until the program starts; return the outcome and the
    answers."""
    words, answers = [f"--{case.name}={case.value}"], []
    while len(answers) < 4:
        found = outcome([*case.beside, *words])
        if isinstance(found, dict):
            return found, answers
        answers.append(found)
        better = to_write(found, case.value)
        if better is None or better == words:
            break
        words = better
    return answers[-1], answers


def wrong(case: Case) -> str:
    """Return what is wrong with an answer, if anything."""
    found, answers = followed(case)
    expected = re.split(r" (?=\w+=)", case.expected)
    told = "\n    ".join([f"--{case.name}={case.value} -> {case.expected}", *answers])
    if expected[0] == "missing":
        return "" if "runs/none: there is no such folder" in found else told
    if expected[0] == "refused":
        if not answers or not any(REFUSED.search(answer) for answer in answers):
            return told
        expected = expected[1:]
        if not expected:
            return ""
    if isinstance(found, str):
        return told
    if expected == ["nothing"]:
        base = outcome(case.beside)
        assert isinstance(base, dict), base
        different = {name: value for name, value in found.items() if base[name] != value}
        return f"{told}\n    changes {different}" if different else ""
    for part in expected:
        field, equals, value = part.partition("=")
        if found[field] != (value if equals else case.value):
            return f"{told}\n    {field}={found[field]}"
    return ""


# -- the tests
# -------------------------------------------------------------------------------------------------------


def test_no_option_is_left_out() -> None:
    """The table has every option of Levanter's page, and those of Fast-LLM's guide and
    MultiStageConfig."""
    names = {case.name for case in cases()}
    levanter = json.loads((VECTORS / "levanter_options.json").read_text("utf-8"))
    fast_llm = json.loads((VECTORS / "fast_llm_options.json").read_text("utf-8"))["ZeRO and stages"]
    assert {name for part in levanter.values() for name in part} <= names
    assert set(fast_llm) - {"compile_all"} <= names and len(names) >= 225
    for name in names:
        values = [case.value for case in cases() if case.name == name]
        assert len(values) > 1 or name in ("epoch", "model.rope", "trainer.checkpointer.keep"), name


def test_answers_do_what_was_meant() -> None:
    """Typed with its default and with another value, each option ends in the configuration that its
    page describes."""
    said = [problem for case in cases() if (problem := wrong(case))]
    assert not said, "\n".join(said)


def test_the_last_part_alone_is_no_other_option() -> None:
    """`--haps` without `optimizer.` is accepted only with the same meaning; save_interval, in two
    units, says so."""
    for case in cases():
        leaf = case.name.rpartition(".")[2]
        if "." in case.name and isinstance(outcome([*case.beside, f"--{leaf}={case.value}"]), dict):
            assert leaf == "save_interval" or not wrong(case._replace(name=leaf)), leaf
    (note,) = parse([*RUN, "--save_interval=15"]).notes
    assert note.text.endswith("are --checkpoint_minutes=15") and not note.is_warning
    assert parse([*RUN, "--checkpoint_interval=15"]).notes == ()


@pytest.mark.parametrize("name", sorted(PATHS - REMOTE))
def test_urls_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only data and pretrained models may be remote: one line, and nothing is written below a
    folder `gs:`."""
    monkeypatch.chdir(tmp_path)
    for url in ("gs://bucket/run", "s3://bucket/a", "hf://datasets/a", "https://host/a.json"):
        said = outcome([f"--{name}={url}"])
        assert isinstance(said, str) and "\n" not in said
        assert "a URL is neither read nor written; write --" in said
    assert not list(tmp_path.iterdir())


def test_urls_of_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts refuse them, too, except in a prompt and as inputs, which are copied."""
    monkeypatch.chdir(tmp_path)
    parser = ScriptParser(prog="script")
    for name in ("inputs", "--output_prefix", "--prompt"):
        parser.add_argument(name)
    assert (
        parser.parse_args(["s3://bucket/a.txt", "--prompt=https://host"]).prompt == "https://host"
    )
    for words in (["a.txt", "--output_prefix=s3://bucket/a"],):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        said = capsys.readouterr().err
        assert (
            "a URL is neither read nor written; write a local or mounted path" in said
            and said.count("\n") == 1
        )


def test_includes() -> None:
    """YAML's `!include file` is @file here."""
    for words in (
        ["--data=!include data.yaml"],
        ["--data", "!include data.yaml"],
        ["!include", "data.yaml"],
    ):
        assert "write @<file> alone instead, to insert the flags in it" in str(outcome(words))
