"""Options of checkpoints: when to save, what to keep, what to load."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import SAVED, Area, NonNegativeInt, PositiveFloat, PositiveInt, Rule, option, optional

LOADED = Rule("experiment_dir or load_checkpoint_path", "there is nothing to load", when="dry_run=0")
STARTS_ANEW = Rule("load_policy=never", "a run that starts from scratch loads no checkpoint")


@dataclass
class CheckpointConfig(Area):
    """Checkpoints"""

    checkpoint_interval: PositiveInt | None = optional(
        "iterations between checkpoints", "only the last iteration", basic=True, aliases="save_interval", needs=SAVED
    )
    checkpoint_offset: NonNegativeInt = option(
        0, "iteration from which checkpoint_interval counts", idle_unless="checkpoint_interval"
    )
    checkpoint_minutes: PositiveFloat | None = optional(
        "also save this many minutes after the last save, by rank 0's clock", "off", needs=SAVED
    )
    max_checkpoints: PositiveInt | None = optional(
        "keep the newest N checkpoints, and those of keep_checkpoints", "all", basic=True, idle_unless="experiment_dir"
    )
    keep_checkpoints: tuple[str, ...] = option(
        (),
        'save, and never delete, checkpoints at these iterations: "1000:10000 5000" is every multiple of 1000 up to '
        "10000, then every multiple of 5000",
        needs=SAVED,
    )
    delete_old_temp_checkpoints: bool = option(
        True,
        "let max_checkpoints delete the checkpoints of earlier starts; 0: keep them",
        idle_unless="max_checkpoints",
    )
    load_policy: str = option(
        "auto",
        "auto: resume if there is a checkpoint, else start from scratch; require: fail without one (exit 4); never: "
        "fail if experiment_dir has one, else start from scratch",
        choices=("auto", "require", "never"),
        needs=(LOADED._replace(when="load_policy=require and dry_run=0"),),
    )
    load_checkpoint_path: str | None = optional(
        "resume from elsewhere, with all state, until experiment_dir has a checkpoint: a checkpoint, a folder of them "
        "or an experiment directory",
        "none",
        never_empty=True,
        excludes=(STARTS_ANEW, Rule("pretrained_checkpoint_path", "a run starts from one of the two")),
    )
    resume_iteration: NonNegativeInt | None = optional(
        "go back to the checkpoint of this iteration, or fail without it (exit 4); newer ones are set aside",
        "the newest good one",
        needs=(LOADED,),
        excludes=(STARTS_ANEW,),
        aliases="ckpt_step",
    )
    allow_data_change: bool = option(
        False, "resume even if data, weights of data sets, split, tokenizer or seed differ from the checkpoint's"
    )
    save_retries: NonNegativeInt = option(
        3, "retries of a save after a storage failure, after pauses of 1, 4, 16, 60 ... s", idle_unless="experiment_dir"
    )
    async_checkpoint: bool = option(
        False,
        "write checkpoints in the background, from a copy in host memory made during the next iteration",
        aliases="async_save",
        idle_unless="checkpoint_interval or checkpoint_minutes or keep_checkpoints and experiment_dir",
    )
