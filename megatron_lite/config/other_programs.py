"""Other programs' names for flags and values, read from `other_programs.txt`, whose head explains
its syntax."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

VALUES = "values"  # section of refused values of our own flags
TEXTS = "texts"  # section of texts shared by several rows
_ROW = re.compile(
    r"(?P<names>[^=>|]+?)(?: = (?P<only>[^>|]+?)(?P<switch> \(switch\))?)?(?: -> (?P<here>.+?))?(?: \| (?P<remark>.+))?"
)
# Kinds of values: cases of an option, and, in <>, placeholders in that section.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "number": "[0-9]{1,18}",
        "several": "[2-9]|[1-9][0-9]{1,3}",
        "fraction": r"0?\.[0-9]+|0\.|[0-9.]+e-[0-9]+",
        "list": r"\[.*\]|.*[, ].*",
    }
)


class Row(NamedTuple):
    """One or more flags of another program that have the same answer."""

    names: tuple[str, ...]
    here: str = (
        ""  # what to write instead; empty if nothing, or if the flag exists here under this name
    )
    remark: str = ""  # the reason if there is nothing to write
    only: tuple[str, ...] = ()  # accepted values, which describe this program's behaviour anyway
    switch: bool = False  # takes 0 and 1; bare means 1


class Table(NamedTuple):
    """Everything in `other_programs.txt`."""

    programs: Mapping[str, tuple[Row, ...]]
    # `option=value`, in lower case -> why it is refused, with what to write instead
    values: Mapping[str, str]


@functools.cache
def table() -> Table:
    """Return the table of this installation; the first call reads it."""
    return read_table(
        (resources.files("megatron_lite.config") / "other_programs.txt").read_text("utf-8")
    )


def read_table(text: str) -> Table:
    """Parse a table.

    Raises:
        ValueError: for a line that cannot be parsed; the message begins with the line.
    """
    texts: dict[str, str] = {}
    values: dict[str, str] = {}
    programs: dict[str, list[Row]] = {}
    section = ""
    for line in re.sub(
        r"\n +", " ", text
    ).splitlines():  # an indented line continues the previous one
        try:
            if not line or line.startswith("#"):
                continue
            if line.startswith("["):
                section = line.removeprefix("[").removesuffix("]")
            elif section == TEXTS:
                key, _, meaning = line.partition(": ")
                texts[key] = _filled(meaning, texts)
            elif section == VALUES:
                names, _, reason = line.partition(" | ")
                for typed in names.split():
                    values[typed] = _filled(reason, {**texts, "value": typed.partition("=")[2]})
            elif not section:
                raise ValueError("write [program] above it")
            else:
                match = _ROW.fullmatch(line)
                if match is None or not (match["here"] or match["remark"]):
                    raise ValueError(
                        "write <names> -> <flags>, <names> | <remark>, or <names> = <values> | <remark>"
                    )
                here, remark = (_filled(match[part] or "", texts) for part in ("here", "remark"))
                words, only = (tuple((match[part] or "").split()) for part in ("names", "only"))
                programs.setdefault(section, []).append(
                    Row(words, here, remark, only, bool(match["switch"]))
                )
        except ValueError as error:
            raise ValueError(f"{line}: {error}") from None
    rows = {program: tuple(rows) for program, rows in programs.items()}
    return Table(MappingProxyType(rows), MappingProxyType(values))


def refused_value(name: str, text: str) -> str | None:
    """Return why a value of the option `name` is refused, with what to write instead; None for
    other values."""
    values, value = table().values, text.lower()
    if reason := values.get(f"{name}={value}"):
        return reason
    for typed, reason in values.items():
        option, _, pattern = typed.partition("=")
        for kind, expression in KINDS.items() if option == name else ():
            match = re.fullmatch(pattern.replace(f"<{kind}>", f"({expression})"), value)
            if match and match.groups():
                return reason.replace(f"<{kind}>", match[1])
    return None


def _filled(text: str, texts: Mapping[str, str]) -> str:
    """Replace each {word} with its text."""
    for word in re.findall(r"\{(\w+)\}", text):
        if word not in texts:
            raise ValueError(f"[{TEXTS}] has no {word}")
        text = text.replace(f"{{{word}}}", texts[word])
    return text
