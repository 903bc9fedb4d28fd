"""The flags of Megatron-LM."""

from __future__ import annotations

from megatron_lite.cli.other_programs.row import (
    COMPILE,
    EXPERTS,
    FP8,
    PARALLEL,
    PRETRAINED,
    PROFILE,
    RECOMPUTE,
    RUN_FOLDER,
    TENSORBOARD,
    TOKENIZED,
    TORCHRUN,
    Row,
    switch,
)

_ONE = "there is only one implementation"
_KEY = (
    "keep secrets out of command lines; set the environment variable WANDB_API_KEY or WANDB_API_KEY_PATH, and "
    "--wandb_entity_name=<team>"
)
_FUSED = "operations are fused where --enable_triton_kernels allows"
_ONE_FORMAT = "checkpoints have one format, complete or absent, which any number of ranks reads; leave it out"
_OTHER_MODELS = "only GPT models are trained; see --model and the flags of the model"
_TASK = "a task of its own, which this program does not have; it pretrains, with --train_iters=<N>"
_RESTARTS = "faults end the run with a code; the same command resumes it from --experiment_dir"
_LOGGED = "a log line comes every --log_interval iterations, and metrics.jsonl has every number"
_ROTARY = "--use_rotary_embeddings=1"

MEGATRON = (
    # Model
    Row("group_query_attention", "--head_groups=<number of key/value heads>"),
    Row("multi_query_attention", "--head_groups=1"),
    Row("position_embedding_type", "--use_rotary_embeddings=1 for rope, =0 for learned_absolute"),
    Row("use_rotary_position_embeddings", _ROTARY),
    Row("no_position_embedding", "--use_position_embeddings=0"),
    Row("rotary_seq_len_interpolation_factor", f"{_ROTARY} --rope_type=linear --rope_factor=<factor>"),
    Row("use_rope_scaling", f"{_ROTARY} --rope_type=llama3 --rope_factor=8"),
    Row("rope_scaling_factor rotary_scaling_factor", "--rope_factor", "with --rope_type=linear, llama3 or yarn"),
    Row(
        "rotary_interleaved", remark="the two halves of a head rotate, as in Hugging Face; --rotary_percent is the part"
    ),
    Row("mscale", "--rope_mscale"),
    Row("mscale_all_dim", "--rope_mscale_all_dim"),
    Row("yarn_original_max_position_embeddings", "--rope_original_max_position_embeddings"),
    Row("yarn_beta_fast", "--rope_beta_fast"),
    Row("yarn_beta_slow", "--rope_beta_slow"),
    Row("no_rope_freq", remark="rotary positions are in every block or in none: --use_rotary_embeddings"),
    Row("normalization", "--normalization_type=layer_norm or --normalization_type=rms_norm"),
    Row("swiglu", "--gated=1 --activation_type=silu"),
    Row("quick_geglu", "--gated=1 --activation_type=quick_gelu"),
    Row("squared_relu", "--activation_type=squared_relu"),
    Row("openai_gelu onnx_safe", "--activation_type=gelu", "the tanh form; gelu_exact is the other"),
    Row("disable_bias_linear", "--add_linear_biases=0"),
    Row("untie_embeddings_and_output_weights", "--tie_word_embeddings=0"),
    Row("window_attn_skip_freq", remark="all blocks have the same --window_size"),
    Row("init_method_xavier_uniform", remark="initial weights are normal, with --init_method_std"),
    Row("apply_query_key_layer_scaling", remark="never needed: scores are fp32; see --attention_softmax_in_fp32"),
    Row("no_query_key_layer_scaling", remark="scores are never scaled by layer; --scale_attn_by_inverse_layer_idx=0"),
    Row(
        "apply_residual_connection_post_layernorm", remark="the residual stream is never normalized; see --hybrid_norm"
    ),
    Row("softmax_type relative_attention_num_buckets relative_attention_max_distance", remark=_OTHER_MODELS),
    Row("encoder_num_layers decoder_num_layers", "--num_layers", "a decoder is the whole model"),
    Row("encoder_seq_length decoder_seq_length", "--sequence_length"),
    Row("padded_vocab_size pad_vocab_size", "--make_vocab_size_divisible_by", "pads --vocab_size"),
    Row("mtp_* multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim v_head_dim", remark=_OTHER_MODELS),
    Row("qk_pos_emb_head_dim hybrid_* mamba_* heterogeneous_* spec retro_* bert_*", remark=_OTHER_MODELS),
    Row("mla_* linear_attention_* experimental_attention_* cache_mla_latents", remark=_OTHER_MODELS),
    # Experts
    Row("moe_* expert_* dropless_*", remark=EXPERTS),
    Row("moe_router_topk", remark=EXPERTS, only="1"),
    Row("expert_model_parallel_size expert_tensor_parallel_size", remark=EXPERTS, only="1"),
    # Training
    Row("train_samples", "--train_iters=<samples / batch_size>"),
    Row("rampup_batch_size", "--batch_size_schedule=<iteration:size ...>"),
    Row("step_batch_size_schedule", "--batch_size_schedule=<iteration:size ...>", "in iterations, not in samples"),
    Row("decrease_batch_size_if_needed", "--allow_nondivisible_batch_size=1", "pads the last micro-batch"),
    Row(
        "exit_signal_handler exit_signal exit_signal_handler_for_training",
        remark="signals are always handled: the run saves into --experiment_dir and stops",
    ),
    Row("skip_train", "--train_iters=0"),
    Row("iterations_to_skip", remark="iterations cannot be skipped; --lr_schedule_offset shifts the learning rate"),
    Row("full_validation", "--validation_iters=all"),
    Row("multiple_validation_sets validation_set_names", remark="there is one validation set; see --split"),
    Row("start_eval_at_iter", remark="validations begin after --validation_interval iterations"),
    Row(
        "sft sft_*",
        remark="every token counts in the loss; --pretrained_checkpoint_path=<folder> trains on from weights",
    ),
    Row("eval_global_batch_size", "--batch_size", "also the size of a validation batch"),
    Row("calculate_per_token_loss", "--loss_reduction=token"),
    # Learning rate
    Row("lr_warmup_samples", "--lr_warmup_iters=<samples / batch_size>"),
    Row("wsd_decay_steps", "--lr_wsd_decay_iters"),
    Row("lr_warmup_init", remark="the warmup starts at lr / lr_warmup_iters, or at 0 with --lr_step_offset=0"),
    Row("lr_decay_samples", "--lr_decay_iters=<samples / batch_size>"),
    Row("lr_wsd_decay_samples", "--lr_wsd_decay_iters=<samples / batch_size>"),
    Row("lr_wsd_decay_style", "--lr_decay_style for the shape, and --lr_wsd_decay_iters"),
    Row("decoupled_lr", "--lr_scales=embedding:<ratio>,head:<ratio>"),
    Row("decoupled_min_lr", "--lr_scales=embedding:<ratio>,head:<ratio>", "the minimum is scaled, too"),
    Row("override_opt_param_scheduler", remark="flags always win over a checkpoint's schedule: write --lr and others"),
    Row("use_checkpoint_opt_param_scheduler", remark="repeat the run's flags, as --lr; its config.json lists them"),
    Row("override_lr_scheduler", remark="flags always win over a checkpoint's schedule: write --lr and others"),
    # Optimizer
    Row("start_weight_decay end_weight_decay weight_decay_incr_style", "--weight_decay", "constant during a run"),
    Row("no_weight_decay_cond_type apply_wd_to_qk_layernorm", "--weight_decay_modules or --weight_decay_default_mask"),
    Row("lion_beta1", "--optimizer=lion --adam_beta1=<decay>"),
    Row("lion_beta2", "--optimizer=lion --adam_beta2=<decay>"),
    Row("muon_num_ns_steps", "--muon_ns_steps"),
    Row("muon_scale_mode muon_extra_scale_factor", "--muon_adjust_lr=match_rms_adamw or --muon_adjust_lr=original"),
    Row("muon_*", "--optimizer=muon --muon_momentum=<decay> --muon_ns_steps=<iterations>"),
    Row("check_for_nan_in_loss_and_grad", "--crash_on_nan=1 --crash_on_inf=1"),
    Row("no_check_for_nan_in_loss_and_grad", "--crash_on_nan=0 --crash_on_inf=0", "such updates are always dropped"),
    Row("check_for_spiky_loss check_for_large_grads", "--skip_bad_steps=1"),
    Row("rerun_mode error_injection_*", remark="iterations are not repeated; see --on_bad_step"),
    Row(
        "optimizer_cpu_offload optimizer_offload_* cpu_offloading*",
        remark="nothing moves to host memory; --zero_stage=3",
    ),
    Row("use_precision_aware_optimizer main_grads_dtype", "--full_precision_gradients"),
    Row("main_params_dtype exp_avg_dtype exp_avg_sq_dtype", remark="fp32; see --split_master_weights"),
    # Precision
    Row("bf16", "--training_dtype=bf16"),
    Row("fp16", "--training_dtype=fp16"),
    Row("fp32", "--training_dtype=fp32"),
    Row("params_dtype", "--training_dtype", "master weights are always fp32"),
    Row("grad_reduce_in_bf16", "--full_precision_gradients=0", "with --training_dtype=bf16"),
    Row("fp16_lm_cross_entropy", remark="the loss is fp32; see --cross_entropy_impl"),
    Row("fp8_format fp8_* fp4_* no_fp8_* mxfp8_*", remark=FP8),
    # Speed and memory
    Row("torch_compile", remark=COMPILE),
    Row("recompute_granularity recompute_method recompute_activations checkpoint_activations", RECOMPUTE),
    Row("recompute_modules", RECOMPUTE),
    Row("recompute_num_layers", "--recompute_layers=<N>", "for MLPs alone write --mlp_recompute_level=none,full:<N>"),
    Row("distribute_saved_activations", remark="write --recompute_layers=<N>, which keeps only inputs of blocks"),
    Row("transformer_impl use_mcore_models use_legacy_models", remark=f"{_ONE}; leave it out"),
    Row("cross_entropy_loss_fusion", remark="head and loss are always fused; see --cross_entropy_splits"),
    Row("cross_entropy_fusion_impl", "--cross_entropy_impl=auto"),
    Row(
        "no_masked_softmax_fusion no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion",
        "--enable_triton_kernels=0",
        "for all operations",
    ),
    Row("no_persist_layer_norm no_gradient_accumulation_fusion disable_jit_fuser", "--enable_triton_kernels=0"),
    Row("bias_gelu_fusion bias_swiglu_fusion masked_softmax_fusion apply_rope_fusion", remark=_FUSED),
    switch("use_flash_attn", "1", "write --attention_backend=math for the plain formula"),
    Row("flash_decode", remark="generation chooses by itself: scripts/generate.py"),
    Row(
        "manual_gc manual_gc_interval no_manual_gc_eval",
        remark="Python's garbage collector is left alone; leave it out",
    ),
    Row("enable_cuda_graph cuda_graph_* external_cuda_graph", remark="CUDA graphs are not used; see --throttle_cpu"),
    Row("empty_unused_memory_level", remark="buffers are allocated once; --dry_run=1 says how much memory a run needs"),
    Row("use_cpu_initialization init_model_with_meta_device", remark="weights are initialized as shards; see --seed"),
    Row("no_initialization perform_initialization", "--load_pretrained_weights=1", "then nothing is initialized"),
    Row("data_parallel_random_init", remark="initial weights depend on --seed only, whatever the number of ranks"),
    # Sharding and communication
    Row("use_distributed_optimizer", "--zero_stage=1"),
    Row("use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 megatron_fsdp_*", "--zero_stage=3"),
    Row("data_parallel_sharding_strategy", "--zero_stage=1 for optim, 2 for optim_grads, 3 for optim_grads_params"),
    Row("torch_fsdp2_no_reshard_after_forward", "--zero_stage=2"),
    Row("fsdp_double_buffer", "--zero_stage=3 --num_weight_buffers=2"),
    Row("fsdp_* outer_dp_sharding_strategy", "--zero_stage=3"),
    Row("overlap_grad_reduce", remark="--num_grad_buffers=2, the default, overlaps reductions with computation"),
    Row("overlap_param_gather", remark="--num_weight_buffers=2, the default, overlaps gathers with computation"),
    Row(
        "ddp_bucket_size ddp_num_buckets ddp_bucket_cap_mb", "--layers_per_stage=<blocks gathered and reduced together>"
    ),
    Row("ddp_*", remark="ranks exchange whole stages of layers; --layers_per_stage sets their size"),
    Row("distributed_backend backend", "--device=cuda or --device=cpu", "NCCL on GPU, gloo on CPU"),
    Row("distributed_timeout_minutes", "--distributed_timeout=<seconds>"),
    Row("local_rank lazy_mpu_init", remark=TORCHRUN),
    Row(
        "pipeline_model_parallel_size context_parallel_size "
        "encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size",
        remark=PARALLEL,
        only="1",
    ),
    Row("model_parallel_size", "--tensor_parallel"),
    Row("num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank", remark=PARALLEL),
    Row("pipeline_model_parallel_* cp_comm_type tp_comm_* microbatch_group_size_*", remark=PARALLEL),
    Row("decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers use_tp_pp_dp_mapping", remark=PARALLEL),
    Row("no_overlap_p2p_communication overlap_p2p_* standalone_embedding_stage", remark=PARALLEL),
    Row("no_async_tensor_model_parallel_allreduce hierarchical_context_* defer_embedding_*", remark=PARALLEL),
    Row("account_for_* disable_tp_* no_scatter_gather_*", remark=PARALLEL),
    Row("num_distributed_optimizer_instances", remark="shards are not replicated; see --zero_stage"),
    Row(
        "use_gloo_process_groups disable_gloo_process_groups",
        remark="a gloo group always agrees on stops; see --device",
    ),
    Row("align_* no_align_* no_pin_* use_torch_optimizer_*", remark="leave it out; see --zero_stage"),
    Row("nccl_* use_nccl_ub use_sharp sharp_*", remark="NCCL is set by its environment variables; see --device"),
    # Data
    Row("mock_data", "--dataset_source=random"),
    Row("train_data_path valid_data_path test_data_path", "--data_path and --split"),
    Row(
        "data_args_path per_split_data_args_path", remark="write --data_path @<file>, where the file lists the prefixes"
    ),
    Row("data_cache_path", remark="nothing is cached for --data_path; its files are read as they are"),
    Row("data_impl", remark="--data_path takes one kind of file: .bin and .idx"),
    Row(
        "mmap_warmup no_mmap_bin_files num_dataset_builder_threads", remark="--data_path is read as it is; leave it out"
    ),
    Row("tokenizer_type tokenizer_model", "--tokenizer_file=<tokenizer.json>", f"{TOKENIZED}; exports get a copy"),
    Row("vocab_file merge_file", "--tokenizer_file=<tokenizer.json>", TOKENIZED),
    Row("vocab_extra_ids tiktoken_* tokenizer_* special_tokens", "--tokenizer_file=<tokenizer.json>", TOKENIZED),
    Row("dataloader_type", "--shuffle", "single is epoch, cyclic is skip_first_epoch or epoch; --seed sets the order"),
    Row("reset_attention_mask dataloader_inter_document_masking", "--cross_document_attention=0"),
    Row("no_create_attention_mask_in_dataloader", remark="no mask is ever made; see --attention_backend"),
    # Checkpoints
    Row("save", RUN_FOLDER, "checkpoints go to <folder>/checkpoints"),
    Row(
        "load",
        RUN_FOLDER,
        "the same command resumes the run in that folder; --pretrained_checkpoint_path=<folder> starts a new run",
    ),
    Row("save_retain_interval persistent_save_interval", "--export_interval=<iterations>", "exports are kept"),
    Row("most_recent_k", "--max_checkpoints=<number>"),
    Row(
        "finetune",
        PRETRAINED,
        "of Hugging Face or this program, not of Megatron-LM; training starts at iteration 0 with its weights and new "
        "moments, if --experiment_dir is new: a checkpoint in there wins",
    ),
    Row("pretrained_checkpoint", PRETRAINED),
    Row("no_load_optim", PRETRAINED, "without --load_pretrained_optimizer=1 only weights are loaded"),
    Row("no_save_optim", "--export_interval=<iterations>", "exports hold weights only, checkpoints always everything"),
    Row("no_load_rng no_save_rng", remark="checkpoints hold no random state: it follows from --seed and the iteration"),
    Row("use_persistent_ckpt_worker", remark="a thread writes; see --async_checkpoint"),
    Row("non_persistent_save_interval", "--checkpoint_interval=<iterations> --max_checkpoints=<number>"),
    Row("non_persistent_*", "--checkpoint_interval=<iterations>"),
    Row(
        "ckpt_format dist_ckpt_format auto_detect_ckpt_format use_dist_ckpt",
        remark=f"{_ONE_FORMAT}; see --export_format",
    ),
    Row("ckpt_* dist_ckpt_* no_ckpt_*", remark=f"{_ONE_FORMAT}; see --checkpoint_interval"),
    Row(
        "use_checkpoint_args use_mp_args_from_checkpoint_args", "--use_pretrained_config=1", "or repeat the run's flags"
    ),
    Row("fully_parallel_* async_* save_tokenizer_* strict_fsdp_*", remark=f"{_ONE_FORMAT}; see --checkpoint_interval"),
    Row("load_optim save_optim", remark="checkpoints always hold it; see --load_pretrained_optimizer"),
    Row("exit_on_missing_checkpoint", "--load_policy=require", "a given path must exist in any case"),
    Row("replication replication_* verify_integrity", remark=f"{_ONE_FORMAT}; see --max_checkpoints"),
    # Logs
    Row("config config_url yaml_cfg", "@<file> to read flags from a file", "--help_all lists them"),
    Row("log_throughput log_progress log_params_norm log_num_zeros_in_grad log_timers", remark=_LOGGED),
    Row("log_params_* log_max_attention_logit log_energy log_memory_interval", remark=_LOGGED),
    Row("timing_log_level timing_log_option no_barrier_with_level_1_timing barrier_with_l1_time", remark=_LOGGED),
    Row("logging_level set_level_for_all_loggers", remark="log lines have one level; see --log_interval"),
    Row("check_weight_hash_across_dp_replicas_interval", remark="replicas are shards of one weight; leave it out"),
    Row("log_straggler straggler_*", "--log_communication=1", "shows how long each rank waits"),
    Row("tensorboard_* log_timers_to_tensorboard log_memory_to_tensorboard", "--tensorboard_dir=<folder>", TENSORBOARD),
    Row(
        "log_validation_ppl_to_tensorboard log_world_size_to_tensorboard log_loss_scale_to_tensorboard",
        "--tensorboard_dir=<folder>",
        TENSORBOARD,
    ),
    Row("log_batch_size_to_tensorboard no_log_loss_scale_to_tensorboard", "--tensorboard_dir=<folder>", TENSORBOARD),
    Row("wandb_save_dir", RUN_FOLDER, "files of Weights & Biases go to <folder>/runs/<k>"),
    Row("wandb_api_key wandb_key", remark=_KEY),
    Row("profile use_pytorch_profiler", PROFILE),
    Row("profile_step_start", "--profile_skip=<iterations>", "a warm-up of --profile_warmup iterations follows"),
    Row("profile_step_end", "--profile_active=<iterations>", "the number of iterations in a profile"),
    Row("use_nsys_profiler nvtx_ranges", PROFILE, "Nsight Systems is not supported"),
    Row("profile_* pytorch_profiler_* record_shapes", PROFILE, "traces have no shapes and no Python stacks"),
    Row("record_memory_history", "--memory_snapshot=2", "records the first 2 iterations of a GPU"),
    Row("memory_snapshot_path", "--memory_snapshot=2", "writes <experiment_dir>/profiles/memory_<rank>.pickle"),
    Row(
        "log_throughput_to_tensorboard log_runtime_to_tensorboard log_l2_norm_grad_to_tensorboard",
        "--tensorboard_dir=<folder>",
        TENSORBOARD,
    ),
    # Other programs in that repository
    Row("inference_* rl_* grpo_* langrl_*", remark=_TASK),
    Row("vision_* dino_* ict_* biencoder_* retriever_* indexer_* swin_* img_* logits_*", remark=_TASK),
    Row("inprocess_* ft_* enable_ft_package calc_ft_timeouts adlr_autoresume*", remark=_RESTARTS),
    Row("one_logger_* no_one_logger app_tag_* otel_* config_logger_dir", remark=_LOGGED),
    Row("kitchen_* te_* symmetric_* gtp_* flight_recorder_*", remark=f"{_ONE}; leave it out"),
)
