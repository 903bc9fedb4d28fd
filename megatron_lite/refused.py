"""Flags that this program knows but does not have: Fast-LLM's without an option here, and other programs' spellings.

Nothing is accepted that would be ignored. A flag of Fast-LLM's flat-flag era is accepted with exactly those values that
describe what this program does anyway (`--tensor_parallel=1`), so that existing command lines keep working; any other
value is refused with the reason. A flag of Megatron-LM or Levanter is refused with the spelling to use instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Refused:
    """One flag of Fast-LLM that is no option here."""

    name: str
    default: str  # Fast-LLM's, as one would type it
    accepted: tuple[str, ...]  # the values under which Fast-LLM would do what this program does
    reason: str
    switch: bool = False  # bare means 1, and true and false are understood
    aliases: tuple[str, ...] = ()  # Megatron-LM's name for it

    def accepts(self, value: str) -> bool:
        """Whether `value`, as typed, is one of `accepted`: 1, 1.0 and true are the same."""
        return _plain(value) in {_plain(accepted) for accepted in self.accepted}


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(value.lower(), value.lower())
    whole, _, fraction = value.partition(".")
    return whole if whole.isascii() and whole.isdigit() and not fraction.strip("0") else value


def _switch(name: str, default: str, accepted: str, reason: str, *aliases: str) -> Refused:
    return Refused(name, default, tuple(accepted.split()), reason, True, aliases)


def _value(name: str, default: str, accepted: str, reason: str, *aliases: str) -> Refused:
    return Refused(name, default, tuple(accepted.split()), reason, False, aliases)


_CALLBACK = "nothing is run after an export; run it yourself, or watch the export folder"
_OVERLAP = (
    "gathers and reduces run beside the computation; for none of that write --num_weight_buffers=1 --num_grad_buffers=1"
)
_PARALLEL = "only data parallelism for now"
_RECOMPUTE = (
    "write --mlp_recompute_level=activation or =full for the MLPs of all layers, --recompute_layers=<N> for everything "
    "in the first N blocks"
)
_SEED = "every random number derives from the seed and its own place (weight, sample, layer), not from shifted seeds"
_EXPERTS = "mixture of experts comes later"
_FIM = "fill-in-the-middle is not built"
_PRETRAINED = "starting from other weights is not built yet; the same experiment_dir resumes by itself"
_PROFILE = "the profiler is not built yet"
_TRITON = "matrix products are the vendor's own; write --enable_triton_kernels=0 or =1 for everything else"
_COMPILE = (
    "torch.compile is not used: the operations are autograd functions fused by hand, which it does not take whole, "
    "and one by one, compiled on a CPU, they take as long"
)
_CONVERT = "belongs to Fast-LLM's conversion tool, not to pretraining; exports are made in Hugging Face's format"
_TORCHRUN = "torchrun sets it through the environment: torchrun --nproc-per-node=N --nnodes=M"


def _entries() -> Iterator[Refused]:
    # Training and batch
    yield _value("export_callback_script", "", "none", _CALLBACK)
    yield _value("export_callback_env", "", "none", _CALLBACK)
    yield _value("micro_sequence_length", "none", "none", "a micro-batch holds whole samples of sequence_length tokens")
    # Multi-stage
    yield _switch("compile_all", "0", "0", _COMPILE)
    # Distributed
    yield _value("tensor_parallel", "1", "1", _PARALLEL, "tensor_model_parallel_size")
    yield _value("pipeline_parallel", "1", "1", _PARALLEL, "pipeline_model_parallel_size")
    yield _switch("sequence_tensor_parallel", "0", "0", _PARALLEL, "sequence_parallel")
    yield _value("sequence_data_parallel", "1", "1", _PARALLEL, "context_parallel_size")
    yield _switch("pipeline_first", "0", "0", _PARALLEL)
    for name in ("rank", "local_world_size"):
        yield _value(name, "from torchrun", "", _TORCHRUN)
    yield _value("optimization_dtype", "float32", "float32 fp32 float", "master weights and Adam's moments are fp32")
    yield _switch("reproducible_init", "0", "1", "initial weights never depend on the number of ranks")
    for name in (
        "dp", "pp", "pp_gen_init", "pp_gen", "tp", "tp_gen_init", "tp_gen", "sample", "train", "valid", "test",
    ):  # fmt: skip
        yield _value(f"{name}_seed_shift", "a large prime", "", _SEED)
    # Schedule
    yield _switch("pipeline_overlap", "1", "1", _PARALLEL)
    yield _switch("data_overlap", "1", "1", _OVERLAP)
    yield _switch("debug_schedule", "0", "0", "the schedule is not logged")
    yield _switch("debug_send_recv", "0", "0", _PARALLEL)
    yield _switch("profile_schedule", "0", "0", _PROFILE)
    yield _switch("skip_step", "0", "0", "no part of a training step can be left out")
    # Model
    yield _switch("triton_rotary", "1", "1", "write --enable_triton_kernels=0, for all operations")
    yield _switch("zero_centered_normalization", "0", "0", "norm weights are stored as they are multiplied")
    yield _value("normalization_implementation", "auto", "auto", "the implementation is chosen by the program")
    yield _switch("transposed_mlp_weight", "1", "0", "every matrix is stored as (outputs, inputs)")
    yield _switch("full_precision_residual", "0", "0", "the residual stream has the training dtype")
    yield _switch(
        "use_flash_attention", "1", "1", "write --attention_backend=math for the formula itself", "use_flash_attn"
    )
    yield _switch("parallel_embeddings", "1", "1", _PARALLEL)
    yield _value("sequence_first", "none", "none", "the batch dimension always comes first")
    yield _switch(
        "debug_transformer", "0", "0", "tensors within a layer are not logged; write --debug_layer_outputs=<level>"
    )
    yield _switch(
        "debug_transformer_memory", "0", "0", "memory within a layer is not logged; write --debug_activation_memory=1"
    )
    # Mixture of experts
    yield _value("num_experts", "1", "1", _EXPERTS)
    yield _value("num_shared_experts", "0", "0", _EXPERTS)
    yield _value("num_experts_per_token", "1", "1", _EXPERTS, "moe_router_topk")
    yield _value("expert_routing_type", "topk", "topk", _EXPERTS)
    yield _switch("dropless_moe", "1", "1", _EXPERTS)
    yield _switch("dropless_dynamic_shape", "0", "0", _EXPERTS)
    yield _value("expert_auxiliary_loss_coefficient", "0.01", "0.01 0", _EXPERTS)
    yield _value("expert_z_loss_coefficient", "0", "0", _EXPERTS)
    yield _value("moe_jitter_eps", "0", "0", _EXPERTS)
    yield _value("mlp_lr_scale", "[]", "none 1", "write --lr_scales=<pattern of the weights' names>:<scale>")
    yield _value("router_lr_scale", "none", "none 1", _EXPERTS)
    # Run
    yield _switch("structured_logs", "1", "1", "log lines have one format")
    yield _switch("torch_dynamo_enable", "1", "0", _COMPILE)
    yield _switch("triton_linear_kernels", "0", "0", _TRITON)
    # Data
    for name, default in (
        ("rate", "0"), ("max_middle_len", "none"), ("split_sample", "none"), ("fragment_rate", "0"),
        ("ignore_prefix", "none"), ("spm_rate", "0.5"), ("truncate_or_pad", "0"),
    ):  # fmt: skip
        yield Refused(f"fim_{name}", default, (default,), _FIM, switch=name == "truncate_or_pad")
    # Pretrained weights
    yield _value("pretrained_checkpoint_path", "none", "none", _PRETRAINED)
    yield _value("pretrained_checkpoint_type", "distributed", "distributed", _PRETRAINED)
    yield _value("imported_model_type", "none", "none", _PRETRAINED)
    yield _switch("use_pretrained_config", "1", "1", _PRETRAINED)
    yield _switch("ignore_pretrained_config", "0", "0", _PRETRAINED)
    yield _switch("load_full_base_model_config", "0", "0", _PRETRAINED)
    yield _switch("load_full_fast_llm_config", "0", "0", _PRETRAINED)
    yield _switch("load_pretrained_weights", "1", "1", _PRETRAINED)
    yield _switch("load_pretrained_optimizer", "0", "0", _PRETRAINED)
    # Profiling
    for name in ("cpu", "cuda", "averages", "trace", "log", "export"):
        yield _switch(f"profile_{name}", "0", "0", _PROFILE)
    for name, default in (("skip", "1"), ("wait", "0"), ("warmup", "1"), ("cycles", "1"), ("column_width", "80")):
        yield _value(f"profile_{name}", default, default, _PROFILE)
    yield _value("profile_ranks", "[]", "none", _PROFILE)
    # Fast-LLM's conversion tool
    for name, default in (
        ("input_type", "required"), ("output_type", "required"), ("input_path", "required"),
        ("output_path", "required"), ("model_type", "none"),
        ("target_params_per_file", "4294967296"), ("layers_per_step", "none"),
    ):  # fmt: skip
        yield _value(name, default, "", _CONVERT)
    yield _switch("exist_ok", "0", "", _CONVERT)
    yield _switch("use_cpu", "0", "", _CONVERT + "; write --device=cpu to train on the CPU")
    yield _value("dtype", "none", "", _CONVERT + "; write --training_dtype=bf16 to train in bf16")


REFUSED: tuple[Refused, ...] = tuple(_entries())

# Values that an option of `config/` has in Fast-LLM or that one may well try, with the reason why not.
REFUSED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType({
    ("dataset_source", "file"): "a blend described by a JSON file comes later; "
    "write the weights and prefixes: --data_path 0.3 first 0.7 second",
    ("dataset_source", "sample"): "the sample data set does not exist; write random for made-up tokens",
    ("mlp_recompute_level", "offload"): "activations are not moved to the host's memory; write activation or full",
    ("mlp_recompute_level", "nested"): "write full, or --recompute_layers=<N> for whole blocks",
    ("mlp_recompute_level", "recompute"): "write activation or full, or --recompute_layers=<N> for whole blocks",
    ("zero_stage", "0"): "strictly worse: a full optimizer state on every rank costs more memory and a slower update; "
    "write 1",
})  # fmt: skip

# Flags of Megatron-LM and Levanter that mean something else, or the same under another value: what to write instead.
# A text that begins with "write" completes "not a flag here: ..."; the others give the reason why there is none.
INSTEAD: Mapping[str, str] = MappingProxyType({
    # Model
    "group_query_attention": "write --head_groups=<number of key/value heads>",
    "position_embedding_type": "write --use_rotary_embeddings=1 for rope, =0 for learned_absolute",
    "rotary_base": "write --rotary_embedding_scale=<minus its natural logarithm>: "
    "-9.210340371976184 for 10000, -13.122363377404328 for 500000, -13.815510557964274 for 1000000",
    "rotary_percent": "rotary positions turn all channels of a head",
    "normalization": "write --normalization_type=layer_norm or --normalization_type=rms_norm",
    "swiglu": "write --gated=1 --activation_type=silu",
    "squared_relu": "write --activation_type=squared_relu",
    "disable_bias_linear": "write --add_linear_biases=0",
    "use_bias": "write --add_linear_biases=1; norms of type layer_norm have a bias in any case",
    "untie_embeddings_and_output_weights": "write --tie_word_embeddings=0",
    "qk_layernorm": "norms on queries and keys are not built",
    "make_vocab_size_divisible_by": "the vocabulary is not padded; write --vocab_size=<padded size>",
    "initializer_range": "write --init_method_std",
    # Batch and time
    "train_samples": "write --train_iters=<samples / batch_size>",
    "rampup_batch_size": "write --batch_size_schedule=<iteration:size ...>",
    "step_batch_size_schedule": "write --batch_size_schedule=<iteration:size ...>, in iterations",
    "gradient_accumulation_steps": "write --sequential_micro_batches=<steps>, or --batch_size and --micro_batch_size",
    "per_device_parallelism": "write --micro_batch_size=<samples>",
    "exit_duration_in_mins": "runs stop at iterations; write --stop_interval=<iterations>",
    "exit_signal_handler": "signals need no flag",
    "skip_train": "write --train_iters=0",
    "iterations_to_skip": "no iteration is skipped",
    # Optimizer
    "lr_warmup_samples": "write --lr_warmup_iters=<samples / batch_size>",
    "lr_decay_samples": "write --lr_decay_iters=<samples / batch_size>",
    "decoupled_lr": "write --lr_scales=embedding:<ratio>,head:<ratio>",
    "warmup": "write --lr_warmup_iters=<iterations> or --lr_warmup_fraction=<fraction of the cycle>",
    "z_loss_weight": "write --logit_z_loss=<weight>",
    # Precision and speed
    "bf16": "write --training_dtype=bf16",
    "fp16": "write --training_dtype=fp16",
    "fp32": "write --training_dtype=fp32",
    "params_dtype": "write --training_dtype; master weights are always fp32",
    "mp": "write --training_dtype=bf16",
    "fp8_format": "fp8 is not built",
    "torch_compile": _COMPILE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _RECOMPUTE,
    "recompute_num_layers": "write --recompute_layers=<N>",
    "recompute_activations": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE + "; nothing is offloaded, and nothing nested",
    "attn_backend": "write --attention_backend",
    "transformer_impl": "there is one implementation",
    "use_mcore_models": "there is one implementation",
    "cross_entropy_loss_fusion": "head and loss are always one operation",
    "no_check_for_nan_in_loss_and_grad": "an update that is not finite is always dropped",
    # Parallelism
    "use_distributed_optimizer": "write --zero_stage=1",
    "use_megatron_fsdp": "write --zero_stage=3",
    "data_parallel_sharding_strategy": "write --zero_stage=1 for optim, 2 for optim_grads, 3 for optim_grads_params",
    "overlap_grad_reduce": "reduces overlap from --num_grad_buffers=2 on, which is the default",
    "overlap_param_gather": "gathers overlap from --num_weight_buffers=2 on, which is the default",
    "ddp_bucket_size": "write --layers_per_stage=<blocks gathered and reduced together>",
    "distributed_backend": "NCCL on GPU and gloo on CPU; write --device=cuda or --device=cpu",
    "distributed_timeout_minutes": "write --distributed_timeout=<seconds>",
    # Data
    "mock_data": "write --dataset_source=random",
    "train_data_path": "write --data_path and --split",
    "valid_data_path": "write --data_path and --split",
    "test_data_path": "write --data_path and --split",
    "data_cache_path": "nothing is cached for --data_path; the files are read as they are",
    "tokenizer_type": "data is tokenized beforehand; write --tokenizer_file=<tokenizer.json> to put it into exports",
    "tokenizer_model": "write --tokenizer_file=<tokenizer.json>",
    "reset_position_ids": "positions count from the beginning of a sample; see --cross_document_attention",
    "reset_attention_mask": "write --cross_document_attention=0",
    "eod_mask_loss": "every token counts in the loss",
    "data_seed": "write --seed, which also orders the data",
    # Saving and logging
    "save": "write --experiment_dir=<folder>; checkpoints go to <folder>/checkpoints",
    "load": "write --experiment_dir=<folder>; a run in that folder resumes by itself",
    "save_retain_interval": "write --export_interval=<iterations> for checkpoints that are kept",
    "most_recent_k": "write --max_checkpoints=<number>",
    "ckpt_step": "a run resumes from its newest good checkpoint",
    "finetune": "starting from other weights is not built yet",
    "no_load_optim": "a checkpoint is loaded whole",
    "no_load_rng": "checkpoints hold no state of random numbers",
    "async_save": "checkpoints are saved between two iterations",
    "log_throughput": "throughput is in every log line",
    "tensorboard_dir": "TensorBoard is not built yet; metrics.jsonl has every number",
    "wandb_api_key": "secrets stay out of command lines; set the variable WANDB_API_KEY or WANDB_API_KEY_PATH",
    "wandb_key": "secrets stay out of command lines; set the variable WANDB_API_KEY or WANDB_API_KEY_PATH",
    "profile": "the profiler is not built yet",
    "use_pytorch_profiler": "the profiler is not built yet",
    "record_memory_history": "the profiler is not built yet",
    "config_url": "write @<file> to read flags from a file",
    "config": "write @<file> to read flags from a file",
    "local_rank": _TORCHRUN,
})  # fmt: skip

REFUSED_SPELLINGS: Mapping[str, Refused] = MappingProxyType(
    {spelling: refused for refused in REFUSED for spelling in (refused.name, *refused.aliases)}
)
