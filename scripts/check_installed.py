"""Check whether this checkout is installed, current and complete; exit code 0 if so, otherwise 1
with the reason.

    python scripts/check_installed.py plot,test

quickstart.sh and run_tests.sh use it to skip pip and the network when there is nothing to install.
"""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION_FILES = ("setup.py", "pyproject.toml")


def missing(extras: Sequence[str]) -> str | None:
    """Return why pip must run, or None."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "not installed"
    # Skip the checkout itself, where a leftover .egg-info folder would look like an installation.
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    found = list(importlib.metadata.distributions(name="megatron_lite", path=path))
    if not found:
        return "not installed"
    origin = json.loads(found[0].read_text("direct_url.json") or "{}").get("url")
    if origin != ROOT.as_uri():
        return f"installed from {origin}, not from this checkout"
    metadata = (
        Path(str(found[0].locate_file("")))
        / f"megatron_lite-{found[0].version}.dist-info"
        / "METADATA"
    )
    for name in DESCRIPTION_FILES:
        if metadata.stat().st_mtime < (ROOT / name).stat().st_mtime:
            return f"{name} has changed since the installation"
    for text in found[0].requires or []:
        requirement = Requirement(text)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{requirement.name} is missing"
        if not requirement.specifier.contains(version, prereleases=True):
            return f"{requirement.name} {version} does not satisfy {requirement.specifier}"
    return None


def main() -> int:
    """Check the comma-separated extras of the command line; return the exit code."""
    reason = missing(
        [extra for extra in sys.argv[1].split(",") if extra] if len(sys.argv) > 1 else []
    )
    print("already installed and current" if reason is None else f"to install: {reason}")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
