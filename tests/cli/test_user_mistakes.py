"""Mistakes: flags of other programs get answers that can be typed, and misspelled flags of scripts
get suggestions.

tests/vectors/user_mistakes.json has, for each program, command lines and the flags that the answer
must contain.
"""

import json
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.cli.unknown_flags import (
    ANY_END,
    HELP,
    accepts,
    answer_to_unknown,
    foreign_answer,
    foreign_names,
    instead,
    is_one_edit,
    nearest_flags,
    refused,
)
from megatron_lite.config.other_programs import refused_value, table
from megatron_lite.config.values import FLAGS, SPELLINGS, is_legal
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.launch import run

FOREIGN = foreign_names()
INSTEAD = instead()
REFUSED = refused()
VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "user_mistakes.json"
MISTAKES: dict[str, dict[str, str]] = json.loads(VECTORS.read_text("utf-8"))
WIDTH = 118  # of a line of the help
BESIDE = ("--dataset_source=random", "--dry_run=1")  # so that nothing else is missing
FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)(?:=((?:<[^>]*>|[^\s<])+))?")


def answer(words: list[str]) -> str:
    """Return the error of a command line, from the parser or from the checks behind it."""
    with pytest.raises(UsageError) as caught:
        resolve(parse([*words, *BESIDE]).config, 1)
    return str(caught.value)


def named(text: str, typed: list[str]) -> list[tuple[str, str | None]]:
    """Return the flags in an answer with their values, except the one that repeats the mistake."""
    spellings = ["=".join(typed), *typed[:1], *(word.partition("=")[0] for word in typed[:1])]
    mistake = min((word for word in spellings if word in text), key=text.index, default="")
    found = []
    for match in FLAG.finditer(text.replace(mistake, "", 1)):
        value = match[2].rstrip(".,;:?)'\"") if match[2] else None
        found.append((match[1], value))
    return found


def assert_typable(name: str, value: str | None, where: str) -> None:
    """A flag of ours takes the value, or has one in place of a `<placeholder>`; another program's
    is accepted so."""
    if name in REFUSED:
        assert value is not None and accepts(REFUSED[name], value), where
        return
    assert name in SPELLINGS or name in HELP, f"--{name} in: {where}"
    if value is not None and "<" not in value:
        assert is_legal(SPELLINGS[name], value.strip("'")), f"--{name}={value} in: {where}"
        assert refused_value(SPELLINGS[name].name, value) is None, where


def test_mistakes_are_answered() -> None:
    """The answer is one line, three on a screen, and has the flags to write; each of its flags can
    be typed."""
    assert (
        min(
            len(MISTAKES[name])
            for name in ("nanoGPT", "Megatron-LM", "Fast-LLM", "Levanter", "Hugging Face")
        )
        >= 15
    )
    for typed, flags in (
        (typed, flags.split()) for rows in MISTAKES.values() for typed, flags in rows.items()
    ):
        said = answer(typed.split())
        assert "\n" not in said and len(said) <= 3 * WIDTH, said
        found = named(said, typed.split())
        for flag in flags:
            name, _, value = flag.removeprefix("--").partition("=")
            assert (name, value) in found or (
                not value and name in [other for other, _ in found]
            ), said
        for name, value in found:
            assert_typable(name, value, said)


def test_a_regular_expression_without_its_mark() -> None:
    """Levanter's regular expressions get the mark, which makes them work; names, parts and
    wildcards are patterns."""
    written = {
        ".*mlp.*": r".*mlp\..*",
        "^blocks": "^blocks",
        r"blocks\.[0-9]+\.mlp\.up": r"blocks\.[0-9]+\.mlp\.up",
    }
    for expression, here in written.items():  # mlp alone would also match mlp_norm
        said = answer([f"--weight_decay_modules={expression}"])
        assert said.endswith(f"write --weight_decay_modules='regex:{here}'")
        resolve(parse([f"--weight_decay_modules=regex:{here}", *BESIDE]).config, 1)
    for pattern in ("mlp", "blocks.0", "blocks.*.mlp.*", "*.weight", "blocks.[01]"):
        resolve(parse([f"--weight_decay_modules={pattern}", *BESIDE]).config, 1)


def test_the_program_says_it_too() -> None:
    """A real start ends with code 2 and the answers, once each."""
    typed = ["--n_layer=12", "--save", "ckpts", "--device=gpu"]
    outcome = run([*typed, *BESIDE])
    assert outcome.codes == [2]
    assert outcome.output.count("ERROR: ") == 1 and f"ERROR: {answer(typed)}" in outcome.output


# --- Everything that can be said


def every_answer() -> Iterator[tuple[str, str]]:
    """Yield what may be typed with its answer: other programs' flags and values, and bad values of
    every flag."""
    for name in [*FOREIGN, *(name for name in INSTEAD if "." in name)]:
        yield name, foreign_answer(name)
    for name in (name.removesuffix(ANY_END) for name in INSTEAD if name.endswith(ANY_END)):
        yield f"{name}zzz", answer([f"--{name}zzzzzzzz=1"]).partition(": ")[2]
    yield from table().values.items()
    # any text is a path
    for flag in (flag for flag in FLAGS.values() if flag.name != "pretrained_checkpoint_path"):
        for value in ("", "!", "-7.5", "yes", "4K", "99999999999999999999999"):
            try:
                parse([f"--{flag.name}={value}", "--dataset_source=random"])
            except UsageError as error:
                yield f"{flag.name}={value}", str(error).partition(": ")[2]


def test_every_flag_in_every_answer_can_be_typed() -> None:
    """With the value that the answer gives it; answers fit on three lines of a screen."""
    for typed, text in every_answer():
        assert len(text) + len(typed) + 30 <= 3 * WIDTH, text
        for name, value in named(text, []):
            if name != typed.partition("=")[0] or value is not None:
                assert_typable(name, value, text)


def test_one_program_owns_a_name() -> None:
    """Otherwise two answers would contradict each other."""
    rows = [row for rows in table().programs.values() for row in rows]
    names = [name for row in rows for name in {name.partition(":")[0] for name in row.names}]
    cases = {name.partition(":")[0] for row in rows for name in row.names if ":" in name}
    assert sorted(set(names) - cases) == sorted(name for name in names if name not in cases)
    with_cases = [row for row in rows if {name.partition(":")[0] for name in row.names} & cases]
    assert all(":" in " ".join(row.names) for row in with_cases)


def one_edit_typos(name: str, generator: random.Random, count: int) -> list[str]:
    """Return some of the deletions, transpositions, insertions and substitutions of one letter at
    every place."""
    typos = set()
    for place in range(len(name)):
        before = name[:place]
        letter = generator.choice(string.ascii_lowercase + "_")
        after = name[place + 1 :]
        typos |= {before + after, before + letter + after, before + letter + name[place:]}
        typos.add(before + name[place : place + 2][::-1] + name[place + 2 :])
    known = {*SPELLINGS, *REFUSED, *INSTEAD, *HELP}
    typos = {typo.strip("_") for typo in typos} - known - {""}
    return generator.sample(sorted(typos), min(count, len(typos)))


def every_typo(name: str) -> set[str]:
    """Return every deletion and transposition, and every insertion and replacement by one of a few
    letters."""
    typos = set()
    for place in range(len(name) + 1):
        before, after = name[:place], name[place + 1 :]
        typos |= {before + letter + rest for letter in "aesz_0" for rest in (name[place:], after)}
        typos |= {before + after, before + name[place : place + 2][::-1] + name[place + 2 :]}
    return {typo for typo in typos if typo.strip("_") and typo != name}


@pytest.mark.slow
def test_every_typo_gets_the_right_suggestion() -> None:
    """Over all names in --help_all, aliases included: the answer names the flag in 99.9 %, and
    first in 99 %."""
    cases = named_at_all = named_first = 0
    for name in (*SPELLINGS, *HELP):
        meant = {other for other in SPELLINGS if SPELLINGS.get(name) is SPELLINGS[other]} or {name}
        for typo in every_typo(name) - {*SPELLINGS, *REFUSED, *HELP}:
            said = answer_to_unknown(f"--{typo}", None).replace(f"--{typo}", "", 1)
            flags = re.findall(r"--([a-z][a-z0-9_]*)", said)
            cases, named_at_all = cases + 1, named_at_all + (not meant.isdisjoint(flags))
            named_first += flags[:1] != [] and flags[0] in meant
    assert cases > 50_000
    assert named_at_all >= 0.999 * cases and named_first >= 0.99 * cases, (
        cases,
        named_at_all,
        named_first,
    )


def test_suggestions_for_typos() -> None:
    """For one-edit typos of our flags the right name comes first in 99 %; for other programs' in 95
    %."""
    generator = random.Random(0)
    for names, share, sample in (([*FLAGS], 0.99, 2), (FOREIGN[::3], 0.95, 1)):
        typos = [(name, typo) for name in names for typo in one_edit_typos(name, generator, sample)]
        cases = [(name, typo, nearest_flags(typo)) for name, typo in typos]
        wrong = [case for case in cases if case[2][:1] != [case[0]]]
        assert len(wrong) <= (1 - share) * len(cases), wrong[:20]
        lost = [case for case in cases if case[0] not in case[2]]
        assert len(lost) <= 0.01 * len(cases), lost[:20]


def test_answers_to_typos_name_flags_that_can_be_typed() -> None:
    """Whatever is misspelled, and whatever the guess."""
    generator = random.Random(0)
    for name in (*FLAGS, *FOREIGN[::4]):
        for typo in one_edit_typos(name, generator, 1):
            said = answer([f"--{typo}=17"])
            for other, value in named(said, [f"--{typo}=17", f"--{typo}"]):
                assert_typable(other, value, said)


def test_one_edit() -> None:
    """One letter added, removed or replaced, or two neighbours swapped."""
    near = "lr/l lr/rl abcd/acbd abcd/axcd abcd/abxcd /a aab/ab"
    far = "lr/lr abcd/bcda abcd/dbca abcd/a"
    for pairs, expected in ((near, True), (far, False)):
        for one, other in (pair.split("/") for pair in pairs.split()):
            assert is_one_edit(one, other) == is_one_edit(other, one) == expected


SCRIPTS = Path(__file__).parents[2] / "scripts"
NAMES = ("model", "max_new_tokens", "prompts_file", "top_k", "top_p", "json_lines")
# build_corpus.py needs no package of ours; smoke_test.py (behind smoke_test.sh) passes other flags
# to pretrain_gpt.py.
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
    assert line.startswith("ERROR: ")
    return line


def test_both_spellings() -> None:
    """Dashes in a name are underscores; values, words behind -- and texts stay as they are."""
    words = ["--max-new-tokens=5", "--model", "a-b", "--prompts-file=x-y", "--", "--top-k"]
    options = parser().parse_args(words)
    assert (options.max_new_tokens, options.model, options.prompts_file) == ("5", "a-b", "x-y")
    assert options.texts == ["--top-k"]


def test_every_typo_gets_its_flag() -> None:
    """Any edit of one letter names the flag that was meant, even where a required flag is missing,
    too."""
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
        (
            ["--checkpoint=x", "--topk", "5"],
            "unknown flag --checkpoint; did you mean --model?\nunknown flag --topk; did",
        ),
        (["--max_length=5"], "unknown flag --max_length; did you mean --max_new_tokens?"),
        (["--file=x"], "unknown flag --file; did you mean --prompts_file?"),
        (["--top_k=1"], "the following arguments are required: --model"),
        (["--=5"], "unknown flag --"),
        (["--model=--"], "--model=--: -- ends the flags, so it cannot be a value"),
        (["--model=x", "a\0b"], "a word of the command line has a NUL character"),
    ],
)
def test_mistakes(words: list[str], expected: str) -> None:
    """The answer begins with the flag that is wrong."""
    assert refusal(*words).startswith(f"ERROR: {expected}")


def test_every_script_uses_it() -> None:
    """No script that users type has a parser of its own."""
    own = {
        path.name
        for path in SCRIPTS.glob("*.py")
        if "argparse.ArgumentParser(" in path.read_text("utf-8")
    }
    assert own <= OWN_PARSERS


def test_no_program_has_a_form_of_its_own_for_errors() -> None:
    """An error begins with ERROR wherever it is printed."""
    sources = [*SCRIPTS.glob("*.py"), *(SCRIPTS.parent / "megatron_lite").rglob("*.py")]
    assert not [
        path.name
        for path in sources
        if re.search(r'f?"(\{[^}]*\}: )?error: ', path.read_text("utf-8"))
    ]
