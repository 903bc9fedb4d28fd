"""Suggestions for a flag that does not exist: the flags with the most similar names."""

from __future__ import annotations

from megatron_lite.cli.foreign_flags import INSTEAD, REFUSED
from megatron_lite.config.values import DASHES, SPELLINGS, shown

LONGEST_NAME = 60  # characters; a longer word was not meant as a flag


def unknown_flag(spelling: str) -> str:
    """Return the message for a flag that does not exist, with the nearest names."""
    name = spelling.lstrip(DASHES).replace("-", "_").lower()
    message = f"unknown flag {shown(spelling)}"
    if name in SPELLINGS:
        return f"{message}: flags begin with two ASCII dashes and are lower case; write --{name}"
    flag = SPELLINGS.get(name.removeprefix("no_"))
    if flag is not None and flag.kind == "bool":
        return f"{message}; write --{flag.name}=0"
    near = nearest_flags(name)
    if not near:
        return f"{message}; --help_all lists all flags"
    return f"{message}; did you mean {' or '.join('--' + other for other in near)}?"


def nearest_flags(name: str, count: int = 3) -> list[str]:
    """Return the flags that `name` may have been meant to be, the likeliest first; ours before other programs'."""
    if not 1 <= len(name) <= LONGEST_NAME:
        return []
    import difflib  # only a mistake needs it

    longer = [other for other in SPELLINGS if len(name) > 1 and other.startswith(name)]
    names = [*SPELLINGS, *REFUSED, *INSTEAD, "help", "help_all"]
    cutoff = 0.8 if len(name) > 4 else 0.6  # two names of four letters with one difference are similar to 0.75
    similar = difflib.get_close_matches(name, names, n=count, cutoff=cutoff)
    return list(dict.fromkeys([*longer, *similar]))[:count]
