#!/usr/bin/env bash
# Install the project with its test extra into the active virtual environment (or .venv) and run the tests.
#
#     bash scripts/run_tests.sh                       the default suite: what CI runs
#     bash scripts/run_tests.sh tests/zero -k tied    extra arguments go to pytest
#     bash scripts/run_tests.sh -m slow               the long tests
#
# PYTHON chooses the interpreter of a new .venv; MEGATRON_LITE_NO_INSTALL=1 uses what the environment has.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

enter_environment
install_project plot,test
say "running the tests"
cd "$ROOT"
run "the test run" "$PYTHON" -m pytest "$@"
