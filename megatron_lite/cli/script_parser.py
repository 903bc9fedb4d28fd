"""Parse the scripts' flags: accept both spellings of a flag and suggest flags for an unknown
one."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_lite.cli.unknown_flags import is_one_edit
from megatron_lite.config.values import LOCAL, URL, shown, similar
from megatron_lite.errors import UsageError, check_addresses

LARGEST_COUNT = 2**31 - 1
MAY_BE_REMOTE = ("prompt", "stop", "inputs", "data_path", "loss_mask")  # no files, or copied ones
# Other programs' names for our flags, where the names are not similar.
ELSEWHERE = """\
model           checkpoint checkpoint_path ckpt hf_path load out_dir pretrained
from            checkpoint input load model source
to              output save
max_new_tokens  max_length n_predict num_tokens out_seq_length
prompt          input start text
prompts_file    file input_file
text            file input input_file
num_processes   workers num_workers
"""


class ScriptParser(argparse.ArgumentParser):
    """An `ArgumentParser` that never abbreviates, reads `--max-tokens` as `--max_tokens`, and
    suggests flags."""

    def __init__(self, about: str | None = None, **options: Any) -> None:
        """Set up the parser. about: a command's docstring; the help shows its summary and the exit
        codes."""
        if about:
            summary, _, more = about.partition("\n\n")
            _, title, codes = more.rpartition("Exit codes:")
            options |= {"description": summary, "epilog": title and title + codes}
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line's words; exit with code 2 and a line for each unknown flag."""
        words = list(sys.argv[1:] if args is None else args)
        if any("\0" in word for word in words):
            self.error("a word of the command line has a NUL character")
        try:
            check_addresses(words)
        except UsageError as error:
            self.error(str(error))
        end = words.index("--") if "--" in words else len(words)
        unknown = list[str]()
        spelled = [self._spelled(word, unknown) for word in words[:end]]
        if unknown:
            self.error("\n".join(unknown))
        return super().parse_known_args([*spelled, *words[end:]], namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.dest not in MAY_BE_REMOTE and re.match(URL, arg_string):
            raise argparse.ArgumentError(
                action, f"{shown(arg_string)}: {LOCAL}; write a local or mounted path"
            )
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit, without the usage, which would fill the screen."""
        self.exit(2, f"ERROR: {UsageError(message)} (--help explains)\n")

    def _spelled(self, word: str, unknown: list[str]) -> str:
        """Return a flag with underscores, as argparse expects it, and anything else unchanged;
        record an unknown one."""
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or " " in flag:
            return word
        name = flag[2:].replace("-", "_")
        names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        if name in names:
            if value == "--":
                self.error(f"--{name}=--: -- ends the flags, so it cannot be a value")
            return f"--{name}{equals}{value}"
        near = (
            [other for other in names if is_one_edit(name, other)]
            or [other for other in names if len(name) > 1 and other.startswith(name)]
            or similar(name, names, 3, 0.7)
            or [
                ours
                for ours, *theirs in map(str.split, ELSEWHERE.splitlines())
                if ours in names and name in theirs
            ]
        )
        meant = (
            f"did you mean {' or '.join(f'--{other}' for other in near)}?"
            if near
            else "no flag has a similar name"
        )
        unknown.append(f"unknown flag {shown(flag)}; {meant}")
        return word


def number(
    kind: Callable[[str], Any], minimum: float, maximum: float = math.inf, above: bool = False
) -> Any:
    """Return an argparse type with bounds; `above` excludes the minimum."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if (
            not (minimum < value if above else minimum <= value)
            or not value <= maximum
            or value == math.inf
        ):
            whole = "whole " if kind is int else ""
            bounds = f"{'above' if above else 'of at least'} {minimum:g}"
            bounds += f" and at most {maximum:.10g}" if maximum < math.inf else ""
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a {whole}number {bounds}")
        return value

    return parse


COUNT = number(int, 1, LARGEST_COUNT)
