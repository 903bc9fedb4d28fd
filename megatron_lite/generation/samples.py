"""Samples during training: what the model makes of the same prompts every so many iterations (--sample_interval).

Every rank runs the same passes over the stages as they are, gathering weights as a validation does; what counts are the
tokens that rank 0 chose. Keys and values are kept, so a sample costs one pass for its prompt and one for each further
token of `ROWS` samples together, and with ZeRO-3 every pass gathers the whole model. Nothing is changed but buffers
that hold gathered weights.

`<experiment_dir>/samples.jsonl` has a line for each time: `iteration`, `train_iters`, `samples` (of each `prompt` its
continuation as `text`, `finish`: end, length, and the `tokens`), `run`, `time`. Where a resumed run repeats an
iteration, the later line counts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.data.tokenizing import Tokenizer, load_tokenizer
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError, NumericsError
from megatron_lite.generation.continuation import Limits, Text, continue_texts
from megatron_lite.generation.prompts import Continuations, encode_prompt, numbered, read_prompts
from megatron_lite.generation.sampling import Choice, Chooser
from megatron_lite.model.layer import MicroBatch
from megatron_lite.monitor.trackers import MetricsFile
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopRequested, StopSignal
from megatron_lite.seeds import derive_seed
from megatron_lite.zero.multi_stage import MultiStage

SAMPLES_FILE = "samples.jsonl"
ROWS = 8  # samples that grow side by side
SHOWN_CHARACTERS = 200  # of a sample in the log


class StageModel:
    """The model of a run, of which every rank holds shards: all of them run every pass."""

    def __init__(self, model: MultiStage, distributed: Distributed) -> None:
        self._model, self._distributed, self.device = model, distributed, distributed.device

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """(t, v) of the tokens that `micro_batch.cache` wants answered."""
        result = self._model.output(micro_batch)
        self._distributed.end_step()
        return result


class Broken(Exception):  # noqa: N818 (not an error)
    """Logits are not finite: there is nothing to choose from."""


class TrainingChooser(Chooser):
    """Says NONE where there is nothing to choose from, so that all ranks hear of it: no sample ends a training."""

    NONE = -1

    def __call__(self, logits: Tensor) -> int:
        try:
            return super().__call__(logits)
        except NumericsError:
            return self.NONE


class Samples:
    """The prompts of a run, and where their continuations go. Made by `open_samples`."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        stop: StopSignal,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[str, list[int]]],
        file: MetricsFile | None,
        run: int,
    ) -> None:
        self._config, self._distributed, self._stop = config, distributed, stop
        self._tokenizer, self._prompts, self._file, self._run = tokenizer, prompts, file, run

    def write(self, model: MultiStage, iteration: int, logger: logging.Logger) -> None:
        """Continue every prompt; all ranks call this together. Logits that are not finite cost the samples: a warning.

        Raises:
            StopRequested: on every rank, if any rank received a signal; nothing is written.
        """
        texts = self._texts(iteration)
        training = self._config.training
        limits = Limits(training.sample_tokens, self._config.batch.sequence_length, (self._tokenizer.end_of_document,))
        try:
            stage_model = StageModel(model, self._distributed)
            # Prompts by the default, "math", which is everywhere: a library that fails would end the training.
            for _ in continue_texts(stage_model, texts, limits, ROWS, self._agree):
                pass
        except Broken:
            logger.warning("no samples @ iteration %d: logits are not finite", iteration)
            return
        continuations = Continuations(self._tokenizer)
        samples: list[dict[str, Any]] = []
        for (prompt, _), text in zip(self._prompts, texts, strict=True):
            continuation = continuations.text(text)
            samples.append({"prompt": prompt, "text": continuation, "finish": text.finish, "tokens": text.tokens})
            logger.info("sample @ iteration %d/%d | %s", iteration, training.train_iters, _shown(prompt, continuation))
        if self._file is not None:
            record = {"iteration": iteration, "train_iters": training.train_iters, "samples": samples}
            self._file.write({**record, "run": self._run, "time": round(time.time(), 3)})

    def _texts(self, iteration: int) -> list[Text]:
        """Draws depend on seed, iteration and prompt alone."""
        training, seed = self._config.training, self._config.distributed.seed
        choice = Choice(training.sample_temperature, training.sample_top_k, training.sample_top_p)
        repetitions = numbered([prompt for prompt, _ in self._prompts])
        return [
            Text(list(tokens), TrainingChooser(choice, derive_seed("sample", seed, iteration, prompt, repetition)))
            for (prompt, tokens), (_, repetition) in zip(self._prompts, repetitions, strict=True)
        ]

    def _agree(self, tokens: list[int]) -> list[int]:
        every = self._distributed.gather_objects([self._stop.received, tokens])
        if any(received for received, _ in every):
            raise StopRequested
        chosen: list[int] = every[0][1]
        if TrainingChooser.NONE in chosen:
            raise Broken
        return chosen


def _shown(prompt: str, continuation: str) -> str:
    """On one line, with quotes and escapes as in JSON."""
    cut = continuation if len(continuation) <= SHOWN_CHARACTERS else continuation[:SHOWN_CHARACTERS] + "..."
    return f"{json.dumps(prompt, ensure_ascii=False)} -> {json.dumps(cut, ensure_ascii=False)}"


def load_prompts(config: Config) -> list[tuple[str, list[int]]]:
    """The prompts of --sample_prompts and their tokens.

    Raises:
        DataError: if they or the tokenizer cannot be read, or one of them does not fit model and --sequence_length.
    """
    training, length = config.training, config.batch.sequence_length
    assert training.sample_prompts is not None and config.data.tokenizer_file is not None, "refused before"
    name = f"--sample_prompts={training.sample_prompts}"
    try:
        content = Path(training.sample_prompts).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    tokenizer = load_tokenizer(config.data.tokenizer_file)
    prompts = []
    for prompt in read_prompts(content, name):
        try:
            prompts.append((prompt, encode_prompt(tokenizer, prompt, False, config.model.vocab_size, length)))
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        if len(prompts[-1][1]) + training.sample_tokens > length:
            raise DataError(
                f"{name}: the prompt {prompt[:40]!r} has {len(prompts[-1][1]):,} tokens, and --sample_tokens="
                f"{training.sample_tokens} follow: more than --sequence_length={length}; shorten one of them"
            )
    return prompts


def open_samples(config: Config, distributed: Distributed, experiment: Experiment, stop: StopSignal) -> Samples | None:
    """The samples of a run, if it asks for them; every rank calls this, and takes the prompts that rank 0 has read.

    Raises:
        DataError, StorageError: on every rank, if prompts or tokenizer are no use, or samples.jsonl cannot be opened.
    """
    if config.training.sample_interval is None:
        return None
    reads, root = distributed.rank == 0, experiment.root
    prompts = together(distributed, lambda: load_prompts(config) if reads else None)
    file = together(distributed, lambda: MetricsFile(root / SAMPLES_FILE) if reads and root is not None else None)
    tokenizer = together(distributed, lambda: load_tokenizer(config.data.tokenizer_file or ""))
    return Samples(config, distributed, stop, tokenizer, distributed.broadcast_object(prompts), file, experiment.run)
