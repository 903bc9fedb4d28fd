#!/usr/bin/env bash
# fastokens gives the ids of tokenizers for thirteen published vocabularies, and yet splits text elsewhere: in the rule of
# Llama 3 an apostrophe and U+017F are a contraction to tokenizers only, since (?i:'s) matches that old form of s; in a
# rule that fastokens has not built in, U+180E is white space to fastokens only. Vocabularies without a token across such
# a border hide it.
#
# Version: fastokens 0.3.5 beside tokenizers 0.23.3. Seen with a vocabulary of bytes in which two bytes across the border
# are one token. Whoever compares tokenizers should use a vocabulary in which any two bytes may be one token
# (scripts/proof/tokenizer_ids.py).
#
#     bash findings/fastokens_borders.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check fastokens==0.3.5 tokenizers==0.23.3
"$folder/environment/bin/python" - <<'PYTHON'
import sys

import fastokens
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
same = 0
for name, rule, before, after in (("Llama 3", LLAMA, "'\u017f", "of"), ("own", r"\s+|\S+", ">", "\u180e")):
    bytes_to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (symbols, _), = bytes_to_symbols.pre_tokenize_str(before + after)
    border = len(before.encode())
    left, right = symbols[border - 1], symbols[border]
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Tokenizer(models.BPE({**vocabulary, left + right: 256}, [(left, right)]))
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_to_symbols])
    ids = library.encode(before + after).ids
    found = fastokens.Tokenizer.from_json_str(library.to_str()).encode(before + after)
    found = list(getattr(found, "ids", found))
    print(f"{name} rule, {before + after!a}: tokenizers {ids}, fastokens {found}")
    same += ids == found
sys.exit("the borders are the same now" if same else 0)
PYTHON
