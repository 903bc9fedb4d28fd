"""What a run says of its options when it starts, beside their values."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """A remark, or a warning."""

    text: str
    is_warning: bool = False
