"""Options for a run's start and saves: presets, pretrained weights, checkpoints.

`--model=mistral-7b` expands to the flags of its preset, as if typed before all others. Importing
the publisher's config.json gives the same values, including dropouts and the initial standard
deviation. Presets omit derived and default values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lite.config.option import (
    SAVED,
    Area,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    idle_unless,
    option,
    optional,
)

_GPT2 = (
    "vocab_size=50257 max_position_embeddings=1024 normalization_type=layer_norm layer_norm_eps=1e-5 "
    "add_linear_biases=1 gated=0 activation_type=gelu tie_word_embeddings=1 use_rotary_embeddings=0 "
    "hidden_dropout=0.1 attention_dropout=0.1 init_method_std=0.02"
)
_LLAMA = (
    "normalization_type=rms_norm layer_norm_eps=1e-5 add_linear_biases=0 gated=1 activation_type=silu "
    "tie_word_embeddings=0 use_rotary_embeddings=1 init_method_std=0.02"
)
_LLAMA_3 = (
    f"{_LLAMA} vocab_size=128256 max_position_embeddings=131072 rotary_base=500000 rope_type=llama3 rope_factor=8 "
    "rope_low_freq_factor=1 rope_high_freq_factor=4 rope_original_max_position_embeddings=8192"
)
_PYTHIA = (
    "vocab_size=50304 max_position_embeddings=2048 use_rotary_embeddings=1 rotary_percent=0.25 rotary_base=10000 "
    "normalization_type=layer_norm layer_norm_eps=1e-5 add_linear_biases=1 gated=0 activation_type=gelu_exact "
    "parallel_branches=two_norms tie_word_embeddings=0 init_method_std=0.02"
)
_MISTRAL = (
    f"{_LLAMA} num_layers=32 hidden_size=4096 num_attention_heads=32 head_groups=8 ffn_hidden_size=14336 "
    "max_position_embeddings=32768"
)

PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": f"{_GPT2} num_layers=12 hidden_size=768 num_attention_heads=12",
        "gpt2-medium": f"{_GPT2} num_layers=24 hidden_size=1024 num_attention_heads=16",
        "gpt2-large": f"{_GPT2} num_layers=36 hidden_size=1280 num_attention_heads=20",
        "gpt2-xl": f"{_GPT2} num_layers=48 hidden_size=1600 num_attention_heads=25",
        "llama-2-7b": f"{_LLAMA} num_layers=32 hidden_size=4096 num_attention_heads=32 ffn_hidden_size=11008 "
        "vocab_size=32000 max_position_embeddings=4096 rotary_base=10000",
        "llama-3.1-8b": f"{_LLAMA_3} num_layers=32 hidden_size=4096 num_attention_heads=32 head_groups=8 "
        "ffn_hidden_size=14336",
        "llama-3.2-1b": f"{_LLAMA_3} num_layers=16 hidden_size=2048 num_attention_heads=32 head_groups=8 "
        "ffn_hidden_size=8192 rope_factor=32 tie_word_embeddings=1",
        "mistral-7b": f"{_MISTRAL} vocab_size=32000 rotary_base=10000 window_size=4096",  # v0.1
        "mistral-7b-v0.3": f"{_MISTRAL} vocab_size=32768 rotary_base=1000000",
        "qwen2.5-7b": f"{_LLAMA} num_layers=28 hidden_size=3584 num_attention_heads=28 head_groups=4 "
        "ffn_hidden_size=18944 vocab_size=152064 max_position_embeddings=131072 rotary_base=1000000 "
        "layer_norm_eps=1e-6 add_qkv_biases=1",
        "qwen3-8b": f"{_LLAMA} num_layers=36 hidden_size=4096 num_attention_heads=32 head_groups=8 kv_channels=128 "
        "ffn_hidden_size=12288 vocab_size=151936 max_position_embeddings=40960 rotary_base=1000000 "
        "layer_norm_eps=1e-6 qk_layernorm=1",
        "starcoder2-3b": "num_layers=30 hidden_size=3072 num_attention_heads=24 head_groups=2 ffn_hidden_size=12288 "
        "vocab_size=49152 max_position_embeddings=16384 normalization_type=layer_norm layer_norm_eps=1e-5 "
        "add_linear_biases=1 gated=0 activation_type=gelu tie_word_embeddings=1 use_rotary_embeddings=1 "
        "rotary_base=999999.4420358813 window_size=4096 hidden_dropout=0.1 attention_dropout=0.1 "
        "init_method_std=0.018042",
        "qwen3-0.6b": f"{_LLAMA} num_layers=28 hidden_size=1024 num_attention_heads=16 head_groups=8 kv_channels=128 "
        "ffn_hidden_size=3072 vocab_size=151936 max_position_embeddings=40960 rotary_base=1000000 "
        "layer_norm_eps=1e-6 qk_layernorm=1 tie_word_embeddings=1",
        "smollm2-135m": f"{_LLAMA} num_layers=30 hidden_size=576 num_attention_heads=9 head_groups=3 "
        "ffn_hidden_size=1536 vocab_size=49152 max_position_embeddings=8192 rotary_base=100000 tie_word_embeddings=1 "
        "init_method_std=0.041666666666666664",
        "smollm3-3b": f"{_LLAMA} num_layers=36 hidden_size=2048 num_attention_heads=16 head_groups=4 "
        "ffn_hidden_size=11008 vocab_size=128256 max_position_embeddings=65536 rotary_base=5000000 "
        "rotary_pattern=rotary,rotary,rotary,nope layer_norm_eps=1e-6 tie_word_embeddings=1",
        "olmo-2-1b": f"{_LLAMA} num_layers=16 hidden_size=2048 num_attention_heads=16 ffn_hidden_size=8192 "
        "vocab_size=100352 max_position_embeddings=4096 rotary_base=500000 layer_norm_eps=1e-6 norm_placement=post "
        "qk_layernorm=1 qk_norm_scope=all",
        "gemma-3-270m": f"{_LLAMA} num_layers=18 hidden_size=640 num_attention_heads=4 head_groups=1 kv_channels=256 "
        "ffn_hidden_size=2048 vocab_size=262144 max_position_embeddings=32768 rotary_base=1000000 "
        "window_rotary_base=10000 window_size=512 attention_pattern=window,window,window,window,window,full "
        "activation_type=gelu layer_norm_eps=1e-6 norm_placement=both qk_layernorm=1 zero_centered_normalization=1 "
        "embedding_scale=25.298221281347036 attention_scale=0.0625 tie_word_embeddings=1",
        "pythia-160m": f"{_PYTHIA} num_layers=12 hidden_size=768 num_attention_heads=12 ffn_hidden_size=3072",
        "pythia-1.4b": f"{_PYTHIA} num_layers=24 hidden_size=2048 num_attention_heads=16 ffn_hidden_size=8192",
        "granite-3.3-2b": f"{_LLAMA} num_layers=40 hidden_size=2048 num_attention_heads=32 head_groups=8 "
        "ffn_hidden_size=8192 vocab_size=49159 max_position_embeddings=131072 rotary_base=10000000 tie_word_embeddings=1 "
        "embedding_scale=12 residual_scale=0.22 attention_scale=0.015625 logit_scale=0.125",
        "mixtral-8x7b": f"{_MISTRAL} vocab_size=32000 rotary_base=1000000 num_experts=8 num_experts_per_token=2 "
        "expert_auxiliary_loss_coefficient=0.02",
        "qwen3-30b-a3b": f"{_LLAMA} num_layers=48 hidden_size=2048 num_attention_heads=32 head_groups=4 kv_channels=128 "
        "ffn_hidden_size=6144 vocab_size=151936 max_position_embeddings=40960 rotary_base=1000000 "
        "layer_norm_eps=1e-6 qk_layernorm=1 num_experts=128 num_experts_per_token=8 moe_ffn_hidden_size=768 "
        "expert_auxiliary_loss_coefficient=0.001",
        "olmoe-1b-7b": f"{_LLAMA} num_layers=16 hidden_size=2048 num_attention_heads=16 ffn_hidden_size=1024 "
        "vocab_size=50304 max_position_embeddings=4096 rotary_base=10000 qk_layernorm=1 qk_norm_scope=all "
        "num_experts=64 num_experts_per_token=8 moe_normalize_top_k=0 expert_auxiliary_loss_coefficient=0.01",
        "gpt-oss-20b": f"{_LLAMA} num_layers=24 hidden_size=2880 num_attention_heads=64 head_groups=8 kv_channels=64 "
        "ffn_hidden_size=2880 vocab_size=201088 max_position_embeddings=131072 rotary_base=150000 rope_type=yarn "
        "rope_factor=32 rope_original_max_position_embeddings=4096 rope_truncate=0 window_size=128 "
        "attention_pattern=window,full attention_sinks=1 add_linear_biases=1 activation_type=quick_gelu "
        "activation_limit=7 num_experts=32 num_experts_per_token=4 moe_router_bias=1 "
        "expert_auxiliary_loss_coefficient=0.9",
    }
)

# Options that have no effect unless another one has this value.
PRETRAINED = "pretrained_checkpoint_path"
pretrained_option = idle_unless(PRETRAINED)
IMPORTED = "pretrained_checkpoint_type=huggingface"


@dataclass
class SourceConfig(Area):
    """Presets and pretrained weights"""

    model: str | None = optional(
        "set the flags of a known architecture; other flags override them",
        "none",
        choices=tuple(PRESETS),
        basic=True,
    )
    pretrained_checkpoint_path: str | None = optional(
        "start from this folder: a Hugging Face model, a checkpoint, or the newest in another run's experiment_dir",
        "none",
        never_empty=True,
        basic=True,
    )
    pretrained_checkpoint_type: str | None = pretrained_option(
        None,
        "type of the pretrained folder",
        choices=("huggingface", "distributed"),
        unset="detected",
    )
    use_pretrained_config: bool = pretrained_option(
        True,
        "take the architecture from the pretrained folder; 0: from the flags, which must agree",
    )
    ignore_pretrained_config: bool = pretrained_option(
        False,
        "let flags override the architecture of the pretrained folder, provided that its weights fit",
        excludes=(
            Rule(
                "load_parts=architecture",
                "with --use_pretrained_config=0, nothing of --pretrained_checkpoint_path would be used",
                when=f"{PRETRAINED} and use_pretrained_config=0",
                fix="leave one of the four out",
            ),
        ),
    )
    load_parts: tuple[str, ...] = pretrained_option(
        ("model",),
        "parts to load: architecture alone, with new initial weights; model: weights; optimizer (moments; without step "
        "the run still starts at iteration 0); step (completed iterations, which set the learning rate and the "
        "position in the data)",
        choices=("architecture", "model", "optimizer", "step"),
        excludes=(
            Rule(
                IMPORTED,
                "a Hugging Face folder has neither iterations nor optimizer state",
                when=f"load_parts=optimizer|step and {PRETRAINED}",
            ),
        ),
    )
    allow_partial_checkpoint: bool = pretrained_option(
        False,
        "start from a checkpoint that lacks parameters of the model or has extra ones: initialize the missing ones, "
        "and list both (with ignore_pretrained_config if model flags differ)",
        excludes=(
            Rule(IMPORTED, "only checkpoints of this program may be partial", when=PRETRAINED),
        ),
    )
    resize_vocabulary: str | None = pretrained_option(
        None,
        "give pretrained embedding and head vocab_size rows: new ones are the mean of the old ones, or random initial "
        "weights",
        choices=("mean", "random"),
        excludes=(
            Rule("load_parts=architecture", "all weights are new", when=PRETRAINED),
            Rule("load_parts=optimizer", "the new rows have no moments", when=PRETRAINED),
        ),
        unset="none: the sizes must agree",
    )


LOADED = Rule(
    "experiment_dir or load_checkpoint_path", "there is nothing to load", when="dry_run=0"
)
STARTS_ANEW = Rule("load_policy=never", "a run that starts from scratch loads no checkpoint")


@dataclass
class CheckpointConfig(Area):
    """Checkpoints"""

    checkpoint_interval: PositiveInt | None = optional(
        "iterations between checkpoints",
        "only the last iteration",
        basic=True,
        aliases="save_interval",
        needs=SAVED,
    )
    checkpoint_minutes: PositiveFloat | None = optional(
        "also save this many minutes after the last save, by rank 0's clock",
        "15 without checkpoint_interval and keep_checkpoints",
        needs=SAVED,
    )
    max_checkpoints: PositiveInt | None = optional(
        "keep the newest N checkpoints, and those of keep_checkpoints",
        "all",
        basic=True,
        idle_unless="experiment_dir",
    )
    keep_best: str | None = optional(
        "save after each validation with the lowest value so far of this metric, never delete the best checkpoint, and "
        "keep its weights in export/best: validation_loss, or validation_loss/<name> of one data set",
        "off",
        choices=("validation_loss", "validation_averaged_loss"),
        also=r"validation_(averaged_)?loss/.+",
        value_aliases={
            "loss": "validation_loss",
            "val_loss": "validation_loss",
            "eval_loss": "validation_loss",
        },
        needs=(*SAVED, Rule("validation_iters", "nothing is validated")),
        idle_unless="train_iters",
    )
    keep_checkpoints: tuple[str, ...] = option(
        (),
        'save, and never delete, checkpoints at these iterations: "1000:10000 5000" is every multiple of 1000 up to '
        "10000, then every multiple of 5000",
        needs=SAVED,
    )
    delete_old_temp_checkpoints: bool = option(
        True,
        "let max_checkpoints delete the checkpoints of earlier starts; 0: keep them",
        idle_unless="max_checkpoints",
    )
    load_policy: str = option(
        "auto",
        "auto: resume if there is a checkpoint, else start from scratch; require: fail without one (exit 4); never: "
        "fail if experiment_dir has one, else start from scratch",
        choices=("auto", "require", "never"),
        needs=(LOADED._replace(when="load_policy=require and dry_run=0"),),
    )
    load_checkpoint_path: str | None = optional(
        "resume from elsewhere, with all state, until experiment_dir has a checkpoint: a checkpoint, a folder of them "
        "or an experiment directory",
        "none",
        never_empty=True,
        excludes=(
            STARTS_ANEW,
            Rule("pretrained_checkpoint_path", "a run starts from one of the two"),
        ),
    )
    resume_iteration: NonNegativeInt | None = optional(
        "go back to the checkpoint of this iteration, or fail without it (exit 4); newer ones are set aside",
        "the newest good one",
        needs=(LOADED,),
        excludes=(STARTS_ANEW,),
        aliases="ckpt_step",
    )
    allow_data_change: bool = option(
        False,
        "resume even if data, weights of data sets, split, tokenizer or seed differ from the checkpoint's",
    )
    save_retries: NonNegativeInt = option(
        3,
        "retries of a save after a storage failure, after pauses of 1, 4, 16, 60 ... s",
        idle_unless="experiment_dir",
    )
    mirror: str | None = optional(
        "copy each finished checkpoint and export, and metrics.jsonl, to this remote folder in the background, as in "
        "s3://bucket/run; a start restores from there what is missing, damaged or older here",
        "off",
        never_empty=True,
        needs=SAVED,
    )
    mirror_timeout: PositiveFloat = option(
        60.0,
        "seconds without a byte to or from the mirror after which a transfer is retried on a new connection",
        idle_unless="mirror",
    )
    mirror_ahead: str | None = optional(
        "if experiment_dir and the mirror have iterations with different options, restore: go on from the mirror; "
        "set_aside: go on from experiment_dir, also if the mirror is merely ahead. The other checkpoints are set aside",
        "refuse the start (exit 4)",
        choices=("restore", "set_aside"),
        idle_unless="mirror",
    )
    adopt_mirror: bool = option(
        False,
        "adopt a mirror that another run or an older version has written",
        idle_unless="mirror",
    )
    async_checkpoint: bool = option(
        False,
        "write checkpoints in the background, from a copy in host memory made during the next iteration",
        aliases="async_save",
        idle_unless="checkpoint_interval or checkpoint_minutes or keep_checkpoints and experiment_dir",
    )
