"""Flags of other programs that are unknown here or need a remark: what to write instead, or why there is nothing.

One table for each program. The parser answers from them, and `scripts/docs/foreign_flags.py` makes the tables of
docs/from_levanter.md and docs/from_fast_llm.md. A flag without a row is the same flag here, perhaps as an alias.
Other programs' values of existing options are in `config/foreign_values.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.config.values import SPELLINGS


class Row(NamedTuple):
    """One or more flags of another program that have the same answer.

    `names`: separated by spaces. A dot keeps the part of Levanter's path without which the name says too little
    (`tracker.name` of `trainer.tracker.name`); `warmup:steps` is one case of the option `warmup`.
    """

    names: str
    here: str = ""  # what to write instead; empty if there is nothing, or if the flag exists here under this name
    remark: str = ""  # the reason if there is nothing to write
    only: str = ""  # values that are accepted, because they describe what this program does anyway
    switch: bool = False  # takes 0 and 1; bare means 1

    def accepts(self, value: str) -> bool:
        """Whether `value`, as typed, is one of `only`: 1, 1.0 and true are the same."""
        return _plain(value) in {_plain(accepted) for accepted in self.only.split()}

    @property
    def answer(self) -> str:
        """The answer when the flag is typed."""
        return "; ".join(text for text in (f"write {self.here}" if self.here else "", self.remark) if text)


def _switch(names: str, only: str, remark: str) -> Row:
    """Return the row of flags that take 0 or 1, only one of which is accepted."""
    return Row(names, remark=remark, only=only, switch=True)


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(value.lower(), value.lower())
    whole, _, fraction = value.partition(".")
    return whole if whole.isascii() and whole.isdigit() and not fraction.strip("0") else value


PARALLEL = "only data parallelism is supported so far"
TORCHRUN = "torchrun sets it through the environment: torchrun --nproc-per-node=N --nnodes=M"
COMPILE = (
    "torch.compile is not used: it cannot compile the hand-fused autograd functions as a whole, and compiling them one"
    " by one makes them no faster on a CPU"
)
PROFILE = "profiling is not supported yet"
_RECOMPUTE = "--recompute_layers=<N> for the first N blocks, or --mlp_recompute_level=activation or =full for all MLPs"
_ONE = "there is only one implementation"
_TOKENIZED = "scripts/prepare_data.py tokenizes the data beforehand"
_TENSORBOARD = "TensorBoard is not supported yet; metrics.jsonl has every number"
_KEY = "keep secrets out of command lines; set the environment variable WANDB_API_KEY or WANDB_API_KEY_PATH"
_PRETRAINED = "--pretrained_checkpoint_path=<folder of a checkpoint>"
_RUN_FOLDER = "--experiment_dir=<folder>"

# Megatron-LM's, and a few of Hugging Face's Trainer.
MEGATRON = (
    Row("group_query_attention", "--head_groups=<number of key/value heads>"),
    Row("position_embedding_type", "--use_rotary_embeddings=1 for rope, =0 for learned_absolute"),
    Row("normalization", "--normalization_type=layer_norm or --normalization_type=rms_norm"),
    Row("swiglu", "--gated=1 --activation_type=silu"),
    Row("squared_relu", "--activation_type=squared_relu"),
    Row("disable_bias_linear", "--add_linear_biases=0"),
    Row("untie_embeddings_and_output_weights", "--tie_word_embeddings=0"),
    Row("train_samples", "--train_iters=<samples / batch_size>"),
    Row("rampup_batch_size", "--batch_size_schedule=<iteration:size ...>"),
    Row("step_batch_size_schedule", "--batch_size_schedule=<iteration:size ...>", "in iterations, not in samples"),
    Row("gradient_accumulation_steps", "--sequential_micro_batches=<steps>, or --batch_size and --micro_batch_size"),
    Row("exit_duration_in_mins", "--stop_interval=<iterations>", "runs stop by iteration, not by time"),
    Row("exit_signal_handler", remark="signals are always handled: the run saves and stops"),
    Row("skip_train", "--train_iters=0"),
    Row("iterations_to_skip", remark="iterations cannot be skipped"),
    Row("lr_warmup_samples", "--lr_warmup_iters=<samples / batch_size>"),
    Row("lr_decay_samples", "--lr_decay_iters=<samples / batch_size>"),
    Row("lr_wsd_decay_samples", "--lr_wsd_decay_iters=<samples / batch_size>"),
    Row("lr_wsd_decay_style", "--lr_decay_style for the shape, and --lr_wsd_decay_iters"),
    Row("decoupled_lr", "--lr_scales=embedding:<ratio>,head:<ratio>"),
    Row("check_for_nan_in_loss_and_grad", "--crash_on_nan=1 --crash_on_inf=1"),
    Row("no_check_for_nan_in_loss_and_grad", "--crash_on_nan=0 --crash_on_inf=0", "such updates are always dropped"),
    Row("bf16", "--training_dtype=bf16"),
    Row("fp16", "--training_dtype=fp16"),
    Row("fp32", "--training_dtype=fp32"),
    Row("params_dtype", "--training_dtype", "master weights are always fp32"),
    Row("fp8_format", remark="fp8 is not supported yet"),
    Row("torch_compile", remark=COMPILE),
    Row("recompute_granularity recompute_method recompute_activations", _RECOMPUTE),
    Row("recompute_num_layers", "--recompute_layers=<N>"),
    Row("transformer_impl use_mcore_models", remark=_ONE),
    Row("cross_entropy_loss_fusion", remark="head and loss are always fused"),
    Row("use_distributed_optimizer", "--zero_stage=1"),
    Row("use_megatron_fsdp", "--zero_stage=3"),
    Row("data_parallel_sharding_strategy", "--zero_stage=1 for optim, 2 for optim_grads, 3 for optim_grads_params"),
    Row("overlap_grad_reduce", remark="--num_grad_buffers=2, the default, overlaps reductions with computation"),
    Row("overlap_param_gather", remark="--num_weight_buffers=2, the default, overlaps gathers with computation"),
    Row("ddp_bucket_size", "--layers_per_stage=<blocks gathered and reduced together>"),
    Row("distributed_backend", "--device=cuda or --device=cpu", "NCCL on GPU, gloo on CPU"),
    Row("distributed_timeout_minutes", "--distributed_timeout=<seconds>"),
    Row("local_rank", remark=TORCHRUN),
    Row("tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size", remark=PARALLEL, only="1"),
    _switch("sequence_parallel", "0", PARALLEL),
    _switch("use_flash_attn", "1", "write --attention_backend=math for the plain formula"),
    Row("moe_router_topk", remark="mixture of experts is not supported yet", only="1"),
    Row("mock_data", "--dataset_source=random"),
    Row("train_data_path valid_data_path test_data_path", "--data_path and --split"),
    Row("data_cache_path", remark="nothing is cached for --data_path; its files are read as they are"),
    Row("tokenizer_type tokenizer_model", "--tokenizer_file=<tokenizer.json>", f"{_TOKENIZED}; exports get a copy"),
    Row("reset_position_ids", remark="positions count from the start of a sample; see --cross_document_attention"),
    Row("reset_attention_mask", "--cross_document_attention=0"),
    Row("eod_mask_loss", remark="every token counts in the loss"),
    Row("save", _RUN_FOLDER, "checkpoints go to <folder>/checkpoints"),
    Row("load", _RUN_FOLDER, "the same command resumes the run in that folder"),
    Row("save_retain_interval", "--export_interval=<iterations>", "exports are kept"),
    Row("most_recent_k", "--max_checkpoints=<number>"),
    Row("ckpt_step", remark="a run resumes from its newest good checkpoint"),
    Row("finetune", _PRETRAINED, "training starts at iteration 0 from the weights in that folder"),
    Row("no_load_optim", _PRETRAINED, "without --load_pretrained_optimizer=1 only weights are loaded"),
    Row("no_load_rng", remark="checkpoints hold no random state"),
    Row("async_save", remark="checkpoints are always saved between two iterations"),
    Row("config config_url", "@<file> to read flags from a file"),
    Row("log_throughput", remark="every log line shows the throughput"),
    Row("tensorboard_dir", remark=_TENSORBOARD),
    Row("wandb_api_key wandb_key", remark=_KEY),
    Row("profile use_pytorch_profiler record_memory_history", remark=PROFILE),
)

LEVANTER = (
    # Learning rate
    Row("learning_rate", remark="the peak"),
    Row(
        "optimizer.lr_schedule lr_schedule.type",
        "--lr_decay_style",
        "Levanter's power is power_tokens here; power here is a polynomial",
    ),
    Row("lr_schedule.exponent", "--lr_cosine_exponent"),
    Row("lr_schedule.timescale", "--lr_inv_sqrt_timescale"),
    Row("lr_schedule.a", "--lr_power_a", "the schedule knows the batch size and the sequence length"),
    Row("lr_schedule.b", "--lr_power_b"),
    Row("min_lr_ratio", remark="or --min_lr, the learning rate itself; with neither it falls to 0"),
    Row("warmup:fraction", "--lr_warmup_fraction", "of the first cycle"),
    Row("warmup:steps", "--lr_warmup_iters", "1 is one iteration here, the whole cycle there"),
    Row("decay:fraction", "--lr_wsd_decay_fraction", "of each cycle; --lr_decay_iters is where the last decay ends"),
    Row("decay:steps", "--lr_wsd_decay_iters", "none: all iterations after the warmup"),
    Row("rewarmup:steps", "--lr_rewarmup_iters", "0: jump back to the peak"),
    Row("rewarmup:fraction", "--lr_rewarmup_fraction", "of a cycle"),
    Row("cycles:number", "--lr_num_cycles", "all of equal length, unlike the formula in Levanter's documentation"),
    Row("cycles:list", "--lr_cycle_minima", "the iterations at which cycles end"),
    Row("cycle_length:steps", "--lr_cycle_iters", "the last cycle also takes the remaining iterations"),
    Row("cycle_length:fraction", "--lr_cycle_fraction", "of the run"),
    Row("cycle_length:list", "--lr_cycle_lengths", "the remaining iterations become a last cycle"),
    Row("cooldown:fraction", "--lr_cooldown_fraction", "of the run"),
    Row("cooldown:steps", "--lr_cooldown_iters"),
    # Optimizer
    Row("optimizer.type", "--optimizer", "adamw (adam there), muon, lion or sgd"),
    Row(
        "default_weight_decay_mask",
        "--weight_decay_default_mask",
        "levanter for true; off for false, or leave it out beside --weight_decay_modules",
    ),
    Row("weight_decay_modules", remark="a list: the same items; a string: put regex: before it"),
    Row("adamc_weight_decay", remark="the decay also scales with the learning rate over its peak"),
    Row("nesterov", "--adam_nesterov", "or --muon_nesterov with --optimizer=muon"),
    Row(
        "max_grad_norm",
        remark="0 turns clipping off; --clip_grad_style=levanter leaves torch's 1e-6 out of the divisor",
    ),
    Row("clip_update_norm", "--clip_update_norm_sigma", "turns it on; --clip_update_norm_window is the window"),
    Row("clip_update_norm.sigma_factor", "--clip_update_norm_sigma=<factor>"),
    Row("clip_update_norm.rolling_interval_length", "--clip_update_norm_window"),
    Row("skip_bad_steps", remark="for a number write --skip_bad_steps_window=<number>"),
    Row("skip_bad_steps.sigma_factor", "--skip_bad_steps_sigma"),
    Row("skip_bad_steps.rolling_interval_length", "--skip_bad_steps_window"),
    Row("sigma_factor", "--skip_bad_steps_sigma or --clip_update_norm_sigma"),
    Row("rolling_interval_length", "--skip_bad_steps_window or --clip_update_norm_window"),
    Row(
        "crash_on_nan crash_on_inf",
        remark="such updates are always dropped; the run ends at the next log line, validation or save",
    ),
    Row("model_averaging.type", "--ema_type", "the same names: ema, ema_decay_sqrt"),
    Row("model_averaging.beta", "--ema_beta"),
    Row("switch_step", "--ema_switch_iter", "a uniform mean until then, as in Levanter's code"),
    Row("model_averaging.decay_steps", "--ema_decay_iters"),
    # Batch, time, validation
    Row("train_batch_size", remark='a list of start and value becomes --batch_size_schedule="0:32 1000:64"'),
    Row("per_device_parallelism per_device_train_parallelism", "--micro_batch_size", "leave it out for -1"),
    Row("per_device_eval_parallelism", "--eval_micro_batch_size", "leave it out for -1"),
    Row("max_eval_batches", "--validation_iters", "all for none"),
    Row("data_seed", "--seed", "it also determines the order of the data"),
    Row("z_loss_weight", remark="part of the training loss only, there and here"),
    Row("epoch", "--train_iters=<iterations>", "the data repeats until then"),
    # Precision, memory, speed
    Row("mp", "--training_dtype", "bf16 for p=f32,c=bfloat16, fp32 for f32; master weights are always fp32"),
    Row("quantization", remark="fp8 and int8 are not supported yet; write --training_dtype=bf16"),
    Row(
        "jax_config jax_compilation_cache_dir log_jaxprs log_xla_hlo save_xla_dumps scan_layers profiler_perfetto_link",
        remark="belongs to JAX and its compiler",
    ),
    # Sharding and processes
    Row(
        "batch_axis fsdp_axis axis_resources parameter_axis_resources compute_axis_resources",
        remark="named axes belong to JAX; write --zero_stage=3 to shard the model over all ranks",
    ),
    Row("tensor_parallel_axes model_axis_size", remark=PARALLEL),
    Row(
        "replica_ici_axis_size replica_dcn_axis_size",
        remark="shards are not replicated yet; write --zero_stage=1, 2 or 3, which shard over all ranks",
    ),
    Row(
        "distributed coordinator_address num_processes process_id local_device_ids initialize_jax_distributed",
        remark=TORCHRUN,
    ),
    Row("ray start_workers auto_start_cluster", remark=f"no cluster is needed: {_TOKENIZED}"),
    Row("require_accelerator", "--device=cuda", "by default a machine without a GPU trains on its CPU"),
    Row("shutdown_at_exit", remark="a run never shuts a machine down"),
    # Checkpoints and other weights
    Row("trainer.id append_run_id_to_base_path", _RUN_FOLDER, "a run is its folder"),
    Row(
        "checkpointer checkpointer.save_interval",
        "--checkpoint_interval=<iterations>",
        "saving by time is not supported yet",
    ),
    Row("base_path", _RUN_FOLDER, "checkpoints go to <folder>/checkpoints"),
    Row(
        "keep",
        "--export_interval=<iterations> --export_format=distributed",
        "these checkpoints are kept; the interval cannot change during a run yet",
    ),
    Row("delete_old_temp_checkpoints", "--max_checkpoints=<number>", "no matter which start saved them"),
    Row("load_checkpoint", remark="a run resumes if --experiment_dir has a checkpoint; there is no flag for it yet"),
    Row("load_checkpoint_path", _RUN_FOLDER, "a run resumes only from its own folder"),
    Row("initialize_from initialize_from_checkpoint_path", _PRETRAINED, "--load_pretrained_optimizer=1 adds moments"),
    Row("initialize_from_hf", "--pretrained_checkpoint_path=<folder of a Hugging Face model>"),
    Row("use_hf_model_config", "--use_pretrained_config"),
    Row("allow_partial_checkpoint", remark="a checkpoint is loaded as a whole"),
    Row("hf_save_path", "--export_interval=<iterations>", "exports go to <experiment_dir>/export"),
    Row("hf_save_steps", "--export_interval"),
    Row("hf_save_dtype", "--export_dtype"),
    Row(
        "hf_upload", "--export_callback_script=<program>", "the program is given each exported folder and can upload it"
    ),
    # Logs, trackers, profiler
    Row("log_dir", _RUN_FOLDER, "each start logs to <folder>/runs/<k>/logs"),
    Row("wandb tracker.entity", "--wandb_entity_name", "turns Weights & Biases on; metrics.jsonl is always written"),
    Row(
        "tracker",
        "--wandb_entity_name=<team> for Weights & Biases",
        "other trackers are not supported yet; metrics.jsonl has every number",
    ),
    Row("tracker.project", "--wandb_project_name"),
    Row("tracker.name", "--experiment_name"),
    Row("tracker.group", "--wandb_group_name"),
    Row("tracker.tags", remark="runs in Weights & Biases have no tags yet"),
    Row("tracker.id tracker.resume", remark="a restart always continues its Weights & Biases run"),
    Row("tracker.mode", remark="set the environment variable WANDB_MODE"),
    Row("save_code", remark="code is not uploaded"),
    Row("logdir", remark=_TENSORBOARD),
    Row(
        "watch",
        "--debug_all_param_gradients=<level> or --debug_param_update=<level>",
        "they log statistics; sending them to trackers is not supported yet",
    ),
    Row("profiler profiler_start_step profiler_num_steps", remark=PROFILE),
    Row(
        "eval_harness eval_harness_steps",
        remark="benchmark tasks are not evaluated; scripts/evaluate.py reports loss, perplexity and bits per byte",
    ),
    Row("log_entropy", remark="the entropy of predictions is not logged"),
    # Model
    Row(
        "model.type",
        remark="there is only one model; for llama write --use_rotary_embeddings=1 --normalization_type=rms_norm "
        "--gated=1 --add_linear_biases=0 --tie_word_embeddings=0, for gpt2 none of them",
    ),
    Row("seq_len", remark="here each sample has one more token, so that every position has a target"),
    Row("mlp_scale", "--ffn_hidden_size", "mlp_scale times --hidden_size"),
    Row("activation_function", "--activation_type", "gelu_new is gelu here, gelu is gelu_exact, swish is silu"),
    Row("use_bias", "--add_linear_biases", "layer_norm has a bias unless --use_layer_norm_weight=0"),
    Row("tie_word_embeddings", remark="Levanter's gpt2 always ties them"),
    Row("initializer_range", "--init_method_std=<std>", "here for all matrices, there only for gpt2's embeddings"),
    Row("embed_pdrop", "--embedding_dropout"),
    Row("resid_pdrop", "--hidden_dropout", "also for embeddings unless --embedding_dropout is given"),
    Row("attn_pdrop", "--attention_dropout", "had no effect in Levanter"),
    Row("rope", "--use_rotary_embeddings=1 --rope_type=<type>", "Hugging Face's formulas: Levanter's yarn differs"),
    Row("rope.type", "--rope_type"),
    Row("rope.theta", "--rotary_base"),
    Row("rope.factor", "--rope_factor", "with --rope_type=linear, llama3 or yarn"),
    Row("cross_entropy_block_size", remark="entries of the vocabulary, there and here"),
    Row("gradient_checkpointing", _RECOMPUTE, "for true write --recompute_layers=<num_layers>"),
    Row("attn_backend", "--attention_backend", "JAX's kernels have other names"),
    Row("model.use_flash_attention", "--attention_backend", "for false write math"),
    Row("flash_attention_block_size", remark="the kernel chooses; --attention_backend names another kernel"),
    Row("reference_checkpoint", "--tokenizer_file=<tokenizer.json>", "exports need no other model"),
    # Data
    Row("train_urls cache_dir data.configs", "--data_path", f"{_TOKENIZED}; write the prefixes of its files"),
    Row("validation_urls", "--split", "the share of documents for validation"),
    Row("cache_options", remark=_TOKENIZED),
    Row("tokenizer", "--tokenizer_file", f"{_TOKENIZED}; exports get a copy"),
    Row("train_weights", "--data_path", "a weight before each prefix (0.3 first 0.7 second), for the whole run"),
    Row("mixture_block_size", remark="the weights of a blend are the same for the whole run"),
    Row("stop_strategy", remark="data sets repeat until --train_iters"),
    Row("data.shuffle permutation_type", remark="every epoch is shuffled as a whole; --seed changes the order"),
    Row("max_train_batches", "--split", "the share of documents for training"),
    Row("num_validation_sequences", "--split", "the share of documents for validation"),
    Row("experiment_budget target_budget", remark="simulated epochs are not supported"),
)

_SEEDS = "random numbers derive from --seed and their position (weight, sample, layer), not from shifted seeds"
_EXPERTS = "mixture of experts is not supported yet"
_FIM = "fill-in-the-middle is not supported"
_WHOLE_CONFIG = "only the architecture is taken from a pretrained folder; write everything else as flags"
_CONVERT = "a flag of Fast-LLM's conversion tool; here use scripts/convert_checkpoint.py"

# Fast-LLM's flags of the flat-flag era.
FAST_LLM = (
    # Flags that exist here, with what differs
    Row("validation_iters", remark="or all"),
    Row("export_callback_script", remark="runs while training goes on; its failure only causes a warning"),
    Row("export_callback_env", remark="only names are recorded; values are written nowhere"),
    Row("lr_decay_style", remark="also Levanter's styles"),
    Row("lr_schedule", remark="the stages that Fast-LLM documents; its own parser rejects every one"),
    Row("lr_decay_iters", remark="Fast-LLM requires it unless the style is constant"),
    Row("clip_grad", remark="0 turns clipping off; Fast-LLM requires a value above 0"),
    Row("min_lr", remark="or --min_lr_ratio"),
    Row("debug_tensor_parallel", remark="there is nothing to compare"),
    Row("pipeline_delay", remark="unused, there and here"),
    Row("stages_per_pipeline_stage", remark="must be 1, there and here"),
    Row("zero_stage", remark="or auto; buffer counts may be given with any stage"),
    Row("layers_per_stage", remark="or auto; 1.5 alternates stages of one and two blocks (2 there); at least 1"),
    Row("world_size", remark="only for a dry run; otherwise torchrun sets it"),
    Row("cross_entropy_impl", remark="auto, torch (alias fused) or triton"),
    Row("mlp_recompute_level", remark="--recompute_layers=<N> recomputes whole blocks"),
    Row("head_groups", remark="write 1, multi-query attention, if you relied on the default"),
    Row("rotary_embedding_scale", remark="the same number; or --rotary_base"),
    Row("export_interval", remark="Fast-LLM requires a multiple of --checkpoint_interval"),
    Row("enable_triton_kernels", remark="1 is an error where Triton cannot run"),
    Row("dataset_source", remark="list or random; file and sample are refused"),
    Row("pretrained_checkpoint_type", remark="huggingface or distributed"),
    # Flags that do not exist here: accepted with the values that change nothing, else refused
    Row("micro_sequence_length", remark="a micro-batch holds whole samples of --sequence_length tokens", only="none"),
    _switch("compile_all", "0", COMPILE),
    Row("tensor_parallel pipeline_parallel sequence_data_parallel", remark=PARALLEL, only="1"),
    _switch("sequence_tensor_parallel pipeline_first debug_send_recv", "0", PARALLEL),
    _switch("pipeline_overlap parallel_embeddings", "1", PARALLEL),
    Row("rank local_world_size", remark=TORCHRUN),
    Row("optimization_dtype", remark="master weights and moments are fp32", only="float32 fp32 float"),
    _switch("reproducible_init", "1", "initial weights never depend on the number of ranks"),
    Row("dp_seed_shift pp_seed_shift pp_gen_init_seed_shift pp_gen_seed_shift tp_seed_shift", remark=_SEEDS),
    Row("tp_gen_init_seed_shift tp_gen_seed_shift sample_seed_shift", remark=_SEEDS),
    Row("train_seed_shift valid_seed_shift test_seed_shift", remark=_SEEDS),
    _switch(
        "data_overlap",
        "1",
        "collectives overlap with computation; to prevent it write --num_weight_buffers=1 --num_grad_buffers=1",
    ),
    _switch("debug_schedule", "0", "the schedule is not logged"),
    _switch("profile_schedule profile_cpu profile_cuda", "0", PROFILE),
    _switch("profile_averages profile_trace profile_log profile_export", "0", PROFILE),
    Row("profile_wait", remark=PROFILE, only="0"),
    Row("profile_skip profile_warmup profile_cycles", remark=PROFILE, only="1"),
    Row("profile_column_width", remark=PROFILE, only="80"),
    Row("profile_ranks", remark=PROFILE, only="none"),
    _switch("skip_step", "0", "parts of a training step cannot be skipped"),
    _switch("triton_rotary", "1", "write --enable_triton_kernels=0, for all operations"),
    Row("normalization_implementation", remark="the program chooses the implementation", only="auto"),
    _switch("transposed_mlp_weight", "0", "every matrix is stored as (outputs, inputs)"),
    _switch("use_flash_attention", "1", "write --attention_backend=math for the plain formula"),
    Row("sequence_first", remark="the batch dimension always comes first", only="none"),
    _switch("debug_transformer", "0", "tensors inside a layer are not logged; write --debug_layer_outputs=<level>"),
    _switch("debug_transformer_memory", "0", "memory inside a layer is not logged; write --debug_activation_memory=1"),
    Row("num_experts num_experts_per_token", remark=_EXPERTS, only="1"),
    Row("num_shared_experts expert_z_loss_coefficient moe_jitter_eps", remark=_EXPERTS, only="0"),
    Row("expert_routing_type", remark=_EXPERTS, only="topk"),
    _switch("dropless_moe", "1", _EXPERTS),
    _switch("dropless_dynamic_shape", "0", _EXPERTS),
    Row("expert_auxiliary_loss_coefficient", remark=_EXPERTS, only="0.01 0"),
    Row("mlp_lr_scale", remark="write --lr_scales=<pattern of the weights' names>:<scale>", only="none 1"),
    Row("router_lr_scale", remark=_EXPERTS, only="none 1"),
    _switch("structured_logs", "1", "log lines have one format"),
    _switch("torch_dynamo_enable", "0", COMPILE),
    _switch(
        "triton_linear_kernels",
        "0",
        "matrix products use the vendor's library; --enable_triton_kernels covers everything else",
    ),
    Row("fim_rate fim_fragment_rate", remark=_FIM, only="0"),
    Row("fim_max_middle_len fim_split_sample fim_ignore_prefix", remark=_FIM, only="none"),
    Row("fim_spm_rate", remark=_FIM, only="0.5"),
    _switch("fim_truncate_or_pad", "0", _FIM),
    Row("imported_model_type", remark="the folder's config.json names the model type", only="none"),
    _switch("load_full_base_model_config load_full_fast_llm_config", "0", _WHOLE_CONFIG),
    Row("input_type output_type input_path output_path model_type", remark=_CONVERT),
    Row("target_params_per_file layers_per_step exist_ok", remark=_CONVERT),
    Row("use_cpu", remark=f"{_CONVERT}; write --device=cpu to train on the CPU"),
    Row("dtype", remark=f"{_CONVERT}; write --training_dtype=bf16 to train in bf16"),
)


def by_name(*tables: tuple[Row, ...]) -> dict[str, list[tuple[str, Row]]]:
    """Return the rows of each name: (case, row) for every case of the option, or one row with the case ""."""
    found: dict[str, list[tuple[str, Row]]] = {}
    for row in (row for table in tables for row in table):
        for name in row.names.split():
            option, _, case = name.partition(":")
            found.setdefault(option, []).append((case, row))
    return found


def _answer(cases: list[tuple[str, Row]]) -> str:
    if len(cases) == 1:
        return cases[0][1].answer
    return "write " + " or ".join(f"{row.here} ({case})" for case, row in cases)


_ROWS = by_name(MEGATRON, LEVANTER, FAST_LLM)
# Flags that are accepted with some values, and refused with all others.
REFUSED: Mapping[str, Row] = MappingProxyType({name: cases[0][1] for name, cases in _ROWS.items() if cases[0][1].only})
# Flags that do not exist here: what to write instead, or why there is nothing.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {name: _answer(cases) for name, cases in _ROWS.items() if name not in SPELLINGS and name not in REFUSED}
)


def suffixes(name: str) -> Iterator[str]:
    """Yield `trainer.tracker.name`, `tracker.name`, `name`: the ends of a dotted name, the longest first."""
    parts = name.split(".") if re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) else []
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def answer_of(name: str) -> str | None:
    """Return what to write instead of another program's flag, or why there is nothing; None for an unknown name.

    The longest known end of a dotted name counts (`tracker.name` of `trainer.tracker.name`), and if none is known, the
    innermost group (`tracker`).
    """
    for end in suffixes(name):
        if end in INSTEAD:
            return INSTEAD[end]
    *groups, leaf = name.split(".") if len(name) <= 120 else [name]
    if groups and leaf in SPELLINGS:
        return f"flags have no dots; write --{SPELLINGS[leaf].name}"
    if groups and leaf in REFUSED:
        return REFUSED[leaf].remark
    return next((INSTEAD[group] for group in reversed(groups) if group in INSTEAD), None)
