#!/usr/bin/env bash
# CI smoke test on one GPU or on CPU: train, kill, resume, export, reload. Under three minutes, no network.
#
#     bash scripts/smoke_test.sh                  a GPU in bf16 where there is one, else two processes on CPU
#     bash scripts/smoke_test.sh --device=cuda    fails without a GPU; arguments go to pretrain_gpt.py and win
#
# The last line of standard output is one JSON object with "ok"; the exit code is 0 if ok. Nothing is installed and
# nothing is written outside a temporary folder (TMPDIR), so a read-only checkout will do. PYTHON is the interpreter to
# use (default: python3 of the active environment); it needs the packages that setup.py lists.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$(command -v python3 || command -v python || true)}"
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    printf '{"ok": false, "failed": "start", "reason": "Python >= 3.10 not found (PYTHON=%s)"}\n' "$PYTHON"
    exit 1
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" "$ROOT/scripts/smoke_test.py" "$@"
