# shellcheck shell=bash
# What the batch scripts of this folder share. Source it from the root of the checkout; do not run it.
set -euo pipefail

# In a job array each task needs a folder of its own: %a in EXP_BASE_DIR and in flags is its number, as in sbatch's --output.
# One task of an array has the id of the whole array, so two numbers name a task.
export EXP_BASE_DIR="${EXP_BASE_DIR:-}"
JOB="$SLURM_JOB_ID"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    EXP_BASE_DIR="${EXP_BASE_DIR//%a/$SLURM_ARRAY_TASK_ID}"
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    JOB="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi

# A start that dies before Python runs writes no exit.json: that of the start before must not be taken for it. The file stays,
# as it may be that of another job, which still trains here.
rm -f "$EXP_BASE_DIR/exit_before.json"
if [ -f "$EXP_BASE_DIR/exit.json" ]; then cp -p "$EXP_BASE_DIR/exit.json" "$EXP_BASE_DIR/exit_before.json"; fi

# Print the exit.json that has been written since.
show_exit() {
    if [ "$EXP_BASE_DIR/exit.json" -nt "$EXP_BASE_DIR/exit_before.json" ]; then cat "$EXP_BASE_DIR/exit.json"; fi
}

# Slurm has signalled this script. A preemption, scancel and the time limit signal the processes of the steps, too, and a
# second signal would end torchrun in the middle of a save. --signal=B:TERM@300 or B:USR1@300 signals this script alone.
pass_on() {
    local job
    job="$(scontrol show job "$JOB" 2>/dev/null || true)"
    if [[ "$job" == *JobState=RUNNING* && "$job" == *PreemptTime=None* ]]; then scancel --signal=TERM "$JOB" || true; fi
}

# wait_for COMMAND...: run a command to its end, whatever signals this script gets; return the exit code of the command.
wait_for() {
    local pid
    trap pass_on TERM USR1
    "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done
    wait "$pid"
}
