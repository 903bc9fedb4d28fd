"""Write a checkpoint or a Hugging Face folder from a `WeightSource`, with one tensor in memory at a
time.

A checkpoint converted from a Hugging Face folder has only fp32 weights, at iteration 0: a run
resumes it with fresh moments. One converted from a checkpoint keeps its iteration, moments,
averages and run state. If averages become the weights, moments and state are dropped, because they
belong to other weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import SavedFile, Slice
from megatron_lite.checkpoint.manifest import Manifest, SavedParameter
from megatron_lite.checkpoint.names import (
    MANIFEST_NAME,
    has_only_our_files,
    new_nonce,
    rank_file,
    work_path,
)
from megatron_lite.config import BatchConfig, Config, flatten, unflatten
from megatron_lite.config.structured_values import size_bytes
from megatron_lite.data.tokenizing import has_tokenizer
from megatron_lite.errors import CheckpointError, NumericsError, UsageError
from megatron_lite.huggingface.export_folder import ExportFolder, split
from megatron_lite.huggingface.gguf_file import FILE_NAME, GgufFile
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.merged_source import MergedSource
from megatron_lite.huggingface.weight_source import (
    CheckpointSource,
    Shapes,
    WeightSource,
    fill,
    read_whole,
)
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.routing import Choice
from megatron_lite.model.embedding_and_head import Head
from megatron_lite.model.experts import Router
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.model.layer import MicroBatch
from megatron_lite.parameter import DTYPES
from megatron_lite.run.durable_files import sync_folder
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.tiles import Tile
from megatron_lite.validation import resolve

VERIFIED_ROWS, VERIFIED_TOKENS = 4, 64
# Largest difference of logits over the largest logit; for rounded weights, 16 times the spacing of
# the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}


def tokenizer_of(options: argparse.Namespace, source: WeightSource) -> Path | None:
    """Return the tokenizer from --tokenizer_file or from the source; None if there is none."""
    if options.tokenizer_file is not None:
        given: Path = options.tokenizer_file
        return given
    if isinstance(source := source.facts, CheckpointSource):
        named = source.content.config.get("tokenizer_file")
        if named is None or has_tokenizer(named):
            return named and Path(named)
        print(f"WARNING: the tokenizer {named} is missing; set --tokenizer_file to include one")
        return None
    own = source.folder / "tokenizer.json"
    return own if own.is_file() else None


def check_target(options: argparse.Namespace, source: WeightSource) -> None:
    """Check that writing the target loses nothing.

    Raises:
        UsageError: if the target exists, overlaps the source, or cannot be resumed under its name.
    """
    to: Path = options.to
    target, typed = to.resolve(), f"--to={to}"
    base = (source.base.folder,) if isinstance(source, MergedSource) else ()
    for folder in (source.folder, *base):
        origin = folder.resolve()
        if target == origin or origin in target.parents or target in origin.parents:
            raise UsageError(
                f"{typed}: this folder and {folder} must not contain each other; choose another"
            )
    iteration = source.iteration or 0
    if options.format == "distributed" and to.name.isdecimal() and to.name != str(iteration):
        raise UsageError(
            f"{typed}: a checkpoint must be named after its iteration, {iteration}; write "
            f"--to={to.with_name(str(iteration))}"
        )
    if not to.is_symlink() and to.is_dir() and not any(to.iterdir()):
        return
    if to.is_symlink() or to.exists():
        if not options.exist_ok:
            raise UsageError(
                f"{typed}: exists; choose another folder, or replace it with --exist_ok"
            )
        if not has_only_our_files(to):
            raise UsageError(
                f"{typed}: holds files that belong to no checkpoint or export, which are never replaced; choose another"
            )


def convert(options: argparse.Namespace) -> str:
    """Convert; return a description of the result.

    Raises:
        RunError: if the conversion fails; --to is then not created.
    """
    limit_bytes = size_bytes(options.shard_size, "shard_size")
    if options.dtype is not None and options.format == "distributed":
        raise UsageError(
            f"--dtype={options.dtype}: a checkpoint always holds fp32 weights; leave --dtype out"
        )
    for name, what in (
        ("tokenizer_file", "tokenizer"),
        ("export_model_type", "Hugging Face architecture"),
    ):
        if getattr(options, name) is not None and options.format == "distributed":
            raise UsageError(f"--{name}: a checkpoint stores no {what}; leave it out")
    for name, usual in (("verify", False), ("shard_size", "5GB")):
        if getattr(options, name) != usual and options.format == "gguf":
            raise UsageError(
                f"--{name}: not for a gguf file, which is one file and read by llama.cpp alone; leave it out"
            )
    state = options.format == "distributed" and options.weights == "raw"
    arguments = options.source, None, options.weights, True, state, None, options.base
    with open_source(*arguments) as source:
        check_target(options, source)
        if not isinstance(source, MergedSource) and options.base is not None:
            raise UsageError(
                f"--base={options.base}: {source.folder} holds no adapters; leave it out"
            )
        shapes = shapes_of(build_gpt(source.model, 1))
        source.check(shapes)
        averages = " (its averages)" if options.weights == "average" else ""
        config = described_config(source, options.dtype, options.export_model_type)
        tokenizer_file = None if options.format == "distributed" else tokenizer_of(options, source)
        gguf = GgufFile(config, tokenizer_file) if options.format == "gguf" else None
        source.verify()
        print(f"from {source.folder}: {source.description}{averages}", flush=True)
        options.to.parent.mkdir(parents=True, exist_ok=True)
        files.recover(options.to.parent, options.to.name)
        temporary = work_path(options.to, "tmp", new_nonce())
        try:
            if gguf is not None:
                size = gguf.write(temporary, source, shapes)
                said = f"{options.to / FILE_NAME}: for llama.cpp, {config.training.export_dtype}, {size:,} bytes of weights"
            else:
                said = write(options, temporary, source, shapes, config, limit_bytes)
            files.publish(temporary, options.to, has_only_our_files)
        except BaseException:
            files.remove_folder(temporary)
            raise
    return said


def write(
    options: argparse.Namespace,
    temporary: Path,
    source: WeightSource,
    shapes: Shapes,
    config: Config,
    limit_bytes: int,
) -> str:
    """Write and verify the folder under its temporary name; return a description.

    Raises:
        RunError, OSError: if writing or verifying fails.
    """
    if options.format == "huggingface":
        tokenizer_file = tokenizer_of(options, source)
        plan = write_huggingface(temporary, source, shapes, config, limit_bytes, tokenizer_file)
        said = f"a Hugging Face folder, {config.training.export_dtype}, {plan.total_bytes:,} bytes of weights"
        said += " with a tokenizer" if tokenizer_file else ", no tokenizer"
        num_files = len(plan.headers)
    else:
        content = write_checkpoint(temporary, source, shapes, config, limit_bytes)
        place = f"checkpoints/{content.iteration} of an --experiment_dir"
        said = f"a checkpoint of iteration {content.iteration}, which resumes as {place}"
        num_files = len(content.files)
    print(f"written: {num_files} file{'' if num_files == 1 else 's'}", flush=True)
    if options.verify:
        dtype = config.training.export_dtype
        # dtype of the source
        own = config.distributed.training_dtype if source.kind == "huggingface" else "fp32"
        is_rounded = options.format == "huggingface" and dtype not in ("fp32", own)
        verify(source, temporary, DTYPES[dtype if is_rounded else "fp32"])
    return f"{options.to}: {said}"


def verify(source: WeightSource, folder: Path, dtype: torch.dtype) -> None:
    """Compare the logits of both folders. dtype: what the weights were rounded to (fp32: not
    rounded).

    Raises:
        CheckpointError: if the logits differ by more than rounding explains.
    """
    length = min(VERIFIED_TOKENS, source.model.max_position_embeddings or VERIFIED_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(source.model.vocab_size, (VERIFIED_ROWS, length), generator=generator)
    with open_source(folder) as written:
        written.check(shapes_of(build_gpt(written.model, 1)))
        choices: dict[str, Tensor] | None = None if dtype is torch.float32 else {}
        before, after = (logits_of(each, tokens, choices) for each in (source, written))
    largest, difference = float(before.abs().max()), float((after - before).abs().max())
    found = f"largest difference of {VERIFIED_ROWS} x {length} x {before.shape[-1]} logits: {difference:.3g}"
    limit = TOLERANCE[dtype] * max(largest, 1e-30)
    text = f"{found} (at most {limit:.3g}; the largest logit is {largest:.3g})"
    if not difference <= limit:  # NaN is not
        raise CheckpointError(f"--verify: {text}: nothing was written; please report this")
    print(f"verified: {text}", flush=True)


class _RepeatedChoice(Choice):
    """A router's choice of experts that the second model repeats."""

    name: str
    first: dict[str, Tensor]  # by router

    def experts(self, values: Tensor) -> Tensor:
        return self.first.setdefault(self.name, super().experts(values))


@torch.no_grad()
def logits_of(
    source: WeightSource, tokens: Tensor, choices: dict[str, Tensor] | None = None
) -> Tensor:
    """Return fp32 logits (b, s, v) of tokens (b, s), with one layer's weights (and a tied head's)
    in memory.

    choices: experts (t, K) by router, which a first call fills and others repeat: rounded weights
    send some tokens elsewhere, whose logits differ by more than rounding.
    """
    model = dataclasses.replace(source.model, make_vocab_size_divisible_by=1)
    hidden, micro_batch = None, MicroBatch(tokens, tokens)
    # Memory of earlier layers by size, reused because the allocator might not.
    spare: dict[int, list[torch.Tensor]] = {}

    def memory(numel: int) -> torch.Tensor:
        return spare[numel].pop() if spare.get(numel) else torch.empty(numel)

    *layers, head = build_gpt(model, tokens.shape[1], Kernels(attention="math"))
    for layer in layers:
        fill(layer, source, memory)
        for router in layer.modules():
            if choices is not None and isinstance(router, Router):
                router.choice = choice = _RepeatedChoice(*router.choice)
                choice.name, choice.first = router.name, choices
        hidden = layer(hidden, micro_batch)
        if layer not in head.borrows_from:
            for parameter in layer.parameters():
                spare.setdefault(parameter.numel(), []).append(parameter.data.view(-1))
            layer.to("meta")
    fill(head, source, memory)
    assert isinstance(head, Head) and hidden is not None
    return head.logits(hidden)


def described_config(
    source: WeightSource, export_dtype: str | None, model_type: str | None
) -> Config:
    """Return a configuration for a source's model, with the options saved in it; None: as trained
    or read."""
    length = min(source.model.max_position_embeddings, BatchConfig.sequence_length)
    if isinstance(source.facts, CheckpointSource):
        length = source.facts.content.config.get("sequence_length", length)
    values = vars(source.model) | {
        "sequence_length": length,
        "batch_size": 1,
        "dataset_source": "random",
        "training_dtype": source.dtype,
        "export_dtype": export_dtype,
        "export_model_type": model_type or source.model_type,
    }
    if (tokenizer := source.facts.folder / "tokenizer.json").is_file():
        values["tokenizer_file"] = str(tokenizer.resolve())
    return resolve(unflatten(values), 1)


def write_huggingface(
    folder: Path,
    source: WeightSource,
    shapes: Shapes,
    config: Config,
    limit_bytes: int,
    tokenizer_file: Path | None,
) -> ExportFolder:
    """Write a new Hugging Face folder in the --export_dtype of `config`, from a checked source.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: if a weight is too large for the dtype.
        OSError: if the folder cannot be written.
    """
    written = ExportFolder(shapes.items(), config, limit_bytes)
    written.create(folder)
    with written.progress:
        for name, shape in shapes.items():
            written.write(name, read_whole(source, name, shape))
            if written.overflow:
                kept = "nothing is written; choose bf16 or fp32"
                raise NumericsError(
                    f"{written.overflow}, too large for {config.training.export_dtype}: {kept}"
                )
    written.finish(
        tokenizer_file,
        source.origin,
        training=source.training,
        keep_class=source.facts.kind == "huggingface",
    )
    return written


def write_checkpoint(
    folder: Path, source: WeightSource, shapes: Shapes, config: Config, limit_bytes: int
) -> Manifest:
    """Write a new checkpoint in files of at most `limit_bytes`, divided like `export_folder.split`.

    config: the run's options, for a source without any.

    Raises:
        OSError: if it cannot be written.
    """
    kept = source if isinstance(source, CheckpointSource) and not source.averaged else None
    tensors = {tensor.name: tensor for tensor in _tensors(source, kept, shapes)}
    cut = split({name: tensor.num_bytes for name, tensor in tensors.items()}, limit_bytes)
    save_id, iteration = new_nonce(), source.iteration or 0
    folder.mkdir()
    saved: dict[str, SavedFile] = {}
    parameters: dict[str, SavedParameter] = {}
    with ByteProgress(
        "writing the checkpoint", sum(tensor.num_bytes for tensor in tensors.values())
    ) as progress:
        for index, names in enumerate(cut):
            file = rank_file(index)
            some = [tensors[name] for name in names]
            metadata = manifest.file_metadata(save_id, iteration, index)
            saved[file], offset = files.write_tensors(folder / file, some, metadata, progress.add)
            for tensor in some:
                name, kind = tensor.name.split("/")
                entry = parameters.setdefault(
                    name, SavedParameter(files.dtype_name(tensor.dtype), tensor.shape, {})
                )
                entry.slices[kind] = [
                    Slice(file, offset, tensor.num_bytes, 0, math.prod(tensor.shape))
                ]
                offset += tensor.num_bytes
    content = Manifest(
        save_id=save_id,
        iteration=iteration,
        world_size=len(saved),
        config=source.content.config if isinstance(source, CheckpointSource) else flatten(config),
        state=_fresh_state() | {"origin": source.origin} if kept is None else kept.content.state,
        files=saved,
        parameters=parameters,
    )
    files.write_text(folder / MANIFEST_NAME, manifest.dump(content))
    sync_folder(folder)
    return content


def _tensors(
    source: WeightSource, kept: CheckpointSource | None, shapes: Shapes
) -> Iterator[files.TensorToWrite]:
    """Yield a checkpoint's tensors "parameter/kind". kept: the source, if its moments and averages
    are copied."""
    for name, shape in shapes.items():
        if kept is None:
            read = functools.partial(read_whole, source, name, shape)
            yield files.TensorToWrite(f"{name}/weights", torch.float32, tuple(shape), read)
            continue
        saved = kept.content.parameters[name]
        for kind in saved.slices:
            read = functools.partial(_read_saved, kept, name, kind)
            dtype = getattr(torch, saved.dtype_of(kind))
            yield files.TensorToWrite(f"{name}/{kind}", dtype, saved.shape, read)


def _read_saved(source: CheckpointSource, name: str, kind: str) -> Tensor:
    saved = source.content.parameters[name]
    # Frozen weights keep their dtype.
    values = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype_of(kind)))
    source.read_state(name, kind, Tile.run(0, values.numel()), values.view(-1))
    return values


def _fresh_state() -> dict[str, Any]:
    """Return a run's state before its first update."""
    scale = {"dynamic": False, "scale": 1.0, "good": 0, "patience": 0}
    window = {"loss": (0.0).hex(), "tokens": 0}
    return {
        "optimizer": {"updates": 0, "loss_scale": scale},
        "window": window,
        "evaluation_due": False,
    }
