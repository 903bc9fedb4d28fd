#!/usr/bin/env bash
# Everything that needs a GPU, in one call under nine minutes: tests on the device, the smoke test, each operation
# against the ceilings of the device, training beside the peers. Nothing is installed, no network is used.
#
#     bash scripts/gpu_report.sh                        writes gpu_report.json to TMPDIR (/tmp)
#     bash scripts/gpu_report.sh --output=report.json   elsewhere
#     bash scripts/gpu_report.sh --only=ceilings,ops    some of the steps; --limit_s=300: less time
#
# Without a GPU it says so and exits 0. Else the exit code is 0 if every step ended well; the file is written after each
# step, so that it is there whatever happens. scripts/benchmarks/gpu/render.py puts it into docs/benchmarks.md. A read-only
# checkout will do: everything is written below TMPDIR. PYTHON is the interpreter to use (default: python3 of the active
# environment); it needs torch, numpy and pytest, and Triton for most of it.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$(command -v python3 || command -v python || true)}"
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    printf 'gpu_report: Python >= 3.10 not found (PYTHON=%s)\n' "$PYTHON" >&2
    exit 1
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -m scripts.benchmarks.gpu.report "$@"
