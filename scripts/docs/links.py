"""Links and headings of the documents, as GitHub interprets them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

FENCE = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1[^\n]*$", re.M | re.S)
_CODE = re.compile(r"(`+)[^`].*?\1", re.S)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)")
_OTHER_LINKS = re.compile(
    r"(?:\b(?:src|srcset|href)=\"|^ *\[[^\]^]+\]:\s+<?|(?<!\()<(?=https?:))([^\s\">]+)", re.M
)
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.M)
_ANCHOR = re.compile(r"<a +(?:id|name)=\"([^\"]+)\"")
_NO_SPACE_OR_QUOTE = re.compile(r"[\w!#$%&'*+,./:;=?@~()-]+")


def slug(heading: str) -> str:
    """Return the anchor of a heading: its text in lower case, without punctuation, with a dash for
    each space."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", text).strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a document; a repeated heading gets -1, -2, ..."""
    found = set(_ANCHOR.findall(text))
    counts: dict[str, int] = {}
    for heading in _HEADING.findall(FENCE.sub("", text)):
        name = slug(heading)
        count = counts[name] = counts.get(name, -1) + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def targets(text: str) -> list[str]:
    """Return the targets of all links and images of a document, outside code."""
    prose = _CODE.sub("", FENCE.sub("", text))
    return [*_LINK.findall(prose), *_OTHER_LINKS.findall(prose)]


def problems(document: Path, root: Path) -> Iterator[str]:
    """Yield each broken link of a document in the checkout `root`; web addresses are not opened."""
    text = document.read_text("utf-8")
    for target in targets(text):
        where = f"{document.relative_to(root)} links to {target!r}"
        if "://" in target or target.startswith("mailto:"):
            if not _is_address(target):
                yield f"{where}: write https:// and a host, without spaces or a full stop at the end"
            continue
        path, _, anchor = target.partition("#")
        place = Path(os.path.normpath(document.parent / path)) if path else document
        if path.startswith("/") or not place.is_relative_to(root) or not place.exists():
            yield f"{where}: no such file"
        elif anchor and (place.suffix != ".md" or anchor not in anchors(place.read_text("utf-8"))):
            yield f"{where}: no such heading"


def _is_address(target: str) -> bool:
    parts = urlsplit(target)
    host = parts.hostname or ""
    formed = _NO_SPACE_OR_QUOTE.fullmatch(target) is not None and target[-1] not in ".,;:"
    return (
        parts.scheme == "https"
        and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", host) is not None
        and formed
    )
