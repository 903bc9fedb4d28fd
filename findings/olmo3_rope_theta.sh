#!/usr/bin/env bash
# transformers 5 gives the rope_theta of an Olmo 3 config.json in the layout of version 4 to the blocks with full
# attention alone. Those with a sliding window get 500,000, without a word, though the file has one base and version 4
# (4.57.3) rotates all blocks by it. Olmo3Config(rope_theta=...) does the same. One base in rope_parameters, the layout of
# most models in version 5, reaches no block.
#
# Version: transformers 5.24.0, torch 2.13.0. Seen for "rope_theta": 10000: bases 10,000 (full) and 500,000 (sliding); in
# rope_parameters: 500,000 in both; with an entry in rope_parameters for each kind of block, or Olmo 2: 10,000. The
# published Olmo 3 models hide it: their base is 500,000. Whoever pretrained with another base, or exports such a model,
# must write an entry for each kind. Gemma 3, whose kinds differ too, has a key of its own for sliding windows.
#
#     bash findings/olmo3_rope_theta.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy
cd "$folder"
TRANSFORMERS_VERBOSITY=warning "$folder/environment/bin/python" - <<'PYTHON'
import json
import pathlib
import sys

import torch
import transformers

HEAD_DIM = 16
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "pad_token_id": None, "eos_token_id": 1,
}  # fmt: skip
BASE = {"rope_type": "default", "rope_theta": 10000}
LAYOUTS = {
    "version 4": {"rope_theta": 10000, "rope_scaling": None},
    "rope_parameters": {"rope_parameters": BASE},
    "entries": {"rope_parameters": {"full_attention": BASE, "sliding_attention": BASE}},
}
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
found = {}
for case in (("olmo2", "version 4"), ("olmo2", "rope_parameters"), *(("olmo3", layout) for layout in LAYOUTS)):
    model_type, layout = case
    pathlib.Path("config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **LAYOUTS[layout]}))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained("."))
    found[case] = {
        # inv_freq[i] = base ** (-2 i / head_dim)
        name: round(inv_freq[1].item() ** (-HEAD_DIM / 2) / 100) * 100
        for name, inv_freq in model.model.rotary_emb.named_buffers()
        if "original" not in name
    }
    print(f"{model_type}, {layout}: {found[case]}")
full, sliding = "full_attention_inv_freq", "sliding_attention_inv_freq"
expected = {
    ("olmo2", "version 4"): {"inv_freq": 10000},
    ("olmo2", "rope_parameters"): {"inv_freq": 10000},
    ("olmo3", "version 4"): {full: 10000, sliding: 500000},
    ("olmo3", "rope_parameters"): {full: 500000, sliding: 500000},
    ("olmo3", "entries"): {full: 10000, sliding: 10000},
}
if found != expected:
    sys.exit("the bases have changed")
PYTHON
