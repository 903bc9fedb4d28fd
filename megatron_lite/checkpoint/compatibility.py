"""Options that may change between a checkpoint and the command line that resumes it."""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from typing import Any, NamedTuple

from megatron_lite.config import BatchConfig, Config, Draft, flatten, unflatten
from megatron_lite.config.learning_rate import LearningRateConfig
from megatron_lite.config.model import rotary_base
from megatron_lite.config.option import Area
from megatron_lite.config.values import abridged, written
from megatron_lite.errors import CheckpointError
from megatron_lite.schedules.batch_options import batch_schedule
from megatron_lite.schedules.batch_size import continued
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation.learning_rate import learning_rate as schedule_problems

# Options that change the parameters, or the function that they compute.
ARCHITECTURE = tuple(
    """
    num_layers hidden_size num_attention_heads head_groups kv_channels ffn_hidden_size vocab_size
    max_position_embeddings use_position_embeddings use_rotary_embeddings rotary_embedding_scale rotary_base
    rotary_percent rope_type rope_factor rope_original_max_position_embeddings rope_low_freq_factor
    rope_high_freq_factor rope_beta_fast rope_beta_slow rope_attention_factor rope_mscale rope_mscale_all_dim
    rope_truncate tie_word_embeddings add_linear_biases add_qkv_biases add_mlp_biases gated activation_type
    normalization_type layer_norm_eps zero_centered_normalization use_layer_norm_weight input_embedding_norm
    hybrid_norm qk_layernorm scale_attn_by_inverse_layer_idx logit_soft_cap window_size
    """.split()
)

# Options added later -> the option that used to include them.
_FOLLOWED = {
    "add_qkv_biases": "add_linear_biases",
    "add_mlp_biases": "add_linear_biases",
    "embedding_dropout": "hidden_dropout",
    "export_dtype": "training_dtype",
}


def saved_optimizer(saved: dict[str, Any]) -> str:
    """Return the --optimizer of a flat saved configuration."""
    return str(saved.get("optimizer", "adamw"))


def keeps_moments(before: str, now: str, is_matrix: bool) -> bool:
    """Return whether a parameter keeps its moments when --optimizer changes from `before` to `now`.

    From AdamW to Muon, the parameters that Muon leaves to AdamW keep them. From Muon to AdamW none do: AdamW corrects
    for moments that begin at zero with one update count for all parameters, and the moments of matrices begin now.

    is_matrix: Muon updates the parameter itself.
    """
    return before == now or ((before, now) == ("adamw", "muon") and not is_matrix)


def optimizer_state(state: dict[str, Any], before: str, now: str) -> dict[str, Any]:
    """Return the saved state of the optimizer (without moments) that --optimizer=`now` can use.

    After a change of --optimizer drop the state of the rule, and AdamW's count of updates unless some moments stay.
    """
    saved: dict[str, Any] = state["optimizer"]
    if before == now:
        return saved
    return {**saved, "updates": saved["updates"] if keeps_moments(before, now, False) else 0, "rule": {}}


class Difference(NamedTuple):
    """An option with different values in the checkpoint and on the command line."""

    name: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        values = (tuple(value) if isinstance(value, list) else value for value in (self.saved, self.current))
        saved, current = (abridged(value) or "none" for value in values)
        return f"{self.name}: {saved} in the checkpoint, {current} now"


def compare_architecture(saved: dict[str, Any], config: Config) -> list[Difference]:
    """List the architecture options that differ, in the order of `config/`. `saved` is flat; both are resolved.

    `max_position_embeddings` counts only with a table of learned positions.
    """
    counted = set(ARCHITECTURE)
    if not config.model.use_position_embeddings and not saved.get("use_position_embeddings"):
        counted.remove("max_position_embeddings")
    return [difference for difference in _all_differences(saved, config) if difference.name in counted]


def check_architecture(saved: dict[str, Any], config: Config, where: str) -> None:
    """Refuse to resume the checkpoint in folder `where` with another architecture.

    Raises:
        CheckpointError: names every differing option with both values.
    """
    found = compare_architecture(saved, config)
    if found:
        raise CheckpointError(
            f"checkpoint {where} was trained with another architecture; write its values or choose another "
            "--experiment_dir:\n  " + "\n  ".join(f"--{difference}" for difference in found)
        )


def differences(saved: dict[str, Any], config: Config) -> list[Difference]:
    """List the options outside the architecture that differ; the command line wins."""
    return [difference for difference in _all_differences(saved, config) if difference.name not in ARCHITECTURE]


def moved_samples(saved: dict[str, Any], config: Config, iterations: int) -> str | None:
    """Warn that a changed batch size or sequence length repeats or skips samples after N iterations, and how not to.

    The samples of an iteration follow from the current schedule, not from the samples read so far. None: no change.
    """
    batch = BatchConfig(**_saved_values(BatchConfig, saved))
    if batch.batch_size is None:  # an older version may have saved it in another way
        return None
    before = batch_schedule(batch)
    now = batch_schedule(config.batch)
    read, counted = before.consumed_samples(iterations), now.consumed_samples(iterations)
    length = saved.get("sequence_length", config.batch.sequence_length)
    if length != config.batch.sequence_length:
        return _recut_tokens(read * length, counted * config.batch.sequence_length, length, config, iterations)
    if read == counted:
        return None
    effect = "read again" if counted < read else "left out"
    return (
        f"the first {iterations:,} iterations read {read:,} samples, but {counted:,} with the current batch size: "
        f"{abs(read - counted):,} samples are {effect}; to continue after the last sample read, write "
        f'--batch_size_schedule="{continued(before, now, iterations)}" instead of --batch_size'
    )


def _recut_tokens(read: int, counted: int, length: int, config: Config, iterations: int) -> str | None:
    """Warn that samples of another length than `length` do not begin where the tokens read so far end."""
    if not iterations:
        return None
    effect = "read again" if counted < read else "left out"
    moved = f"{abs(read - counted):,} tokens are {effect}" if counted != read else "their number is the same"
    return (
        f"the first {iterations:,} iterations read {read:,} tokens, but {counted:,} with --sequence_length="
        f"{config.batch.sequence_length}: {moved}, and samples are cut anew, in another order, so that some tokens are "
        f"read again before all were read; to continue after the last sample read, write --sequence_length={length}"
    )


def moved_rate(saved: dict[str, Any], config: Config, iterations: int) -> str | None:
    """Warn that a changed schedule changes the learning rate of the iteration after N, and say how to keep the old one.

    None: the same rate, or no iteration is left.
    """
    following = iterations + 1
    if following > config.training.train_iters:
        return None
    before = _with_schedule_of(saved, config)
    if before is None:
        return None
    rates = learning_rate(before, following), learning_rate(config, following)
    if math.isclose(*rates):
        return None
    old, now, default = vars(before.learning_rate), vars(config.learning_rate), vars(LearningRateConfig())
    changed = [name for name in now if now[name] != old[name]]
    keep = [f"--{name}={shlex.quote(written(old[name]))}" for name in changed if old[name] != default[name]]
    drop = [f"--{name}" for name in changed if old[name] == default[name]]
    ways = [f"write {' '.join(keep)}"] * bool(keep) + [f"leave out {' '.join(drop)}"] * bool(drop)
    return (
        f"the learning rate of iteration {following} is {rates[1]:.3e}, but {rates[0]:.3e} by the schedule of the "
        f"checkpoint" + (f"; to keep that schedule, {' and '.join(ways)}" if ways else "")
    )


def schedule_table(saved: dict[str, Any], config: Config, iterations: int) -> list[str]:
    """Return a table, as lines, of a schedule that changes after N iterations: rate and batch size, old and new.

    Its rows are the next iteration, the quarters of the rest, and the last. Empty if both schedules agree there.
    """
    first, last = iterations + 1, config.training.train_iters
    before = _with_schedule_of(saved, config) if first <= last else None
    if before is None:
        return []
    places = sorted({first + (last - first) * quarter // 4 for quarter in range(5)})
    rows, changes = [], False
    for place in places:
        rates = learning_rate(before, place), learning_rate(config, place)
        sizes = tuple(batch_schedule(some.batch).batch_size(place) for some in (before, config))
        changes = changes or not math.isclose(*rates) or sizes[0] != sizes[1]
        values = (f"{place:,}", *(f"{rate:.3e}" for rate in rates), *(f"{size:,}" for size in sizes))
        rows.append("".join(f"{value:>16}" for value in values))
    if not changes:
        return []
    names = ("iteration", "saved rate", "rate now", "saved batch", "batch now")
    kept = f"kept: weights, optimizer state, the number of iterations done ({iterations:,}); changed:"
    return [kept, "".join(f"{name:>16}" for name in names), *rows]


def _with_schedule_of(saved: dict[str, Any], config: Config) -> Config | None:
    """Return `config` with the learning rate and the batch of a saved configuration; None if these make no schedule."""
    draft = Draft(**flatten(config) | _saved_values(LearningRateConfig, saved) | _saved_values(BatchConfig, saved))
    if draft.batch_size is None or any(schedule_problems(draft)):
        return None
    return unflatten(vars(draft))


def _saved_values(kind: type[Area], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the saved values of an area; an option that was not saved has its default."""
    values = {field.name: saved.get(field.name, field.default) for field in fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _all_differences(saved: dict[str, Any], config: Config) -> list[Difference]:
    """List the options that differ. An option added after the checkpoint was saved counts as its default there."""
    derived = {name: saved[other] for name, other in _FOLLOWED.items() if other in saved}
    if saved.get("rotary_embedding_scale") is not None:
        derived["rotary_base"] = rotary_base(saved["rotary_embedding_scale"])
    saved = {**_as_json(flatten(Config())), **derived, **saved}
    return [
        Difference(name, saved[name], value)
        for name, value in _as_json(flatten(config)).items()
        if saved[name] != value
    ]


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON would, with lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
