"""Room for the checkpoints to come, counted before they are written."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from megatron_lite.checkpoint import manifest, space
from megatron_lite.config import CheckpointConfig, Config, TrainingConfig
from megatron_lite.errors import DamagedError
from tests.checkpoint.test_writing import save


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
def test_checkpoints_that_exist_at_one_time(there: int, saves: int, keep: int | None, more: int) -> None:
    assert space.additional(there, saves, keep) == more


def test_the_lack_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One save every 10 of 100 iterations, 40 done; the folder need not exist yet."""
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=29, f_frsize=10**8))
    root, training = tmp_path / "checkpoints", TrainingConfig(train_iters=100)
    config = Config(training=training, checkpoint=CheckpointConfig(checkpoint_interval=10, max_checkpoints=2))
    assert space.lack_at_start(root, 966_000_000, config, 40) is None
    lack = space.lack_at_start(root, 967_000_000, config, 40)
    assert lack is not None and f"{root}: 2.9 GB free, but the checkpoints to come take 3 x 1.0 GB; make room" in lack
    assert space.lack_at_start(root, 2_900_000_000, Config(training=training), 40) is None
    assert space.lack_now(root, 2_900_000_000) is None
    assert space.lack_now(root, 3_000_000_000) == f"{root}: the next checkpoint takes 3.0 GB, but only 2.9 GB are free"
    assert space.lack_at_start(None, 10**12, config, 40) is None
    keep = CheckpointConfig(checkpoint_interval=10, max_checkpoints=2, keep_checkpoints=("20",))
    lack = space.lack_at_start(root, 967_000_000, Config(training=training, checkpoint=keep), 40)
    assert lack is not None and "take 6 x 1.0 GB" in lack  # three, and those of 60, 80 and 100


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
