"""Convert checkpoints to Hugging Face folders and back, one tensor in memory at a time.

    megatron_lite convert_checkpoint --from=mine/checkpoints --to=exports/mine --format=huggingface --dtype=bf16
    megatron_lite convert_checkpoint --from=models/Mistral-7B --to=start/0 --format=distributed --verify

--from is a Hugging Face folder, a checkpoint, or the folder of a run (the newest good one is used).
--to is written under a temporary name and renamed when complete. --exist_ok replaces an existing
folder that holds only files of a checkpoint or an export. A Hugging Face folder becomes a
checkpoint of iteration 0 with fp32 weights and no optimizer state; use it with
--pretrained_checkpoint_path, or resume it as <experiment_dir>/checkpoints/0. A checkpoint converted
to a checkpoint keeps everything (with --weights=average: only the iteration and the averages).
--verify compares the logits of random tokens from both folders, one layer in memory at a time,
before --to appears.

Exit codes: 0 done, 2 usage, 3 data (unreadable tokenizer), 4 checkpoint (unusable input, or the two
folders differ), 5 numerics (a weight is too large for --dtype), 8 storage.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_lite.checkpoint import files, names
from megatron_lite.checkpoint.rotation import again
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.config import Config
from megatron_lite.config.structured_values import size_bytes
from megatron_lite.data.tokenizing import has_tokenizer
from megatron_lite.errors import EXIT_DONE, CheckpointError, RunError, StorageError, UsageError
from megatron_lite.generation.model import fill, folder
from megatron_lite.huggingface import convert as conversion
from megatron_lite.huggingface.architectures import ARCHITECTURES
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.model_folder import KINDS
from megatron_lite.huggingface.weight_source import CheckpointSource, Shapes, WeightSource
from megatron_lite.kernels.choice import Kernels
from megatron_lite.model.embedding_and_head import Head
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.model.layer import MicroBatch
from megatron_lite.parameter import DTYPES
from megatron_lite.run.exit_status import print_failure

VERIFIED_ROWS, VERIFIED_TOKENS = 4, 64
# Largest difference of logits over the largest logit; for rounded weights, 16 times the spacing of
# the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}


def tokenizer_of(options: argparse.Namespace, source: WeightSource) -> Path | None:
    """Return the tokenizer from --tokenizer_file or from the source; None if there is none."""
    if options.tokenizer_file is not None:
        given: Path = options.tokenizer_file
        return given
    if isinstance(source, CheckpointSource):
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
    target, origin = to.resolve(), source.folder.resolve()
    typed = f"--to={to}"
    if target == origin or origin in target.parents or target in origin.parents:
        raise UsageError(
            f"{typed}: this folder and {source.folder} must not contain each other; choose another"
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
        if not names.has_only_our_files(to):
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
    state = options.format == "distributed" and options.weights == "raw"
    with open_source(options.source, weights=options.weights, whole=True, state=state) as source:
        check_target(options, source)
        shapes = shapes_of(build_gpt(source.model, 1))
        source.check(shapes)
        source.verify()
        averages = " (its averages)" if options.weights == "average" else ""
        print(f"from {source.folder}: {source.description}{averages}", flush=True)
        config = conversion.described_config(source, options.dtype, options.export_model_type)
        options.to.parent.mkdir(parents=True, exist_ok=True)
        files.recover(options.to.parent, options.to.name)
        temporary = names.work_path(options.to, "tmp", names.new_nonce())
        try:
            said = write(options, temporary, source, shapes, config, limit_bytes)
            files.publish(temporary, options.to, names.has_only_our_files)
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
        plan = conversion.write_huggingface(
            temporary, source, shapes, config, limit_bytes, tokenizer_file
        )
        said = f"a Hugging Face folder, {config.training.export_dtype}, {plan.total_bytes:,} bytes of weights"
        said += " with a tokenizer" if tokenizer_file else ", no tokenizer"
        num_files = len(plan.names)
    else:
        content = conversion.write_checkpoint(temporary, source, shapes, config, limit_bytes)
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
        before, after = logits_of(source, tokens), logits_of(written, tokens)
    largest, difference = float(before.abs().max()), float((after - before).abs().max())
    found = f"largest difference of {VERIFIED_ROWS} x {length} x {before.shape[-1]} logits: {difference:.3g}"
    limit = TOLERANCE[dtype] * max(largest, 1e-30)
    text = f"{found} (at most {limit:.3g}; the largest logit is {largest:.3g})"
    if not difference <= limit:  # NaN is not
        raise CheckpointError(f"--verify: {text}: nothing was written; please report this")
    print(f"verified: {text}", flush=True)


@torch.no_grad()
def logits_of(source: WeightSource, tokens: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits (b, s, v) of tokens (b, s), with one layer's weights (and a tied head's)
    in memory."""
    model = dataclasses.replace(source.model, make_vocab_size_divisible_by=1)
    hidden, micro_batch = None, MicroBatch(tokens, tokens)
    # Memory of earlier layers by size, reused because the allocator might not.
    spare: dict[int, list[torch.Tensor]] = {}

    def memory(numel: int) -> torch.Tensor:
        return spare[numel].pop() if spare.get(numel) else torch.empty(numel)

    *layers, head = build_gpt(model, tokens.shape[1], Kernels(attention="math"))
    for layer in layers:
        fill(layer, source, memory)
        hidden = layer(hidden, micro_batch)
        if layer not in head.borrows_from:
            for parameter in layer.parameters():
                spare.setdefault(parameter.numel(), []).append(parameter.data.view(-1))
            layer.to("meta")
    fill(head, source, memory)
    assert isinstance(head, Head) and hidden is not None
    return head.logits(hidden)


def parse(arguments: Sequence[str], program: str | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(__doc__, prog=program)
    add = parser.add_argument
    source = "Hugging Face folder, checkpoint, folder of checkpoints, or experiment directory"
    add("--from", dest="source", type=folder, required=True, help=source)
    add("--to", type=folder, required=True, help="folder to write")
    add("--format", choices=KINDS, required=True, help="what to write")
    add("--dtype", choices=tuple(DTYPES), help="of exported weights (default: as trained or read)")
    add(
        "--export_model_type",
        choices=tuple(ARCHITECTURES),
        help="architecture (default: as saved, or one that fits)",
    )
    add(
        "--shard_size", default="5GB", help="largest file: 5GB, 500MB, 2GiB or bytes (default: 5GB)"
    )
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="weights to convert (default: raw)",
    )
    add(
        "--tokenizer_file",
        type=folder,
        help="tokenizer.json to include, or byte (default: the model's)",
    )
    add("--exist_ok", action="store_true", help="replace --to if it is a checkpoint or an export")
    add("--verify", action="store_true", help="compare the logits of both folders")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Convert; return the exit code."""
    options = parse(arguments, program)
    try:
        print(again(lambda: convert(options)))
    except RunError as error:
        return print_failure(error)
    except OSError as error:
        why = (
            "this is a file, not a folder"
            if isinstance(error, FileExistsError)
            else error.strerror or error
        )
        reason = f"{error.filename or options.to}: {why}; free some space or choose another --to"
        return print_failure(StorageError(reason))
    return EXIT_DONE
