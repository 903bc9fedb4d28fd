"""--mirror: a copy of a run's checkpoints, exports and records in remote storage, made by a thread of rank 0.

The layout is that of the experiment directory. A folder there counts once its mark is there, which is written last:
manifest.json of a checkpoint, mirror.json of a Hugging Face export. A folder of another save loses its mark first. Each
pass of the thread compares and completes, also what an earlier start has left.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Collection
from pathlib import Path

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.files import logger
from megatron_lite.checkpoint.names import MANIFEST_NAME, OUR_FILE, find_checkpoints, new_nonce, parse_json, work_path
from megatron_lite.checkpoint.resume import SET_ASIDE
from megatron_lite.checkpoint.retention import best_of, checkpoints_to_delete, is_permanent, was_permanent
from megatron_lite.checkpoint.writing import good_manifest, pause_s
from megatron_lite.config.source import CheckpointConfig
from megatron_lite.config.structured_values import keep_rules
from megatron_lite.errors import CheckpointError, DamagedError, StorageError
from megatron_lite.run.durable_files import replace_file, sync_files
from megatron_lite.run.remote_storage import RemoteFolder, failure
from megatron_lite.run.stop_signal import StopSignal

MARK_NAME = "mirror.json"
Rotation = tuple[int, int, int | None, Collection[int]]  # see `checkpoints_to_delete`
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl", "wandb.json")  # a run elsewhere continues them
PATIENCE_S, STOPPED_PATIENCE_S = 60.0, 10.0  # at the end of a run, with a store that fails
_POLL_S = 0.05


class Mirror:
    """The mirror of the experiment directory `root`. Call `restore`, then `update` whenever there is something new.

    Raises:
        UsageError: see `open_storage`.
    """

    def __init__(self, root: Path, options: CheckpointConfig) -> None:
        assert options.mirror is not None
        self._root, self._options, self._flag = root, options, f"--mirror={options.mirror}"
        self._checkpoints, self._remote = root / "checkpoints", RemoteFolder(options.mirror, "mirror")
        self._sent = set[tuple[Path, int, int]]()  # what is there, see `_identity`
        self._current = root  # under upload; root: nothing
        self._rotation: Rotation | None = None
        self._rotated: Rotation | None = None  # the last one that was carried out
        self._wake, self._asked, self._done, self._ended = threading.Event(), 0, 0, False
        self._failed_s: float | None = None  # since when every attempt fails
        threading.Thread(target=self._work, daemon=True, name="mirror").start()

    # -- at the start ----------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the newest whole checkpoint and the records into a directory without a checkpoint.

        Raises:
            CheckpointError: if all checkpoints there are damaged.
            StorageError: if the mirror cannot be read, or an empty one written: no run may begin beside its mirror.
        """
        try:
            damaged = [] if find_checkpoints(self._checkpoints) else self._restore()
        except Exception as error:
            fix = "a start without checkpoints needs its mirror: make it reachable, or leave the flag out"
            raise StorageError(f"{self._flag}: {failure(error)}; {fix}") from None
        if damaged:
            raise CheckpointError(f"{self._flag}: no usable checkpoint is there: {'; '.join(damaged)}")

    def _restore(self) -> list[str]:
        """Restore, or return the damaged checkpoints if there is nothing else."""
        damaged, wanted = list[str](), self._options.resume_iteration
        for iteration in self._iterations():
            name = f"checkpoints/{iteration}"
            if (content := self._remote.read(f"{name}/{MANIFEST_NAME}")) is None:
                logger.warning("%s: %s is not complete; skipped", self._flag, name)
            elif wanted is None or iteration <= wanted or _config(content).get("resume_iteration") == wanted:
                try:
                    self._fetch(name, content)
                    for best in best_of(self._root / name) - {iteration}:
                        older = f"checkpoints/{best}"
                        with contextlib.suppress(DamagedError):  # the run goes on without, and says so
                            self._fetch(older, self._remote.read(f"{older}/{MANIFEST_NAME}") or b"")
                    return []
                except DamagedError as error:
                    damaged.append(f"{name}: {error}")
                    logger.warning("%s: %s; skipped, looking for an older one", self._flag, damaged[-1])
        if not damaged:
            self._remote.write(MARK_NAME, b"{}\n")  # refused now rather than at the first save
            logger.info("%s holds no checkpoint", self._flag)
        return damaged

    def _fetch(self, name: str, content: bytes) -> None:
        """Download a checkpoint, verify every byte and publish it; also the records. Raises: DamagedError."""
        start_s, folder = time.perf_counter(), self._root / name
        temporary = work_path(folder, "tmp", new_nonce())
        temporary.mkdir(parents=True)
        try:
            (temporary / MANIFEST_NAME).write_bytes(content)
            for file_name, file in manifest.read(temporary).files.items():
                with contextlib.suppress(FileNotFoundError):  # which `check_blocks` reports
                    self._remote.storage.get_file(self._remote.at(f"{name}/{file_name}"), str(temporary / file_name))
                files.check_blocks(temporary, file_name, file)
            for record in RECORDS:
                if not (self._root / record).exists() and (data := self._remote.read(record)) is not None:
                    replace_file(self._root / record, data)
            sync_files(temporary)
            files.publish(temporary, folder, lambda folder: False)
            self._sent.add(_identity(folder))
        finally:
            files.remove_folder(temporary)
        logger.info("restored %s from %s (%.1f s)", name, self._flag, time.perf_counter() - start_s)

    # -- while the run trains --------------------------------------------------------------------------------------

    def update(self, rotation: Rotation | None = None) -> None:
        """Let the thread copy what is new, then rotate the checkpoints there like those here; return at once."""
        self._rotation = rotation or self._rotation
        self._asked += 1
        self._wake.set()

    def held(self) -> set[int]:
        """Return the iteration under upload, which must stay: a slow store would never get a whole checkpoint."""
        current = self._current
        return {int(current.name)} if current.parent == self._checkpoints else set()

    def close(self, limit_s: float, stop: StopSignal | None) -> None:
        """Wait until all is there: up to a limit, or until the store has failed for a minute or a signal arrives.

        stop: None after a signal; then wait as long, but hardly for a store that fails.
        """
        self.update()
        asked, start_s, patience_s = self._asked, time.monotonic(), PATIENCE_S if stop else STOPPED_PATIENCE_S
        if unsent := self._names():
            logger.info("waiting up to %.0f s for %s: %s", limit_s, self._flag, unsent)
        while (
            self._done < asked and (waited_s := time.monotonic() - start_s) < limit_s and not (stop and stop.received)
        ):
            if self._failed_s is not None and min(waited_s, time.monotonic() - self._failed_s) > patience_s:
                break
            time.sleep(_POLL_S)
        self._ended = True
        if self._done < asked:
            what = self._names() or "the newest records"
            logger.warning("%s lacks %s; the next start with the same command continues", self._flag, what)

    def _work(self) -> None:
        attempt, pause = 0, None
        while not self._ended:
            self._wake.wait(pause)
            self._wake.clear()
            asked = self._asked
            try:
                self._copy()
                if attempt:
                    logger.info("%s works again", self._flag)
                attempt, pause, self._failed_s, self._done = 0, None, None, asked
            except Exception as error:
                attempt, pause = attempt + 1, pause_s(attempt + 1)
                self._failed_s = self._failed_s or time.monotonic()
                if attempt == 1:
                    text = "%s: %s; training goes on, the next attempt is in %.0f s, others follow after longer pauses"
                    logger.warning(text, self._flag, failure(error), pause)

    def _copy(self) -> None:
        """Copy until nothing is left, a folder whose upload has begun first; rotate what is there."""
        self._send_records()
        while unsent := self._unsent():
            self._current = folder = self._current if self._current in unsent else unsent[0]
            try:
                self._send(folder)
            except OSError:
                if folder.is_dir():
                    raise  # otherwise it was rotated away meanwhile
            self._current = self._root
            self._rotate()
            self._send_records()
        if self._rotation != self._rotated:  # told after the upload
            self._rotate()

    def _unsent(self) -> list[Path]:
        """List the folders that may not be there: first the newest checkpoint, then exports, then other checkpoints."""
        best, found = self._root / "export" / "best", list[Path]()
        own, *others = ([path for _, path in find_checkpoints(one)] for one in (self._checkpoints, best.parent, best))
        exports = [*others[0], *others[1], *([best] if (best / "config.json").exists() else [])]
        for folder in (*own[:1], *exports, *own[1:]):
            with contextlib.suppress(FileNotFoundError):
                if not folder.name.startswith(".") and _identity(folder) not in self._sent:
                    found += [folder] if folder in exports or good_manifest(folder) else []
        return found

    def _names(self) -> str:
        return ", ".join(str(folder.relative_to(self._root)) for folder in self._unsent())

    def _send(self, folder: Path) -> None:
        start_s, identity, target = time.perf_counter(), _identity(folder), str(folder.relative_to(self._root))
        found = {path.name: path.stat() for path in sorted(folder.iterdir()) if OUR_FILE.fullmatch(path.name)}
        if found.pop(MANIFEST_NAME, None):
            mark, content = f"{target}/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes()
        else:  # sizes and times tell an export from a later one of the same iteration
            sizes = {name: [one.st_size, one.st_mtime_ns] for name, one in found.items()}
            mark, content = f"{target}/{MARK_NAME}", json.dumps(sizes).encode()
        if (there := self._remote.read(mark)) != content:
            if there is not None:
                self._remote.delete(target, mark)
            told = self._remote.listing(target)
            sent = [self._remote.upload(folder / name, f"{target}/{name}", told.get(name, {})) for name in found]
            if _identity(folder) != identity:
                return  # another save has replaced it meanwhile
            self._remote.write(mark, content)
            seconds = time.perf_counter() - start_s
            logger.info("mirrored %s to %s (%.1f MB sent, %.1f s)", target, self._flag, sum(sent) / 1e6, seconds)
        self._sent.add(identity)

    def _send_records(self) -> None:
        for path in (self._root / name for name in RECORDS):
            if path.exists() and (identity := _identity(path)) not in self._sent:
                data = path.read_bytes()
                self._remote.write(path.name, data[: data.rfind(b"\n") + 1])  # a line may be half-written
                self._sent.add(identity)

    def _iterations(self) -> list[int]:
        """List the iterations of checkpoints there, whole or not, newest first."""
        return sorted((int(name) for name in self._remote.listing("checkpoints") if name.isdecimal()), reverse=True)

    def _rotate(self) -> None:
        """Delete there what is rotated here, also checkpoints that were never here, and what was set aside here."""
        rotation = self._rotation
        here, there = {iteration for iteration, _ in find_checkpoints(self._checkpoints)}, self._iterations()
        away = [one for one in there if one not in here and any(self._checkpoints.glob(f"{SET_ASIDE}/*/{one}"))]
        if rotation is not None:
            saved, rules = dict.fromkeys(there, True), keep_rules(self._options.keep_checkpoints)
            for one in (one for one in there if one not in here and not is_permanent(one, rules)):
                content = self._remote.read(f"checkpoints/{one}/{MANIFEST_NAME}")
                saved[one] = was_permanent(one, _config(content))
            away += checkpoints_to_delete(saved, *rotation)
        for one in away:
            self._remote.delete(f"checkpoints/{one}", f"checkpoints/{one}/{MANIFEST_NAME}")
        self._rotated = rotation


def _identity(path: Path) -> tuple[Path, int, int]:
    """Return what changes when a file grows, or another file or folder gets its name."""
    found = path.stat()
    return path, found.st_ino, found.st_mtime_ns


def _config(content: bytes | None) -> dict[str, object]:
    """Return the configuration in a manifest; {} if there is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return dict(parse_json(content or b"")["config"])
    return {}
