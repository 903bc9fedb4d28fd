"""Packages that only some kinds of input need: the extra `data` of the installation."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from megatron_lite.corpus.inputs import InputFile
from megatron_lite.errors import UsageError


def parquet_package(path: str) -> Any:
    """Import pyarrow for a parquet file."""
    return optional_package("pyarrow.parquet", f"{path} is a parquet file")


def arrow_package(path: str) -> Any:
    """Import pyarrow for an arrow file."""
    return optional_package("pyarrow", f"{path} is an arrow file")


def zstd_package(path: str) -> Any:
    """Import zstandard for a compressed file."""
    return optional_package("zstandard", f"{path} is compressed with zstd")


def check_packages(files: Iterable[InputFile]) -> None:
    """Check, before any work, that every file can be read.

    Raises:
        UsageError: for the first file of a kind whose package is not installed.
    """
    for needed, check in ((".zst", zstd_package), ("parquet", parquet_package), ("arrow", arrow_package)):
        first = next((file for file in files if needed in (file.kind, file.compression)), None)
        if first is not None:
            check(first.path)


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
