"""Rules for sizes: what --tensor_parallel must divide, and products that overflow counts or exceed
memory as lists."""

from __future__ import annotations

import math

from megatron_lite.config import Config, Draft
from megatron_lite.config.dimensions import ranks_per_sample
from megatron_lite.config.system import number_of_chunks, number_of_stages, shard_of_node
from megatron_lite.config.training import ITERATIONS
from megatron_lite.config.values import counted, typed
from megatron_lite.errors import UsageError
from megatron_lite.validation.rules import Problems, nearest_multiples

CLIPPING_ALIGNMENT = 64  # elements: `kernels.adamw.ALIGNMENT`


def data_ranks(draft: Draft, world_size: int) -> int:
    """Return the number of data-parallel ranks."""
    return max(1, world_size // ranks_per_sample(draft))


def tensor_parallel(draft: Draft, world_size: int) -> Problems:
    """Check that heads, channels, vocabulary, tokens and ranks divide by --tensor_parallel."""
    ranks = draft.tensor_parallel
    fitting = _fitting(draft, world_size)
    if world_size % ranks:
        have = f"the run has {counted(world_size, 'rank')}"
        rule = f"{have}, which must be a multiple; start more with torchrun, or write --tensor_parallel={fitting}"
        yield "tensor_parallel", rule, "world_size dry_run"
    heads, groups = draft.num_attention_heads, draft.head_groups or draft.num_attention_heads
    if heads % ranks:
        few = "there are more ranks than query heads, of which " if ranks > heads else ""
        rule = (
            f"{few}each rank takes equally many{'' if few else ' query heads'}; write --tensor_parallel={fitting}, or "
            f"nearest heads: {nearest_multiples(heads, ranks)}"
        )
        yield "tensor_parallel num_attention_heads", rule
    elif groups % ranks and ranks % groups:
        rule = f"key/value heads must divide by the ranks or the ranks by them; write --tensor_parallel={fitting}"
        yield "tensor_parallel head_groups", rule, "num_attention_heads"
    elif groups < ranks and (draft.update_rms_clip or draft.clip_update_norm_sigma) is not None:
        yield from _clipped_updates(draft, heads // ranks)
    for name in ("ffn_hidden_size", *["moe_ffn_hidden_size"] * (draft.num_experts > 1)):
        if (width := getattr(draft, name)) and width % ranks:
            nearest = nearest_multiples(width, ranks)
            rule = (
                f"each rank takes equally many channels of the MLP; nearest {name}: {nearest}; or write "
                f"--tensor_parallel={fitting}"
            )
            yield f"tensor_parallel {name}", rule
    if draft.sequence_tensor_parallel and draft.sequence_length % ranks:
        nearest = nearest_multiples(draft.sequence_length, ranks)
        rule = (
            f"each rank takes equally many positions; nearest sequence_length: {nearest}; or leave "
            "sequence_tensor_parallel out"
        )
        yield "sequence_tensor_parallel tensor_parallel sequence_length", rule
    rows = draft.vocabulary_rows(ranks)
    if draft.parallel_embeddings and rows * (ranks - 1) >= draft.vocab_size:
        rule = (
            f"with {rows} rows of the vocabulary per rank, some of the {ranks} ranks would have none; write a smaller "
            "--tensor_parallel or --make_vocab_size_divisible_by, or --parallel_embeddings=0"
        )
        yield "tensor_parallel vocab_size", rule, "make_vocab_size_divisible_by parallel_embeddings"


def pipeline_parallel(draft: Draft, world_size: int) -> Problems:
    """Check that ranks and stages suffice for --pipeline_parallel; choose schedule and
    placement."""
    ranks = draft.pipeline_parallel
    if world_size % (ranks * draft.tensor_parallel) and world_size % draft.tensor_parallel == 0:
        fitting = math.gcd(ranks, world_size // draft.tensor_parallel)
        rule = (
            f"the run has {counted(world_size, 'rank')}, which must be a multiple of pipeline times tensor-"
            f"parallel ranks; start more with torchrun, or write --pipeline_parallel={fitting}"
        )
        yield "pipeline_parallel", rule, "tensor_parallel world_size dry_run"
    if ranks == 1:
        return
    size = draft.layers_per_stage
    stages = draft.num_layers if size == "auto" else number_of_stages(draft.num_layers, size) - 2
    schedule, placement = draft.pipeline_schedule, draft.pipeline_placement = _chosen_pipeline(
        draft, stages
    )
    if schedule != "breadth_first" and placement != (
        "v" if schedule == "zero_bubble_v" else "loop"
    ):
        other = "zero_bubble_v" if placement == "v" else "one_f_one_b or interleaved"
        rule = f"this schedule needs the other placement; write --pipeline_schedule=breadth_first or {other}"
        yield "pipeline_schedule pipeline_placement", rule
    if not number_of_chunks(ranks, stages, schedule, placement):
        least = ranks * (2 if placement == "v" else 1)
        rule = (
            f"--pipeline_placement={placement} takes at least {least} stages of blocks, and there "
            f"{'are' if stages > 1 else 'is'} {stages}; write a smaller --pipeline_parallel or --layers_per_stage"
        )
        yield "pipeline_parallel num_layers layers_per_stage", rule, "pipeline_placement"


def data_parallel_shard(draft: Draft, world_size: int, nodes: int) -> Problems:
    """Derive --data_parallel_shard; check that it divides the data-parallel ranks. nodes: see
    `resolve`."""
    ranks, size = data_ranks(draft, world_size), draft.data_parallel_shard
    replicas = draft.replica_dcn_axis_size * draft.replica_ici_axis_size
    if replicas > 1 and (ranks % replicas or size not in (None, ranks // replicas)):
        names = draft.changed(
            "replica_dcn_axis_size", "replica_ici_axis_size", "data_parallel_shard"
        )
        many = "equally many" if size is None else f"{size}"
        rule = f"{ranks} data-parallel ranks are not {replicas} replicas of {many}; write only --data_parallel_shard"
        yield " ".join(names), rule, "tensor_parallel pipeline_parallel world_size dry_run"
    elif size is None and (replicas > 1 or nodes or draft.zero_stage != 3):
        of_node = shard_of_node(draft, world_size, nodes) if draft.zero_stage == 3 and nodes else 0
        draft.data_parallel_shard = ranks // replicas if replicas > 1 else of_node
    elif size and ranks % size:
        rule = (
            f"the {counted(ranks, 'data-parallel rank')} must be a multiple; start more with torchrun, or write "
            f"--data_parallel_shard={math.gcd(size, ranks)}"
        )
        yield "data_parallel_shard", rule, "tensor_parallel pipeline_parallel world_size dry_run"


def expert_parallel(draft: Draft, world_size: int) -> Problems:
    """Check that experts and ranks divide by --expert_parallel."""
    ranks, experts = draft.expert_parallel, draft.num_experts
    whole = data_ranks(draft, world_size)
    shard = draft.data_parallel_shard or whole
    others = "tensor_parallel pipeline_parallel world_size dry_run"
    if experts == 1:
        return
    if experts % ranks:
        rule = f"each rank has equally many of them; write --expert_parallel={math.gcd(ranks, experts)}"
        yield "expert_parallel num_experts", rule
    elif whole % ranks:
        rule = (
            f"the {counted(whole, 'data-parallel rank')} must be a multiple; start more with torchrun, or write "
            f"--expert_parallel={math.gcd(ranks, whole)}"
        )
        yield "expert_parallel", rule, others
    elif shard % ranks:
        rule = f"the ranks of a replica have all experts; write --expert_parallel={math.gcd(ranks, shard)}"
        yield "expert_parallel data_parallel_shard", rule, others


def _chosen_pipeline(draft: Draft, stages: int) -> tuple[str, str]:
    """Return schedule and placement without `auto`. stages: of blocks."""
    schedule, placement = draft.pipeline_schedule, draft.pipeline_placement
    fits_v = placement != "loop" and number_of_chunks(
        draft.pipeline_parallel, stages, "zero_bubble_v", "v"
    )
    if schedule == "auto":
        schedule = "breadth_first"
        if (draft.zero_stage or 1) == 1 and (fits_v or placement != "v"):
            schedule = "zero_bubble_v" if fits_v else "one_f_one_b"
    if placement == "auto":
        in_v = schedule == "zero_bubble_v" or (
            schedule == "breadth_first" and draft.tie_word_embeddings and fits_v
        )
        placement = "v" if in_v else "loop"
    return schedule, placement


def _fitting(draft: Draft, world_size: int) -> int:
    """Return a divisor of --tensor_parallel that satisfies all rules except the vocabulary's."""
    heads, groups = draft.num_attention_heads, draft.head_groups or draft.num_attention_heads
    positions = draft.sequence_length if draft.sequence_tensor_parallel else 0
    widths = draft.ffn_hidden_size or 0, draft.moe_ffn_hidden_size or 0
    fitting = math.gcd(draft.tensor_parallel, world_size, heads, *widths, positions)
    return fitting if groups % fitting == 0 or fitting % groups == 0 else math.gcd(fitting, groups)


def _clipped_updates(draft: Draft, heads: int) -> Problems:
    """Check that replicated key/value heads start at an optimizer block boundary. heads: query
    heads per rank."""
    if draft.kv_channels is None:  # the heads are wrong
        return
    # of a channel: those of an adapter, which alone is trained, of a bias or of a weight
    elements = draft.lora_rank or (1 if draft.add_qkv_biases else draft.hidden_size)
    elements *= heads * draft.kv_channels
    if elements % CLIPPING_ALIGNMENT:
        clip = "update_rms_clip" if draft.update_rms_clip is not None else "clip_update_norm_sigma"
        rule = (
            f"several ranks hold the same key/value heads, after {elements} elements of queries; clipping needs a "
            f"multiple of {CLIPPING_ALIGNMENT}; write another --tensor_parallel or leave --{clip} out"
        )
        yield f"tensor_parallel {clip}", rule, "head_groups num_attention_heads kv_channels"


# Elements of one kind of weight, or of one tensor in a micro-batch. With optimizer state, all
# layers and padding this stays below 2**63 bytes; the largest machines have 2**57.
MOST_ELEMENTS = 2**56
MOST_SAMPLES = 2**62  # per run; sample indices are 64-bit integers
MOST_LISTED_SAMPLES = 2**18  # per micro-batch; attention and data readers list them
# Passes of micro-batches through stages per step. A step is a list of passes, each of some 300
# bytes and 10 us.
MOST_PASSES = 2**20


def sizes(draft: Draft) -> Problems:
    """Check that products of sizes do not overflow, once all sizes are derived."""
    if None in (draft.kv_channels, draft.ffn_hidden_size, draft.moe_ffn_hidden_size):
        return
    hidden, ffn = draft.hidden_size, draft.ffn_hidden_size
    head_channels = draft.num_attention_heads * draft.kv_channels
    width, shared = draft.moe_ffn_hidden_size, draft.num_shared_experts * (draft.num_experts > 1)
    weights = {
        "vocab_size hidden_size": draft.vocab_size * hidden,
        "max_position_embeddings hidden_size": draft.max_position_embeddings
        * hidden
        * draft.use_position_embeddings,
        "num_layers hidden_size num_attention_heads kv_channels": 4
        * draft.num_layers
        * hidden
        * head_channels,
        "num_layers hidden_size ffn_hidden_size": 3 * draft.num_layers * hidden * ffn,
        "num_layers hidden_size moe_ffn_hidden_size num_experts num_shared_experts": 3
        * draft.num_layers
        * hidden
        * width
        * (draft.num_experts + shared),
    }
    names, number = max(weights.items(), key=lambda pair: pair[1])
    if number > MOST_ELEMENTS:
        yield names, f"the model would have {number:.1e} weights; write smaller sizes"
        return
    if draft.sequential_micro_batches is None:  # the batch is wrong
        return
    micro = max(draft.micro_batch_size or 1, draft.eval_micro_batch_size or 1)
    experts = 2 * width * max(draft.num_experts_per_token, shared)
    channels = max(3 * head_channels, 2 * ffn, experts, hidden, draft.vocab_size)
    elements = micro * draft.sequence_length * channels
    if elements > MOST_ELEMENTS:
        rule = f"a tensor of a micro-batch would have {elements:.1e} elements; write smaller sizes"
        yield "micro_batch_size sequence_length", rule
        return
    for name in ITERATIONS.values():
        iterations = getattr(draft, name)
        if iterations != "all" and iterations * (draft.batch_size or 1) > MOST_SAMPLES:
            yield f"{name} batch_size", "more than 2**62 samples; write smaller numbers"


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
    passes = micro_batches * number_of_stages(
        config.model.num_layers, 1.0 if blocks == "auto" else blocks
    )
    if passes > MOST_PASSES:
        raise UsageError(
            f"{typed(batch, 'batch_size', 'micro_batch_size')}: a step would pass {micro_batches} micro-batches of a "
            "rank through each stage; write a smaller --batch_size, a larger --micro_batch_size, or use more ranks"
        )
