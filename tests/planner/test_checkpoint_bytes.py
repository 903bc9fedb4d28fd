"""The disk of a checkpoint as planned, against real saves of configurations that a seed draws."""

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.writing import files_bytes
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import run_distributed, start_run, tiny_config
from tests.support.memory_meters import some
from tests.support.plans import one_plan
from tests.support.random_configurations import Drawn, draw_configurations

DRAWN = draw_configurations(12)
MOST_RANKS = 3  # that this test starts; those of a drawn configuration may be more


def save(distributed: Distributed, options: dict[str, Any], folder: str) -> None:
    """Build a run as the program does, and save."""
    from megatron_lite.outputs.saving import save

    run = start_run(
        distributed, tiny_config(distributed.world_size, **options, experiment_dir=folder)
    )
    save(run)
    distributed.barrier()


@pytest.mark.parametrize("drawn", some(DRAWN, each=12))
def test_the_disk_of_a_checkpoint(drawn: Drawn, tmp_path: Path) -> None:
    """The files of all ranks to the byte; with the manifest, a large part for models this small,
    within 2 %."""
    ranks = min(drawn.ranks, MOST_RANKS)
    batch = {"batch_size": drawn.options["batch_size"] // drawn.ranks * ranks}
    files_are_as_planned(ranks, {**drawn.options, **batch}, tmp_path, most_manifest=0.02)


def test_the_disk_of_adapters(tmp_path: Path) -> None:
    """Without their model."""
    options = dict(lora_rank=2, training_dtype="bf16", num_layers=2)
    files_are_as_planned(2, options, tmp_path, most_manifest=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shared"), [(2, 2), (4, 2), (4, 4)])
def test_the_disk_of_tensor_parallel_ranks(ranks: int, shared: int, tmp_path: Path) -> None:
    """Each rank writes what it holds, copies of small parameters included."""
    options = dict(
        tensor_parallel=shared, vocab_size=61, num_layers=3, training_dtype="bf16", ema_type="ema"
    )
    files_are_as_planned(ranks, options, tmp_path, most_manifest=0.1)


def files_are_as_planned(
    ranks: int, options: dict[str, Any], folder: Path, most_manifest: float
) -> None:
    """Save on ranks that are processes, and compare the bytes of the files."""
    run_distributed(
        ranks, save, options, str(folder), tensor_parallel=options.get("tensor_parallel", 1)
    )
    config = tiny_config(ranks, **options, experiment_dir=str(folder))
    plan = one_plan(config, ranks, "cpu")
    sizes = {path.name: path.stat().st_size for path in (folder / "checkpoints" / "0").iterdir()}
    manifest, whole = sizes.pop("manifest.json"), sum(sizes.values())
    assert len(sizes) == ranks and files_bytes(plan.model, ranks, 0) == whole
    assert manifest <= most_manifest * whole
    print(f"{whole:,} bytes, exact; beside them a manifest of {manifest:,}")
