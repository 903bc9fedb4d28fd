"""Options of what a run reports: its folder, log lines, tensor logs, trackers, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import (
    SAVED,
    Area,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    debug_level,
    idle_unless,
    option,
    optional,
)

RUN_ID = (
    r"(?=[_-]*[A-Za-z0-9])[A-Za-z0-9_-]{1,128}"  # of Weights & Biases; also the name of a folder
)
TRACKERS = ("jsonl", "wandb", "tensorboard", "webhook", "prometheus")
WATCHED = ("grads", "params", "updates", "opt_state", "experts")
PROFILED = "profile_cpu or profile_cuda or profile_schedule"

# Options that have no effect unless another one has this value.
wandb_option = idle_unless("wandb_entity_name or trackers=wandb")
watch_option = idle_unless("watch")
profile_option = idle_unless(PROFILED)


@dataclass
class RunConfig(Area):
    """Run and monitoring"""

    experiment_dir: str | None = optional(
        "folder for all files of the run", "nothing is written", basic=True
    )
    experiment_name: str | None = wandb_option(
        None,
        "name of the run in Weights & Biases",
        unset="name of experiment_dir",
        aliases="wandb_exp_name",
        may_differ=True,
    )
    report: bool = idle_unless("experiment_dir")(
        True,
        "write report.html, a page about the run, into experiment_dir at the end of each start",
    )
    log_interval: PositiveInt = optional(
        "iterations between log lines", "100, or a fiftieth of train_iters", basic=True
    )
    log_offset: NonNegativeInt = option(
        1, "first logged iteration (0: only multiples of log_interval)"
    )
    log_communication: bool = option(
        False, "log the bytes and the time of each step's communication, by kind"
    )
    debug_layer_outputs: int = debug_level("the output of each layer", training=True)
    debug_layer_gradients: int = debug_level("the gradient of each layer's input", training=True)
    debug_param_init: int = debug_level("each parameter after initialization")
    debug_param_gradients: int = debug_level("each gradient shard after reduction", training=True)
    debug_all_param_gradients: int = debug_level(
        "each parameter's gradient after reduction", training=True
    )
    debug_param_update: int = debug_level("each parameter after the update", training=True)
    debug_global_tensors: bool = option(
        True, "gather tensors from all ranks before logging them (slow)"
    )
    debug_activation_memory: bool = option(False, "log the memory in use after each layer")
    debug_schedule: bool = option(
        False,
        "draw the passes of all pipeline ranks in a step, and the waits between them: as text in the log or dry run, "
        "as schedule.svg in runs/<k>/artifacts of experiment_dir",
    )
    debug_tensor_parallel: bool = option(
        False,
        "check that tensor-parallel ranks agree on replicated weights, gradients and layer outputs (slow)",
        idle_unless="tensor_parallel!=1",
    )
    moe_replay_routing: str | None = idle_unless("num_experts!=1")(
        None,
        "folder with each token's experts in training: recorded if it is empty or missing, otherwise chosen as recorded, "
        "to compare layouts (slow)",
        unset="routers choose, and nothing is recorded",
    )
    save_tensor_logs: bool = option(
        False, "save logged tensors in runs/<k>/artifacts of experiment_dir", needs=SAVED
    )
    show_tensor_logs: bool = option(True, "print logged tensors")
    peak_tflops: PositiveFloat | None = optional(
        "dense peak TFLOP/s of one device, for mfu", "known for common GPUs"
    )


def _added(tracker: str, switch: str) -> tuple[Rule]:
    """Return the rule that --trackers, if set, includes the tracker that the option `switch` turns
    on."""
    fix = f"add {tracker} to --trackers, or leave {switch} out"
    return (Rule(f"trackers={tracker}", f"{switch} turns {tracker} on", fix=fix),)


@dataclass
class TrackingConfig(Area):
    """Trackers and watch"""

    trackers: tuple[str, ...] = optional(
        "destinations of metrics, separated by commas: experiment_dir/metrics.jsonl, Weights & Biases, TensorBoard, "
        "messages to the webhook in MEGATRON_LITE_WEBHOOK, experiment_dir/metrics.prom, or a class of your own, as "
        "package.module:Class",
        "jsonl with experiment_dir, wandb with wandb_entity_name, tensorboard with tensorboard_dir",
        choices=TRACKERS,
        also=r"[\w.]+:\w+",
        needs=(
            Rule(
                "experiment_dir", "jsonl has nowhere to write", when="trackers=jsonl and dry_run=0"
            ),
            Rule(
                "tensorboard_dir or experiment_dir",
                "tensorboard has nowhere to write",
                when="trackers=tensorboard and dry_run=0",
            ),
            Rule(
                "experiment_dir",
                "prometheus has nowhere to write",
                when="trackers=prometheus and dry_run=0",
            ),
        ),
    )
    tensorboard_dir: str | None = optional(
        "folder for TensorBoard's files; turns TensorBoard on",
        "experiment_dir/tensorboard with tensorboard in trackers",
        needs=_added("tensorboard", "tensorboard_dir"),
    )
    wandb_entity_name: str | None = optional(
        "Weights & Biases user or team; turns Weights & Biases on",
        "off, or the account's own with wandb in trackers",
        aliases="wandb_entity",
        needs=_added("wandb", "wandb_entity_name"),
    )
    wandb_project_name: str = wandb_option(
        "megatron_lite",
        "Weights & Biases project",
        aliases="wandb_project",
        pattern=r"[^/\\#?%:]{0,128}",
        why="takes up to 128 characters, and none of / \\ # ? % : (a team goes to --wandb_entity_name)",
    )
    wandb_group_name: str = wandb_option(
        "default", "Weights & Biases group", aliases="wandb_group", may_differ=True
    )
    wandb_id: str | None = wandb_option(
        None,
        "id of the Weights & Biases run, which later starts in the same experiment_dir continue",
        unset="a new one, saved in experiment_dir/wandb.json",
        pattern=RUN_ID,
        why="takes up to 128 letters, digits, - and _",
        may_differ=True,
    )
    wandb_tags: tuple[str, ...] = wandb_option(
        (),
        "tags of the Weights & Biases run",
        may_differ=True,
        pattern="(?s).{1,64}",
        why="each tag has 1 to 64 characters",
    )
    wandb_mode: str | None = wandb_option(
        None,
        "online; offline: record on disk, for `wandb sync`; disabled: record nothing",
        choices=("online", "offline", "disabled"),
        unset="WANDB_MODE, else online with a key and offline without",
    )
    wandb_save_code: bool = wandb_option(
        False, "add the source of this program to the Weights & Biases run"
    )
    wandb_status_interval: PositiveInt | None = wandb_option(
        None, "iterations between Weights & Biases alerts with metrics", unset="none"
    )
    wandb_post_alerts: bool = wandb_option(
        None,
        "post Weights & Biases alerts when the run starts, ends or fails",
        unset="on with wandb_status_interval",
    )
    watch: tuple[str, ...] = idle_unless("trackers and train_iters")(
        (),
        "statistics to send to the trackers, separated by commas: of gradients, weights, updates, optimizer state, "
        "experts' loads",
        choices=WATCHED,
        needs=(
            Rule(
                "num_experts!=1", "the model has no experts", "watch=experts", "leave experts out"
            ),
        ),
        aliases="watch_targets",
    )
    watch_interval: PositiveInt = watch_option(20, "iterations between watched steps")
    watch_per_layer: bool = watch_option(False, "also send the statistics of each layer")
    watch_histograms: bool = watch_option(
        False, "also send a histogram of each parameter", aliases="watch_include_histograms"
    )


def default_trackers(options: object) -> tuple[str, ...]:
    """Return the trackers that other options request."""
    needs = {
        "jsonl": "experiment_dir",
        "wandb": "wandb_entity_name",
        "tensorboard": "tensorboard_dir",
    }
    return tuple(name for name in needs if getattr(options, needs[name]) is not None)


@dataclass
class ProfilingConfig(Area):
    """Profiles"""

    profile_cpu: bool = idle_unless("experiment_dir")(
        False,
        "profile operations on the CPU with PyTorch's profiler, into profiles/ of experiment_dir: a trace for "
        "ui.perfetto.dev, and a table of the operations, sorted by self time",
    )
    profile_cuda: bool = idle_unless("experiment_dir and device!=cpu")(
        False, "also profile kernels on the GPU"
    )
    profile_schedule: bool = idle_unless("experiment_dir")(
        False,
        "time each step of the schedule, its gathers and reductions, and how much of them computation overlaps: a "
        "table, a trace and a page",
    )
    profile_skip: NonNegativeInt = profile_option(
        1,
        "iterations before the profile, counted from each start; one more is profiled and discarded, as it is slower",
    )
    profile_active: PositiveInt = profile_option(1, "iterations to profile")
    profile_ranks: tuple[NonNegativeInt, ...] = idle_unless(f"{PROFILED} or memory_snapshot")(
        (), "ranks to profile; none: all"
    )
    memory_snapshot: NonNegativeInt = idle_unless("experiment_dir and device!=cpu")(
        0,
        "CUDA: record every allocation from the start through the first N iterations, in experiment_dir/profiles/"
        "memory_<rank>.pickle for https://pytorch.org/memory_viz (0: record nothing)",
    )
