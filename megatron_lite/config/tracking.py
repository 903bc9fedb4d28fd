"""Options of the destinations of metrics, and of the statistics of weights, gradients and updates."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, PositiveInt, Rule, derived, idle_unless, optional

TRACKERS = ("jsonl", "wandb", "tensorboard")
WATCHED = ("grads", "params", "updates", "opt_state")
WANDB = "wandb_entity_name or trackers=wandb"

# Options that have no effect unless another one has this value.
wandb_option = idle_unless(WANDB)
watch_option = idle_unless("watch")


def _added(tracker: str, switch: str) -> Rule:
    """Return the rule that an option which turns a tracker on does not contradict --trackers."""
    fix = f"add {tracker} to --trackers, or leave {switch} out"
    return Rule(f"trackers={tracker}", f"{switch} turns {tracker} on", fix=fix)


@dataclass
class TrackingConfig(Area):
    """Trackers and watch"""

    trackers: tuple[str, ...] = derived(
        "destinations of metrics, separated by commas: experiment_dir/metrics.jsonl, Weights & Biases, TensorBoard",
        "jsonl with experiment_dir, wandb with wandb_entity_name, tensorboard with tensorboard_dir",
        choices=TRACKERS,
        needs=(
            Rule("experiment_dir", "jsonl has nowhere to write", when="trackers=jsonl and dry_run=0"),
            Rule(
                "tensorboard_dir or experiment_dir",
                "tensorboard has nowhere to write",
                when="trackers=tensorboard and dry_run=0",
            ),
        ),
    )
    tensorboard_dir: str | None = optional(
        "folder of TensorBoard's files; turns TensorBoard on",
        "experiment_dir/tensorboard with tensorboard in trackers",
        needs=(_added("tensorboard", "tensorboard_dir"),),
    )
    wandb_entity_name: str | None = optional(
        "Weights & Biases user or team; turns logging there on",
        "off, or the account's own with wandb in trackers",
        aliases="wandb_entity",
        needs=(_added("wandb", "wandb_entity_name"),),
    )
    wandb_project_name: str = wandb_option("megatron_lite", "Weights & Biases project", aliases="wandb_project")
    wandb_group_name: str = wandb_option("default", "Weights & Biases group", aliases="wandb_group")
    wandb_id: str | None = wandb_option(
        None,
        "id of the Weights & Biases run, which later starts in the same experiment_dir continue",
        unset="a new one, kept in experiment_dir/wandb.json",
    )
    wandb_tags: tuple[str, ...] = wandb_option((), "tags of the Weights & Biases run")
    wandb_mode: str | None = wandb_option(
        None,
        "online; offline: record on disk, for `wandb sync`; disabled: record nothing",
        choices=("online", "offline", "disabled"),
        unset="WANDB_MODE, else online with a key and offline without",
    )
    wandb_save_code: bool = wandb_option(False, "add the source of this program to the Weights & Biases run")
    wandb_status_interval: PositiveInt | None = wandb_option(
        None, "iterations between Weights & Biases alerts with metrics", unset="none"
    )
    wandb_post_alerts: bool | None = wandb_option(
        None, "post Weights & Biases alerts when the run starts, ends or fails", unset="on with wandb_status_interval"
    )
    watch: tuple[str, ...] = idle_unless("trackers and train_iters")(
        (),
        "statistics to send to the trackers, separated by commas: of gradients, weights, updates, optimizer state",
        choices=WATCHED,
        aliases="watch_targets",
    )
    watch_interval: PositiveInt = watch_option(20, "iterations between steps that are watched")
    watch_per_layer: bool = watch_option(False, "also the statistics of each layer")
    watch_histograms: bool = watch_option(
        False, "also a histogram of each parameter", aliases="watch_include_histograms"
    )


def is_run_id(text: str) -> bool:
    """Whether Weights & Biases takes a text as the id of a run, and a folder can have it as its name."""
    return 0 < len(text) <= 128 and text.replace("-", "").replace("_", "").isalnum() and text.isascii()


def default_trackers(options: object) -> tuple[str, ...]:
    """Return the trackers that other options ask for."""
    needs = {"jsonl": "experiment_dir", "wandb": "wandb_entity_name", "tensorboard": "tensorboard_dir"}
    return tuple(name for name in TRACKERS if getattr(options, needs[name]) is not None)
