"""Rules about the data and the phases that read it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_lite.config.structured_values import weighted_paths
from megatron_lite.errors import UsageError
from megatron_lite.validation.messages import Problem, fill, typed

PHASE_ITERS = ("train_iters", "validation_iters", "test_iters")


def data(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What is read, and whether every phase has a share of it."""
    split = values["split"]
    if not 1 <= len(split) <= 3 or not 0 < sum(split) < math.inf:
        yield Problem(
            ("split",),
            f"{typed(values, 'split')}: takes up to three proportions (training, validation, test) "
            f"with a positive sum, as in --split=969,30,1",
        )
        return
    split = values["split"] = split + (0.0,) * (3 - len(split))
    if values["dataset_source"] != "list":
        if values["validation_iters"] == "all":
            yield Problem(
                ("validation_iters", "dataset_source"),
                f"{typed(values, 'validation_iters', 'dataset_source')}: made-up samples have no end; write a number "
                "of batches",
            )
        return
    if not values["data_path"]:
        if values["dry_run"]:
            return  # and its documents are not asked for
        yield Problem(
            ("data_path", "dataset_source"),
            "--data_path is missing: write the prefix of a .bin/.idx pair (scripts/prepare_data.py makes them), "
            "or --dataset_source=random for made-up tokens",
        )
    else:
        try:
            weighted_paths(values["data_path"])
        except UsageError as error:
            yield Problem(("data_path",), str(error))
    for share, phase, count in zip(split, ("training", "validation", "test"), PHASE_ITERS, strict=True):
        if values[count] != 0 and share == 0:
            yield Problem(
                ("split", count),
                f"{typed(values, 'split', count)}: no documents are left for {phase}; "
                f"give it a share in --split or write --{count}=0",
            )


def training(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What is saved, and where."""
    fill(values, "export_dtype", values["training_dtype"])
    for name in ("checkpoint_interval", "export_interval", "stop_interval"):
        if values[name] is not None and values["experiment_dir"] is None and not values["dry_run"]:
            yield Problem(
                (name, "experiment_dir"),
                f"{typed(values, name)}: there is nowhere to save; set --experiment_dir or leave {name} out",
            )
