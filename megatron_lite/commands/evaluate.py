"""Measure loss, perplexity and bits per byte of a model on a data set.

    megatron_lite evaluate --model experiments/mine/export/1000 --data_path data/mine --split 969,30,1
    megatron_lite evaluate --model experiments/mine --text held_out.txt more.jsonl --json

The model is an export, any Hugging Face folder, a checkpoint, or the folder of a run (the newest good one is used).

--data_path reads the validation split of token files with the samples and order of --validation_iters=all, or its
first --samples. The loss equals the one that training logs for the same weights, split and sequence length. With
--seed it is that of a run whose metrics do not say `"evaluation_order": "data"`, as an earlier version began it.
--text reads text files (one document each) and .jsonl files (one document per line), tokenizes them like
scripts/prepare_data.py, and predicts every token except the first exactly once.

`loss` is the mean over predicted tokens in nats. Bits per byte is the sum of their losses in bits, divided by the UTF-8
bytes of their text; special tokens such as the end of a document cost bits and have no bytes. It needs a tokenizer,
from the model's folder or --tokenizer_file.

Exit codes: 0 done, 2 usage, 3 data, 4 model, 5 numerics, 7 memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron_lite.checkpoint.rotation import again
from megatron_lite.cli.script_parser import LARGEST_COUNT, ScriptParser, number
from megatron_lite.config import unflatten
from megatron_lite.config.structured_values import weighted_paths
from megatron_lite.corpus.prepared import KnownTokenizer, check_tokenizer, known_tokenizer
from megatron_lite.data.host_batch import micro_batch
from megatron_lite.data.open_data import open_data
from megatron_lite.data.tokenizing import JsonTokenizer, Tokenizer
from megatron_lite.errors import EXIT_DONE, DataError, NumericsError, UsageError
from megatron_lite.generation.model import (
    LocalModel,
    Totals,
    choose_device,
    evaluate,
    load_model,
    model_arguments,
    text_batches,
)
from megatron_lite.generation.prompts import open_tokenizer
from megatron_lite.model.layer import MicroBatch
from megatron_lite.run.exit_status import print_failure, print_page
from megatron_lite.run.progress_line import ProgressLine
from megatron_lite.validation import resolve

UNKNOWN_LENGTH = 2048  # of samples, at most, for a folder that does not say how it was trained


def parse_options(arguments: Sequence[str] | None, program: str | None = None) -> argparse.Namespace:
    """Parse the command line; argparse exits with code 2 if it is wrong."""
    parser = ScriptParser(
        prog=program, description="Measure loss, perplexity and bits per byte of a model.", parents=[model_arguments()]
    )
    add = parser.add_argument
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data_path", nargs="+", help="prefix of .bin/.idx files, or weight prefix weight prefix ...")
    data.add_argument("--text", nargs="+", type=Path, help="text files, and .jsonl files with one text per line")
    add("--json_key", help='key of the text in .jsonl lines (default: "text")')
    add("--split", help="--split of training; its second part is read; 0,1,0 reads everything (default: 969,30,1)")
    count = number(int, 1, LARGEST_COUNT)
    add("--samples", type=count, help="number of samples of --data_path (default: all)")
    add("--seed", type=int, help="--seed of a run that an earlier version began: its validation depends on it")
    add("--sequence_length", type=count, help="tokens per sample (default: as in training)")
    add("--micro_batch_size", type=count, default=1, help="samples per forward pass (default: 1)")
    add("--cross_document_attention", type=int, choices=(0, 1), default=1, help="as in training (default: 1)")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    others = ("json_key",) if options.data_path else ("split", "samples", "seed")
    for name in others:
        if getattr(options, name) is not None:
            parser.error(f"argument --{name}: has no effect with {'--data_path' if options.data_path else '--text'}")
    return options


def indexed_batches(options: argparse.Namespace, model: LocalModel, length: int) -> Iterator[MicroBatch]:
    """Yield the validation samples of token files as training reads them.

    Raises:
        UsageError, DataError: if the options contradict each other, or the files cannot be read.
    """
    try:
        split = tuple(float(share) for share in (options.split or "969,30,1").split(","))
    except ValueError:
        raise UsageError(f"--split={options.split}: expected numbers separated by commas, such as 969,30,1") from None
    batch_size = options.samples or options.micro_batch_size
    values = vars(model.config) | {
        "batch_size": batch_size,
        "micro_batch_size": min(batch_size, options.micro_batch_size),
        "sequence_length": length,
        "allow_nondivisible_batch_size": True,
        "data_path": tuple(options.data_path),
        "split": split,
        "num_workers": 0,
        "cross_document_attention": bool(options.cross_document_attention),
        "seed": options.seed or 0,
        "device": model.device.type,
        "validation_iters": 1 if options.samples else "all",
    }
    source = open_data(resolve(unflatten(values), 1), 0, 1, "data" if options.seed is None else "seed")
    for host_batches in source.batches("validation"):
        for host_batch in host_batches:
            yield micro_batch(host_batch, model.device, None, None)


def texts(paths: Sequence[Path], key: str) -> Iterator[str]:
    """Yield the text of every text file and .jsonl line, except empty texts.

    Raises:
        DataError: if a file or line cannot be read; names both.
    """
    for path in paths:
        try:
            if not path.name.endswith(".jsonl"):
                whole = path.read_text(encoding="utf-8")
                if whole.strip():
                    yield whole
                continue
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text_of(line, key, f"{path}: line {number}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8: {error}") from None


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        text = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{place}: not a JSON object with {key!r} (--json_key)") from None
    if not isinstance(text, str):
        raise DataError(f"{place}: {key!r} is not text (--json_key)")
    return text


def find_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer, which is optional for token files.

    Raises:
        DataError: if --text or --tokenizer_file is given and the tokenizer is missing or damaged.
    """
    try:
        return open_tokenizer(options.model, options.tokenizer_file, special_tokens=False)
    except DataError:
        if options.text or options.tokenizer_file is not None:
            raise
    return None


def result(options: argparse.Namespace) -> dict[str, object]:
    """Evaluate the model and return the record.

    Raises:
        RunError: if the model, the data or the tokenizer cannot be used.
    """
    device = choose_device(options.device)
    tokenizer = find_tokenizer(options)
    model = load_model(options.model, options.sequence_length, options.dtype, device, options.weights, UNKNOWN_LENGTH)
    length = model.longest
    if options.text:
        assert tokenizer is not None
        micro_batches = text_batches(
            texts(options.text, options.json_key or "text"),
            tokenizer,
            model.config.vocab_size,
            length,
            options.micro_batch_size,
            device,
            separate=not options.cross_document_attention,
        )
    else:
        _check_tokenizer(options, model, tokenizer)
        micro_batches = indexed_batches(options, model, length)
    table = None if tokenizer is None else tokenizer.token_bytes()
    progress = ProgressLine()
    try:
        totals = evaluate(model, micro_batches, table, lambda totals: progress.update(partial(so_far, totals)))
    finally:
        progress.close()
    if not math.isfinite(totals.nats):
        raise NumericsError("the loss is not finite: the weights are broken, or too large for the dtype")
    return totals.record() | {"sequence_length": length, "model": str(options.model)}


def _check_tokenizer(options: argparse.Namespace, model: LocalModel, tokenizer: Tokenizer | None) -> None:
    """Compare the model's tokenizer with that of the data: its own file, what its training recorded, or the one in use.

    Raises:
        DataError: names both if they differ.
    """
    file, recorded, known = model.folder / "tokenizer.json", model.training, None
    if file.is_file():
        known = known_tokenizer(str(file), f"of {model.folder}")
    elif "tokenizer_sha256" in recorded:
        digest, size = recorded["tokenizer_sha256"], recorded.get("tokenizer_size", 0)
        known = KnownTokenizer(f"in the training of {model.folder}", digest, size, file)
    elif isinstance(tokenizer, JsonTokenizer):
        known = known_tokenizer(tokenizer.path, f"{tokenizer.path}")
    check_tokenizer((path for _, path in weighted_paths(options.data_path)), model.config.vocab_size, known)


def so_far(totals: Totals, seconds: float) -> str:
    """Describe the progress of the evaluation."""
    return f"{totals.tokens:,} tokens, loss {totals.loss:.4f}, {totals.tokens / seconds:,.0f} tokens/s"


def in_words(record: dict[str, object]) -> str:
    """Format the record as one line."""
    perplexity, bits = record["perplexity"], record["bits_per_byte"]
    parts = [f"loss {record['loss']:.6f}"]
    parts += [] if perplexity is None else [f"perplexity {perplexity:.4f}"]
    parts += ["bits per byte unknown (no tokenizer)" if bits is None else f"bits per byte {bits:.6f}"]
    bytes_ = "" if record["bytes"] is None else f", {record['bytes']:,} bytes"
    return f"{' | '.join(parts)} | {record['tokens']:,} tokens{bytes_}, in samples of {record['sequence_length']:,}"


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Evaluate and print; return the exit code."""
    options = parse_options(arguments, program)
    try:
        record = again(lambda: result(options))
    except Exception as error:
        return print_failure(error, "write a smaller --micro_batch_size or --sequence_length, or --dtype=bf16")
    print_page(json.dumps(record) if options.json else in_words(record))
    return EXIT_DONE
