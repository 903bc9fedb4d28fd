"""Compare a checkpoint's options, data and schedules with a resume's, and refuse forbidden changes.
Imports no torch."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_lite.config import (
    BatchConfig,
    Config,
    Draft,
    JsonObject,
    ModelConfig,
    Options,
    flatten,
    unflatten,
)
from megatron_lite.config.model import DenseConfig, repeating, rotary_base
from megatron_lite.config.optimizer import LearningRateConfig
from megatron_lite.config.option import Area
from megatron_lite.config.structured_values import WeightStage, weight_stages, weighted_paths
from megatron_lite.config.values import abridged, written
from megatron_lite.errors import CheckpointError, RunError
from megatron_lite.schedules.batch_size import batch_schedule, continued
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation.learning_rate import learning_rate as schedule_problems

if TYPE_CHECKING:
    from megatron_lite.checkpoint.manifest import Manifest

# of a data set: its number, the samples read in it, and all its samples
_Epoch = tuple[int, int, int]
_MOST_LINES = 20  # data changes listed in a message
ARCHITECTURE, DATA = "architecture", "data"
# Options that do not change the meaning of weights: noise, initial values, precision, padding, how the
# loads of experts are balanced.
FREE = frozenset(
    "attention_dropout hidden_dropout embedding_dropout init_method_std init_method_std_embed init_method_std_qkv "
    "init_method_std_attn_proj init_method_std_mlp_1 init_method_std_mlp_2 layer_norm_init_range random_bias_init "
    "full_precision_residual attention_softmax_in_fp32 make_vocab_size_divisible_by expert_routing_type "
    "expert_auxiliary_loss_coefficient expert_z_loss_coefficient moe_balance moe_jitter_eps "
    "moe_router_bias_update_rate".split()
)
# Options that have no effect on a dense model.
OF_EXPERTS = vars(ModelConfig()).keys() - vars(DenseConfig()).keys() - {"num_experts"}
# Options that only name a run.
NAMES_OF_A_RUN = ("experiment_dir", "experiment_name", "wandb_id")
# Option -> kind of change; other options' changes are only logged.
KINDS = {
    **{name: ARCHITECTURE for name in vars(ModelConfig()) if name not in FREE},
    **dict.fromkeys("lora_rank lora_alpha lora_scaling lora_targets".split(), ARCHITECTURE),
    # The samples, or their order.
    **dict.fromkeys(
        "dataset_source seed shuffle shuffle_era shuffle_documents truncate_documents max_epochs".split(),
        DATA,
    ),
}
# Options added later -> the option that included them before.
_FOLLOWED = {
    "add_qkv_biases": "add_linear_biases",
    "add_mlp_biases": "add_linear_biases",
    "embedding_dropout": "hidden_dropout",
    "export_dtype": "training_dtype",
}


def saved_optimizer(saved: Options) -> str:
    """Return the --optimizer in a flat saved configuration."""
    return str(saved.get("optimizer", "adamw"))


def keeps_moments(before: str, now: str, is_matrix: bool) -> bool:
    """Return whether a parameter keeps its moments when --optimizer changes from `before` to `now`.

    From AdamW to Muon, the parameters that Muon updates with AdamW keep them. From Muon to AdamW
    none do: AdamW's bias correction uses one update count for all parameters, and the moments of
    matrices start now.

    is_matrix: Muon updates the parameter itself.
    """
    return before == now or ((before, now) == ("adamw", "muon") and not is_matrix)


def optimizer_state(state: JsonObject, before: str, now: str) -> JsonObject:
    """Return the saved optimizer state (without moments) that --optimizer=`now` can use.

    After a change of --optimizer, drop the rule's state, and AdamW's update count unless some
    moments are kept.
    """
    saved: JsonObject = state["optimizer"]
    if before == now:
        return saved
    return {
        **saved,
        "updates": saved["updates"] if keeps_moments(before, now, False) else 0,
        "rule": {},
    }


class Difference(NamedTuple):
    """An option whose value differs between the checkpoint and the command line."""

    name: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        saved, current = (abridged(value) or "none" for value in (self.saved, self.current))
        return f"{self.name}: {saved} in the checkpoint, {current} now"


def differences(saved: Options, config: Config, *kinds: str | None) -> list[Difference]:
    """List the differing options of these kinds, in the order of `config/`; None: options without a
    kind.

    Options newer than the checkpoint have their defaults there. `saved` is flat; both are resolved.
    """
    derived = {name: saved[other] for name, other in _FOLLOWED.items() if other in saved}
    if saved.get("rotary_embedding_scale") is not None:
        derived["rotary_base"] = rotary_base(saved["rotary_embedding_scale"])
    derived["norm_placement"] = "both" if saved.get("hybrid_norm") else "pre"
    derived["hybrid_norm"] = False
    saved = {**flatten(Config()), **derived, **with_tuples(saved)}
    for name, usual in (("attention_pattern", "window"), ("rotary_pattern", "rotary")):
        saved[name] = repeating(saved[name], usual)
    is_dense = saved["num_experts"] == config.model.num_experts == 1
    without_effect = OF_EXPERTS if is_dense else ()
    return [
        Difference(name, saved[name], value)
        for name, value in flatten(config).items()
        if saved[name] != value and KINDS.get(name) in kinds and name not in without_effect
    ]


def with_tuples(saved: Options) -> Options:
    """Convert saved lists to tuples, as in a configuration: JSON has no tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }


def check_architecture(saved: Options, config: Config, where: str) -> None:
    """Refuse to resume the checkpoint in folder `where` with another architecture.

    `max_position_embeddings` only counts with learned positions.

    Raises:
        CheckpointError: names every differing option with both values.
    """
    has_table = config.model.use_position_embeddings or saved.get("use_position_embeddings")
    found = differences(saved, config, ARCHITECTURE)
    lines = [
        f"--{difference}"
        for difference in found
        if has_table or difference.name != "max_position_embeddings"
    ]
    if lines:
        raise CheckpointError(
            f"checkpoint {where} was trained with another architecture; write its values or choose another "
            "--experiment_dir:\n  " + "\n  ".join(lines)
        )


def moved_samples(
    saved: Options, config: Config, iterations: int, sets: Sequence[Sequence[Any]] = ()
) -> str | None:
    """Warn, with a fix, if a changed batch size or sequence length repeats or skips samples after N
    iterations.

    The samples of an iteration follow from the current schedule, not from the samples read so far.
    None: no change. sets: samples read per data set, see `data.counts`.
    """
    batch = BatchConfig(**_saved_values(BatchConfig, saved))
    if batch.batch_size is None:  # an older version may have saved it differently
        return None
    before, now = batch_schedule(batch), batch_schedule(config.batch)
    read, counted = before.consumed_samples(iterations), now.consumed_samples(iterations)
    old_length = saved.get("sequence_length", config.batch.sequence_length)
    length = config.batch.sequence_length
    if (read, old_length) == (counted, length) or not iterations:
        return None
    if old_length != length:
        return (
            f"--sequence_length={length}: samples are cut at other places and come in another order, so some tokens "
            f"repeat before the epoch has read them all{_lost(_epochs(sets, config, iterations))}; no schedule avoids "
            f"that; to continue after the last sample read, write --sequence_length={old_length}"
        )
    moved = f"{abs(read - counted):,} samples are {'read again' if counted < read else 'left out'}"
    return (
        f"the first {iterations:,} iterations ended at sample {read:,}, but end at {counted:,} with the current batch "
        f"size: {moved}; to continue after the last sample read, write "
        f'--batch_size_schedule="{continued(before, now, iterations)}" instead of --batch_size'
    )


def moved_rate(saved: Options, config: Config, iterations: int) -> str | None:
    """Warn that a changed schedule changes the learning rate after N iterations, and how to keep
    the old one.

    None: the rate is the same, or no iteration remains.
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
    old = vars(before.learning_rate)
    now = vars(config.learning_rate)
    default = vars(LearningRateConfig())
    changed = [name for name in now if now[name] != old[name]]
    drop = [f"--{name}" for name in changed if old[name] == default[name]]
    # Values that are equal now may derive from a flag that is to be removed.
    keep = [
        f"--{name}={shlex.quote(written(value))}"
        for name, value in old.items()
        if value != default[name] and (name in changed or drop and default[name] is None)
    ]
    ways = [f"write {' '.join(keep)}"] * bool(keep) + [f"leave out {' '.join(drop)}"] * bool(drop)
    return (
        f"the learning rate of iteration {following} is {rates[1]:.3e}, but {rates[0]:.3e} by the schedule of the "
        f"checkpoint" + (f"; to keep that schedule, {' and '.join(ways)}" if ways else "")
    )


def schedule_table(saved: Options, config: Config, iterations: int) -> list[str]:
    """Return a table, as lines, of a schedule changed after N iterations: old and new rate and
    batch size.

    Rows: the next iteration, the quarters of the remaining ones, and the last. Empty if the
    schedules agree on these.
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
        values = (
            f"{place:,}",
            *(f"{rate:.3e}" for rate in rates),
            *(f"{size:,}" for size in sizes),
        )
        rows.append("".join(f"{value:>16}" for value in values))
    if not changes:
        return []
    optimizers = (saved_optimizer(saved), config.optimizer.optimizer)
    kept = ", optimizer state"
    gone = ""
    if optimizers[0] != optimizers[1]:
        matrices = " of matrices" if keeps_moments(*optimizers, is_matrix=False) else ""
        kept, gone = "", f"; gone: the moments{matrices} of --optimizer={optimizers[0]}"
    names = (
        f"{'iteration':>16}{'saved rate':>16}{'rate now':>16}{'saved batch':>16}{'batch now':>16}"
    )
    return [
        f"kept: weights{kept}, the number of iterations done ({iterations:,}){gone}; changed:",
        names,
        *rows,
    ]


def _with_schedule_of(saved: Options, config: Config) -> Config | None:
    """Return `config` with the saved learning rate and batch options; None if these are no valid
    schedule."""
    draft = Draft(
        **flatten(config)
        | _saved_values(LearningRateConfig, saved)
        | _saved_values(BatchConfig, saved)
    )
    if draft.batch_size is None or any(schedule_problems(draft)):
        return None
    return unflatten(vars(draft))


def _saved_values(kind: type[Area], saved: Options) -> Options:
    """Return an area's saved values, with defaults for options that were not saved."""
    return with_tuples({name: saved.get(name, default) for name, default in vars(kind()).items()})


def check_data(loaded: Manifest, config: Config, identity: JsonObject, where: str) -> list[str]:
    """Return the changes of data, tokenizer and seed, one per line, if --allow_data_change=1 allows
    them.

    Args:
        identity: the current data's, see `data.fingerprint.identity`.
        where: the checkpoint's folder, for the message.

    Raises:
        CheckpointError: names the differences with both values.
    """
    changes = (
        [] if config.training.train_iters == 0 else list(data_changes(loaded, config, identity))
    )
    if len(changes) > _MOST_LINES:
        changes = [*changes[:_MOST_LINES], f"and {len(changes) - _MOST_LINES:,} more"]
    if changes and not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"checkpoint {where} was trained with other data: a resumed run would read some of it again and leave some "
            "out. Restore what differs, choose another --experiment_dir, or write --allow_data_change=1:\n  "
            + "\n  ".join(changes)
        )
    return changes


def _epochs(
    sets: Sequence[Sequence[Any]], config: Config, iterations: int, together: int = 1
) -> list[_Epoch]:
    """Return each data set's epoch; nothing if not all samples were counted. sets: see
    `data.counts`.

    together: epochs that are shuffled as one.
    """
    if sum(read for *_, read in sets) != batch_schedule(config.batch).consumed_samples(iterations):
        return []
    return [
        (read // size, read % size, size)
        for size, read in ((row[2] * together, row[-1]) for row in sets)
    ]


def _lost(epochs: Sequence[_Epoch]) -> str:
    """Describe the samples repeated and skipped if the samples or their order change in
    mid-epoch."""
    again = sum(read * (size - read) / size for _, read, size in epochs)
    if not again:
        return ""
    share = again / sum(size - read for _, read, size in epochs)
    return (
        f": about {share:.1%} of the rest of this epoch was already read, and as much is left out"
    )


def _way_to_the_end(epochs: Sequence[_Epoch], config: Config, iterations: int) -> str:
    """Return a hint to wait for the end of the epoch, which loses few samples; "" with several data
    sets or if the run ends first."""
    schedule, (_, read, size) = batch_schedule(config.batch), epochs[0]
    goal = schedule.consumed_samples(iterations) + size - read
    end = bisect.bisect_left(
        range(config.training.train_iters + 1), goal, key=schedule.consumed_samples
    )
    if len(epochs) > 1 or end > config.training.train_iters:
        return ""
    over = schedule.consumed_samples(end) - goal
    return f"; to lose at most {over} samples, keep the old value until the epoch ends (--stop_interval={end})"


def _change_of_samples(difference: Difference, loaded: Manifest, config: Config) -> str | None:
    """Describe a change of a sample option, and its cost; None if it loses nothing."""
    name = difference.name
    line = f"--{difference}"
    both = (loaded.config, vars(config.data))
    if name in ("dataset_source", "seed"):
        return line
    cycles = [some.get("max_epochs") or 1 for some in both if some.get("shuffle") == "full"]
    if config.data.dataset_source == "random" or (name == "max_epochs" and not cycles):
        return None
    sets = loaded.state.get("counts", {"sets": ()})["sets"]
    epochs = _epochs(sets, config, loaded.iteration, math.lcm(*cycles)) if sets else []
    if any(some.get("shuffle_era") for some in both):
        return line  # an order within windows may repeat less
    if not epochs or name == "truncate_documents":
        return line + _lost(epochs)
    # values that all give the same order
    orders = {"skip_first_epoch", *("epoch" if number else "none" for number, *_ in epochs)}
    if not _lost(epochs) or (
        name == "shuffle" and orders == {some.get("shuffle") for some in both}
    ):
        return None
    return line + _lost(epochs) + _way_to_the_end(epochs, config, loaded.iteration)


def data_changes(loaded: Manifest, config: Config, identity: JsonObject) -> Iterator[str]:
    """Yield each difference in the samples that a run reads, with both values. Paths may change."""
    saved = loaded.config
    for difference in differences(saved, config, DATA):
        if (line := _change_of_samples(difference, loaded, config)) is not None:
            yield line
    before = loaded.state.get("data")
    if not before or not before["sets"] or not identity["sets"]:
        return  # random tokens, or a checkpoint from an older version
    split, now = tuple(saved.get("split", config.data.split)), config.data.split
    if not _same_shares(split, now, 1):  # training reads the first documents
        kept = ",".join(f"{share:g}" for share in (split[0], 0, sum(split[1:])))
        hint = f"; --split={kept} leaves training its documents" if now == (1.0, 0.0, 0.0) else ""
        yield f"--{Difference('split', split, now)}{hint}"
    old_schedule = tuple(saved.get("data_weights_schedule", ()))
    new_schedule = config.data.data_weights_schedule
    done, count = loaded.iteration, max(len(before["sets"]), len(identity["sets"]))
    old, old_stages = _data_sets(saved.get("data_path", ()), old_schedule, before, done, count)
    new, new_stages = _data_sets(config.data.data_path, new_schedule, identity, done, count)
    lines = []
    weights = [
        [value for start, shares in stages[1:] if start < done for value in (start, *shares)]
        for stages in (old_stages, new_stages)
    ]
    if len(weights[0]) != len(weights[1]) or not all(map(math.isclose, *weights)):
        lines.append(
            f"--{Difference('data_weights_schedule', old_schedule, new_schedule)}, in the iterations that are done"
        )
    pairs = list(itertools.zip_longest(old, new))
    # A list position from which no sample was read may have another data set, or none.
    read = [any(some and some.is_read for some in pair) for pair in pairs]
    for number, (ours, theirs) in enumerate(pairs):
        if read[number] and not (
            ours and theirs and ours.row == theirs.row and math.isclose(ours.weight, theirs.weight)
        ):
            lines.append(
                f"data set {number}: {ours or 'none'} in the checkpoint, {theirs or 'none'} now"
            )
    yield from lines
    if lines and all(ours.row == theirs.row for ours, theirs in zip(old, new, strict=False)):
        yield _only_later(
            [(theirs or ours).path for ours, theirs in pairs], old_stages, new_stages, done
        )
    if (
        len(old) == 1 < len(new)
        and [sum(some.row[place] for some in new) for place in (0, 1)] == old[0].row[:2]
    ):
        yield (
            f"if these {len(new)} are its shards, join them for the samples of before: prepare_data "
            f"{shlex.join(f'{some.path}.bin' for some in new)} --from_tokens={new[0].row[2]} --output_prefix=<another>"
        )
    for number, pair in enumerate(
        itertools.zip_longest(before.get("masks", ()), identity.get("masks", ()))
    ):
        if read[number] and pair[0] != pair[1]:
            marks = (mark and f"fingerprint {mark}" for mark in pair)
            yield f"--{Difference(f'loss_mask of data set {number}', *marks)}"
    digests = before["tokenizer"], identity["tokenizer"]
    if None not in digests and digests[0] != digests[1]:
        files = (
            f"{saved.get('tokenizer_file')} (digest {digests[0]})",
            f"{config.data.tokenizer_file} ({digests[1]})",
        )
        yield f"--tokenizer_file: {files[0]} in the checkpoint, {files[1]} now"


def _only_later(
    paths: Sequence[str], old: Sequence[WeightStage], new: Sequence[WeightStage], iterations: int
) -> str:
    """Return flags that keep the weights of completed iterations, and use the new ones
    afterwards."""
    stages = [stage for stage in old if stage.start < iterations]
    for stage, following in itertools.zip_longest(new, new[1:]):
        if following is None or following.start > iterations:
            stages.append(WeightStage(max(stage.start, iterations), stage.weights))
    schedule = " ".join(f"{start}:{'/'.join(map(written, weights))}" for start, weights in stages)
    return f'to change only what follows, write --data_path {shlex.join(paths)} --data_weights_schedule="{schedule}"'


class _DataSet(NamedTuple):
    """A data set of a run."""

    row: list[Any]  # of `data.fingerprint.identity`
    weight: float
    path: str
    is_read: bool  # in the completed iterations

    def __str__(self) -> str:
        documents, tokens, dtype, fingerprint = self.row
        share = f", {100 * self.weight:.4g}% of the samples" if self.weight != 1 else ""
        return f"{self.path} ({documents:,} documents, {tokens:,} tokens, {dtype}, fingerprint {fingerprint}{share})"


def _data_sets(
    data_path: Sequence[str],
    schedule: Sequence[str],
    identity: JsonObject,
    iterations: int,
    count: int,
) -> tuple[list[_DataSet], list[WeightStage]]:
    """Return a run's data sets and weight stages, with weight 0 for data sets missing up to
    `count`.

    If a manifest contradicts itself, paths and weights are unknown.
    """
    number = len(identity["sets"])
    paths = ["a data set"] * number
    stages: Sequence[WeightStage] = [WeightStage(0, (1.0 / number,) * number)]
    with contextlib.suppress(RunError):
        found = weight_stages(data_path, schedule)
        if len(found[0].weights) == number:
            paths, stages = [path for _, path in weighted_paths(data_path)], found
    padded = [
        WeightStage(start, (*weights, *[0.0] * (count - number))) for start, weights in stages
    ]
    past = [weights for start, weights in padded if start < max(iterations, 1)]
    are_read = map(any, zip(*past, strict=True))
    return list(map(_DataSet, map(list, identity["sets"]), past[0], paths, are_read)), padded


def other_evaluations(loaded: Manifest, config: Config, identity: JsonObject) -> Iterator[str]:
    """Yield a warning for each phase whose evaluation data changed since the checkpoint; training
    continues."""
    shares = _same_shares(loaded.config.get("split", config.data.split), config.data.split)
    for phase, iterations in (("validation", "validation_iters"), ("test", "test_iters")):
        old, new = (
            (data or {}).get("evaluated", {}).get(phase)
            for data in (loaded.state.get("data"), identity)
        )
        is_other = old != new or (
            new is None and not shares and config.data.dataset_source != "random"
        )
        if is_other and loaded.config.get(iterations) and getattr(config.training, iterations):
            flag = config.data.path_flag(phase) if new or shares else "split"
            yield f"--{flag}: other {phase} data than before: {phase} losses are not comparable with earlier ones"


def wrong_frozen_layers(loaded: Manifest) -> Iterator[str]:
    """Yield a warning if the version that saved a checkpoint computed frozen layers with wrong
    weights.

    It kept a frozen weight's 8-bit form, but not the form's delayed scale, until a gather; then it
    also missed the weight's magnitude, which now counts in each iteration like a trained weight's.
    """
    scales = loaded.state["optimizer"].get("scales", {})
    wrong = [
        name
        for name, (_, (scale, seen), _) in scales.items()
        if scale != 1 and all(age for age, _ in seen)
    ]
    if wrong:
        yield (
            "--fp8=delayed: an earlier version computed with wrong weights in frozen layers "
            f"({abridged(tuple(wrong))}), from the second iteration in which they were frozen: iteration 2, if they "
            "always were. From here on these weights are right, but the others were trained with the wrong ones; to "
            "undo that, start again, or resume a checkpoint from before that iteration"
        )


def _same_shares(left: Sequence[float], right: Sequence[float], phases: int = 3) -> bool:
    """Return whether two values of --split give each of the first phases the same share."""
    pairs = itertools.zip_longest(left, right, fillvalue=0.0)
    return all(
        math.isclose(a * sum(right), b * sum(left)) for a, b in itertools.islice(pairs, phases)
    )
