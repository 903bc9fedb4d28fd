#!/usr/bin/env bash
# From a fresh clone to a trained model in one command: install, build a corpus from Python's own standard library,
# tokenize it, train a small GPT with torchrun, validate, checkpoint, export, and sample from the export.
#
#     bash scripts/quickstart.sh                      start; again: resume, or report that the run is complete
#     bash scripts/quickstart.sh --train_iters=1200   train longer; extra arguments go to pretrain_gpt.py and win
#     QUICKSTART_CORPUS_BYTES=1e6 bash scripts/quickstart.sh --train_iters=20 --lr_warmup_iters=2 \
#         --validation_interval=10 --validation_iters=2 --export_interval=20      everything in half a minute
#
# Two idle CPU cores train for two and a half minutes, a GPU for less. Other programs on the machine make that longer; each
# line of training shows the time left. Installing the packages takes a minute or more, depending on the network.
#
# QUICKSTART_DIR is the folder for all files (default: quickstart/ in the checkout; delete it to start over).
# QUICKSTART_CORPUS_BYTES limits the corpus (default: the whole standard library). PYTHON chooses the interpreter of a
# new .venv. MEGATRON_LITE_NO_INSTALL=1 installs nothing and uses the packages of the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case "${1:-}" in -h | --help)
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

FOLDER="${QUICKSTART_DIR:-$ROOT/quickstart}"
FOLDER="${FOLDER%/}"
RUN="$FOLDER/python_gpt"
PREFIX="$FOLDER/data/stdlib"
VOCABULARY=2048
ITERATIONS=800

case "$FOLDER" in *[[:space:],]*)
    die "the folder $FOLDER contains spaces or commas, which separate files in --data_path; set QUICKSTART_DIR to another folder"
    ;;
esac
DEVICE=auto
previous=""
for argument in "$@"; do
    case "$argument" in
        --experiment[_-]dir*) die "QUICKSTART_DIR sets the folder; remove $argument" ;;
        --device=*) DEVICE="${argument#*=}" ;;
    esac
    [ "$previous" != --device ] || DEVICE="$argument"
    previous="$argument"
done

mkdir -p "$FOLDER" 2>/dev/null && [ -w "$FOLDER" ] || die "cannot write to $FOLDER; set QUICKSTART_DIR to another folder"
require_space "$FOLDER" 500 "the run"
STEP=0
NAME=""
TIMES=""

# step NAME WORDS: announce the next step, and note how long the one before took.
step() {
    [ -z "$NAME" ] || TIMES="$TIMES${TIMES:+, }$NAME $SECONDS s"
    NAME="$1"
    STEP=$((STEP + 1))
    SECONDS=0
    say "step $STEP of 5: $2"
}

step packages "the Python environment and its packages"
enter_environment
install_project plot,fast

if [ "$DEVICE" = auto ]; then
    DEVICE="$("$PYTHON" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')"
fi
if [ "$DEVICE" = cuda ]; then
    PROCESSES=1
    DEVICE_ARGS="--training_dtype=bf16"
else
    PROCESSES=2
    DEVICE_ARGS="--zero_stage=2"
    export LOGLEVEL="${LOGLEVEL:-ERROR}" # torchrun warns of threads per process, which the program chooses itself
fi

step data "a corpus of the standard library's source files, and a tokenizer of $VOCABULARY entries"
if [ -f "$PREFIX.summary.json" ]; then
    say "using the corpus $PREFIX.bin"
else
    partial="$FOLDER/data.partial"
    rm -rf "$partial"
    mkdir -p "$partial"
    run "building the corpus" "$PYTHON" "$ROOT/scripts/build_corpus.py" --output "$partial/stdlib.jsonl" \
        --max_bytes "${QUICKSTART_CORPUS_BYTES:-inf}"
    run "tokenizing" "$PYTHON" "$ROOT/scripts/prepare_data.py" "$partial/stdlib.jsonl" \
        --output_prefix "$partial/stdlib" --train_tokenizer "$VOCABULARY"
    rm -rf "$FOLDER/data"
    mv "$partial" "$FOLDER/data" # complete or absent: an interrupted start begins again
fi

MODEL_ARGS="--num_layers=4 --hidden_size=128 --num_attention_heads=4 --ffn_hidden_size=384 --vocab_size=$VOCABULARY
    --use_rotary_embeddings=1 --gated=1 --normalization_type=rms_norm --add_linear_biases=0 --tie_word_embeddings=1"
# The decay ends at a fixed iteration: a longer run continues at min_lr. If it ended at --train_iters, more iterations would
# stretch the decay, and the learning rate would jump up where the run resumes.
TRAINING_ARGS="--batch_size=8 --sequence_length=256 --train_iters=$ITERATIONS
    --lr=4e-3 --min_lr=2e-4 --lr_warmup_iters=40 --lr_decay_style=cosine --lr_decay_iters=$ITERATIONS --weight_decay=0.1 --adam_beta2=0.95"
MONITORING_ARGS="--log_interval=20 --validation_interval=200 --validation_iters=16
    --checkpoint_interval=100 --max_checkpoints=2 --export_interval=200"

step training "training on $DEVICE with $PROCESSES process(es)"
# The strings are split into flags on purpose. Paths may contain spaces, so they are separate words.
# shellcheck disable=SC2086
run "training (see $RUN/exit.json)" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$PROCESSES" "$ROOT/pretrain_gpt.py" \
    $MODEL_ARGS $TRAINING_ARGS $MONITORING_ARGS $DEVICE_ARGS --num_workers=1 \
    --data_path="$PREFIX" --split=95,5,0 --tokenizer_file="$PREFIX.tokenizer.json" --experiment_dir="$RUN" "$@"

step plot "the loss curve"
read_entropy='import json, sys; print("%.3f" % json.load(open(sys.argv[1]))["unigram_entropy_nats"])'
ENTROPY="$("$PYTHON" -c "$read_entropy" "$PREFIX.summary.json")"
run "drawing the loss curve" "$PYTHON" "$ROOT/scripts/plot_run.py" "$RUN" --output "$FOLDER/loss.png" \
    --baseline "unigram entropy=$ENTROPY"

EXPORT="$(find "$RUN/export" -mindepth 1 -maxdepth 1 -type d -name '[0-9]*' 2>/dev/null | sort -V | tail -n 1 || true)"
step sample "a sample from ${EXPORT:-an export: there is none yet}"
if [ -n "$EXPORT" ]; then
    run "sampling" "$PYTHON" "$ROOT/scripts/generate.py" --model "$EXPORT" --prompt 'def read(self' \
        --max_new_tokens 120 --temperature 0.7 --seed 1
fi

TIMES="$TIMES, $NAME $SECONDS s"
say "result"
"$PYTHON" - "$RUN/metrics.jsonl" <<'PYTHON'
import json
import sys

records = []
with open(sys.argv[1]) as file:
    for line in file:
        try:
            records.append(json.loads(line))
        except ValueError:  # a killed run may end in half a line
            pass
validations = [record for record in records if record["phase"] == "validation"]
if validations:
    newest = max(validations, key=lambda record: record["iteration"])
    print(f"validation loss   {newest['loss']:.3f} nats per token, at iteration {newest['iteration']}")
PYTHON
printf '%s\n' "unigram entropy   $ENTROPY nats per token: the loss of a model that only knows token frequencies" \
    "loss curve        $FOLDER/loss.png" "export            ${EXPORT:-none yet; set --export_interval}" \
    "time              $TIMES"
