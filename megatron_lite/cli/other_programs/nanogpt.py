"""The settings of nanoGPT and nanochat."""

from __future__ import annotations

from megatron_lite.cli.other_programs.row import COMPILE, TOKENIZED, Row

_SAMPLES = "--sample_interval=<iterations> --sample_prompts=<file> --tokenizer_file=<tokenizer.json>"
_RATES = "--optimizer=muon, with --lr and --lr_scales=<pattern>:<scale> for the rates of parts"
_VALIDATED = "--validation_iters=<batches>"

NANOGPT = (
    Row("n_layer", "--num_layers"),
    Row("n_head", "--num_attention_heads"),
    Row("n_embd", "--hidden_size"),
    Row("n_kv_head", "--head_groups"),
    Row("block_size context_length ctx_len max_seq_len context_size seqlen", "--sequence_length"),
    Row("dropout", "--hidden_dropout=<p> --attention_dropout=<p>"),
    Row("bias", "--add_linear_biases", "layer norms keep their biases unless --use_layer_norm_weight=0"),
    Row("meta_vocab_size", "--vocab_size"),
    Row("max_iters num_iterations", "--train_iters"),
    Row("warmup_iters", "--lr_warmup_iters"),
    Row(
        "decay_lr",
        "--lr_decay_style=cosine --lr_decay_iters=<iterations> --min_lr=<rate>",
        "for False leave them out: the rate is constant by default",
    ),
    Row("grad_clip", "--clip_grad"),
    Row("out_dir", "--experiment_dir"),
    Row(
        "init_from",
        "--pretrained_checkpoint_path=<folder> for weights",
        "to resume, repeat the --experiment_dir of a run",
    ),
    Row(
        "always_save_checkpoint", "--checkpoint_interval=<iterations>", "all are kept unless --max_checkpoints=<number>"
    ),
    Row("eval_only", f"--train_iters=0 {_VALIDATED}"),
    Row("dataset", "--data_path=<prefix>", f"{TOKENIZED}; nanoGPT's train.bin has no .idx"),
    Row("compile", remark=COMPILE),
    Row("wandb_run_name", "--experiment_name", "with --wandb_entity_name"),
    # Its sample.py and bench.py
    Row("start num_samples", _SAMPLES, "or scripts/generate.py"),
    Row("max_new_tokens", "--sample_tokens", "with --sample_interval; or scripts/generate.py"),
    Row("temperature", "--sample_temperature", "with --sample_interval; or scripts/generate.py"),
    Row("top_k", "--sample_top_k", "with --sample_interval; or scripts/generate.py"),
    Row("top_p", "--sample_top_p", "with --sample_interval; or scripts/generate.py"),
    Row("real_data", "--dataset_source=random for random tokens"),
    # nanochat's
    Row("depth", "--num_layers", "and --hidden_size, which does not follow from it"),
    Row("device_batch_size", "--micro_batch_size"),
    Row("total_batch_size", "--batch_size=<tokens / sequence_length>"),
    Row("warmdown_ratio", "--lr_decay_style=linear --lr_wsd_decay_fraction=<fraction>"),
    Row("final_lr_frac", "--min_lr_ratio"),
    Row("matrix_lr embedding_lr unembedding_lr scalar_lr", _RATES),
    Row("eval_every", "--validation_interval"),
    Row("eval_tokens", "--validation_iters=<tokens / (batch_size * sequence_length)>"),
    Row("sample_every", "--sample_interval"),
    Row("save_every", "--checkpoint_interval"),
    Row(
        "target_param_data_ratio target_flops max_tokens train_tokens", "--train_iters=<tokens / (batch_size * length)>"
    ),
)
