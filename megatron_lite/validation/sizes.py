"""Limits on products of sizes, beyond which counts overflow or the list of a step exceeds memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config import Config, Draft
from megatron_lite.config.system import number_of_stages
from megatron_lite.config.values import typed
from megatron_lite.errors import UsageError
from megatron_lite.validation.messages import Problem, problem

# Elements of one kind of weight, or of one tensor of a micro-batch. With optimizer state, all layers and padding this
# stays below 2**63 bytes; the largest machines have 2**57.
MOST_ELEMENTS = 2**56
MOST_SAMPLES = 2**62  # per run; sample indices are 64-bit integers
MOST_LISTED_SAMPLES = 2**18  # per micro-batch; attention and data readers list them
# Passes of micro-batches through stages per step. A step is a list of passes, each of some 300 bytes and 10 us.
MOST_PASSES = 2**20


def sizes(draft: Draft) -> Iterator[Problem]:
    """Check that products of sizes do not overflow, once all sizes are derived."""
    if None in (draft.kv_channels, draft.ffn_hidden_size):
        return
    hidden, ffn = draft.hidden_size, draft.ffn_hidden_size
    head_channels = draft.num_attention_heads * draft.kv_channels
    weights = {
        "vocab_size hidden_size": draft.vocab_size * hidden,
        "max_position_embeddings hidden_size": draft.max_position_embeddings * hidden * draft.use_position_embeddings,
        "num_layers hidden_size num_attention_heads kv_channels": 4 * draft.num_layers * hidden * head_channels,
        "num_layers hidden_size ffn_hidden_size": 3 * draft.num_layers * hidden * ffn,
    }
    names, number = max(weights.items(), key=lambda pair: pair[1])
    if number > MOST_ELEMENTS:
        yield problem(draft, names, f"the model would have {number:.1e} weights; write smaller sizes")
        return
    if draft.sequential_micro_batches is None:  # the batch is wrong
        return
    micro = max(draft.micro_batch_size or 1, draft.eval_micro_batch_size or 1)
    channels = max(3 * head_channels, 2 * ffn, hidden, draft.vocab_size)
    elements = micro * draft.sequence_length * channels
    if elements > MOST_ELEMENTS:
        rule = f"a tensor of a micro-batch would have {elements:.1e} elements; write smaller sizes"
        yield problem(draft, "micro_batch_size sequence_length", rule)
        return
    for name in ("train_iters", "validation_iters", "test_iters"):
        iterations = getattr(draft, name)
        if iterations != "all" and iterations * (draft.batch_size or 1) > MOST_SAMPLES:
            yield problem(draft, f"{name} batch_size", "more than 2**62 samples; write smaller numbers")


def check_passes(config: Config) -> None:
    """Refuse a resolved configuration whose micro-batches or steps are too long for a list.

    Raises:
        UsageError: if one of them is.
    """
    batch, blocks = config.batch, config.multi_stage.layers_per_stage
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        if (getattr(batch, name) or 1) > MOST_LISTED_SAMPLES:
            raise UsageError(
                f"{typed(batch, name)}: a micro-batch has at most {MOST_LISTED_SAMPLES:,} samples; write a smaller "
                "value, and use more micro-batches"
            )
    micro_batches = batch.sequential_micro_batches or 1
    passes = micro_batches * number_of_stages(config.model.num_layers, 1.0 if blocks == "auto" else blocks)
    if passes > MOST_PASSES:
        raise UsageError(
            f"{typed(batch, 'batch_size', 'micro_batch_size')}: a step would pass {micro_batches} micro-batches of a "
            "rank through each stage; write a smaller --batch_size, a larger --micro_batch_size, or use more ranks"
        )
