#!/usr/bin/env bash
# save_pretrained(max_shard_size=...) of transformers 5 writes files many times as large as the limit, though every tensor
# in them is smaller, if the model has experts. Its manual excepts only a single weight larger than the limit, and with
# version 4 (4.57.3) the same model keeps it: 37,312 bytes at most.
#
# The cause: version 5 holds the experts of a block stacked in one tensor. To save, it splits that into views, which share
# a storage (SplitModulelist in transformers.core_model_loading), and huggingface_hub counts a storage as one tensor and
# writes all its views to one file (split_state_dict_into_shards_factory). Copies of the same tensors keep the limit.
#
# Version: transformers 5.24.0, huggingface_hub 2.4.0, torch 2.13.0. Seen with Mixtral, 16 experts and a limit of 40,000
# bytes: files of 526,216 bytes whose largest tensor has 32,768; with copies 37,848 at most. For 256 experts of 7168 to
# 2048 in bf16 it is 7.5 GB a file under any smaller limit. Whoever converts models and plans memory, uploads or parallel
# reading by the size of files should look at the files, or save copies, as below, in twice the memory.
#
#     bash findings/expert_files_over_limit.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 \
    huggingface_hub==2.4.0 torch==2.13.0 numpy
cd "$folder"
TRANSFORMERS_VERBOSITY=warning HF_HUB_DISABLE_PROGRESS_BARS=1 "$folder/environment/bin/python" - <<'PYTHON'
import pathlib
import sys

import huggingface_hub
import torch
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

LIMIT = 40_000
config = transformers.MixtralConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=16,
)  # fmt: skip
model = transformers.MixtralForCausalLM(config)
views = revert_weight_conversion(model, model.state_dict())
copies = {name: tensor.clone() for name, tensor in views.items()}
print(f"transformers {transformers.__version__}, huggingface_hub {huggingface_hub.__version__}, torch {torch.__version__}")
largest_file = {}
for case, tensors in (("as it is", None), ("copies", copies)):
    storages = {tensor.untyped_storage().data_ptr() for tensor in (tensors or views).values()}
    model.save_pretrained(case, state_dict=tensors, max_shard_size=LIMIT)
    files = list(pathlib.Path(case).glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if written.keys() != views.keys() or not all(torch.equal(written[name], views[name]) for name in views):
        sys.exit(f"{case}: other tensors were written")
    largest_file[case] = max(file.stat().st_size for file in files)
    largest_tensor = max(tensor.nbytes for tensor in written.values())
    print(
        f"{case}: limit {LIMIT:,} bytes, {len(written)} tensors in {len(storages)} storages, {len(files)} files, "
        f"largest file {largest_file[case]:,}, largest tensor {largest_tensor:,}"
    )
    if largest_tensor > LIMIT:
        sys.exit(f"{case}: a tensor is larger than the limit")
if largest_file["as it is"] <= LIMIT or largest_file["copies"] > LIMIT:
    sys.exit("the files have other sizes now")
PYTHON
