"""Which checkpoints stay, whatever happened before: the newest good one and the permanent ones;
room for the next."""

import dataclasses
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest, retention
from megatron_lite.checkpoint.retention import (
    checkpoints_to_delete,
    is_permanent,
    num_permanent,
    was_permanent,
)
from megatron_lite.config import CheckpointConfig, Config, TrainingConfig, flatten
from megatron_lite.config.structured_values import keep_rules
from megatron_lite.errors import DamagedError, UsageError
from tests.checkpoint.test_writing import save
from tests.support.fakes import run_state

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
DOCUMENTED = ("1000:10000", "5000:40000", "10000")


@pytest.mark.parametrize(
    ("iterations", "keep", "deleted"),
    [
        ([], 1, []),
        ([100], 1, []),
        ([100, 200, 300], 5, []),
        ([100, 200, 300], 3, []),
        ([100, 200, 300], 2, [100]),
        ([300, 100, 200], 1, [100, 200]),
        ([9, 10, 0], 2, [0]),
        ([10, 10, 20], 1, [10]),
    ],
)
def test_table(iterations: list[int], keep: int, deleted: list[int]) -> None:
    """Oldest first; numbers are compared as numbers."""
    assert checkpoints_to_delete(dict.fromkeys(iterations, False), keep) == deleted


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int) -> None:
    """A policy cannot delete everything."""
    with pytest.raises(AssertionError, match="cannot resume"):
        checkpoints_to_delete({1: False, 2: False}, keep)


def test_levanters_example() -> None:
    """A rule holds up to its end inclusive; after the last end all checkpoints are temporary."""
    rules = keep_rules(["10:30", "20:60"])
    assert [step for step in range(1, 101) if is_permanent(step, rules)] == [10, 20, 30, 40, 60]
    rules = keep_rules(DOCUMENTED)
    kept = [step for step in range(1, 70001) if is_permanent(step, rules)]
    assert kept == [*range(1000, 10001, 1000), *range(15000, 40001, 5000), 50000, 60000, 70000]


@hypothesis.given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 300)),
        max_size=4,
        unique_by=lambda rule: rule[1],
    ),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_the_number_of_permanent_checkpoints(
    pairs: list[tuple[int, int]], first: int, last: int
) -> None:
    """`num_permanent` counts the iterations for which `is_permanent` holds."""
    ordered = sorted(pairs, key=lambda rule: rule[1])
    items = [f"{every}:{until}" for every, until in ordered[:-1]] + [
        str(every) for every, _ in ordered[-1:]
    ]
    rules = keep_rules(items)
    assert num_permanent(first, last, rules) == sum(
        is_permanent(step, rules) for step in range(first + 1, last + 1)
    )


@pytest.mark.parametrize(
    "items", ["", "x", "0", "10:", ":10", "10:5:2", "-1", "10 20", "10:30 5:30", "9:30 5:20", "1.5"]
)
def test_malformed_rules_are_refused(items: str) -> None:
    """The message names the flag and what to write."""
    with pytest.raises(UsageError, match=r"--keep_checkpoints=.*(write|sort)"):
        keep_rules(items.split(" "))


@pytest.mark.parametrize("items", [["x"], [3], 5, None, [None]])
def test_rules_that_cannot_be_understood_delete_nothing(items: object) -> None:
    """A manifest may come from a later version: a checkpoint with rules that nobody understands is
    permanent."""
    assert was_permanent(7, {"keep_checkpoints": items})
    assert not was_permanent(7, {})


RULES = st.sampled_from([(), ("4",), ("6:24",), ("2:10", "5:20", "12")])
STARTS = st.tuples(RULES, st.none() | st.integers(1, 4), st.booleans(), st.integers(1, 5))
EVENTS = st.lists(
    st.sampled_from(["save", "save", "save", "damage", "start", "bad step"]), max_size=60
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data(), EVENTS)
def test_random_histories(data: st.DataObject, events: list[str]) -> None:
    """Starts with other rules, saves, damage and bad steps in any order: a good checkpoint, once
    there, always remains.

    Neither the newest good checkpoint nor one that was permanent when it was saved, or from which
    one of the last bad steps can be repeated, is ever deleted. At most --max_checkpoints temporary
    ones up to the newest remain besides, and those that belong to earlier starts.
    """
    good: dict[int, bool] = {}  # iteration -> permanent when it was saved
    rules = keep_rules(())
    keep = None
    deletes_old = True
    step = 1
    iteration = resumed_at = 0
    held: list[int] = []
    for event in events:
        if event == "start":
            items, keep, deletes_old, step = data.draw(STARTS)
            rules = keep_rules(items)
            # a run resumes from its newest good checkpoint
            iteration = resumed_at = max(good, default=0)
        elif event == "damage" and len(good) > 1:
            # is seen by the manifest or the sizes
            del good[data.draw(st.sampled_from(sorted(good)))]
        elif event == "bad step" and good:
            held = [*held, max(good)][-3:]
        elif event == "save":
            iteration += step
            good[iteration] = is_permanent(iteration, rules)
            saved = {number: kept or is_permanent(number, rules) for number, kept in good.items()}
            after = None if deletes_old else resumed_at
            deleted = (
                checkpoints_to_delete(saved, keep, iteration, after, held)
                if keep is not None
                else []
            )
            assert iteration not in deleted and max(good) not in deleted
            assert not set(deleted) & set(held)
            assert not any(good[number] or is_permanent(number, rules) for number in deleted)
            assert deletes_old or all(number > resumed_at for number in deleted)
            for number in deleted:
                del good[number]
            temporary = [
                n
                for n, kept in good.items()
                if not kept and not is_permanent(n, rules) and n <= iteration
            ]
            own = [n for n in temporary if (deletes_old or n > resumed_at) and n not in held]
            assert keep is None or len(own) <= keep
            assert good


def test_permanent_checkpoints_stay_on_the_disk(tmp_path: Path) -> None:
    """The manifest says which were permanent: a start with other rules deletes none of these."""
    keep = Config(checkpoint=CheckpointConfig(keep_checkpoints=("4:8",)))
    for iteration in range(2, 15, 2):
        save(tmp_path, iteration, 1, config=keep if iteration < 9 else Config())
        retention.prune(tmp_path, 1, iteration)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 8, 14]
    save(tmp_path, 16, 1)
    retention.prune(tmp_path, 1, 16, after=14)
    assert (tmp_path / "14").exists()


def test_the_best_checkpoint_stays_on_the_disk(tmp_path: Path) -> None:
    """The checkpoint that was just published says which, whatever is newer; one that cannot be read
    names none."""
    save(tmp_path, 12, 1)
    for iteration, best in ((2, 2), (4, 4), (6, 4), (8, 4), (10, 10)):
        counts = {
            "measured": "0" * 16,
            "value": (1.0).hex(),
            "iteration": best,
            "seen": iteration,
            "bad": 0,
        }
        save(tmp_path, iteration, 1, state={**run_state(), "best": counts})
        folder = tmp_path / str(iteration)
        assert retention.best_of(folder) == {best}
        retention.prune(tmp_path, 1, iteration, held=retention.best_of(folder))
        assert {path.name for path in tmp_path.iterdir()} == {"12", str(iteration), str(best)}
    (folder / "manifest.json").write_text("damaged")
    assert retention.best_of(folder) == retention.best_of(tmp_path / "12") == set()


def kept(folder: Path, number: int, base: Path, config: Config) -> Path:
    """Write that many good checkpoints, which share the file of `base`."""
    content = manifest.read(base)
    for iteration in range(1, number + 1):
        target = folder / str(iteration)
        target.mkdir(parents=True)
        os.link(base / "rank_000.safetensors", target / "rank_000.safetensors")
        text = manifest.dump(
            dataclasses.replace(content, iteration=iteration, config=flatten(config))
        )
        (target / "manifest.json").write_text(text)
    return folder


def reads_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how many files an action opens, and the bytes of the manifests among them."""
    opened: list[int] = []
    original = os.open

    def counting(path: Any, *args: Any, **options: Any) -> int:
        if not os.path.isdir(path):
            opened.append(os.path.getsize(path) if os.path.basename(path) == "manifest.json" else 0)
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", counting)
        action()
    return len(opened), sum(opened)


# Rules of the configuration that saved them, current rules, and --max_checkpoints.
KEPT: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "by --max_checkpoints": ((), (), 2000),
    "by the rules": (("1",), ("1",), 1),
    "by earlier rules": (("1",), (), 1),
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("many", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_save_costs_the_same_with_any_number(
    how: str, many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save reads its own checkpoint, and the one that it deletes, if any, but none of those that
    are kept."""
    earlier, current, keep = KEPT[how]
    save(tmp_path / "base", 1, 1)
    costs = []
    for number in (10, many):
        root = kept(tmp_path / str(number), number, tmp_path / "base" / "1", keeping(*earlier))
        known: retention.Known = {}

        def prune(iteration: int, root: Path = root, known: retention.Known = known) -> None:
            retention.prune(root, keep, iteration, keep_rules(current), known=known)

        found = []
        for iteration in (number + 1, number + 2, number + 3):
            save(root, iteration, 1)
            found.append(reads_of(lambda iteration=iteration: prune(iteration), monkeypatch))
        files, num_bytes = found[-1]
        assert (
            files <= 4
            and num_bytes <= 2.1 * (root / f"{number + 3}" / "manifest.json").stat().st_size
        )
        # the first save of a start may read each once
        costs.append(found[1:] if how != "by the rules" else found)
        there = {int(path.name) for path in root.iterdir()}
        assert there >= set(range(1, number + 1)) and (number + 2 in there) == (
            how != "by earlier rules"
        )
    few, more = ([files for files, _ in found] for found in costs)
    assert few == more


def keeping(*rules: str) -> Config:
    return Config(checkpoint=CheckpointConfig(keep_checkpoints=rules))


def test_what_was_read_once_is_read_again_before_it_is_deleted(tmp_path: Path) -> None:
    """A checkpoint damaged since then stays, and one whose files changed, or that another save
    replaced, is new."""
    known: retention.Known = {}
    for iteration in (1, 2):
        save(tmp_path, iteration, 1)
        retention.prune(tmp_path, 2, iteration, known=known)
    os.truncate(tmp_path / "1" / "rank_000.safetensors", 100)
    save(tmp_path, 3, 1)
    retention.prune(tmp_path, 2, 3, known=known)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3"}
    save(tmp_path, 2, 1, config=keeping("2"))  # permanent now
    (tmp_path / "3" / "rank_000.safetensors").unlink()
    save(tmp_path, 4, 1)
    retention.prune(tmp_path, 1, 4, known=known)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3", "4"}


def test_the_memory_of_a_long_run_does_not_grow(tmp_path: Path) -> None:
    """What is deleted is forgotten."""
    known: retention.Known = {}
    for iteration in range(1, 8):
        save(tmp_path, iteration, 1)
        retention.prune(tmp_path, 2, iteration, known=known)
    assert len(known) == 2


# -- room for those to come
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, saves, keep, more",
    [
        (0, 5, None, 5),
        (3, 5, None, 5),
        (0, 5, 2, 3),  # two, and a third while it is written
        (0, 2, 2, 2),
        (2, 5, 2, 1),
        (1, 5, 2, 2),
        (4, 1, 2, 1),
        (2, 0, None, 0),
    ],
)
def test_checkpoints_that_exist_at_one_time(
    there: int, saves: int, keep: int | None, more: int
) -> None:
    assert retention.additional(there, saves, keep) == more


def test_the_lack_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One save every 10 of 100 iterations, 40 done; the folder need not exist yet."""
    monkeypatch.setattr(
        os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=29, f_frsize=10**8)
    )
    root, training = tmp_path / "checkpoints", TrainingConfig(train_iters=100)
    config = Config(
        training=training, checkpoint=CheckpointConfig(checkpoint_interval=10, max_checkpoints=2)
    )
    assert retention.lack_at_start(root, 966_000_000, config, 40) is None
    lack = retention.lack_at_start(root, 967_000_000, config, 40)
    assert (
        lack is not None
        and f"{root}: 2.9 GB free, but the checkpoints to come take 3 x 967.0 MB; make room" in lack
    )
    assert retention.lack_at_start(root, 2_900_000_000, Config(training=training), 40) is None
    assert retention.lack_now(root, 2_900_000_000) is None
    assert (
        retention.lack_now(root, 3_000_000_000)
        == f"{root}: the next checkpoint takes 3.0 GB, but only 2.9 GB are free"
    )
    assert retention.lack_at_start(None, 10**12, config, 40) is None
    keep = CheckpointConfig(checkpoint_interval=10, max_checkpoints=2, keep_checkpoints=("20",))
    lack = retention.lack_at_start(
        root, 967_000_000, Config(training=training, checkpoint=keep), 40
    )
    assert lack is not None and "take 6 x 967.0 MB" in lack  # three, and those of 60, 80 and 100
    monkeypatch.setattr(retention, "free_bytes", lambda path: 400_000)
    lack = retention.lack_now(root, 5_700_000)
    assert lack is not None and lack.endswith("takes 5.7 MB, but only 0.4 MB are free")


def test_a_manifest_that_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the writer is that of the reader."""
    save(tmp_path, 10, 1)
    content = manifest.read(tmp_path / "10")
    size = (tmp_path / "10" / "manifest.json").stat().st_size
    monkeypatch.setattr(manifest, "MAX_BYTES", size + 32)
    assert len(manifest.dump(content)) == size
    monkeypatch.setattr(manifest, "MAX_BYTES", size - 1)
    with pytest.raises(ValueError, match="could not be read again: a manifest of"):
        manifest.dump(content)
    with pytest.raises(DamagedError, match="bytes, at most"):
        manifest.read(tmp_path / "10")
