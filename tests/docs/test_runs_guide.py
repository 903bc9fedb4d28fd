"""docs/runs.md: the signals, the grace times and the sizes that it states."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.run.stop_signal import SIGNALS
from tests.support import documents
from tests.support.harness import run_distributed, tiny_config, train_whole

pytestmark = pytest.mark.guides
GUIDE = documents.read("runs")


def test_every_stop_signal_is_in_the_table() -> None:
    named = re.findall(r"^\| (SIG\w+) \|", GUIDE, re.MULTILINE)
    assert sorted(named) == sorted(number.name for number in SIGNALS)


def test_grace_time_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 s, and the option and the variable that change it."""
    launcher = pytest.importorskip("torch.distributed.launcher.api")
    from torch.distributed.run import get_args_parser

    if "shutdown_timeout" not in launcher.LaunchConfig.__dataclass_fields__:
        pytest.skip("torch before 2.12")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert launcher.LaunchConfig(1, 1, 1).shutdown_timeout == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "240")
    assert launcher.LaunchConfig(1, 1, 1).shutdown_timeout == 240
    assert (
        get_args_parser().parse_args(["--shutdown-timeout=240", "program"]).shutdown_timeout == 240
    )
    assert "--shutdown-timeout=240" in GUIDE and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240" in GUIDE


SAVES: list[tuple[str, dict[str, Any], int, int]] = [
    ("| AdamW | 12 |", {}, 12, 12),
    (
        "| Muon | 8 for the matrices of the blocks, 12 for all others |",
        {"optimizer": "muon"},
        8,
        12,
    ),
    ("| Lion, SGD | 8 |", {"optimizer": "lion"}, 8, 8),
    ("| Lion, SGD | 8 |", {"optimizer": "sgd"}, 8, 8),
    ("| an average (`--ema_type`), in addition | 4 |", {"ema_type": "ema"}, 16, 16),
    ("| frozen | 4, or 2 with", {"freeze": ("blocks.*",)}, 4, 12),
]


def save_all(distributed: Any, folder: str) -> list[tuple[int, int, int]]:
    """Parameters of the blocks (nearly all in matrices), all others, and the bytes of a
    checkpoint's shards, by row."""
    found = []
    for index, (_, options, _, _) in enumerate(SAVES):
        run = f"{folder}/{index}"
        model = train_whole(
            distributed, tiny_config(hidden_size=64, train_iters=1, experiment_dir=run, **options)
        ).model
        sizes = {
            slot.spec.name: math.prod(slot.spec.shape)
            for _, part in model.parts()
            for slot in part.layout.slots
        }
        blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
        (file,) = Path(run, "checkpoints", "1").glob("*.safetensors")
        found.append((blocks, sum(sizes.values()) - blocks, file.stat().st_size))
    return found


def test_sizes_of_saves(tmp_path: Path) -> None:
    """Bytes per parameter by optimizer, against the file of one rank."""
    (found,) = run_distributed(1, save_all, str(tmp_path))
    for (row, _, block_bytes, other_bytes), (blocks, others, size) in zip(
        SAVES, found, strict=True
    ):
        assert row in GUIDE
        assert size == pytest.approx(block_bytes * blocks + other_bytes * others, rel=0.02), row
