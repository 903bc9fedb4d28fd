#!/usr/bin/env bash
# transformers' AutoTokenizer gives other ids than the tokenizer.json of a folder whose config.json says qwen2, without a
# word, whatever class its tokenizer_config.json names: normalizer and splitting become those of Qwen2.
#
# Version: transformers 5.24.0, tokenizers 0.23.3. Seen: [16, 17] for "12", where tokenizer.json, and the same folder
# with model_type llama, give [256]. Whoever trains a Qwen2 model with another tokenizer should compare the ids, and load
# the tokenizer with transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER).
#
#     bash findings/qwen2_splits_anew.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
"$folder/environment/bin/python" - <<'PYTHON' 2> /dev/null
import json
import pathlib
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
words = {word: number for number, word in enumerate([*letters, "12"])}
made = Tokenizer(models.BPE(vocab=words, merges=[("1", "2")]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
found = {}
for model_type in ("qwen2", "llama"):
    folder = pathlib.Path(model_type)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found[model_type] = loaded("12")["input_ids"]
print(f"transformers {transformers.__version__}: {found}, tokenizer.json {made.encode('12').ids}")
if found["qwen2"] == made.encode("12").ids:
    print("the ids are those of tokenizer.json now")
    sys.exit(1)
PYTHON
