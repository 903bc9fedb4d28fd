"""What a disk may hold after a power cut: images made from a log of writes, syncs and renames.

A file's bytes are certain once the file was synced; a folder's entries (files made, renamed or
deleted in it) once the folder was. Until then any part of them may have reached the disk, in any
order. Journals of common file systems keep more order than this, so what survives here survives
there.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.os_calls import OsCall, intercept


@dataclass
class Inode:
    """A file, or a folder with entries."""

    number: int
    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""  # the content at the last sync of the file
    entries: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A change of entries of one folder (a rename: of two names in it)."""

    folder: int
    name: str
    inode: int | None  # None: the name goes away
    old_name: str | None = None  # of a rename


@dataclass(frozen=True)
class Event:
    """A call of the program, or with `mark` a remark of the test: what it was promised by then."""

    name: str
    path: str = ""
    data: bytes = b""
    offset: int | None = None
    target: str = ""
    mark: int | None = None


class Log:
    """The events of a program between `with` and its end, in order, relative to the folder
    `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events = [Event("mkdir", "")]
        self._lock = threading.Lock()

    def __enter__(self) -> Log:
        self._undo = intercept(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()

    def promise(self, iteration: int) -> None:
        """From here on, a checkpoint at least as new as this one must survive."""
        self.events.append(Event("promise", mark=iteration))

    def _see(self, call: OsCall) -> None:
        path = os.path.relpath(call.path, self.root)
        data = b""
        offset = None
        target = ""
        if call.name in ("write", "pwrite"):
            data = bytes(call.arguments[1])
            offset = call.arguments[2] if call.name == "pwrite" else None
        elif call.name in ("rename", "replace"):
            target = os.path.relpath(os.fspath(call.arguments[1]), self.root)
        with self._lock:
            self.events.append(Event(call.name, "" if path == "." else path, data, offset, target))


class Disk:
    """The state after some events: what programs see, and which changes have not reached the disk
    for certain."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.inodes = [Inode(0, True)]
        self.certain: dict[int, dict[str, int]] = {0: {}}  # entries of synced folders
        self.pending: list[Change] = []
        self.promised: int | None = None
        for event in events:
            self._follow(event)

    def _find(self, path: str) -> Inode:
        inode = self.inodes[0]
        for part in path.split("/") if path else ():
            inode = self.inodes[inode.entries[part]]
        return inode

    def _follow(self, event: Event) -> None:
        parent, _, name = event.path.rpartition("/")
        if event.name == "promise":
            self.promised = event.mark
        elif event.name in ("mkdir", "open"):
            if event.path and name not in self._find(parent).entries:
                inode = Inode(len(self.inodes), event.name == "mkdir")
                self.inodes.append(inode)
                self._change(Change(self._find(parent).number, name, inode.number))
        elif event.name in ("write", "pwrite"):
            data = self._find(event.path).data
            offset = len(data) if event.offset is None else event.offset
            data[offset : offset + len(event.data)] = event.data
        elif event.name == "fsync":
            inode = self._find(event.path)
            inode.synced = bytes(inode.data)
            if inode.is_folder:
                self.certain[inode.number] = dict(inode.entries)
                self.pending = [change for change in self.pending if change.folder != inode.number]
        elif event.name in ("rename", "replace"):
            new_parent, _, new_name = event.target.rpartition("/")
            assert new_parent == parent, "renames stay in their folder"
            folder = self._find(parent)
            self._change(Change(folder.number, new_name, folder.entries[name], name))
        else:
            assert event.name in ("unlink", "rmdir"), event
            self._change(Change(self._find(parent).number, name, None))

    def _change(self, change: Change) -> None:
        _apply(change, self.inodes[change.folder].entries)
        self.pending.append(change)

    def images(self, chance: random.Random, most: int) -> Iterator[Image]:
        """Yield states that the disk may be in: with none, all, all but one, and random ones of the
        pending changes."""
        count = len(self.pending)
        choices = [[True] * count, [False] * count]
        choices += [[index < cut for index in range(count)] for cut in range(1, count)]
        choices += [[index != out for index in range(count)] for out in range(count)]
        if len(choices) > most:
            choices = choices[:2] + chance.sample(choices[2:], most - 2)
        choices += [
            [chance.random() < 0.5 for _ in range(count)]
            for _ in range(max(0, most - len(choices)))
        ]
        for index, choice in enumerate(choices):
            kept = [change for change, stays in zip(self.pending, choice, strict=True) if stays]
            yield Image(self, kept, CONTENTS[index % len(CONTENTS)], chance)


class Image:
    """One possible content of the disk."""

    def __init__(
        self, disk: Disk, kept: Sequence[Change], content: str, chance: random.Random
    ) -> None:
        self.disk = disk
        self.content = content
        self.chance = chance
        self.entries = {inode: dict(names) for inode, names in disk.certain.items()}
        for change in kept:
            _apply(change, self.entries.setdefault(change.folder, {}))

    def write(self, folder: Path, inode: int = 0) -> None:
        """Write the image below a new folder."""
        folder.mkdir()
        for name, number in self.entries.get(inode, {}).items():
            entry = self.disk.inodes[number]
            if entry.is_folder:
                self.write(folder / name, number)
            else:
                (folder / name).write_bytes(self._bytes(entry))

    def _bytes(self, file: Inode) -> bytes:
        """Return what a file may hold: all that was written, what was synced, half of the rest, or
        zeros for it."""
        data = bytes(file.data)
        if data == file.synced or self.content == "all":
            return data
        if self.content == "synced":
            return file.synced
        if self.content == "half":
            return data[: self.chance.randint(len(file.synced), len(data))]
        return file.synced + bytes(len(data) - len(file.synced))


CONTENTS = ("all", "synced", "half", "zeros")


def _apply(change: Change, entries: dict[str, int]) -> None:
    """Make a change, if an earlier one that was lost does not prevent it."""
    if change.old_name is not None:
        if change.old_name in entries and entries[change.old_name] == change.inode:
            entries[change.name] = entries.pop(change.old_name)
    elif change.inode is not None:
        entries[change.name] = change.inode
    else:
        entries.pop(change.name, None)


def without(events: Sequence[Event], is_left_out: Callable[[Event], bool]) -> list[Event]:
    """Return the events of a program that forgets some of them."""
    return [event for event in events if not is_left_out(event)]
