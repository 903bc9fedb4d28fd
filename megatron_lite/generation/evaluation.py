"""The work of the command `evaluate`: measure models on token files or text, and print the losses."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron_lite.checkpoint.rotation import again
from megatron_lite.config import JsonObject, unflatten
from megatron_lite.corpus.documents import BLANK, TextFields, whole_texts
from megatron_lite.corpus.fast_tokenizer import UnfitError
from megatron_lite.corpus.from_text import resolve_data
from megatron_lite.corpus.inputs import find_inputs
from megatron_lite.corpus.prepared import KnownTokenizer, check_tokenizer, known_tokenizer
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.host_batch import micro_batch
from megatron_lite.data.loader import DataSource
from megatron_lite.data.open_data import open_data, prefixes
from megatron_lite.data.tokenizing import JsonTokenizer, Tokenizer
from megatron_lite.errors import EXIT_DONE, DataError, NumericsError, UsageError, spelled
from megatron_lite.generation.model import (
    LocalModel,
    Totals,
    choose_device,
    common_length,
    evaluate,
    load_model,
    text_batches,
)
from megatron_lite.generation.prompts import open_tokenizer, token_text
from megatron_lite.monitor.logging import get_logger
from megatron_lite.run.exit_status import print_failure, print_page
from megatron_lite.run.progress_line import ProgressLine, aligned, printed
from megatron_lite.validation import resolve


def open_samples(
    options: argparse.Namespace, model: LocalModel, tokenizer: Tokenizer | None
) -> DataSource:
    """Open the validation samples of token files, or of text that becomes such for this call, as
    training does.

    Raises:
        UsageError, DataError: if the options contradict each other, or the files cannot be read or
            are of another tokenizer.
    """
    try:
        split = tuple(map(float, (options.split or "969,30,1").split(",")))
        if not split[1] > 0:
            raise ValueError
    except (ValueError, IndexError):
        rule = "write numbers, such as 969,30,1, of which the second, above 0, is read; 0,1,0 reads everything"
        raise UsageError(f"--split={options.split}: {rule}") from None
    batch_size = options.samples or options.micro_batch_size
    values = vars(model.config) | {
        "batch_size": batch_size,
        "micro_batch_size": min(batch_size, options.micro_batch_size),
        "sequence_length": model.longest,
        "allow_nondivisible_batch_size": True,
        "data_path": tuple(options.data_path),
        "tokenizer_file": tokenizer.path if tokenizer else options.tokenizer_file,
        "loss_mask": tuple(options.loss_mask or ()),
        "split": split,
        "dataset_cache": options.cache,
        "num_workers": 0,
        "cross_document_attention": bool(options.cross_document_attention),
        "seed": options.seed or 0,
        "device": model.device.type,
        "validation_iters": 1 if options.samples else "all",
    }
    began = None if options.seed is None else {"config": values}  # by an earlier version
    config, _ = resolve_data(resolve(unflatten(values), 1), None, None, get_logger(), began)
    _check_tokenizer(prefixes(vars(config.data)), model, tokenizer)
    return open_data(config, 0, 1, began)


def find_tokenizer(options: argparse.Namespace, folder: Path) -> Tokenizer | None:
    """Return the tokenizer, which is optional for token files: without one, that of the data is
    taken, unless `none`.

    Raises:
        DataError: if --text or --tokenizer_file is given and the tokenizer is missing or damaged.
    """
    try:
        return open_tokenizer(folder, options.tokenizer_file, special_tokens=False)
    except (DataError, UsageError):
        if options.text or options.tokenizer_file not in (None, "none"):
            raise
    return None


def print_token(
    tokenizer: Tokenizer | None, as_json: bool, before: int, token: int, loss: float
) -> None:
    """Print the loss of a token on a line; without a tokenizer, a token has no text."""
    text = None if tokenizer is None else token_text(tokenizer, before, token)
    words = f"{loss:9.4f}  {token:6}" + ("" if text is None else f'  "{spelled(text)}"')
    print_page(json.dumps({"token": text, "id": token, "loss": loss}) if as_json else words)


def result(options: argparse.Namespace, folder: Path, library: str = "auto") -> JsonObject:
    """Evaluate one model and return the record. library: that tokenizes --text, see
    `TokenizerChoice`.

    Raises:
        RunError: if the model, the data or the tokenizer cannot be used.
    """
    device = choose_device(options.device)
    tokenizer = find_tokenizer(options, folder)
    model = load_model(folder, options.sequence_length, options.dtype, device, options.weights)
    about: JsonObject = {"sequence_length": model.longest, "model": str(folder)}
    if options.text:
        assert tokenizer is not None
        fields, files = TextFields((options.json_key or "text",)), find_inputs(options.text)
        micro_batches = text_batches(
            whole_texts(files, fields, strict=True, allowed=BLANK),
            TokenizerChoice(tokenizer.path, library=library).fast(tokenizer, files, fields)
            or tokenizer,
            model.config.vocab_size,
            model.longest,
            options.micro_batch_size,
            device,
            separate=not options.cross_document_attention,
        )
    else:
        source = open_samples(options, model, tokenizer)
        data = source.config.data
        if tokenizer is None and data.tokenizer_file is not None:
            tokenizer = open_tokenizer(folder, data.tokenizer_file, special_tokens=False)
        if data.loss_mask:
            about["loss_mask"] = data.loss_mask
        micro_batches = (
            micro_batch(host_batch, device, None, None)
            for host_batches in source.batches("validation")
            for host_batch in host_batches
        )
    bytes_of = None if tokenizer is None else tokenizer.token_bytes()
    each = partial(print_token, tokenizer, options.json) if options.per_token else None
    try:
        with ProgressLine(shown=not options.per_token) as progress:
            totals = evaluate(
                model,
                micro_batches,
                bytes_of,
                lambda totals: progress.update(partial(so_far, totals)),
                each,
            )
    except UnfitError as reason:
        print(f"{reason}: reading all texts anew with tokenizers", file=sys.stderr)
        return result(options, folder, "tokenizers")
    if not math.isfinite(totals.nats):
        raise NumericsError(
            "the loss is not finite: the weights are broken, or too large for the dtype"
        )
    return totals.record() | about


def _check_tokenizer(
    data_path: Sequence[str], model: LocalModel, tokenizer: Tokenizer | None
) -> None:
    """Compare the model's tokenizer with that of the data: its own file, what its training
    recorded, or the one in use.

    Raises:
        DataError: names both if they differ.
    """
    file = model.folder / "tokenizer.json"
    recorded = model.training
    known = None
    if file.is_file():
        known = known_tokenizer(str(file), f"of {model.folder}")
    elif "tokenizer_sha256" in recorded:
        digest, size = recorded["tokenizer_sha256"], recorded.get("tokenizer_size", 0)
        known = KnownTokenizer(f"in the training of {model.folder}", digest, size, file)
    elif isinstance(tokenizer, JsonTokenizer):
        known = known_tokenizer(tokenizer.path, f"{tokenizer.path}")
    check_tokenizer(data_path, model.config.vocab_size, known)


def so_far(totals: Totals, seconds: float) -> str:
    """Describe the progress of the evaluation."""
    return (
        f"{totals.tokens:,} tokens, loss {totals.loss:.4f}, {totals.tokens / seconds:,.0f} tokens/s"
    )


def in_words(record: JsonObject) -> list[str]:
    """Format the record in six parts."""
    perplexity = record["perplexity"]
    bits = record["bits_per_byte"]
    num_bytes = record["bytes"]
    return [
        f"loss {record['loss']:.6f}",
        "perplexity beyond numbers" if perplexity is None else f"perplexity {perplexity:.4f}",
        "bits per byte unknown (no tokenizer)" if bits is None else f"bits per byte {bits:.6f}",
        f"{record['tokens']:,} tokens",
        "-" if num_bytes is None else f"{num_bytes:,} bytes",
        f"in samples of {record['sequence_length']:,}{', with a loss mask' if 'loss_mask' in record else ''}",
    ]


def report(records: Sequence[JsonObject]) -> Iterator[str]:
    """Yield one line, or the lines of a table of several models."""
    if len(records) == 1:
        yield " | ".join(in_words(records[0]))
    else:
        yield from aligned([[printed(record["model"]), *in_words(record)] for record in records])
        if len({record["tokens"] for record in records}) > 1:
            yield "the tokenizers differ: only bits per byte are comparable"


def print_losses(options: argparse.Namespace) -> int:
    """Evaluate and print, also what was done before an error; return the exit code."""
    code, records = EXIT_DONE, list[JsonObject]()
    try:
        options.sequence_length = options.sequence_length or again(
            lambda: common_length(options.model, options.weights)
        )
        with tempfile.TemporaryDirectory() as options.cache:
            for folder in options.model:
                # of fastokens, some texts are read anew, when tokens have been printed
                library = "tokenizers" if options.per_token else "auto"
                records.append(again(partial(result, options, folder, library)))
    except Exception as error:
        code = print_failure(
            error, "write a smaller --micro_batch_size or --sequence_length, or --dtype=bf16"
        )
    for line in map(json.dumps, records) if options.json else report(records):
        print_page(line)
    return code
