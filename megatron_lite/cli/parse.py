"""Parse the command line: words -> flags -> `Config`.

`argparse` would abbreviate flags, accept `nan` and `1_000` as numbers, confuse an empty value with
a missing one and stop at the first error. This parser accounts for every word and reports all
problems together:

    argv --insert @files--> words --group--> (flag, value words) --parse--> values by name --> Config
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_lite import __version__
from megatron_lite.cli.help import help_text
from megatron_lite.cli.model_source import with_preset, with_source
from megatron_lite.cli.recorded_run import LENGTHS, recorded_flags
from megatron_lite.cli.unknown_flags import (
    accepts,
    answer_of_any,
    answer_to_unknown,
    foreign_answer,
    refused_row,
)
from megatron_lite.config import Config, JsonObject, unflatten
from megatron_lite.config.other_programs import refused_value
from megatron_lite.config.structured_values import environment_values
from megatron_lite.config.values import (
    PATHS,
    QUOTES,
    SPELLINGS,
    BadValueError,
    Flag,
    is_flag,
    is_legal,
    parse_list,
    parse_value,
    shown,
    written,
)
from megatron_lite.errors import RunError, UsageError, check_addresses
from megatron_lite.run.launch import launch_world_size
from megatron_lite.run.secrets import without_secrets
from megatron_lite.validation import examine, planned_world_size
from megatron_lite.validation.rules import Note

MOST_FILES = 100
LARGEST_FILE_BYTES = 2**20
NO_QUOTES = 'write $ARGS instead of "$ARGS"'
# Keep group 1, quoted text and escaped characters; drop comments and escaped line breaks.
_COMMENT = re.compile(
    r"""('[^']*'|"(?:\\.|[^"\\])*"|\\[^\r\n])|(?<!\S)\#[^\n]*|\\\r?\n""", re.DOTALL
)


@dataclass(frozen=True)
class Arguments:
    """A valid command line."""

    config: Config
    given: JsonObject  # typed options, by name
    notes: tuple[Note, ...]  # warnings, and the sources of other options
    # Variables of --export_callback_env, possibly secret: stored in no other object, and never
    # printed.
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(note.text for note in self.notes if note.is_warning)


class HelpRequested(Exception):  # noqa: N818 (not an error)
    """`--help`, `--help_all` or `--version`: print the message and exit."""


class Word(NamedTuple):
    """One shell word and the @file that contains it, if any."""

    text: str
    file: str | None = None

    @property
    def where(self) -> str:
        return f" (in {self.file})" if self.file else ""


class Item(NamedTuple):
    """One flag with its values. inline: the text after `=`. words: the words after that."""

    flag: Word
    name: str  # with underscores, without two leading dashes
    inline: str | None
    words: list[Word]

    @property
    def spelling(self) -> str:
        return self.flag.text.partition("=")[0]

    @property
    def values(self) -> list[str]:
        return ([] if self.inline is None else [self.inline]) + [word.text for word in self.words]


def parse(argv: Sequence[str]) -> Arguments:
    """Parse a command line, without the program's name.

    Raises:
        UsageError: with all problems, one per line.
        RunError: if --pretrained_checkpoint_path cannot be used, or copied.
        HelpRequested: for --help, --help_all and --version.
    """
    parser = _Parser()
    words = [word for text in argv for word in parser.expand(Word(text))]
    items = parser.group(iter(words))
    for item in items:
        if item.name in ("help", "help_all", "-h"):
            raise HelpRequested(help_text(everything=item.name == "help_all"))
        if item.name == "version":
            raise HelpRequested(f"megatron_lite {__version__}")
    for item in items:
        parser.take(item)
    config = unflatten(with_preset(parser.given)[0])
    # Otherwise a contradiction may be due to a missing flag or the pretrained folder's model.
    if (
        parser.problems
        and not parser.guesswork
        and config.source.pretrained_checkpoint_path is None
    ):
        parser.problems += _contradictions(config, parser.wrong)
    try:
        check_addresses(without_secrets([word.text for word in words]))
        if parser.problems:
            raise UsageError("\n".join(parser.problems))
        values, notes = with_source(parser.given)
    except RunError as error:
        error.experiment_dir = folder_of(config)  # for exit.json
        raise
    return Arguments(unflatten(values), parser.given, (*parser.notes, *notes), parser.environment)


def _contradictions(config: Config, wrong: set[str]) -> list[str]:
    """Return the problems that `validation.resolve` would raise, except those that involve options
    in `wrong`."""
    try:
        _, problems = examine(config, planned_world_size(config, launch_world_size()))
    except UsageError as error:  # the launcher's variables
        return [str(error)]
    return [problem.message for problem in problems if wrong.isdisjoint(problem.names)]


def folder_of(config: Config) -> str | None:
    """Return the experiment directory, or None for a dry run, which writes nothing."""
    return None if config.distributed.dry_run else config.run.experiment_dir


class _Parser:
    """The state of one pass over a command line."""

    def __init__(self) -> None:
        self.given: JsonObject = {}
        self.problems: list[str] = []
        self.notes: list[Note] = []
        self.environment: dict[str, str] = {}
        self.wrong: set[str] = set()  # options with illegal values
        self.repeated = set[str]()  # options from the config.json of a run
        self.guesswork = False  # whether a flag may be missing because a word is unknown
        self._files_read = 0

    def _problem(self, text: str, word: Word, guess: bool = False) -> None:
        """Record a problem. guess: a flag may be missing because of it."""
        self.problems.append(text + word.where)
        self.guesswork |= guess

    # -- words
    # ---------------------------------------------------------------------------------------------------

    def expand(self, word: Word, folder: str = "", chain: tuple[str, ...] = ()) -> Iterator[Word]:
        """Yield the word, or the words of an @file. chain: the including files, the innermost in
        `folder`."""
        if re.match(r"(--[\w.-]+=)?!include\b", word.text):  # of YAML files
            self._problem(
                f"{shown(word.text)}: write @<file> alone instead, to insert the flags in it",
                word,
                guess=True,
            )
            return
        if not word.text.startswith("@"):
            yield word
            return
        self._files_read += 1
        # reported already; mutual inclusion can grow exponentially
        if self._files_read > MOST_FILES + 1:
            return
        path = os.path.join(folder, os.path.expanduser(word.text[1:]))
        try:
            if self._files_read > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES} files are inserted; write fewer @files")
            if os.path.realpath(path) in chain:
                raise ValueError("includes itself; remove one of the @files")
            text = read_file(path)
            texts = self._recorded(text, word) if text.lstrip().startswith("{") else words_of(text)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._problem(f"{shown(word.text)}: file {shown(path)}: {reason}", word, guess=True)
            return
        for text in texts:
            yield from self.expand(
                Word(text, path), os.path.dirname(path), (*chain, os.path.realpath(path))
            )

    def _recorded(self, text: str, word: Word) -> list[str]:
        """Return the flags of a run's config.json, which later ones may contradict."""
        flags, left_out = recorded_flags(text)
        self.repeated.update(flag[2:].partition("=")[0] for flag in flags)
        if left_out:
            names = ", ".join(f"--{name}" for name in left_out)
            said = f"{word.text} repeats that run without what belongs to its folder or machine: {names}"
            self.notes.append(Note(said))
        return flags

    def group(self, words: Iterator[Word]) -> list[Item]:
        """Return each flag with the words that follow it."""
        items, stray = list[Item](), list[Word]()
        for word in words:
            if is_flag(word.text):
                spelling, equals, value = word.text.partition("=")
                name = spelling[2:].replace("-", "_") if spelling.startswith("--") else spelling
                items.append(Item(word, name, value if equals else None, []))
            elif items:
                items[-1].words.append(word)
            else:
                stray.append(word)
        if stray:
            self._stray(stray, None)
        return items

    def _stray(self, words: Sequence[Word], after: str | None) -> None:
        first = words[0]
        more = f" and {len(words) - 1} more" if len(words) > 1 else ""
        place = f" after {after}" if after else ""
        self._problem(
            f"stray word {shown(first.text)}{more}{place}: {_stray_hint(first.text)}",
            first,
            guess=True,
        )

    # -- flags
    # ---------------------------------------------------------------------------------------------------

    def take(self, item: Item) -> None:
        """Store the value of one flag, or record its problem."""
        if item.name in SPELLINGS:
            self._take_option(item, SPELLINGS[item.name])
        elif row := refused_row(item.name):
            # accepted if the value describes this program's behaviour anyway
            values = item.values or (["1"] if row.switch else [])
            if not values or not accepts(row, " ".join(values)):
                typed = f"{item.spelling}={shown(' '.join(values))}" if values else item.spelling
                self._problem(f"{typed} is refused: {foreign_answer(item.name)}", item.flag)
        else:
            value = " ".join(item.values) or None
            answer = answer_to_unknown(item.spelling, value)
            if re.search(r"\s", item.spelling.strip()):
                answer = f"the shell passed {shown(item.flag.text)} as one word; remove the quotes around it, or {NO_QUOTES}"
            self._problem(answer, item.flag, guess=True)

    def _take_option(self, item: Item, flag: Flag) -> None:
        values = item.values if flag.is_list else item.values[:1]
        if not values and flag.kind == "bool":
            values = ["1"]
        try:
            value = self._value(item, flag, values)
        except BadValueError as error:
            self.wrong.add(flag.name)
            typed = (
                f"{item.spelling}={shown(' '.join(values))}"
                if values and not flag.secret
                else item.spelling
            )
            self._problem(f"{typed}: {error.rule}{_remedy(flag, error)}", item.flag)
            if any(text and text[0] in QUOTES for text in values):
                return  # the words that follow belong to the quoted value
        else:
            if flag.name in LENGTHS:
                for name in self.repeated.intersection(LENGTHS):
                    self.given.pop(name, None)
            if (
                flag.name in self.given
                and self.given[flag.name] != value
                and flag.name not in self.repeated
            ):
                before, now = (shown(written(v)) for v in (self.given[flag.name], value))
                said = (
                    f"--{flag.name} is given twice: {now} is used, {before} is not{item.flag.where}"
                )
                self.notes.append(Note(said, is_warning=True))
            self.given[flag.name] = value
            if item.name == "save_interval":  # two programs use it
                said = f"--save_interval={value} counts iterations, as Megatron-LM does; Levanter's minutes are"
                self.notes.append(Note(f"{said} --checkpoint_minutes={value}"))
        stray = item.words[1 if item.inline is None else 0 :]
        if stray and flag.secret:
            said = (
                f"{item.spelling}: words follow the value; quote the JSON object, or use an @file"
            )
            self._problem(said, item.flag, guess=True)
        elif stray and not flag.is_list:
            self._stray(stray, f"{item.spelling}={shown(values[0])}")

    def _value(self, item: Item, flag: Flag, values: list[str]) -> Any:
        """Return the value for `flag`.

        Raises:
            BadValueError: if the value is missing or illegal.
        """
        if not values:
            raise BadValueError("a value must follow")
        if flag.secret:
            self.environment = (
                environment_values(values[0]) if values[0].lower() not in ("", "none") else {}
            )
            return ",".join(self.environment)  # only the names
        for text in values:
            _check_shell(text, item)
        # an alias; 1 is all
        if flag.takes_share and item.name.endswith("_fraction") and values[0].isdecimal():
            values = [f"{values[0]}.0"]
        if reason := refused_value(flag.name, values[0]):
            raise BadValueError(reason)
        for text in values if flag.is_list and flag.name in PATHS else ():
            if " " in text and any(
                map(os.path.exists, (os.path.expanduser(text), f"{os.path.expanduser(text)}.idx"))
            ):
                raise BadValueError(
                    "spaces separate words here, not parts of a path; rename it, or make a link to it"
                )
        if not flag.is_list:
            return parse_value(flag, values[0])
        if not all(values):
            raise BadValueError(
                "the value is empty (an unset variable?); write a value or leave the flag out"
            )
        return parse_list(flag, values)


def read_file(path: str) -> str:
    """Return the text of an @file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text, or is too large.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST_FILE_BYTES + 1)
    if len(data) > LARGEST_FILE_BYTES:
        raise ValueError(f"larger than {LARGEST_FILE_BYTES} bytes; an @file holds flags")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not a UTF-8 text file") from None


def words_of(text: str) -> list[str]:
    """Return the shell words of an @file, with shell quoting, `#` comments and any line breaks.

    Raises: ValueError for an open quote.
    """
    try:
        return shlex.split(_COMMENT.sub(lambda match: match[1] or "", text))
    except ValueError as error:
        raise ValueError(
            f"{str(error).lower()}; close the quote, or escape it with a backslash"
        ) from None


def _remedy(flag: Flag, error: BadValueError) -> str:
    """Return the end of the message about a bad value: the flag with a legal value."""
    if "--" in error.rule:
        return ""
    texts = [*flag.choices[:1], written(flag.default) if flag.default is not None else ""]
    texts += [] if flag.kind == "str" else ["1", "0.1", "2", "100", "-1", "10000"]
    example = next((text for text in texts if text and is_legal(flag, text)), "text")
    return error.fix(f"--{flag.name}=") or f", as in --{flag.name}={example}"


def _check_shell(text: str, item: Item) -> None:
    """Refuse a value that contains shell syntax.

    Raises:
        BadValueError: for literal quotes, several flags in one word, and variables in an @file.
    """
    if text and text[0] in QUOTES:
        raise BadValueError(
            "begins with a literal quote, because a shell keeps the quotes inside a variable; leave the quotes out, "
            "or put the flag into a file, where quotes work, and pass @file"
        )
    if re.search(r"\s--[A-Za-z]", text):
        raise BadValueError(f"several flags in one word; {NO_QUOTES}, or pass @file")
    if item.flag.file and re.search(r"\$(\w|\{)", text):
        raise BadValueError(
            "an @file has no variables; write the value, or pass the flag on the command line"
        )


def _stray_hint(text: str) -> str:
    name, equals, value = text.partition("=")
    if not text.strip():
        return f"an empty word; {NO_QUOTES}"
    if text == "{" or text.endswith(":"):
        return "an @file holds flags as a shell has them (--lr=1e-3), not YAML; @RUN/config.json repeats a run"
    if re.search(r"(^|\s)--[A-Za-z]", text):
        return f"several flags in one word; {NO_QUOTES}"
    if (equals or name.replace("-", "_") in SPELLINGS) and (answer := answer_of_any(name, value)):
        return f"flags begin with two dashes; {answer}"
    if re.search(r"\.(py|ya?ml|json|toml|cfg|ini|sh)$", text):
        return "configuration files are not read; write settings as flags (--help), or pass a file of flags as @file"
    return "every word must be a flag or its value (--help); put a value with spaces into an @file, in quotes"
