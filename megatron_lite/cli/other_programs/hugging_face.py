"""The arguments of Hugging Face's Trainer and of run_clm.py, and the names in a model's config.json."""

from __future__ import annotations

from megatron_lite.cli.other_programs.row import (
    ADAPTERS,
    COMPILE,
    DTYPE,
    EXPERTS,
    FP8,
    PRETRAINED,
    PROFILE,
    RECOMPUTE,
    RUN_FOLDER,
    SHARDING,
    TOKENIZED,
    TORCHRUN,
    WANDB,
    Row,
)

_UPLOAD = "--export_callback_script=<program>"
_UPLOADS = "the program is given each exported folder and can upload it"
_ITERATIONS = "every interval here counts iterations"
_LOGGED = "log lines come every --log_interval iterations"
_ALWAYS_GOOD = "the newest checkpoint resumes, and --max_checkpoints=<number> are kept"
_LOSS = "evaluation is the loss on --validation_iters batches"
_COLUMNS = "samples are tokens of --data_path, without columns or labels"
_LOADER = "--num_workers and --prefetch_factor set how data is read"
_GENERATES = "a name for generating text; see scripts/generate.py, or --sample_interval while training"
_UNUSED = "pretraining does not use it; leave it out"
_GPT = "only GPT models are trained; see --model"
_FILES = "--data_path=<prefix>"

TRAINER = (
    # Length, batch, learning rate
    Row(
        "num_train_epochs epochs num_epochs",
        "--train_iters=<epochs * samples / batch_size>",
        "a sample has --sequence_length tokens, and the data repeats until then",
    ),
    Row("max_steps", "--train_iters"),
    Row("per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size", "--eval_micro_batch_size"),
    Row("per_gpu_train_batch_size", "--micro_batch_size"),
    Row("gradient_accumulation_steps", "--sequential_micro_batches=<steps>, or --batch_size and --micro_batch_size"),
    Row("auto_find_batch_size", "--dry_run=1", "prints the memory that a --micro_batch_size needs"),
    Row(
        "lr_scheduler_type lr_scheduler",
        "--lr_decay_style",
        "polynomial is power, inverse_sqrt is inv_sqrt, constant_with_warmup is constant, and warmup_stable_decay is "
        "linear with --lr_wsd_decay_iters",
    ),
    Row("lr_scheduler_kwargs", "--min_lr, --lr_decay_power, --lr_num_cycles or --lr_wsd_decay_iters"),
    Row("warmup_ratio", "--lr_warmup_fraction"),
    Row("warmup_steps num_warmup_steps", "--lr_warmup_iters"),
    # Optimizer
    Row("optim", "--optimizer=adamw, muon, lion or sgd", "adamw for every adamw_*"),
    Row("optim_args optim_target_modules", "--adam_eps, --lr_scales and others of --optimizer"),
    Row("adafactor", remark="not supported; write --optimizer=adamw"),
    Row("label_smoothing_factor", remark="labels are not smoothed; see --logit_z_loss"),
    Row("neftune_noise_alpha", remark="embeddings get no noise; see --embedding_dropout"),
    Row("average_tokens_across_devices num_items_in_batch", "--loss_reduction=token", "the default"),
    # Precision and speed
    Row("bf16_full_eval", remark=DTYPE),
    Row(
        "fp16_full_eval half_precision_backend fp16_opt_level fp16_backend",
        remark="--training_dtype=fp16 trains in fp16",
    ),
    Row("tf32", remark="products of fp32 weights are fp32; write --training_dtype=bf16 for speed"),
    Row("activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs", RECOMPUTE),
    Row("torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval", remark=COMPILE),
    Row("use_liger_kernel liger_kernel_config", "--enable_triton_kernels=1", "the default with a GPU"),
    Row("torch_empty_cache_steps", remark="buffers are allocated once; see --dry_run=1"),
    Row("full_determinism", "--deterministic"),
    # Devices and sharding
    Row("no_cuda", "--device=cpu"),
    Row("use_mps_device use_ipex tpu_num_cores", remark="--device=cuda and --device=cpu are supported"),
    Row("fsdp fsdp_config", "--zero_stage=3", "for full_shard; --zero_stage=2 for shard_grad_op"),
    Row(
        "deepspeed deepspeed_config",
        "--zero_stage=1, 2 or 3",
        "for zero_optimization.stage; write the file's other settings as flags",
    ),
    Row("accelerator_config parallelism_config", remark=SHARDING),
    Row("ddp_timeout", "--distributed_timeout"),
    Row("ddp_backend", "--device=cuda or --device=cpu", "NCCL on GPU, gloo on CPU"),
    # Logs
    Row("logging_steps", "--log_interval"),
    Row("logging_strategy", "--log_interval=<iterations>", _ITERATIONS),
    Row("logging_first_step", "--log_offset=1", "the default"),
    Row("log_level log_level_replica log_on_each_node", "--enable_all_loggers=1 for the log of every rank", _LOGGED),
    Row("logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second", remark=_LOGGED),
    Row("disable_tqdm", remark=f"a progress bar is only in a terminal; {_LOGGED}"),
    Row(
        "report_to", "--trackers", "or --wandb_entity_name=<team> for wandb; wandb, tensorboard, or both after a comma"
    ),
    Row("run_name", "--experiment_name", "with --wandb_entity_name"),
    Row("project trackio_*", "--wandb_project_name", "with --wandb_entity_name"),
    Row("debug skip_memory_metrics", remark="see --debug_activation_memory and --show_tensor_logs"),
    # Validation
    Row("do_train", "--train_iters=<iterations>"),
    Row("do_eval", "--validation_iters=<batches>"),
    Row("do_predict", "--test_iters=<batches>"),
    Row(
        "eval_strategy evaluation_strategy evaluate_during_training",
        "--validation_iters=<batches> --validation_interval=<iterations>",
        _ITERATIONS,
    ),
    Row("eval_steps", "--validation_interval", "with --validation_iters=<batches>"),
    Row("eval_on_start", "--validation_at_start"),
    Row("eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object", remark=_LOSS),
    Row("prediction_loss_only include_for_metrics batch_eval_metrics predict_with_generate", remark=_LOSS),
    Row("load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience", remark=_ALWAYS_GOOD),
    # Checkpoints
    Row("output_dir", "--experiment_dir"),
    Row("overwrite_output_dir", remark="nothing is overwritten; a new run needs a new --experiment_dir"),
    Row("save_steps", "--checkpoint_interval"),
    Row("save_strategy", "--checkpoint_interval=<iterations>", _ITERATIONS),
    Row("save_total_limit", "--max_checkpoints"),
    Row("save_safetensors save_on_each_node enable_jit_checkpoint", remark=f"always; {_ALWAYS_GOOD}"),
    Row("save_only_model", "--export_interval=<iterations>", "exports hold weights, checkpoints everything"),
    Row(
        "resume_from_checkpoint resume",
        "--experiment_dir=<folder of the run>",
        "the same command resumes; --pretrained_checkpoint_path=<folder> starts a new run from weights",
    ),
    Row("ignore_data_skip", remark="a resumed run goes on at its next sample; --seed=<another> changes the order"),
    Row("restore_callback_states_from_checkpoint", remark=_ALWAYS_GOOD),
    Row("push_to_hub push_to_hub_* hub_*", _UPLOAD, _UPLOADS),
    # Data
    Row("dataloader_num_workers preprocessing_num_workers", "--num_workers"),
    Row("dataloader_prefetch_factor", "--prefetch_factor"),
    Row("dataloader_multiprocessing_context", "--multiprocessing_context"),
    Row("dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_in_order", remark=_LOADER),
    Row("remove_unused_columns label_names length_column_name text_column dataset_text_field", remark=_COLUMNS),
    Row("group_by_length train_sampling_strategy", remark="samples have one length, --sequence_length; order: --seed"),
    Row("packing", remark="documents are always packed into samples; see --cross_document_attention"),
    Row("ray_scope past_index", remark=_UNUSED),
    Row("peft lora_* use_peft use_lora load_in_8bit load_in_4bit qlora", remark=ADAPTERS),
)

RUN_CLM = (
    Row("model_name_or_path", "--pretrained_checkpoint_path=<folder>", "a folder that exists; nothing is downloaded"),
    Row("config_name", "--model for a preset, or --pretrained_checkpoint_path=<folder> --load_pretrained_weights=0"),
    Row("config_overrides", remark="write each setting as a flag: --num_layers=<N> --hidden_size=<width>"),
    Row("tokenizer_name tokenizer_name_or_path tokenizer_path", "--tokenizer_file=<tokenizer.json>", TOKENIZED),
    Row("use_fast_tokenizer", "--tokenizer_file=<tokenizer.json>", TOKENIZED),
    Row("torch_dtype", "--training_dtype"),
    Row("low_cpu_mem_usage", remark="weights are read as shards; see --pretrained_checkpoint_path"),
    Row("trust_remote_code", remark="no code of a model is ever run; see --pretrained_checkpoint_path"),
    Row("model_revision use_auth_token token", PRETRAINED, "nothing is downloaded"),
    Row("dataset_name dataset_config_name train_file validation_file dataset_path", _FILES, TOKENIZED),
    Row("text_file streaming overwrite_cache keep_linebreaks", _FILES, TOKENIZED),
    Row("validation_split_percentage", "--split=<training>,<validation>,<test>", "as in --split=95,5,0"),
    Row("max_train_samples", "--train_iters=<samples / batch_size>"),
    Row("max_eval_samples", "--validation_iters=<samples / batch_size>"),
    Row("max_seq_length max_length model_max_length cutoff_len", "--sequence_length"),
)

CONFIG_JSON = (
    Row("num_hidden_layers n_layers", "--num_layers"),
    Row("d_model model_dim embed_dim n_embed embedding_dim emb_dim", "--hidden_size"),
    Row("n_heads num_heads_q nheads num_attn_heads", "--num_attention_heads"),
    Row("n_kv_heads n_query_groups multi_query num_kv_groups", "--head_groups=<number of key/value heads>"),
    Row("n_positions n_ctx max_sequence_length", "--max_position_embeddings", "a sample's length is --sequence_length"),
    Row("n_inner d_ff ffn_dim ff_dim d_inner", "--ffn_hidden_size"),
    Row("hidden_act act_fn hidden_activation", "--activation_type", "gelu_new is gelu here, gelu is gelu_exact"),
    Row("rms_norm_eps norm_eps", "--layer_norm_eps", "with --normalization_type=rms_norm"),
    Row("rope_theta rotary_emb_base rope_base", "--rotary_base", "with --use_rotary_embeddings=1"),
    Row("rope_scaling rope_parameters", "--rope_type=<type> --rope_factor=<factor>", "with --use_rotary_embeddings=1"),
    Row("partial_rotary_factor rotary_pct rotary_percentage", "--rotary_percent"),
    Row("attention_bias qkv_bias use_qkv_bias", "--add_qkv_biases"),
    Row("mlp_bias", "--add_mlp_biases"),
    Row("embd_pdrop", "--embedding_dropout"),
    Row("hidden_dropout_prob", "--hidden_dropout"),
    Row("attention_probs_dropout_prob", "--attention_dropout"),
    Row("sliding_window", "--window_size"),
    Row("use_sliding_window max_window_layers layer_types", remark="all blocks have the same --window_size"),
    Row("attn_implementation attention_implementation", "--attention_backend=auto", "flash, cudnn or math by name"),
    Row("use_flash_attention_2 flash_attn use_flash", remark="--attention_backend=auto, the default, chooses it"),
    Row("tie_embeddings tied_embeddings share_embeddings_and_output_weights", "--tie_word_embeddings"),
    Row("final_logit_softcapping logits_soft_cap", "--logit_soft_cap"),
    Row(
        "attn_logit_softcapping query_pre_attn_scalar scale_attn_weights", remark="not supported; see --logit_soft_cap"
    ),
    Row("scale_attn_by_inverse_layer_index", "--scale_attn_by_inverse_layer_idx"),
    Row("reorder_and_upcast_attn", "--attention_softmax_in_fp32"),
    Row("num_local_experts n_experts n_routed_experts", remark=EXPERTS),
    Row(
        "bos_token_id eos_token_id pad_token_id architectures",
        "--tokenizer_file=<tokenizer.json>",
        "exports get a copy",
    ),
    Row(
        "transformers_version summary_type pretraining_tp use_cache output_attentions", remark=f"{_UNUSED}; see --model"
    ),
    Row("cross_attention is_encoder_decoder num_labels problem_type", remark=_GPT),
    Row("num_beams do_sample repetition_penalty", remark=_GENERATES),
    Row("quantization_config", remark=FP8),
    Row("num_machines machine_rank main_process_port num_gpus n_gpus gpus n_gpu", remark=TORCHRUN),
    Row("profiling", PROFILE),
    Row("wandb_log use_wandb with_tracking", "--wandb_entity_name=<team>", WANDB),
    Row(
        "ckpt_dir checkpoint_dir checkpoint_path save_dir save_path",
        RUN_FOLDER,
        "checkpoints go to <folder>/checkpoints",
    ),
)
