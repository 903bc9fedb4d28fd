"""Report a package that is not installed in one line, with the command that installs it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from types import TracebackType

from megatron_lite.errors import UsageError
from megatron_lite.run.launch import is_first_on_machine

CHECKOUT = Path(__file__).resolve().parents[2]
OWN = ("megatron_lite", "scripts")  # if missing: a bug, or Python was started in another folder


def missing_package(error: BaseException | None) -> UsageError | None:
    """Return the error to report if `error` is the import of a package that is not installed, else None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or "." in name or name in OWN or name in sys.stdlib_module_names:
        return None
    missing = UsageError(f"{sys.executable} lacks the package {name}; {_remedy(name)}")
    missing.agreed = False  # another machine of the run may have the package
    return missing


def _remedy(name: str) -> str:
    """Return the command to type: activate the checkout's .venv if it has the package, else install."""
    environment = CHECKOUT / ".venv"
    activate = f"source {_typed(environment / 'bin' / 'activate')}"
    if any(environment.glob(f"lib/python*/site-packages/{name}")) and Path(sys.prefix) != environment:
        return f"activate the environment and repeat the command: {activate}"
    if importlib.util.find_spec("torch") is not None or not (CHECKOUT / "setup.py").is_file():
        return f"install the package and repeat the command: pip install {name}"
    install = f"pip install -e {_typed(CHECKOUT)}"
    if sys.prefix == sys.base_prefix:  # many systems forbid pip outside of environments
        install = f"python3 -m venv {_typed(environment)} && {activate} && {install}"
    return f"install the project and repeat the command: {install}"


def _typed(path: Path) -> str:
    """Return a path as a user would type it: relative in the checkout, absolute elsewhere."""
    inside = Path.cwd() == CHECKOUT
    return shlex.quote(os.path.relpath(path) if inside else str(path))


def name_missing_package(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one line about a missing package and exit with code 2; installed as `sys.excepthook`.

    Any other error is printed as usual.
    """
    missing = missing_package(error)
    if missing is None:
        sys.__excepthook__(kind, error, traceback)
        return
    if is_first_on_machine():
        print(f"ERROR: {missing}", file=sys.stderr)
    sys.exit(missing.exit_code)
