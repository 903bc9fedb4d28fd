"""See, stop or count the calls that change checkpoints and exports, inside a forked process of a
test.

The functions of `os` that change a file system are replaced by ones that report first. Only a test
does this, never the package; tests/faults/test_every_call.py checks against strace that no such
call of a save, prune or export is missed.
"""

import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

# Everything that changes a file system and that the program calls for its checkpoints and exports;
# to open a file for reading is no change.
CHANGES = (
    "mkdir",
    "open",
    "write",
    "pwrite",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "ftruncate",
)
_PLACE = re.compile(r"/(checkpoints|export)(/|$)")


class OsCall(NamedTuple):
    """A call of a function of `os` on something in checkpoints/ or export/."""

    name: str
    path: str  # of a descriptor, the file behind it
    arguments: tuple[Any, ...]

    @property
    def phase(self) -> str:
        """Which work of the program the call belongs to: save, prune or export."""
        if "/.trash-" in "".join(self.path_and_target()):
            return "prune"
        return "export" if "/export" in self.path else "save"

    def needs_space(self) -> bool:
        """Whether a full disk refuses the call."""
        creates = self.name == "open" and bool(self.arguments[1] & os.O_CREAT)
        return creates or self.name in ("mkdir", "write", "pwrite")

    def path_and_target(self) -> tuple[str, ...]:
        """The path, and of a rename the new path."""
        return (
            (self.path, os.fspath(self.arguments[1]))
            if self.name in ("rename", "replace")
            else (self.path,)
        )


def intercept(before: Callable[[OsCall], None]) -> Callable[[], None]:
    """Call `before` ahead of each change in checkpoints/ and export/; return a function that undoes
    this.

    `before` may raise OSError in place of the call. Its own calls of `os` are not reported.
    """
    originals = {name: getattr(os, name) for name in CHANGES}
    inside = threading.local()

    def call(name: str, *args: Any, **options: Any) -> Any:
        if not getattr(inside, "now", False):
            inside.now = True
            try:
                reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if not reads and (path := _path(args[0], options.get("dir_fd"))) is not None:
                    before(OsCall(name, path, args))
            finally:
                inside.now = False
        return originals[name](*args, **options)

    for name in CHANGES:
        setattr(os, name, functools.partial(call, name))

    def undo() -> None:
        for name, function in originals.items():
            setattr(os, name, function)

    return undo


def _path(first: Any, directory: int | None) -> str | None:
    """Return the path of a call by its first argument and `dir_fd`; None outside of checkpoints/
    and export/."""
    descriptor = first if isinstance(first, int) else directory
    path = os.fspath(first) if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")
    if descriptor is not None and not isinstance(first, int):
        path = os.path.join(path, os.fspath(first))
    return str(path) if _PLACE.search(str(path)) else None
