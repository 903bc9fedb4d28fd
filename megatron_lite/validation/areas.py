"""Rules per area of options: model, positions, computation, its source, the update, stages, data,
output files."""

from __future__ import annotations

import contextlib
import math
import os

from megatron_lite.config import Draft
from megatron_lite.config.model import numbered_blocks, repeating, rotary_base
from megatron_lite.config.monitoring import default_trackers
from megatron_lite.config.structured_values import (
    interconnect,
    keep_rules,
    lr_scale_patterns,
    module_expression,
    sample_ranges,
    size_bytes,
    storage_address,
    weight_stages,
    weighted_paths,
)
from megatron_lite.config.system import number_of_stages
from megatron_lite.config.training import ITERATIONS, NO_MASK, OWN_DATA
from megatron_lite.config.values import is_number, written
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.validation.experts import experts
from megatron_lite.validation.rules import (
    Problem,
    Problems,
    default,
    fill,
    nearest_multiples,
    parsing,
)

MANY_TOKENS = 2**50  # until an epoch's tokens are known
DEFAULT_MINUTES = 15.0  # between checkpoints, if no flag sets it


def model(draft: Draft) -> Problems:
    """Check and derive the model's shape and its initial weights."""
    heads, hidden = draft.num_attention_heads, draft.hidden_size
    fill(draft, head_groups=heads)
    if heads % draft.head_groups:
        rule = f"key/value heads must serve equally many query heads; set --head_groups to a divisor of {heads}"
        yield "num_attention_heads head_groups", rule
    if hidden % heads and not draft.changed("kv_channels"):
        nearest = nearest_multiples(hidden, heads)
        rule = f"hidden_size must be a multiple of num_attention_heads; nearest: {nearest}; or set --kv_channels"
        yield "hidden_size num_attention_heads", rule, "kv_channels"
        return
    fill(draft, kv_channels=hidden // heads, ffn_hidden_size=4 * hidden)
    fill(
        draft,
        activation_type="silu" if draft.gated else "gelu",
        embedding_dropout=draft.hidden_dropout,
    )
    fill(draft, add_qkv_biases=draft.add_linear_biases, add_mlp_biases=draft.add_linear_biases)
    fill(draft, use_position_embeddings=not draft.use_rotary_embeddings)
    # they derive numbers from it
    scaled = draft.use_rotary_embeddings and draft.rope_type in ("llama3", "yarn", "longrope")
    fill(draft, max_position_embeddings=max(2048 if scaled else 1, draft.sequence_length))
    if draft.use_position_embeddings and draft.sequence_length > draft.max_position_embeddings:
        rule = (
            f"samples are longer than the learned positions; write --sequence_length={draft.max_position_embeddings}, "
            f"or --max_position_embeddings={draft.sequence_length} for a model that is not trained yet"
        )
        yield "sequence_length max_position_embeddings", rule, "use_position_embeddings"
    yield from experts(draft)
    yield from _rotary(draft)
    draft.attention_pattern = repeating(draft.attention_pattern, "window")
    fill(draft, norm_placement="both" if draft.hybrid_norm else "pre")
    fill(draft, hybrid_norm=draft.norm_placement == "both")
    if draft.hybrid_norm != (draft.norm_placement == "both"):
        yield "hybrid_norm norm_placement", "hybrid_norm means both; leave one of the two out"
    if draft.mup and draft.mup_base_hidden_size is not None:
        hidden = draft.mup_base_hidden_size
        yield from _mup(draft)
    std = draft.init_method_std = default(draft.init_method_std, hidden**-0.5)
    fill(draft, init_method_std_embed=std, init_method_std_qkv=std, init_method_std_mlp_1=std)
    # every block adds two outputs to the residual stream
    residual_std = std / math.sqrt(2 * draft.num_layers)
    fill(draft, init_method_std_attn_proj=residual_std, init_method_std_mlp_2=residual_std)


def _mup(draft: Draft) -> Problems:
    """Derive the base model's channels per head, and check that this model is a multiple of it."""
    fill(draft, mup_base_kv_channels=draft.kv_channels)
    for name in ("hidden_size", "kv_channels"):
        if getattr(draft, name) % getattr(draft, f"mup_base_{name}"):
            rule = f"write a divisor of {name}: this model must be a whole number of times as wide as its base"
            yield f"mup_base_{name} {name}", rule, "mup"


def performance(draft: Draft) -> Problems:
    """Check the recomputation and loss block options against the model."""
    if draft.recompute_layers > draft.num_layers:
        yield "recompute_layers num_layers", f"write at most {draft.num_layers}"
    if numbered_blocks(draft.mlp_recompute_level) > draft.num_layers:
        yield (
            "mlp_recompute_level num_layers",
            f"write numbers that add up to at most {draft.num_layers}",
        )
    if (
        draft.cross_entropy_block_size is not None
        and draft.cross_entropy_block_size > draft.vocab_size
    ):
        yield "cross_entropy_block_size vocab_size", f"write at most {draft.vocab_size}"


# --- Rotary positions


def _rotary(draft: Draft) -> Problems:
    """Derive the base from minus its logarithm or vice versa, and check the RoPE type's options."""
    scale = draft.rotary_embedding_scale
    base = draft.rotary_base = default(
        draft.rotary_base, 10000.0 if scale is None else rotary_base(scale)
    )
    draft.rotary_embedding_scale = default(scale, -math.log(base))
    if abs(draft.rotary_embedding_scale + math.log(base)) > 1e-9:
        rule = "the scale must be minus the logarithm of the base; write only one of the two"
        yield "rotary_base rotary_embedding_scale", rule
    draft.rotary_pattern = repeating(draft.rotary_pattern, "rotary")
    if not draft.use_rotary_embeddings:
        return
    yield from _rotated_channels(draft)
    if draft.rope_type == "llama3":
        yield from _llama3(draft)
    elif draft.rope_type == "yarn":
        yield from _yarn(draft)
    elif draft.rope_type == "longrope":
        yield from _longrope(draft)
    if draft.rope_type != "default":
        yield from _scaling(draft)


def _rotated_channels(draft: Draft) -> Problems:
    """Check that the number of rotated channels is even."""
    part = draft.rotary_percent
    channels = draft.kv_channels
    rotated = draft.rotated_channels
    if part == 1.0 and channels % 2:
        yield Problem(
            ("kv_channels", "use_rotary_embeddings", "hidden_size", "num_attention_heads"),
            f"--use_rotary_embeddings=1: channels are rotated in pairs, but a head has {channels} (kv_channels); "
            "write an even --kv_channels",
        )
    if part < 1.0 and (rotated % 2 or rotated == 0):
        even = [
            number
            for number in (rotated - 1, rotated + 1, 2)
            if number % 2 == 0 and 0 < number <= channels
        ]
        fix = (
            f"--rotary_percent={_percent(even[0], channels)} rotates {even[0]}"
            if even
            else "use more --kv_channels"
        )
        rule = f"rotates {rotated} of a head's {channels} channels (kv_channels), but they rotate in pairs; {fix}"
        yield "rotary_percent", rule, "kv_channels"


def _percent(rotated: int, channels: int) -> str:
    """Return the shortest decimal fraction of `channels` that rounds down to `rotated` channels."""
    for digits in range(1, 16):
        part = math.ceil(rotated / channels * 10**digits) / 10**digits
        if int(channels * part) == rotated:
            return written(part)
    return f"{rotated} / {channels}"


def _llama3(draft: Draft) -> Problems:
    low = draft.rope_low_freq_factor = default(draft.rope_low_freq_factor, 1.0)
    high = draft.rope_high_freq_factor = default(draft.rope_high_freq_factor, 4.0)
    if high <= low:
        rule = "frequencies between the two are interpolated, so the high factor must be greater (usually 4 and 1)"
        yield "rope_high_freq_factor rope_low_freq_factor", rule


def _yarn(draft: Draft) -> Problems:
    fill(draft, rope_truncate=True)
    fast = draft.rope_beta_fast = default(draft.rope_beta_fast, 32.0)
    slow = draft.rope_beta_slow = default(draft.rope_beta_slow, 1.0)
    if fast < slow:
        rule = (
            "the ramp must end at no fewer turns than it starts at; 32 and 1 are the usual values"
        )
        yield "rope_beta_fast rope_beta_slow", rule
    scales = draft.changed("rope_mscale", "rope_mscale_all_dim")
    if len(scales) == 1:
        other = "rope_mscale" if scales == ["rope_mscale_all_dim"] else "rope_mscale_all_dim"
        yield (
            scales[0],
            f"has an effect only together with {other}; write --{other} as well, or leave it out",
            other,
        )
    if scales and draft.rope_attention_factor is not None:
        rule = "the mscales derive the attention factor; leave out either the factor or the mscales"
        yield " ".join(("rope_attention_factor", *scales)), rule


def _longrope(draft: Draft) -> Problems:
    pairs = draft.rotated_channels // 2
    for name in ("rope_short_factor", "rope_long_factor"):
        if len(getattr(draft, name)) != pairs:
            rule = f"takes {pairs} numbers, one for each pair of rotated channels"
            yield name, rule, "rope_type kv_channels rotary_percent"


def _scaling(draft: Draft) -> Problems:
    """Derive the original length (max_position_embeddings) and YaRN's factor (the quotient), like
    Hugging Face."""
    longest, original = draft.max_position_embeddings, draft.rope_original_max_position_embeddings
    derives = draft.rope_type in ("yarn", "longrope")
    if draft.rope_factor is None and derives and original is not None:
        if longest < original:
            rule = "their quotient, rope_factor, must be >= 1; raise --max_position_embeddings, or write --rope_factor"
            names = "max_position_embeddings rope_original_max_position_embeddings"
            yield names, rule, "rope_factor"
            return
        draft.rope_factor = longest / original
    if draft.rope_factor is None:
        alternative = " or --rope_original_max_position_embeddings=<positions>" if derives else ""
        yield (
            "rope_type",
            f"the scaling factor is missing; write --rope_factor=<factor>{alternative}",
            "rope_factor",
        )
    elif draft.rope_type != "linear":
        fill(draft, rope_original_max_position_embeddings=longest)


PREFETCH_FACTOR = 2


def source(draft: Draft) -> Problems:
    """Check what to load from a pretrained checkpoint."""
    weights = "model" in draft.load_parts
    if draft.pretrained_checkpoint_path and weights == (draft.load_parts == ("architecture",)):
        rule = "takes architecture, or model and after it optimizer, step or both, as in "
        yield "load_parts", f"{rule}--load_parts=model,optimizer,step"


def update(draft: Draft) -> Problems:
    """Check and derive the loss scale and the weight-decay patterns and mask."""
    dynamic = draft.training_dtype == "fp16" and draft.loss_scale is None
    if dynamic and draft.initial_loss_scale < draft.min_loss_scale:
        rule = "the first loss scale is below the smallest; write --min_loss_scale of at most the first"
        yield "initial_loss_scale min_loss_scale", rule, "training_dtype loss_scale"
    elif not dynamic:
        fill(draft, loss_scale=1.0)
    for name in ("weight_decay_modules", "quantization_targets", "lora_targets"):
        for pattern in getattr(draft, name):
            yield from parsing(name, module_expression, name, pattern)
    if not draft.weight_decay_modules:
        fill(draft, weight_decay_default_mask="fast_llm")


def multi_stage(draft: Draft) -> Problems:
    """Check stages, buffers, learning-rate scales and the planned link; derive the ZeRO stage."""
    yield from parsing("interconnect", interconnect, draft.interconnect)
    yield from parsing("freeze lr_scales", lr_scale_patterns, draft.freeze, draft.lr_scales)
    scales = draft.mlp_lr_scale, *(item.rpartition(":")[2] for item in draft.lr_scales)
    if draft.lora_rank and any(scale is not None and not float(scale) for scale in scales):
        rule = "a scale of 0 would freeze adapters; select fewer with --lora_targets"
        yield "lora_rank lr_scales", rule, "mlp_lr_scale"
    fill(draft, zero_stage=1)
    if not draft.split_master_weights:
        return
    buffers, size = draft.num_weight_buffers, draft.layers_per_stage
    stages = None if size == "auto" else number_of_stages(draft.num_layers, size)
    if buffers is None and draft.zero_stage == 3:
        name, fix = "zero_stage", "write --zero_stage=1 or 2"
    elif buffers is not None and (stages is None or buffers < stages - draft.tie_word_embeddings):
        name, fix = "num_weight_buffers", "leave num_weight_buffers out"
    else:
        return
    rule = (
        "the bf16 weights are half of the master, so every stage needs its own weight buffer; "
        f"{fix}, or leave split_master_weights out"
    )
    yield f"split_master_weights {name}", rule, "num_layers layers_per_stage tie_word_embeddings"


def profiles(draft: Draft, world_size: int) -> Problems:
    """Check that the ranks to profile exist."""
    if max(draft.profile_ranks, default=0) >= world_size:
        ranks = f"the ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
        yield "profile_ranks", f"{ranks}; leave out profile_ranks to profile all"


def length(draft: Draft) -> Problems:
    """Derive the iterations from other goals, as far as possible before data and earlier starts are
    known."""
    if draft.train_iters:
        return
    if draft.epochs is not None and (
        any(map(is_number, draft.data_path)) or draft.data_weights_schedule
    ):
        rule = "with weights, no iteration has read every token once; leave them out, or write --train_tokens"
        yield "epochs data_path", rule, "data_weights_schedule"
    elif draft.batch_size is not None:
        tokens = MANY_TOKENS if draft.epochs is not None else draft.train_tokens or 0
        draft.train_iters = batch_schedule(draft).iterations_of(tokens)


def data(draft: Draft) -> Problems:
    """Check the data, and that every phase has a share of the split."""
    if draft.num_workers > 0:
        fill(draft, prefetch_factor=PREFETCH_FACTOR)
    if not 1 <= len(draft.split) <= 3 or not 0 < sum(draft.split) < math.inf:
        rule = "takes up to three proportions (training, validation, test) with a positive sum, as in --split=969,30,1"
        yield "split", rule
        return
    is_default = not draft.changed("split")
    draft.split += (0.0,) * (3 - len(draft.split))
    if draft.dataset_source == "random":
        if draft.tokenizer_file == "none":
            draft.tokenizer_file = None
        return
    own = {phase: flag for phase, flag in OWN_DATA.items() if getattr(draft, flag)}
    # as in Megatron-LM, with a separate validation set the rest is for training
    if is_default and own:
        draft.split = (1.0, 0.0, 0.0) if "validation" in own else (*draft.split[:2], 0.0)
    for flag in own.values():
        yield from parsing(flag, weighted_paths, getattr(draft, flag), flag)
    needed = [phase for phase, name in ITERATIONS.items() if getattr(draft, name) != 0]
    if not draft.data_path and (not own or not {*needed} <= {*own}):
        if draft.dry_run:  # a dry run reads no data
            return
        yield Problem(
            ("data_path", "dataset_source"),
            "--data_path is missing: write the prefix of a .bin/.idx pair (scripts/prepare_data.py makes them), "
            "or --dataset_source=random for random tokens",
        )
    elif draft.dataset_source == "file":
        if len(draft.data_path) != 1:
            yield "dataset_source data_path", "name one JSON file, which holds the prefixes"
    else:
        yield from parsing("skip_samples", sample_ranges, draft.skip_samples)
        names = "data_path data_weights_schedule"
        yield from parsing(names, weight_stages, draft.data_path, draft.data_weights_schedule)
        words = (*draft.data_path, *draft.valid_data_path, *draft.test_data_path)
        masks, sets = len(draft.loss_mask), sum(not is_number(word) for word in words)
        if masks not in (0, sets) and draft.loss_mask != (NO_MASK,):
            order = " and ".join(f"--{flag}" for flag in ("data_path", *own.values()))
            rule = f"{masks} for {sets} data sets; write one for each, in the order of {order}, or the word none"
            yield "loss_mask", rule, "data_path"
    for number, (share, (phase, name)) in enumerate(
        zip(draft.split, ITERATIONS.items(), strict=True)
    ):
        if phase in own and share > 0:
            rest = written((*draft.split[:number], 0.0, *draft.split[number + 1 :]))
            rule = f"nothing would read that share of --data_path; write --split={rest}, or leave one of the two out"
            yield f"split {own[phase]}", rule
        elif phase not in own and phase in needed and share == 0:
            other = f", data of its own with --{OWN_DATA[phase]}," if phase in OWN_DATA else ""
            rule = f"no documents are left for {phase}; give it a share in --split{other} or write --{name}=0"
            yield f"{own['validation'] if is_default else 'split'} {name}", rule, "split"


def files(draft: Draft) -> Problems:
    """Check checkpoints, exports and samples."""
    fill(draft, export_dtype=draft.training_dtype)
    yield from parsing("keep_checkpoints", keep_rules, draft.keep_checkpoints)
    yield from parsing("export_shard_size", size_bytes, draft.export_shard_size)
    if draft.mirror is not None:
        yield from parsing("mirror", storage_address, draft.mirror, "mirror")
    if draft.export_dtype != draft.training_dtype and draft.export_format == "distributed":
        yield (
            "export_dtype export_format",
            "a resumable checkpoint holds the fp32 masters; leave one of the two out",
        )
    if "averaged" in (draft.keep_best or "") and draft.ema_type == "none":
        yield (
            "keep_best",
            "no average is kept; set --ema_type=ema or write validation_loss",
            "ema_type",
        )
    if draft.sample_interval is not None and draft.sample_tokens >= draft.sequence_length:
        rule = f"a sample and its prompt must fit into sequence_length; write at most {draft.sequence_length - 1}"
        yield "sample_tokens sequence_length", rule
    if draft.experiment_dir is not None:
        if draft.train_iters and not (
            draft.checkpoint_interval or draft.checkpoint_minutes or draft.keep_checkpoints
        ):
            draft.checkpoint_minutes = DEFAULT_MINUTES
        fill(draft, experiment_name=folder_name(draft.experiment_dir))


def tracking(draft: Draft) -> None:
    """Choose the trackers and alerts."""
    fill(draft, log_interval=max(1, min(100, draft.train_iters // 50)))
    fill(draft, wandb_post_alerts=draft.wandb_status_interval is not None)
    draft.trackers = draft.trackers or default_trackers(draft)


def folder_name(path: str) -> str | None:
    """Return the last component of a path, which is made absolute unless the current directory is
    gone."""
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    return os.path.basename(path) or None
