"""Repeat a run from its config.json, inserted into a command line as @RUN/config.json."""

from __future__ import annotations

from megatron_lite.checkpoint.names import parse_json
from megatron_lite.checkpoint.saved_state import check_options, with_current_names
from megatron_lite.config import flatten, unflatten
from megatron_lite.config.values import FLAGS, written
from megatron_lite.errors import DamagedError
from megatron_lite.validation import defaults

# Options that belong to the folder of the recorded run, or to its machine.
OF_THE_RUN = frozenset(
    """
    experiment_dir experiment_name mirror mirror_ahead adopt_mirror load_policy load_checkpoint_path resume_iteration
    allow_data_change tensorboard_dir wandb_id stop_file dataset_cache device cpu_matmul peak_tflops machine_speeds
    ignore_memory_check preflight export_callback_env
    """.split()
)
LENGTHS = ("train_iters", "train_tokens", "epochs")  # options that say how long a run is


def recorded_flags(text: str) -> tuple[list[str], list[str]]:
    """Return the flags that repeat a run, from the text of its config.json, and the names of the
    options left out because they belong to the run's folder or machine.

    The file has all values. Those that follow from others are derived again, so that later flags
    may change what they follow from.

    Raises:
        ValueError: if the text is not that of a run's config.json.
    """
    recorded = parse_json(text)
    if not isinstance(recorded, dict) or "train_iters" not in recorded:
        raise ValueError(
            "an object in JSON, but not the config.json of a run; an @file holds flags"
        )
    try:
        recorded = with_current_names(recorded)
        check_options(recorded)
    except DamagedError as error:
        raise ValueError(str(error)) from None
    if unknown := [name for name in recorded if name not in FLAGS]:
        raise ValueError(f"this version has no option {unknown[0]}, which another one wrote")
    config = unflatten(
        {name: tuple(some) if isinstance(some, list) else some for name, some in recorded.items()}
    )
    usual = defaults(config)
    changed = {name: value for name, value in flatten(config).items() if value != usual[name]}
    if changed.keys() & {*LENGTHS[1:]}:
        changed.pop("train_iters", None)  # it follows from the length and the data
    left_out = [name for name in changed if name in OF_THE_RUN]
    flags = [
        f"--{name}={written(value) or 'none'}"
        for name, value in changed.items()
        if name not in OF_THE_RUN
    ]
    return flags, left_out
