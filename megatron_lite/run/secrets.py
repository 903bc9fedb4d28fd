"""Mask secret values in command lines and texts, and read one. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from megatron_lite.config.values import SPELLINGS
from megatron_lite.errors import UsageError

SHORTEST_SECRET = 4  # characters; shorter values are common words such as `1` or `yes`
HIDDEN = "..."
WEBHOOK_VARIABLE = "MEGATRON_LITE_WEBHOOK"


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command line with the values of secret flags hidden, for libraries that record
    it."""
    words, hide = [], False
    for word in argv:
        if word.startswith("--"):
            spelling, equals, _ = word.partition("=")
            flag = SPELLINGS.get(spelling[2:].replace("-", "_"))
            hide = flag is not None and flag.secret
            words.append(f"{spelling}={HIDDEN}" if hide and equals else word)
        else:
            words.append(HIDDEN if hide else word)
    return words


def masked(text: str, values: Collection[str]) -> str:
    """Mask `values` and their lines in `text`, except those shorter than SHORTEST_SECRET.

    Longer values are replaced first, because one value may contain another.
    """
    lines = {line.strip() for value in values for line in value.splitlines()}
    for line in sorted(lines, key=len, reverse=True):
        if len(line) >= SHORTEST_SECRET:
            text = text.replace(line, HIDDEN)
    return text


def webhook_address() -> str:
    """Return the address in the environment, which is a secret: whoever has it can write there.

    Raises: UsageError without one. The message never shows it.
    """
    address = os.environ.get(WEBHOOK_VARIABLE, "").strip()
    with contextlib.suppress(ValueError):  # errors of urllib about such an address quote it
        parts = urlsplit(address)
        has_place = parts.hostname and parts.username is None and parts.port != 0
        if has_place and re.fullmatch(r"https?://[!-~]+", address):
            return address
    raise UsageError(
        f"--trackers=webhook: {WEBHOOK_VARIABLE} is not an https address; export it, as no flag takes a secret"
    )
