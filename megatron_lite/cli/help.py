"""Write the text of `--help` and `--help_all`, and the full and the short start-up banner."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from megatron_lite.cli.unknown_flags import answers_for, refused
from megatron_lite.config import AREAS, Config, flatten
from megatron_lite.config.other_programs import table
from megatron_lite.config.values import FLAGS, Flag, abridged, limits, written
from megatron_lite.errors import as_installed
from megatron_lite.validation import defaults

WIDTH = 118
NAME_WIDTH = 46  # columns for a flag with its values in --help
DOTS_WIDTH = 48  # columns for a name and its dots in the banner, as in Megatron-LM

INTRODUCTION = """\
usage: torchrun --nproc-per-node=N pretrain_gpt.py [--flag=value ...] [@file ...]      (or python, for one process)
installed by pip: torchrun --nproc-per-node=N -m pretrain_gpt ..., or pretrain_gpt ..., in any folder

--a_b=v, --a_b v and --a-b=v are the same. A bare 0|1 flag means 1. If a flag is given twice, the last one wins.
@file inserts the flags of a file: shell words, # comments, other @files relative to its folder."""

EXAMPLE = """\
List all options, aliases and flags of other programs: --help_all. Print the version: --version.
Try it without data: python pretrain_gpt.py --num_layers=2 --hidden_size=64 --num_attention_heads=4 --vocab_size=256
    --sequence_length=128 --train_iters=100 --batch_size=32 --dataset_source=random
Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 a peer died or hung, 7 memory, 8 storage,
    75 preempted and saved, 1 anything else. torchrun reports each failure as 1; exit.json in --experiment_dir has the
    code."""


def help_text(everything: bool) -> str:
    """Return the text of `--help` or `--help_all`: all options with bounds and aliases, and all
    foreign flags."""
    lines = [INTRODUCTION]
    for area, owner in AREAS.items():
        shown = [
            flag for flag in FLAGS.values() if flag.area == area and (everything or flag.basic)
        ]
        if shown:
            lines += ["", f"{owner.__doc__}:"]
        for flag in shown:
            lines += _help_lines(flag, everything)
    if everything:
        lines += [
            "",
            "Flags of other programs that are accepted only with these values, which change nothing:",
        ]
        for name, row in refused().items():
            lines += _two_columns(f"--{name}={'|'.join(row.only)}", row.remark)
        lines += ["", "Values that are refused:"]
        for typed, reason in table().values.items():
            lines += _two_columns(f"--{typed}", reason)
        for program in table().programs:
            lines += ["", f"Flags of {program} that do not exist here:"]
            for names, text in answers_for(program):
                lines += _two_columns(", ".join(f"--{name}" for name in names), text)
    else:
        lines += ["", EXAMPLE]
    return as_installed("\n".join(lines))


def value_words(flag: Flag) -> str:
    """Return the placeholder for a flag's value: `0|1`, the choices, or the kind of value."""
    if flag.kind == "bool":
        return "0|1"
    if flag.choices:
        return "|".join(flag.choices)
    word = {"int": "N", "float": "X", "str": "TEXT"}[flag.kind]
    if flag.is_list:
        word += " ..." if word == "TEXT" else f",{word},..."
    return "|".join((word, *flag.words, *["N%"] * flag.takes_share))


def default_words(flag: Flag) -> str:
    """Return the default as a user would type it, or a description if it is derived."""
    if flag.default is None:
        return flag.unset
    return written(flag.default) or "none"


def _help_lines(flag: Flag, everything: bool) -> Iterator[str]:
    words = value_words(flag)
    left = f"--{flag.name}={words}"
    right = f"{flag.help} [{default_words(flag)}]"
    if len(left) > NAME_WIDTH - 4 and flag.choices:  # too long for the column
        left = f"--{flag.name}=NAME"
        right = f"{flag.help}: {words.replace('|', ', ')} [{default_words(flag)}]"
    if everything:
        right += f"; {limits(flag)}" if limits(flag) else ""
        right += "; also --" + ", --".join(flag.aliases) if flag.aliases else ""
    yield from _two_columns(left, right)


def _two_columns(left: str, right: str) -> list[str]:
    """Return one entry's lines; if the left text overflows its column, the right text starts on a
    new line."""
    start, indent = f"  {left} ".ljust(NAME_WIDTH), " " * NAME_WIDTH
    own_line = (
        textwrap.wrap(start, WIDTH, subsequent_indent="  ") if len(start) > NAME_WIDTH else []
    )
    first = indent if own_line else start
    return own_line + textwrap.wrap(
        right, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )


def banners(config: Config, derived: Mapping[str, str]) -> tuple[str, str]:
    """Return two lists that a run logs at startup, each followed by `derived`: all options, and
    those set by the user.

    config: resolved. The first list is dotted, and `*` marks options that differ from their
    default, which may be derived; the second lists only these, as typed.
    """
    usual = defaults(config)
    every = list[str]()
    typed = list[str]()
    for name, value in sorted(flatten(config).items()):
        text, whole = abridged(value), written(value)
        stated = f"({FLAGS[name].unset})" if value is None else text or "none"
        every.append(_dotted(name, stated, " " if value == usual[name] else "*"))
        if value != usual[name]:
            typed.append(f"--{name}={text if text != whole else shlex.quote(whole)}")
    others = [_dotted(name, text, " ") for name, text in derived.items()]
    every += [" derived ".center(72, "-"), *others] if others else []
    dotted = [
        " arguments (* differs from the default) ".center(72, "-"),
        *every,
        " end of arguments ".center(72, "-"),
    ]
    where = (
        ""
        if config.run.experiment_dir is None
        else f" (all are in {config.run.experiment_dir}/config.json)"
    )
    short = [f"arguments that differ from the default{where}:", *_wrapped(typed), *others]
    return "\n".join(dotted), "\n".join(short)


def _wrapped(words: Iterable[str]) -> list[str]:
    """Return indented lines of at most WIDTH columns, except for longer words."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return lines


def _dotted(name: str, text: str, mark: str) -> str:
    return f"{mark} {name} {'.' * max(2, DOTS_WIDTH - len(name))} {text}"
