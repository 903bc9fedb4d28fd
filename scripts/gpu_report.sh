#!/usr/bin/env bash
# Run everything that needs a GPU, in four calls of less than nine minutes each: the tests on the device and the smoke
# test, then each operation against the ceilings of the device, then training, then training beside the peers. Installs
# nothing and needs no network.
#
#     bash scripts/gpu_report.sh --output=report.json                      whether everything is right
#     bash scripts/gpu_report.sh --output=report.json --only=operations    how fast single operations are
#     bash scripts/gpu_report.sh --output=report.json --only=training      how fast training is
#     bash scripts/gpu_report.sh --output=report.json --only=peers         how fast the peers are beside it
#
# Each call adds its steps to the file (default: gpu_report.json in TMPDIR or /tmp). Calls on machines of one kind that
# do not share files write one file each; `--merge=first.json,second.json` joins them without a GPU. --only also takes
# single steps; --limit_s=300 lowers the limit, and the budgets of the steps must fit into it.
#
# Without a GPU it says so and exits 0. Otherwise it exits 0 if every step succeeded. The file is written after each
# step, so it exists however the run ends, with what every step printed beside it, in gpu_report_logs/; `python -m scripts.benchmarks.gpu.render` puts it into docs/benchmarks.md.
# The checkout may be read-only: all other files go below TMPDIR. PYTHON chooses the interpreter (default: that of
# the active environment, of .venv, or python3), which needs torch, numpy and pytest, and Triton for most steps.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ENVIRONMENT="${VIRTUAL_ENV:-$ROOT/.venv}"
PYTHON="${PYTHON:-$(command -v "$ENVIRONMENT/bin/python" || command -v python3 || command -v python || true)}"
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    printf 'gpu_report: Python >= 3.10 not found (PYTHON=%s)\n' "$PYTHON" >&2
    exit 1
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -m scripts.benchmarks.gpu.report "$@"
