#!/usr/bin/env bash
# A configuration of transformers 5 keeps the dictionary that it is given as rope_parameters and writes its defaults into
# it. Two configurations made from one dictionary share it: the second finds the first one's rope_theta and takes it for
# the caller's, and a later change of one changes the other.
#
# Version: transformers 5.24.0. Seen for SHARED = {"rope_type": "default"}: MixtralConfig alone has the base 1,000,000,
# SmolLM3Config 2,000,000; after LlamaConfig(rope_parameters=SHARED) both have 10,000, and SHARED says so, too. Whoever
# makes several models from common settings must give each a copy.
#
#     bash findings/shared_rope_parameters.sh      exit code 1 if the behaviour has changed
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 numpy
cd "$folder"
TRANSFORMERS_VERBOSITY=error "$folder/environment/bin/python" - <<'PYTHON'
import sys

import transformers

KINDS = (transformers.MixtralConfig, transformers.SmolLM3Config)
alone = [kind(rope_parameters={"rope_type": "default"}).rope_parameters["rope_theta"] for kind in KINDS]
shared = {"rope_type": "default"}
first = transformers.LlamaConfig(rope_parameters=shared)
after = [kind(rope_parameters=shared).rope_parameters["rope_theta"] for kind in KINDS]
first.rope_parameters["rope_theta"] = 5.0
print(f"transformers {transformers.__version__}: alone {alone}, after another {after}, then {shared}")
if (alone, after, shared["rope_theta"]) != ([1e6, 2e6], [1e4, 1e4], 5.0):
    sys.exit("the dictionary is no longer shared")
PYTHON
