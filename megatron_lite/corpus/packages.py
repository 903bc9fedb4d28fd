"""Packages that only some kinds of input need: the extra `data` of the installation."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_lite.errors import UsageError


def optional_package(name: str, reason: str) -> Any:
    """Import a package of the extra.

    Raises:
        UsageError: if it is not installed; the message begins with `reason` and names the command that helps.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(f"{reason}, which needs the package {package}: pip install '.[data]'") from error
