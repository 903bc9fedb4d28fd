"""README.md of an export: the model, the data by name, the training and its command, as far as
known.

Whoever publishes the model chooses the license. The card contains no folders or secrets: it names
only the last part of a path, and omits options with private paths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_lite.config import Config, JsonObject
from megatron_lite.config.values import FLAGS, written
from megatron_lite.huggingface.origin import UNCHOSEN
from megatron_lite.run.progress_line import format_count
from megatron_lite.schedules.batch_size import BatchSchedule, Segment

# Areas whose options describe the training; options of other areas describe where and how it ran
# and are omitted.
AREAS = ("model", "learning_rate", "optimizer", "averaging", "training")
# in the names of options with paths
PRIVATE = ("path", "dir", "file", "script", "env", "folder", "prompts")
TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
{kept}
tags:
- megatron_lite
---

# {title}

{license}
## Model

{model}
{training}
## Use

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("FOLDER")  # the folder of this file
```
"""
UNCHOSEN_NOTE = """\
> **License: not chosen yet.** Write the license of the weights into the first lines of this file before publishing.
"""
KEPT = "The first lines state what the card of the weights before this training or conversion stated.\n"


@dataclass(frozen=True)
class TrainingSummary:
    """The training that led to the exported weights."""

    iteration: int
    losses: dict[str, float]  # by name, in nats per token
    counts: JsonObject  # see `data.counts`
    facts: JsonObject = field(default_factory=dict)  # see `saved_state.TRAINING`
    # of the initial weights, see `read_origin`
    origin: JsonObject = field(default_factory=dict)
    compared: bool = False  # whether the run itself reports AutoTokenizer's result


def model_card(
    config: Config,
    model_type: str,
    parameters: int,
    active: int,
    trained: TrainingSummary | None,
    kept: list[str] | None = None,
) -> str:
    """Return the text of README.md.

    Args:
        config: resolved; only its model is used if `trained` is None, as for weights of unknown
            origin.
        model_type: the architecture's name in transformers.
        active: parameters that compute a token.
        kept: lines from the initial weights' card, such as the license; None or empty: none.
    """
    return TEXT.format(
        kept="\n".join(kept or [UNCHOSEN]),
        license=KEPT if kept else UNCHOSEN_NOTE,
        title=f"A {model_type} model with {format_count(parameters)} parameters",
        model=_table(_model_rows(config, model_type, parameters, active)),
        training="" if trained is None else "\n".join(_training(config, trained)) + "\n",
    )


def _model_rows(
    config: Config, model_type: str, parameters: int, active: int
) -> Iterator[tuple[str, str]]:
    model = config.model
    yield "architecture", f"`{model_type}`"
    yield "parameters", f"{parameters:,}"
    if active < parameters:
        yield "parameters that compute a token", f"{active:,}"
    yield (
        "blocks, hidden size, MLP size",
        f"{model.num_layers:,}, {model.hidden_size:,}, {model.ffn_hidden_size:,}",
    )
    yield (
        "attention heads, groups, channels",
        f"{model.num_attention_heads}, {model.head_groups}, {model.kv_channels}",
    )
    yield "vocabulary", f"{model.vocab_size:,}"
    yield "dtype of the weights", config.training.export_dtype


def _training(config: Config, trained: TrainingSummary) -> Iterator[str]:
    batches = BatchSchedule(tuple(Segment(*row) for row in trained.counts["stages"]))
    sizes = [
        f"{part.size:,} samples of {part.length:,} tokens ({count:,} iterations)"
        for part, count in batches.parts(trained.iteration)
        if part.size
    ]
    tokens, known = batches.consumed_tokens(trained.iteration), Counter[str]()
    for _, name, _, length, samples in trained.counts["sets"]:
        known[name] += length * samples
    other = (
        "random tokens, a test"
        if config.data.dataset_source == "random"
        else "data that was not counted"
    )
    known[other] += tokens - known.total()
    names = [f"`{_plain(name)}` ({count / tokens:.1%})" for name, count in known.items() if count]
    yield "\n## Training\n"
    rows = [
        ("data", ", ".join(names) or "none"),
        ("iterations", f"{trained.iteration:,} of {config.training.train_iters:,}"),
        ("tokens", f"{tokens:,}{batches.since}"),
        ("batch", ", then ".join(sizes)),
        ("context", f"{config.batch.sequence_length:,} tokens, the length of a sample"),
    ]
    for name, loss in trained.losses.items():
        perplexity = f"{math.exp(loss):,.2f}" if loss < 50 else "beyond 1e21"
        rows.append((name, f"{loss:.4f} nats per token (perplexity {perplexity})"))
    yield _table(iter(rows))
    yield "\nOptions, with the values that follow from others:\n\n```text"
    yield from _options(config)
    yield "```"


def _options(config: Config) -> Iterator[str]:
    areas = (vars(getattr(config, area)) for area in AREAS)
    for name, value in (option for area in areas for option in area.items()):
        flag = FLAGS[name]
        is_private = flag.secret or any(word in name for word in PRIVATE) or "/" in str(value)
        if value != flag.default and value is not None and not is_private:
            yield f"--{name}={_plain(written(value))}"


def _table(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _plain(text: str) -> str:
    """Return a name without characters special in Markdown, YAML or a terminal."""
    return "".join(
        letter if letter.isprintable() and letter not in "`|<>\\" else "?" for letter in text
    )[:200]
