#!/usr/bin/env bash
# Run all checks that a change must pass: linter, formatter, types, tests. Extra arguments go to pytest.
#
#     bash scripts/check.sh
#
# PYTHON chooses the interpreter of a new .venv; MEGATRON_LITE_NO_INSTALL=1 installs nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

enter_environment
install_project dev,plot,data,test
cd "$ROOT"
say "linter"
run "ruff check" "$PYTHON" -m ruff check .
say "format"
run "ruff format" "$PYTHON" -m ruff format --check .
say "types"
run "mypy" "$PYTHON" -m mypy
say "tests"
run_pytest "$@"
