"""What may change between a checkpoint and the command line that resumes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_lite.config import BatchConfig, Config, flatten
from megatron_lite.config.model import rotary_base
from megatron_lite.errors import CheckpointError
from megatron_lite.schedules.batch_size import batch_schedule, continued

# Options that change the parameters, or the function that they were trained for.
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "head_groups",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "use_position_embeddings",
    "use_rotary_embeddings",
    "rotary_embedding_scale",
    "rotary_base",
    "rotary_percent",
    "rope_type",
    "rope_factor",
    "rope_original_max_position_embeddings",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_attention_factor",
    "rope_mscale",
    "rope_mscale_all_dim",
    "rope_truncate",
    "tie_word_embeddings",
    "add_linear_biases",
    "add_qkv_biases",
    "add_mlp_biases",
    "gated",
    "activation_type",
    "normalization_type",
    "layer_norm_eps",
    "zero_centered_normalization",
    "use_layer_norm_weight",
    "input_embedding_norm",
    "hybrid_norm",
    "qk_layernorm",
    "scale_attn_by_inverse_layer_idx",
    "logit_soft_cap",
    "window_size",
)


# What a run did without an option that a later version added, where that is not the option's default.
_BEFORE: dict[str, Any] = {"weight_decay_default_mask": "fast_llm"}
# Such an option, and the one that it was part of.
_FOLLOWED = {
    "add_qkv_biases": "add_linear_biases",
    "add_mlp_biases": "add_linear_biases",
    "embedding_dropout": "hidden_dropout",
    "export_dtype": "training_dtype",
}


def saved_optimizer(saved: dict[str, Any]) -> str:
    """The --optimizer of a flat saved configuration; before it could be chosen it was AdamW."""
    return str(saved.get("optimizer", "adamw"))


def keeps_moments(before: str, now: str, is_matrix: bool) -> bool:
    """Whether the moments of a parameter go on after a change of --optimizer. `is_matrix`: Muon updates it itself.

    They do where the same rule goes on: what Muon leaves to AdamW. The other way round they do not: AdamW counts its
    updates once for all parameters, to correct moments that began at zero, and those of the matrices begin there.
    """
    return before == now or ((before, now) == ("adamw", "muon") and not is_matrix)


def optimizer_state(state: dict[str, Any], before: str, now: str) -> dict[str, Any]:
    """What goes on of an optimizer, moments aside, of all that a checkpoint saved.

    After a change of --optimizer it is what is no rule's own, and AdamW's count of updates where any of its moments go
    on. Before there was a guard, dropped updates were counted beside the log's window.
    """
    counts = {name: state["window"].get(name, 0) for name in ("skipped", "nan", "streak")}
    saved = {"guard": {"dropped": {**counts, "new": 0, "last": [(0.0).hex()] * 5}}, **state["optimizer"]}
    if before == now:
        return saved
    return {**saved, "updates": saved["updates"] if keeps_moments(before, now, False) else 0, "rule": {}}


class Difference(NamedTuple):
    """One option of which the checkpoint and the command line have different values."""

    name: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.saved} in the checkpoint, {self.current} now"


def compare_architecture(saved: dict[str, Any], config: Config) -> list[Difference]:
    """Architecture options that differ, in the order of `config/`. `saved` is flat; both are resolved.

    `max_position_embeddings` counts only where there is a table of learned positions.
    """
    counted = set(ARCHITECTURE)
    if not config.model.use_position_embeddings and not saved.get("use_position_embeddings"):
        counted.remove("max_position_embeddings")
    return [difference for difference in _all_differences(saved, config) if difference.name in counted]


def check_architecture(saved: dict[str, Any], config: Config, where: str) -> None:
    """Refuse to resume the checkpoint `where` with another architecture.

    Raises:
        CheckpointError: naming every differing option with both values.
    """
    found = compare_architecture(saved, config)
    if found:
        raise CheckpointError(
            f"checkpoint {where} was trained with another architecture; give its values or choose another "
            "--experiment_dir:\n  " + "\n  ".join(f"--{difference}" for difference in found)
        )


def differences(saved: dict[str, Any], config: Config) -> list[Difference]:
    """Options outside the architecture that differ; the command line wins."""
    return [difference for difference in _all_differences(saved, config) if difference.name not in ARCHITECTURE]


def moved_samples(saved: dict[str, Any], config: Config, iterations: int) -> str | None:
    """What another batch size does to a checkpoint after so many iterations, and how to avoid it; None: nothing.

    The samples of an iteration follow from the schedule that is given, not from what was read before.
    """
    given = tuple(saved.get("batch_size_schedule", ()))
    before = batch_schedule(BatchConfig(batch_size=saved["batch_size"], batch_size_schedule=given))
    now = batch_schedule(config.batch)
    read, counted = before.consumed_samples(iterations), now.consumed_samples(iterations)
    if read == counted:
        return None
    what = "read again" if counted < read else "left out"
    return (
        f"the first {iterations:,} iterations took {read:,} samples, and by the batch size given now {counted:,}: "
        f"{abs(read - counted):,} samples are {what}; to go on behind the last one, write "
        f'--batch_size_schedule="{continued(before, now, iterations)}" in place of --batch_size'
    )


def other_decay(saved: dict[str, Any], config: Config) -> str | None:
    """What the meaning of --lr_decay_power does to a checkpoint of a version in which it was another; None: nothing."""
    options = config.learning_rate
    by_power = options.lr_decay_style in ("linear", "power", "cosine") and options.lr_decay_power != 1.0
    if "lr_schedule" in saved or options.lr_schedule is not None or not by_power:
        return None
    return (
        f"--lr_decay_power={options.lr_decay_power:g} is the exponent of the part of the decay that is over; the "
        "version that saved this checkpoint took it of the part that remains: the rate does not go on as it was"
    )


def _all_differences(saved: dict[str, Any], config: Config) -> list[Difference]:
    """Options that differ; an older version of the program may have known fewer, and did what their defaults mean."""
    derived = {name: saved[other] for name, other in _FOLLOWED.items() if other in saved}
    if saved.get("rotary_embedding_scale") is not None:
        derived["rotary_base"] = rotary_base(saved["rotary_embedding_scale"])
    saved = {**_as_json(flatten(Config())), **_BEFORE, **derived, **saved}
    return [
        Difference(name, saved[name], value)
        for name, value in _as_json(flatten(config)).items()
        if saved[name] != value
    ]


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The same values as JSON returns them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
