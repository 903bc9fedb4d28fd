"""A mirror knows its run and its history: which side goes on, what is refused, and that nothing is
lost.

A history is written as a word: one letter an iteration, by the options that the iteration had.
"""

import dataclasses
import json
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest, mirror, retention
from megatron_lite.checkpoint.history import History, history_of, shared_iterations
from megatron_lite.checkpoint.mirror import Mirror
from megatron_lite.checkpoint.names import new_nonce
from megatron_lite.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    LearningRateConfig,
    RunConfig,
)
from megatron_lite.errors import CheckpointError, RunError, StorageError, UsageError
from tests.checkpoint import test_writing
from tests.support.mirrors import RUN, finish, load_chosen, make, restore, save, wait_until
from tests.support.results import checkpoints, digests

OTHER_RUN = "2" * 16


def changes_of(word: str) -> tuple[tuple[int, str], ...]:
    """Return the changes of a history's options."""
    found, at = [], 0
    for letter, same in groupby(word):
        found.append((at, letter * 16))
        at += len(list(same))
    return tuple(found)


def save_word(root: Path, word: str, run: str = RUN, seed: int = 0) -> None:
    """Save the checkpoint of a history's end."""
    save(root / "checkpoints", len(word), seed, run=run, changes=changes_of(word))


def folder(root: Path, *words: str, run: str = RUN) -> Path:
    """Make a directory with the checkpoints of these histories' ends."""
    for word in words:
        save_word(root, word, run)
    (root / "metrics.jsonl").write_text(
        "".join(f'{{"iteration": {len(word)}, "of": "{word}"}}\n' for word in words)
    )
    return root


def newest_word(root: Path) -> str:
    """Return the history of the newest checkpoint of a directory."""
    return word_of(root / "checkpoints" / str(max(checkpoints(root))))


def word_of(checkpoint: Path) -> str:
    content = manifest.read(checkpoint)
    history = history_of(content)
    return "".join(str(history.options_after(at))[0] for at in range(content.iteration))


# -- what a history is
# -----------------------------------------------------------------------------------------------


def test_options_that_change_numbers_change_the_history() -> None:
    """The same options go on in the same history, whatever a start writes or logs; another learning
    rate does not."""
    history = History(RUN, ()).continued(0, Config())
    assert history.continued(5, Config(run=RunConfig(log_interval=7))) == history
    other = history.continued(5, Config(learning_rate=LearningRateConfig(lr=1.0)))
    assert [start for start, _ in other.changes] == [0, 5]
    assert [
        start for start, _ in other.continued(9, Config(batch=BatchConfig(batch_size=3))).changes
    ] == [0, 5, 9]


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("aaa", "aaaaa", 3),
        ("aab", "aabb", 3),
        ("aab", "aaab", 2),
        ("aab", "aaa", 2),
        ("b", "a", 0),
        ("aa", "aa", 2),
    ],
)
def test_two_checkpoints_share_the_iterations_with_the_same_options(
    one: str, other: str, shared: int, tmp_path: Path
) -> None:
    left, right = folder(tmp_path / "a", one), folder(tmp_path / "b", other)
    contents = [
        manifest.read(root / "checkpoints" / str(len(word)))
        for root, word in ((left, one), (right, other))
    ]
    assert shared_iterations(*contents) == shared_iterations(*reversed(contents)) == shared


# -- whose a mirror is
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [
        lambda root: str(root),
        lambda root: f"{root}/",
        lambda root: f"{root}/export/../",
        lambda root: str(root.parent),
        lambda root: f"{root}/mirror",
        lambda root: f"file://{root}",
        lambda root: os.path.relpath(root),
        lambda root: str(link(root.parent / "link", root)),
        lambda root: f"{link(root.parent / 'link', root)}/deep/er",
        lambda root: str(link(root / "out", root.parent)),
    ],
)
def test_a_mirror_and_its_directory_do_not_overlap(
    spelled: Callable[[Path], str], tmp_path: Path
) -> None:
    """However it is spelled; the mirror once renamed an empty copy over the metrics that the run
    was writing."""
    root = folder(tmp_path / "outer" / "run", "a")
    before = digests(root)
    with pytest.raises(
        UsageError, match="--mirror=.*: it is, contains or lies in --experiment_dir="
    ):
        make(root, spelled(root))
    assert digests(root) == before
    make(root, str(tmp_path / "outer.mirror"))


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_the_mirror_of_another_run_is_refused_and_untouched(
    kind: str, bucket: Any, tmp_path: Path
) -> None:
    """At the start, with checkpoints or without; by --adopt_mirror=1 it becomes this run's."""
    address = f"s3://{bucket.name}/m" if kind == "s3" else str(tmp_path / "m")
    first = folder(tmp_path / "a", "a", "aa")
    finish(made := make(first, address))
    made.close(1.0, None)
    before = store_content(address)
    second = folder(tmp_path / "b", "b", run=OTHER_RUN)
    with pytest.raises(
        StorageError, match="--mirror=.*: it belongs to another run, started on .*--adopt_mirror=1"
    ):
        restore(make(second, address, OTHER_RUN))
    late = make(second, address, OTHER_RUN)  # the store could not be reached at its start, say
    late.update()
    wait_until(lambda: late._lost is not None)
    with pytest.raises(
        StorageError, match="--mirror=.*: another run uses it, started on .*copies nothing more"
    ):
        late.close(60.0, None)
    assert store_content(address) == before
    adopted = make(second, address, OTHER_RUN, adopt_mirror=True, mirror_ahead="set_aside")
    adopted.compare()
    finish(adopted)
    after = store_content(address)
    assert {name.replace("set_aside/1/", "") for name in after if "set_aside" in name} >= {
        name for name in before if name.startswith("checkpoints/")
    }
    with pytest.raises(StorageError, match="it belongs to another run"):
        make(first, address).compare()


def test_a_claim_without_a_checkpoint_is_respected(tmp_path: Path) -> None:
    """Another run has begun its first upload: a run that starts from scratch must not share its
    mirror."""
    store = tmp_path / "m"
    store.mkdir()
    (store / "mirror.json").write_text(
        json.dumps({"run": OTHER_RUN, "start": "0" * 16, "host": "there"})
    )
    with pytest.raises(StorageError, match="it belongs to another run, started on there"):
        make(tmp_path / "a", str(store)).compare()
    make(tmp_path / "a", str(store), adopt_mirror=True).compare()


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_of_two_runs_that_claim_a_mirror_at_once_one_ends(
    kind: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no claim, both write theirs, one reads its own back; the other ends with code 8 and
    wrote nothing."""
    address = f"s3://{bucket.name}/m" if kind == "s3" else str(tmp_path / "m")
    monkeypatch.setattr(mirror, "CLAIM_S", 1.0)
    lost: dict[str, RunError] = {}
    runs = {run: folder(tmp_path / run, "a", "aa", run=run) for run in (RUN, OTHER_RUN)}
    made = {}
    for run, root in runs.items():
        options = CheckpointConfig(mirror=address)
        made[run] = Mirror(root, options, lambda error, run=run: lost.update({run: error}))  # type: ignore[misc]
        made[run].begin(run)
        made[run].compare()
    for one in made.values():
        one.update()
    wait_until(lambda: len(lost) == 1 and any(one._done for one in made.values()))
    (loser, error), (winner,) = next(iter(lost.items())), runs.keys() - lost.keys()
    assert (
        isinstance(error, StorageError)
        and error.exit_code == 8
        and "another run uses it" in str(error)
    )
    with pytest.raises(StorageError):
        made[loser].close(1.0, None)
    assert json.loads(store_content(address)["mirror.json"])["run"] == winner
    saves = [
        manifest.parse(data)
        for name, data in store_content(address).items()
        if name.endswith("manifest.json")
    ]
    assert {history_of(content).run for content in saves} == {winner}


def test_a_start_takes_the_mirror_over_and_the_one_before_it_ends(tmp_path: Path) -> None:
    """A machine that was thought dead wakes up: it finds the newer start before it writes again."""
    address, first = str(tmp_path / "m"), folder(tmp_path / "a", "a")
    finish(old := make(first, address))
    new = restore(make(tmp_path / "b", address))
    save_word(tmp_path / "b", "aa")
    finish(new)
    save_word(first, "ab")
    before = store_content(address)
    old.update()
    wait_until(lambda: old._lost is not None)
    with pytest.raises(StorageError, match="another start of this run uses it"):
        old.close(60.0, None)
    assert store_content(address) == before


def test_a_mirror_of_an_earlier_version_is_adopted_if_its_newest_save_is_here(
    tmp_path: Path,
) -> None:
    """Else the start is refused with the flag that adopts it."""
    address, root = str(tmp_path / "m"), tmp_path / "a"
    for iteration in (1, 2):
        test_writing.save(root / "checkpoints", iteration, iteration)
    store = tmp_path / "m" / "checkpoints"
    shutil.copytree(root / "checkpoints", store)
    (tmp_path / "m" / "mirror.json").write_text("{}\n")
    made = make(root, address)
    made.compare()
    finish(made)
    shutil.copytree(
        store.parent, tmp_path / "n", ignore=lambda _, names: {"mirror.json"} & set(names)
    )
    shutil.rmtree(root / "checkpoints")
    test_writing.save(root / "checkpoints", 2, 9)
    with pytest.raises(StorageError, match="--adopt_mirror=1"):
        make(root, str(tmp_path / "n")).compare()
    make(root, str(tmp_path / "n"), adopt_mirror=True).compare()


# -- which history goes on
# ---------------------------------------------------------------------------------------------


def test_a_stale_disk_goes_on_from_the_mirror(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, and the metrics of the iterations that are only there come along."""
    ahead, address = folder(tmp_path / "a", "a", "aa", "aaa"), str(tmp_path / "m")
    finish(make(ahead, address))
    stale = folder(tmp_path / "b", "a")
    made = restore(make(stale, address))
    assert checkpoints(stale) == [1, 3] and (stale / "metrics.jsonl").read_text().count("\n") == 3
    assert "is ahead: iteration 3 there, 1 here; the run goes on from there" in caplog.text
    finish(made)
    assert digests(stale / "checkpoints" / "3") == digests(ahead / "checkpoints" / "3")


@pytest.mark.parametrize("side", [None, "restore", "set_aside"])
def test_after_a_fork_only_the_user_decides(side: str | None, tmp_path: Path) -> None:
    """Nothing is lost on either side: the other checkpoints and the records are set aside."""
    there = folder(tmp_path / "a", "a", "aa", "aab")
    here = folder(tmp_path / "b", "a", "ac")
    address = tmp_path / "m"
    finish(made := make(there, str(address)))
    made.close(1.0, None)
    before, own = digests(address), digests(here)
    made = make(here, str(address), mirror_ahead=side)
    if side is None:
        with pytest.raises(
            CheckpointError,
            match="after iteration 1 .*--mirror_ahead=restore.*--mirror_ahead=set_as",
        ):
            made.compare()
        assert digests(address) == before and digests(here) == own
        return
    restore(made)
    finish(made)
    if side == "restore":
        assert newest_word(here) == "aab" and word_of(here / "checkpoints/set_aside/1/2") == "ac"
        assert "aab" in (here / "metrics.jsonl").read_text()
    else:
        assert newest_word(here) == "ac" and newest_word(address) == "ac"
        assert [word_of(address / "checkpoints/set_aside/1" / name) for name in "23"] == [
            "aa",
            "aab",
        ]
        assert "aab" in (address / "checkpoints/set_aside/1/metrics.jsonl").read_text()
    make(here, str(address)).compare()


@pytest.mark.parametrize("followed", ["here", "there"])
def test_the_branch_that_a_return_has_left_is_a_fork(followed: str, tmp_path: Path) -> None:
    """Where one side has followed --resume_iteration, and the other one still holds the branch that
    was left.

    As on a stale disk: checkpoint 2 of the branch that was left took the place of the newer one in
    the mirror.
    """
    left = folder(tmp_path / "a", "a", "ab")
    back = folder(tmp_path / "b", "a")
    address = tmp_path / "m"
    flag = CheckpointConfig(resume_iteration=1)
    for word in ("ac", "acc"):
        save(
            back / "checkpoints",
            len(word),
            0,
            changes=changes_of(word),
            config=Config(checkpoint=flag),
        )
    here, there = (back, left) if followed == "here" else (left, back)
    finish(made := make(there, str(address)))
    made.close(1.0, None)
    with pytest.raises(CheckpointError, match="after iteration 1 "):
        make(here, str(address), resume_iteration=1).compare()
    ahead = "set_aside" if followed == "here" else "restore"
    finish(restore(make(here, str(address), resume_iteration=1, mirror_ahead=ahead)))
    assert newest_word(here) == newest_word(address) == "acc"
    aside = (address if followed == "here" else here) / "checkpoints/set_aside/1/2"
    assert word_of(aside) == "ab"


def test_nothing_is_restored_before_the_choice_is_known_to_work(tmp_path: Path) -> None:
    """A mistyped --resume_iteration names the checkpoints there; --load_policy=never restores
    nothing."""
    address = str(tmp_path / "m")
    finish(make(folder(tmp_path / "a", "a", "aa", "aaa"), address))
    with pytest.raises(
        CheckpointError, match="no checkpoint of this iteration in .*write one of these: 1, 2, 3"
    ):
        restore(make(tmp_path / "b", address, resume_iteration=4))
    with pytest.raises(
        CheckpointError,
        match="--load_policy=never: --mirror=.* has checkpoints, the newest of .* 3",
    ):
        restore(make(tmp_path / "b", address, load_policy="never"))
    assert not (tmp_path / "b").exists()
    restore(make(tmp_path / "b", address, resume_iteration=2, load_policy="require"))
    assert checkpoints(tmp_path / "b") == [2]


def test_the_newest_good_checkpoint_of_both_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is damaged in another place; the log says where the one that is used came from, and no
    copy is deleted."""
    here, address = folder(tmp_path / "a", "a", "aa", "aaa"), tmp_path / "m"
    finish(make(here, str(address)))
    for checkpoint in (here / "checkpoints/3", here / "checkpoints/2", address / "checkpoints/3"):
        damage(checkpoint)
    loaded = load_chosen(make(here, str(address)))
    assert loaded is not None and word_of(loaded[0]) == "aa"
    assert "/3: rank_000" in loaded[1][0] and "skipped" in loaded[1][0]
    assert "/2: rank_000" in loaded[1][1] and loaded[1][1].endswith("; the mirror's is used")
    assert f"--mirror={address}: checkpoints/3: rank_000" in caplog.text
    assert (
        len(list((here / "checkpoints").glob("2.aside-*"))) == 1
        and (here / "checkpoints" / "3").exists()
    )


def damage(checkpoint: Path) -> None:
    with open(checkpoint / "rank_000.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


# -- random histories
# --------------------------------------------------------------------------------------------------


def expected(here: str, there: str, side: str | None) -> str | None:
    """Say which history a start goes on with; None: it is refused."""
    shared = len(os.path.commonprefix([here, there]))
    if shared == len(there):
        return here
    if shared == len(here):  # an empty directory is no side
        return here if here and side == "set_aside" else there
    return {None: None, "restore": there, "set_aside": here}[side]


REQUESTS = ("read", "write", "upload", "delete", "listing")  # to a store


class Killed(BaseException):
    """The process is gone, at this request to the store."""


class World:
    """Two machines, a mirror, and whatever happens to them."""

    def __init__(self, seed: int, address: str, root: Path) -> None:
        self.draw = random.Random(seed)
        self.address = address
        self.roots = [root / "one", root / "two"]
        self.idle: list[Mirror] = []  # of starts that nobody has killed
        self.saves: dict[str, str] = {}  # save id -> history
        self.begun: list[str] = []  # starts in order

    def whole(self, checkpoints_there: dict[str, bytes]) -> dict[int, str]:
        """Return the histories of the whole checkpoints in a store or folder, by iteration."""
        marks = [
            name
            for name in checkpoints_there
            if re.fullmatch(r"checkpoints/\d+/manifest\.json", name)
        ]
        found = {}
        for name in marks:
            content = manifest.parse(checkpoints_there[name])
            found[content.iteration] = self.saves[content.save_id]
        return found

    def start(self) -> None:
        """Let a machine start, check what it goes on with, and let it train until it ends or is
        killed."""
        draw, root = self.draw, self.draw.choice(self.roots)
        side = draw.choice([None, None, "restore", "set_aside"])
        before, own = store_content(self.address), folder_content(root)
        here, there = (
            found[max(found)] if (found := self.whole(one)) else "" for one in (own, before)
        )
        options = CheckpointConfig(mirror=self.address, mirror_ahead=side)
        # the disk was lost during the first upload
        if not here and not there and "mirror.json" in before:
            with pytest.raises(StorageError, match="--adopt_mirror=1"):
                Mirror(root, options).compare()
            options = dataclasses.replace(options, adopt_mirror=True)
        made, wanted = Mirror(root, options), expected(here, there, side)
        if wanted is None:
            with pytest.raises(CheckpointError, match="--mirror_ahead"):
                made.compare()
            assert store_content(self.address) == before and folder_content(root) == own
            return
        loaded = load_chosen(made)
        self.begun.append(made._claim["start"])
        word = "" if loaded is None else self.saves[manifest.read(loaded[0]).save_id]
        assert word == wanted, (here, there, side)
        self.assert_kept(before, store_content(self.address))
        self.assert_kept(own, folder_content(root))
        self.train(made, root, word)

    def assert_kept(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """Check that every whole checkpoint of before is still there, or set aside."""
        kept = {data for name, data in after.items() if name.endswith("manifest.json")}
        assert {data for name, data in before.items() if name.endswith("manifest.json")} <= kept

    def train(self, made: Mirror, root: Path, word: str) -> None:
        thread = next(
            one for one in threading.enumerate() if getattr(one, "_target", None) == made._work
        )
        draw, letter = self.draw, self.draw.choice("aab")
        if draw.random() < 0.4:
            kill_after(made, draw.randrange(40))
        made.begin(RUN)
        for _ in range(draw.randrange(1, 4)):
            word += letter
            shutil.rmtree(root / "checkpoints" / str(len(word)), ignore_errors=True)
            save_word(root, word, seed=len(self.saves))
            self.saves[manifest.read(root / "checkpoints" / str(len(word))).save_id] = word
            retention.prune(root / "checkpoints", 3, len(word))
            if draw.random() < 0.8:
                made.update((3, len(word), None, set()))
        if draw.random() < 0.6:
            wait_until(lambda: made._done == made._asked or not thread.is_alive())
            if thread.is_alive():
                for name in REQUESTS:
                    vars(made._remote).pop(name, None)  # nobody kills it any more
                self.idle.append(made)
        else:
            kill_after(made, 0)
            made.update()
            wait_until(lambda: not thread.is_alive())

    def wake(self, made: Mirror) -> None:
        """Let a machine that was thought dead save: after another start it ends, and writes
        nothing."""
        before = store_content(self.address)
        claimed_by = json.loads(before.get("mirror.json", b"{}")).get("start")
        later = self.begun[self.begun.index(made._claim["start"]) + 1 :]
        if claimed_by not in later or not checkpoints(made._root):
            return finish(made)
        made.update()
        wait_until(lambda: made._lost is not None)
        with pytest.raises(StorageError, match="another start of this run uses it"):
            made.close(60.0, None)
        assert store_content(self.address) == before
        self.idle.remove(made)

    def happen(self) -> None:
        """Let one thing happen between two starts."""
        draw, root = self.draw, self.draw.choice(self.roots)
        kind = draw.choice(["lost", "copied", "moved", "nothing", "another run", "woken"])
        if kind == "lost":
            shutil.rmtree(root, ignore_errors=True)
        elif kind == "copied" and self.roots[0].exists():
            shutil.rmtree(self.roots[1], ignore_errors=True)
            shutil.copytree(self.roots[0], self.roots[1])
        elif kind == "moved" and checkpoints(root):
            away = root / "away"
            away.mkdir(exist_ok=True)
            newest = root / "checkpoints" / str(max(checkpoints(root)))
            newest.rename(away / f"{newest.name}-{new_nonce()}")
        elif kind == "woken" and self.idle:
            self.wake(draw.choice(self.idle))
        elif kind == "another run":
            before = store_content(self.address)
            if any(name.endswith("manifest.json") for name in before):
                other = folder(root.parent / f"other-{new_nonce()}", "c", run=OTHER_RUN)
                with pytest.raises(StorageError):
                    make(other, self.address, OTHER_RUN).compare()
                assert store_content(self.address) == before


def kill_after(made: Mirror, requests: int) -> None:
    """Let the process of a mirror die at its n-th request."""
    remote, left = made._remote, [requests]

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                made._ended = True
                raise Killed
            return method(*arguments)

        return call

    for name in REQUESTS:
        setattr(remote, name, dying(getattr(remote, name)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 11))]
)
def test_random_histories(
    seed: int, bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens, the side that goes on is the one that was said, and no whole checkpoint
    disappears.

    Two short ones by default, 20 in each slow case; every other one on S3.
    """
    caplog.set_level(logging.CRITICAL)
    histories, starts = (2, 4) if seed == 0 else (20, 6)
    for number in range(histories):
        root = tmp_path / str(number)
        root.mkdir()
        address = f"s3://{bucket.name}/{number}" if number % 2 else str(root / "m")
        world = World(100 * seed + number, address, root)
        for _ in range(starts):
            world.start()
            world.happen()
        for made in world.idle:
            made._ended = True
            made._wake.set()


def store_content(address: str) -> dict[str, bytes]:
    """Return the files of a store by name."""
    made = mirror.RemoteFolder(address, "mirror")
    top = made.at("")
    found = made.system.find(top.rstrip("/")) if made.system.exists(top.rstrip("/")) else []
    return {path.removeprefix(top): bytes(made.system.cat_file(path)) for path in found}


def folder_content(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
