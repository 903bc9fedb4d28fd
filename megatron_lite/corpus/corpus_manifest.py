"""`<prefix>.summary.json`: counts, digests, versions and options of a corpus, the same for any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite import __version__
from megatron_lite.corpus.assemble import Assembled
from megatron_lite.corpus.faults import Faults
from megatron_lite.corpus.inputs import InputFile

ENDING = ".summary.json"


def describe_inputs(files: Sequence[InputFile]) -> dict[str, Any]:
    """Return the number and the bytes of the input files, and a digest of their names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.size_bytes}\n".encode(errors="surrogateescape"))
    return {"files": len(files), "bytes": sum(file.size_bytes for file in files), "sha256": digest.hexdigest()}


def describe_result(assembled: Assembled, text_bytes: int, duplicates: int, faults: Faults) -> dict[str, Any]:
    """Return the counts of a corpus. `text_bytes`: of all documents that were read, also duplicates."""
    counts = assembled.frequencies
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return {
        "documents": assembled.documents,
        "tokens": assembled.tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / max(assembled.tokens, 1),
        "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),
        "duplicates": duplicates,
        "skipped": dict(sorted(faults.counts.items())),
        "first_skipped": faults.first,
    }


def versions() -> dict[str, str]:
    """Return the versions of all that makes tokens."""
    import tokenizers

    return {"megatron_lite": __version__, "tokenizers": tokenizers.__version__}


def read_summary(prefix: str) -> dict[str, Any] | None:
    """Return the summary beside a corpus; None if there is none that can be read."""
    try:
        values = json.loads(Path(prefix + ENDING).read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def is_complete(prefix: str, fingerprint: str) -> dict[str, Any] | None:
    """Return the summary of a corpus that was prepared with this fingerprint, if all its files are there, else None."""
    summary = read_summary(prefix)
    if summary is None or summary.get("fingerprint") != fingerprint:
        return None
    try:
        for name, described in summary["files"].items():
            if Path(prefix).with_name(name).stat().st_size != described["bytes"]:
                return None
    except (OSError, KeyError, TypeError, AttributeError):
        return None
    return summary
