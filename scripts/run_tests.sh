#!/usr/bin/env bash
# Install the project with its test packages into the active virtual environment (or .venv) and run the tests.
#
#     bash scripts/run_tests.sh                       what CI runs: the default suite with the tests of guides and reports
#     bash scripts/run_tests.sh tests/zero -k tied    extra arguments go to pytest, which then runs once, in one process
#     bash scripts/run_tests.sh -m slow               the long tests
#     bash scripts/run_tests.sh --changed             the default suite's tests of what has changed since main
#     bash scripts/run_tests.sh --changed COMMIT      the same since another commit
#
# PYTHON chooses the interpreter of a new .venv; MEGATRON_LITE_NO_INSTALL=1 uses the packages of the environment as they are.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

enter_environment
install_project plot,data,test
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # else each of the hundreds of programs that tests start compiles the package again, in 0.4 s
tests=()
if [ "${1:-}" = --changed ]; then
    changed="$("$PYTHON" -m tests.support.changed_tests "${@:2}")"
    if [ -n "$changed" ]; then mapfile -t tests <<<"$changed"; fi # else all
    set --
    say "running the tests of what has changed"
elif [ "$#" -gt 0 ]; then
    say "running the tests"
    run_pytest "$@"
    exit
else
    say "running the tests, those of guides, plots and reports included"
fi
# One process more than there are cores: tests often wait, for the ranks that they start or for the disk. Idle processes
# take tests from busy ones.
cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
run_pytest --numprocesses "$((cores + 1))" --dist worksteal -m "not slow and not benchmarks" "${tests[@]}"
