"""Where a model's options come from that nobody typed: a preset, or pretrained weights.

With pretrained weights it is two flags that say whose word counts:

    --use_pretrained_config  --ignore_pretrained_config
    1                        0       the checkpoint fills in the options; a flag that contradicts it is an error
    1                        1       the checkpoint fills in the options; flags win, and the shapes must fit
    0                        0       flags and defaults alone; where they differ from the checkpoint is an error
    0                        1       flags and defaults alone, and the shapes must fit

Some options say nothing about the weights and may always differ: see `FREE`. Once the experiment directory holds a
checkpoint, that is what speaks: a resumed run needs the pretrained folder no more.

This happens while the command line is parsed, so that validation, banner and dry run see the model; so no torch is
imported for a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_lite.checkpoint.compatibility import Difference
from megatron_lite.config import unflatten
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.values import written
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface import folder_kind, model_options
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.validation import examine
from megatron_lite.validation.messages import Note

# What weights mean does not depend on these: noise, initial values, precision, padding.
FREE = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "embedding_dropout",
        "init_method_std",
        "init_method_std_embed",
        "init_method_std_qkv",
        "init_method_std_attn_proj",
        "init_method_std_mlp_1",
        "init_method_std_mlp_2",
        "layer_norm_init_range",
        "random_bias_init",
        "full_precision_residual",
        "attention_softmax_in_fp32",
        "make_vocab_size_divisible_by",
    }
)
# Options that follow from another one, or belong to its value: where that is changed, those brought along go, too.
FOLLOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_dropout": ("embedding_dropout",),
        "init_method_std": tuple(sorted(name for name in FREE if name.startswith("init_method_std_"))),
        "rotary_base": ("rotary_embedding_scale",),
        "rotary_embedding_scale": ("rotary_base",),
        "rope_type": tuple(
            name for name in model_options.MODEL_OPTIONS if name.startswith("rope_") and name != "rope_type"
        ),
    }
)


class Stated(NamedTuple):
    """The model that a checkpoint states."""

    where: str  # the checkpoint is
    values: dict[str, Any]  # of options of the model
    model_type: str | None  # Hugging Face's name of its architecture, if it has one


def with_source(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The options that were given, and those that they bring along: of a preset, of the pretrained checkpoint's model.

    The notes say which are used, and from where.

    Raises:
        CheckpointError: if the checkpoint cannot be used, or contradicts what was given.
    """
    typed, notes = with_preset(given)
    path = typed.get("pretrained_checkpoint_path")
    if path is None:
        return typed, notes
    values, found = _with_stated_model(typed, Path(path))
    if found is not None:
        notes = (*notes, Note(f"the model is that of {found.where}"))
        values = _with_export_type(values, found.model_type)
    return values, notes


def with_preset(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The options that were given and those that their --model stands for, with a note on the latter."""
    name = given.get("model")
    if name is None:
        return dict(given), ()
    preset = _brought_along(PRESETS[name], given)
    flags = " ".join(f"--{option}={written(value)}" for option, value in preset.items())
    overridden = [f"--{option}={written(given[option])}" for option in preset if option in given]
    others = f"; overridden: {' '.join(overridden)}" if overridden else ""
    return {**preset, **given}, (Note(f"--model={name} stands for {flags}{others}"),)


def _brought_along(values: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a model's options beside those that were typed."""
    changed = {first for first in FOLLOW if first in typed and typed[first] != values.get(first)}
    dropped = {name for first in changed for name in FOLLOW[first]}
    return {name: value for name, value in values.items() if name not in dropped}


def _with_stated_model(given: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Stated | None]:
    """With the model of the pretrained checkpoint, and what it states; None: the flags speak."""
    use, ignore = given.get("use_pretrained_config", True), given.get("ignore_pretrained_config", False)
    own = _own_values(given)
    if not use and (ignore or own is not None):  # resuming compares with what was saved
        return given, None
    kind, weights = given.get("pretrained_checkpoint_type"), given.get("load_pretrained_weights", True)
    found = own or _stated(folder, kind, weights)
    where, values, _ = found
    theirs = model_options.resolved_values(values, where)
    # Theirs are stored as they are multiplied; what ours are stored as is then a choice.
    free = FREE | ({"zero_centered_normalization"} - values.keys())
    typed = {name: given[name] for name in model_options.MODEL_OPTIONS if name in given}
    if not use:
        _refuse(_differences(given, theirs, theirs.keys() - free), where, use)
        return given, None
    filled = {**_brought_along(values, typed), **given}
    if not ignore:
        _refuse(_differences(filled, theirs, typed.keys() - free), where, use)
    return filled, found


def _with_export_type(values: dict[str, Any], model_type: str | None) -> dict[str, Any]:
    """Exports are of the architecture that the model came in, if it can still express it and no other is asked for."""
    if model_type is None or "export_model_type" in values:
        return values
    resolved, problems = examine(unflatten(dict(values)), 1)
    if not problems:
        with contextlib.suppress(UsageError):
            return {**values, "export_model_type": check_exportable(resolved.model, model_type)}
    return values


def _stated(folder: Path, kind: str | None, weights: bool) -> Stated:
    """What the pretrained checkpoint states. `weights`: they are needed."""
    try:
        if folder_kind.kind_of(folder, kind) == "huggingface":
            if weights:
                folder_kind.weight_files(folder)  # noticed now if it is an adapter, or a pickle
            return Stated(str(folder), *model_options.hugging_face_values(folder))
        from megatron_lite.huggingface.open_source import open_source

        with open_source(folder, "distributed") as source:
            return Stated(str(source.folder), source.values(), source.model_type)
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained_checkpoint_path: {error}") from None


def _own_values(given: Mapping[str, Any]) -> Stated | None:
    """The same of the newest checkpoint of the run itself; None: it has none, or none that can be read."""
    directory = given.get("experiment_dir")
    root = None if directory is None else Path(directory) / "checkpoints"
    try:
        if root is None or not root.is_dir():
            return None
    except OSError:
        return None  # whoever has to write there will say so
    from megatron_lite.checkpoint.sharded import newest_config

    newest = newest_config(root)
    if newest is None:
        return None
    where = str(root / str(newest[0]))
    return Stated(where, model_options.checkpoint_values(newest[1], where), model_options.saved_model_type(newest[1]))


def _differences(ours: Mapping[str, Any], theirs: dict[str, Any], names: Collection[str]) -> list[Difference]:
    """Of these options those that differ. What else is wrong with ours is said elsewhere."""
    resolved, problems = examine(unflatten(dict(ours)), 1)
    wrong = {name for problem in problems for name in problem.names}
    values = model_options.model_options(resolved)
    positions = values["use_position_embeddings"] or theirs["use_position_embeddings"]
    found = []
    for name in (name for name in theirs if name in names and (positions or name != "max_position_embeddings")):
        now = ours[name] if name in wrong and name in ours else values[name]
        if not _same(theirs[name], now) and (now is not None or name not in wrong):
            found.append(Difference(name, theirs[name], now))
    return found


def _same(saved: Any, current: Any) -> bool:
    """Numbers may come through a logarithm (the rotary base)."""
    if isinstance(saved, float) and isinstance(current, float):
        return math.isclose(saved, current, rel_tol=1e-9)
    return bool(saved == current)


def _refuse(differences: list[Difference], where: str, filled: bool) -> None:
    if not differences:
        return
    fix = (
        "leave them out, and its values are used; or let the flags win, where the weights fit them: "
        "--ignore_pretrained_config=1"
        if filled
        else "give its values, or compare nothing but shapes: --ignore_pretrained_config=1"
    )
    raise CheckpointError(
        f"the pretrained checkpoint {where} has another model than the flags; {fix}:\n  "
        + "\n  ".join(f"--{difference}" for difference in differences)
    )
