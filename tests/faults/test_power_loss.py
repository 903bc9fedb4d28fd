"""A power cut at any moment of saves and deletions: whatever reached the disk, a promised
checkpoint loads."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_lite.checkpoint import retention
from megatron_lite.errors import CheckpointError
from tests.checkpoint.test_writing import SPECS, load, names, save
from tests.support.fakes import random_values, same
from tests.support.power_loss import Disk, Event, Log, without


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Event]:
    """Two ranks save 10 and 20, delete 10, save 20 again, save 30 and delete 20."""
    root = tmp_path_factory.mktemp("log") / "checkpoints"
    with Log(root) as log:
        for iteration in (10, 20, 20, 30):
            save(root, iteration, iteration, world_size=2)
            log.promise(iteration)
            retention.prune(root, 1, iteration)
    assert names(root) == {"30"}
    return log.events


def faults_of(
    events: Sequence[Event],
    per_moment: int,
    folder: Path,
    again: Callable[[int], bool],
    every: int = 1,
) -> Iterator[str]:
    """Yield what goes wrong in images of a power cut before each event. again: whether to save once
    more there."""
    chance = random.Random(1)
    for moment in range(1, len(events) + 1, every):
        disk = Disk(events[:moment])
        for number, image in enumerate(disk.images(chance, per_moment)):
            root = folder / "image"
            image.write(root)
            where = f"before event {moment}, image {number} ({sorted(names(root))}, promised {disk.promised})"
            try:
                loaded, values, lines = load(root)
            except CheckpointError as error:
                yield f"{where}: {error}"
            else:
                iteration = 0 if loaded is None else loaded.iteration
                if iteration < (disk.promised or 0):
                    yield f"{where}: lost, {iteration} is loaded"
                if lines:
                    yield f"{where}: a damaged checkpoint is visible: {lines}"
                if loaded is not None and not same(values, random_values(SPECS, iteration)):
                    yield f"{where}: other values"
                if again(moment):
                    save(root, 40, 40)
                    if names(root) - {"10", "20", "30"} != {"40"} or load(root)[0] is None:
                        yield f"{where}: the next save leaves {sorted(names(root))}"
            shutil.rmtree(root)


@pytest.mark.parametrize(
    ("every", "per_moment"), [(2, 3), pytest.param(1, 40, marks=pytest.mark.slow)]
)
def test_any_power_cut(
    events: Sequence[Event], every: int, per_moment: int, tmp_path: Path
) -> None:
    """The checkpoint of the last save that returned, or a newer one, is loaded bit for bit, and
    none is damaged."""
    again = 150 // per_moment
    bad = list(faults_of(events, per_moment, tmp_path, lambda moment: moment % again == 1, every))
    assert not bad, f"{len(bad)} bad images:\n" + "\n".join(bad[:20])


FORGOTTEN: dict[str, Callable[[Event], bool]] = {
    "tensors": lambda event: event.name == "fsync" and event.path.endswith(".safetensors"),
    "manifest": lambda event: event.name == "fsync" and event.path.endswith("manifest.json"),
    "new folder": lambda event: (
        event.name == "fsync" and event.path.startswith(".tmp-") and "/" not in event.path
    ),
    "directory": lambda event: event.name == "fsync" and event.path == "",
}


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param(sync, marks=[pytest.mark.slow] * (sync in ("manifest", "new folder")))
        for sync in FORGOTTEN
    ],
)
def test_a_forgotten_sync_is_noticed(events: Sequence[Event], sync: str, tmp_path: Path) -> None:
    """Without any one kind of sync, some image is bad: the test above needs them all."""
    forgetful = without(events, FORGOTTEN[sync])
    assert len(forgetful) < len(events)
    assert next(faults_of(forgetful, 4, tmp_path, lambda moment: False), None) is not None
