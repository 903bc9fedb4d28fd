"""Mirror a run's checkpoints, exports and records to remote storage, in a thread of rank 0
(--mirror).

The layout is the experiment directory's. A remote folder counts once its mark exists, which is
written last: manifest.json for a checkpoint, mirror.json for a Hugging Face export. A folder from
another save loses its mark first. Each pass of the thread compares and completes, including remains
of an earlier start.

A mirror belongs to one run, and one start at a time writes to it: its own mirror.json names both.
Stores without conditional writes let two starts write it at once, so a start reads it back after a
pause, and again before each pass.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import check_blocks
from megatron_lite.checkpoint.files import logger
from megatron_lite.checkpoint.history import history_of, shared_iterations
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.names import (
    MANIFEST_NAME,
    OUR_FILE,
    find_checkpoints,
    new_nonce,
    parse_json,
    work_path,
)
from megatron_lite.checkpoint.resume import SET_ASIDE, set_aside
from megatron_lite.checkpoint.retention import (
    best_of,
    checkpoints_to_delete,
    is_permanent,
    was_permanent,
)
from megatron_lite.checkpoint.writing import good_manifest
from megatron_lite.config.source import CheckpointConfig
from megatron_lite.config.structured_values import keep_rules
from megatron_lite.errors import CheckpointError, DamagedError, RunError, StorageError, UsageError
from megatron_lite.run.durable_files import pause_s, replace_file, sync_files
from megatron_lite.run.remote_storage import RemoteFolder, failure
from megatron_lite.run.stop_signal import StopSignal

MARK_NAME = "mirror.json"  # of an export; in the mirror's own folder, its owner
PROBE_NAME = "write_test"
Rotation = tuple[int, int, int | None, Collection[int]]  # see `checkpoints_to_delete`
# a run elsewhere resumes with them
RECORDS = ("config.json", "metrics.jsonl", "samples.jsonl", "wandb.json")
PATIENCE_S, STOPPED_PATIENCE_S = 60.0, 10.0  # at the end of a run, with a store that fails
LEAST_BYTES_S = 100_000  # a stopped run does not wait for a store that is slower
CLAIM_S = 2.0  # until a start that has claimed the mirror reads whether another one has, too
_POLL_S = 0.05


class Mirror:
    """The mirror of the experiment directory `root`.

    Call `compare` and `fetch` to find and restore its content, `begin` once the run is known, then
    `update` whenever there is something new.

    on_loss: called once, from the thread, when another run or start has claimed the mirror.

    Attributes:
        usable: remote iterations that this start may use, with the manifests read to determine
            this.

    Raises:
        UsageError: if the mirror overlaps the directory; also see `open_storage`.
    """

    def __init__(
        self,
        root: Path,
        options: CheckpointConfig,
        on_loss: Callable[[RunError], None] = lambda error: None,
        startup_timeout_s: float = math.inf,
    ) -> None:
        assert options.mirror is not None
        self._root = root
        self._options = options
        self._flag = f"--mirror={options.mirror}"
        logger.info("asking %s what it holds", self._flag)
        limit_s = min(options.mirror_timeout, startup_timeout_s)
        self._checkpoints = root / "checkpoints"
        self._remote = RemoteFolder(options.mirror, "mirror", limit_s, False)
        if self._remote.overlaps(root):
            raise UsageError(
                f"{self._flag}: it is, contains or lies in --experiment_dir={root}; choose another folder"
            )
        self.usable: dict[int, Manifest | None] = {}
        self._manifests: dict[int, Manifest] = {}  # of remote checkpoints
        self._claim = {"run": "", "start": new_nonce(), "host": socket.gethostname()}
        self._expected: dict[str, Any] | None = (
            None  # the remote claim, unless another start has written its own
        )
        self._on_loss = on_loss
        self._lost: StorageError | None = None  # once another run or start has claimed the mirror
        self._sent = set[tuple[Path, int, int]]()  # already uploaded, see `_identity`
        self._permanent: dict[int, bool] = {}  # see `_rotate`
        self._current = root  # being uploaded; root: nothing
        self._rotation: Rotation | None = None
        self._rotated: Rotation | None = None  # the last one carried out
        self._wake = threading.Event()
        self._asked = 0
        self._done = 0
        self._ended = False
        self._failed_s: float | None = None  # since when every attempt fails
        threading.Thread(target=self._work, daemon=True, name="mirror").start()

    # -- at the start
    # ----------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Find the remote checkpoints that this start may use.

        Where the options of iterations differ between local and remote, --mirror_ahead decides
        which side continues, and the other side's checkpoints are set aside.

        Raises:
            StorageError: if the mirror cannot be read, or an empty one written: no run may begin
                without its mirror. Or if it belongs to another run.
            CheckpointError: if only --mirror_ahead could decide which side continues.
        """
        with self._needed():
            claim, iterations = self._read_claim(), self._iterations()
            self._expected = claim
            found = [iteration for iteration, _ in find_checkpoints(self._checkpoints)]
            newest = there = _first(iterations, self._read_manifest)
            newest_here = here = _first(found, self._own_manifest)
            wanted = self._options.resume_iteration
            # Once a side has followed it, the newest ones show whether the other side is on the
            # abandoned branch.
            if wanted is not None and wanted not in map(_followed, (here, there)):
                here, there = (
                    _first([one for one in side if one == wanted], read)
                    for side, read in (
                        (found, self._own_manifest),
                        (iterations, self._read_manifest),
                    )
                )
            if newest is None:
                logger.info("%s holds no checkpoint", self._flag)
            if newest is None and claim is None:
                self._remote.write(PROBE_NAME, b"")  # refused now rather than at the first save
                self._remote.delete(PROBE_NAME, PROBE_NAME)
            if not self._options.adopt_mirror:
                self._refuse_another_run(newest_here, newest, claim)
            if here is not None and there is not None:
                self._choose_side(here, there)
            if newest is not None:
                there_now = (one for one in self._iterations() if one <= newest.iteration)
                self.usable = {one: self._manifests.get(one) for one in there_now}

    def _own_manifest(self, iteration: int) -> Manifest | None:
        return good_manifest(self._checkpoints / str(iteration))

    def _read_manifest(self, iteration: int) -> Manifest | None:
        """Return a remote checkpoint's manifest; None, with a warning, if it is incomplete."""
        name = f"checkpoints/{iteration}"
        if (content := self._remote.read(f"{name}/{MANIFEST_NAME}")) is None:
            logger.warning("%s: %s is not complete; skipped", self._flag, name)
            return None
        try:
            self._manifests[iteration] = manifest.parse(content)
        except (DamagedError, ValueError) as error:
            logger.warning("%s: %s: %s: %s; skipped", self._flag, name, MANIFEST_NAME, error)
        return self._manifests.get(iteration)

    def _refuse_another_run(
        self, here: Manifest | None, there: Manifest | None, claim: dict[str, Any] | None
    ) -> None:
        """Refuse another run's mirror. An older version's mirror names no run: compare the
        checkpoints."""
        if here is None:
            is_other = there is None and claim is not None
        else:
            theirs = claim["run"] if claim is not None else there and history_of(there).run
            is_other = theirs not in (None, history_of(here).run)
            if is_other and there is not None:
                own, copy = self._own_manifest(there.iteration), self._manifests.get(here.iteration)
                is_other = there.save_id != (own and own.save_id) and here.save_id != (
                    copy and copy.save_id
                )
        if is_other:
            raise StorageError(
                f"{self._flag}: it belongs to another run{_host(claim)}; give each run its own, or write "
                "--adopt_mirror=1 if that run is this one"
            )

    def _choose_side(self, here: Manifest, there: Manifest) -> None:
        shared, ahead = shared_iterations(here, there), self._options.mirror_ahead
        places = f"iteration {there.iteration} there, {here.iteration} here"
        if shared < min(here.iteration, there.iteration) and ahead is None:
            raise CheckpointError(
                f"{self._flag}: {places}, but after iteration {shared} the two were trained with different options; "
                "write --mirror_ahead=restore to continue from the mirror, or --mirror_ahead=set_aside to continue from "
                "here; the other checkpoints are set aside"
            )
        if shared < there.iteration and ahead == "set_aside":
            self.set_aside(shared)
        elif shared < here.iteration and shared < there.iteration:
            logger.warning(
                "%s: %s; moved those here to %s",
                self._flag,
                places,
                set_aside(self._checkpoints, shared),
            )
        elif shared < there.iteration:
            logger.warning("%s is ahead: %s; the run goes on from there", self._flag, places)

    def fetch(self, iteration: int) -> bool | None:
        """Restore a checkpoint, the best one that it names, and the records.

        Returns:
            Whether it is complete there; None if this start may use no such checkpoint.

        Raises:
            StorageError: if the mirror cannot be read.
        """
        if iteration not in self.usable:
            return None
        with self._needed():
            try:
                self._fetch(iteration)
                return True
            except DamagedError as error:
                logger.warning("%s: checkpoints/%d: %s", self._flag, iteration, error)
                return False

    def _fetch(self, iteration: int) -> None:
        """Download a checkpoint, verify every byte and publish it. Raises: DamagedError."""
        start_s, name = time.perf_counter(), f"checkpoints/{iteration}"
        folder = self._root / name
        temporary = work_path(folder, "tmp", new_nonce())
        temporary.mkdir(parents=True)
        try:
            (temporary / MANIFEST_NAME).write_bytes(
                self._remote.read(f"{name}/{MANIFEST_NAME}") or b""
            )
            for file_name, file in manifest.read(temporary).files.items():
                with contextlib.suppress(FileNotFoundError):  # reported by `check_blocks`
                    self._remote.download(f"{name}/{file_name}", temporary / file_name)
                check_blocks(temporary, file_name, file)
            self._restore_records()
            sync_files(temporary)
            files.publish(temporary, folder, lambda folder: False)
            self._sent.add(_identity(folder))
        finally:
            files.remove_folder(temporary)
        logger.info("restored %s from %s (%.1f s)", name, self._flag, time.perf_counter() - start_s)
        for best in best_of(folder):
            if not (self._checkpoints / str(best)).exists():
                self.fetch(best)  # the run continues without it, and logs that

    def _restore_records(self) -> None:
        """Restore the records; append remote lines to local ones, because an iteration's last line
        wins."""
        for name in RECORDS:
            path, there = self._root / name, self._remote.read(name)
            here = path.read_bytes() if path.exists() else b""
            if there is None or (here and not name.endswith(".jsonl")) or here.startswith(there):
                continue
            replace_file(
                path, there if there.startswith(here) else here[: here.rfind(b"\n") + 1] + there
            )

    def set_aside(self, after: int) -> None:
        """Move remote checkpoints after an iteration to a new remote folder, with a copy of the
        records.

        Raises:
            StorageError: if the mirror cannot be changed.
        """
        with self._needed():
            if not (newer := [iteration for iteration in self._iterations() if iteration > after]):
                return
            parent = f"checkpoints/{SET_ASIDE}"
            numbers = [int(name) for name in self._remote.listing(parent) if name.isdecimal()]
            target = f"{parent}/{max(numbers, default=0) + 1}"
            for name in RECORDS:
                self._remote.copy(name, f"{target}/{name}")
            for iteration in newer:
                self._remote.move(
                    f"checkpoints/{iteration}", f"{target}/{iteration}", MANIFEST_NAME
                )
        logger.warning("%s: newer checkpoints there were moved to %s", self._flag, target)

    @contextlib.contextmanager
    def _needed(self) -> Iterator[None]:
        """Convert a store's error to one that aborts the start, which must not continue without its
        mirror."""
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            fix = "a start compares its directory with the mirror: make it reachable, or leave the flag out"
            raise StorageError(f"{self._flag}: {failure(error)}; {fix}") from None

    # -- one run, one start
    # ----------------------------------------------------------------------------------------

    def begin(self, run: str) -> None:
        """Copy for this run from now on; see `History`."""
        self._claim["run"] = run

    def _read_claim(self) -> dict[str, Any] | None:
        """Return the mirror's owner; None without one, or without an id, as in an older version."""
        with contextlib.suppress(ValueError):
            claim = parse_json(self._remote.read(MARK_NAME) or b"{}")
            return claim if isinstance(claim, dict) and "run" in claim else None
        return None

    def _check_claim(self) -> None:
        """Claim the mirror at the first call, and check at each one whether the claim still holds.

        Raises:
            StorageError: if another run or start has claimed it since this start looked.
        """
        if (there := self._read_claim()) == self._claim:
            return
        if there not in (None, self._expected):
            who = (
                "another start of this run" if there["run"] == self._claim["run"] else "another run"
            )
            raise StorageError(
                f"{self._flag}: {who} uses it{_host(there)}; this run ends and copies nothing more to it. Give each "
                "run its own mirror"
            )
        self._remote.write(MARK_NAME, json.dumps(self._claim).encode())
        self._expected = self._claim
        time.sleep(CLAIM_S)
        self._check_claim()

    # -- while the run trains
    # --------------------------------------------------------------------------------------

    def update(self, rotation: Rotation | None = None) -> None:
        """Let the thread copy new folders, then rotate remote checkpoints like local ones; return
        at once."""
        self._rotation = rotation or self._rotation
        self._asked += 1
        self._wake.set()

    def held(self) -> set[int]:
        """Return the iteration being uploaded, which must be kept: a slow store would never get a
        whole checkpoint."""
        current = self._current
        return {int(current.name)} if current.parent == self._checkpoints else set()

    def close(self, limit_s: float, stop: StopSignal | None) -> None:
        """Wait until everything is copied, up to a limit, or until the store has failed for a
        minute or a signal arrives.

        stop: None after a signal; then wait as long, but hardly for a store that fails, is silent
        or slow.

        Raises:
            StorageError: if another run or start has claimed the mirror.
        """
        self.update()
        asked = self._asked
        start_s = time.monotonic()
        patience_s = PATIENCE_S if stop else STOPPED_PATIENCE_S
        line = self._remote.line
        begin_bytes = line.moved_bytes()
        if unsent := self._names():
            logger.info("waiting up to %.0f s for %s: %s", limit_s, self._flag, unsent)
        while (
            self._done < asked
            and self._lost is None
            and (waited_s := time.monotonic() - start_s) < limit_s
            and not (stop and stop.received)
        ):
            failed_s = self._failed_s
            failing_s = line.silent_s if failed_s is None else time.monotonic() - failed_s
            is_slow = not stop and line.moved_bytes() - begin_bytes < LEAST_BYTES_S * waited_s
            if waited_s > patience_s and (failing_s > patience_s or is_slow):
                break
            time.sleep(_POLL_S)
        self._ended = True
        line.close()
        if self._lost is not None:
            raise self._lost
        if self._done < asked:
            what = self._names() or "the newest records"
            logger.warning(
                "%s lacks %s; the next start with the same command continues", self._flag, what
            )

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
                attempt = 0
                pause = None
                self._failed_s = None
                self._done = asked
            except StorageError as error:
                self._lost = error
                return self._on_loss(error)
            except Exception as error:
                if self._ended:
                    return
                attempt, pause = attempt + 1, pause_s(attempt + 1)
                self._failed_s = self._failed_s or time.monotonic() - self._remote.line.silent_s
                if attempt == 1:
                    text = "%s: %s; training goes on, the next attempt is in %.0f s, others follow after longer pauses"
                    logger.warning(text, self._flag, failure(error), pause)

    def _copy(self) -> None:
        """Copy until nothing is left, starting with a partially uploaded folder; then rotate the
        mirror.

        Before the first save the run has no id that another start could know, so nothing is copied.
        """
        if not find_checkpoints(self._checkpoints):
            return
        self._check_claim()
        self._send_records()
        while unsent := self._unsent():
            self._current = folder = self._current if self._current in unsent else unsent[0]
            try:
                self._send(folder)
            except OSError:
                if folder.is_dir():
                    raise  # otherwise it was rotated away meanwhile
            self._current = self._root
            self._check_claim()
            self._rotate()
            self._send_records()
        if self._rotation != self._rotated:  # requested after the upload
            self._rotate()

    def _unsent(self) -> list[Path]:
        """List the folders that may be missing remotely: first the newest checkpoint, then exports,
        then other checkpoints."""
        root, found = self._root / "export", list[Path]()
        best = root / "best"
        own, *others = (
            [path for _, path in find_checkpoints(one)]
            for one in (self._checkpoints, root, best, root / "merged")
        )
        # config.json of a model, adapter_config.json of adapters
        bests = [one for one in (best, root / "merged" / "best") if [*one.glob("*config.json")]]
        exports = [*itertools.chain(*others), *bests]
        for folder in (*own[:1], *exports, *own[1:]):
            with contextlib.suppress(FileNotFoundError):
                if not folder.name.startswith(".") and _identity(folder) not in self._sent:
                    found += [folder] if folder in exports or good_manifest(folder) else []
        return found

    def _names(self) -> str:
        return ", ".join(str(folder.relative_to(self._root)) for folder in self._unsent())

    def _send(self, folder: Path) -> None:
        start_s = time.perf_counter()
        identity = _identity(folder)
        target = str(folder.relative_to(self._root))
        found = {
            path.name: path.stat()
            for path in sorted(folder.iterdir())
            if OUR_FILE.fullmatch(path.name)
        }
        if found.pop(MANIFEST_NAME, None):
            mark, content = f"{target}/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes()
            self._permanent.pop(int(folder.name), None)
        else:  # sizes and times distinguish an export from a later one of the same iteration
            sizes = {name: [one.st_size, one.st_mtime_ns] for name, one in found.items()}
            mark, content = f"{target}/{MARK_NAME}", json.dumps(sizes).encode()
        if (there := self._remote.read(mark)) != content:
            if there is not None:
                self._remote.delete(target, mark)
            told = self._remote.listing(target)
            sent = [
                self._remote.upload(folder / name, f"{target}/{name}", told.get(name, {}))
                for name in found
            ]
            if _identity(folder) != identity:
                return  # another save has replaced it meanwhile
            self._remote.write(mark, content)
            seconds = time.perf_counter() - start_s
            logger.info(
                "mirrored %s to %s (%.1f MB sent, %.1f s)",
                target,
                self._flag,
                sum(sent) / 1e6,
                seconds,
            )
        self._sent.add(identity)

    def _send_records(self) -> None:
        for path in (self._root / name for name in RECORDS):
            if path.exists() and (identity := _identity(path)) not in self._sent:
                data = path.read_bytes()
                # a line may be half-written
                self._remote.write(path.name, data[: data.rfind(b"\n") + 1])
                self._sent.add(identity)

    def _iterations(self) -> list[int]:
        """List the iterations of remote checkpoints, complete or not, newest first."""
        return sorted(
            (int(name) for name in self._remote.listing("checkpoints") if name.isdecimal()),
            reverse=True,
        )

    def _rotate(self) -> None:
        """Delete checkpoints remotely that were rotated locally, or never existed locally."""
        rotation = self._rotation
        if rotation is not None:
            here = {iteration for iteration, _ in find_checkpoints(self._checkpoints)}
            there = self._iterations()
            saved, rules = dict.fromkeys(there, True), keep_rules(self._options.keep_checkpoints)
            for one in (one for one in there if one not in here and not is_permanent(one, rules)):
                if one not in self._permanent:
                    content = self._remote.read(f"checkpoints/{one}/{MANIFEST_NAME}")
                    self._permanent[one] = was_permanent(one, _config(content))
                saved[one] = self._permanent[one]
            for one in checkpoints_to_delete(saved, *rotation):
                self._remote.delete(f"checkpoints/{one}", f"checkpoints/{one}/{MANIFEST_NAME}")
        self._rotated = rotation


def _identity(path: Path) -> tuple[Path, int, int]:
    """Return values that change when a file grows, or another file or folder takes its name."""
    found = path.stat()
    return path, found.st_ino, found.st_mtime_ns


def _first(iterations: Sequence[int], read: Callable[[int], Manifest | None]) -> Manifest | None:
    """Return the first complete checkpoint."""
    return next((content for content in map(read, iterations) if content is not None), None)


def _followed(content: Manifest | None) -> object:
    """Return the --resume_iteration of the start that saved a checkpoint."""
    return content and content.config.get("resume_iteration")


def _host(claim: dict[str, Any] | None) -> str:
    return f", started on {claim['host']}" if claim is not None and "host" in claim else ""


def _config(content: bytes | None) -> dict[str, object]:
    """Return the configuration in a manifest; {} without one."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return dict(parse_json(content or b"")["config"])
    return {}
