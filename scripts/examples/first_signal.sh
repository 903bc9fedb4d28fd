#!/usr/bin/env bash
# Run a command in a session of its own, and pass on the first SIGTERM alone:
#
#     srun ... bash scripts/examples/first_signal.sh torchrun ...
#
# At the end of a grace time Slurm sends SIGTERM again, KillWait before SIGKILL. torchrun would end at it, in the middle of
# a save, and its ranks with it. The ranks themselves go on saving.
set -euo pipefail

pid="" early=""
pass_on() {
    if [ -z "$pid" ]; then
        early=yes
        return
    fi
    # Bash must not see another signal: where one meets the end of the command, `wait` returns 255.
    trap '' TERM
    kill -TERM "$pid" 2>/dev/null || true  # it may have just ended
}
trap pass_on TERM
setsid "$@" &
pid=$!
if [ -n "$early" ]; then pass_on; fi
while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done
code=0
wait "$pid" || code=$?
exit "$code"
