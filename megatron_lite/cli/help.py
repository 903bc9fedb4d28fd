"""What is printed about flags: `--help`, `--help_all`, the start-up banner, the tables of docs/flags.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lite.cli.foreign_flags import INSTEAD
from megatron_lite.config import AREAS, Config, flatten, unflatten
from megatron_lite.config.foreign_values import REFUSED, REFUSED_VALUES, Refused
from megatron_lite.config.values import FLAGS, Flag, limits, written
from megatron_lite.validation import BATCH, examine

WIDTH = 118
NAME_WIDTH = 46  # of a flag with its values in --help
DOTS_WIDTH = 48  # of a name and its dots in the banner, as in Megatron-LM

INTRODUCTION = """\
usage: torchrun --nproc-per-node=N pretrain_gpt.py [--flag=value ...] [@file ...]      (or python, on one process)

--a_b=v, --a_b v and --a-b=v are the same. A bare 0|1 flag means 1. A flag given twice: the last one counts.
@file inserts the flags of a file: shell words, # comments, other @files relative to it."""

EXAMPLE = """\
All options, aliases and refused flags: --help_all.
Try it without data: python pretrain_gpt.py --num_layers=2 --hidden_size=64 --num_attention_heads=4 --vocab_size=256
    --sequence_length=128 --train_iters=100 --batch_size=32 --dataset_source=random
Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 a peer died or hung, 7 memory, 8 storage,
    75 preempted and saved, 1 anything else; torchrun turns each into 1, exit.json in experiment_dir keeps it."""


def help_text(everything: bool) -> str:
    """The text of `--help`, or of `--help_all` with every option, its bounds and aliases, and every refused flag."""
    lines = [INTRODUCTION]
    for area, owner in AREAS.items():
        lines += ["", f"{owner.__doc__}:"]
        for flag in FLAGS.values():
            if flag.area == area and (everything or flag.option.basic):
                lines += _help_lines(flag, everything)
    if everything:
        lines += ["", "Fast-LLM's flags that are no options here, with the values that are accepted:"]
        for refused in REFUSED:
            lines += _two_columns(f"--{refused.name}={'|'.join(refused.accepted) or '...'}", refused.reason)
        for (name, value), reason in REFUSED_VALUES.items():
            lines += _two_columns(f"--{name}={value}", f"refused: {reason}")
        lines += ["", "Flags of Megatron-LM and Levanter with another spelling here:"]
        for name, text in INSTEAD.items():
            lines += _two_columns(f"--{name}", text)
    else:
        lines += ["", EXAMPLE]
    return "\n".join(lines)


def value_words(flag: Flag) -> str:
    """What stands behind the flag: `0|1`, the choices, or the kind of value."""
    if flag.kind == "bool":
        return "0|1"
    if flag.option.choices:
        return "|".join(flag.option.choices)
    words = {
        "int": "N",
        "float": "X",
        "str": "TEXT",
        "list of int": "N,N,...",
        "list of float": "X,X,...",
        "list of str": "TEXT ...",
    }
    return "|".join((words[flag.kind], *flag.words))


def default_words(flag: Flag) -> str:
    """The default as one would type it; a derived one in words."""
    if flag.default is None:
        return flag.option.unset
    return written(flag.default) or "none"


def _help_lines(flag: Flag, everything: bool) -> Iterator[str]:
    words = value_words(flag)
    left = f"--{flag.name}={words}"
    right = f"{flag.option.help} [{default_words(flag)}]"
    if len(left) > NAME_WIDTH - 4 and flag.option.choices:  # too many for the column
        left, right = f"--{flag.name}=NAME", f"{flag.option.help}: {words.replace('|', ', ')} [{default_words(flag)}]"
    if everything:
        right += f"; {limits(flag)}" if limits(flag) else ""
        right += "; also --" + ", --".join(flag.aliases) if flag.aliases else ""
    yield from _two_columns(left, right)


def _two_columns(left: str, right: str) -> list[str]:
    """What is too long for the left column gets a line of its own."""
    start, indent = f"  {left} ".ljust(NAME_WIDTH), " " * NAME_WIDTH
    alone = [start.rstrip()] if len(start) > NAME_WIDTH else []
    first = indent if alone else start
    return alone + textwrap.wrap(right, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def banner(config: Config, derived: Mapping[str, str]) -> str:
    """The dotted list of all options that a run prints when it starts, then the numbers that follow from them.

    config: resolved. derived: in the order to print. `*` marks what differs from the default, also a derived one.
    """
    lines = [" arguments (* differs from the default) ".center(72, "-")]
    defaults = _defaults(config)
    for name, value in sorted(flatten(config).items()):
        text = f"({FLAGS[name].option.unset})" if value is None else written(value) or "none"
        lines.append(_dotted(name, text, " " if value == defaults[name] else "*"))
    if derived:
        lines.append(" derived ".center(72, "-"))
        lines += [_dotted(name, text, " ") for name, text in derived.items()]
    return "\n".join([*lines, " end of arguments ".center(72, "-")])


def _defaults(config: Config) -> dict[str, Any]:
    """The value that each option of a resolved configuration would have if it alone had not been set.

    The options of the batch arithmetic follow from each other and are taken back together.
    """
    values = flatten(config)
    defaults = {flag.name: flag.default for flag in FLAGS.values()}
    sizes = [values[name] for name in ("batch_size", "micro_batch_size", "sequential_micro_batches")]
    world_size = -(-sizes[0] // (sizes[1] * sizes[2])) if None not in sizes else 1
    for name, default in list(defaults.items()):
        if default is None and values[name] is not None:
            unset = dict.fromkeys(BATCH if name in BATCH else (name,))
            without, _ = examine(unflatten({**values, **unset}), world_size)
            defaults[name] = flatten(without)[name]
    return defaults


def _dotted(name: str, text: str, mark: str) -> str:
    return f"{mark} {name} {'.' * max(2, DOTS_WIDTH - len(name))} {text}"


def option_table(area: str, elsewhere: Mapping[str, str]) -> str:
    """The Markdown table of the options of one area. elsewhere: other programs' defaults by name, where they differ."""
    rows = [
        (
            f"`--{flag.name}`",
            default_words(flag),
            _limits(flag),
            ", ".join(f"`{name}`" for name in flag.aliases),
            flag.option.help,
            elsewhere.get(flag.name, ""),
        )
        for flag in FLAGS.values()
        if flag.area == area
    ]
    return _table(("flag", "default", "values", "also spelled", "meaning", "defaults elsewhere"), rows)


def _limits(flag: Flag) -> str:
    words = {"int": "integer", "float": "number", "str": "text", "list of str": "texts", "list of float": "numbers"}
    text = ", ".join(flag.option.choices) or words.get(flag.kind, "0 or 1")
    text += f" {limits(flag)}" if limits(flag) else ""
    also = ", ".join(f"{alias} = {value}" for alias, value in flag.option.value_aliases.items())
    return text + (f" ({also})" if also else "") + ("; none" if flag.optional else "")


def refused_table() -> str:
    """The Markdown table of Fast-LLM's flags that are no options here."""
    rows = [_refused_row(refused) for refused in REFUSED]
    rows += [(f"`--{name}={value}`", "", "", "", reason) for (name, value), reason in REFUSED_VALUES.items()]
    return _table(("flag", "Fast-LLM's default", "accepted", "also spelled", "why no other value"), rows)


def _refused_row(refused: Refused) -> tuple[str, ...]:
    accepted = ", ".join(f"`{value}`" for value in refused.accepted) or "nothing"
    aliases = ", ".join(f"`{name}`" for name in refused.aliases)
    return f"`--{refused.name}`", refused.default or "none", accepted, aliases, refused.reason


def instead_table() -> str:
    """The Markdown table of other programs' flags that are refused with the spelling to use."""
    return _table(("flag", "instead"), [(f"`--{name}`", text) for name, text in INSTEAD.items()])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(_escaped(cell) for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")
