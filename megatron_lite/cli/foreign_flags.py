"""Flags of Megatron-LM and Levanter that mean something else here, or the same under another value, or nothing.

A text that begins with "write" says how the same is written here; the others give the reason why there is none.
A name with a dot is an option of Levanter whose last part alone would say too little: `--trainer.tracker.name` is found
as `tracker.name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_lite.config.foreign_values import COMPILE, PARALLEL, PROFILE, TORCHRUN

_RECOMPUTE = (
    "write --mlp_recompute_level=activation or =full for the MLPs of all layers, --recompute_layers=<N> for everything "
    "in the first N blocks"
)
_JAX = "belongs to JAX and its compiler"
_AXES = "axes with names belong to JAX; write --zero_stage=3 to shard the model over all ranks"
_REPLICAS = "replicas of the shards are not built yet; write --zero_stage=1, 2 or 3, which shard over all ranks"
_QUANTIZATION = "fp8 and int8 are not built yet; write --training_dtype=bf16"
_TRACKERS = (
    "trackers other than Weights & Biases are not built yet; write --wandb_entity_name=<team> for that one; "
    "metrics.jsonl has every number in any case"
)
_WATCH = (
    "norms and histograms of single tensors are not tracked yet; write --debug_all_param_gradients=<level> or "
    "--debug_param_update=<level> to log their statistics"
)
_FOLDER = "a run is its folder; write --experiment_dir=<folder>"
_TEXTS = "data is tokenized beforehand by scripts/prepare_data.py; write --data_path=<prefixes of its files>"
_BLEND = "the weights of a blend are the same for the whole run; write --data_path 0.3 first 0.7 second"
_ORDER = "all samples of an epoch are shuffled, and each epoch anew; write --seed for another order"
_PLANNED = "checkpoints by time are not built yet; write --checkpoint_interval=<iterations>"
_KEPT = (
    "write --export_interval=<iterations> --export_format=distributed for checkpoints that stay; "
    "intervals that change during a run are not built yet"
)
_SECRET = "secrets stay out of command lines; set the variable WANDB_API_KEY or WANDB_API_KEY_PATH"
_HARNESS = "tasks are not evaluated; scripts/evaluate.py gives loss, perplexity and bits per byte"

_MODEL = {
    "group_query_attention": "write --head_groups=<number of key/value heads>",
    "position_embedding_type": "write --use_rotary_embeddings=1 for rope, =0 for learned_absolute",
    "normalization": "write --normalization_type=layer_norm or --normalization_type=rms_norm",
    "swiglu": "write --gated=1 --activation_type=silu",
    "squared_relu": "write --activation_type=squared_relu",
    "disable_bias_linear": "write --add_linear_biases=0",
    "use_bias": "write --add_linear_biases=1; norms of type layer_norm have a bias unless --use_layer_norm_weight=0",
    "untie_embeddings_and_output_weights": "write --tie_word_embeddings=0",
    "initializer_range": "write --init_method_std",
    # Levanter
    "model.type": "there is one model; write --use_rotary_embeddings=1 --normalization_type=rms_norm --gated=1 "
    "--add_linear_biases=0 --tie_word_embeddings=0 for llama, none of them for gpt2",
    "mlp_scale": "write --ffn_hidden_size=<this * hidden_size>",
    "embed_pdrop": "write --embedding_dropout",
    "resid_pdrop": "write --hidden_dropout, and --embedding_dropout for the embeddings",
    "attn_pdrop": "write --attention_dropout; in Levanter it had no effect",
    "activation_function": "write --activation_type: gelu_new is gelu here, gelu is gelu_exact",
    "scan_layers": _JAX + "; layers are never stacked here",
    "rope": "write --use_rotary_embeddings=1 --rope_type=<type>, and --rotary_base for theta",
    "rope.type": "write --rope_type",
    "rope.theta": "write --rotary_base",
    "rope.factor": "write --rope_factor, with --rope_type=linear, llama3 or yarn",
    "reference_checkpoint": "exports need no other model; write --tokenizer_file=<tokenizer.json>",
}

_BATCH_AND_TIME = {
    "train_samples": "write --train_iters=<samples / batch_size>",
    "rampup_batch_size": "write --batch_size_schedule=<iteration:size ...>",
    "step_batch_size_schedule": "write --batch_size_schedule=<iteration:size ...>, in iterations, not in samples",
    "gradient_accumulation_steps": "write --sequential_micro_batches=<steps>, or --batch_size and --micro_batch_size",
    "exit_duration_in_mins": "runs stop at iterations; write --stop_interval=<iterations>",
    "exit_signal_handler": "signals need no flag",
    "skip_train": "write --train_iters=0",
    "iterations_to_skip": "no iteration is skipped",
    # Levanter
    "per_device_parallelism": "write --micro_batch_size=<samples>, and leave it out for -1",
    "per_device_train_parallelism": "write --micro_batch_size=<samples>, and leave it out for -1",
    "per_device_eval_parallelism": "write --eval_micro_batch_size=<samples>, and leave it out for -1",
    "max_eval_batches": "write --validation_iters=<batches>, or =all",
    "epoch": "write --train_iters; data is read again and again until then",
}

_OPTIMIZER = {
    "lr_warmup_samples": "write --lr_warmup_iters=<samples / batch_size>",
    "lr_decay_samples": "write --lr_decay_iters=<samples / batch_size>",
    "lr_wsd_decay_samples": "write --lr_wsd_decay_iters=<samples / batch_size>",
    "lr_wsd_decay_style": "write --lr_decay_style for the shape, and --lr_wsd_decay_iters",
    "decoupled_lr": "write --lr_scales=embedding:<ratio>,head:<ratio>",
    "check_for_nan_in_loss_and_grad": "write --crash_on_nan=1 --crash_on_inf=1",
    "no_check_for_nan_in_loss_and_grad": "write --crash_on_nan=0 --crash_on_inf=0; an update that is not finite is "
    "dropped in any case",
    # Levanter
    "optimizer.type": "write --optimizer=adamw, muon, lion or sgd",
    "warmup": "write --lr_warmup_iters=<iterations> or --lr_warmup_fraction=<part of the first cycle>",
    "decay": "write --lr_wsd_decay_iters=<iterations> or --lr_wsd_decay_fraction=<part of a cycle>",
    "rewarmup": "write --lr_rewarmup_iters=<iterations> or --lr_rewarmup_fraction=<part of a cycle>",
    "cooldown": "write --lr_cooldown_iters=<iterations> or --lr_cooldown_fraction=<part of the run>",
    "cycles": "write --lr_num_cycles=<number>, or --lr_cycle_minima=<iterations at which they end>",
    "cycle_length": "write --lr_cycle_iters=<iterations> or --lr_cycle_fraction=<part of the run>, "
    "or --lr_cycle_lengths=<iterations of each>",
    "optimizer.lr_schedule": "write --lr_decay_style; power is power_tokens here",
    "lr_schedule.type": "write --lr_decay_style; power is power_tokens here",
    "lr_schedule.exponent": "write --lr_cosine_exponent",
    "lr_schedule.timescale": "write --lr_inv_sqrt_timescale",
    "lr_schedule.a": "write --lr_power_a",
    "lr_schedule.b": "write --lr_power_b",
    "lr_schedule.batch_size": "write --batch_size; the schedule knows it",
    "lr_schedule.seq_length": "write --sequence_length; the schedule knows it",
    "default_weight_decay_mask": "write --weight_decay_default_mask=levanter for true, =off for false; "
    "beside --weight_decay_modules leave it out for false",
    "nesterov": "write --adam_nesterov=1, or --muon_nesterov=1 with --optimizer=muon",
    "clip_update_norm": "write --clip_update_norm_sigma=<factor> and --clip_update_norm_window=<updates>",
    "clip_update_norm.rolling_interval_length": "write --clip_update_norm_window=<updates>",
    "clip_update_norm.sigma_factor": "write --clip_update_norm_sigma=<factor>",
    "skip_bad_steps.rolling_interval_length": "write --skip_bad_steps_window=<updates>",
    "skip_bad_steps.sigma_factor": "write --skip_bad_steps_sigma=<factor>",
    "rolling_interval_length": "write --skip_bad_steps_window or --clip_update_norm_window",
    "sigma_factor": "write --skip_bad_steps_sigma or --clip_update_norm_sigma",
    "model_averaging.type": "write --ema_type",
    "model_averaging.beta": "write --ema_beta",
    "switch_step": "write --ema_switch_iter",
    "model_averaging.decay_steps": "write --ema_decay_iters",
}

_PRECISION_AND_SPEED = {
    "bf16": "write --training_dtype=bf16",
    "fp16": "write --training_dtype=fp16",
    "fp32": "write --training_dtype=fp32",
    "params_dtype": "write --training_dtype; master weights are always fp32",
    "fp8_format": "fp8 is not built yet",
    "torch_compile": COMPILE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _RECOMPUTE,
    "recompute_num_layers": "write --recompute_layers=<N>",
    "recompute_activations": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE + "; nothing is offloaded, and nothing nested",
    "attn_backend": "write --attention_backend",
    "transformer_impl": "there is one implementation",
    "use_mcore_models": "there is one implementation",
    "cross_entropy_loss_fusion": "head and loss are always one operation",
    # Levanter
    "mp": "write --training_dtype=bf16 for p=f32,c=bfloat16, =fp32 for f32; master weights are always fp32",
    "quantization": _QUANTIZATION,
    "flash_attention_block_size": "the block size is chosen by the kernel; write --attention_backend for another one",
    "jax_config": _JAX,
    "jax_compilation_cache_dir": _JAX + "; Triton keeps its kernels in ~/.triton/cache",
    "log_jaxprs": _JAX,
    "log_xla_hlo": _JAX,
    "save_xla_dumps": _JAX,
}

_PARALLELISM = {
    "use_distributed_optimizer": "write --zero_stage=1",
    "use_megatron_fsdp": "write --zero_stage=3",
    "data_parallel_sharding_strategy": "write --zero_stage=1 for optim, 2 for optim_grads, 3 for optim_grads_params",
    "overlap_grad_reduce": "reduces overlap from --num_grad_buffers=2 on, which is the default",
    "overlap_param_gather": "gathers overlap from --num_weight_buffers=2 on, which is the default",
    "ddp_bucket_size": "write --layers_per_stage=<blocks gathered and reduced together>",
    "distributed_backend": "NCCL on GPU and gloo on CPU; write --device=cuda or --device=cpu",
    "distributed_timeout_minutes": "write --distributed_timeout=<seconds>",
    "local_rank": TORCHRUN,
    # Levanter
    "fsdp_axis": _AXES,
    "batch_axis": _AXES,
    "axis_resources": _AXES,
    "parameter_axis_resources": _AXES,
    "compute_axis_resources": _AXES,
    "tensor_parallel_axes": PARALLEL,
    "model_axis_size": PARALLEL,
    "replica_ici_axis_size": _REPLICAS,
    "replica_dcn_axis_size": _REPLICAS,
    "distributed": TORCHRUN,
    "coordinator_address": TORCHRUN,
    "num_processes": TORCHRUN,
    "process_id": TORCHRUN,
    "local_device_ids": TORCHRUN,
    "initialize_jax_distributed": TORCHRUN,
    "ray": "data is prepared beforehand, by scripts/prepare_data.py, without a cluster",
    "start_workers": "data is prepared beforehand, by scripts/prepare_data.py, without a cluster",
    "auto_start_cluster": "data is prepared beforehand, by scripts/prepare_data.py, without a cluster",
    "require_accelerator": "write --device=cuda, which never falls back to the CPU",
    "shutdown_at_exit": "a machine is never shut down",
}

_DATA = {
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
    # Levanter
    "data_seed": "write --seed, which also orders the data",
    "train_urls": _TEXTS,
    "validation_urls": _TEXTS + " and --split",
    "cache_dir": _TEXTS,
    "cache_options": _TEXTS,
    "data.configs": _TEXTS,
    "tokenizer": "data is tokenized beforehand; write --tokenizer_file=<tokenizer.json> to put it into exports",
    "train_weights": _BLEND,
    "mixture_block_size": _BLEND,
    "stop_strategy": "data sets are read again and again until --train_iters",
    "data.shuffle": _ORDER,
    "permutation_type": _ORDER,
    "max_train_batches": "write --split for the share of the documents that is trained on",
    "num_validation_sequences": "write --split for the share of the documents that validates",
    "experiment_budget": "simulated epochs are not built",
    "target_budget": "simulated epochs are not built",
}

_SAVING = {
    "save": "write --experiment_dir=<folder>; checkpoints go to <folder>/checkpoints",
    "load": "write --experiment_dir=<folder>; a run in that folder resumes by itself",
    "save_retain_interval": "write --export_interval=<iterations> for checkpoints that are kept",
    "most_recent_k": "write --max_checkpoints=<number>",
    "ckpt_step": "a run resumes from its newest good checkpoint",
    "finetune": "starting from other weights is not built yet",
    "no_load_optim": "a checkpoint is loaded whole",
    "no_load_rng": "checkpoints hold no state of random numbers",
    "async_save": "checkpoints are saved between two iterations",
    "config_url": "write @<file> to read flags from a file",
    "config": "write @<file> to read flags from a file",
    # Levanter
    "trainer.id": _FOLDER,
    "append_run_id_to_base_path": _FOLDER,
    "base_path": "write --experiment_dir=<folder>; checkpoints go to <folder>/checkpoints",
    "checkpointer": _PLANNED,
    "checkpointer.save_interval": _PLANNED,
    "keep": _KEPT,
    "delete_old_temp_checkpoints": "write --max_checkpoints=<number>, whichever start saved them",
    "load_checkpoint": "a run resumes by itself where --experiment_dir has a checkpoint; "
    "to demand one or to ignore it is not built yet",
    "load_checkpoint_path": "a run resumes from its own folder alone; write --experiment_dir=<folder>",
    "initialize_from": "write --pretrained_checkpoint_path=<folder of a checkpoint>",
    "initialize_from_checkpoint_path": "write --pretrained_checkpoint_path=<folder of a checkpoint>",
    "initialize_from_hf": "write --pretrained_checkpoint_path=<folder of a Hugging Face model>",
    "use_hf_model_config": "write --use_pretrained_config=1 or =0",
    "allow_partial_checkpoint": "a checkpoint is loaded whole",
    "hf_save_path": "write --export_interval; exports go to <experiment_dir>/export",
    "hf_save_steps": "write --export_interval=<iterations>",
    "hf_save_dtype": "write --export_dtype",
    "hf_upload": "nothing is uploaded by itself; write --export_callback_script=<program>, which gets the folder",
}

_LOGGING = {
    "log_throughput": "throughput is in every log line",
    "tensorboard_dir": "TensorBoard is not built yet; metrics.jsonl has every number",
    "wandb_api_key": _SECRET,
    "wandb_key": _SECRET,
    "profile": PROFILE,
    "use_pytorch_profiler": PROFILE,
    "record_memory_history": PROFILE,
    # Levanter
    "log_dir": "write --experiment_dir=<folder>; logs go to <folder>/runs/<k>/logs",
    "tracker": _TRACKERS,
    "wandb": "write --wandb_entity_name=<team> and --wandb_project_name",
    "tracker.entity": "write --wandb_entity_name=<team>",
    "tracker.project": "write --wandb_project_name",
    "tracker.name": "write --experiment_name",
    "tracker.group": "write --wandb_group_name",
    "tracker.id": "a run in Weights & Biases is found again by the id in --experiment_dir",
    "tracker.resume": "a run in Weights & Biases is found again by the id in --experiment_dir",
    "tracker.tags": "runs in Weights & Biases have no tags yet",
    "tracker.mode": "set the variable WANDB_MODE",
    "save_code": "code is not uploaded",
    "logdir": "TensorBoard is not built yet; metrics.jsonl has every number",
    "watch": _WATCH,
    "profiler": PROFILE,
    "profiler_start_step": PROFILE,
    "profiler_num_steps": PROFILE,
    "profiler_perfetto_link": _JAX + "'s profiler server; " + PROFILE,
    "eval_harness": _HARNESS,
    "eval_harness_steps": _HARNESS,
    "log_entropy": "the entropy of predictions is not logged",
}

INSTEAD: Mapping[str, str] = MappingProxyType(
    {**_MODEL, **_BATCH_AND_TIME, **_OPTIMIZER, **_PRECISION_AND_SPEED, **_PARALLELISM, **_DATA, **_SAVING, **_LOGGING}
)
