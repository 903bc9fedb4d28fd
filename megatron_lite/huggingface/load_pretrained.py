"""Open a folder's weights and start a model from them: every rank reads only its own shards'
elements."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.compatibility import (
    check_architecture,
    keeps_moments,
    optimizer_state,
    saved_optimizer,
)
from megatron_lite.checkpoint.manifest import MOMENTS
from megatron_lite.checkpoint.rotation import pinned
from megatron_lite.config import Config, ModelConfig
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, DamagedError, RunError, shorten
from megatron_lite.huggingface.folder_source import VOCABULARY, HuggingFaceSource
from megatron_lite.huggingface.merged_source import MergedSource
from megatron_lite.huggingface.model_folder import (
    ADAPTER_NAME,
    base_of,
    read_object,
    source_folders,
)
from megatron_lite.huggingface.weight_source import (
    ADVICE,
    CheckpointSource,
    Shapes,
    WeightSource,
    read_whole,
)
from megatron_lite.model.adapters import is_of_adapter
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.parameter import ParameterSpec
from megatron_lite.tiles import Tile
from megatron_lite.zero.finite import not_finite
from megatron_lite.zero.multi_stage import MultiStage


def open_one(
    folder: Path,
    kind: str,
    model: ModelConfig | None = None,
    weights: str = "raw",
    state: bool = False,
    base: Path | None = None,
) -> WeightSource:
    """Open exactly this folder; see `open_source`. model: the resolved one to fill; None: the one
    in the files.

    Raises:
        DamagedError: if the folder is a damaged checkpoint, or an unusable Hugging Face folder.
        CheckpointError: if it cannot be used.
    """
    if kind == "distributed":
        source = CheckpointSource(folder, weights == "average", state)
        options = source.content.config
        if not options.get("lora_rank"):
            return source
        if base is not None:
            return _merged(folder, source, base)
        named = (options.get(f"pretrained_checkpoint_{what}") for what in ("path", "type"))
        return _merged(folder, source, *named)
    if weights == "average":
        raise CheckpointError(
            f"{folder}: a Hugging Face folder has one set of weights; leave --weights=average out"
        )
    try:
        return HuggingFaceSource(folder, model)
    except CheckpointError as error:
        raise DamagedError(str(error).removeprefix(f"{folder}: ")) from None


def _merged(
    folder: Path, adapters: CheckpointSource | None, stated: object, kind: str | None = None
) -> WeightSource:
    """Return the adapters in a folder, merged into their model. adapters: a run's; None: peft's.
    stated: the model's folder."""
    model, base = None if adapters is None else adapters.model, base_of(folder, stated)
    try:
        return MergedSource(folder, _open_model(base, kind, model=model), adapters)
    except RecursionError:
        raise CheckpointError(
            f"{folder}: it holds adapters to {base}, which leads back to them; convert_checkpoint takes the folder "
            "of the model itself as --base"
        ) from None


def open_source(
    folder: Path,
    kind: str | None = None,
    weights: str = "raw",
    whole: bool = False,
    state: bool = False,
    model: ModelConfig | None = None,
    base: Path | None = None,
) -> WeightSource:
    """Open a Hugging Face folder, a checkpoint, or the newest good one in a folder of them or an
    experiment directory. Adapters are merged into their model.

    Args:
        kind: one of model_folder.KINDS; None: any.
        weights: raw, or average: a checkpoint's running averages.
        whole: among several, also read the values: damaged checkpoints are skipped with a warning,
            as on resume.
        state: moments and averages will also be read; see `CheckpointSource`.
        model: the resolved one to fill; None: the one in the files.
        base: the folder of the model that adapters belong to; None: where they say.

    Raises:
        CheckpointError: if there is none; suggests a fix.
        RotatedError: if a live run deletes what is read; see `rotation.again`.
    """
    if (folder / ADAPTER_NAME).is_file():
        if weights == "average":
            raise CheckpointError(
                f"{folder}: a folder of peft has one set of adapters; leave --weights=average out"
            )
        stated = read_object(folder, ADAPTER_NAME).get("base_model_name_or_path")
        return _merged(folder, None, base or stated)
    return _open_model(folder, kind, weights, whole, state, model, base)


def _open_model(
    folder: Path,
    kind: str | None,
    weights: str = "raw",
    whole: bool = False,
    state: bool = False,
    model: ModelConfig | None = None,
    base: Path | None = None,
) -> WeightSource:
    """See `open_source`. A folder of peft is no model: it may name itself as its own."""
    found, problems = with_state(source_folders(folder, kind), state or weights == "average"), []
    for own_kind, path in found:
        check = pinned(path)
        try:
            source = open_one(path, own_kind, model, weights, state, base)
            if len(found) == 1 or not whole or (problem := source.damage()) is None:
                return source
            source.close()
        except DamagedError as error:
            problem = str(error)
        check()
        problems.append(f"{path.relative_to(folder)}: {problem}" if len(found) > 1 else problem)
        if len(found) > 1:
            what = "checkpoint" if own_kind == "distributed" else "export"
            files.logger.warning(
                "%s %s: %s; skipped, looking for an older one", what, path, RunError(problem)
            )
    raise unusable(folder, found, problems)


def with_state(found: list[tuple[str, Path]], needed: bool) -> list[tuple[str, Path]]:
    """Return only the checkpoints if a state that exports lack is needed, else all folders."""
    return [pair for pair in found if pair[0] == "distributed" or not needed] or found


def unusable(folder: Path, found: list[tuple[str, Path]], problems: list[str]) -> CheckpointError:
    """Return the error for a folder whose checkpoints and exports are all damaged."""
    if len(found) == 1 and found[0][0] == "huggingface":
        return CheckpointError(f"{found[0][1]}: {problems[0]}")
    return CheckpointError(f"{folder}: no usable checkpoint: {shorten(problems)}; restore one")


T = TypeVar("T")
FLAG = "--pretrained_checkpoint_path"


def open_pretrained(
    config: Config, shapes: Shapes, distributed: Distributed, report: Callable[[str], None]
) -> WeightSource:
    """Open and check the source named by the flags, before memory is allocated. Collective.

    Args:
        shapes: of the model's parameters.
        report: called with a line for each newer, damaged checkpoint.

    Raises:
        CheckpointError: on every rank, if the source cannot be used or does not fit the model.
        RotatedError: on every rank, if a live run deletes what is read; see `rotation.again`.
    """
    assert config.source.pretrained_checkpoint_path is not None
    folder = Path(config.source.pretrained_checkpoint_path)
    wanted = config.source.pretrained_checkpoint_type
    flags = {
        "--load_parts": bool({"optimizer", "step"} & {*config.source.load_parts}),
        "--allow_partial_checkpoint": config.source.allow_partial_checkpoint,
    }
    need_state = [flag for flag, given in flags.items() if given]
    found = with_state(
        _together(distributed, lambda: source_folders(folder, wanted)), bool(need_state)
    )
    found = [
        (kind, Path(path))
        for kind, path in distributed.broadcast_object([(k, str(p)) for k, p in found])
    ]
    if need_state and found[0][0] != "distributed":
        raise CheckpointError(
            f"{need_state[0]}: {folder} is a Hugging Face folder, not a checkpoint, and holds no optimizer state; "
            "leave the flag out"
        )
    problems = []
    for kind, path in found:
        check = pinned(path)
        look = functools.partial(_open_and_look, path, kind, config, shapes, distributed)
        source, own_problem = _together(distributed, look)
        problem = next(
            (text for text in distributed.gather_objects(own_problem) if text is not None), None
        )
        if source is not None and problem is None:
            return source
        if source is not None:
            source.close()
        _together(distributed, check)
        problems.append(
            f"{path.relative_to(folder)}: {problem}" if len(found) > 1 else str(problem)
        )
        if len(found) > 1:
            report(f"{FLAG}: {path}: {problem}; skipped, looking for an older one")
    raise CheckpointError(f"{FLAG}: {unusable(folder, found, problems)}")


def _open_and_look(
    path: Path, kind: str, config: Config, shapes: Shapes, distributed: Distributed
) -> tuple[WeightSource | None, str | None]:
    """Return the source, or None if its manifest is damaged, and any damage that this rank
    found."""
    try:
        source = open_one(path, kind, config.model, state="optimizer" in config.source.load_parts)
    except DamagedError as error:
        return None, str(error)
    if isinstance(source, MergedSource) and {"optimizer", "step"} & {*config.source.load_parts}:
        raise CheckpointError(
            f"{path}: it holds adapters, whose optimizer state and iterations are not their model's; write "
            "--load_parts=model"
        )
    if kind == "distributed":
        # The command line was completed from the newest checkpoint, and another may be the newest
        # now.
        theirs, own = {**vars(source.model), **vars(config.adapters)}, vars(config.model)
        if config.source.resize_vocabulary:
            theirs = {**theirs, "vocab_size": own["vocab_size"]}
        if config.source.ignore_pretrained_config:  # norm weights are stored that way anyway
            theirs = {**own, "zero_centered_normalization": theirs["zero_centered_normalization"]}
        check_architecture(theirs, config, str(source.folder))
    if config.source.resize_vocabulary:
        shapes = {
            name: (source.model.vocab_size, *shape[1:]) if name in VOCABULARY else shape
            for name, shape in shapes.items()
        }
    if isinstance(source, CheckpointSource) and config.source.allow_partial_checkpoint:
        source.check(
            {name: shape for name, shape in shapes.items() if name in source.content.parameters},
            partial=True,
        )
    else:
        source.check(shapes)
    return source, source.damage(distributed.rank, distributed.world_size)


def _together(distributed: Distributed, action: Callable[[], T]) -> T:
    """Run an action on all ranks; its errors name the flag."""

    def named() -> T:
        try:
            return action()
        except CheckpointError as error:
            raise type(error)(f"{FLAG}: {error}") from None

    return together(distributed, named)


def load_weights(
    source: WeightSource,
    model: MultiStage,
    distributed: Distributed,
    missing: frozenset[str] = frozenset(),
    resize: str | None = None,
) -> None:
    """Fill the weight shards one by one; padding becomes zero, and parameters that the source lacks
    do not change.

    resize: the value of --resize_vocabulary; with `random`, rows that the source lacks do not
    change.

    Raises:
        CheckpointError: on every rank, if a file can no longer be read or contains a value that is
            not finite.
    """

    def fill() -> None:
        for _, part in model.parts():
            shard = part.read("weights")
            if not (missing or resize):
                shard.zero_()
            for spec, tile in part.layout.tiles(part.rank):
                target = shard[tile.offset : tile.end]
                if spec.name in missing:
                    continue
                if resize and spec.name in VOCABULARY:
                    _read_rows(source, spec, tile, target, resize == "mean")
                else:
                    source.read(spec.name, tile, target)
            part.write("weights", shard)
        model.invalidate()

    _together(distributed, fill)
    if distributed.agree_max(int(not_finite(model) is not None)):
        raise CheckpointError(
            f"{FLAG}: {source.folder}: some weights are not finite, so training cannot start from them; {ADVICE}"
        )


def _read_rows(
    source: WeightSource, spec: ParameterSpec, tile: Tile, target: Tensor, with_mean: bool
) -> None:
    """Read a source's vocabulary rows; `with_mean`, fill the missing rows with the mean of all
    rows.

    tile: a run, because tensor-parallel ranks have whole rows.
    """
    rows, width = source.model.vocab_size, spec.shape[1]
    kept = min(max(rows * width - tile.first, 0), tile.numel)
    source.read(spec.name, Tile.run(tile.first, kept), target[:kept])
    if with_mean and kept < tile.numel:  # on a few ranks
        values = read_whole(source, spec.name, (rows, width))
        columns = torch.arange(tile.first + kept, tile.first + tile.numel) % width
        target[kept:].copy_(values.mean(0, dtype=torch.float64)[columns])


def partly(source: WeightSource, model: MultiStage) -> tuple[frozenset[str], str | None]:
    """Return the parameters that a source lacks, and a line that names these and the source's
    unused ones."""
    if not isinstance(source, CheckpointSource):
        return frozenset(), None
    ours = [spec.name for spec in model.specs()]
    missing = [name for name in ours if name not in source.content.parameters]
    others = sorted(source.content.parameters.keys() - set(ours))
    if not missing and not others:
        return frozenset(), None
    lists = (
        ("initialized, because it lacks them", missing),
        ("not used, because the model lacks them", others),
    )
    line = "; ".join(
        f"{len(names)} parameters {what}: {shorten(names)}" for what, names in lists if names
    )
    return frozenset(missing), f"--allow_partial_checkpoint=1: {source.folder}: {line}"


def load_moments(
    source: WeightSource, model: MultiStage, distributed: Distributed, optimizer: str
) -> tuple[dict[str, Any], str | None]:
    """Fill the optimizer's moments; those that the current `optimizer` cannot use stay zero.

    Returns:
        The rest of the optimizer state, for `Optimizer.load_rule`, and a line about the moments
        that stay zero, if any.

    Raises:
        CheckpointError: on every rank, if no moments can be used or a file can no longer be read.
    """
    assert isinstance(source, CheckpointSource), "open_pretrained refuses other sources"
    content, before = source.content, saved_optimizer(source.content.config)
    wanted = [
        (kind, slot.spec)
        for _, part in model.all_parts()
        for kind in part.kinds()
        for slot in part.layout.slots
        if kind in MOMENTS and part.has(kind, slot.spec)
    ]
    fitting = {
        (kind, spec.name)
        for kind, spec in wanted
        if keeps_moments(before, optimizer, bool(spec.matrix_rows))
    }
    kept = fitting & {
        (kind, name) for name, saved in content.parameters.items() for kind in saved.slices
    }

    def fill() -> None:
        for _, part in model.parts():
            for kind in part.kinds():
                for spec, tile in part.layout.tiles(part.rank):
                    if (kind, spec.name) in kept:
                        source.read_state(
                            spec.name, kind, tile, part.read(kind)[tile.offset : tile.end]
                        )

    _together(distributed, fill)
    num_lost = len(wanted) - len(kept)
    if num_lost and not kept:
        raise CheckpointError(
            f"--load_parts=model,optimizer: --optimizer={optimizer} cannot use any moments of {source.folder} "
            f"(--optimizer={before}); leave optimizer out"
        )
    note = (
        f"{num_lost} of {len(wanted)} moments of parameter tensors are not in {source.folder}, or cannot be used "
        f"(--optimizer={before}): they start at zero"
    )
    return optimizer_state(content.state, before, optimizer), note if num_lost else None


def fill_base(
    source: WeightSource | None, config: Config, model: MultiStage, distributed: Distributed
) -> None:
    """Fill the frozen weights of a run that trains adapters, which get their initial values. source:
    None: all weights get these.

    Raises:
        CheckpointError: see `load_weights`.
    """
    model.initialize(config.distributed.seed, frozen=source is None)
    if source is not None:
        with source:
            adapters = (spec.name for spec in model.specs() if is_of_adapter(spec.name))
            load_weights(source, model, distributed, frozenset(adapters))
        files.logger.info("loaded the weights of %s (%s)", source.folder, source.description)


def start_from(
    source: WeightSource,
    config: Config,
    model: MultiStage,
    optimizer: Optimizer,
    distributed: Distributed,
    logger: logging.Logger,
) -> int:
    """Load pretrained weights, with optimizer state if requested; return the number of completed
    iterations.

    Without `step` in --load_parts, iterations, schedule and data start over.
    """
    with source:
        missing, line = partly(source, model)
        resize = config.source.resize_vocabulary
        if missing or resize:
            model.initialize(config.distributed.seed)
        load_weights(source, model, distributed, missing, resize)
        if line is not None:
            logger.warning(line)
        logger.info("loaded the weights of %s (%s)", source.folder, source.description)
        if "optimizer" in config.source.load_parts and model.training:
            name = config.optimizer.optimizer
            state, note = load_moments(source, model, distributed, name)
            optimizer.load_rule(state)
            logger.info(
                "  with the state of its optimizer, after %s updates", f"{state['updates']:,}"
            )
            if note is not None:
                logger.warning(note)
        if "step" not in config.source.load_parts or source.iteration is None:
            return 0
        logger.info("  the run continues after its iteration %d", source.iteration)
        return source.iteration
