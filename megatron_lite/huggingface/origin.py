"""Keep a model folder's facts that training does not change: ids of special tokens, generation
settings, licence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.data.tokenizing import read_object
from megatron_lite.huggingface.config_file import text_part
from megatron_lite.run.regular_files import read_bytes

GENERATION_NAME, CARD_NAME = "generation_config.json", "README.md"
LARGEST_CARD_BYTES = 2**22
UNCHOSEN = "license: other\nlicense_name: choose-a-license"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT = re.compile(
    r"^(?:license|license_name|license_link|base_model):.*(?:\n[ \t-].*)*", re.MULTILINE
)


def read_origin(folder: Path) -> dict[str, Any]:
    """Return a folder's token ids (`ids`) and `generation` settings from `config.json`, and lines
    of its `card`."""
    content, header = text_part(read_object(folder / "config.json")), ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        card = read_bytes(folder / CARD_NAME, LARGEST_CARD_BYTES, follow_links=True).decode()
        header = card.replace("\r\n", "\n").split("---\n")[1].replace(UNCHOSEN, "")
    ids = {key: content[key] for key in _IDS if key in content}
    return {
        "ids": ids,
        "generation": read_object(folder / GENERATION_NAME),
        "card": _KEPT.findall(header),
    }


def special_ids(
    stated: Mapping[str, Any], tokenizer: Mapping[str, int | None], is_trained: bool
) -> dict[str, Any]:
    """Return an export's special ids: as stated, else the tokenizer's; trained texts end with its
    end of document."""
    ids = {key: tokenizer.get(key) if stated.get(key) is None else stated[key] for key in _IDS}
    ends, end = ids["eos_token_id"], tokenizer.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return ids | {"eos_token_id": [*ends, end]} if is_trained and end not in (None, *ends) else ids
