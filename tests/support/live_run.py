"""A run that saves and rotates while a program reads it, at a chosen call of the reader and not by
the clock."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What a reader of a folder calls of `os`.
READS = ("open", "stat", "lstat", "listdir", "scandir")


class LiveRun:
    """An experiment directory with a copy of the first of some checkpoints; `rotate` replaces it by
    that of the next.

    Two of the same name stand for a run that goes back to an older checkpoint and saves an
    iteration once more.

    permanent: a checkpoint that stays.
    """

    def __init__(
        self, root: Path, checkpoints: Sequence[Path], permanent: Path | None = None
    ) -> None:
        self.root = root
        self.folder = root / "checkpoints"
        self._left = list(checkpoints)
        self.folder.mkdir(parents=True)
        self._stays = (
            shutil.copytree(permanent, self.folder / permanent.name).name if permanent else None
        )
        (root / "metrics.jsonl").touch()
        self.rotations = -1
        self.rotate()

    def rotate(self) -> None:
        """Publish the next checkpoint, then delete the others as `retention.prune` does; nothing if
        none is left."""
        if not self._left:
            return
        source, self.rotations = self._left.pop(0), self.rotations + 1
        before = [
            path
            for path in self.folder.iterdir()
            if path.name.isdecimal() and path.name != self._stays
        ]
        ready = self.folder / f".tmp-{source.name}-0123456789abcdef"
        shutil.copytree(source, ready)
        os.utime(ready)  # as new as a folder that a run has written
        target = self.folder / source.name
        for path in before:
            if path == target:
                path.rename(self._trash(path))
        ready.rename(target)
        for path in before:
            if path != target:
                path.rename(self._trash(path))
            shutil.rmtree(self._trash(path))

    def _trash(self, path: Path) -> Path:
        return path.with_name(f".trash-{path.name}-0123456789abcdef")

    @contextmanager
    def rotating(self, at: Callable[[int], bool]) -> Iterator[list[str]]:
        """Rotate before each call on something in the folder for whose number `at` holds; yield the
        calls so far."""
        originals = {name: getattr(os, name) for name in READS}
        calls: list[str] = []
        inside = False

        def call(name: str, *args: Any, **options: Any) -> Any:
            nonlocal inside
            path = args[0] if args and not isinstance(args[0], int) else ""
            if not inside and os.fspath(path).startswith(str(self.folder)):
                calls.append(f"{name} {path}")
                if at(len(calls)):
                    inside = True
                    try:
                        self.rotate()
                    finally:
                        inside = False
            return originals[name](*args, **options)

        for name in READS:
            setattr(os, name, lambda *args, _name=name, **options: call(_name, *args, **options))
        try:
            yield calls
        finally:
            for name, function in originals.items():
                setattr(os, name, function)
