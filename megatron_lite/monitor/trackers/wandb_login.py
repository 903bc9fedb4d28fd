"""The key of Weights & Biases, from the variable WANDB_API_KEY or the text file at WANDB_API_KEY_PATH.

The key goes to the library only. It never becomes an option, so no command line, configuration, log or saved file has
it.
"""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from megatron_lite.errors import UsageError


def read_key() -> str | None:
    """Return the key from WANDB_API_KEY or the file at WANDB_API_KEY_PATH; None without either.

    Raises:
        UsageError: if the file cannot be read or does not hold one word. The message never shows the content.
    """
    if key := os.environ.get("WANDB_API_KEY", "").strip():
        return key
    path = os.environ.get("WANDB_API_KEY_PATH", "")
    if not path:
        return None
    try:
        words = Path(path).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"WANDB_API_KEY_PATH={path} cannot be read: {reason}; give a text file with the key") from None
    if len(words) != 1:
        fact = "is empty" if not words else f"holds {len(words)} words"
        raise UsageError(f"WANDB_API_KEY_PATH={path} {fact}; it must hold the key and nothing else")
    return words[0]


def _logged_in() -> bool:
    """Whether `wandb login` has left a key in the user's netrc file; the library itself might prompt for one."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return False


def why_offline(mode: str | None, key: str | None) -> str | None:
    """Return why a run is recorded on disk only, or None to go online.

    mode: of --wandb_mode, which wins over WANDB_MODE.
    """
    source, mode = ("--wandb_mode", mode) if mode else ("WANDB_MODE", os.environ.get("WANDB_MODE", ""))
    if mode in ("offline", "dryrun"):
        return f"{source}={mode}"
    if mode in ("", "online") and key is None and not _logged_in():
        return "no key in WANDB_API_KEY or in the file WANDB_API_KEY_PATH"
    return None


def send_no_error_reports() -> None:
    """Keep the library from sending reports of its own errors, for which it would wait when the process ends."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
