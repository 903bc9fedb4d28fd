"""Set model options from a preset or from pretrained weights instead of flags.

With pretrained weights, two flags decide whether the checkpoint or the command line sets the
options:

    --use_pretrained_config  --ignore_pretrained_config
    1                        0       the checkpoint fills in the options; a flag that contradicts it is an error
    1                        1       the checkpoint fills in the options; flags win if the shapes fit
    0                        0       flags and defaults set the options; a difference from the checkpoint is an error
    0                        1       flags and defaults set the options; the shapes must fit

Options that do not change the meaning of the weights may always differ: see `compatibility.FREE`.
Once the experiment directory has a checkpoint, that model is used, and a resumed run no longer
needs the pretrained folder.

This happens during parsing, so that validation, banner and dry run see the model. Reading a Hugging
Face folder imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.checkpoint.compatibility import FREE, Difference
from megatron_lite.checkpoint.rotation import again
from megatron_lite.config import ModelConfig, Options, unflatten
from megatron_lite.config.source import PRESETS
from megatron_lite.config.values import FLAGS, parse_list, parse_value, written
from megatron_lite.errors import CheckpointError, UsageError
from megatron_lite.huggingface import model_folder
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.rope_keys import ROPE_OPTIONS
from megatron_lite.validation import examine
from megatron_lite.validation.rules import Note

if TYPE_CHECKING:
    from megatron_lite.checkpoint.manifest import Manifest

# Options that only affect initial weights.
INITIAL = frozenset(name for name in FREE if "init" in name)
# Option -> options that depend on its value: if a flag changes it, the model's values for these are
# dropped.
FOLLOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_dropout": ("embedding_dropout",),
        "init_method_std": tuple(
            sorted(name for name in FREE if name.startswith("init_method_std_"))
        ),
        "rotary_base": ("rotary_embedding_scale",),
        "rotary_embedding_scale": ("rotary_base",),
        "rope_type": ROPE_OPTIONS,
        "hybrid_norm": ("norm_placement",),
        "norm_placement": ("hybrid_norm",),
    }
)


class Stated(NamedTuple):
    """The model that a checkpoint describes."""

    where: str  # path of the checkpoint
    values: Options  # model options by name
    model_type: str | None  # Hugging Face's name for the architecture, if any


def with_source(given: Options) -> tuple[Options, tuple[Note, ...]]:
    """Return the given options plus the preset's or the pretrained checkpoint's, and notes on their
    source.

    Raises:
        CheckpointError: if the checkpoint cannot be used, or contradicts the given options.
    """
    typed, notes = with_preset(given)
    path = typed.get("pretrained_checkpoint_path")
    if path is None:
        return _with_export_type(_with_own_positions(typed), None), notes
    if "://" in path:
        from megatron_lite.corpus.remote_copy import cache_of, local_copy

        cache = cache_of(typed.get("dataset_cache"), typed.get("experiment_dir"))
        own = _own_manifest(typed)
        path = typed["pretrained_checkpoint_path"] = local_copy(
            path, "pretrained_checkpoint_path", cache, own[1].state.get("pinned", {}) if own else {}
        )
    loads = given.get("load_parts") != ("architecture",)
    if loads and given.get("resize_vocabulary") != "random":
        # Only typed options: the folder's own values are no reason to warn.
        reason = "has no effect with --pretrained_checkpoint_path, because no weight is initialized"
        notes += tuple(
            Note(f"--{name} {reason}", is_warning=True) for name in sorted(INITIAL & given.keys())
        )
    values, found = _with_stated_model(typed, Path(path))
    if found is not None:
        notes += (Note(f"the architecture is taken from {found.where}"),)
        values = _with_export_type(values, found.model_type)
    if values.get("pretrained_adapter") is not None:
        values = _with_adapter(values)
    tokenizer = Path(path, "tokenizer.json")
    if (
        loads
        and values.get("dataset_source") != "random"
        and "tokenizer_file" not in values
        and tokenizer.is_file()
    ):
        values = {**values, "tokenizer_file": str(tokenizer)}
        notes += (
            Note(f"the tokenizer is that of the pretrained model: --tokenizer_file={tokenizer}"),
        )
    return values, notes


def with_preset(given: Options) -> tuple[Options, tuple[Note, ...]]:
    """Return the given options plus their --model preset's, and a note that lists the preset."""
    name = given.get("model")
    if name is None:
        return dict(given), ()
    values: Options = {}
    for option, text in (words.split("=") for words in PRESETS[name].split()):
        flag = FLAGS[option]
        values[option] = parse_list(flag, [text]) if flag.is_list else parse_value(flag, text)
    preset = _brought_along(values, given)
    flags = " ".join(f"--{option}={written(value)}" for option, value in preset.items())
    overridden = [f"--{option}={written(given[option])}" for option in preset if option in given]
    others = f"; overridden: {' '.join(overridden)}" if overridden else ""
    return {**preset, **given}, (Note(f"--model={name} stands for {flags}{others}"),)


def _brought_along(values: Options, typed: Options) -> Options:
    """Return a model's options except those that depend on a typed option with another value.

    The length that typed rotary positions stretch is the model's own, even if a longer one is
    typed, too.
    """
    changed = {first for first in FOLLOW if first in typed and typed[first] != values.get(first)}
    dropped = {name for first in changed for name in FOLLOW[first]}
    kept = {name: value for name, value in values.items() if name not in dropped}
    if (
        "rope_type" in changed
        and typed["rope_type"] in ("llama3", "yarn")
        and "rope_factor" in typed
    ):
        kept["rope_original_max_position_embeddings"] = values["max_position_embeddings"]
    return kept


def _with_stated_model(given: Options, folder: Path) -> tuple[Options, Stated | None]:
    """Add the pretrained checkpoint's model to the options; return both (no model if only flags set
    the options)."""
    use = given.get("use_pretrained_config", True)
    ignore = given.get("ignore_pretrained_config", False)
    own = _own_values(given)
    if not use and (ignore or own is not None):  # resuming compares with the saved values
        return given, None
    kind = given.get("pretrained_checkpoint_type")
    weights = given.get("load_parts") != ("architecture",)
    found = own or _stated(folder, kind, weights)
    where, values, _ = found
    theirs = vars(model_folder.resolved_model(values, where))
    # A model without this value does not specify how norm weights are stored, so the flag may
    # choose.
    free = FREE | ({"zero_centered_normalization"} - values.keys())
    if given.get("resize_vocabulary"):
        free |= {"vocab_size"}
    typed = {name: given[name] for name in model_folder.MODEL_OPTIONS if name in given}
    filled = {**_brought_along(values, typed), **given} if use else given
    if not ignore:
        _refuse(_differences(filled, theirs, (typed if use else theirs).keys() - free), where, use)
    return filled, found if use else None


def _with_export_type(values: Options, model_type: str | None) -> Options:
    """Set the export type to the model's own architecture, if it supports the options and none was
    typed. With adapters, whose number depends on it, to any that does."""
    if "export_model_type" in values or (model_type is None and not values.get("lora_rank")):
        return values
    with contextlib.suppress(UsageError, CheckpointError):
        return {**values, "export_model_type": check_exportable(_model_of(values), model_type)}
    return values


def _model_of(values: Options) -> ModelConfig:
    """Return the resolved model, in any layout of ranks."""
    options = {name: values[name] for name in model_folder.MODEL_OPTIONS if name in values}
    return model_folder.resolved_model(options, "the command line")


def _with_adapter(values: Options) -> Options:
    """Add what the folder of --pretrained_adapter states.

    Raises:
        CheckpointError: if a typed option contradicts it.
    """
    from megatron_lite.huggingface.adapter_folder import options_of

    folder = Path(values["pretrained_adapter"])
    try:
        stated = options_of(folder, _model_of(values), values.get("export_model_type"))
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained_adapter={error}") from None
    differing = [
        Difference(name, value, values[name])
        for name, value in stated.items()
        if name in values and name != "lora_targets" and values[name] != value
    ]
    if differing:
        lines = "\n  ".join(f"--{difference}" for difference in differing)
        raise CheckpointError(
            f"the flags contradict the adapters of {folder}; leave these out:\n  {lines}"
        )
    return {**stated, **values}


def _stated(folder: Path, kind: str | None, weights: bool) -> Stated:
    """Return the pretrained checkpoint's model. weights: whether its weights are needed, too."""
    try:
        if model_folder.source_folders(folder, kind) == [("huggingface", folder)]:
            if weights:
                model_folder.weight_files(folder)  # refuse adapters and pickles now
            return Stated(str(folder), *model_folder.hugging_face_values(folder))
        from megatron_lite.huggingface.load_pretrained import open_source

        with again(lambda: open_source(folder, kind)) as source:
            if source.kind == "huggingface":
                return Stated(str(source.folder), *model_folder.hugging_face_values(source.folder))
            return Stated(str(source.folder), vars(source.model), source.model_type)
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained_checkpoint_path: {error}") from None


def _own_manifest(given: Options) -> tuple[Path, Manifest] | None:
    """Return the folder and the manifest of the run's newest checkpoint, or None if none is
    readable."""
    root = Path(given.get("experiment_dir") or "") / "checkpoints"
    # writing to the directory will report an error
    if not given.get("experiment_dir") or not os.path.isdir(root):
        return None
    from megatron_lite.checkpoint.resume import Choice, find

    return Choice(tuple(find(root))).newest


def _own_values(given: Options) -> Stated | None:
    """Return the model of the run's newest checkpoint, or None if no checkpoint is readable."""
    if (newest := _own_manifest(given)) is None:
        return None
    where, config = str(newest[0]), newest[1].config
    return Stated(
        where, model_folder.checkpoint_values(config, where), model_folder.saved_model_type(config)
    )


def _with_own_positions(given: Options) -> Options:
    """Add the number of learned positions in the run's newest checkpoint: older versions defaulted
    to 2,048."""
    is_learned = given.get("use_position_embeddings", not given.get("use_rotary_embeddings", False))
    if not is_learned or "max_position_embeddings" in given or (own := _own_values(given)) is None:
        return given
    return {"max_position_embeddings": own.values.get("max_position_embeddings"), **given}


def _differences(ours: Options, theirs: Options, names: Collection[str]) -> list[Difference]:
    """Return the differences in the options `names`; invalid values in `ours` are reported
    elsewhere."""
    resolved, problems = examine(unflatten(dict(ours)), 1)
    wrong = {name for problem in problems for name in problem.names}
    values = vars(resolved.model)
    positions = values["use_position_embeddings"] or theirs["use_position_embeddings"]
    found = []
    for name in (
        name
        for name in theirs
        if name in names and (positions or name != "max_position_embeddings")
    ):
        now = ours[name] if name in wrong and name in ours else values[name]
        both_numbers = isinstance(now, float) and isinstance(theirs[name], float)
        # The rotary base may be given by its logarithm.
        same = (
            math.isclose(theirs[name], now, rel_tol=1e-9) if both_numbers else theirs[name] == now
        )
        if not same and (now is not None or name not in wrong):
            found.append(Difference(name, theirs[name], now))
    return found


def _refuse(differences: list[Difference], where: str, filled: bool) -> None:
    if not differences:
        return
    fix = "write its values, or --ignore_pretrained_config=1 to compare only the shapes"
    if filled:
        fix = "leave these flags out, or write --ignore_pretrained_config=1 to let flags win if the weights fit"
    if any(difference.name == "vocab_size" for difference in differences):
        fix += ", or --resize_vocabulary=mean for other tokens"
    raise CheckpointError(
        f"the flags contradict the model of the pretrained checkpoint {where}; {fix}:\n  "
        + "\n  ".join(f"--{difference}" for difference in differences)
    )
