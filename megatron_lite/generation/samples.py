"""Samples during training: continuations of the same prompts every --sample_interval iterations.

Every rank runs the same passes over the stages and gathers weights as in a validation; all use the
tokens sampled by rank 0. Keys and values are cached, so a sample costs one pass for its prompt, and
one pass per further token of `ROWS` samples together; with ZeRO-3 every pass gathers the whole
model. Only buffers of gathered weights change.

`<experiment_dir>/samples.jsonl` gets one line each time: `iteration`, `train_iters`, `samples` (per
sample `prompt`, `text`, `finish` (end or length) and `tokens`), `run`, `time`. If a resumed run
repeats an iteration, the later line counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.data.disk_array import unreadable
from megatron_lite.data.tokenizing import Tokenizer, load_tokenizer
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError, NumericsError
from megatron_lite.generation.continuation import (
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)
from megatron_lite.generation.prompts import Continuations, encode_prompt, numbered, read_prompts
from megatron_lite.model.layer import MicroBatch
from megatron_lite.monitor.trackers.metrics_file import MetricsFile
from megatron_lite.monitor.trackers.opening import Trackers
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopRequested, StopSignal
from megatron_lite.seeds import derive_seed
from megatron_lite.zero.multi_stage import MultiStage

SAMPLES_FILE = "samples.jsonl"
ROWS = 8  # samples continued together
SHOWN_CHARACTERS = 200  # per sample in the log


class Samples(NamedTuple):
    """A run's prompts, and the file for their continuations. Created by `open_samples`."""

    config: Config
    distributed: Distributed
    stop: StopSignal
    tokenizer: Tokenizer
    prompts: Sequence[tuple[str, int, list[int]]]  # text, number of equal ones before it, tokens
    trackers: Trackers  # samples.jsonl on rank 0, with an experiment directory

    def write(self, model: MultiStage, iteration: int, logger: logging.Logger) -> None:
        """Continue every prompt and write the samples, or warn if logits are not finite.
        Collective.

        Raises:
            StopRequested: on every rank, if any rank received a signal; nothing is written.
        """
        texts = self._texts(iteration)
        training = self.config.training
        limits = Limits(
            training.sample_tokens,
            self.config.batch.sequence_length,
            (self.tokenizer.end_of_document,),
            read_anew=self.config.model.longrope_length,
        )

        def run_pass(micro_batch: MicroBatch) -> Tensor:
            logits = model.output(micro_batch)
            self.distributed.wait_for_device()
            return logits

        try:
            # Attention over prompts uses "math", which always works; a failing library would end
            # the training.
            for _ in continue_texts(
                run_pass, self.distributed.device, texts, limits, ROWS, self._agree
            ):
                pass
        except NumericsError:
            logger.warning("no samples @ iteration %d: logits are not finite", iteration)
            return
        continuations = Continuations(self.tokenizer)
        samples: list[dict[str, Any]] = []
        for (prompt, _, _), text in zip(self.prompts, texts, strict=True):
            continuation = continuations.text(text)
            samples.append(
                {
                    "prompt": prompt,
                    "text": continuation,
                    "finish": text.finish,
                    "tokens": text.tokens,
                }
            )
            logger.info(
                "sample @ iteration %d/%d | %s",
                iteration,
                training.train_iters,
                _shown(prompt, continuation),
            )
        self.trackers.log(
            {"iteration": iteration, "train_iters": training.train_iters, "samples": samples}
        )

    def _texts(self, iteration: int) -> list[Text]:
        """Return the prompts with samplers that depend only on seed, iteration and prompt."""
        training, seed = self.config.training, self.config.distributed.seed
        options = SamplingOptions(
            training.sample_temperature, training.sample_top_k, training.sample_top_p
        )
        return [
            Text(
                list(tokens),
                TokenSampler(options, derive_seed("sample", seed, iteration, prompt, repetition)),
            )
            for prompt, repetition, tokens in self.prompts
        ]

    def _agree(self, tokens: list[int]) -> list[int]:
        every = self.distributed.gather_objects([self.stop.received, tokens])
        if reason := max(received for received, _ in every):
            raise StopRequested(reason)
        chosen: list[int] = every[0][1]
        return chosen


def _shown(prompt: str, continuation: str) -> str:
    """Format a sample on one line, with quotes and escapes as in JSON."""
    cut = (
        continuation
        if len(continuation) <= SHOWN_CHARACTERS
        else continuation[:SHOWN_CHARACTERS] + "..."
    )
    return f"{json.dumps(prompt, ensure_ascii=False)} -> {json.dumps(cut, ensure_ascii=False)}"


def load_prompts(config: Config) -> list[tuple[str, int, list[int]]]:
    """Encode the prompts of --sample_prompt and --sample_prompts.

    Raises:
        DataError: if prompts or tokenizer cannot be read, or a prompt does not fit the model or
            --sequence_length.
    """
    training, length = config.training, config.batch.sequence_length
    assert config.data.tokenizer_file is not None, "validated"
    texts = [] if training.sample_prompt is None else [training.sample_prompt]
    name = (
        f"--sample_prompts={training.sample_prompts}"
        if training.sample_prompts
        else "--sample_prompt"
    )
    if training.sample_prompts is not None:
        try:
            content = Path(training.sample_prompts).expanduser().read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            hint = "write a prompt itself as --sample_prompt"
            raise DataError(f"{unreadable(name, error)}; {hint}") from None
        texts += read_prompts(content, name)
    tokenizer = load_tokenizer(config.data.tokenizer_file)
    prompts = []
    for prompt, repetition in numbered(texts):
        try:
            tokens = encode_prompt(tokenizer, prompt, False, config.model.vocab_size, length)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        if len(tokens) + training.sample_tokens > length:
            raise DataError(
                f"{name}: the prompt {prompt[:40]!r} has {len(tokens):,} tokens, which with --sample_tokens="
                f"{training.sample_tokens} exceeds --sequence_length={length}; shorten one of them"
            )
        prompts.append((prompt, repetition, tokens))
    return prompts


def open_samples(
    config: Config, distributed: Distributed, experiment: Experiment, stop: StopSignal
) -> Samples | None:
    """Return a run's samples, or None without --sample_interval; all ranks get the prompts that
    rank 0 reads.

    Raises:
        DataError, StorageError: on every rank, if prompts or tokenizer cannot be used, or
            samples.jsonl not opened.
    """
    if config.training.sample_interval is None:
        return None
    reads, root = distributed.rank == 0, experiment.root
    prompts = together(distributed, lambda: load_prompts(config) if reads else None)
    files = together(
        distributed,
        lambda: [MetricsFile(root / SAMPLES_FILE)] if reads and root is not None else [],
    )
    tokenizer = together(distributed, lambda: load_tokenizer(config.data.tokenizer_file or ""))
    trackers = Trackers(files, experiment.run)
    return Samples(
        config, distributed, stop, tokenizer, distributed.broadcast_object(prompts), trackers
    )
