"""Resolve a run's data from text, prepared once into a cache and found again by its fingerprint, or
from a list."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path

from megatron_lite.config import Config, JsonObject, changed
from megatron_lite.config.structured_values import weighted_paths
from megatron_lite.config.training import NO_MASK, PATH_FLAGS
from megatron_lite.config.values import abridged, is_number
from megatron_lite.corpus.inputs import bare_name, find_inputs, is_input
from megatron_lite.corpus.prepare import CorpusOptions, describe_inputs, fingerprints_of, prepare
from megatron_lite.corpus.prepared import is_complete, older_summary, stated
from megatron_lite.corpus.remote_copy import cache_of, local_copy, pin_of
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.disk_array import reading
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.open_data import prefixes
from megatron_lite.data.tokenizing import load_tokenizer
from megatron_lite.distributed.agreement import rank_0_works
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError, UsageError
from megatron_lite.run.host import available_cores

FINGERPRINT_DIGITS = 16  # in a folder's name


def resolve_data(
    config: Config,
    distributed: Distributed | None,
    root: Path | None,
    logger: logging.Logger,
    began: JsonObject | None = None,
) -> tuple[Config, dict[str, str]]:
    """Replace text and lists in data paths by prefixes of pairs; rank 0 prepares what is missing.

    Adds the loss masks and the tokenizer named in the pairs' summaries, unless options name some,
    and the data sets' tokens as weights, unless some are given. Also return the commits of what
    comes from the hub, see `remote_copy.pin_of`. Collective; waits as long as it takes.

    Args:
        distributed: None in a command, which has no ranks.
        root: the experiment directory.
        began: see `Choice.began`; a run begun without masks or a tokenizer continues without, and
            keeps its shares.

    Raises: RunError on every rank: usage, data, storage, or a worker that died.
    """
    if config.data.dataset_source == "random":
        pinned = (began or {}).get("pinned", {})
        return config, {**pin_of(config.source.pretrained_checkpoint_path or ""), **pinned}
    cache = cache_of(config.data.dataset_cache, root)
    found, pinned = rank_0_works(distributed, lambda: _resolved(config, cache, logger, began))
    paths = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    return changed(config, {"dataset_source": "list", **paths}), pinned


def is_text(path: str) -> bool:
    """Return whether a path in --data_path names text instead of the prefix of a pair."""
    if Path(path + ".idx").exists() or Path(path + ".bin").exists():
        return False
    return Path(path).is_dir() or is_input(Path(path)) or any(sign in path for sign in "*?[{")


def _resolved(
    config: Config, cache: str | None, logger: logging.Logger, began: JsonObject | None
) -> tuple[JsonObject, dict[str, str]]:
    """Return the words of each data and mask path, and the tokenizer's file, as local paths, and
    the commits of those from the hub."""
    begun: JsonObject = began["config"] if began else {}
    pinned = dict(began.get("pinned", {})) if began else {}
    data, flags = config.data, (*PATH_FLAGS, "loss_mask")
    copies = [config.source.pretrained_checkpoint_path or ""]

    def copied(word: str, flag: str) -> str:
        copies.append(local_copy(word, flag, cache, pinned))
        return copies[-1]

    found: JsonObject = {
        flag: [copied(word, flag) for word in getattr(data, flag)] for flag in flags
    }
    if data.tokenizer_file not in (None, "none"):
        found["tokenizer_file"] = copied(data.tokenizer_file, "tokenizer_file")
    if data.dataset_source == "file" and data.data_path:
        listed = read_list(Path(found["data_path"][0]))
        found["data_path"] = [copied(word, "data_path") for word in listed]
    for address, commit in [pair for copy in copies for pair in pin_of(copy).items()]:
        if (kept := pinned.setdefault(address, commit)) != commit:
            text = (
                "this copy of %s is of hf://%s, but the run began with hf://%s; write that address"
            )
            logger.warning(text, address, commit, kept)
    for flag in PATH_FLAGS:
        texts = [path for _, path in weighted_paths(found[flag], flag) if is_text(path)]
        arguments = flag, config, found.get("tokenizer_file"), cache, logger
        words = (
            [word for word in each if not is_number(word)]
            for each in (found[flag], begun.get(flag, ()))
        )
        before = dict(zip(*words, strict=False))
        prepared = {
            path: _prepared(path, before.get(path, ""), *arguments) for path in dict.fromkeys(texts)
        }
        found[flag] = _weighted(
            [prepared.get(word, word) for word in found[flag]], flag, config, begun, logger
        )
    for name, value in stated(prefixes(found)).items():
        if not getattr(data, name):
            way = "this run began without it and continues so"
            if began is None or begun.get(name):
                found[name], way = value, f"--{name}=none leaves it out"
            logger.info("--%s=%s: a summary of the data names it; %s", name, abridged(value), way)
    if found.setdefault("tokenizer_file", None) is None and (
        data.fim_rate or config.training.sample_interval
    ):
        raise UsageError(
            "--fim_rate and --sample_interval need a tokenizer; write --tokenizer_file"
        )
    if {*found["loss_mask"]} <= {NO_MASK}:
        found["loss_mask"] = []
    elif data.fim_rate:
        raise UsageError(
            "--fim_rate: loss masks do not fit rearranged documents; write --loss_mask=none"
        )
    return found, pinned


def _weighted(
    words: list[str], flag: str, config: Config, begun: JsonObject, logger: logging.Logger
) -> list[str]:
    """Add default weights to a run's data sets: their tokens, so that all are read equally often.

    A run that has begun keeps its weights, which are equal if an earlier version began it. begun:
    its options, if any.
    """
    at_start = flag == "data_path" and (*config.data.data_weights_schedule, "")[0].startswith("0:")
    if len(words) < 2 or at_start or any(map(is_number, words)):
        return words
    saved = begun.get(flag, ())
    weights = [word for word in saved if is_number(word)]
    if len(saved) == len(words) and not weights:
        weights = ["1"] * len(words)
        logger.info(
            "--%s: this run keeps the equal shares that the earlier version which began it used",
            flag,
        )
    elif len(weights) != len(words):
        weights = [str(max(IndexedDataset(prefix).num_tokens, 1)) for prefix in words]
    return [word for pair in zip(weights, words, strict=True) for word in pair]


def read_list(path: Path) -> list[str]:
    """Return a list of data sets as words for --data_path: weight, prefix, ...; without weight 0.

    A list is JSON, like Fast-LLM's: `{"datasets": [{"prefix", "weight", "num_documents",
    "num_tokens"}]}`. Prefixes are relative to its folder, so that a folder with its list can be
    moved.

    Raises: DataError if the file is not such a list.
    """
    with reading(f"--data_path={path}"):
        content = path.read_bytes()
    try:
        pairs = [(entry["weight"], entry["prefix"]) for entry in json.loads(content)["datasets"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"--data_path={path}: is not a list of data sets: {error!r}; scripts/concatenate_dataset.py writes one"
        ) from error
    for weight, prefix in pairs:
        if (
            type(weight) not in (int, float)
            or not 0 <= weight < math.inf
            or not isinstance(prefix, str)
        ):
            raise DataError(
                f"--data_path={path}: weight {weight!r} of {prefix!r} is not a number >= 0"
            )
    if not any(weight for weight, _ in pairs):
        raise DataError(f"--data_path={path}: names no data set with a weight")
    return [
        word
        for weight, prefix in pairs
        if weight
        for word in (repr(float(weight)), str(path.parent / prefix))
    ]


def _prepared(
    path: str,
    before: str,
    flag: str,
    config: Config,
    tokenizer: str | None,
    folder: str | None,
    logger: logging.Logger,
) -> str:
    """Return the prefix of a text's pair in the cache folder, preparing it unless it exists.

    before: the pair that an earlier start read for the same path; the run keeps it if it has older
    rules.
    """
    pairs = sorted(Path(path).glob("*.idx"))
    if pairs and (
        tokenizer is None or not any(is_text(str(file)) for file in Path(path).rglob("*"))
    ):
        fix = f"give the prefix of a pair: --{flag}={pairs[0].with_suffix('')}"
        raise UsageError(f"--{flag}={path}: is a folder of token files; {fix}")
    if tokenizer is None:
        raise UsageError(
            f"--{flag}={path}: is text; name its tokenizer: --tokenizer_file=<tokenizer.json>, or byte"
        )
    if folder is None:
        raise UsageError(
            f"--{flag}={path}: is text, and there is no place for its tokens; give --dataset_cache or "
            "--experiment_dir, or prepare it with scripts/prepare_data.py"
        )
    vocab_size = load_tokenizer(tokenizer).vocab_size
    if vocab_size > config.model.vocab_size:
        raise DataError(
            f"--tokenizer_file={tokenizer}: has {vocab_size:,} tokens, more than "
            f"--vocab_size={config.model.vocab_size:,}"
        )
    options = CorpusOptions(
        (path,), "", TokenizerChoice(tokenizer, library=config.data.tokenizer_library)
    )
    files = find_inputs(options.inputs)
    if older_summary(before).get("inputs") == describe_inputs(files):
        logger.warning(
            "%s: the run goes on with %s, which was prepared under older rules", path, before
        )
        return before
    name = bare_name(Path(path).name).partition(".")[0].strip("*?[]{},") or "text"
    fingerprints = fingerprints_of(options, files)
    prefixes = [
        str(Path(folder, fingerprint[:FINGERPRINT_DIGITS], name)) for fingerprint in fingerprints
    ]
    prefix = next(
        (prefix for prefix in prefixes if is_complete(prefix, fingerprints)), prefixes[-1]
    )
    options = dataclasses.replace(
        options,
        output_prefix=prefix,
        num_processes=available_cores(),
        on_wait=lambda: logger.info(
            "waiting for another run, which prepares %s as %s", path, prefix
        ),
    )
    summary, is_new = prepare(options)
    size = f"{summary['documents']:,} documents, {summary['tokens']:,} tokens"
    logger.info("%s %s as %s: %s", "prepared" if is_new else "found", path, prefix, size)
    if is_new and summary["skipped"]:
        bad = ", ".join(f"{count:,} {kind}" for kind, count in summary["skipped"].items())
        logger.warning("%s: skipped documents: %s; see %s.summary.json", path, bad, prefix)
    return prefix
