#!/usr/bin/env bash
# Smoke test on one GPU or on a CPU: train, kill, resume, export, reload. Takes under three minutes and needs no network.
#
#     bash scripts/smoke_test.sh                  one GPU in bf16 if there is one, otherwise two processes on the CPU
#     bash scripts/smoke_test.sh --quick          the same checks with half the iterations
#     bash scripts/smoke_test.sh --installed      the commands that pip has installed beside the interpreter, not this checkout
#     bash scripts/smoke_test.sh --device=cuda    fail without a GPU; other arguments go to pretrain_gpt.py and win
#
# The last line of standard output is a JSON object with "ok"; the exit code is 0 if ok. Nothing is installed, and all
# files go to a temporary folder (TMPDIR), so the checkout may be read-only. PYTHON chooses the interpreter (default:
# that of the active environment, of .venv, or python3), which needs the packages listed in setup.py.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ENVIRONMENT="${VIRTUAL_ENV:-$ROOT/.venv}"
PYTHON="${PYTHON:-$(command -v "$ENVIRONMENT/bin/python" || command -v python3 || command -v python || true)}"
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    printf '{"ok": false, "failed": "start", "reason": "Python >= 3.10 not found (PYTHON=%s)"}\n' "$PYTHON"
    exit 1
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" "$ROOT/scripts/smoke_test.py" "$@"
