#!/usr/bin/env bash
# Pretrain a Mistral-7B: the flags of one run, kept in environment strings that other scripts can reuse and extend.
#
#     DATA_PATH=/data/corpus EXP_BASE_DIR=/experiments/mistral bash scripts/examples/train_mistral.sh
#     ... bash scripts/examples/train_mistral.sh --zero_stage=2 --micro_batch_size=1     more flags; the last one wins
#
# DATA_PATH is the prefix of a .bin/.idx pair made by scripts/prepare_data.py with a vocabulary of at most 32000 entries.
# TORCHRUN_ARGS says where to run (default: every GPU of this machine). Running the same command again resumes.
# Weights & Biases is on when WANDB_ENTITY_NAME is set; its key comes from WANDB_API_KEY or WANDB_API_KEY_PATH.
set -euo pipefail

for variable in DATA_PATH EXP_BASE_DIR; do
    if [ -z "${!variable:-}" ]; then
        printf 'train_mistral.sh: set %s; the first lines of this script say to what\n' "$variable" >&2
        exit 2
    fi
done
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

export MODEL_ARGS="\
--num_layers=32 \
--hidden_size=4096 \
--vocab_size=32000 \
--num_attention_heads=32 \
--head_groups=8 \
--add_linear_biases=0 \
--ffn_hidden_size=14336 \
--kv_channels=128 \
--use_rotary_embeddings=1 \
--rotary_embedding_scale=-9.210340371976184 \
--gated=1 \
--activation_type=silu \
--normalization_type=rms_norm \
--tie_word_embeddings=0 \
--window_size=4096 \
"

export DATA_ARGS="\
--data_path=$DATA_PATH \
--split=9998,2,0 \
"

# 500 K iterations of 128 samples of 8192 tokens: 524 B tokens.
export TRAINING_ARGS="\
--batch_size=128 \
--sequence_length=8192 \
--train_iters=500000 \
--weight_decay=0.1 \
--adam_beta1=0.9 \
--adam_beta2=0.95 \
--clip_grad=1.0 \
--lr=0.0001 \
--lr_warmup_iters=1000 \
--lr_decay_style=cosine \
--lr_decay_iters=500000 \
--min_lr=0.000003 \
"

# One sample per GPU and iteration on 128 GPUs. On fewer, add --micro_batch_size=1 --zero_stage=2: the same batch by
# gradient accumulation.
export PERFORMANCE_ARGS="\
--training_dtype=bf16 \
--num_workers=8 \
"

export MONITORING_ARGS="\
--experiment_dir=$EXP_BASE_DIR \
--validation_iters=25 \
--validation_interval=1000 \
--max_checkpoints=5 \
--export_interval=25000 \
--log_interval=10 \
--log_offset=0 \
--checkpoint_interval=500 \
"

export WANDB_ARGS="\
--wandb_entity_name=${WANDB_ENTITY_NAME:-} \
--wandb_project_name=${PROJECT_NAME:-mistral} \
--wandb_group_name=${PROJECT_VERSION:-default} \
"

# The strings are split into flags on purpose.
# shellcheck disable=SC2086
exec torchrun ${TORCHRUN_ARGS:---standalone --nproc-per-node=gpu} "$ROOT/pretrain_gpt.py" \
    $MODEL_ARGS $DATA_ARGS $TRAINING_ARGS $PERFORMANCE_ARGS $MONITORING_ARGS $WANDB_ARGS "$@"
