#!/usr/bin/env bash
# torch._int_mm on a CPU without VNNI returns wrong integers, without a word: oneDNN adds pairs of 8-bit products in 16
# bits there, and their sums saturate.
#
# Version: torch 2.13.0 (CPU). Seen with ONEDNN_MAX_CPU_ISA=AVX2, which stands for such a CPU: 8,160 for 64 products of
# 127 and 127, whose sum is 1,032,256; wrong with AVX512_CORE, too, and exact where the CPU has VNNI. Whoever checks
# kernels for 8 bits against a CPU should multiply in fp32 or fp64.
#
#     bash findings/integer_products_without_vnni.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
ONEDNN_MAX_CPU_ISA=AVX2 "$folder/environment/bin/python" - <<'PYTHON'
import sys

import torch

values = torch.full((32, 64), 127, dtype=torch.int8)
found, exact = int(torch._int_mm(values, values.t())[0, 0]), 64 * 127**2
print(f"torch {torch.__version__}: {found:,}, exact {exact:,}")
if found == exact:
    sys.exit("the integers are exact now")
PYTHON
