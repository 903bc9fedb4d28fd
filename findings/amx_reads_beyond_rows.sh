#!/usr/bin/env bash
# On a CPU with AMX (Sapphire Rapids and later), torch's bf16 matrix products read beyond the end of a row of the first
# factor, where rows are padded (a view of the first columns of a wider matrix), and multiply what lies there by zero. A
# NaN or infinity in the padding, as in memory that torch.empty returns, then makes the whole row of the result NaN.
# mm, addmm and linear do it; the padding of the second factor, of a transposed first one, and of fp32 does no harm, and
# neither does any of them with oneDNN kept to AVX-512 (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16), also on the same CPU.
#
# Version: torch 2.13.0 (CPU), oneDNN as in it. Seen for 32 rows and 32 columns of the result, and rows of k = 1 to 130 in
# 192 columns: with AMX NaN for 93 values of k, the odd ones from 5 on at first, later nearly all but multiples of 4;
# without AMX never. So whoever pads rows for alignment must write finite numbers into the padding once.
#
#     bash findings/amx_reads_beyond_rows.sh      exit code 1 if the behaviour has changed, 0 without a check on a CPU
#                                                 without AMX
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
if ! grep --quiet amx_bf16 /proc/cpuinfo; then
    echo "this CPU has no AMX: nothing to see here"
    exit 0
fi
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
cat > products.py <<'PYTHON'
import torch

ROWS, COLUMNS, WIDTH = 32, 32, 192


def wrong(padded: str, dtype: torch.dtype) -> list[int]:
    """Return the lengths k of padded rows for which a product of ones is not k everywhere."""
    found = []
    for k in range(1, 131):
        wide = torch.full((ROWS, WIDTH), torch.nan, dtype=dtype)
        wide[:, :k] = 1
        rows, ones = wide[:, :k], torch.ones(ROWS, k, dtype=dtype)
        result = torch.mm(rows, ones.t()) if padded == "first" else torch.mm(ones, rows.t())
        if not bool((result == k).all()):
            found.append(k)
    return found


found = wrong("first", torch.bfloat16)
print(len(found), found[:4], found[-6:], wrong("second", torch.bfloat16), wrong("first", torch.float32))
PYTHON
for isa in DEFAULT AVX512_CORE_BF16; do
    found="$(ONEDNN_MAX_CPU_ISA=$isa OMP_NUM_THREADS=1 "$folder/environment/bin/python" products.py)"
    echo "$isa: wrong lengths, of the first factor in bf16, the second, the first in fp32: $found"
    case "$isa $found" in
    "DEFAULT 93 [5, 7, 9, 11] [123, 124, 125, 126, 127, 129] [] []" | "AVX512_CORE_BF16 0 [] [] [] []") ;;
    *) echo "the behaviour has changed" && exit 1 ;;
    esac
done
