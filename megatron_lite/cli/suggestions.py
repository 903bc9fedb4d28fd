"""What was meant by a flag that does not exist: another program's, or one of ours with a typing error."""

from __future__ import annotations

import difflib
import re

from megatron_lite.cli.foreign_flags import INSTEAD
from megatron_lite.config.foreign_values import REFUSED_SPELLINGS
from megatron_lite.config.values import SPELLINGS, shown

LONGEST_NAME = 60  # characters; nothing longer was meant to be a flag
LONG_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"  # what word processors and web pages make of dashes


def instead_of(name: str) -> str | None:
    """What to write instead of another program's flag, or why there is none; None if it is unknown.

    Of an option with dots (`trainer.tracker.name`) the longest known end counts (`tracker.name`, or else `name`), and
    where there is none, what is known of the group that it belongs to (`tracker`).
    """
    parts = name.split(".") if re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) else []
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if end in INSTEAD:
            return INSTEAD[end]
    if len(parts) > 1 and parts[-1] in SPELLINGS:
        return f"flags have no dots; write --{SPELLINGS[parts[-1]].name}"
    if len(parts) > 1 and parts[-1] in REFUSED_SPELLINGS:
        return REFUSED_SPELLINGS[parts[-1]].reason
    return next((INSTEAD[part] for part in reversed(parts) if part in INSTEAD), None)


def unknown_flag(spelling: str) -> str:
    """The message for a flag that does not exist, with the nearest names."""
    name = spelling.lstrip("-" + LONG_DASHES).replace("-", "_").lower()
    message = f"unknown flag {shown(spelling)}"
    if name in SPELLINGS:
        return f"{message}: flags begin with two plain dashes and are in small letters; write --{name}"
    flag = SPELLINGS.get(name.removeprefix("no_"))
    if flag is not None and flag.kind == "bool":
        return f"{message}; write --{flag.name}=0"
    near = nearest_flags(name)
    if not near:
        return f"{message}; --help_all lists all flags"
    return f"{message}; did you mean {' or '.join('--' + other for other in near)}?"


def nearest_flags(name: str, count: int = 3) -> list[str]:
    """The flags that `name` may have been meant to be, the likeliest first.

    One typing error away comes before names that only go on longer, and those before names that need more edits.
    """
    if not 1 <= len(name) <= LONGEST_NAME:
        return []
    names = [*SPELLINGS, *REFUSED_SPELLINGS, *INSTEAD, "help", "help_all"]
    longer = [other for other in SPELLINGS if len(name) > 1 and other.startswith(name)]
    similar = difflib.get_close_matches(name, names, n=8, cutoff=0.5)
    distance = {other: float(_edits(name, other)) for other in similar}
    distance.update({other: min(1.5, _edits(name, other)) for other in longer})
    near = [other for other in distance if distance[other] <= max(1.5, len(name) // 3)]
    return sorted(near, key=lambda other: (distance[other], other not in SPELLINGS))[:count]


def _edits(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
